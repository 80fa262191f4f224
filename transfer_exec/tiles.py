"""Where ids live, two axes at a time, and what of it a plan's runs reach.

A tile ``(start, length, stride, count)`` is a run of ids as in a ``RunTable``, together with the elements of one tensor
that hold them: id ``start + i * stride + j`` is held by flat index ``index + i * index_step + j * index_stride``. A
matrix cut by columns is one tile, a transposed one too, and a stack of experts one for each expert at most:

::

    tensor[4, 3] holds ids 1..12 transposed      start 1, length 4, stride 4, count 3
                                                 index 0, index_stride 3, index_step 1

What a tile and a run have in common are a few grids of ids, whatever the number of rows: with one step they share a
range of columns of a range of rows, and an interval takes whole rows and a part of one at either end. Only where two
steps differ are rows looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges, expand_runs
from layout_algebra.slice_copy import CopyTable, unroll
from transfer_exec.grids import cut_grids

_PAIRS = 1 << 20
"""Pairs of tiles and runs looked at in one step."""


class Tile(IntEnum):
    """Columns of a tile table; the first four as in a ``RunTable``."""

    START = 0
    LENGTH = 1
    STRIDE = 2
    COUNT = 3
    TENSOR = 4
    INDEX = 5
    INDEX_STRIDE = 6
    INDEX_STEP = 7


class Share(IntEnum):
    """Columns of what tiles and runs have in common.

    Elements ``index + i * index_step + j * index_stride`` of the tile's tensor (the stride is the tile's), ``i <
    count`` and ``j < length``, hold the ids of rank ``rank + i * rank_step + j`` in the run.
    """

    TILE = 0
    RUN = 1
    LENGTH = 2
    COUNT = 3
    INDEX = 4
    INDEX_STEP = 5
    RANK = 6
    RANK_STEP = 7


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles sorted by their first id.

    Attributes
    ----------
    rows
        int64, shape ``(n, 8)``, columns as in `Tile`; lengths are at most the stride where there are several rows.
        Several tiles may hold one id: several elements may be fed from it.
    """

    rows: IdArray

    @staticmethod
    def of(tables: Sequence[CopyTable]) -> TileTable:
        """The tiles of tensors 0, 1, ... whose copies these are."""
        tensor = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        copies = CopyTable.concatenate(tables)
        number = np.arange(len(copies))
        index, start = copies.target_starts.copy(), copies.source_starts.copy()
        extents, along, across = copies.extents.copy(), copies.target_strides.copy(), copies.source_strides.copy()
        back = across < 0
        start += np.where(back, (extents - 1) * across, 0).sum(axis=1)
        index += np.where(back, (extents - 1) * along, 0).sum(axis=1)
        along[back] *= -1
        across[back] *= -1
        inner = np.argmax(np.where(across == 1, extents, 0), axis=1)
        length = np.where(across[number, inner] == 1, extents[number, inner], 1)
        stride = np.where(length > 1, along[number, inner], 1)
        extents[number, inner] = np.where(length > 1, 1, extents[number, inner])
        # Rows are the finest axis whose rows lie apart; the other axes are looked at place by place.
        apart = (extents > 1) & (across >= length[:, None])
        outer = np.argmin(np.where(apart, across, np.iinfo(np.int64).max), axis=1)
        several = apart[number, outer]
        count = np.where(several, extents[number, outer], 1)
        step = np.where(several, across[number, outer], length)
        index_step = np.where(several, along[number, outer], 0)
        extents[number, outer] = np.where(several, 1, extents[number, outer])
        row, places = unroll(extents)
        starts = start[row] + (places * across[row]).sum(axis=1)
        indices = index[row] + (places * along[row]).sum(axis=1)
        fields = (length, step, count, tensor)
        rows = np.stack([starts, *(field[row] for field in fields), indices, stride[row], index_step[row]], axis=1)
        return TileTable.sorted(rows)

    @staticmethod
    def sorted(rows: IdArray) -> TileTable:
        """A table of rows in any order."""
        return TileTable(rows[np.lexsort((rows[:, Tile.INDEX], rows[:, Tile.TENSOR], rows[:, Tile.START]))])

    @property
    def elements(self) -> IdArray:
        """Elements of every tile."""
        counted: IdArray = self.rows[:, Tile.LENGTH] * self.rows[:, Tile.COUNT]
        return counted

    def within(self, runs: IdArray) -> IdArray:
        """What the tiles and some runs have in common.

        Parameters
        ----------
        runs
            Start, length, stride, count; sorted by start, the stretches of one run disjoint; shape ``(m, 4)``.

        Returns
        -------
        numpy.ndarray
            int64, shape ``(k, 8)``, columns as in `Share`. Every element of a tile whose id is in a run is in
            exactly one row for that tile and run.
        """
        parts = [_shares(self.rows, runs, tile, run) for tile, run in _pairs(self.rows, runs)]
        return np.concatenate([np.empty((0, len(Share)), dtype=np.int64), *parts])


