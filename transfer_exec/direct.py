"""Which bytes go straight from parameter to parameter, and the plan that is left for all others.

Where a trainer and a rollout can look at each other's memory, a run of elements that is contiguous on both sides, of
one dtype and long needs no buffers and no kernels: the rollout reads it out of the trainer's parameter into its own.
If that parameter is in shared memory the rollout maps it, and copies runs that are much shorter.
That is a matter of hops: one that starts at the worker that holds the ids and ends at one that forwards them to nobody.

A route whose ids are only partly direct is cut. What is left is a lawful plan of its own, often of fewer rounds, and
everything that runs in rounds follows that one:

::

    route  ids 1..9  t -> e                             ids 1..6 lie alike on both sides, 7..9 are transposed
    rest   ids 7..9  t -> e                             in rounds
    moves  (t, e): tensor 0 at 0 -> tensor 0 at 0, 6 elements       in one piece, beside the rounds
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import RunTable, expand_ranges, overlaps
from layout_algebra.source_map import SourceMap
from transfer_exec.conversions import COPY_WIDTHS
from transfer_exec.gather import Column
from transfer_exec.plan import Plan, Route, Stage
from transfer_exec.rounds import count_rounds
from transfer_exec.route_runs import RouteRuns
from transfer_exec.templates import holder_templates, needer_templates, tensors_of

LEAST_BYTES = 4096
"""Shorter runs stay in the rounds: reading a range of another process costs what copying 4 KiB does."""

LEAST_MAPPED_BYTES = 512
"""The same out of memory that the reader maps: copying would pay for any length, but each run is 64 bytes of tables."""

MOST_SHORT_RUNS = 1 << 20
"""Runs too short to be read that a worker may have; if it has more, they stay in the rounds, which have templates."""


@dataclass(frozen=True, slots=True, eq=False)
class Near:
    """Workers that can reach each other's memory, and what of it.

    Attributes
    ----------
    maps
        Their source maps.
    scattered
        By worker, parameters that are not contiguous in host memory, and so are left to the rounds.
    least_bytes, least_mapped_bytes
        Shortest run that is read directly, and that is copied out of a parameter in shared memory.
    shared
        By worker, parameters in shared memory, which others map.
    """

    maps: Mapping[str, SourceMap]
    scattered: Mapping[str, Collection[str]]
    least_bytes: int = LEAST_BYTES
    least_mapped_bytes: int = LEAST_MAPPED_BYTES
    shared: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def shortest_bytes(self) -> int:
        """Shortest run of either kind."""
        return min(self.least_bytes, self.least_mapped_bytes) if any(self.shared.values()) else self.least_bytes


class MoveColumn(IntEnum):
    """Columns of direct moves; tensors by their position in ``tensors_of`` either worker's map, counts of elements."""

    SOURCE = 0
    SOURCE_INDEX = 1
    TARGET = 2
    TARGET_INDEX = 3
    LENGTH = 4
    ITEM_BYTES = 5


