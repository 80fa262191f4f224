"""CheckpointSpace: numbering, order, bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.errors import LayoutError, SpaceError, UnsupportedDtypeError
from layout_algebra.space import MAX_ELEMENTS, CheckpointSpace, TensorSpec, natural_key

NAMES = ["layers.10.w", "layers.2.w", "layers.2.b", "a", "a1", "a01", "a10", "a2", "mtp.lm_head", "é", "x" * 10_000]


def test_numbers_every_element_once_in_natural_order() -> None:
    space = CheckpointSpace(TensorSpec(name, (2, 3), "BF16") for name in ["e.10", "e.9", "e.2"])
    assert space.names == ("e.2", "e.9", "e.10")
    ids = [space.element_id(name, flat) for name in space.names for flat in range(6)]
    assert ids == list(range(1, 19))
    assert [space.locate(i) for i in ids] == [(name, flat) for name in space.names for flat in range(6)]
    assert space.total_elements == 18
    assert space.total_bytes == 36


def test_scalars_and_empty_tensors() -> None:
    space = CheckpointSpace([TensorSpec("s", (), "F32"), TensorSpec("e", (0, 4), "F32"), TensorSpec("v", (2,), "F32")])
    assert space.id_range("e") == (1, 1)
    assert space.locate(1) == ("s", 0)
    assert space.locate(2) == ("v", 0)
    with pytest.raises(SpaceError, match="e: flat index 0 is outside 0:0"):
        space.element_id("e", 0)


@given(st.permutations(NAMES))
def test_order_of_arrival_has_no_effect(names: list[str]) -> None:
    there = CheckpointSpace(TensorSpec(name, (index % 3, 2), "F32") for index, name in enumerate(NAMES))
    shapes = {name: (index % 3, 2) for index, name in enumerate(NAMES)}
    here = CheckpointSpace(TensorSpec(name, shapes[name], "F32") for name in names)
    assert here == there
    assert here.digest() == there.digest()
    assert np.array_equal(here.starts, there.starts)


@given(st.text(min_size=1), st.text(min_size=1))
def test_natural_key_is_total(left: str, right: str) -> None:
    assert (natural_key(left) == natural_key(right)) == (left == right)
    assert (natural_key(left) < natural_key(right)) or (natural_key(right) < natural_key(left)) or left == right


def test_digits_compare_as_numbers_and_ties_as_text() -> None:
    for left, right in itertools.pairwise(["a", "a01", "a1", "a2", "a10", "b"]):
        assert natural_key(left) < natural_key(right), (left, right)


def test_digest_tells_shape_dtype_and_name_apart() -> None:
    specs = [("a", (2, 3), "F32"), ("a", (3, 2), "F32"), ("a", (6,), "F32"), ("a", (2, 3), "I32"), ("b", (2, 3), "F32")]
    assert len({CheckpointSpace([TensorSpec(*spec)]).digest() for spec in specs}) == len(specs)


def test_ids_past_32_bits_are_exact() -> None:
    space = CheckpointSpace([TensorSpec("w", (512, 2048, 4096), "BF16"), TensorSpec("z", (3,), "BF16")])
    last = 511 * 8388608
    assert space.element_id("w", last) == last + 1 == 4286578689
    assert space.locate(4294967299) == ("z", 2)


def test_refusals() -> None:
    with pytest.raises(SpaceError, match="a: named twice"):
        CheckpointSpace([TensorSpec("a", (1,), "F32"), TensorSpec("a", (2,), "F32")])
    with pytest.raises(SpaceError, match=r"2\*\*50"):
        CheckpointSpace([TensorSpec("a", (MAX_ELEMENTS,), "F32")])
    CheckpointSpace([TensorSpec("a", (MAX_ELEMENTS - 1,), "F32")])
    with pytest.raises(UnsupportedDtypeError, match="bfloat16"):
        TensorSpec("a", (1,), "bfloat16")
    with pytest.raises(SpaceError, match="negative"):
        TensorSpec("a", (-1,), "F32")
    with pytest.raises(SpaceError, match="non-empty"):
        TensorSpec("", (1,), "F32")
    with pytest.raises(SpaceError):
        TensorSpec("a", (1.5,), "F32")  # type: ignore[arg-type]
    space = CheckpointSpace([TensorSpec("a", (2,), "F32")])
    for bad in (0, 3, -1):
        with pytest.raises(SpaceError, match="outside"):
            space.locate(bad)
    with pytest.raises(LayoutError, match="b: no such tensor"):
        space.element_id("b", 0)


@pytest.mark.parametrize(("flat", "number"), [(1.5, 2.5), ((1, 2), "x"), (None, None)])
def test_indices_and_ids_are_integers(flat: object, number: object) -> None:
    space = CheckpointSpace([TensorSpec("v", (4,), "F32")])
    with pytest.raises(SpaceError, match=r"v: flat index .* is no integer"):
        space.element_id("v", flat)  # type: ignore[arg-type]
    with pytest.raises(SpaceError, match=r"element id .* is no integer"):
        space.locate(number)  # type: ignore[arg-type]
    assert space.locate(space.element_id("v", np.uint8(3))) == ("v", 3)  # type: ignore[arg-type]


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"v: shape .* is not a tuple of integers"):
        TensorSpec("v", (float("inf"),), "F32")  # type: ignore[arg-type]
    with pytest.raises(SpaceError, match="'v': expected a TensorSpec"):
        CheckpointSpace(["v"])  # type: ignore[list-item]
