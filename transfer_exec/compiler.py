"""From a plan and one worker's source map to that worker's program.

Everybody compiles from the same plan, so the two ends of a message agree on flags, offsets and sizes without a word:
that is why ranks compare the plan's digest first. Nothing here touches memory or a clock.

>>> import numpy as np
>>> from layout_algebra.runs import RunTable
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> from transfer_exec.plan import Hop, Plan, Route, Stage
>>> space = CheckpointSpace([TensorSpec("w", (4,), "F32")])
>>> held = SourceMap.from_ids(space, {"w": np.arange(1, 5)})
>>> route = Route(RunTable.from_ids([1, 2, 3, 4]), 4, "t", (Hop(Stage.RECEIVE, "t", "e"),))
>>> plan = Plan(space.digest(), ("t",), ("e",), (0, 1), (route,), 2, 8, 1.0, "t", 1.0, 1.0)
>>> [type(step).__name__ for step in compile_program(plan, "t", held).instructions]
['Pack', 'Write']
>>> [type(step).__name__ for step in compile_program(plan, "e", held).instructions]
['Await', 'Assemble', 'Release']
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from transfer_exec.descriptors import buffers_of
from transfer_exec.direct import DirectMoves, Division, MoveColumn, Near, divide
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column
from transfer_exec.plan import Plan, Stage
from transfer_exec.program import (
    Assemble,
    Await,
    Exchange,
    Fetch,
    FetchColumn,
    Instruction,
    Offer,
    Pack,
    Program,
    ProgramTensor,
    Release,
    Write,
)
from transfer_exec.regions import Buffer, Layout, Letter, Region, Regions
from transfer_exec.route_runs import RouteRuns
from transfer_exec.templates import holder_templates, needed_elements, needer_templates, tensors_of

_NO_ROWS = np.empty((0, len(Column)), dtype=np.int64)
_NO_TENSORS = np.empty(0, dtype=np.int64)


def compile_program(plan: Plan, worker: str, source_map: SourceMap) -> Program:
    """Compile one worker's program, all of it in rounds.

    Parameters
    ----------
    plan
        The whole plan.
    worker
        One of its workers.
    source_map
        That worker's map, the one the plan was made with.

    Returns
    -------
    Program
        With the parameters that have traffic, and the checkpoint tensors that opaque parameters depend on.

    Raises
    ------
    ProgramError
        If the worker is not in the plan, the map is of another checkpoint, a holder lacks what the plan has it
        send, a needer does not get what its map needs, a buffer would exceed the plan's budget, or a conversion
        is not defined.
    """
    return Compiler(plan).program(worker, source_map)


class Compiler:
    """The programs of one plan; what several workers have in common is looked at once.

    Parameters
    ----------
    plan
        The whole plan.
    near
        Workers that can read each other's memory; what is contiguous on both sides goes directly between them. By
        default everything goes in rounds.
    """

    def __init__(self, plan: Plan, near: Near | None = None) -> None:
        self._plan = plan
        self._near = near
        self._division: Division | None = None
        self._regions: Regions | None = None
        self._runs: RouteRuns | None = None
        self._needers: dict[str, tuple[IdArray, int]] = {}
        self._sources: dict[str, list[str]] = {}
        self._readers: dict[str, list[str]] = {}
        self._lent: dict[str, IdArray] = {}
        self._tensors: dict[str, tuple[ProgramTensor, ...]] = {}

    @property
    def division(self) -> Division:
        """What goes directly, and the plan of the rest; raises as `divide`."""
        if self._division is None:
            self._division = Division(self._plan, {}) if self._near is None else divide(self._plan, self._near)
            place = {worker: position for position, worker in enumerate(self._plan.workers)}
            for source, reader in sorted(self._division.moves, key=lambda pair: (place[pair[0]], place[pair[1]])):
                self._sources.setdefault(reader, []).append(source)
                self._readers.setdefault(source, []).append(reader)
        return self._division

    def program(self, worker: str, source_map: SourceMap) -> Program:
        """One worker's program; raises as `compile_program`."""
        plan = self._plan
        if worker not in plan.workers:
            raise ProgramError(f"{worker} is not a worker of the plan; it has {', '.join(plan.workers)}")
        if plan.space_digest != source_map.space.digest():
            raise ProgramError(
                f"{worker}: its map is of checkpoint {source_map.space.digest()}, the plan of {plan.space_digest}; "
                "discover and plan with one checkpoint folder"
            )
        rest = self.division.rest
        if self._regions is None or self._runs is None:
            self._regions, self._runs = Regions(rest), RouteRuns.of(rest, source_map.space)
        regions = self._regions
        pack, receive, external, internal = (regions.layout(Region(worker, buffer)) for buffer in Buffer)
        layouts = (pack, receive, external, internal)
        _check_budget(plan, worker, layouts)
        key = source_map.digest()
        if key not in self._tensors:
            self._tensors[key] = tensors_of(source_map)
        tensors = self._tensors[key]
        packed = self._packed(worker, source_map, layouts)
        assembled = self._assembled(worker, source_map, layouts)
        _check_codes(worker, tensors, packed, assembled)
        offers, fetches = self._direct(worker)
        lent = self._tensors_lent_by(worker) if offers else _NO_TENSORS
        mapped = np.unique(np.concatenate([_NO_TENSORS, *(moves.mapped for _, moves in offers)]))
        rows = [self._rows_to_fetch(fetch.peer, moves) for fetch, moves in fetches]
        used = [tensor for each in rows for tensor in each[:, FetchColumn.TENSOR].tolist()]
        number = _numbers_of_used(tensors, packed[:, Column.TENSOR], assembled[:, Column.TENSOR], lent, used)
        packed, assembled = (_renumbered(table, Column.TENSOR, number) for table in (packed, assembled))
        rows = [_renumbered(table, FetchColumn.TENSOR, number) for table in rows]
        letters = regions.letters(worker)
        return Program(
            worker=worker,
            plan_digest=self._digest(),
            map_digest=source_map.digest(),
            rounds=rest.rounds,
            flags=self._first_flag(worker) + len(offers) + len(fetches),
            instructions=_instructions(regions, worker, layouts, letters, assembles=len(assembled) > 0),
            tensors=tuple(tensor for tensor, place in zip(tensors, number.tolist(), strict=True) if place >= 0),
            layouts=layouts,
            letters=letters,
            pack_templates=packed,
            assemble_templates=assembled,
            offers=tuple(offer for offer, _ in offers),
            fetches=tuple(fetch for fetch, _ in fetches),
            lent=tuple(number[lent].tolist()),
            mapped=tuple(number[mapped].tolist()),
            fetch_rows=tuple(rows),
        )

    def _digest(self) -> str:
        """Of the plan, and of its division if it is divided."""
        plan, rest = self._plan.digest(), self.division.rest.digest()
        if not self.division.moves:
            return plan
        return hashlib.blake2b(f"{plan}/{rest}".encode(), digest_size=16).hexdigest()

    def _direct(self, worker: str) -> tuple[list[tuple[Offer, DirectMoves]], list[tuple[Fetch, DirectMoves]]]:
        """What others read from a worker, and what it reads, each in the plan's order of workers."""
        moves, offers, fetches = self.division.moves, [], []
        sources, readers = self._sources.get(worker, []), self._readers.get(worker, [])
        for reader in readers:
            mine = moves[worker, reader]
            flag = self._first_flag(reader) + self._sources[reader].index(worker)
            done = self._first_flag(worker) + len(sources) + readers.index(reader)
            offers.append((Offer(mine.stage, reader, flag, done, mine.bytes, mine.mapped_bytes), mine))
        for source in sources:
            mine = moves[source, worker]
            flag = self._first_flag(worker) + sources.index(source)
            done = self._first_flag(source) + len(self._sources.get(source, ())) + self._readers[source].index(worker)
            fetches.append((Fetch(mine.stage, source, flag, done, mine.bytes, mine.mapped_bytes), mine))
        return offers, fetches

    def _first_flag(self, worker: str) -> int:
        """The first flag of direct moves: after those of messages and of releases."""
        assert self._regions is not None
        releases = {posting.release for posting in self._regions.outgoing(worker)}
        return len(self._regions.incoming(worker)) + len(releases)

    def _tensors_lent_by(self, source: str) -> IdArray:
        """Positions of all tensors that somebody reads from a worker, ascending."""
        if source not in self._lent:
            moves = (self.division.moves[source, reader] for reader in self._readers[source])
            self._lent[source] = np.unique(np.concatenate([each.rows[:, MoveColumn.SOURCE] for each in moves]))
        return self._lent[source]

    def _rows_to_fetch(self, source: str, moves: DirectMoves) -> IdArray:
        """Moves in bytes, their sources by place among all tensors that the source lends."""
        lent = self._tensors_lent_by(source)
        rows, width = moves.rows, moves.rows[:, MoveColumn.ITEM_BYTES]
        out = np.empty((len(rows), len(FetchColumn)), dtype=np.int64)
        out[:, FetchColumn.LENT] = np.searchsorted(lent, rows[:, MoveColumn.SOURCE])
        out[:, FetchColumn.LENT_OFFSET] = rows[:, MoveColumn.SOURCE_INDEX] * width
        out[:, FetchColumn.TENSOR] = rows[:, MoveColumn.TARGET]
        out[:, FetchColumn.OFFSET] = rows[:, MoveColumn.TARGET_INDEX] * width
        out[:, FetchColumn.BYTES] = rows[:, MoveColumn.LENGTH] * width
        return out

    def _packed(self, worker: str, source_map: SourceMap, layouts: tuple[Layout, ...]) -> IdArray:
        assert self._runs is not None
        routes = layouts[Buffer.PACK.value].routes
        if not len(routes):
            return _NO_ROWS
        rows = holder_templates(source_map, self._runs, self._runs.load_of_route[routes])
        if rows is None:
            raise _not_held(self._plan, source_map, worker, routes)
        return _with_parts(rows, self._runs.load_of_route, layouts)

    def _assembled(self, worker: str, source_map: SourceMap, layouts: tuple[Layout, ...]) -> IdArray:
        assert self._runs is not None
        if worker not in self._plan.needers:
            return _NO_ROWS
        key = source_map.digest()
        if key not in self._needers:
            self._needers[key] = needer_templates(source_map, self._runs), needed_elements(source_map)
        rows, needed = self._needers[key]
        rows = _with_parts(rows, self._runs.load_of_route, layouts)
        rows = rows[rows[:, Column.BUFFER] >= 0]  # what others get in rounds may come here directly
        direct = sum(self.division.moves[source, worker].elements for source in self._sources.get(worker, ()))
        if int((rows[:, Column.LENGTH] * rows[:, Column.COUNT]).sum()) + direct != needed:
            raise _not_served(self._plan, source_map, worker)
        return rows


