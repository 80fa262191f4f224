"""The conductor: one thread of trainer rank 0 that carries out connects and updates for everybody.

It reads like the protocol it is: every step is said to the groups it concerns and waited for under a deadline. Any
failure ends the transaction for everyone who takes part, with the reason, so that nobody waits to learn it.

::

    connect   wait for the engines, stop them at one poll, probe, fetch new maps, plan, bind, attach
    update    stop the engines at one poll, prepare, transfer, compare digests, install
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from adapters.connect_report import ConnectReport, describe_worker
from adapters.failures import (
    ClosedError,
    DisagreementError,
    Failure,
    LostWorkerError,
    StaleError,
    UsageError,
    VerificationError,
    VersionError,
    failure_of,
    raise_failure,
)
from adapters.messages import (
    Assess,
    Assessed,
    Attach,
    Bind,
    Bound,
    Call,
    ConnectIntent,
    FromLead,
    GiveMap,
    Install,
    MapGiven,
    Member,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Publish,
    Result,
    Roster,
    SendIntent,
    Stay,
    ToLead,
    Transfer,
    Transferred,
)
from adapters.planning import Connection, group_of, make_connection, topology_of_hosts
from adapters.steps import STOP, TRAINERS, GroupLost, Results, Say, Steps
from adapters.update_report import gather_report, report_bytes
from adapters.verification import Digests, cells_of, check_digests, check_holders
from layout_algebra.source_map import SourceMap
from layout_algebra.space import natural_key
from transfer_exec.compiler import compile_program
from transfer_exec.errors import DeadlineError
from transfer_exec.topology import Topology

__all__ = ["Conductor"]

_LISTEN_S = 0.5
_ASSESS_WITHIN_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Engine:
    """A connected engine: which processes it was, what they hold, and its version."""

    incarnations: tuple[str, ...]
    digests: tuple[str, ...]
    version: int | None


@dataclass(frozen=True, slots=True)
class _Binding:
    """What one worker is told when it is bound, kept so that it can be bound again."""

    bind: Bind
    peers: tuple[str, ...]


class Conductor:
    """Runs on trainer rank 0.

    Parameters
    ----------
    trainers
        Worker names in rank order.
    send
        Takes a message to a group's lead; any thread may call it.
    deadline_s
        Of every step.
    """

    def __init__(self, trainers: Sequence[str], send: Callable[[str, ToLead], None], *, deadline_s: float) -> None:
        self._trainers = tuple(trainers)
        self._steps = Steps(send, deadline_s=deadline_s)
        self._topology: Topology | None = None
        self._maps: dict[str, SourceMap] = {}
        self._holders: tuple[str, ...] = ()
        self._engines: dict[str, _Engine] = {}
        self._intent: ConnectIntent | None = None
        self._connection: Connection | None = None
        self._bindings: dict[str, _Binding] = {}
        self._bound = False
        self._thread = threading.Thread(target=self._run, name="transload conductor", daemon=True)

    def hear(self, item: FromLead | GroupLost) -> None:
        """Take something from a lead; any thread may call it."""
        self._steps.hear(item)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._steps.close()
        self._thread.join()

    def offer_topology(self, topology: Topology | None) -> None:
        """Rank 0's own argument of the connect that it is about to call."""
        self._topology = topology

    # The thread

    def _run(self) -> None:
        waiting_since: float | None = None
        while True:
            try:
                self._steps.listen(_LISTEN_S)
                calls = self._steps.calls
                if not calls:
                    continue
                waiting_since = waiting_since or time.monotonic()
                if self._check_calls(calls, time.monotonic() - waiting_since):
                    self._conduct(calls)
                    waiting_since = None
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainers that called must hear of it
                self._fail(error)
                waiting_since = None

    def _fail(self, error: Exception) -> None:
        _log.debug("a transaction failed", exc_info=error)
        self._steps.end_all(failure_of(error, ""))

    def _check_calls(self, calls: Mapping[str, Call], waited_s: float) -> bool:
        """Whether every trainer has called; raises what keeps the call from beginning.

        Nothing is raised before all are there, or the deadline is over: a rank that has not called would not hear it.
        """
        missing = [worker for worker in self._trainers if worker not in calls]
        gone = [worker for worker in missing if worker in self._steps.gone]
        if missing and not gone and waited_s < self._steps.deadline_s:
            return False
        self._steps.open()
        first = next(iter(calls.values()))
        for call in calls.values():
            if call.failure is not None:
                raise_failure(call.failure)
            if call.intent != first.intent:
                raise DisagreementError(
                    f"{first.worker} called {_shown(first)}, {call.worker} called {_shown(call)}; every trainer rank "
                    "must make the same call"
                )
        if gone:
            raise LostWorkerError(f"{', '.join(gone)} is gone, and {_shown(first)} is collective over the trainers")
        if missing:
            raise DeadlineError(
                f"{', '.join(missing)} did not call {_shown(first)} within {self._steps.deadline_s:g} s; it is "
                "collective over the trainers"
            )
        return True

    def _conduct(self, calls: Mapping[str, Call]) -> None:
        call = calls[self._trainers[0]]
        match call.intent:
            case ConnectIntent():
                self._connect(call.intent)
            case SendIntent(version):
                self._update(version, call.metadata)

    # Connect

    def _connect(self, intent: ConnectIntent) -> None:
        seconds: dict[str, float] = {}
        listed = [f"engine/{name}" for name in intent.engines]
        with _timed(seconds, "wait for engines"):
            self._await_engines(listed)
            kept = [group for group in self._present_engines() if group not in listed]
            groups = sorted([*listed, *kept], key=natural_key)
            transport = self._choose_transport(intent.transport, groups)
        with _timed(seconds, "stop"):
            self._steps.run(dict.fromkeys(groups, STOP))
        with _timed(seconds, "probe"):
            probe: dict[str, Say] = {group: (Probe(),) for group in (TRAINERS, *listed)}
            probed = self._steps.run({**probe, **{group: (Stay(),) for group in kept}})
        with _timed(seconds, "fetch maps"):
            digests = {group: _digests(probed[group]) for group in (TRAINERS, *listed)}
            digests |= {group: self._engines[group].digests for group in kept}
            self._fetch_maps(digests)
        with _timed(seconds, "plan"):
            holders = self._workers_maps(TRAINERS, digests[TRAINERS])
            needers = {w: m for group in groups for w, m in self._workers_maps(group, digests[group]).items()}
            connection = self._plan(intent, holders, needers)
        with _timed(seconds, "compile"):
            bindings = _compile(connection, transport, verify=intent.verify)
        with _timed(seconds, "bind"):
            self._bind(bindings)
        self._intent, self._connection, self._holders = intent, connection, digests[TRAINERS]
        self._engines = {
            group: _Engine(_incarnations(self._steps.rosters[group]), digests[group], self._version_of(group))
            for group in groups
        }
        for group in groups:
            self._steps.end(group, None)
        report = _describe(connection, intent, transport, seconds, len({d for each in digests.values() for d in each}))
        self._steps.end(TRAINERS, None, report.to_bytes())

    def _await_engines(self, groups: Sequence[str]) -> None:
        stop_at = time.monotonic() + self._steps.deadline_s
        while missing := [group for group in (TRAINERS, *groups) if not _complete(self._steps.rosters.get(group))]:
            if time.monotonic() >= stop_at:
                known = [_missing_ranks(group, self._steps.rosters.get(group)) for group in missing]
                raise DeadlineError(
                    f"connect: {'; '.join(known)} within {self._steps.deadline_s:g} s; start every rank with the "
                    "same rendezvous and the engine's name"
                )
            self._steps.listen(min(_LISTEN_S, max(0.0, stop_at - time.monotonic())))

    def _choose_transport(self, wanted: str, groups: Sequence[str]) -> str:
        members = self._members(groups)
        chosen = "shared_memory" if wanted == "auto" else wanted
        for member in members:
            if member.transport not in ("auto", chosen):
                raise UsageError(f"{member.worker} asks for transport {member.transport}, the trainers for {wanted}")
        elsewhere = next((member for member in members if member.host != members[0].host), None)
        if elsewhere is not None:
            raise UsageError(
                f"{members[0].worker} runs on {members[0].host}, {elsewhere.worker} on {elsewhere.host}; the transport "
                f"{chosen} stays inside one machine, and no other is available yet"
            )
        return chosen

    def _fetch_maps(self, digests: Mapping[str, Sequence[str]]) -> None:
        """Get every map that is not known yet, from one of the workers that have it."""
        self._maps = {d: self._maps[d] for each in digests.values() for d in each if d in self._maps}
        asked: set[str] = set()
        say: dict[str, Say] = {}
        for group, each in digests.items():
            duties = []
            for one in each:
                new = one not in self._maps and one not in asked
                asked.add(one)
                duties.append(GiveMap(one) if new else Stay())
            if any(isinstance(duty, GiveMap) for duty in duties):
                say[group] = tuple(duties)
        for results in self._steps.run(say).values():
            for result in results:
                if isinstance(result, MapGiven):
                    given = SourceMap.from_bytes(result.data)
                    self._maps[given.digest()] = given

    def _plan(
        self, intent: ConnectIntent, holders: Mapping[str, SourceMap], needers: Mapping[str, SourceMap]
    ) -> Connection:
        groups = {group_of(worker) for worker in needers}
        topology = self._topology
        if topology is None:
            topology = topology_of_hosts({member.worker: member.host for member in self._members(groups)})
        return make_connection(
            holders,
            needers,
            topology,
            buffer_bytes=intent.buffer_bytes,
            allow_partial=intent.allow_partial,
            cast=intent.cast,
        )

    def _bind(self, bindings: Mapping[str, _Binding]) -> None:
        """Bind every worker to its program and tell it where its peers' memory is."""
        self._bound = False
        groups = sorted({group_of(worker) for worker in bindings}, key=natural_key)
        bound = self._steps.run({group: tuple(bindings[w].bind for w in self._ranks(group)) for group in groups})
        endpoints = {
            worker: result.endpoint
            for group in groups
            for worker, result in zip(self._ranks(group), bound[group], strict=True)
            if isinstance(result, Bound)
        }
        self._steps.run(
            {
                group: tuple(
                    Attach({peer: endpoints[peer] for peer in bindings[worker].peers}) for worker in self._ranks(group)
                )
                for group in groups
            }
        )
        self._bindings = dict(bindings)
        self._bound = True

    # Update

    def _update(self, version: int, metadata: bytes) -> None:
        groups = self._connected_engines()
        for group in groups:
            known = self._engines[group].version
            if known is not None and version <= known:
                raise VersionError(f"version {version} is not newer than {known}, which {group} has; they must grow")
        connection, intent = self._connection, self._intent
        assert connection is not None
        assert intent is not None
        prepare: Say = (Prepare(version, metadata),)
        if self._bound:
            # Before the engines stop: trainers' digests take a while, and nobody else need wait for them.
            holding = self._by_worker(self._steps.run({TRAINERS: prepare}))
            self._steps.run(dict.fromkeys(groups, STOP))
        else:
            self._steps.run(dict.fromkeys(groups, STOP))
            self._bind(self._bindings)
            holding = self._by_worker(self._steps.run({TRAINERS: prepare}))
        sent = _digests_sent(holding)
        check_holders(connection.correspondence, sent)
        prepared = self._by_worker(self._steps.run(dict.fromkeys(groups, prepare)))
        if any(isinstance(result, Prepared) and result.moved for result in prepared.values()):
            self._bind(self._bindings)
        self._bound = False
        results, failures = self._steps.run_each(dict.fromkeys([TRAINERS, *groups], (Transfer(version),)), cancel=True)
        moved = self._by_worker(results)
        failures |= self._compare(sent, moved, [group for group in groups if group in results])
        for duty in (Install(version), Publish(version)):
            left = [group for group in groups if group not in failures]
            results, refused = self._steps.run_each(dict.fromkeys(left, (duty,)), cancel=False)
            failures |= refused
        for group in results:
            self._engines[group] = replace(self._engines[group], version=version)
            self._steps.end(group, None)
        if failures:
            self._give_up(_joined(version, failures, list(results)), [group for group in groups if group in failures])
            return
        self._bound = True
        report = gather_report(connection, holding, moved, self._by_worker(results), verify=intent.verify)
        self._steps.end(TRAINERS, None, report_bytes(report))

    def _give_up(self, failure: Failure, groups: Sequence[str]) -> None:
        """End an update that failed in some engines; one of whose ranks any was written is torn as a whole."""
        assessed, silent = self._steps.run_each(
            dict.fromkeys(groups, (Assess(),)), cancel=False, within_s=_ASSESS_WITHIN_S
        )
        for group in groups:
            wrote = any(isinstance(result, Assessed) and result.wrote for result in assessed.get(group, ()))
            self._steps.end(group, failure, torn=wrote or group in silent)
        self._steps.end_all(failure)

    def _compare(self, sent: Digests, moved: Mapping[str, Result | None], groups: Sequence[str]) -> dict[str, Failure]:
        """Engines whose digests differ from the trainers', and why they must not be used."""
        assert self._connection is not None
        failures = {}
        for group in groups:
            landed = {
                worker: result.digests
                for worker, result in moved.items()
                if group_of(worker) == group and isinstance(result, Transferred)
            }
            try:
                check_digests(self._connection.correspondence, sent, landed)
            except VerificationError as error:
                failures[group] = failure_of(error, "")
        return failures

    def _connected_engines(self) -> list[str]:
        """Engines that an update reaches; those that are gone are left out, with a new plan for the others."""
        if self._connection is None or self._intent is None:
            raise StaleError("send_weights before connect; call connect(engines) on every trainer rank first")
        groups = self._present_engines()
        gone = [group for group in self._engines if group not in groups]
        if not groups:
            raise LostWorkerError(f"{', '.join(gone)}: gone since connect; start it again and call connect")
        if gone:
            _log.warning("%s: gone since connect, left out from now on", ", ".join(gone))
            needers = {w: m for w, m in self._connection.needers.items() if group_of(w) in groups}
            self._connection = self._plan(self._intent, self._connection.holders, needers)
            transport = next(iter(self._bindings.values())).bind.transport
            self._bindings = _compile(self._connection, transport, verify=self._intent.verify)
            self._bound = False
            self._engines = {group: self._engines[group] for group in groups}
        return groups

    # Who is there

    def _ranks(self, group: str) -> tuple[str, ...]:
        if group == TRAINERS:
            return self._trainers
        return tuple(f"{group}/{rank}" for rank in range(self._steps.rosters[group].world_size))

    def _members(self, groups: Iterable[str]) -> list[Member]:
        """Members of the trainers and of some engines."""
        return [m for group in (TRAINERS, *sorted(groups, key=natural_key)) for m in self._steps.rosters[group].members]

    def _present_engines(self) -> list[str]:
        """Connected engines all of whose processes are still the same."""
        rosters = self._steps.rosters
        return [
            group
            for group, engine in self._engines.items()
            if _complete(rosters.get(group)) and _incarnations(rosters[group]) == engine.incarnations
        ]

    def _version_of(self, group: str) -> int | None:
        """The version that an engine holds, as far as is known."""
        roster, engine = self._steps.rosters[group], self._engines.get(group)
        if engine is not None and engine.incarnations == _incarnations(roster):
            return engine.version
        return max((m.version for m in roster.members if m.version is not None), default=None)

    def _workers_maps(self, group: str, digests: Sequence[str]) -> dict[str, SourceMap]:
        return {worker: self._maps[one] for worker, one in zip(self._ranks(group), digests, strict=True)}

    def _by_worker(self, results: Results) -> dict[str, Result | None]:
        return {w: one for group in results for w, one in zip(self._ranks(group), results[group], strict=True)}


