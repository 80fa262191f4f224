"""normal_form against the sweep over listed ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.canonical import lift
from layout_algebra.errors import MapError
from layout_algebra.normal_form import normal_form
from layout_algebra.recover import rectangles_of_ids
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided


@st.composite
def one_copy(draw: st.DrawFn) -> tuple[tuple[int, ...], SliceCopy]:
    """A copy of at most three axes without two elements at one place, in a parameter of up to three axes."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = math.prod(shape)
    units = [1, 2, shape[-1], 2 * shape[-1], math.prod(shape[-2:])]
    extents = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    strides = tuple(draw(st.sampled_from([*units, *(-unit for unit in units)])) for _ in extents)
    steps = tuple(draw(st.integers(-3, 7)) for _ in extents)
    low = sum(min(0, (n - 1) * s) for n, s in zip(extents, strides, strict=True))
    start = draw(st.integers(-low, max(-low, size - 1)))
    piece = SliceCopy(Strided(60, extents, steps), Strided(start, extents, strides))
    return shape, piece


@settings(deadline=None, max_examples=500)
@given(one_copy())
def test_one_copy_has_the_form_of_its_ids(drawn: tuple[tuple[int, ...], SliceCopy]) -> None:
    shape, piece = drawn
    where = piece.target.indices().ravel()
    table = CopyTable.of([piece])
    if int(where.max()) >= math.prod(shape) or len(set(where.tolist())) < len(where):
        with pytest.raises(MapError):
            normal_form(table, shape)
        return
    ids = np.zeros(math.prod(shape), dtype=np.int64)
    table.write_ids(ids)
    wanted = lift(rectangles_of_ids(ids.reshape(shape)))
    assert np.array_equal(normal_form(table, shape).rows, wanted.rows)


def test_no_copies_have_a_form_too() -> None:
    assert len(normal_form(CopyTable.empty(), (3, 4))) == 0
    assert normal_form(CopyTable.empty(), (0, 4)).rows.shape == (0, 5)
