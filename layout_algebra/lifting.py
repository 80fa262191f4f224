"""Few pieces from many: regular repeats of equal pieces become one more axis of one piece.

``lift`` works on pieces with disjoint targets. Pieces that stand one, two, ... or a period apart that is common among
them, that look alike and whose starts advance by one step, are one piece with one more axis: a stack of experts becomes
one slice copy, and a swizzle that repeats in every tile a few.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> rows = [SliceCopy(Strided(1 + 8 * e, (2,), (1,)), Strided(4 * e, (2,), (1,))) for e in range(3)]
>>> [str(copy) for copy in lift(CopyTable.of(rows)).slice_copies()]
['0+(3:4,2:1) <- 1+(3:8,2:1)']

Where a parameter has very many pieces, those of one slab of it are lifted before the next slab's are there
(``lift_slabs``), so that a regular swizzle of any size takes little memory. The slabs depend on the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from layout_algebra._lift_kernels import join_continued, merged, repeats, signatures, tidy_axes
from layout_algebra.dtypes import IdArray
from layout_algebra.slice_copy import CopyTable

MAX_AXES = 8
MANY_PIECES = 1 << 18
"""With more pieces than this a parameter is lifted slab by slab first."""

_SLAB_ELEMENTS = 1 << 20
_MAX_PERIOD = 8
_FAR_PERIODS = 4


def lift(table: CopyTable) -> CopyTable:
    """Merge regular repeats into axes, fuse axes that continue each other, and drop unit axes.

    Two pieces alone are no repeat: any two equal shapes would merge, and a gate half and an up half read better as the
    two copies they are.

    Parameters
    ----------
    table
        Pieces with disjoint targets, as recovery emits them.

    Returns
    -------
    CopyTable
        The same ids in at most as many pieces, sorted by target start, with as few axes as the widest piece needs.
        A function of the pieces, whatever their order.
    """
    rows = _tidy(_sorted(table.rows))
    period = 1
    while (rows.shape[1] - 2) // 3 < MAX_AXES:
        found = _merge_repeats(rows, period) if period <= _MAX_PERIOD else _merge_far_repeats(rows)
        if found is not None:
            rows = _tidy(found)
            period = 1
        elif period > _MAX_PERIOD:
            break
        else:
            period += 1
    return CopyTable(rows)


def slab_elements(shape: Sequence[int]) -> int:
    """Elements of a parameter that make a slab: whole inner axes while they fit, then a power of two."""
    slab = 1
    for extent in reversed(shape):
        room = _SLAB_ELEMENTS // slab
        if extent > room:
            return slab << (room.bit_length() - 1)
        slab *= max(extent, 1)
    return slab


def lift_slabs(parts: Iterable[tuple[CopyTable, int]], shape: Sequence[int]) -> CopyTable:
    """``lift`` of pieces that arrive bit by bit.

    Parameters
    ----------
    parts
        Pieces, and a flat place: all pieces that end before it have been given. Together they have disjoint targets.
    shape
        The parameter's.

    Returns
    -------
    CopyTable
        Of at most ``MANY_PIECES`` pieces what ``lift`` makes of them all. Of more, what it makes of its results for the
        pieces that end in each slab, those joined that go on from slab to slab. A function of the pieces and the shape.
    """
    slab = slab_elements(shape)
    lifted: list[CopyTable] = []
    waiting: list[CopyTable] = []
    total = done = 0
    for table, reached in parts:
        waiting.append(table)
        total += len(table)
        if total > MANY_PIECES and reached // slab > done:
            done = reached // slab
            waiting = _lift_complete(waiting, slab, done, lifted)
    if total > MANY_PIECES:
        _lift_complete(waiting, slab, 1 << 62, lifted)
        rows = _sorted(CopyTable.concatenate(lifted).rows)
        lifted.clear()
        return lift(CopyTable(rows[: join_continued(rows)]))
    return lift(CopyTable.concatenate(waiting))


def _lift_complete(waiting: list[CopyTable], elements: int, slabs: int, lifted: list[CopyTable]) -> list[CopyTable]:
    """Lift the pieces that end in the first ``slabs`` slabs, slab by slab; gives back the others."""
    table = CopyTable.concatenate(waiting)
    waiting.clear()
    ends_in = table.bounds(of="target")[1] // elements
    order = np.argsort(ends_in, kind="stable")
    ends_in = ends_in[order]
    edges = [0, *(np.flatnonzero(np.diff(ends_in)) + 1).tolist(), len(order)]
    left = [CopyTable.empty()]
    for first, last in pairwise(edges):
        if last > first:
            part = CopyTable(table.rows[order[first:last]])
            if ends_in[first] < slabs:
                lifted.append(lift(part))
            else:
                left.append(part)
    return left


def _sorted(rows: IdArray) -> IdArray:
    """The rows by target start, in an array of their own."""
    starts = rows[:, 0]
    return rows.copy() if np.all(starts[1:] >= starts[:-1]) else rows[np.argsort(starts, kind="stable")]


def _tidy(rows: IdArray) -> IdArray:
    """Tidy the axes of rows that are nobody else's, and cut those that no row needs."""
    needed = max(1, tidy_axes(rows))
    spare = (rows.shape[1] - 2) // 3 - needed
    return np.concatenate([rows[:, :2], rows[:, 2 + 3 * spare :]], axis=1) if spare else rows


def _merge_repeats(rows: IdArray, period: int, fewest: int = 1) -> IdArray | None:
    """Merge progressions of pieces that stand ``period`` apart; None if fewer than ``fewest`` pieces would go."""
    if len(rows) <= 2 * period:
        return None
    length = np.empty(len(rows), dtype=np.int64)
    joined = repeats(rows, period, length)
    return merged(rows, period, length, len(rows) - joined) if joined >= fewest else None


def _merge_far_repeats(rows: IdArray) -> IdArray | None:
    """Merge pieces that stand one of the commonest longer periods apart, if a good part of all pieces do."""
    if len(rows) <= 3 * _MAX_PERIOD:
        return None
    signs = np.empty(len(rows) - 1, dtype=np.int64)
    signatures(rows, signs)
    fewest = max(1, len(rows) // 16)
    # Where pieces repeat so do most signatures; finding out that few do is quicker than finding which.
    if 2 * np.count_nonzero(np.diff(np.sort(signs)) == 0) < fewest:
        return None
    order = np.argsort(signs, kind="stable")
    apart = np.diff(order)[np.diff(signs[order]) == 0]
    periods, counts = np.unique(apart[apart > _MAX_PERIOD], return_counts=True)
    for period in periods[np.argsort(-counts, kind="stable")][:_FAR_PERIODS].tolist():
        found = _merge_repeats(rows, period, fewest)
        if found is not None:
            return found
    return None