def _compile(connection: Connection, transport: str, *, verify: str) -> dict[str, _Binding]:
    """Every worker's program, what it must digest, and whom it writes to."""
    out = {}
    for worker, source_map in connection.maps.items():
        program = compile_program(connection.plan, worker, source_map)
        cells = cells_of(connection.correspondence, worker) if verify == "digest" else ()
        out[worker] = _Binding(Bind(program.to_bytes(), transport, cells), program.peers)
    return out


def _describe(
    connection: Connection, intent: ConnectIntent, transport: str, seconds: dict[str, float], layouts: int
) -> ConnectReport:
    plan, space = connection.plan, connection.correspondence.space
    sides: dict[str, set[str]] = {}
    for worker, source_map in connection.maps.items():
        unused = set(source_map.coverage().unused_tensors)
        sides[group_of(worker)] = sides.get(group_of(worker), unused) & unused
    return ConnectReport(
        engines=tuple(side.removeprefix("engine/") for side in sides if side != TRAINERS),
        tensors=len(space),
        elements=space.total_elements,
        layouts=layouts,
        unused={side: tuple(sorted(names, key=natural_key)) for side, names in sides.items()},
        kept=connection.kept,
        plan_digest=plan.digest(),
        transport=transport,
        buffer_bytes=intent.buffer_bytes,
        rounds=plan.rounds,
        verify=intent.verify,
        lower_bound_s=plan.lower_bound_s,
        bound_link=plan.bound_link,
        optimum_s=plan.optimum_s,
        planned_s=plan.load_s,
        workers=tuple(describe_worker(worker, source_map, plan) for worker, source_map in connection.maps.items()),
        seconds=seconds,
    )