def _with_parts(rows: IdArray, load_of_route: IdArray, layouts: tuple[Layout, ...]) -> IdArray:
    """Templates of loads as templates of parts, -1 for loads that do not come to the worker."""
    part = np.full(int(load_of_route.max(initial=-1)) + 1, -1, dtype=np.int64)
    routes = np.concatenate([layout.routes for layout in layouts])
    part[load_of_route[routes]] = np.arange(len(routes))
    out = rows.copy()
    out[:, Column.BUFFER] = part[rows[:, Column.BUFFER]]
    return out[np.lexsort((out[:, Column.OFFSET], out[:, Column.BUFFER]))]


def _instructions(
    regions: Regions,
    worker: str,
    layouts: tuple[Layout, ...],
    letters: tuple[Letter, ...],
    *,
    assembles: bool,
) -> tuple[Instruction, ...]:
    """A round: per stage and leg first write what is there, then wait for what comes; then assemble and release."""
    steps: list[Instruction] = []
    incoming, outgoing = regions.incoming(worker), regions.outgoing(worker)
    buffers = [buffers_of(letter, layouts) for letter in letters]
    if any(Buffer.PACK in each for each in buffers):
        steps.append(Pack())
    tables = 0
    for stage, leg in ((stage, leg) for stage in Stage for leg in (0, 1)):
        for (message, flag, release), read in zip(outgoing, buffers, strict=True):
            if message.stage is stage and message.leg == leg:
                kind = Write if read == [Buffer.PACK] else Exchange
                steps.append(kind(stage, message.target, flag, release, tuple(range(tables, tables + len(read)))))
                tables += len(read)
        arriving = [(m.source, flag) for m, flag, _ in incoming if m.stage is stage and m.leg == leg]
        if arriving:
            steps.append(Await(stage, tuple(name for name, _ in arriving), tuple(flag for _, flag in arriving)))
    if assembles:
        steps.append(Assemble())
    if incoming:
        sources = {message.source: release for message, _, release in incoming}
        steps.append(Release(tuple(sources), tuple(sources.values())))
    return tuple(steps)


