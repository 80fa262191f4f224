"""Where ids live: stretches of consecutive ids and the parameter elements that hold them.

A ``SourceMap`` answers "which id does this parameter element hold"; packing and assembling ask the other way
round. A strip ``(id, length, parameter, index, stride)`` says that ids ``id .. id + length - 1`` are held by flat
elements ``index, index + stride, ...`` of one parameter. Strips are one-dimensional whatever the layout: a
transposed matrix is one strip a row of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import overlaps
from layout_algebra.slice_copy import CopyTable


@dataclass(frozen=True, slots=True, eq=False)
class StripTable:
    """Strips sorted by id.

    Attributes
    ----------
    rows
        int64, shape ``(n, 5)``: first id, length, parameter's position, flat index of the first id, index step.
        Several strips may hold one id: several elements may be fed from it.
    """

    rows: IdArray

    @staticmethod
    def of(tables: Sequence[CopyTable]) -> StripTable:
        """The strips of parameters 0, 1, ... whose copies these are."""
        parts = [_strips_of(table, position) for position, table in enumerate(tables) if len(table)]
        if not parts:
            return StripTable(np.empty((0, 5), dtype=np.int64))
        rows = np.concatenate(parts)
        rows = rows[np.lexsort((rows[:, 3], rows[:, 2], rows[:, 0]))]
        return StripTable(_fuse(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def disjoint(self) -> StripTable:
        """One home for each id: what an earlier strip already holds is cut from the later ones."""
        rows = self.rows
        if not len(rows):
            return self
        stops = rows[:, 0] + rows[:, 1]
        reach = np.concatenate([rows[:1, 0], np.maximum.accumulate(stops)[:-1]])
        cut = np.maximum(reach - rows[:, 0], 0)
        kept = cut < rows[:, 1]
        out = rows[kept].copy()
        out[:, 0] += cut[kept]
        out[:, 1] -= cut[kept]
        out[:, 3] += cut[kept] * out[:, 4]
        return StripTable(out)

    def within(self, intervals: IdArray) -> tuple[StripTable, IdArray]:
        """Cut the strips to sorted disjoint id intervals.

        Parameters
        ----------
        intervals
            Half-open, ascending, disjoint; shape ``(m, 2)``.

        Returns
        -------
        tuple
            The parts of strips inside the intervals, and for each the rank of its first id among the
            intervals' ids, which is where that id stands in a buffer that holds them in order.
        """
        spans = np.stack([self.rows[:, 0], self.rows[:, 0] + self.rows[:, 1]], axis=1)
        mine, theirs = overlaps(spans, intervals)
        starts = np.maximum(spans[mine, 0], intervals[theirs, 0])
        stops = np.minimum(spans[mine, 1], intervals[theirs, 1])
        out = self.rows[mine].copy()
        out[:, 3] += (starts - out[:, 0]) * out[:, 4]
        out[:, 0] = starts
        out[:, 1] = stops - starts
        lengths = intervals[:, 1] - intervals[:, 0]
        ranks = (np.cumsum(lengths) - lengths)[theirs] + starts - intervals[theirs, 0]
        return StripTable(out), ranks


def _strips_of(table: CopyTable, position: int) -> IdArray:
    """Unroll every copy along an axis whose ids are consecutive; single elements where there is none."""
    consecutive = np.abs(table.source_strides) == 1
    score = np.where(consecutive, table.extents, 0)
    inner = np.where(consecutive.any(axis=1), np.argmax(score, axis=1), -1)
    flat = table.expand(inner).rows
    target, source, length, stride, step = flat.T
    backward = step < 0
    rows = np.empty((len(flat), 5), dtype=np.int64)
    rows[:, 0] = np.where(backward, source - (length - 1), source)
    rows[:, 1] = length
    rows[:, 2] = position
    rows[:, 3] = np.where(backward, target + (length - 1) * stride, target)
    rows[:, 4] = np.where(length == 1, 1, np.where(backward, -stride, stride))
    return rows


def _fuse(rows: IdArray) -> IdArray:
    """Join neighbouring strips of index step 1 that continue each other in ids and elements alike."""
    if len(rows) < 2:
        return rows
    ids, length, owner, index, stride = rows.T
    goes_on = np.zeros(len(rows), dtype=bool)
    goes_on[1:] = (
        (ids[1:] == ids[:-1] + length[:-1])
        & (owner[1:] == owner[:-1])
        & (index[1:] == index[:-1] + length[:-1])
        & (stride[1:] == 1)
        & (stride[:-1] == 1)
    )
    heads = np.flatnonzero(~goes_on)
    out = rows[heads].copy()
    out[:, 1] = np.add.reduceat(length, heads)
    return out
