"""Cut ids into cells: maximal sets covered by the same layouts.

Every edge of every layout cuts the id line; a segment between two edges is covered by each layout wholly or not at
all, and segments with equal covers are one cell. Columns of a matrix would cut it once a row, so a tensor that
everybody takes in whole or in equal columns of every row is *folded*: only its first row is cut, and each segment
of that row stands for the same columns of all rows.

>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (4096, 8), "F32")])
>>> left, all_of_it = np.array([[1, 4, 8, 4096]]), np.array([[1, 32768, 32768, 1]])
>>> [(cell.runs.tolist(), cell.covered_by.tolist()) for cell in cut_cells(space, [left, all_of_it])]
[([[1, 4, 8, 4096]], [True, True]), ([[5, 4, 8, 4096]], [False, True])]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_runs, merge_intervals
from layout_algebra.space import CheckpointSpace

_Columns: TypeAlias = tuple[npt.NDArray[np.bool_], IdArray]
"""Which runs of a layout are equal columns of every row of one tensor, and the tensor that each run begins in."""


class Cell(NamedTuple):
    """Ids with one cover and one element width.

    Attributes
    ----------
    runs
        int64, shape ``(n, 4)``: start, length, stride, count; disjoint.
    covered_by
        For every layout whether it covers the cell.
    item_bits
        Width of the cell's elements in the checkpoint.
    """

    runs: IdArray
    covered_by: npt.NDArray[np.bool_]
    item_bits: int


def cut_cells(space: CheckpointSpace, layouts: Sequence[IdArray]) -> list[Cell]:
    """Cells of some layouts, ascending by first id; ids that no layout covers are in none.

    Parameters
    ----------
    space
        The checkpoint, for tensor edges and element widths.
    layouts
        Runs ``(start, length, stride, count)`` of each, in any order, overlapping or not; shape ``(n, 4)``.

    Returns
    -------
    list
        Cost grows with the runs of all layouts, and for tensors that do not fold with their rows.
    """
    if not any(len(runs) for runs in layouts):
        return []
    columns = [_in_columns(space, runs) for runs in layouts]
    period = _periods(space, layouts, columns)
    covers = [_folded_intervals(runs, *found, period) for runs, found in zip(layouts, columns, strict=True)]
    folded = np.flatnonzero(period)
    fold_starts, fold_stops = space.starts[folded], space.starts[folded + 1]
    width_changes = space.starts[np.flatnonzero(np.diff(space.item_bits)) + 1]
    edges = np.unique(
        np.concatenate(
            [
                *(cover.reshape(-1) for cover in covers),
                width_changes,
                fold_starts,
                fold_starts + period[folded],
                fold_stops,
            ]
        )
    )
    marks = np.zeros((len(edges), 2), dtype=np.uint64)
    depth = np.zeros(len(edges), dtype=np.int64)
    for number, cover in enumerate(covers):
        starts, stops = np.searchsorted(edges, cover[:, 0]), np.searchsorted(edges, cover[:, 1])
        marks[starts] += _mark(number)
        marks[stops] -= _mark(number)
        depth[starts] += 1
        depth[stops] -= 1
    labels = np.cumsum(marks, axis=0, dtype=np.uint64)
    starts = edges[:-1]
    tensor = np.clip(np.searchsorted(space.starts, starts, side="right") - 1, 0, len(space) - 1)
    repeats_a_row = (period[tensor] > 0) & (starts >= space.starts[tensor] + period[tensor])
    kept = np.flatnonzero((np.cumsum(depth)[:-1] > 0) & ~repeats_a_row)
    runs = np.ones((len(kept), 4), dtype=np.int64)
    runs[:, 0] = starts[kept]
    runs[:, 1] = runs[:, 2] = edges[kept + 1] - starts[kept]
    own = period[tensor[kept]]
    runs[own > 0, 2] = own[own > 0]
    runs[own > 0, 3] = (np.diff(space.starts)[tensor[kept]] // np.maximum(own, 1))[own > 0]
    bits = space.item_bits[tensor[kept]]
    order = np.lexsort((bits, labels[kept, 0], labels[kept, 1]))
    same = (labels[kept[order[1:]]] == labels[kept[order[:-1]]]).all(axis=1) & (bits[order[1:]] == bits[order[:-1]])
    bounds = np.concatenate([[0], np.flatnonzero(~same) + 1, [len(order)]])
    first = np.minimum.reduceat(runs[order, 0], bounds[:-1])
    members = np.stack([_contains(cover, first) for cover in covers])
    return [
        Cell(runs[order[bounds[group] : bounds[group + 1]]], members[:, group], int(bits[order[bounds[group]]]))
        for group in np.argsort(first).tolist()
    ]


def _periods(space: CheckpointSpace, layouts: Sequence[IdArray], columns: Sequence[_Columns]) -> IdArray:
    """Row length of every tensor that folds, 0 of the others: all its columns agree, and all else takes it whole."""
    period = np.zeros(len(space) + 1, dtype=np.int64)
    refused = np.zeros(len(space) + 1, dtype=np.int64)
    for runs, (fits, tensor) in zip(layouts, columns, strict=True):
        period[tensor[fits]] = runs[fits, 2]
    for runs, (fits, tensor) in zip(layouts, columns, strict=True):
        agree = period[tensor[fits]] == runs[fits, 2]
        refused[tensor[fits][~agree]] += 1
        plain = merge_intervals(expand_runs(runs[~fits]))
        first = np.searchsorted(space.starts, plain[:, 0], side="right") - 1
        last = np.searchsorted(space.starts, plain[:, 1] - 1, side="right") - 1
        refused[first[plain[:, 0] > space.starts[first]]] += 1
        refused[last[plain[:, 1] < space.starts[last + 1]]] += 1
    period[refused > 0] = 0
    return period[:-1]


def _in_columns(space: CheckpointSpace, runs: IdArray) -> _Columns:
    """Which runs are equal columns of every row of one tensor, and the tensor that each run begins in."""
    tensor = np.searchsorted(space.starts, runs[:, 0], side="right") - 1
    offset = runs[:, 0] - space.starts[tensor]
    size = space.starts[np.minimum(tensor + 1, len(space))] - space.starts[tensor]
    fits = (runs[:, 3] > 1) & (offset + runs[:, 1] <= runs[:, 2]) & (runs[:, 2] * runs[:, 3] == size)
    return fits, tensor


def _folded_intervals(runs: IdArray, fits: npt.NDArray[np.bool_], tensor: IdArray, period: IdArray) -> IdArray:
    """A layout's intervals, of folded tensors only those of the first row."""
    folds = fits & (period[np.minimum(tensor, len(period) - 1)] > 0)
    return merge_intervals(np.concatenate([_plain(runs[folds]), expand_runs(runs[~folds])]))


def _plain(runs: IdArray) -> IdArray:
    return np.stack([runs[:, 0], runs[:, 0] + runs[:, 1]], axis=1)


def _contains(intervals: IdArray, ids: IdArray) -> npt.NDArray[np.bool_]:
    position = np.searchsorted(intervals[:, 0], ids, side="right") - 1
    if not len(intervals):
        return np.zeros(len(ids), dtype=bool)
    inside: npt.NDArray[np.bool_] = (position >= 0) & (ids < intervals[np.maximum(position, 0), 1])
    return inside


def _mark(number: int) -> npt.NDArray[np.uint64]:
    """Two fixed 64-bit numbers per layout. A cover is known by its sums mod 2**64: two covers meet with
    probability 2**-128 per pair."""
    state = np.array([2 * number + 1, 2 * number + 2], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
