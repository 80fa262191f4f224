"""Gather tables: which tensor elements stand where in a buffer, round by round.

A row says that ``count`` x ``length`` elements of one tensor, at flat indices ``index + i * index_step + j *
index_stride``, stand at bytes ``offset + i * offset_step + j * offset_stride`` of one buffer. Packing reads the
elements, assembling writes them. A transposed matrix of any size is one row:

::

    tensor[4, 3], its transpose in the buffer, 2 bytes an element
    index 0, offset 0, length 3, index_stride 1, offset_stride 8, count 4, index_step 3, offset_step 2

Tables come from strips (ids that stand at evenly spaced indices of one tensor), cut by route and round, then folded:
pieces that continue each other are joined, and regular progressions of equal pieces become one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.strips import StripTable
from transfer_exec.plan import Plan
from transfer_exec.regions import Buffer, Layout, part_intervals


class Column(IntEnum):
    """Columns of a gather table."""

    TENSOR = 0
    BUFFER = 1
    CODE = 2
    LENGTH = 3
    INDEX_STRIDE = 4
    OFFSET_STRIDE = 5
    COUNT = 6
    INDEX_STEP = 7
    OFFSET_STEP = 8
    INDEX = 9
    OFFSET = 10


@dataclass(frozen=True, slots=True, eq=False)
class GatherTable:
    """Rows for every round.

    Attributes
    ----------
    rows
        int64, shape ``(n, 11)``, columns as in `Column`.
    bounds
        Rows ``bounds[k]:bounds[k + 1]`` belong to round k; int64, shape ``(rounds + 1,)``.
    """

    rows: IdArray
    bounds: IdArray

    def of_round(self, number: int) -> IdArray:
        """The rows of one round."""
        return self.rows[self.bounds[number] : self.bounds[number + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What the ids of a checkpoint are, for a table of one worker.

    Attributes
    ----------
    strips
        Where ids live; parameter numbers are positions among the worker's tensors.
    edges
        First ids of stretches of one wire dtype, ascending.
    dtype_of_edge
        The dtype's number of every stretch.
    codes
        Conversion by tensor and dtype number; -1 where there is none. Shape ``(tensors, dtypes)``.
    wire_bytes
        Bytes of an element in the buffer, by dtype number.
    """

    strips: StripTable
    edges: IdArray
    dtype_of_edge: IdArray
    codes: IdArray
    wire_bytes: IdArray


def gather_table(plan: Plan, sources: Sources, buffers: Sequence[tuple[Buffer, Layout]]) -> GatherTable:
    """The table of everything that a worker's strips have in common with the routes that pass its buffers.

    Parameters
    ----------
    plan
        Where the routes' ids and rounds are.
    sources
        The worker's tensors.
    buffers
        Buffers to read or fill, and what stands where in them.

    Returns
    -------
    GatherTable
        One or more rows for every maximal regular piece; every element of a strip whose id is in a route is in
        exactly one row.
    """
    pieces = [_pieces(plan, sources, buffer, layout) for buffer, layout in buffers]
    rounds = np.concatenate([np.empty(0, dtype=np.int64), *(number for number, _ in pieces)])
    rows = np.concatenate([np.empty((0, len(Column)), dtype=np.int64), *(rows for _, rows in pieces)])
    rounds, rows = fold_rows(rounds, rows)
    bounds = np.searchsorted(rounds, np.arange(plan.rounds + 1)).astype(np.int64)
    return GatherTable(rows, bounds)


def _pieces(plan: Plan, sources: Sources, buffer: Buffer, layout: Layout) -> tuple[IdArray, IdArray]:
    """Round and row of every strip's part in every route's part."""
    intervals, about = part_intervals(plan, layout.routes)
    intervals, about = _split(intervals, about, sources.edges)
    cut, _ = sources.strips.within(intervals)
    ids, length, tensor, index, stride = cut.rows.T
    of = np.searchsorted(intervals[:, 0], ids, side="right") - 1
    route, number, rank = about[of].T
    kind = sources.dtype_of_edge[np.searchsorted(sources.edges, ids, side="right") - 1]
    width = sources.wire_bytes[kind]
    rows = np.empty((len(cut.rows), len(Column)), dtype=np.int64)
    rows[:, Column.TENSOR] = tensor
    rows[:, Column.BUFFER] = buffer.value
    rows[:, Column.CODE] = sources.codes[tensor, kind]
    rows[:, Column.LENGTH] = length
    rows[:, Column.INDEX_STRIDE] = stride
    rows[:, Column.OFFSET_STRIDE] = width
    rows[:, Column.COUNT] = 1
    rows[:, Column.INDEX_STEP] = 0
    rows[:, Column.OFFSET_STEP] = 0
    rows[:, Column.INDEX] = index
    rows[:, Column.OFFSET] = layout.offsets[route, number] + (rank + ids - intervals[of, 0]) * width
    return number, rows


def _split(intervals: IdArray, about: IdArray, edges: IdArray) -> tuple[IdArray, IdArray]:
    """Cut intervals wherever an edge falls inside one."""
    if not len(intervals):
        return intervals, about
    of_edge = np.searchsorted(intervals[:, 0], edges, side="right") - 1
    inside = (of_edge >= 0) & (edges > intervals[of_edge, 0]) & (edges < intervals[of_edge, 1])
    starts = np.concatenate([intervals[:, 0], edges[inside]])
    owner = np.concatenate([np.arange(len(intervals)), of_edge[inside]])
    order = np.argsort(starts, kind="stable")
    starts, owner = starts[order], owner[order]
    stops = intervals[owner, 1].copy()
    same = owner[1:] == owner[:-1]
    stops[:-1][same] = starts[1:][same]
    facts = about[owner].copy()
    facts[:, 2] += starts - intervals[owner, 0]
    return np.stack([starts, stops], axis=1), facts


