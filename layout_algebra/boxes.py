"""A parameter's slice copies as boxes of named tensors: what a layout looks like to a person, and to ``symbolic``.

A slice copy speaks of ids, which differ from layer to layer and rank to rank. Cut at the edges of tensors and turned
into coordinates, one rank's part of a matrix is "rows 512:1024 of q_proj", and a stack of experts is "experts 12:24,
all rows": tensors whose names differ in a number are one tensor with that number as one more coordinate.

>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec(f"e.{e}.w", (4, 6), "BF16") for e in range(8)])
>>> from layout_algebra.blocks import stack, whole
>>> table = stack([whole(space, f"e.{e}.w").shard(0, 1, 2) for e in (2, 3, 4)]).copies()
>>> boxes = merged([box_of(piece, (4, 6), (piece.tensor,)) for piece in cut_at_tensors(space, table)])
>>> boxes[0].at, [(axis.dim, axis.step, axis.count, axis.stride) for axis in boxes[0].axes]
((2, 2, 0), [(0, 1, 3, 12), (1, 1, 2, 6), (2, 1, 6, 1)])

That is: from e=2, row 2, column 0 on, three experts of 2 x 6, whose targets are 12, 6 and 1 apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from layout_algebra.errors import FormulaError
from layout_algebra.slice_copy import CopyTable
from layout_algebra.space import CheckpointSpace

MAX_PIECES = 1 << 14
"""Most pieces of one parameter that are looked at."""

REPEAT = -1
"""The coordinate of an axis along which one element is repeated."""


class Piece(NamedTuple):
    """A copy from one tensor.

    Attributes
    ----------
    tensor
        Position in the checkpoint.
    offset, start
        Flat index in the tensor and in the parameter.
    axes
        Count, target stride, source stride >= 0.
    """

    tensor: int
    offset: int
    start: int
    axes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class BoxAxis:
    """``count`` positions along one coordinate, ``step`` apart, whose targets are ``stride`` apart."""

    dim: int
    step: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """Coordinates of the first element, its flat target, and the axes from there, by coordinate and falling step."""

    at: tuple[int, ...]
    start: int
    axes: tuple[BoxAxis, ...]


def cut_at_tensors(space: CheckpointSpace, table: CopyTable) -> list[Piece]:
    """Slice copies as pieces of single tensors, by target start.

    Raises
    ------
    FormulaError
        If there are more than ``MAX_PIECES``.
    """
    out: list[Piece] = []
    for row in table.rows.tolist():
        start, number = row[:2]
        axes = []
        for place in range(2, len(row), 3):
            count, target, source = row[place : place + 3]
            if count == 1:
                continue
            if source < 0:
                start, number = start + (count - 1) * target, number + (count - 1) * source
                target, source = -target, -source
            axes.append((count, target, source))
        _cut(space, start, number, axes, out)
    return sorted(out, key=lambda piece: piece.start)


def _cut(space: CheckpointSpace, start: int, number: int, axes: list[tuple[int, int, int]], out: list[Piece]) -> None:
    if len(out) > MAX_PIECES:
        raise FormulaError(f"more than {MAX_PIECES} pieces of single tensors")
    starts = space.starts
    tensor = int(np.searchsorted(starts, number, side="right")) - 1
    stop = int(starts[tensor + 1])
    reach = sum((count - 1) * source for count, _, source in axes)
    if number + reach < stop:
        out.append(Piece(tensor, number - int(starts[tensor]), start, tuple(axes)))
        return
    longest = max(range(len(axes)), key=lambda k: (axes[k][0] > 1, axes[k][2]))
    count, target, source = axes[longest]
    inner = reach - (count - 1) * source
    step = 0
    while step < count:
        here = number + step * source
        stop = int(starts[np.searchsorted(starts, here, side="right")])
        fit = min(count - step, (stop - 1 - inner - here) // source + 1)
        part = [*axes[:longest], (max(fit, 1), target, source), *axes[longest + 1 :]]
        if part[longest][0] == 1:
            del part[longest]
        _cut(space, start + step * target, here, part, out)
        step += max(fit, 1)


def box_of(piece: Piece, shape: Sequence[int], numbers: Sequence[int]) -> Box | None:
    """A piece in coordinates: the numbers of its tensor's name, then its place along the tensor's axes.

    Returns
    -------
    Box
        None if some axis does not walk along one axis of ``shape``.
    """
    first = len(numbers)
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    at = [piece.offset // stride % extent for stride, extent in zip(strides, shape, strict=True)]
    found: list[BoxAxis] = []
    room = [extent - place for extent, place in zip(shape, at, strict=True)]
    todo = list(piece.axes)
    while todo:
        count, target, source = todo.pop()
        if source == 0:
            found.append(BoxAxis(REPEAT, 0, count, target))
            continue
        axis = next(k for k in range(len(shape)) if strides[k] <= source and shape[k] > 1)
        step, rest = divmod(source, strides[axis])
        if rest:
            return None
        if (count - 1) * step < room[axis]:
            room[axis] -= (count - 1) * step
            found.append(BoxAxis(first + axis, step, count, target))
            continue
        per_line = shape[axis] // step
        if shape[axis] % step or at[axis] >= step or count % per_line:
            return None
        # Several whole lines in one go: the lines are an axis of their own.
        todo += [(count // per_line, target * per_line, source * per_line), (per_line, target, source)]
    return Box((*numbers, *at), piece.start, _sorted(found))


def merged(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that repeat at equal distances along one coordinate as one box with one more axis; by target start."""
    left = sorted(boxes, key=lambda box: box.start)
    dims = len(left[0].at) if left else 0
    for dim in range(dims - 1, -1, -1):
        groups: dict[tuple[object, ...], list[Box]] = {}
        for box in left:
            groups.setdefault((box.at[:dim], box.at[dim + 1 :], box.axes), []).append(box)
        left = [each for group in groups.values() for each in _joined(group, dim)]
    return sorted(left, key=lambda box: box.start)


def _joined(group: list[Box], dim: int) -> list[Box]:
    """Equal progressions as one box each, and those again; anything else as it was."""
    if len(group) < 2:
        return group
    ordered = sorted(group, key=lambda box: box.at[dim])
    gaps = [(right.at[dim] - left.at[dim], right.start - left.start) for left, right in pairwise(ordered)]
    length = next((k + 1 for k, gap in enumerate(gaps) if gap != gaps[0]), len(ordered))
    inside = [gap for k, gap in enumerate(gaps) if (k + 1) % length]
    if gaps[0][0] <= 0 or len(ordered) % length or any(gap != gaps[0] for gap in inside):
        return group
    out = []
    for head in ordered[::length]:
        axes = _sorted([*head.axes, BoxAxis(dim, gaps[0][0], length, gaps[0][1])])
        out.append(Box(head.at, head.start, _fused(axes)))
    return _joined(out, dim)


def _sorted(axes: Sequence[BoxAxis]) -> tuple[BoxAxis, ...]:
    return tuple(sorted(axes, key=lambda axis: (axis.dim, -axis.step, -abs(axis.stride))))


def _fused(axes: tuple[BoxAxis, ...]) -> tuple[BoxAxis, ...]:
    """Axes of one coordinate where the outer one continues the inner one, as one axis."""
    out: list[BoxAxis] = []
    for axis in axes:
        last = out[-1] if out else None
        if (
            last is not None
            and last.dim == axis.dim
            and last.step == axis.step * axis.count
            and last.stride == axis.stride * axis.count
        ):
            out[-1] = BoxAxis(axis.dim, axis.step, axis.count * last.count, axis.stride)
        else:
            out.append(axis)
    return tuple(out)