def _digests(results: Sequence[Result | None]) -> tuple[str, ...]:
    """Map digests of a group's probes, in rank order."""
    return tuple(result.map_digest for result in results if isinstance(result, Probed))


def _digests_sent(results: Mapping[str, Result | None]) -> Digests:
    return {worker: result.digests for worker, result in results.items() if isinstance(result, Prepared)}


def _incarnations(roster: Roster) -> tuple[str, ...]:
    return tuple(member.incarnation for member in roster.members)


def _complete(roster: Roster | None) -> bool:
    return roster is not None and len(roster.members) == roster.world_size


def _missing_ranks(group: str, roster: Roster | None) -> str:
    if roster is None or not roster.members:
        return f"{group} did not come"
    there = {member.rank for member in roster.members}
    return f"{', '.join(f'{group}/{rank}' for rank in range(roster.world_size) if rank not in there)} did not come"


def _joined(version: int, failures: Mapping[str, Failure], fine: Sequence[str]) -> Failure:
    """One failure that tells of all, and of who has the version nevertheless."""
    first = next(iter(failures.values()))
    texts = dict.fromkeys(str(failure) for failure in failures.values())
    has = f"; {', '.join(fine)} has version {version}" if fine else ""
    return Failure(first.kind, "", f"version {version}: {'; '.join(texts)}{has}")


def _shown(call: Call) -> str:
    match call.intent:
        case SendIntent(version):
            return f"send_weights({version})"
        case ConnectIntent():
            named = ", ".join(f"{k}={v!r}" for k, v in msgspec.structs.asdict(call.intent).items() if v)
            return f"connect({named})"


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
