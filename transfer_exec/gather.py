"""Gather tables: which tensor elements stand where in a buffer, round by round.

A row says that ``count`` x ``length`` elements of one tensor, at flat indices ``index + i * index_step + j *
index_stride``, stand at bytes ``offset + i * offset_step + j * offset_stride`` of one buffer. Packing reads the
elements, assembling writes them. A transposed matrix of any size is one row:

::

    tensor[4, 3], its transpose in the buffer, 2 bytes an element
    index 0, offset 0, length 3, index_stride 1, offset_stride 8, count 4, index_step 3, offset_step 2

A program has such rows once for all rounds, as *templates*: the offset of a template counts elements among the ids of
its route. A round has a window of those ids, so it takes a part of one line of a template, whole lines and a part of
another, however many lines there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges
from transfer_exec.grids import cut_grids
from transfer_exec.parts import pieces_of
from transfer_exec.regions import Layout


class Column(IntEnum):
    """Columns of a gather table. In a template BUFFER is a part, and offsets count elements of the part's route."""

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


_INDEX_AXES = (Column.LENGTH, Column.INDEX_STRIDE, Column.OFFSET_STRIDE)
_STEP_AXES = (Column.COUNT, Column.INDEX_STEP, Column.OFFSET_STEP)
_LIKE = (Column.TENSOR, Column.BUFFER, Column.CODE, Column.INDEX_STRIDE, Column.OFFSET_STRIDE)
_WINDOW = (Column.OFFSET, Column.LENGTH, Column.OFFSET_STRIDE, Column.COUNT, Column.OFFSET_STEP)


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


def cut_by_round(templates: IdArray, layouts: Sequence[Layout]) -> GatherTable:
    """The rows of every round.

    Parameters
    ----------
    templates
        Shape ``(n, 11)``; lines one behind the other, as ``make_templates`` gives them.
    layouts
        Of the worker's four buffers; parts are counted through in the order of `Buffer`.
    """
    counts = [len(layout.routes) for layout in layouts]
    spread = [pieces_of(layout.schedule) for layout in layouts]
    whose, low, size, number, inside = np.concatenate(spread, axis=1)
    whose += np.repeat(np.cumsum(counts) - counts, [each.shape[1] for each in spread])
    # All parts' ids on one line, so that one search finds the pieces that each template reaches.
    elements = np.zeros(sum(counts), dtype=np.int64)
    np.add.at(elements, whose, size)
    line = np.cumsum(elements) - elements
    last_rank = templates[:, Column.OFFSET].copy()
    for extent, _, step in (_INDEX_AXES, _STEP_AXES):
        last_rank += (templates[:, extent] - 1) * templates[:, step]
    begin = line[templates[:, Column.BUFFER]]
    first, last = (
        np.searchsorted(line[whose] + low, begin + rank, side="right") - 1
        for rank in (templates[:, Column.OFFSET], last_rank)
    )
    of = np.repeat(np.arange(len(templates)), last - first + 1)
    piece = expand_ranges(first, last - first + 1)
    blocks = cut_grids(templates[of][:, _WINDOW], low[piece], (low + size)[piece])
    blocks = blocks[np.argsort(number[piece[blocks[:, 0]]], kind="stable")]
    owner, line_of, lines, column, columns = blocks.T
    rows, piece = templates[of[owner]], piece[owner]
    part = rows[:, Column.BUFFER].copy()
    rows[:, Column.LENGTH], rows[:, Column.COUNT] = columns, lines
    rows[:, Column.INDEX] += line_of * rows[:, Column.INDEX_STEP] + column * rows[:, Column.INDEX_STRIDE]
    rows[:, Column.OFFSET] += line_of * rows[:, Column.OFFSET_STEP] + column * rows[:, Column.OFFSET_STRIDE]
    rows[:, Column.OFFSET] += (inside - low)[piece]
    width = np.concatenate([layout.item_bytes for layout in layouts])[part]
    for field in (Column.OFFSET, Column.OFFSET_STRIDE, Column.OFFSET_STEP):
        rows[:, field] *= width
    rows[:, Column.OFFSET] += np.concatenate([layout.offsets for layout in layouts])[part, number[piece]]
    rows[:, Column.BUFFER] = np.repeat(np.arange(len(layouts)), counts)[part]
    bounds = np.searchsorted(number[piece], np.arange(layouts[0].schedule.rounds + 1))
    return GatherTable(rows, bounds.astype(np.int64))