def _numbers_of_used(tensors: tuple[ProgramTensor, ...], *positions: Sequence[int] | IdArray) -> IdArray:
    """Positions without the parameters that have no traffic, -1 for those.

    Staged tensors stay, empty ones too, since a loader may ask for them.
    """
    used = np.array([tensor.staged for tensor in tensors], dtype=bool)
    for some in positions:
        used[np.asarray(some, dtype=np.int64)] = True
    return np.where(used, np.cumsum(used) - 1, -1)


def _renumbered(table: IdArray, column: int, number: IdArray) -> IdArray:
    out = table.copy()
    out[:, column] = number[out[:, column]]
    return out


def _check_budget(plan: Plan, worker: str, layouts: tuple[Layout, ...]) -> None:
    for buffer, layout in zip(Buffer, layouts, strict=True):
        if layout.size_bytes > plan.buffer_bytes:
            fullest = int(layout.bytes_of_rounds.argmax())
            raise ProgramError(
                f"{worker}: round {fullest} puts {layout.size_bytes} bytes into the {buffer.name} buffer, "
                f"the plan allows {plan.buffer_bytes}; plan again"
            )


def _not_held(plan: Plan, source_map: SourceMap, worker: str, routes: IdArray) -> ProgramError:
    sent = RunTable.empty().union(*(plan.routes[route].runs for route in routes.tolist()))
    missing = sent.subtract(source_map.held())
    start, stop = missing.intervals[0].tolist()
    return ProgramError(
        f"{worker}: the plan has it send {source_map.space.describe_ids(start, stop)}, which its map does not "
        f"hold ({missing.elements} of {sent.elements} elements); compile with the map the plan was made with"
    )


def _not_served(plan: Plan, source_map: SourceMap, worker: str) -> ProgramError:
    arriving = [route.runs for route in plan.routes if any(hop.target == worker for hop in route.hops)]
    missing = source_map.needed().subtract(RunTable.empty().union(*arriving))
    start, stop = missing.intervals[0].tolist()
    return ProgramError(
        f"{worker}: its map needs {source_map.space.describe_ids(start, stop)}, which the plan does not bring "
        f"({missing.elements} elements); compile with the map the plan was made with"
    )


def _check_codes(worker: str, tensors: tuple[ProgramTensor, ...], pack: IdArray, assemble: IdArray) -> None:
    for table, verb in ((pack, "sent from"), (assemble, "assembled into")):
        bad = np.flatnonzero(table[:, Column.CODE] < 0)
        if len(bad):
            tensor = tensors[int(table[bad[0], Column.TENSOR])]
            raise ProgramError(
                f"{tensor.name} on {worker} is {tensor.dtype}: a checkpoint tensor of another dtype is {verb} it, "
                "and no conversion between the two is defined"
            )