def tiles_of_runs(runs: IdArray, owner: IdArray) -> TileTable:
    """Runs as tiles, for comparing sets of ids; TENSOR is the owner of each.

    A run among more others than it has stretches (in even steps over many tensors) becomes its stretches, so that only
    near ones are compared.
    """
    stops = last_stops(runs)
    near = np.searchsorted(np.sort(runs[:, 0]), stops) - np.searchsorted(np.sort(stops), runs[:, 0], side="right")
    wide = (runs[:, 3] > 1) & (near > runs[:, 3])
    spans = expand_runs(runs[wide])
    lengths = spans[:, 1] - spans[:, 0]
    rows = np.zeros((len(runs) - int(wide.sum()) + len(spans), len(Tile)), dtype=np.int64)
    rows[: len(spans), :4] = np.stack([spans[:, 0], lengths, lengths, np.ones_like(lengths)], axis=1)
    rows[len(spans) :, :4] = runs[~wide]
    rows[:, Tile.TENSOR] = np.concatenate([np.repeat(owner[wide], runs[wide, 3]), owner[~wide]])
    return TileTable.sorted(rows)


def last_stops(runs: IdArray) -> IdArray:
    """Where each run's last stretch ends."""
    stops: IdArray = runs[:, 0] + (runs[:, 3] - 1) * runs[:, 2] + runs[:, 1]
    return stops


def _pairs(tiles: IdArray, runs: IdArray) -> Iterator[tuple[IdArray, IdArray]]:
    """Positions of tiles and runs whose ranges from first to last id overlap, some at a time."""
    if not len(tiles) or not len(runs):
        return
    stops, ends = last_stops(tiles), last_stops(runs)
    first = np.searchsorted(np.maximum.accumulate(ends), tiles[:, Tile.START], side="right")
    counts = np.maximum(np.searchsorted(runs[:, 0], stops, side="left") - first, 0)
    chunk = np.cumsum(counts) // _PAIRS
    for some in np.split(np.arange(len(tiles)), np.flatnonzero(np.diff(chunk)) + 1):
        tile, run = np.repeat(some, counts[some]), expand_ranges(first[some], counts[some])
        near = ends[run] > tiles[tile, Tile.START]
        yield tile[near], run[near]


def _shares(tiles: IdArray, runs: IdArray, tile: IdArray, run: IdArray) -> IdArray:
    """What pairs have in common, by the kind of pair."""
    many_tile, many_run = tiles[tile, Tile.COUNT] > 1, runs[run, 3] > 1
    both = many_tile & many_run
    alike = both & (tiles[tile, Tile.STRIDE] == runs[run, 2])
    unlike = both & ~alike
    by_tile = unlike & (tiles[tile, Tile.COUNT] < runs[run, 3])
    in_run, in_tile = ~many_run | (unlike & ~by_tile), (many_run & ~many_tile) | by_tile
    each_run, run_row = _row_by_row(in_run, runs[run, 3])
    each_tile, tile_row = _row_by_row(in_tile, tiles[tile, Tile.COUNT])
    return np.concatenate(
        [
            _tile_in_interval(tiles, runs, tile[each_run], run[each_run], run_row),
            _run_in_interval(tiles, runs, tile[each_tile], run[each_tile], tile_row),
            _same_step(tiles, runs, tile[alike], run[alike]),
        ]
    )