def make_templates(rows: IdArray) -> IdArray:
    """Fold rows whose offsets count ids of a route, and put their lines one behind the other.

    Parameters
    ----------
    rows
        Shape ``(n, 11)``; ``BUFFER`` names a route.

    Returns
    -------
    numpy.ndarray
        Rows for the same elements, in which no stride of offsets is negative, and each line's last offset is before the
        next line's first.
    """
    folded = fold_rows(np.zeros(len(rows), dtype=np.int64), rows)[1].copy()
    for extent, along, across in (_INDEX_AXES, _STEP_AXES):
        back = folded[:, across] < 0
        for start, step in ((Column.INDEX, along), (Column.OFFSET, across)):
            folded[back, start] += ((folded[:, extent] - 1) * folded[:, step])[back]
            folded[back, step] *= -1
    length, stride, count, step = folded[:, _WINDOW[1:]].T
    turned = (count > 1) & ((length - 1) * stride >= step) & ((count - 1) * step < stride)
    _turn(folded, turned)
    length, stride, count, step = folded[:, _WINDOW[1:]].T
    woven = (count > 1) & ((length - 1) * stride >= step)
    return np.concatenate([folded[~woven], _lines(folded[woven])])


def _turn(rows: IdArray, chosen: npt.NDArray[np.bool_]) -> None:
    """Exchange the two axes of some rows, in place."""
    for one, other in zip(_INDEX_AXES, _STEP_AXES, strict=True):
        rows[chosen, one], rows[chosen, other] = rows[chosen, other], rows[chosen, one]


def _lines(rows: IdArray) -> IdArray:
    """Every line as a row of its own, along the axis that leaves fewer."""
    _turn(rows, rows[:, Column.LENGTH] < rows[:, Column.COUNT])
    of = np.repeat(np.arange(len(rows)), rows[:, Column.COUNT])
    line = expand_ranges(np.zeros(len(rows), dtype=np.int64), rows[:, Column.COUNT])
    out = rows[of]
    for start, step in ((Column.INDEX, Column.INDEX_STEP), (Column.OFFSET, Column.OFFSET_STEP)):
        out[:, start] += line * out[:, step]
        out[:, step] = 0
    out[:, Column.COUNT] = 1
    return out


def fold_rows(rounds: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    """Join rows that continue each other and turn regular progressions of equal rows into one.

    Tried in order of indices and in order of offsets, and the shorter kept for every tensor.

    Parameters
    ----------
    rounds
        The round of every row; shape ``(n,)``.
    rows
        Shape ``(n, 11)``. Those that have a second axis already stay as they are.

    Returns
    -------
    tuple
        Rounds, ascending, and rows that move the same elements.
    """
    if not len(rows):
        return rounds, rows
    rows = _flat(rows)
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
    single = (rows[:, Column.LENGTH] == 1) & (rows[:, Column.COUNT] == 1)
    rounds, rows = _progressions(rounds, rows, single, _INDEX_AXES)
    return _progressions(rounds, rows, rows[:, Column.COUNT] == 1, _STEP_AXES)


def _flat(rows: IdArray) -> IdArray:
    """Rows with one axis less where the second goes on from the first, or the first has one element."""
    rows = rows.copy()
    thin = (rows[:, Column.LENGTH] == 1) & (rows[:, Column.COUNT] > 1)
    _turn(rows, thin)
    goes_on = rows[:, Column.COUNT] > 1
    for along, across in ((Column.INDEX_STRIDE, Column.INDEX_STEP), (Column.OFFSET_STRIDE, Column.OFFSET_STEP)):
        goes_on &= rows[:, across] == rows[:, Column.LENGTH] * rows[:, along]
    rows[goes_on, Column.LENGTH] *= rows[goes_on, Column.COUNT]
    flat = goes_on | (rows[:, Column.COUNT] == 1)
    rows[flat, Column.COUNT] = 1
    rows[flat, Column.INDEX_STEP] = 0
    rows[flat, Column.OFFSET_STEP] = 0
    return rows


def _join(rounds: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    """One row for neighbours that continue each other in the tensor and in the buffer alike."""
    if len(rows) < 2:
        return rounds, rows
    left, right = rows[:-1], rows[1:]
    reach = left[:, Column.LENGTH]
    goes_on = np.zeros(len(rows), dtype=bool)
    goes_on[1:] = (
        (rounds[1:] == rounds[:-1])
        & (left[:, Column.COUNT] == 1)
        & (right[:, Column.COUNT] == 1)
        & _equal(left, right, _LIKE)
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
