"""The canonical form of a parameter's slice copies: few, regular, and a function of the ids and the shape alone.

Recovery's sweep cuts ids into rectangles, a cut that depends only on the ids and the shape, and lifting merges regular
repeats. So declared, fitted, traced and probed layouts have equal digests, and two programs for one shape have equal
canonical forms exactly when they have equal ids. Most parameters are one rectangle of one tensor, which is its own
canonical form and needs no sweep.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> rows = [SliceCopy(Strided(1 + 8 * e, (2,), (1,)), Strided(2 * e, (2,), (1,))) for e in range(3)]
>>> [str(copy) for copy in canonical(rows, (3, 2)).slice_copies()]
['0+(3:2,2:1) <- 1+(3:8,2:1)']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from layout_algebra.lifting import lift
from layout_algebra.recover import canonical_without
from layout_algebra.slice_copy import CopyTable, SliceCopy
from layout_algebra.views import view_of

_NOTHING = np.empty((0, 2), dtype=np.int64)


def canonical(copies: Iterable[SliceCopy], shape: Sequence[int]) -> CopyTable:
    """The canonical form of some slice copies of one parameter, without listing their ids.

    Parameters
    ----------
    copies
        In any order, with disjoint targets.
    shape
        The parameter's shape.

    Returns
    -------
    CopyTable
        The same ids. ``canonical(p, shape).rows`` equals ``canonical(q, shape).rows`` if and only if p and q give
        every element the same id; both equal ``canonical_of_ids(ids)``.

    Raises
    ------
    MapError
        If targets overlap or leave the parameter, or an id is below 1.
    """
    return canonical_table(CopyTable.of(copies), shape)


def canonical_table(table: CopyTable, shape: Sequence[int]) -> CopyTable:
    """``canonical`` of slice copies that are a table already."""
    if not len(table):
        return CopyTable.empty()
    one = _one_rectangle(table.rows[0].tolist(), shape) if len(table) == 1 else None
    return canonical_without(lift(table), _NOTHING, shape) if one is None else one


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