def _row_by_row(chosen: IdArray, rows: IdArray) -> tuple[IdArray, IdArray]:
    """Every row of some pairs: the pair and the row."""
    pairs = np.flatnonzero(chosen)
    return np.repeat(pairs, rows[pairs]), expand_ranges(np.zeros_like(pairs), rows[pairs])


def _tile_in_interval(tiles: IdArray, runs: IdArray, tile: IdArray, run: IdArray, row: IdArray) -> IdArray:
    """Tiles cut by one row of each run."""
    low = runs[run, 0] + row * runs[run, 2]
    grids = tiles[tile][:, [Tile.START, Tile.LENGTH, Tile.LENGTH, Tile.COUNT, Tile.STRIDE]]
    grids[:, 2] = 1
    owner, first, rows, column, columns = cut_grids(grids, low, low + runs[run, 1]).T
    mine, theirs = tiles[tile[owner]], run[owner]
    rank = mine[:, Tile.START] + first * mine[:, Tile.STRIDE] + column - low[owner] + row[owner] * runs[theirs, 1]
    index = mine[:, Tile.INDEX] + first * mine[:, Tile.INDEX_STEP] + column * mine[:, Tile.INDEX_STRIDE]
    fields = (tile[owner], theirs, columns, rows, index, mine[:, Tile.INDEX_STEP], rank, mine[:, Tile.STRIDE])
    return np.stack(fields, axis=1)


def _run_in_interval(tiles: IdArray, runs: IdArray, tile: IdArray, run: IdArray, row: IdArray) -> IdArray:
    """Runs cut by one row of each tile."""
    low = tiles[tile, Tile.START] + row * tiles[tile, Tile.STRIDE]
    grids = runs[run][:, [0, 1, 1, 3, 2]]
    grids[:, 2] = 1
    owner, first, rows, column, columns = cut_grids(grids, low, low + tiles[tile, Tile.LENGTH]).T
    mine, theirs = tiles[tile[owner]], runs[run[owner]]
    at = theirs[:, 0] + first * theirs[:, 2] + column - low[owner]
    index = mine[:, Tile.INDEX] + row[owner] * mine[:, Tile.INDEX_STEP] + at * mine[:, Tile.INDEX_STRIDE]
    rank = first * theirs[:, 1] + column
    step = theirs[:, 2] * mine[:, Tile.INDEX_STRIDE]
    return np.stack([tile[owner], run[owner], columns, rows, index, step, rank, theirs[:, 1]], axis=1)


def _same_step(tiles: IdArray, runs: IdArray, tile: IdArray, run: IdArray) -> IdArray:
    """Tiles and runs of one step: the columns they share, of the rows they share.

    Against the run's rows the tile's begin ``turn`` rows later and ``shift`` columns to the right; what of them passes
    the end of a row lies in the next.
    """
    mine, theirs = tiles[tile], runs[run]
    step = theirs[:, 2]
    turn, shift = np.divmod(mine[:, Tile.START] - theirs[:, 0], np.maximum(step, 1))
    out = []
    for turns, begin in ((turn, shift), (turn + 1, shift - step)):
        low = np.maximum(begin, 0)
        width = np.minimum(begin + mine[:, Tile.LENGTH], theirs[:, 1]) - low
        first = np.maximum(turns, 0)
        rows = np.minimum(theirs[:, 3], turns + mine[:, Tile.COUNT]) - first
        kept = (width > 0) & (rows > 0)
        index = mine[:, Tile.INDEX] + (first - turns) * mine[:, Tile.INDEX_STEP]
        index += (low - begin) * mine[:, Tile.INDEX_STRIDE]
        fields = (tile, run, width, rows, index, mine[:, Tile.INDEX_STEP], first * theirs[:, 1] + low, theirs[:, 1])
        out.append(np.stack(fields, axis=1)[kept])
    return np.concatenate(out)
