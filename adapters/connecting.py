"""One connect, as the conductor carries it out: from engines that may not have come yet to a bound plan.

::

    wait for the engines, stop them at one poll, probe, fetch new maps, plan, compile, bind, attach

Nothing of an earlier connect is given up before all of that has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from adapters.connect_report import ConnectReport, describe_worker
from adapters.duty_messages import GiveMap, MapGiven, Probe, Probed, Result, Stay
from adapters.failures import raise_failure
from adapters.fleet import Fleet, compile_bindings, is_complete
from adapters.messages import ConnectIntent, Roster
from adapters.planning import Connection, group_of
from adapters.steps import STOP, TRAINERS, Say, Steps
from adapters.transports import choose_transport
from layout_algebra.source_map import SourceMap
from layout_algebra.space import natural_key
from transfer_exec.errors import DeadlineError
from transfer_exec.topology import Topology

__all__ = ["connect"]

_LISTEN_S = 0.5


def connect(fleet: Fleet, steps: Steps, intent: ConnectIntent, topology: Topology | None) -> None:
    """Carry out a connect that all trainers have called; on return everybody has been told.

    Raises
    ------
    TransferError, LayoutError
        Whatever keeps it from succeeding; nobody but the engines that were waited for has been told.
    """
    seconds: dict[str, float] = {}
    listed = [f"engine/{name}" for name in intent.engines]
    with _timed(seconds, "wait for engines"):
        _await_engines(steps, listed)
        kept = [group for group in fleet.present_engines() if group not in listed]
        groups = sorted([*listed, *kept], key=natural_key)
        transport = choose_transport(fleet.members(groups), intent.transport)
    steps.idle = set()
    with _timed(seconds, "stop"):
        steps.run(dict.fromkeys(groups, STOP))
    with _timed(seconds, "probe"):
        probe: dict[str, Say] = {group: (Probe(),) for group in (TRAINERS, *listed)}
        probed, failures = steps.run_each({**probe, **{group: (Stay(),) for group in kept}}, cancel=True)
        if failures:
            # Everybody has its own bits again by now.
            raise_failure(min(failures.values(), key=lambda failure: failure.echo))
    with _timed(seconds, "fetch maps"):
        digests = {group: _digests(probed[group]) for group in (TRAINERS, *listed)}
        digests |= {group: fleet.engines[group].digests for group in kept}
        _fetch_maps(fleet, steps, digests)
    with _timed(seconds, "plan"):
        holders = _workers_maps(fleet, TRAINERS, digests[TRAINERS])
        needers = {w: m for group in groups for w, m in _workers_maps(fleet, group, digests[group]).items()}
        connection = fleet.plan(intent, topology, holders, needers)
    with _timed(seconds, "compile"):
        bindings = compile_bindings(connection, transport, verify=intent.verify)
    with _timed(seconds, "bind"):
        fleet.bind(bindings)
    fleet.connected(intent, topology, connection, digests)
    for group in groups:
        steps.end(group, None)
    layouts = len({d for each in digests.values() for d in each})
    report = _describe(connection, intent, transport, seconds, layouts, fleet.places)
    steps.end(TRAINERS, None, report.to_bytes())


def _await_engines(steps: Steps, groups: Sequence[str]) -> None:
    stop_at = time.monotonic() + steps.deadline_s
    while missing := [group for group in (TRAINERS, *groups) if not is_complete(steps.rosters.get(group))]:
        if time.monotonic() >= stop_at:
            known = [_missing_ranks(group, steps.rosters.get(group)) for group in missing]
            strangers = steps.turned_away()
            raise DeadlineError(
                f"connect: {'; '.join(known)} within {steps.deadline_s:g} s; start every rank with the "
                "same rendezvous and the engine's name"
                f"{f'; {strangers} handshakes failed here, so some caller has another key' if strangers else ''}"
            )
        steps.listen(min(_LISTEN_S, max(0.0, stop_at - time.monotonic())))


def _fetch_maps(fleet: Fleet, steps: Steps, digests: Mapping[str, Sequence[str]]) -> None:
    """Get every map that is not known yet, from one of the workers that have it."""
    fleet.maps = {d: fleet.maps[d] for each in digests.values() for d in each if d in fleet.maps}
    asked: set[str] = set()
    say: dict[str, Say] = {}
    for group, each in digests.items():
        duties = []
        for one in each:
            new = one not in fleet.maps and one not in asked
            asked.add(one)
            duties.append(GiveMap(one) if new else Stay())
        if any(isinstance(duty, GiveMap) for duty in duties):
            say[group] = tuple(duties)
    for results in steps.run(say).values():
        for result in results:
            if isinstance(result, MapGiven):
                given = SourceMap.from_bytes(result.data)
                fleet.maps[given.digest()] = given


def _workers_maps(fleet: Fleet, group: str, digests: Sequence[str]) -> dict[str, SourceMap]:
    return {worker: fleet.maps[one] for worker, one in zip(fleet.ranks(group), digests, strict=True)}


def _describe(
    connection: Connection,
    intent: ConnectIntent,
    transport: str,
    seconds: dict[str, float],
    layouts: int,
    places: Mapping[str, str],
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
        places={worker: place for worker, place in places.items() if place},
    )


def _digests(results: Sequence[Result | None]) -> tuple[str, ...]:
    """Map digests of a group's probes, in rank order."""
    return tuple(result.map_digest for result in results if isinstance(result, Probed))


def _missing_ranks(group: str, roster: Roster | None) -> str:
    if roster is None or not roster.members:
        return f"{group} did not come"
    there = {member.rank for member in roster.members}
    return f"{', '.join(f'{group}/{rank}' for rank in range(roster.world_size) if rank not in there)} did not come"


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
