"""The canonical form of a parameter's slice copies, whichever way they were written down.

Recovery's sweep cuts ids into rectangles and ``lift`` merges regular repeats; of any slice copies the result depends on
their ids alone, so declared, fitted and probed layouts have equal digests. Most parameters are one rectangle of one
tensor, which is its own canonical form and needs no sweep.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> halves = [SliceCopy(Strided(1 + 4 * k, (4,), (1,)), Strided(4 * k, (4,), (1,))) for k in (1, 0)]
>>> [str(copy) for copy in normal_form(CopyTable.of(halves), (4, 2)).slice_copies()]
['0+(8:1) <- 1+(8:1)']
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layout_algebra.canonical import lift
from layout_algebra.recover import rectangles_of_copies
from layout_algebra.slice_copy import CopyTable
from layout_algebra.views import view_of


def normal_form(table: CopyTable, shape: Sequence[int]) -> CopyTable:
    """The canonical form of some slice copies of a parameter of that shape.

    Raises
    ------
    MapError
        If targets overlap or leave the parameter, or an id is below 1.
    """
    if len(table) == 1:
        one = _one_rectangle(table.rows[0].tolist(), shape)
        if one is not None:
            return one
    return lift(rectangles_of_copies(lift(table), shape)) if len(table) else CopyTable.empty()


def _one_rectangle(row: list[int], shape: Sequence[int]) -> CopyTable | None:
    """The canonical form of a copy that is one rectangle of the parameter's matrix; None if it is not."""
    target, source = row[:2]
    axes = []
    for place in range(2, len(row), 3):
        count, stride, step = row[place : place + 3]
        if count == 1:
            continue
        if stride < 0:
            target, source = target + (count - 1) * stride, source + (count - 1) * step
            stride, step = -stride, -step
        axes.append((stride, count, step))
    axes.sort(reverse=True)
    if len(axes) == 2 and axes[0][0] == axes[1][0] * axes[1][1] and axes[0][2] == axes[1][2] * axes[1][1]:
        axes = [(axes[1][0], axes[0][1] * axes[1][1], axes[1][2])]
    rows, width = view_of(shape)
    column = target % width
    match axes:
        case []:
            plain = True
        case [(1, count, _)]:
            plain = column + count <= width or (column == 0 and count % width == 0)
        case [(stride, _, _)]:
            plain = stride == width
        case [(stride, _, _), (1, count, _)]:
            plain = stride == width and column + count <= width
        case _:
            plain = False
    last = target + sum((count - 1) * stride for stride, count, _ in axes)
    least = source + sum(min(0, (count - 1) * step) for _, count, step in axes)
    if not plain or target < 0 or last >= rows * width or least < 1:
        return None
    out = [target, source]
    for stride, count, step in axes:
        out += [count, stride, step]
    return CopyTable(np.array([out if axes else [*out, 1, 0, 0]], dtype=np.int64))