def fold_rows(rounds: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    """Join rows that continue each other and turn regular progressions of equal rows into one.

    Tried in order of indices and in order of offsets, and the shorter kept for every tensor.

    Parameters
    ----------
    rounds
        The round of every row; shape ``(n,)``.
    rows
        Rows with a count of 1; shape ``(n, 11)``.

    Returns
    -------
    tuple
        Rounds, ascending, and rows that move the same elements.
    """
    if not len(rows):
        return rounds, rows
    folded = []
    for first, second in ((Column.INDEX, Column.OFFSET), (Column.OFFSET, Column.INDEX)):
        order = np.lexsort((rows[:, second], rows[:, first], rows[:, Column.BUFFER], rows[:, Column.TENSOR], rounds))
        folded.append(_fold(rounds[order], rows[order]))
    tensors = int(rows[:, Column.TENSOR].max()) + 1
    by_index, by_offset = (np.bincount(table[:, Column.TENSOR], minlength=tensors) for _, table in folded)
    chosen = by_index <= by_offset
    kept = [chosen[folded[0][1][:, Column.TENSOR]], ~chosen[folded[1][1][:, Column.TENSOR]]]
    out_rounds = np.concatenate([number[keep] for (number, _), keep in zip(folded, kept, strict=True)])
    out = np.concatenate([table[keep] for (_, table), keep in zip(folded, kept, strict=True)])
    order = np.lexsort((out[:, Column.OFFSET], out[:, Column.INDEX], out[:, Column.TENSOR], out_rounds))
    return out_rounds[order], out[order]


def _fold(rounds: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    rounds, rows = _join(rounds, rows)
    rounds, rows = _progressions(
        rounds, rows, rows[:, Column.LENGTH] == 1, (Column.LENGTH, Column.INDEX_STRIDE, Column.OFFSET_STRIDE)
    )
    everything = np.ones(len(rows), dtype=bool)
    return _progressions(rounds, rows, everything, (Column.COUNT, Column.INDEX_STEP, Column.OFFSET_STEP))


def _join(rounds: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    """One row for neighbours that continue each other in the tensor and in the buffer alike."""
    if len(rows) < 2:
        return rounds, rows
    left, right = rows[:-1], rows[1:]
    reach = left[:, Column.LENGTH]
    goes_on = np.zeros(len(rows), dtype=bool)
    goes_on[1:] = (
        (rounds[1:] == rounds[:-1])
        & _equal(left, right, (Column.TENSOR, Column.BUFFER, Column.CODE, Column.INDEX_STRIDE))
        & (right[:, Column.INDEX] == left[:, Column.INDEX] + reach * left[:, Column.INDEX_STRIDE])
        & (right[:, Column.OFFSET] == left[:, Column.OFFSET] + reach * left[:, Column.OFFSET_STRIDE])
    )
    heads = np.flatnonzero(~goes_on)
    out = rows[heads].copy()
    out[:, Column.LENGTH] = np.add.reduceat(rows[:, Column.LENGTH], heads)
    return rounds[heads], out


def _progressions(
    rounds: IdArray, rows: IdArray, allowed: npt.NDArray[np.bool_], axis: tuple[Column, Column, Column]
) -> tuple[IdArray, IdArray]:
    """Turn three or more equal rows whose indices and offsets advance by one step into one row with an axis more."""
    count = len(rows)
    if count < 3:
        return rounds, rows
    static = tuple(column for column in Column if column not in (Column.INDEX, Column.OFFSET))
    linked = allowed[1:] & allowed[:-1] & (rounds[1:] == rounds[:-1]) & _equal(rows[:-1], rows[1:], static)
    steps = np.diff(rows[:, [Column.INDEX, Column.OFFSET]], axis=0)
    # Link i joins rows i and i + 1; it goes on from link i - 1 when both hold and step alike.
    goes_on = np.zeros(count - 1, dtype=bool)
    goes_on[1:] = linked[1:] & linked[:-1] & np.all(steps[1:] == steps[:-1], axis=1)
    in_chain = goes_on.copy()
    in_chain[:-1] |= goes_on[1:]
    # A row that two chains share stays with the earlier one, which costs the later one its first link.
    lost = np.zeros(count - 1, dtype=bool)
    lost[1:] = (in_chain & ~goes_on)[1:] & in_chain[:-1]
    in_chain &= ~lost
    joined = np.zeros(count, dtype=bool)
    joined[1:] = in_chain
    heads = np.flatnonzero(~joined)
    counts = np.diff(np.append(heads, count))
    out = rows[heads].copy()
    several = counts > 1
    out[several, axis[0]] = counts[several]
    out[several, axis[1]] = steps[heads[several], 0]
    out[several, axis[2]] = steps[heads[several], 1]
    return rounds[heads], out


def _equal(left: IdArray, right: IdArray, columns: Sequence[Column]) -> npt.NDArray[np.bool_]:
    """Whether pairs of rows agree in some columns."""
    equal: npt.NDArray[np.bool_] = np.all(left[:, columns] == right[:, columns], axis=1)
    return equal