@dataclass(frozen=True, slots=True, eq=False)
class DirectMoves:
    """What one worker reads out of another's parameters.

    Attributes
    ----------
    stage
        Of the plan's hops that this stands for.
    rows
        int64, shape ``(n, 6)``, columns as in `MoveColumn`, by target.
    bytes
        Of the plan's ids that travel this way; an id that is needed twice is read twice and counted once.
    mapped_bytes
        Of those, what comes out of parameters in shared memory.
    mapped
        Tensors of the source that are in shared memory, as in the rows; int64, ascending.
    """

    stage: Stage
    rows: IdArray
    bytes: int
    mapped_bytes: int
    mapped: IdArray

    @property
    def elements(self) -> int:
        """Elements of the target that are written."""
        return int(self.rows[:, MoveColumn.LENGTH].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan divided into what is read directly and the rest.

    Attributes
    ----------
    rest
        The plan of the rest; the whole plan itself if nothing is direct.
    moves
        By source and target.
    """

    rest: Plan
    moves: Mapping[tuple[str, str], DirectMoves]


def divide(plan: Plan, near: Near) -> Division:
    """Take out of a plan what can be read directly.

    Both ends compile from the same division; it depends on the plan, the maps and ``near`` alone.

    Raises
    ------
    ProgramError
        As `RouteRuns.of`.
    """
    hops = _direct_hops(plan, near)
    if not len(hops):
        return Division(plan, {})
    space = next(iter(near.maps.values())).space
    runs = RouteRuns.of(plan, space)
    table, workers = plan.hops, plan.workers
    loads = _Loads.of(plan, runs)
    held = {
        worker: loads.held_lines(near, workers[worker], runs, runs.load_of_route[table.route[hops]][of])
        for worker in np.unique(table.source[hops]).tolist()
        for of in [table.source[hops] == worker]
    }
    moves: dict[tuple[str, str], DirectMoves] = {}
    taken: dict[int, dict[int, RunTable]] = {}  # target -> load -> ranks on the line of all loads
    needed: dict[str, IdArray] = {}
    for target in np.unique(table.target[hops]).tolist():
        name = workers[target]
        key = near.maps[name].digest()
        if key not in needed:
            needed[key] = needer_templates(near.maps[name], runs)
        rows = needed[key]
        for source in np.unique(table.source[hops[table.target[hops] == target]]).tolist():
            mine = hops[(table.target[hops] == target) & (table.source[hops] == source)]
            which = np.unique(runs.load_of_route[table.route[mine]])
            lines, others = loads.needed_lines(near, name, rows, which)
            shared = _shared_tensors(near, workers[source])
            pieces, ranks, mapped = _join(held[source], lines, others, near, shared)
            if not len(pieces):
                continue
            per_load = loads.by_load(ranks)
            taken.setdefault(target, {}).update(per_load)
            moves[workers[source], name] = DirectMoves(
                Stage(int(table.stage[mine[0]])),
                pieces,
                loads.bytes_of(per_load),
                loads.bytes_of(loads.by_load(mapped)) if mapped else 0,
                np.intersect1d(pieces[:, MoveColumn.SOURCE], np.flatnonzero(shared)),
            )
    if not moves:
        return Division(plan, {})
    return Division(_rest(plan, runs, loads, taken), moves)


def _direct_hops(plan: Plan, near: Near) -> IdArray:
    """Hops from a route's holder to a worker that forwards it to nobody, of enough bytes, between two that are near."""
    table, workers = plan.hops, plan.workers
    close = np.array([worker in near.maps for worker in workers], dtype=bool)
    rank = {worker: position for position, worker in enumerate(workers)}
    holder = np.array([rank[route.holder] for route in plan.routes], dtype=np.int64)
    large = np.array([route.bytes >= near.shortest_bytes for route in plan.routes], dtype=bool)
    forwards = np.isin(table.route * len(workers) + table.target, table.route * len(workers) + table.source)
    good = (table.source == holder[table.route]) & ~forwards & large[table.route]
    return np.flatnonzero(good & close[table.source] & close[table.target])


class _Line(IntEnum):
    """Columns of contiguous stretches: where on the line of all loads, how long, and which elements of a tensor."""

    BEGIN = 0
    LENGTH = 1
    TENSOR = 2
    INDEX = 3
    ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Loads:
    """All loads' ranks on one line, with a gap between loads."""

    begin: IdArray
    elements: IdArray
    item_bytes: IdArray

    @staticmethod
    def of(plan: Plan, runs: RouteRuns) -> _Loads:
        first = np.unique(runs.load_of_route, return_index=True)[1]
        routes = [plan.routes[route] for route in first.tolist()]
        elements = np.array([route.runs.elements for route in routes], dtype=np.int64)
        widths = np.array([route.item_bytes for route in routes], dtype=np.int64)
        return _Loads(np.cumsum(elements + 1) - elements - 1, elements, widths)

    def held_lines(self, near: Near, worker: str, runs: RouteRuns, loads: IdArray) -> IdArray:
        """Contiguous stretches of a holder, by their place on the line; disjoint."""
        rows = holder_templates(near.maps[worker], runs, np.unique(loads))
        if rows is None:
            return np.empty((0, len(_Line)), dtype=np.int64)  # compiling says what is missing
        lines = self._lines(rows[self._straight(near, worker, rows)])
        return lines[np.argsort(lines[:, _Line.BEGIN], kind="stable")]

    def needed_lines(self, near: Near, worker: str, rows: IdArray, loads: IdArray) -> tuple[IdArray, IdArray]:
        """Contiguous stretches of some loads at a needer, and intervals of the line with everything else it needs."""
        rows = rows[np.isin(rows[:, Column.BUFFER], loads)]
        straight = self._straight(near, worker, rows)
        other = rows[~straight]
        first = self.begin[other[:, Column.BUFFER]] + other[:, Column.OFFSET]
        last = first + (other[:, Column.LENGTH] - 1) * other[:, Column.OFFSET_STRIDE]
        last += (other[:, Column.COUNT] - 1) * other[:, Column.OFFSET_STEP]
        return self._lines(rows[straight]), np.stack([first, last + 1], axis=1)

    def bytes_of(self, per_load: Mapping[int, RunTable]) -> int:
        """Bytes of some ranks of each load."""
        return sum(part.elements * int(self.item_bytes[load]) for load, part in per_load.items())

    def by_load(self, ranks: RunTable) -> dict[int, RunTable]:
        """Places on the line as ranks of each load."""
        intervals = ranks.intervals
        load = np.searchsorted(self.begin, intervals[:, 0], side="right") - 1
        cuts = np.flatnonzero(np.diff(load)) + 1
        return {
            int(load[at]): RunTable.from_intervals(part - self.begin[load[at]])
            for at, part in zip([0, *cuts.tolist()], np.split(intervals, cuts), strict=True)
        }

    def _straight(self, near: Near, worker: str, rows: IdArray) -> npt.NDArray[np.bool_]:
        tensors = tensors_of(near.maps[worker])
        scattered = near.scattered.get(worker, ())
        fit = np.array([tensor.staged or tensor.name not in scattered for tensor in tensors], dtype=bool)
        even = (rows[:, Column.INDEX_STRIDE] == 1) & (rows[:, Column.OFFSET_STRIDE] == 1)
        copied = (rows[:, Column.CODE] >= 0) & (rows[:, Column.CODE] < len(COPY_WIDTHS))
        size = rows[:, Column.LENGTH] * self.item_bytes[rows[:, Column.BUFFER]]
        good: npt.NDArray[np.bool_] = fit[rows[:, Column.TENSOR]] & even & copied & (size >= near.shortest_bytes)
        short = good & (size < near.least_bytes)
        return good & ~short if int(rows[short, Column.COUNT].sum()) > MOST_SHORT_RUNS else good

    def _lines(self, rows: IdArray) -> IdArray:
        counts = rows[:, Column.COUNT]
        of = np.repeat(np.arange(len(rows)), counts)
        step = expand_ranges(np.zeros(len(rows), dtype=np.int64), counts)
        rows = rows[of]
        out = np.empty((len(rows), len(_Line)), dtype=np.int64)
        out[:, _Line.BEGIN] = self.begin[rows[:, Column.BUFFER]] + rows[:, Column.OFFSET]
        out[:, _Line.BEGIN] += step * rows[:, Column.OFFSET_STEP]
        out[:, _Line.LENGTH] = rows[:, Column.LENGTH]
        out[:, _Line.TENSOR] = rows[:, Column.TENSOR]
        out[:, _Line.INDEX] = rows[:, Column.INDEX] + step * rows[:, Column.INDEX_STEP]
        out[:, _Line.ITEM_BYTES] = self.item_bytes[rows[:, Column.BUFFER]]
        return out


def _shared_tensors(near: Near, worker: str) -> npt.NDArray[np.bool_]:
    """Which tensors of a worker others map."""
    shared = near.shared.get(worker, ())
    return np.array([not each.staged and each.name in shared for each in tensors_of(near.maps[worker])], dtype=bool)


def _join(
    held: IdArray, needed: IdArray, others: IdArray, near: Near, shared: npt.NDArray[np.bool_]
) -> tuple[IdArray, RunTable, RunTable]:
    """What stretches of both sides have in common: direct moves by target, their places on the line, those mapped.

    An id that is needed in several places is direct in all of them or in none: else it would travel twice.
    """
    theirs, mine = (
        np.stack([lines[:, _Line.BEGIN], lines[:, _Line.BEGIN] + lines[:, _Line.LENGTH]], axis=1)
        for lines in (held, needed)
    )
    of, part = overlaps(mine, theirs)
    begin = np.maximum(mine[of, 0], theirs[part, 0])
    stop = np.minimum(mine[of, 1], theirs[part, 1])
    rows = np.empty((len(of), len(MoveColumn)), dtype=np.int64)
    rows[:, MoveColumn.SOURCE] = held[part, _Line.TENSOR]
    rows[:, MoveColumn.SOURCE_INDEX] = held[part, _Line.INDEX] + begin - theirs[part, 0]
    rows[:, MoveColumn.TARGET] = needed[of, _Line.TENSOR]
    rows[:, MoveColumn.TARGET_INDEX] = needed[of, _Line.INDEX] + begin - mine[of, 0]
    rows[:, MoveColumn.LENGTH] = stop - begin
    rows[:, MoveColumn.ITEM_BYTES] = needed[of, _Line.ITEM_BYTES]
    group = _neighbours(rows)
    size = np.bincount(group, rows[:, MoveColumn.LENGTH] * rows[:, MoveColumn.ITEM_BYTES])
    least = np.where(shared[rows[:, MoveColumn.SOURCE]], near.least_mapped_bytes, near.least_bytes)
    long = size[group] >= least if len(rows) else np.empty(0, dtype=bool)
    places = np.stack([begin, stop], axis=1)
    uncovered = RunTable.from_intervals(mine).subtract(RunTable.from_intervals(theirs))
    staged = RunTable.from_intervals(np.concatenate([others, places[~long], uncovered.intervals]))
    direct = RunTable.from_intervals(places[long]).subtract(staged)
    which, interval = overlaps(places[long], direct.intervals)
    cut, whole = direct.intervals[interval], places[long][which]
    rows = rows[long][which]
    low, high = np.maximum(cut[:, 0], whole[:, 0]), np.minimum(cut[:, 1], whole[:, 1])
    rows[:, MoveColumn.SOURCE_INDEX] += low - whole[:, 0]
    rows[:, MoveColumn.TARGET_INDEX] += low - whole[:, 0]
    rows[:, MoveColumn.LENGTH] = high - low
    mapped = shared[rows[:, MoveColumn.SOURCE]]
    return _merged(rows), direct, RunTable.from_intervals(np.stack([low, high], axis=1)[mapped])


def _neighbours(rows: IdArray) -> IdArray:
    """A number per move: equal for moves that continue each other in both tensors."""
    order = np.lexsort((rows[:, MoveColumn.TARGET_INDEX], rows[:, MoveColumn.TARGET]))
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = np.cumsum(~_continues(rows[order])) - 1
    return out


def _merged(rows: IdArray) -> IdArray:
    """Moves by target, those that continue each other in one."""
    rows = rows[np.lexsort((rows[:, MoveColumn.TARGET_INDEX], rows[:, MoveColumn.TARGET]))]
    heads = np.flatnonzero(~_continues(rows))
    out = rows[heads]
    if len(heads):
        out[:, MoveColumn.LENGTH] = np.add.reduceat(rows[:, MoveColumn.LENGTH], heads)
    return out


def _continues(rows: IdArray) -> npt.NDArray[np.bool_]:
    """Whether a move begins in both tensors where the one before it ends."""
    out = np.zeros(len(rows), dtype=bool)
    before, after = rows[:-1], rows[1:]
    length = before[:, MoveColumn.LENGTH]
    out[1:] = (
        (before[:, MoveColumn.SOURCE] == after[:, MoveColumn.SOURCE])
        & (before[:, MoveColumn.TARGET] == after[:, MoveColumn.TARGET])
        & (before[:, MoveColumn.ITEM_BYTES] == after[:, MoveColumn.ITEM_BYTES])
        & (before[:, MoveColumn.SOURCE_INDEX] + length == after[:, MoveColumn.SOURCE_INDEX])
        & (before[:, MoveColumn.TARGET_INDEX] + length == after[:, MoveColumn.TARGET_INDEX])
    )
    return out


def _rest(plan: Plan, runs: RouteRuns, loads: _Loads, taken: Mapping[int, Mapping[int, RunTable]]) -> Plan:
    """The plan without the direct moves. Routes of the same ids are cut alike, as the laws of plans have it."""
    names = plan.workers
    groups = {
        load: _by_targets(int(loads.elements[load]), {t: each[load] for t, each in taken.items() if load in each})
        for load in sorted({load for each in taken.values() for load in each})
    }
    routes: list[Route] = []
    for route, load in zip(plan.routes, runs.load_of_route.tolist(), strict=True):
        if load not in groups:
            routes.append(route)
            continue
        for targets, ranks in groups[load]:
            gone = {names[target] for target in targets}
            # A worker gets an id by one hop at most, so that hop is the direct one, whichever route has it.
            hops = tuple(hop for hop in route.hops if hop.target not in gone)
            if hops:
                routes.append(replace(route, runs=_ids_of(route.runs, ranks.intervals), hops=hops))
    routes.sort(key=lambda each: (int(each.runs.runs[0, 0]), names.index(each.holder)))
    rounds = plan.rounds
    if plan.groups is None:
        before, after = (sum(each.bytes * len(each.hops) for each in some) for some in (plan.routes, routes))
        rounds = count_rounds(routes, plan.buffer_bytes, at_least=-(-plan.rounds * after // before))
    elif not routes:
        rounds = 1
    return replace(plan, routes=tuple(routes), rounds=rounds, table=None)


def _by_targets(elements: int, taken: Mapping[int, RunTable]) -> list[tuple[tuple[int, ...], RunTable]]:
    """All ranks of a load, by who reads them directly; none empty."""
    groups: list[tuple[tuple[int, ...], RunTable]] = [((), RunTable.from_intervals([[0, elements]]))]
    for target, direct in taken.items():
        cut = [
            part
            for targets, ranks in groups
            for part in (((*targets, target), ranks.intersect(direct)), (targets, ranks.subtract(direct)))
        ]
        groups = [part for part in cut if part[1]]
    return groups


def _ids_of(runs: RunTable, ranks: IdArray) -> RunTable:
    """The ids of some ranks, which are intervals."""
    ids = runs.intervals
    lengths = ids[:, 1] - ids[:, 0]
    begin = np.cumsum(lengths) - lengths
    of, which = overlaps(ranks, np.stack([begin, begin + lengths], axis=1))
    low = np.maximum(ranks[of, 0], begin[which])
    high = np.minimum(ranks[of, 1], begin[which] + lengths[which])
    start = ids[which, 0] + low - begin[which]
    return RunTable.from_intervals(np.stack([start, start + high - low], axis=1))
