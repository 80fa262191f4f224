"""One connect, as the conductor carries it out: from engines that may not have come yet to a bound plan.

::

    wait for the engines, stop them at one poll, probe, fetch new maps, plan, compile, bind, attach

An engine that fails, hangs or is lost on the way is told, left out, and named in the report; the others go on. So do
trainers without one that did not call, if they hold everything. Nothing of an earlier connect is given up before the
workers are bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from adapters.connect_report import ConnectReport, describe_worker
from adapters.duty_messages import Duty, GiveMap, MapGiven, Probe, Probed, Stay
from adapters.events import log_event
from adapters.failures import CoverageError, Failure, LostWorkerError, StaleError, UsageError, raise_failure
from adapters.fleet import Fleet
from adapters.messages import ConnectIntent
from adapters.paths import Answers
from adapters.planning import Connection, group_of
from adapters.steps import STOP, TRAINERS, Results, Say, Steps, is_complete, missing_ranks
from adapters.transports import choose_transport
from layout_algebra.source_map import SourceMap
from layout_algebra.space import natural_key
from transfer_exec.errors import DeadlineError, UnheldError, UnmappableError, UnreadableError
from transfer_exec.topology import Topology

__all__ = ["connect"]

_LISTEN_S = 0.5


def connect(
    fleet: Fleet, steps: Steps, intent: ConnectIntent, topology: Topology | None, absent: Sequence[str] = ()
) -> None:
    """Carry out a connect that all trainers have called but those that are absent; on return everybody has been told.

    Raises
    ------
    TransferError, LayoutError
        Whatever keeps it from succeeding, for instance that no engine that it names can be connected.
    """
    seconds: dict[str, float] = {}
    lost: dict[str, Failure] = {}
    listed = [f"engine/{name}" for name in intent.engines]
    log_event("connecting", TRAINERS, engines=",".join(intent.engines), absent=",".join(absent))
    with _timed(seconds, "wait for engines"):
        _await_engines(steps, listed)
        kept = [group for group in fleet.present_engines() if group not in listed]
        groups = sorted([*listed, *kept], key=natural_key)
        transport = choose_transport(fleet.members(groups), intent.transport)
    steps.idle = set(absent)
    with _timed(seconds, "stop"):
        stopped = steps.run_without(dict.fromkeys(groups, STOP), lost)
        groups = [group for group in groups if group in stopped]
    with _timed(seconds, "probe"):
        probe: dict[str, Say] = {group: (Probe() if group in listed else Stay(),) for group in groups}
        probed = steps.run_without({TRAINERS: (Probe(),), **probe}, lost, decisive=(TRAINERS,))
        digests = {group: _digests(fleet, group, probed) for group in (TRAINERS, *groups) if group in probed}
        answers = {worker: one for worker, one in fleet.by_worker(probed).items() if isinstance(one, Probed)}
        fleet.scattered |= {worker: one.scattered for worker, one in answers.items()}
        fleet.shared |= {worker: one.shared for worker, one in answers.items()}
        fleet.unreadable = fleet.unmappable = ""
        staging = {group: _staging(fleet, group, probed[group]) for group in groups if group in probed}
    with _timed(seconds, "fetch maps"):
        _fetch_maps(fleet, steps, digests, lost)
    while True:
        groups = steps.leave_out([group for group in digests if group != TRAINERS], {}, lost)
        if lost and not any(group in listed for group in groups):
            raise_failure(next(iter(lost.values())))
        digests = {group: digests[group] for group in (TRAINERS, *groups)}
        steps.note("plan")
        with _timed(seconds, "plan"):
            holders = {worker: fleet.maps[one] for worker, one in digests[TRAINERS].items()}
            needers = {worker: fleet.maps[one] for group in groups for worker, one in digests[group].items()}
            try:
                connection = fleet.plan(intent, topology, holders, needers)
            except (UnheldError, CoverageError) as error:
                _raise_absent(steps, absent, error)
                raise
        with _timed(seconds, "compile"):
            bindings = fleet.compile(connection, transport, verify=intent.verify)
        try:
            with _timed(seconds, "bind"):
                failures = fleet.bind(bindings)
        except (UnreadableError, UnmappableError):
            continue  # compile again, without
        if not failures:
            break
        left = steps.leave_out(groups, failures, lost)
        digests = {group: digests[group] for group in (TRAINERS, *left)}
    found = {group: tuple(each.values()) for group, each in digests.items()}
    fleet.connected(intent, topology, connection, found, staging)
    for group in groups:
        steps.end(group, None)
    layouts = len({one for each in digests.values() for one in each.values()})
    report = _describe(fleet, connection, intent, transport, seconds, layouts, lost)
    took_s = sum(seconds.values())
    log_event("connected", TRAINERS, engines=",".join(report.engines), lost=",".join(report.lost), seconds=took_s)
    steps.end(TRAINERS, None, report.to_bytes())


def _raise_absent(steps: Steps, absent: Sequence[str], error: Exception) -> None:
    """Say whose absence is why the trainers do not hold everything."""
    lacking = f"and the other trainers do not hold everything: {error}; call connect on every trainer rank"
    gone = [worker for worker in absent if worker in steps.gone]
    if gone:
        raise LostWorkerError(f"{', '.join(gone)} is gone, {lacking}") from error
    if absent:
        raise DeadlineError(
            f"{', '.join(absent)} did not call connect within {steps.deadline_s:g} s, {lacking}"
        ) from error


def _await_engines(steps: Steps, groups: Sequence[str]) -> None:
    steps.note(f"wait for {', '.join(groups)}")
    stop_at = time.monotonic() + steps.deadline_s
    while missing := [group for group in groups if not is_complete(steps.rosters.get(group))]:
        if time.monotonic() >= stop_at:
            known = [f"{missing_ranks(group, steps.rosters.get(group))} did not come" for group in missing]
            strangers = steps.turned_away()
            raise DeadlineError(
                f"connect: {'; '.join(known)} within {steps.deadline_s:g} s; start every rank with the "
                "same rendezvous and the engine's name"
                f"{f'; {strangers} handshakes failed here, so some caller has another key' if strangers else ''}"
            )
        steps.listen(min(_LISTEN_S, max(0.0, stop_at - time.monotonic())))


def _fetch_maps(fleet: Fleet, steps: Steps, digests: dict[str, dict[str, str]], lost: dict[str, Failure]) -> None:
    """Get every map that is not known yet, from one of the workers that have it; engines that fail are left out."""
    fleet.maps = {d: fleet.maps[d] for each in digests.values() for d in each.values() if d in fleet.maps}
    while say := _requests(fleet, digests):
        results, failures = steps.run_each(say)
        left = steps.leave_out([group for group in digests if group != TRAINERS], failures, lost)
        for group in digests.keys() - {TRAINERS, *left}:
            del digests[group]
        for result in (each for group in results for each in results[group]):
            if isinstance(result, MapGiven):
                given = SourceMap.from_bytes(result.data)
                fleet.maps[given.digest()] = given
        for group in results:
            if any(isinstance(duty, GiveMap) and duty.digest not in fleet.maps for duty in say[group]):
                raise StaleError(f"{group}: gave another source map than it had found; call connect again")


def _requests(fleet: Fleet, digests: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[Duty | None, ...]]:
    """Whom to ask for which maps: every one that is missing once."""
    asked: set[str] = set()
    say: dict[str, tuple[Duty | None, ...]] = {}
    for group, each in digests.items():
        duties: dict[str, Duty] = dict.fromkeys(each, Stay())
        for worker, one in each.items():
            if one not in fleet.maps and one not in asked:
                asked.add(one)
                duties[worker] = GiveMap(one)
        if any(isinstance(duty, GiveMap) for duty in duties.values()):
            say[group] = tuple(duties.get(worker) for worker in fleet.ranks(group))
    return say


def _describe(
    fleet: Fleet,
    connection: Connection,
    intent: ConnectIntent,
    transport: str,
    seconds: dict[str, float],
    layouts: int,
    lost: Mapping[str, Failure],
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
        workers=tuple(
            describe_worker(
                worker,
                source_map,
                plan,
                direct_bytes=fleet.bindings[worker].direct_bytes,
                mapped_bytes=fleet.bindings[worker].mapped_bytes,
            )
            for worker, source_map in connection.maps.items()
        ),
        seconds=seconds,
        places={worker: place for worker, place in fleet.places.items() if place},
        lost={group.removeprefix("engine/"): str(why) for group, why in lost.items()},
        unreadable=fleet.unreadable,
        unmappable=fleet.unmappable,
    )


def _digests(fleet: Fleet, group: str, results: Results) -> dict[str, str]:
    """Worker -> digest of its map, in rank order; of engines that were not probed again, as known."""
    probed = {
        worker: one.map_digest
        for worker, one in zip(fleet.ranks(group), results[group], strict=True)
        if isinstance(one, Probed)
    }
    return probed or dict(zip(fleet.ranks(group), fleet.engines[group].digests, strict=True))


def _staging(fleet: Fleet, group: str, answers: Answers) -> bool:
    """Whether an engine stages; of one that was not probed again, as known."""
    probed = [answer for answer in answers if isinstance(answer, Probed)]
    if not probed:
        return fleet.engines[group].staging
    stage = [str(rank) for rank, answer in enumerate(probed) if answer.staging]
    if 0 < len(stage) < len(probed):
        raise UsageError(
            f"{group}: ranks {', '.join(stage)} have staging=True, the others of {len(probed)} have not; give all "
            "ranks of an engine the same"
        )
    return bool(stage)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
