"""The ids of a plan's routes as runs that each lie in one tensor, for comparing with what a worker's tensors hold.

Routes with the very same ids (one crosses the network, another serves a node that holds them) are one *load*: the ids
are looked at once, and where they stand in a buffer is a matter of rank. A run of a route may go on over several
tensors, in even steps or without a gap. Here it ends with its tensor, but consecutive ids of one dtype stay together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges
from layout_algebra.space import CheckpointSpace
from transfer_exec.errors import ProgramError
from transfer_exec.plan import Plan
from transfer_exec.tiles import last_stops


@dataclass(frozen=True, slots=True, eq=False)
class RouteRuns:
    """Runs of all loads, sorted by start.

    Attributes
    ----------
    runs
        Start, length, stride, count; int64, shape ``(n, 4)``.
    load
        Whose ids they are; shape ``(n,)``.
    rank
        Rank of each run's first id among its load's; the others follow in order.
    dtype
        Number of the checkpoint's dtype, as in ``CheckpointSpace.dtype_numbers``.
    load_of_route
        Shape ``(routes,)``.
    """

    runs: IdArray
    load: IdArray
    rank: IdArray
    dtype: IdArray
    load_of_route: IdArray

    @staticmethod
    def of(plan: Plan, space: CheckpointSpace) -> RouteRuns:
        """Look at a plan's routes.

        Raises
        ------
        ProgramError
            If a route's ids are not in the checkpoint, or its element width is not that of their tensors.
        """
        number: dict[bytes, int] = {}
        load_of_route = np.array(
            [number.setdefault(route.runs.runs.tobytes(), len(number)) for route in plan.routes], dtype=np.int64
        )
        routes = np.unique(load_of_route, return_index=True)[1]
        tables = [plan.routes[route].runs.runs for route in routes.tolist()]
        runs = np.concatenate([np.empty((0, 4), dtype=np.int64), *tables])
        load = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        _check_ids(runs, routes[load], space)
        elements = runs[:, 1] * runs[:, 3]
        before = np.cumsum(elements) - elements
        rank = before - before[np.searchsorted(load, load)]
        cut, owner, skipped = _split(runs, space)
        order = np.lexsort((owner, cut[:, 0]))
        cut, owner, skipped = cut[order], owner[order], skipped[order]
        tensor = _tensor_of(space, cut[:, 0])
        widths = np.array([plan.routes[route].item_bytes for route in routes.tolist()], dtype=np.int64)
        _check_widths(cut, routes[load[owner]], widths[load[owner]], tensor, space)
        dtype = space.dtype_numbers[1][tensor]
        return RouteRuns(cut, load[owner], rank[owner] + skipped, dtype, load_of_route)


def _tensor_of(space: CheckpointSpace, ids: IdArray) -> IdArray:
    found: IdArray = np.searchsorted(space.starts, ids, side="right") - 1
    return found


def _check_ids(runs: IdArray, routes: IdArray, space: CheckpointSpace) -> None:
    bad = np.flatnonzero((runs[:, 0] < 1) | (last_stops(runs) > space.total_elements + 1))
    if len(bad):
        raise ProgramError(f"route {routes[bad[0]]} names ids past {space.total_elements}; plan again")


def _check_widths(runs: IdArray, routes: IdArray, widths: IdArray, tensor: IdArray, space: CheckpointSpace) -> None:
    bad = np.flatnonzero(space.item_bits[tensor] != 8 * widths)
    if len(bad):
        start, length = runs[bad[0], :2].tolist()
        where = space.describe_ids(start, start + length)
        raise ProgramError(f"route {routes[bad[0]]} moves {where} as {widths[bad[0]]} bytes an element; plan again")


def _split(runs: IdArray, space: CheckpointSpace) -> tuple[IdArray, IdArray, IdArray]:
    """Runs of one tensor, or intervals of one dtype; which run each is part of, and how many of its ids come before."""
    first, last = _tensor_of(space, runs[:, 0]), _tensor_of(space, last_stops(runs) - 1)
    length, step = runs[:, 1], runs[:, 2]
    inside = np.flatnonzero(first == last)
    spanning = first < last
    many = spanning & (last - first < runs[:, 3])
    owner, row, rows = _rows_by_tensor(runs, np.flatnonzero(many), first, last, space)
    start = runs[owner, 0] + row * step[owner]
    # The last of a tensor's rows may end in the next tensor.
    over = start + (rows - 1) * step[owner] + length[owner] > space.starts[_tensor_of(space, start) + 1]
    rows = rows - over
    table = np.stack([start, length[owner], step[owner], rows], axis=1)
    kept = rows > 0
    single = np.flatnonzero(spanning & ~many)
    lone = np.concatenate([np.repeat(single, runs[single, 3]), owner[over]])
    lone_row = np.concatenate([expand_ranges(np.zeros_like(single), runs[single, 3]), (row + rows)[over]])
    parts = (
        (runs[inside], inside, np.zeros_like(inside)),
        (table[kept], owner[kept], (row * length[owner])[kept]),
        _cut_by_dtype(runs[lone, 0] + lone_row * step[lone], length[lone], lone, lone_row * length[lone], space),
    )
    table, owner, skipped = (np.concatenate(field) for field in zip(*parts, strict=True))
    return table, owner, skipped


def _rows_by_tensor(
    runs: IdArray, chosen: IdArray, first: IdArray, last: IdArray, space: CheckpointSpace
) -> tuple[IdArray, IdArray, IdArray]:
    """For every tensor in which rows of the chosen runs begin: the run, the first such row and how many."""
    counts = (last - first + 1)[chosen]
    owner = np.repeat(chosen, counts)
    tensor = expand_ranges(first[chosen], counts)
    start, step, rows = runs[owner, 0], runs[owner, 2], runs[owner, 3]
    low, high = (np.clip(-((start - space.starts[tensor + after]) // step), 0, rows) for after in (0, 1))
    kept = high > low
    return owner[kept], low[kept], (high - low)[kept]


def _cut_by_dtype(
    start: IdArray, length: IdArray, owner: IdArray, skipped: IdArray, space: CheckpointSpace
) -> tuple[IdArray, IdArray, IdArray]:
    """Intervals cut where the checkpoint's dtype changes."""
    filled = np.flatnonzero(np.diff(space.starts) > 0)
    number = space.dtype_numbers[1][filled]
    edges = space.starts[filled[1:][number[1:] != number[:-1]]]
    low = np.searchsorted(edges, start, side="right")
    counts = np.searchsorted(edges, start + length, side="left") - low + 1
    of = np.repeat(np.arange(len(start)), counts)
    place = expand_ranges(low, counts)
    bounds = np.concatenate([[0], edges, [space.total_elements + 1]])
    begin = np.maximum(start[of], bounds[place])
    size = np.minimum((start + length)[of], bounds[place + 1]) - begin
    runs = np.stack([begin, size, size, np.ones_like(size)], axis=1)
    return runs, owner[of], skipped[of] + begin - start[of]
