"""Rows made uniform, and cut into shares of equal bytes."""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.conversions import SOURCE_BYTES, TARGET_BYTES
from transfer_exec.kernels.base import RowColumn

_LINE = 64


def uniform_rows(rows: IdArray) -> IdArray:
    """Rows that copy the same elements, whose inner axis is contiguous on both sides, or in the source, if it can be.

    An inner axis of one element changes places with the outer one, which is then one element long.
    """
    rows = rows[(rows[:, RowColumn.LENGTH] > 0) & (rows[:, RowColumn.COUNT] > 0)]
    of, to = SOURCE_BYTES[rows[:, RowColumn.CODE]], TARGET_BYTES[rows[:, RowColumn.CODE]]
    several = np.flatnonzero(rows[:, RowColumn.COUNT] > 1)
    some = rows[several]
    inner, outer = (
        (some[:, source] == of[several]).astype(np.int64) * (2 + 2 * (some[:, target] == to[several])) * (size > 1)
        for source, target, size in (
            (RowColumn.SOURCE_STRIDE, RowColumn.TARGET_STRIDE, some[:, RowColumn.LENGTH]),
            (RowColumn.SOURCE_STEP, RowColumn.TARGET_STEP, some[:, RowColumn.COUNT]),
        )
    )
    turned = (outer > inner) | (some[:, RowColumn.LENGTH] == 1)
    rows[several[turned]] = some[turned][:, [0, 2, 1, 3, 5, 4, 7, 6, 8]]
    single = rows[:, RowColumn.LENGTH] == 1
    rows[single, RowColumn.SOURCE_STRIDE], rows[single, RowColumn.TARGET_STRIDE] = of[single], to[single]
    return rows


def split_evenly(rows: IdArray, shares: int) -> list[IdArray]:
    """Cut rows, in their order, into shares of about equal bytes; long rows are cut where a cache line begins."""
    sizes = _bytes_of(rows)
    ends = np.cumsum(sizes)
    cuts = ends[-1] * np.arange(1, shares) // shares
    of_cut = np.searchsorted(ends, cuts, side="right")
    out, begin, pending = [], 0, rows[:0]
    for number in range(shares - 1):
        row = int(of_cut[number])
        if number == 0 or row != int(of_cut[number - 1]):
            parts = [rows[begin:row]] if number == 0 else [pending, rows[begin:row]]
            rest, done = rows[row : row + 1], int(ends[row] - sizes[row])
        else:
            parts, rest = [], pending
        head, rest = _cut_row(rest, int(cuts[number]) - done)
        done += int(_bytes_of(head).sum())
        out.append(np.concatenate([*parts, head]))
        begin, pending = row + 1, rest
    out.append(np.concatenate([pending, rows[begin:]]))
    return [share for share in out if len(share)]


def _bytes_of(rows: IdArray) -> IdArray:
    widths = np.maximum(SOURCE_BYTES, TARGET_BYTES)[rows[:, RowColumn.CODE]]
    sizes: IdArray = rows[:, RowColumn.LENGTH] * rows[:, RowColumn.COUNT] * widths
    return sizes


def _cut_row(row: IdArray, size: int) -> tuple[IdArray, IdArray]:
    """The part of a row (or of none) with its first ``size`` bytes, roughly, and the rest; either may be empty."""
    if not len(row):
        return row, row
    outer = int(row[0, RowColumn.COUNT]) > 1
    extent, source, target = (
        (RowColumn.COUNT, RowColumn.SOURCE_STEP, RowColumn.TARGET_STEP)
        if outer
        else (RowColumn.LENGTH, RowColumn.SOURCE_STRIDE, RowColumn.TARGET_STRIDE)
    )
    total, whole = int(row[0, extent]), int(_bytes_of(row)[0])
    at = total * size // whole
    item = int(TARGET_BYTES[row[0, RowColumn.CODE]])
    if int(row[0, target]) == item:
        at -= (int(row[0, RowColumn.TARGET]) + at * item) % _LINE // item
    at = min(max(at, 0), total)
    head, tail = row.copy(), row.copy()
    head[0, extent] = at
    tail[0, extent] = total - at
    tail[0, RowColumn.SOURCE] += at * row[0, source]
    tail[0, RowColumn.TARGET] += at * row[0, target]
    return head[: int(at > 0)], tail[: int(at < total)]
