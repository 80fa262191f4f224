"""Differences of two maps, against their ids."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layout_algebra.blocks import concatenate, declare, stack, whole
from layout_algebra.map_diff import differences
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

SPACE = CheckpointSpace([TensorSpec("a", (4, 6), "BF16"), TensorSpec("b", (24,), "BF16")])
arrays = hnp.arrays(np.int64, st.just((4, 5)), elements=st.integers(-1, 48))


def elements_of(where: str, shape: tuple[int, ...]) -> set[int]:
    """Flat indices of a range as it is printed."""
    first, _, rest = where.partition(" and ")
    flat = np.arange(int(np.prod(shape)))
    if first.startswith(".flat"):
        start, stop = map(int, re.findall(r"\d+", first))
        found = flat[start:stop]
    else:
        found = eval(f"array{first}", {"array": flat.reshape(shape)}).ravel()
    more = [int(number) for number in re.findall(r"\d+", rest)]
    steps = range(0, (more[0] + 1) * more[1], more[1]) if more else [0]
    return {int(i) + step for step in steps for i in np.atleast_1d(found)}


@settings(max_examples=200)
@given(arrays, arrays, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4))
def test_ranges_are_the_elements_that_differ(left: np.ndarray, right: np.ndarray, same: list[tuple[int, int]]) -> None:
    for row, column in same:
        right[row, column] = left[row, column]
    maps = [SourceMap.from_ids(SPACE, {"p": ids}) for ids in (left, right)]
    found = differences(*maps)
    listed = [element for each in found for element in elements_of(each.where, (4, 5))]
    assert sorted(listed) == np.flatnonzero(left != right).tolist()
    assert bool(found) == (maps[0].digest() != maps[1].digest())


def test_columns_of_many_rows_are_one_range() -> None:
    space = CheckpointSpace([TensorSpec("w", (4096, 8), "BF16"), TensorSpec("v", (4096, 8), "BF16")])
    w, v = whole(space, "w"), whole(space, "v")
    left = declare(space, {"p": w.shard(1, 0, 2), "q": w})
    right = declare(
        space, {"p": concatenate([w.take(1, 0, 3), v.take(1, 4, 5)], axis=1), "q": w.transpose().transpose()}
    )
    assert [str(each) for each in differences(left, right)] == ["p[:, 3:4]: w[:, 3:4] / v[:, 4:5]"]


def test_swapped_experts_are_told_apart() -> None:
    space = CheckpointSpace(TensorSpec(f"e.{e}.w", (2, 3), "BF16") for e in range(6))
    experts = [whole(space, f"e.{e}.w") for e in range(6)]
    left = declare(space, {"w": stack(experts)})
    right = declare(space, {"w": stack([experts[k] for k in (0, 2, 1, 3, 4, 5)])})
    assert [str(each) for each in differences(left, right)] == [
        "w[1:2, :, :]: e.1.w[:, :] / e.2.w[:, :]",
        "w[2:3, :, :]: e.2.w[:, :] / e.1.w[:, :]",
    ]


def test_everything_else_that_differs_is_named() -> None:
    copies = CopyTable.empty()

    def one(shape: tuple[int, ...], dtype: str, opaque: list[int], depends: tuple[str, ...] = ()) -> ParameterMap:
        return ParameterMap(shape, dtype, copies, RunTable.from_ids(opaque), depends)

    same = {"s": one((4,), "BF16", []), "o": one((4,), "F32", [1, 2], ("a",))}
    left = SourceMap(SPACE, {**same, "d": one((4,), "F32", []), "x": one((), "F32", [])})
    changed = {"s": one((2, 2), "BF16", []), "o": one((4,), "F32", [2], ("b",))}
    right = SourceMap(SPACE, {**changed, "d": one((4,), "F16", []), "y": one((), "F32", [])})
    assert [str(each) for each in differences(left, right)] == [
        "d (dtype): F32 / F16",
        "o[1:2]: computed / empty",
        "o (depends_on): a / b",
        "s (shape): [4] / [2, 2]",
        "x (parameter): F32[] / none",
        "y (parameter): none / F32[]",
    ]
    assert differences(left, left) == ()


def test_different_checkpoints_are_compared_themselves() -> None:
    other = CheckpointSpace([TensorSpec("a", (6, 4), "BF16"), TensorSpec("c", (2,), "F32")])
    found = differences(SourceMap.from_ids(SPACE, {}), SourceMap.from_ids(other, {"p": np.array([1])}))
    assert [str(each) for each in found] == [
        "a (checkpoint): BF16[4, 6] / BF16[6, 4]",
        "b (checkpoint): BF16[24] / none",
        "c (checkpoint): none / F32[2]",
    ]


def test_a_large_stack_with_one_row_off_is_found_at_once() -> None:
    """A terabyte of experts: the sizes are the model's, the work is that of its pieces."""
    space = CheckpointSpace(TensorSpec(f"e.{e}.w", (2048, 7168), "BF16") for e in range(384))
    experts = [whole(space, f"e.{e}.w") for e in range(384)]
    moved = experts[200]
    swapped = concatenate([moved.take(0, 0, 7), moved.take(0, 8, 9), moved.take(0, 7, 8), moved.take(0, 9, 2048)])
    left = declare(space, {"w": stack(experts)})
    right = declare(space, {"w": stack([*experts[:200], swapped, *experts[201:]])})
    assert [str(each) for each in differences(left, right)] == [
        "w[200, 7:8, :]: e.200.w[7:8, :] / e.200.w[8:9, :]",
        "w[200, 8:9, :]: e.200.w[8:9, :] / e.200.w[7:8, :]",
    ]


def test_random_permutations_stop_at_a_bounded_list() -> None:
    rng = np.random.default_rng(0)
    space = CheckpointSpace([TensorSpec("w", (5000,), "BF16")])
    maps = [SourceMap.from_ids(space, {"p": rng.permutation(5000) + 1}) for _ in range(2)]
    found = differences(*maps)
    assert len(found) <= 65
    assert "more elements" in found[-1].where
