"""pieces_meet against listing every element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra import disjoint
from layout_algebra.disjoint import UndecidedError, pieces_meet
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided

SIZE = 64


def boxes(most: int) -> st.SearchStrategy[list[SliceCopy]]:
    """Pieces inside 64 elements, strides of any sign and size, nested or not."""

    @st.composite
    def one(draw: st.DrawFn) -> SliceCopy:
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        strides = tuple(draw(st.sampled_from([1, 2, 3, 4, 8, 16, -1, -4, 5])) for _ in shape)
        low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
        start = draw(st.integers(-low, max(-low, SIZE - 1 - high)))
        return SliceCopy(Strided(1, shape, strides), Strided(start, shape, strides))

    inside = one().filter(lambda c: int(c.target.indices().max()) < SIZE)
    return st.lists(inside, max_size=most)


def brute(pieces: list[SliceCopy], opaque: set[int]) -> bool:
    listed = [int(i) for piece in pieces for i in piece.target.indices().ravel()] + sorted(opaque)
    return len(set(listed)) != len(listed)


@settings(max_examples=400)
@given(boxes(4), st.sets(st.integers(0, SIZE - 1), max_size=5))
def test_pieces_meet_where_listed_elements_do(pieces: list[SliceCopy], opaque: set[int]) -> None:
    table = CopyTable.of(pieces)
    assert pieces_meet(table, RunTable.from_ids(sorted(opaque))) == brute(pieces, opaque)
    assert pieces_meet(table, RunTable.from_ids(sorted(opaque)), SIZE) == brute(pieces, opaque)


@settings(max_examples=200)
@given(st.data())
def test_tilings_of_a_matrix_are_decided_without_listing(data: st.DataObject) -> None:
    """Random guillotine cuts, interleaved: disjoint until one piece is moved."""
    rows, width = data.draw(st.sampled_from([(8, 8), (6, 12), (16, 4)]))
    parts: list[tuple[int, int, int, int]] = [(0, rows, 0, width)]
    for _ in range(data.draw(st.integers(0, 5))):
        r0, r1, c0, c1 = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        if data.draw(st.booleans()) and r1 - r0 > 1:
            cut = data.draw(st.integers(r0 + 1, r1 - 1))
            parts += [(r0, cut, c0, c1), (cut, r1, c0, c1)]
        elif c1 - c0 > 1:
            cut = data.draw(st.integers(c0 + 1, c1 - 1))
            parts += [(r0, r1, c0, cut), (r0, r1, cut, c1)]
        else:
            parts.append((r0, r1, c0, c1))
    pieces = []
    for r0, r1, c0, c1 in parts:
        step = data.draw(st.sampled_from([1, 2]))
        for phase in range(step):
            count = len(range(c0 + phase, c1, step))
            if count:
                axes, strides = (r1 - r0, count), (width, step)
                pieces.append(SliceCopy(Strided(1, axes, strides), Strided(r0 * width + c0 + phase, axes, strides)))
    starts, extents, strides = disjoint._claims(CopyTable.of(pieces), RunTable.empty())
    assert not disjoint._Meeting(1 << 20).meets(starts, extents, strides)
    victim = data.draw(st.integers(0, len(pieces) - 1))
    moved = pieces[victim]
    shift = data.draw(st.sampled_from([1, -1, width, -width]))
    low = moved.target.start + shift
    if low >= 0 and low + sum((n - 1) * s for n, s in zip(moved.shape, moved.target.strides, strict=True)) < SIZE * 2:
        pieces[victim] = SliceCopy(moved.source, Strided(low, moved.shape, moved.target.strides))
        assert pieces_meet(CopyTable.of(pieces), RunTable.empty()) == brute(pieces, set())


def test_size_costs_nothing_where_pieces_are_regular() -> None:
    """Gate and up rows alternating in a stack of experts of 2**40 elements, and one row claimed again as opaque."""
    axes, strides = (2**10, 2**15, 2**14), (2**30, 2**15, 1)
    gate = SliceCopy(Strided(1, axes, strides), Strided(0, axes, strides))
    up = SliceCopy(Strided(1, axes, strides), Strided(2**14, axes, strides))
    table = CopyTable.of([gate, up])
    assert not pieces_meet(table, RunTable.empty(), 2**41)
    assert pieces_meet(table, RunTable.from_intervals([[2**35, 2**35 + 1]]), 2**41)
    shifted = SliceCopy(Strided(1, axes, strides), Strided(2**14 - 1, axes, strides))
    assert pieces_meet(CopyTable.of([gate, shifted]), RunTable.empty(), 2**41)


def test_what_cannot_be_decided_says_so() -> None:
    """Axes that are not nested, in a parameter too large to list."""
    odd = SliceCopy(Strided(1, (2, 3), (3, 2)), Strided(0, (2, 3), (3, 2)))
    assert not pieces_meet(CopyTable.of([odd]), RunTable.empty(), 2**20)
    with pytest.raises(UndecidedError):
        pieces_meet(CopyTable.of([odd]), RunTable.empty(), 2**40)


def test_a_stride_of_zero_meets_itself() -> None:
    same = CopyTable(np.array([[0, 1, 2, 0, 1]], dtype=np.int64))
    assert pieces_meet(same, RunTable.empty())
