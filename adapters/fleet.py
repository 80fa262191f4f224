"""Everybody the conductor deals with: who is there, what they hold, and what they are bound to.

A fleet outlives single connects and updates. Engines are known by their processes: one that was started again is
another engine until a connect has discovered it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from adapters.duty_messages import Attach, Bind, Bound, Result
from adapters.events import log_event
from adapters.failures import CoverageError, Failure, LostWorkerError, StaleError, raise_failure
from adapters.messages import ConnectIntent, Member, Roster
from adapters.planning import Connection, group_of, make_connection, topology_of_hosts
from adapters.steps import TRAINERS, Results, Steps, is_complete, missing_ranks
from adapters.transports import reads_memory
from adapters.verification import cells_of
from layout_algebra.source_map import SourceMap
from layout_algebra.space import natural_key
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near
from transfer_exec.errors import UnheldError, UnmappableError, UnreadableError
from transfer_exec.topology import Topology

__all__ = ["Binding", "Engine", "Fleet", "compile_bindings", "incarnations"]


@dataclass(frozen=True, slots=True)
class Engine:
    """A connected engine.

    Attributes
    ----------
    incarnations
        Which processes it is, in rank order.
    digests
        Digests of their source maps.
    version
        What all of them hold; None before the first update.
    staging
        Whether updates land beside their parameters first.
    """

    incarnations: tuple[str, ...]
    digests: tuple[str, ...]
    version: int | None
    staging: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """What one worker is told when it is bound, and whom it writes to; kept so that it can be bound again.

    Of its payload, ``direct_bytes`` go straight from parameter to parameter, ``mapped_bytes`` of those out of memory
    that readers map.
    """

    bind: Bind
    peers: tuple[str, ...]
    direct_bytes: int = 0
    mapped_bytes: int = 0


class Fleet:
    """The state between transactions; used by the conductor's thread only.

    Parameters
    ----------
    trainers
        Worker names in rank order.
    steps
        How groups are spoken to.

    Attributes
    ----------
    maps
        Source maps by digest.
    engines
        Connected engines by group; those that are gone count too, and are reached again when they are back.
    intent, topology, connection
        Of the connect that succeeded last; None before.
    trainers
        Incarnations of the trainers of that connect.
    bindings
        Of the connection, by worker.
    places
        Where peers on other machines reach each worker, in words.
    scattered
        By worker, parameters that nothing can go straight to or from.
    shared
        By trainer, parameters in shared memory.
    unreadable
        Why nothing is read straight out of a parameter: somebody is not allowed to read a peer's memory.
    unmappable
        Why no parameter is mapped: somebody cannot map a peer's shared memory.
    bound
        Whether every worker is bound to it and able to run.
    """

    def __init__(self, trainers: Sequence[str], steps: Steps) -> None:
        self._trainers = tuple(trainers)
        self._steps = steps
        self.maps: dict[str, SourceMap] = {}
        self.engines: dict[str, Engine] = {}
        self.intent: ConnectIntent | None = None
        self.topology: Topology | None = None
        self.connection: Connection | None = None
        self.trainers: dict[str, str] = {}
        self.bindings: dict[str, Binding] = {}
        self.places: dict[str, str] = {}
        self.scattered: dict[str, tuple[str, ...]] = {}
        self.shared: dict[str, tuple[str, ...]] = {}
        self.unreadable = self.unmappable = ""
        self.bound = False
        self._routed: set[str] = set()

    def ranks(self, group: str) -> tuple[str, ...]:
        """Worker names of a group in rank order."""
        if group == TRAINERS:
            return self._trainers
        roster = self._steps.rosters.get(group)
        # One that was lost since it answered had as many ranks as when it was connected.
        size = len(self.engines[group].digests) if roster is None else roster.world_size
        return tuple(f"{group}/{rank}" for rank in range(size))

    def members(self, groups: Iterable[str]) -> list[Member]:
        """Members of the trainers and of some engines."""
        return [m for group in (TRAINERS, *sorted(groups, key=natural_key)) for m in self._steps.rosters[group].members]

    def by_worker(self, results: Results) -> dict[str, Result | None]:
        """Results of groups as results of workers."""
        return {w: one for group in results for w, one in zip(self.ranks(group), results[group], strict=True)}

    def present_engines(self) -> list[str]:
        """Connected engines all of whose processes are still the same."""
        rosters = self._steps.rosters
        return [
            group
            for group, engine in self.engines.items()
            if is_complete(rosters.get(group)) and incarnations(rosters[group]) == engine.incarnations
        ]

    def version_of(self, group: str) -> int | None:
        """The version that an engine holds, as far as is known."""
        roster, engine = self._steps.rosters[group], self.engines.get(group)
        if engine is not None and engine.incarnations == incarnations(roster):
            return engine.version
        return max((m.version for m in roster.members if m.version is not None), default=None)

    def plan(
        self,
        intent: ConnectIntent,
        topology: Topology | None,
        holders: Mapping[str, SourceMap],
        needers: Mapping[str, SourceMap],
    ) -> Connection:
        """Make a connection of these workers; without a topology, from the machines they run on."""
        if topology is None:
            members = self.members({group_of(worker) for worker in needers})
            topology = topology_of_hosts(
                {m.worker: m.host for m in members if m.worker in holders or m.worker in needers}
            )
        made = make_connection(
            holders,
            needers,
            topology,
            buffer_bytes=intent.buffer_bytes,
            allow_partial=intent.allow_partial,
            cast=intent.cast,
        )
        log_event(
            "plan",
            TRAINERS,
            trainers=len(holders),
            engines=len({group_of(worker) for worker in needers}),
            rollouts=len(needers),
            rounds=made.plan.rounds,
            planned_s=made.plan.load_s,
            digest=made.plan.digest()[:12],
        )
        return made

    def compile(self, connection: Connection, transport: str, *, verify: str) -> dict[str, Binding]:
        """Every worker's program, what it must digest, and whom it writes to."""
        near = self._near(connection) if reads_memory(transport) else None
        return compile_bindings(connection, transport, verify=verify, near=near)

    def compile_again(self) -> None:
        """Make the connection's programs anew, as the last ones were made."""
        assert self.connection is not None
        assert self.intent is not None
        transport = next(iter(self.bindings.values())).bind.transport
        self.bindings = self.compile(self.connection, transport, verify=self.intent.verify)

    def bind(self, bindings: Mapping[str, Binding]) -> dict[str, Failure]:
        """Bind every worker to its program and tell it where its peers' memory is: two steps of the transaction.

        Returns
        -------
        dict
            Engines that could not be bound, and why: then nobody is, and the others need a plan without them.

        Raises
        ------
        TransferError
            If a trainer cannot be bound.
        UnreadableError, UnmappableError
            If a worker is not allowed to read a peer's memory, or cannot map it; then ``unreadable`` or ``unmappable``
            says so, and what is compiled from then on needs no reading, or no mapping.
        """
        self.bound = False
        self._let_rest(bindings)
        groups = sorted({group_of(worker) for worker in bindings}, key=natural_key)
        engines = {group_of(worker) for worker in bindings} - {TRAINERS}
        machines = len({member.host for member in self.members(engines)})
        binds = {worker: structs.replace(each.bind, machines=machines) for worker, each in bindings.items()}
        results, failures = self._steps.run_each(
            {g: tuple(binds.get(w) for w in self.ranks(g)) for g in groups}, decisive=(TRAINERS,)
        )
        failures |= self._steps.absent(results)
        if failures:
            return self._steps.blame(failures)
        bound = self.by_worker(results)
        endpoints = {worker: result.endpoint for worker, result in bound.items() if isinstance(result, Bound)}
        self.places = {worker: result.place for worker, result in bound.items() if isinstance(result, Bound)}
        attach = {w: Attach({peer: endpoints[peer] for peer in each.peers}) for w, each in bindings.items()}
        results, failures = self._steps.run_each({g: tuple(attach.get(w) for w in self.ranks(g)) for g in groups})
        for failure in failures.values():
            if failure.kind == UnreadableError.__name__ and not self.unreadable:
                self.unreadable = str(failure)
                log_event("unreadable", failure.worker, level=logging.WARNING, why=f"{failure}; it goes in rounds")
                raise_failure(failure)
            if failure.kind == UnmappableError.__name__ and not self.unmappable:
                self.unmappable = str(failure)
                log_event("unmappable", failure.worker, level=logging.WARNING, why=f"{failure}; it is read instead")
                raise_failure(failure)
        failures |= self._steps.absent(results)
        if failures:
            return self._steps.blame(failures)
        self.bindings = dict(bindings)
        self.bound = True
        return {}

    def reach(self) -> tuple[list[str], dict[str, str]]:
        """Find the connected engines that an update reaches, with a new plan if they are others than before.

        Returns
        -------
        list of str, dict
            Those that are there, and why each of the others is left out; it is taken in again by itself when the
            processes that were connected are back.

        Raises
        ------
        StaleError
            Before the first connect.
        LostWorkerError
            If no engine is left.
        """
        if self.connection is None or self.intent is None:
            raise StaleError("send_weights before connect; call connect(engines) on every trainer rank first")
        self._steps.wait_back(self.engines)
        groups = self.present_engines()
        left_out = {group: self._why_gone(group) for group in self.engines if group not in groups}
        if not groups:
            told = "; ".join(f"{group}: {why}" for group, why in left_out.items())
            raise LostWorkerError(f"{told}; start it again and call connect")
        for group, why in left_out.items():
            log_event("left_out", group, self.engines[group].version, level=logging.WARNING, why=why)
        self.route(groups)
        # Trainers that stage are spoken to before anybody is bound; a connect that failed since may have told others.
        self._let_rest(self.bindings)
        return groups, left_out

    def route(self, groups: Sequence[str]) -> None:
        """Plan for exactly these engines, and for the trainers that are there, unless the plan at hand is that.

        Raises
        ------
        LostWorkerError
            If the trainers that are there do not hold everything that the engines need.
        """
        assert self.connection is not None
        assert self.intent is not None
        there = {m.worker: m.incarnation for m in self._steps.rosters[TRAINERS].members}
        gone = [w for w, incarnation in self.trainers.items() if there.get(w) != incarnation]
        holders = {w: m for w, m in self.connection.holders.items() if w not in gone}
        if holders.keys() == self.connection.holders.keys() and set(groups) == self._routed:
            return
        needers = {w: self.maps[d] for g in groups for w, d in zip(self.ranks(g), self.engines[g].digests, strict=True)}
        self._steps.note("plan")
        try:
            self.connection = self.plan(self.intent, self.topology, holders, needers)
        except (UnheldError, CoverageError) as error:
            if not gone:
                raise
            raise LostWorkerError(
                f"{', '.join(gone)} is gone, and the other trainers do not hold everything: {error}; start it again "
                "and call connect"
            ) from error
        if gone:
            for worker in gone:
                log_event(
                    "done_without", worker, level=logging.WARNING, why="gone since connect; others hold everything"
                )
        self.compile_again()
        self._routed = set(groups)
        self.bound = False

    def forget(self, groups: Iterable[str]) -> None:
        """Leave engines out until a connect names them again."""
        for group in groups:
            self.engines.pop(group, None)
            log_event("forgotten", group, level=logging.WARNING, why="left out of updates until a connect names it")

    def connected(
        self,
        intent: ConnectIntent,
        topology: Topology | None,
        connection: Connection,
        digests: Mapping[str, tuple[str, ...]],
        staging: Mapping[str, bool],
    ) -> None:
        """Take over what a connect has found and bound."""
        rosters = self._steps.rosters
        engines = {
            g: Engine(incarnations(rosters[g]), d, self.version_of(g), staging[g])
            for g, d in digests.items()
            if g != TRAINERS
        }
        self.intent, self.topology, self.connection = intent, topology, connection
        self.engines, self._routed = engines, set(engines)
        there = {member.worker: member.incarnation for member in rosters[TRAINERS].members}
        self.trainers = {worker: there.get(worker, "") for worker in connection.holders}

    def _why_gone(self, group: str) -> str:
        roster = self._steps.rosters.get(group)
        if is_complete(roster):
            return "started again since connect"
        missing = missing_ranks(group, roster)
        return "gone since connect" if missing == group else f"{missing} gone since connect"

    def _near(self, connection: Connection) -> Near:
        """Who reaches whose parameters, as far as has been said and seen."""
        shared = {} if self.unmappable else {w: self.shared.get(w, ()) for w in connection.holders}
        scattered = {worker: set(self.scattered.get(worker, ())) for worker in connection.maps}
        if self.unreadable:
            for worker, source_map in connection.holders.items():
                scattered[worker] |= set(source_map.parameters) - set(shared.get(worker, ()))
        return Near(connection.maps, scattered, shared=shared)

    def _let_rest(self, bindings: Mapping[str, Binding]) -> None:
        """Speak no more to trainers that have nothing to do."""
        self._steps.idle = {worker for worker in self._trainers if worker not in bindings}


def compile_bindings(
    connection: Connection, transport: str, *, verify: str, near: Near | None = None
) -> dict[str, Binding]:
    """Every worker's program, what it must digest, and whom it writes to."""
    compiler = Compiler(connection.plan, near)
    out = {}
    for worker, source_map in connection.maps.items():
        program = compiler.program(worker, source_map)
        cells = () if verify == "off" else cells_of(connection.correspondence, worker)
        own_load = verify == "full" and worker in connection.needers
        # One that keeps some of what it needs does not know which, so it is told.
        kept = source_map.to_bytes() if connection.kept and worker in connection.needers else b""
        bind = Bind(program.to_bytes(), transport, cells, kept, own_load=own_load)
        out[worker] = Binding(bind, program.peers, program.direct_bytes, program.mapped_bytes)
    return out


def incarnations(roster: Roster) -> tuple[str, ...]:
    """Which processes a group is, in rank order."""
    return tuple(member.incarnation for member in roster.members)
