"""What a worker's tensors have of a plan's routes: the templates of its gather tables.

A needer's templates are those of every element that copies an id: workers with equal maps get the same ids, each by its
own routes, so they share them. A holder's are those of the ids it sends, each from one element. Sums of elements, of
tiles on one side and of runs on the other, show that nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import UnsupportedDtypeError
from layout_algebra.runs import expand_ranges
from layout_algebra.source_map import SourceMap
from layout_algebra.strips import StripTable
from transfer_exec.conversions import code_of
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column, make_templates
from transfer_exec.program import ProgramTensor
from transfer_exec.route_runs import RouteRuns
from transfer_exec.tiles import Share, Tile, TileTable


def tensors_of(source_map: SourceMap) -> tuple[ProgramTensor, ...]:
    """The parameters of a map, then the checkpoint tensors that its opaque parameters depend on."""
    entries = [(name, source_map[name]) for name in source_map.parameters]
    parameters = [ProgramTensor(name, entry.shape, entry.dtype) for name, entry in entries]
    specs = [source_map.space.spec(name) for name in source_map.staged_tensors()]
    return (*parameters, *(ProgramTensor(spec.name, spec.shape, spec.dtype, staged=True) for spec in specs))


def needed_elements(source_map: SourceMap) -> int:
    """Elements that copy an id or are staged: what the rows of `needer_templates` add up to if routes have all ids."""
    return int(_staged_too(source_map, _tiles(source_map)).elements.sum())


def needer_templates(source_map: SourceMap, runs: RouteRuns) -> IdArray:
    """Rows for every element that copies an id of some route, or is staged from one.

    Parameters
    ----------
    source_map
        The needer's.
    runs
        Of all routes of the plan.

    Returns
    -------
    numpy.ndarray
        Shape ``(n, 11)``; TENSOR is a position in `tensors_of`, BUFFER a load, CODE -1 where no conversion is defined.
    """
    tiles = _staged_too(source_map, _tiles(source_map))
    shares = tiles.within(runs.runs)
    return _templates(source_map, runs, tiles, shares, lambda tensor, wire: code_of(wire, tensor))


def holder_templates(source_map: SourceMap, runs: RouteRuns, loads: IdArray) -> IdArray | None:
    """Rows for every id of some loads, each from one element; None if some id is in no element.

    Parameters
    ----------
    source_map
        The holder's.
    runs
        Of all routes of the plan.
    loads
        What the holder sends.
    """
    mine = np.flatnonzero(np.isin(runs.load, loads))
    runs = RouteRuns(runs.runs[mine], runs.load[mine], runs.rank[mine], runs.dtype[mine], runs.load_of_route)
    tiles = _tiles(source_map)
    shares = tiles.within(runs.runs)
    elements = runs.runs[:, 1] * runs.runs[:, 3]
    several = np.bincount(shares[:, Share.RUN], minlength=len(elements)) > 1
    tiles, shares = _once(tiles, shares, several, np.cumsum(elements) - elements)
    held = _sums(shares[:, Share.RUN], shares[:, Share.LENGTH] * shares[:, Share.COUNT], len(elements))
    if not np.array_equal(held, elements):
        return None
    return _templates(source_map, runs, tiles, shares, code_of)


def _tiles(source_map: SourceMap) -> TileTable:
    return TileTable.of([source_map[name].copies for name in source_map.parameters])


def _staged_too(source_map: SourceMap, tiles: TileTable) -> TileTable:
    """With a tile for every checkpoint tensor that an opaque parameter depends on."""
    rows = [tiles.rows]
    first = len(source_map.parameters)
    for position, name in enumerate(source_map.staged_tensors()):
        start, stop = source_map.space.id_range(name)
        if stop > start:
            rows.append(np.array([[start, stop - start, stop - start, 1, first + position, 0, 1, 0]], dtype=np.int64))
    return TileTable.sorted(np.concatenate(rows))


def _once(
    tiles: TileTable, shares: IdArray, several: npt.NDArray[np.bool_], line: IdArray
) -> tuple[TileTable, IdArray]:
    """One element for every id: of runs that several shares hold ids of, those shares row by row, without repeats.

    ``line`` puts the ids of all runs on one line, by the place of each run's first.
    """
    doubtful = shares[several[shares[:, Share.RUN]]]
    of = np.repeat(np.arange(len(doubtful)), doubtful[:, Share.COUNT])
    row = expand_ranges(np.zeros(len(doubtful), dtype=np.int64), doubtful[:, Share.COUNT])
    each = doubtful[of]
    strips = np.empty((len(each), 5), dtype=np.int64)
    strips[:, 0] = line[each[:, Share.RUN]] + each[:, Share.RANK] + row * each[:, Share.RANK_STEP]
    strips[:, 1] = each[:, Share.LENGTH]
    strips[:, 2] = tiles.rows[each[:, Share.TILE], Tile.TENSOR]
    strips[:, 3] = each[:, Share.INDEX] + row * each[:, Share.INDEX_STEP]
    strips[:, 4] = tiles.rows[each[:, Share.TILE], Tile.INDEX_STRIDE]
    strips = strips[np.lexsort((strips[:, 3], strips[:, 2], strips[:, 0]))]
    single = StripTable(strips).disjoint().rows
    if single[:, 1].sum() == strips[:, 1].sum():
        return tiles, shares
    # Every strip that is left becomes a tile of its own.
    run = np.searchsorted(line, single[:, 0], side="right") - 1
    nothing, one = np.zeros(len(single), dtype=np.int64), np.ones(len(single), dtype=np.int64)
    made = np.stack([single[:, 0], single[:, 1], single[:, 1], one, *single.T[2:], nothing], axis=1)
    number = len(tiles.rows) + np.arange(len(single))
    rank = single[:, 0] - line[run]
    added = np.stack([number, run, single[:, 1], one, single[:, 3], nothing, rank, single[:, 1]], axis=1)
    kept = shares[~several[shares[:, Share.RUN]]]
    return TileTable(np.concatenate([tiles.rows, made])), np.concatenate([kept, added])


def _sums(group: IdArray, counts: IdArray, groups: int) -> IdArray:
    sums = np.zeros(groups, dtype=np.int64)
    np.add.at(sums, group, counts)
    return sums


def _templates(
    source_map: SourceMap, runs: RouteRuns, tiles: TileTable, shares: IdArray, code: Callable[[str, str], int]
) -> IdArray:
    mine, run = tiles.rows[shares[:, Share.TILE]], shares[:, Share.RUN]
    codes = _codes(source_map, code)
    rows = np.empty((len(shares), len(Column)), dtype=np.int64)
    rows[:, Column.TENSOR] = mine[:, Tile.TENSOR]
    rows[:, Column.BUFFER] = runs.load[run]
    rows[:, Column.CODE] = codes[mine[:, Tile.TENSOR], runs.dtype[run]]
    rows[:, Column.LENGTH] = shares[:, Share.LENGTH]
    rows[:, Column.INDEX_STRIDE] = mine[:, Tile.INDEX_STRIDE]
    rows[:, Column.OFFSET_STRIDE] = 1
    rows[:, Column.COUNT] = shares[:, Share.COUNT]
    rows[:, Column.INDEX_STEP] = shares[:, Share.INDEX_STEP]
    rows[:, Column.OFFSET_STEP] = shares[:, Share.RANK_STEP]
    rows[:, Column.INDEX] = shares[:, Share.INDEX]
    rows[:, Column.OFFSET] = runs.rank[run] + shares[:, Share.RANK]
    return make_templates(rows)


def _codes(source_map: SourceMap, code: Callable[[str, str], int]) -> IdArray:
    """Number of the conversion by tensor and checkpoint dtype, -1 where there is none."""
    space = source_map.space
    dtypes = [source_map.dtype(name) for name in source_map.parameters]
    dtypes += [space.spec(name).dtype for name in source_map.staged_tensors()]
    number = {dtype: row for row, dtype in enumerate(dict.fromkeys(dtypes))}
    table = np.full((len(number), len(space.dtype_numbers[0])), -1, dtype=np.int64)
    for dtype, row in number.items():
        for wire, column in space.dtype_numbers[0].items():
            try:
                table[row, column] = code(dtype, wire)
            except (ProgramError, UnsupportedDtypeError):
                continue
    return table[np.array([number[dtype] for dtype in dtypes], dtype=np.int64)]
