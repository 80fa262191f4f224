"""Layout operations mean what numpy does to the filled-in array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.blocks import Layout, concatenate, declare, stack, whole
from layout_algebra.errors import MapError
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

SHAPES = [(), (0, 4), (3,), (6, 4), (4, 3, 2), (2, 2, 3, 2), (1, 5), (12,)]
SPACE = CheckpointSpace(TensorSpec(f"t{i}", shape, "BF16") for i, shape in enumerate(SHAPES))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Layout, np.ndarray]:
    """A random chain of operations, carried out on a layout and on the plain array of ids."""
    name = draw(st.sampled_from(SPACE.names))
    layout, array = whole(SPACE, name), np.array(whole(SPACE, name).ids())
    for _ in range(draw(st.integers(0, 7))):
        rank = array.ndim
        axis = draw(st.integers(0, max(0, rank - 1)))
        kind = draw(st.sampled_from(["take", "chunk", "transpose", "split", "merge", "pad", "concatenate", "stack"]))
        if kind == "stack":
            axis = draw(st.integers(0, rank))
            count = draw(st.integers(1, 3))
            layout, array = stack([layout] * count, axis), np.stack([array] * count, axis)
        elif rank == 0:
            continue
        elif kind == "take":
            start, stop = sorted(draw(st.tuples(st.integers(0, array.shape[axis]), st.integers(0, array.shape[axis]))))
            layout, array = layout.take(axis, start, stop), np.take(array, range(start, stop), axis)
        elif kind == "chunk":
            count = draw(st.integers(1, 4))
            index = draw(st.integers(0, count - 1))
            layout, width = layout.chunk(axis, index, count), -(-array.shape[axis] // count)
            size = array.shape[axis]
            array = np.take(array, range(min(size, index * width), min(size, (index + 1) * width)), axis)
        elif kind == "transpose":
            order = draw(st.permutations(range(rank)))
            layout, array = layout.transpose(*order), array.transpose(order)
        elif kind == "split" and array.shape[axis]:
            inner = draw(st.sampled_from([d for d in range(1, array.shape[axis] + 1) if array.shape[axis] % d == 0]))
            layout = layout.split_axis(axis, inner)
            array = array.reshape(layout.shape)
        elif kind == "merge" and axis + 1 < rank:
            layout = layout.merge_axes(axis)
            array = array.reshape(layout.shape)
        elif kind == "pad":
            more = draw(st.integers(0, 3))
            layout = layout.pad(axis, array.shape[axis] + more)
            array = np.pad(array, [(0, more if number == axis else 0) for number in range(rank)])
        elif kind == "concatenate":
            part = draw(st.integers(0, array.shape[axis]))
            layout = concatenate([layout, layout.take(axis, 0, part)], axis)
            array = np.concatenate([array, np.take(array, range(part), axis)], axis)
        if array.size > 5000:
            break
    return layout, array


@settings(max_examples=400)
@given(steps())
def test_operations_mean_numpys(both: tuple[Layout, np.ndarray]) -> None:
    layout, array = both
    assert layout.shape == array.shape
    assert np.array_equal(layout.ids(), array)
    assert np.array_equal(layout.flatten().ids(), array.reshape(-1))
    declared = declare(SPACE, {"p": layout})
    assert np.array_equal(declared.ids("p"), array)
    assert np.array_equal(declared.held().ids(), SourceMap.from_ids(SPACE, {"p": array}).held().ids())


def test_shards_tile_an_axis_at_any_size() -> None:
    for size in range(9):
        space = CheckpointSpace([TensorSpec("w", (size, 2), "BF16")])
        for count in range(1, 6):
            chunks = [whole(space, "w").chunk(0, index, count) for index in range(count)]
            assert np.array_equal(np.concatenate([c.ids() for c in chunks]), whole(space, "w").ids())
            if size % count:
                with pytest.raises(MapError, match="equal parts"):
                    whole(space, "w").shard(0, 0, count)
            else:
                assert all(whole(space, "w").shard(0, i, count).shape == (size // count, 2) for i in range(count))


def test_a_trillion_elements_take_no_memory() -> None:
    space = CheckpointSpace(TensorSpec(f"e.{e}.w", (2**10, 2**20), "BF16") for e in range(2**10))
    layout = stack([whole(space, name) for name in space.names]).shard(2, 3, 4)
    made = declare(space, {"w": layout})
    assert made.held().elements == 2**38
    assert [copy.shape for copy in made.slice_copies("w")] == [(2**20, 2**18)]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda w: w.shard(0, 2, 2), "no part 2 of 2"),
        (lambda w: w.shard(0, 0, 4), "equal parts"),
        (lambda w: w.chunk(0, 0, 0), "no chunk"),
        (lambda w: w.take(2, 0, 1), "has no axis 2"),
        (lambda w: w.split_axis(0, 4), "does not split"),
        (lambda w: w.merge_axes(1), "no next axis"),
        (lambda w: w.pad(0, 5), "larger than 5"),
        (lambda w: w.transpose(0, 0), "no order of the axes"),
        (lambda w: concatenate([w, w.transpose()]), "do not concatenate"),
        (lambda _: concatenate([]), "nothing to concatenate"),
        (lambda _: stack([]), "nothing to stack"),
        (lambda w: stack([w], 4), "has no axis 4"),
    ],
)
def test_refusals(act: object, message: str) -> None:
    with pytest.raises(MapError, match=message):
        act(whole(SPACE, "t3"))  # type: ignore[operator]
