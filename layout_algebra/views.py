"""A parameter as a matrix: which rows and columns, and any slice copy as rectangles of it.

Rows of the matrix are the parameter's last axis (its last longer than one), so that flat indices stay what they are.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> table = CopyTable.of([SliceCopy(Strided(1, (10,), (1,)), Strided(2, (10,), (1,)))])
>>> rectangles_in_view(table, 4)[:, :7].tolist()        # row, column, rows, columns, id, step per row and column
[[0, 2, 1, 2, 1, 0, 1], [1, 0, 2, 4, 3, 4, 1]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.slice_copy import CopyTable


def view_of(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's shape as (rows, columns): columns are its last axis longer than one.

    >>> view_of((4, 3, 2, 1)), view_of((7,)), view_of(()), view_of((3, 0))
    ((12, 2), (1, 7), (1, 1), (0, 1))
    """
    extents = [extent for extent in shape if extent != 1]
    if 0 in extents:
        return 0, 1
    return math.prod(extents[:-1]), extents[-1] if extents else 1


def rectangles_in_view(table: CopyTable, width: int) -> IdArray:
    """Any slice copies as affine rectangles of a matrix with rows of ``width`` elements.

    An axis that walks along a row and one that walks down a column are kept, all others are unrolled, and runs that go
    past the end of a row are cut there.

    Returns
    -------
    ndarray
        int64, shape ``(n, 8)``: row, column, rows, columns, id, step per row, step per column, and a 1.
    """
    rows = forward(table)
    extents, target = rows[:, 2::3], rows[:, 3::3]
    along = _first_axis((target == 1) & (extents > 1))
    down = _first_axis((target == width) & (extents > 1) & (width > 1))
    plain = _unroll(rows, along, down)
    wraps = (plain[:, 0] % width + plain[:, 4] > width) & (plain[:, 2] > 1)
    if wraps.any():
        # A rectangle that leaves the matrix on the right comes back a row lower: take it row by row.
        wrapped = plain[wraps]
        repeats = wrapped[:, 2]
        each = np.repeat(wrapped, repeats, axis=0)
        step = np.arange(len(each)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        each[:, 0] += step * width
        each[:, 1] += step * each[:, 3]
        each[:, 2] = 1
        plain = np.concatenate([plain[~wraps], each])
    return _cut_at_row_ends(plain, width)


def unrolled_pieces(table: CopyTable, width: int) -> int:
    """About how many rectangles ``rectangles_in_view`` gives, run ends apart."""
    extents, target = table.extents, table.target_strides
    kept = np.ones(len(table), dtype=np.int64)
    for stride in (1, width):
        kept *= np.max(np.where(np.abs(target) == stride, extents, 1), axis=1)
    return int((table.elements // kept).sum())


def forward(table: CopyTable) -> IdArray:
    """The rows with every target stride turned positive."""
    rows = table.rows.copy()
    for axis in range(table.axes):
        extent, target, source = (rows[:, 2 + 3 * axis + k] for k in range(3))
        back = target < 0
        rows[back, 0] += (extent[back] - 1) * target[back]
        rows[back, 1] += (extent[back] - 1) * source[back]
        rows[back, 3 + 3 * axis] *= -1
        rows[back, 4 + 3 * axis] *= -1
    return rows


def _first_axis(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> IdArray:
    return np.where(mask.any(axis=1), np.argmax(mask, axis=1), -1)


def _unroll(rows: IdArray, along: IdArray, down: IdArray) -> IdArray:
    """Unroll all axes but two: columns target, id, rows, step per row, columns, step per column."""
    index = np.arange(len(rows))
    out = np.zeros((len(rows), 6), dtype=np.int64)
    out[:, :2] = rows[:, :2]
    extents = rows[:, 2::3].copy()
    for kept, place in ((down, 2), (along, 4)):
        out[:, place] = 1
        has = kept >= 0
        out[has, place] = rows[index[has], 2 + 3 * kept[has]]
        out[has, place + 1] = rows[index[has], 4 + 3 * kept[has]]
        extents[index[has], kept[has]] = 1
    repeats = np.prod(extents, axis=1, dtype=np.int64)
    of_row = np.repeat(index, repeats)
    local = np.arange(len(of_row), dtype=np.int64) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    out = out[of_row]
    for axis in range(extents.shape[1] - 1, -1, -1):
        extent = extents[of_row, axis]
        step = local % extent
        local //= extent
        out[:, 0] += step * rows[of_row, 3 + 3 * axis]
        out[:, 1] += step * rows[of_row, 4 + 3 * axis]
    return out


def _cut_at_row_ends(plain: IdArray, width: int) -> IdArray:
    """Columns of ``_unroll`` -> rectangles: a run past the end of a row becomes a head, whole rows and a tail."""
    target, number, height, step, length, slope = plain.T
    row, column = target // width, target % width
    head = np.minimum(length, width - column)
    head = np.where((column == 0) & (length > width), 0, head)
    whole = (length - head) // width
    tail = length - head - whole * width
    body = row + (head > 0)
    ones = np.ones(len(plain), dtype=np.int64)
    zeros = np.zeros(len(plain), dtype=np.int64)
    heads = np.stack([row, column, height, head, number, step, slope, ones], axis=1)
    bodies = np.stack([body, zeros, whole, width * ones, number + head * slope, width * slope, slope, ones], axis=1)
    tails = np.stack(
        [body + whole, zeros, ones, tail, number + (head + whole * width) * slope, zeros, slope, ones], axis=1
    )
    return np.concatenate([heads[head > 0], bodies[whole > 0], tails[tail > 0]])
