"""From what a traced memory holds to one parameter's part of a source map.

>>> from adapters.trace_moves import Moves
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> moves = Moves(CheckpointSpace([TensorSpec("w", (4, 2), "F32")]))
>>> found = settle(moves.labels, moves.view(moves.checkpoint_tensor("w").t()), (2, 4), "F32")
>>> [str(copy) for copy in found.entry.copies.slice_copies()], found.operations
(['0+(2:4,4:1) <- 1+(2:1,4:2)'], ())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adapters.trace_lattice import Grid, Irregular, nested
from adapters.trace_memory import View
from adapters.trace_moves import row_major
from adapters.trace_pieces import CONSTANT, Copied, Labels, Piece, Untouched, sources_of
from layout_algebra.canonical import canonical_table
from layout_algebra.dtypes import IdArray
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """One parameter's map, and the operations that its opaque elements went through, in order."""

    entry: ParameterMap
    operations: tuple[str, ...]


def settle(labels: Labels, view: View | None, shape: tuple[int, ...], dtype: str) -> Settled:
    """Read off a live tensor what it holds at the end.

    Parameters
    ----------
    view
        Its elements, or None if nothing of the checkpoint ever went there.
    shape, dtype
        Of the parameter.

    Raises
    ------
    TracingError
        If its elements are too irregular for pieces and too many to list.
    """
    copies: list[IdArray] = []
    opaque: list[IdArray] = []
    steps: set[int] = set()
    tensors: set[int] = set()
    for piece in _pieces(view, dtype) if view is not None and view.elements else ():
        good, bad = [], []
        for number, found in sources_of(labels, piece).items():
            label = labels[number]
            if isinstance(label, Copied) and label.holds(dtype):
                good.append(number)
            elif not isinstance(label, Untouched):
                bad.append(number)
                tensors |= found
                steps.update(labels.seen_as(number, dtype))
        if piece.table is not None:
            index, number_of = piece.grid.pairs()
            held = piece.table.labels[number_of]
            copied = np.isin(held, good)
            copies.append(_runs_of(index[copied], piece.table.ids[number_of[copied]]))
            lost = index[np.isin(held, bad)]
            opaque.append(np.stack([lost, lost + 1], axis=1))
        elif good:
            copies.append(_row_of(piece.grid))
        elif bad:
            opaque.append(_intervals_of(piece.grid))
    rows = canonical_table(CopyTable(_stacked(copies)), shape)
    lost_runs = RunTable.from_intervals(np.concatenate([np.empty((0, 2), dtype=np.int64), *opaque]))
    names = tuple(labels.space.specs[position].name for position in sorted(tensors))
    return Settled(ParameterMap(shape, dtype, rows, lost_runs, names), labels.chain(steps))


def _pieces(view: View, dtype: str) -> list[Piece]:
    """What a view holds, as pieces at flat indices."""
    counts = row_major(view.shape)
    try:
        found = []
        for grid in nested(view.start, 0, tuple(zip(view.shape, view.strides, counts, strict=True))):
            found += view.content.touched(grid, view.width, dtype)
        return found
    except Irregular:
        table = view.content.listed(view.places(), view.width)
        return [Piece(Grid(0, 0, ((view.elements, 1, 1),)), 1, CONSTANT, table)]


def _row_of(grid: Grid) -> IdArray:
    """One row of a copy table."""
    axes = grid.axes or ((1, 0, 0),)
    return np.array([[grid.start, grid.other, *(number for axis in axes for number in axis)]], dtype=np.int64)


def _runs_of(index: IdArray, ids: IdArray) -> IdArray:
    """Flat indices and their ids as rows of one axis; not always as few as possible."""
    order = np.argsort(index, kind="stable")
    index, ids = index[order], ids[order]
    if not len(index):
        return np.empty((0, 5), dtype=np.int64)
    steps = np.diff(ids)
    cuts = np.ones(len(index), dtype=bool)
    cuts[1:] = np.diff(index) != 1
    cuts[2:] |= steps[1:] != steps[:-1]
    heads = np.flatnonzero(cuts)
    out = np.zeros((len(heads), 5), dtype=np.int64)
    out[:, 0], out[:, 1] = index[heads], ids[heads]
    out[:, 2] = np.diff(np.concatenate([heads, [len(index)]]))
    several = out[:, 2] > 1
    out[:, 3] = several
    out[several, 4] = steps[heads[several]]
    return out


def _intervals_of(grid: Grid) -> IdArray:
    """The places of a grid as half-open intervals, one for each stretch of consecutive ones."""
    inner = grid.axes[-1] if grid.axes and grid.axes[-1][1] == 1 else None
    outer = grid._replace(axes=grid.axes[:-1] if inner else grid.axes)
    starts = outer.pairs()[0]
    return np.stack([starts, starts + (inner[0] if inner else 1)], axis=1)


def _stacked(rows: Sequence[IdArray]) -> IdArray:
    """Rows of copy tables with different numbers of axes as one array: unit axes stand in front."""
    width = max([5, *(one.shape[1] for one in rows)])
    out: npt.NDArray[np.int64] = np.zeros((sum(len(one) for one in rows), width), dtype=np.int64)
    out[:, 2::3] = 1
    begin = 0
    for one in rows:
        part = out[begin : begin + len(one)]
        part[:, :2] = one[:, :2]
        part[:, width - (one.shape[1] - 2) :] = one[:, 2:]
        begin += len(one)
    return out
