"""Grids: affine relations between places in memory and numbers that belong to them, met and subtracted exactly.

A strided view is a grid: place ``start + sum(i * stride)`` stands for number ``other + sum(i * other_stride)``. Two
views of one memory meet in a few grids again, found digit by digit from the widest stride down, and what one leaves of
the other is a few grids too. Nothing is listed element by element.

>>> rows = Grid(0, 100, ((4, 8, 2), (2, 1, 1)))             # columns 0:2 of a 4 x 8 matrix, numbered from 100
>>> meet(rows, Grid(8, 0, ((24, 1, 1),)))                   # rows 1:4: pairs (number of the one, of the other)
[Grid(start=102, other=0, axes=((3, 2, 8), (2, 1, 1)))]
>>> minus(rows, Grid(8, 0, ((24, 1, 1),)))                  # what is left of row 0
[Grid(start=0, other=100, axes=((2, 1, 1),))]

Grids must be nested: each stride longer than everything inside it reaches. ``nested`` makes them so.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from layout_algebra.dtypes import IdArray

Axis: TypeAlias = tuple[int, int, int]
"""Extent, stride of places, stride of the other number."""

Axes: TypeAlias = tuple[Axis, ...]

MOST_UNROLLED = 512
"""Longest axis that is taken apart one step at a time, where strides do not divide each other."""


class Irregular(Exception):
    """Two grids whose strides do not divide each other, too long to take apart; callers fall back to plain lists."""


class Grid(NamedTuple):
    """An affine relation; ``axes`` from the widest stride of places to the narrowest.

    Attributes
    ----------
    start, other
        The place and the number at the origin.
    axes
        Extent, stride of places, stride of the other number.
    """

    start: int
    other: int
    axes: Axes

    @property
    def elements(self) -> int:
        """Number of pairs."""
        count = 1
        for extent, _, _ in self.axes:
            count *= extent
        return count

    @property
    def last(self) -> int:
        """The largest place."""
        return self.start + _reach(self.axes)

    def inverse(self) -> tuple[Grid, ...]:
        """The same pairs with the roles exchanged; nested again."""
        return nested(self.other, self.start, tuple((extent, back, step) for extent, step, back in self.axes))

    def pairs(self) -> tuple[IdArray, IdArray]:
        """Every place and its number, in order of the axes: the definition. Two int64 arrays, flat."""
        places, others = np.array([self.start]), np.array([self.other])
        for extent, step, other_step in self.axes:
            index = np.arange(extent, dtype=np.int64)
            places = (places[:, None] + index * step).reshape(-1)
            others = (others[:, None] + index * other_step).reshape(-1)
        return places.astype(np.int64), others.astype(np.int64)


def nested(start: int, other: int, axes: Axes) -> tuple[Grid, ...]:
    """Grids in nested form for any strides, negative and overlapping ones included.

    Axes along which places stand still come last, with stride 0.

    Raises
    ------
    Irregular
        If axes overlap and the shorter one is too long to take apart.
    """
    moving: list[Axis] = []
    still: list[Axis] = []
    for extent, step, other_step in axes:
        if extent == 0:
            return ()
        if extent == 1:
            continue
        if step < 0:
            start, other = start + (extent - 1) * step, other + (extent - 1) * other_step
            step, other_step = -step, -other_step
        (moving if step else still).append((extent, step, other_step))
    moving.sort(key=lambda axis: -axis[1])
    reach = 0
    for place in range(len(moving) - 1, -1, -1):
        extent, step, other_step = moving[place]
        if step <= reach:
            # Take the shortest of the entangled axes apart.
            worst = min(range(place, len(moving)), key=lambda index: moving[index][0])
            extent, step, other_step = moving.pop(worst)
            if extent > MOST_UNROLLED:
                raise Irregular
            rest = (*moving, *still)
            return tuple(
                grid
                for index in range(extent)
                for grid in nested(start + index * step, other + index * other_step, rest)
            )
        reach += (extent - 1) * step
    return (Grid(start, other, (*_fused(tuple(moving)), *still)),)


def meet(left: Grid, right: Grid) -> list[Grid]:
    """Pairs of numbers that share a place: grids from ``left``'s numbers to ``right``'s, in no order of strides.

    ``left`` may have axes of stride 0: each place then stands for several numbers. No two pairs are equal.

    Raises
    ------
    Irregular
        See there.
    """
    moving = tuple(axis for axis in left.axes if axis[1])
    still = tuple((extent, other_step, 0) for extent, step, other_step in left.axes if not step)
    found = _meet(left.start - right.start, moving, right.axes)
    return [Grid(left.other + one, right.other + two, (*axes, *still)) for one, two, axes in found]


def minus(left: Grid, right: Grid) -> list[Grid]:
    """What remains of ``left`` without the places of ``right``; nested.

    Raises
    ------
    Irregular
        See there.
    """
    moving = tuple(axis for axis in left.axes if axis[1])
    still = tuple(axis for axis in left.axes if not axis[1])
    kept = _minus(left.start - right.start, moving, tuple(axis for axis in right.axes if axis[1]))
    return [Grid(left.start + place, left.other + other, (*_fused(axes), *still)) for place, other, axes in kept]


def _reach(axes: Axes) -> int:
    return sum((extent - 1) * step for extent, step, _ in axes)


def _fused(axes: Axes) -> Axes:
    """Neighbouring axes that continue each other as one, unit axes dropped."""
    out: list[Axis] = []
    for axis in axes:
        if axis[0] == 1:
            continue
        if out:
            extent, step, other_step = out[-1]
            if step == axis[0] * axis[1] and other_step == axis[0] * axis[2]:
                out[-1] = (extent * axis[0], axis[1], axis[2])
                continue
        out.append(axis)
    return tuple(out)


def _between(low: int, high: int, step: int, extent: int) -> range:
    """Indices ``i`` of ``range(extent)`` with ``low <= i * step <= high``."""
    return range(max(0, -(-low // step)), min(extent - 1, high // step) + 1)


def _parts(axes: Axes, wide: int, phase: int) -> list[tuple[int, Axes]]:
    """The outermost axis cut at places ``phase`` modulo ``wide``: head, whole stretches, tail; with first indices.

    Nothing where it does not divide, or where the axis is a single one of these.
    """
    if not axes or wide % axes[0][1]:
        return []
    extent, step, other = axes[0]
    inner, per = axes[1:], wide // step
    head = min(extent, -(-(phase % wide) // step) % per)
    whole, tail = divmod(extent - head, per)
    out: list[tuple[int, Axes]] = []
    if head:
        out.append((0, ((head, step, other), *inner)))
    if whole:
        outer: Axes = ((whole, wide, per * other),) if whole > 1 else ()
        out.append((head, (*outer, (per, step, other), *inner)))
    if tail:
        out.append((head + whole * per, ((tail, step, other), *inner)))
    return [] if out[0][1] == axes else out


def _unrolled(indices: range) -> range:
    if len(indices) > MOST_UNROLLED:
        raise Irregular
    return indices


def _meet(delta: int, left: Axes, right: Axes) -> list[tuple[int, int, Axes]]:
    """Common places of ``delta + left`` and ``right``: offsets of both numbers, and axes of both."""
    left_reach, right_reach = _reach(left), _reach(right)
    if delta > right_reach or delta + left_reach < 0:
        return []
    if not left and not right:
        return [(0, 0, ())]
    left_step = left[0][1] if left else 0
    right_step = right[0][1] if right else 0
    if left_step < right_step:
        swapped = _meet(-delta, right, left)
        return [(one, two, tuple((n, b, a) for n, a, b in axes)) for two, one, axes in swapped]
    extent, step, other = left[0]
    inner, inner_reach = left[1:], left_reach - (left[0][0] - 1) * left_step
    out = []
    if left_step == right_step:
        right_extent, _, right_other = right[0]
        right_inner = right[1:]
        right_inner_reach = right_reach - (right_extent - 1) * step
        # Row i of the one and row i + ahead of the other can share places for at most two values of `ahead`.
        for ahead in range(-((right_inner_reach - delta) // step), (delta + inner_reach) // step + 1):
            first, last = max(0, -ahead), min(extent, right_extent - ahead)
            if first < last:
                for one, two, axes in _meet(delta - ahead * step, inner, right_inner):
                    row: Axes = ((last - first, other, right_other),) if last - first > 1 else ()
                    out.append((one + first * other, two + (first + ahead) * right_other, (*row, *axes)))
        return out
    touched = _between(-delta - inner_reach, right_reach - delta, step, extent)
    parts = _parts(right, step, delta) if len(touched) > 1 else []
    if parts:
        for first, part in parts:
            for one, two, axes in _meet(delta - first * right_step, left, part):
                out.append((one, two + first * right[0][2], axes))
        return out
    for index in _unrolled(touched):
        for one, two, axes in _meet(delta + index * step, inner, right):
            out.append((one + index * other, two, axes))
    return out


def _minus(delta: int, left: Axes, right: Axes) -> list[tuple[int, int, Axes]]:
    """What remains of ``delta + left`` without ``right``: offsets of place and number, and axes."""
    left_reach, right_reach = _reach(left), _reach(right)
    if delta > right_reach or delta + left_reach < 0:
        return [(0, 0, left)]
    if not left and not right:
        return []
    left_step = left[0][1] if left else 0
    right_step = right[0][1] if right else 0
    if left_step >= right_step:
        return _minus_rows(delta, left, right, left_step == right_step)
    inner_reach = right_reach - (right[0][0] - 1) * right_step
    touched = _between(delta - inner_reach, delta + left_reach, right_step, right[0][0])
    parts = _parts(left, right_step, -delta) if len(touched) > 1 else []
    if parts:
        out = []
        for first, part in parts:
            place, other = first * left_step, first * left[0][2]
            out += [(place + p, other + o, axes) for p, o, axes in _minus(delta + place, part, right)]
        return out
    rest: list[tuple[int, int, Axes]] = [(0, 0, left)]
    for index in _unrolled(touched):
        rest = _each_minus(rest, delta - index * right_step, right[1:])
    return rest


def _minus_rows(delta: int, left: Axes, right: Axes, same: bool) -> list[tuple[int, int, Axes]]:
    """``_minus`` where no stride of ``right`` is wider than the outermost of ``left``."""
    extent, step, other = left[0]
    inner = left[1:]
    inner_reach, right_reach = _reach(inner), _reach(right)
    if same:
        right_inner = right[1:]
        reach = _reach(right_inner)
        spans = []
        for ahead in range(-((reach - delta) // step), (delta + inner_reach) // step + 1):
            first, last = max(0, -ahead), min(extent, right[0][0] - ahead)
            if first < last:
                spans.append((first, last, delta - ahead * step, right_inner))
    else:
        touched = _between(-delta - inner_reach, right_reach - delta, step, extent)
        parts = _parts(right, step, delta) if len(touched) > 1 else []
        if parts:
            rest: list[tuple[int, int, Axes]] = [(0, 0, left)]
            for first, part in parts:
                rest = _each_minus(rest, delta - first * right[0][1], part)
            return rest
        spans = [(index, index + 1, delta + index * step, right) for index in _unrolled(touched)]
    out: list[tuple[int, int, Axes]] = []
    edges = sorted({0, extent, *(span[0] for span in spans), *(span[1] for span in spans)})
    for low, high in pairwise(edges):
        rest = [(0, 0, inner)]
        for first, last, shift, taken in spans:
            if first <= low and high <= last:
                rest = _each_minus(rest, shift, taken)
        rows: Axes = ((high - low, step, other),) if high - low > 1 else ()
        out += [(place + low * step, number + low * other, (*rows, *axes)) for place, number, axes in rest]
    return out


def _each_minus(pieces: list[tuple[int, int, Axes]], delta: int, right: Axes) -> list[tuple[int, int, Axes]]:
    return [
        (place + more, other + further, rest)
        for place, other, axes in pieces
        for more, further, rest in _minus(delta + place, axes, right)
    ]
