"""Layouts put together by hand: slice, chunk, transpose, stack, concatenate, split and merge axes, pad.

A ``Layout`` is an array of element ids that is never filled in: blocks of affine ids inside a shape, and nothing
(id 0) between them. The operations are numpy's, and each means exactly what numpy does to the filled-in array:

>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("gate", (4, 2), "BF16"), TensorSpec("up", (4, 2), "BF16")])
>>> gate, up = whole(space, "gate"), whole(space, "up")
>>> concatenate([gate.shard(0, 1, 2), up.shard(0, 1, 2)]).ids().tolist()
[[5, 6], [7, 8], [13, 14], [15, 16]]
>>> stack([gate, up], axis=1).merge_axes(0).take(0, 0, 4).ids().tolist()     # rows of both, alternating
[[1, 2], [9, 10], [3, 4], [11, 12]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layout_algebra.canonical import canonical_table
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import MapError
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a block lies along one axis: positions ``offset + step * i`` for ``i < count``, ids ``stride`` apart."""

    offset: int
    step: int
    count: int
    stride: int

    def clip(self, start: int, stop: int) -> tuple[Axis, int] | None:
        """The part inside positions ``start:stop``, moved to begin at ``start``, and how many ``i`` were cut before."""
        first = max(0, -((self.offset - start) // self.step)) if self.offset < start else 0
        last = min(self.count, -((self.offset - stop) // self.step))
        if last <= first:
            return None
        return replace(self, offset=self.offset + first * self.step - start, count=last - first), first


@dataclass(frozen=True, slots=True)
class Block:
    """Ids ``start + sum(axis.stride * i)`` at the positions that the axes name."""

    start: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """An array of ids of some shape, in blocks that do not overlap; positions in no block are empty.

    Attributes
    ----------
    shape
        As numpy's.
    blocks
        Each with one ``Axis`` per axis of the shape.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def ids(self) -> IdArray:
        """The definition: the filled-in int64 array, 0 where empty."""
        out = np.zeros(self.shape, dtype=np.int64)
        for block in self.blocks:
            where = np.ix_(*(axis.offset + axis.step * np.arange(axis.count) for axis in block.axes))
            values = np.full([axis.count for axis in block.axes], block.start, dtype=np.int64)
            for number, axis in enumerate(block.axes):
                steps = axis.stride * np.arange(axis.count)
                values += steps.reshape([-1 if other == number else 1 for other in range(len(block.axes))])
            out[where] = values
        return out

    def take(self, axis: int, start: int, stop: int) -> Layout:
        """Positions ``start:stop`` of one axis, as ``array[..., start:stop, ...]``."""
        axis = self._axis(axis)
        start, stop, _ = slice(start, stop).indices(self.shape[axis])
        stop = max(start, stop)
        kept = []
        for block in self.blocks:
            clipped = block.axes[axis].clip(start, stop)
            if clipped is not None:
                axes = (*block.axes[:axis], clipped[0], *block.axes[axis + 1 :])
                kept.append(Block(block.start + clipped[1] * block.axes[axis].stride, axes))
        return Layout((*self.shape[:axis], stop - start, *self.shape[axis + 1 :]), tuple(kept))

    def shard(self, axis: int, index: int, count: int) -> Layout:
        """Part ``index`` of ``count`` equal parts.

        Raises
        ------
        MapError
            If the axis does not divide evenly or the index is outside ``0:count``.
        """
        axis = self._axis(axis)
        size = self.shape[axis]
        if count < 1 or not 0 <= index < count or size % count:
            raise MapError(f"axis {axis} of {self.shape} has no part {index} of {count} equal parts")
        return self.take(axis, index * (size // count), (index + 1) * (size // count))

    def chunk(self, axis: int, index: int, count: int) -> Layout:
        """Part ``index`` of ``count`` as torch.chunk cuts them: ceil-sized, the last ones short or empty."""
        axis = self._axis(axis)
        if count < 1 or not 0 <= index < count:
            raise MapError(f"axis {axis} of {self.shape} has no chunk {index} of {count}")
        size = self.shape[axis]
        width = -(-size // count)
        return self.take(axis, min(size, index * width), min(size, (index + 1) * width))

    def transpose(self, *order: int) -> Layout:
        """Axes in another order; reversed by default."""
        axes = tuple(self._axis(axis) for axis in order) or tuple(reversed(range(len(self.shape))))
        if sorted(axes) != list(range(len(self.shape))):
            raise MapError(f"axes {order} are no order of the axes of {self.shape}")
        blocks = tuple(Block(block.start, tuple(block.axes[axis] for axis in axes)) for block in self.blocks)
        return Layout(tuple(self.shape[axis] for axis in axes), blocks)

    def split_axis(self, axis: int, inner: int) -> Layout:
        """Cut an axis of ``n`` into two of ``n // inner`` and ``inner``.

        Raises
        ------
        MapError
            If ``inner`` does not divide the axis.
        """
        axis = self._axis(axis)
        size = self.shape[axis]
        if inner < 1 or size % inner:
            raise MapError(f"axis {axis} of {self.shape} does not split into rows of {inner}")
        blocks = [
            Block(block.start + skip, (*block.axes[:axis], outer, within, *block.axes[axis + 1 :]))
            for block in self.blocks
            for outer, within, skip in _split(block.axes[axis], inner)
        ]
        return Layout((*self.shape[:axis], size // inner, inner, *self.shape[axis + 1 :]), tuple(blocks))

    def merge_axes(self, axis: int) -> Layout:
        """Fuse an axis with the next one, row-major, as ``reshape`` does."""
        axis = self._axis(axis)
        if axis + 1 >= len(self.shape):
            raise MapError(f"axis {axis} of {self.shape} has no next axis to merge with")
        inner = self.shape[axis + 1]
        blocks = [
            Block(block.start + skip, (*block.axes[:axis], merged, *block.axes[axis + 2 :]))
            for block in self.blocks
            for merged, skip in _merge(block.axes[axis], block.axes[axis + 1], inner)
        ]
        return Layout((*self.shape[:axis], self.shape[axis] * inner, *self.shape[axis + 2 :]), tuple(blocks))

    def flatten(self) -> Layout:
        """One axis, row-major."""
        if not self.shape:
            return Layout((1,), tuple(Block(block.start, (Axis(0, 1, 1, 0),)) for block in self.blocks))
        flat = self
        while len(flat.shape) > 1:
            flat = flat.merge_axes(len(flat.shape) - 2)
        return flat

    def pad(self, axis: int, size: int) -> Layout:
        """Grow an axis to ``size`` with empty positions at its end; MapError if it is larger already."""
        axis = self._axis(axis)
        if size < self.shape[axis]:
            raise MapError(f"axis {axis} of {self.shape} is larger than {size} already")
        return Layout((*self.shape[:axis], size, *self.shape[axis + 1 :]), self.blocks)

    def copies(self) -> CopyTable:
        """The blocks as slice copies in canonical form: the same as any other way to the same ids gives.

        Raises
        ------
        MapError
            If blocks overlap.
        """
        axes = max(1, len(self.shape))
        steps = [math.prod(self.shape[number + 1 :]) for number in range(len(self.shape))]
        rows = np.zeros((len(self.blocks), 2 + 3 * axes), dtype=np.int64)
        rows[:, 2::3] = 1
        for row, block in zip(rows, self.blocks, strict=True):
            row[0] = sum(axis.offset * step for axis, step in zip(block.axes, steps, strict=True))
            row[1] = block.start
            for number, (axis, step) in enumerate(zip(block.axes, steps, strict=True)):
                row[2 + 3 * number : 5 + 3 * number] = axis.count, axis.step * step, axis.stride
        return canonical_table(CopyTable(rows), self.shape)

    def _axis(self, axis: int) -> int:
        if not -len(self.shape) <= axis < len(self.shape):
            raise MapError(f"{self.shape} has no axis {axis}")
        return axis % len(self.shape)


def whole(space: CheckpointSpace, name: str) -> Layout:
    """A checkpoint tensor as it stands; SpaceError if there is none of that name."""
    spec = space.spec(name)
    if not spec.elements:
        return Layout(spec.shape, ())
    strides = [math.prod(spec.shape[number + 1 :]) for number in range(len(spec.shape))]
    axes = tuple(Axis(0, 1, extent, stride) for extent, stride in zip(spec.shape, strides, strict=True))
    return Layout(spec.shape, (Block(space.id_range(name)[0], axes),))


def concatenate(layouts: Iterable[Layout], axis: int = 0) -> Layout:
    """Layouts one after another along an axis, as numpy.concatenate.

    Raises
    ------
    MapError
        If there is none, or they differ in another axis.
    """
    parts = tuple(layouts)
    if not parts:
        raise MapError("nothing to concatenate")
    axis = parts[0]._axis(axis)
    rest = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
    if len({len(part.shape) for part in parts}) > 1 or len(rest) > 1:
        raise MapError(f"shapes {[part.shape for part in parts]} do not concatenate along axis {axis}")
    blocks, offset = [], 0
    for part in parts:
        for block in part.blocks:
            moved = replace(block.axes[axis], offset=block.axes[axis].offset + offset)
            blocks.append(Block(block.start, (*block.axes[:axis], moved, *block.axes[axis + 1 :])))
        offset += part.shape[axis]
    return Layout((*parts[0].shape[:axis], offset, *parts[0].shape[axis + 1 :]), tuple(blocks))


def stack(layouts: Iterable[Layout], axis: int = 0) -> Layout:
    """Layouts of one shape along a new axis, as numpy.stack."""
    parts = tuple(layouts)
    if not parts:
        raise MapError("nothing to stack")
    rank = len(parts[0].shape) + 1
    if not -rank <= axis < rank:
        raise MapError(f"a stack of {parts[0].shape} has no axis {axis}")
    axis %= rank
    one = Axis(0, 1, 1, 0)
    return concatenate(
        (
            Layout(
                (*part.shape[:axis], 1, *part.shape[axis:]),
                tuple(Block(block.start, (*block.axes[:axis], one, *block.axes[axis:])) for block in part.blocks),
            )
            for part in parts
        ),
        axis,
    )


def declare(
    space: CheckpointSpace, layouts: Mapping[str, Layout], dtypes: Mapping[str, str] | None = None
) -> SourceMap:
    """A source map from declared layouts.

    Parameters
    ----------
    space
        The checkpoint.
    layouts
        One per parameter; blocks must not overlap.
    dtypes
        Safetensors dtype per parameter; by default that of the first tensor it copies.
    """
    parameters = {}
    for name, layout in layouts.items():
        copies = layout.copies()
        named = None if dtypes is None else dtypes.get(name)
        first = space.locate(int(copies.source_starts[0]))[0] if len(copies) else None
        own = space.spec(first).dtype if first is not None else (space.specs[0].dtype if len(space) else "U8")
        parameters[name] = ParameterMap(layout.shape, named or own, copies, RunTable.empty())
    return SourceMap(space, parameters)


def _split(axis: Axis, inner: int) -> Sequence[tuple[Axis, Axis, int]]:
    """An axis as (outer, inner) pairs and the id step to each pair's origin."""
    if axis.step % inner == 0 or axis.count == 1:
        row, column = divmod(axis.offset, inner)
        return [(Axis(row, max(1, axis.step // inner), axis.count, axis.stride), Axis(column, 1, 1, 0), 0)]
    first_row, last_row = axis.offset // inner, (axis.offset + axis.step * (axis.count - 1)) // inner
    if inner % axis.step or first_row == last_row:
        # Rows are cut at different phases: one piece a row.
        return [
            (Axis(row, 1, 1, 0), clipped[0], clipped[1] * axis.stride)
            for row in range(first_row, last_row + 1)
            if (clipped := axis.clip(row * inner, (row + 1) * inner)) is not None
        ]
    out = []
    per_row = inner // axis.step
    whole_from = -(-(axis.offset - axis.offset % axis.step) // inner)
    whole_to = (axis.offset + axis.step * axis.count - axis.offset % axis.step) // inner
    for start, stop, rows in (
        (first_row, whole_from, 1),
        (whole_from, whole_to, whole_to - whole_from),
        (max(whole_to, whole_from), last_row + 1, 1),
    ):
        if stop <= start or rows < 1:
            continue
        clipped = axis.clip(start * inner, stop * inner)
        if clipped is None:
            continue
        part, skipped = clipped
        if rows == 1:
            out.append((Axis(start, 1, 1, 0), part, skipped * axis.stride))
        else:
            outer = Axis(start, 1, rows, per_row * axis.stride)
            out.append((outer, replace(part, count=per_row), skipped * axis.stride))
    return out


def _merge(outer: Axis, within: Axis, inner: int) -> Sequence[tuple[Axis, int]]:
    """Two axes as one, in several pieces where they do not fuse, and the id step to each piece's origin."""
    if outer.count == 1:
        return [(replace(within, offset=outer.offset * inner + within.offset), 0)]
    if within.count == 1:
        return [(Axis(outer.offset * inner + within.offset, outer.step * inner, outer.count, outer.stride), 0)]
    if within.step * within.count == outer.step * inner and within.stride * within.count == outer.stride:
        merged = Axis(outer.offset * inner + within.offset, within.step, outer.count * within.count, within.stride)
        return [(merged, 0)]
    if outer.count <= within.count:
        return [
            (replace(within, offset=(outer.offset + outer.step * row) * inner + within.offset), outer.stride * row)
            for row in range(outer.count)
        ]
    return [
        (
            Axis(
                outer.offset * inner + within.offset + within.step * column,
                outer.step * inner,
                outer.count,
                outer.stride,
            ),
            within.stride * column,
        )
        for column in range(within.count)
    ]
