"""A plan: which element travels which way, in which round.

A plan is a list of *routes*. A route is a set of ids that share one way through the cluster: the worker that
packs them and the hops they take, receive first, then external, then internal. Every route is cut into as many
near-equal parts as there are rounds, and part k passes all its hops in round k, so that each round keeps every
link as busy as every other round. (A plan with ``groups`` cuts routes at their edges instead.) A worker's moves follow
from that:

::

    route  ids 1..9   trainer/0 -receive-> engine/0/0 -internal-> engine/0/1      3 rounds
    moves  round 0: ids 1..3   round 1: ids 4..6   round 2: ids 7..9

Plans are values: the same demand on the same cluster gives the same plan and the same digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layout_algebra.runs import RunTable
from transfer_exec.errors import PlanError
from transfer_exec.hops import HopTable
from transfer_exec.laws import check_structure
from transfer_exec.schedule import GroupedSchedule, Groups, Schedule


class Stage(Enum):
    """The three stages that every round passes, in order."""

    RECEIVE = 0
    EXTERNAL = 1
    INTERNAL = 2


class Hop(NamedTuple):
    """One transfer of a route's ids from one worker to another."""

    stage: Stage
    source: str
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Ids that travel together.

    Attributes
    ----------
    runs
        The ids. Two routes have none in common, or the very same ones and then other holders and other targets:
        where a node holds ids that others need, its holder serves it beside the route that crosses the network.
    item_bytes
        Bytes of one element on the wire.
    holder
        The worker that packs them.
    hops
        In stage order, at least one: RECEIVE from the holder to the first receiver, EXTERNAL from there to one
        entry worker in every other node of its cluster and to one gateway in every other cluster, EXTERNAL from a
        gateway to one entry worker in every other node of its own, INTERNAL from the holder or an entry worker to
        workers of its node. No worker is a target twice.
    """

    runs: RunTable
    item_bytes: int
    holder: str
    hops: tuple[Hop, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the route's ids, counted once."""
        return self.runs.elements * self.item_bytes

    def legs(self) -> tuple[int, ...]:
        """Per hop, 1 if its source is a gateway, which got the ids earlier in the same stage, else 0."""
        gateways = {hop.target for hop in self.hops if hop.stage is Stage.EXTERNAL}
        return tuple(int(hop.stage is Stage.EXTERNAL and hop.source in gateways) for hop in self.hops)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Ids that go from one worker to another in one stage of one round.

    Attributes
    ----------
    stage, round, source, target
        When and between whom.
    runs
        The ids.
    item_bytes
        Bytes of one element on the wire; a move's elements are equally wide.
    """

    stage: Stage
    round: int
    source: str
    target: str
    runs: RunTable
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Payload bytes of the move."""
        return self.runs.elements * self.item_bytes


@dataclass(frozen=True, eq=False)
class Plan:
    """A whole update, for every worker. Checked when it is made: PlanError if it breaks a law (``laws``).

    Attributes
    ----------
    space_digest
        Digest of the checkpoint space whose ids the routes name.
    holders, needers
        All workers of either side in natural order, those without traffic included.
    nodes
        Node number of every worker of ``holders + needers``.
    routes
        Ascending by first id, those of the same ids by holder.
    rounds
        At least 1.
    buffer_bytes
        The budget per worker and round: bytes received in one stage, and distinct bytes packed.
    lower_bound_s
        No lawful plan is faster: the largest required bytes over bandwidth of any link.
    bound_link
        The link that gives ``lower_bound_s``, as a person reads it.
    optimum_s
        The linear program's own optimum: no division of the demand has a smaller largest load over bandwidth.
    load_s
        The largest load over bandwidth of this plan, after rounding to elements.
    clusters
        Cluster number of every worker of ``holders + needers``; left out where there is one cluster.
    groups
        Ids that stay together and the round of each; by default every route is cut into equal parts.
    table
        ``HopTable.of(routes, workers)`` if somebody has it already; it takes long for large plans.
    """

    space_digest: str
    holders: tuple[str, ...]
    needers: tuple[str, ...]
    nodes: tuple[int, ...]
    routes: tuple[Route, ...]
    rounds: int
    buffer_bytes: int
    lower_bound_s: float
    bound_link: str
    optimum_s: float
    load_s: float
    clusters: tuple[int, ...] = ()
    groups: Groups | None = None
    table: InitVar[HopTable | None] = None

    @property
    def workers(self) -> tuple[str, ...]:
        """Holders, then needers."""
        return self.holders + self.needers

    def __post_init__(self, table: HopTable | None) -> None:
        if table is not None:
            self.__dict__["hops"] = table
        check_structure(self)

    @cached_property
    def schedule(self) -> Schedule | GroupedSchedule:
        """How the routes' elements are spread over the rounds."""
        if self.groups is not None:
            return GroupedSchedule.of([route.runs.intervals for route in self.routes], self.groups, self.rounds)
        return Schedule.of(np.array([route.runs.elements for route in self.routes], dtype=np.int64), self.rounds)

    @cached_property
    def hops(self) -> HopTable:
        """The hops of all routes; workers are numbered as in ``workers``."""
        return HopTable.of(self.routes, self.workers)

    def part(self, route: int, number: int) -> RunTable:
        """The ids of one route that travel in round ``number``; consecutive where nothing is kept together."""
        parts = [self.routes[route].runs.slice(*span) for span in self.schedule.spans(route, number)]
        return parts[0].union(*parts[1:]) if len(parts) > 1 else parts[0] if parts else RunTable.empty()

    def part_elements(self, route: int, number: int) -> int:
        """Size of ``part(route, number)`` without making it."""
        return sum(last - first for first, last in self.schedule.spans(route, number))

    def moves(self) -> Iterator[Move]:
        """Every move, by round, stage, source, target and element width; what gateways get before what they forward."""
        legs = [route.legs() for route in self.routes]
        for number in range(self.rounds):
            parts: dict[tuple[int, int, str, str, int], list[RunTable]] = {}
            for index, route in enumerate(self.routes):
                if not self.part_elements(index, number):
                    continue
                runs = self.part(index, number)
                for hop, leg in zip(route.hops, legs[index], strict=True):
                    key = (hop.stage.value, leg, hop.source, hop.target, route.item_bytes)
                    parts.setdefault(key, []).append(runs)
            for key in sorted(parts):
                stage, _, source, target, item_bytes = key
                tables = parts[key]
                yield Move(Stage(stage), number, source, target, tables[0].union(*tables[1:]), item_bytes)

    def bytes_sent(self, worker: str, stage: Stage | None = None) -> int:
        """Payload bytes a worker sends in one update, in one stage or in all of them."""
        return self._traffic(worker, stage)[0]

    def bytes_received(self, worker: str, stage: Stage | None = None) -> int:
        """Payload bytes a worker receives in one update, in one stage or in all of them."""
        return self._traffic(worker, stage)[1]

    def _traffic(self, worker: str, stage: Stage | None) -> tuple[int, int]:
        if worker not in self.workers:
            raise PlanError(f"{worker} is not a worker of this plan; it has {', '.join(self.workers)}")
        if stage is not None and not isinstance(stage, Stage):
            raise PlanError(f"stage is {stage!r}; expected a Stage, or None for all")
        stages = Stage if stage is None else (stage,)
        return (
            sum(self._sent.get((worker, each), 0) for each in stages),
            sum(self._received.get((worker, each), 0) for each in stages),
        )

    @cached_property
    def _sent(self) -> dict[tuple[str, Stage], int]:
        return self._totals(source=True)

    @cached_property
    def _received(self) -> dict[tuple[str, Stage], int]:
        return self._totals(source=False)

    def _totals(self, *, source: bool) -> dict[tuple[str, Stage], int]:
        out: dict[tuple[str, Stage], int] = {}
        for route in self.routes:
            for hop in route.hops:
                key = (hop.source if source else hop.target, hop.stage)
                out[key] = out.get(key, 0) + route.bytes
        return out

    def same_as(self, other: Plan) -> bool:
        """Whether both are the same plan."""
        return self.digest() == other.digest()

    def digest(self) -> str:
        """Hex digest of the plan; ranks compare it before the first byte of an update."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        from transfer_exec.plan_bytes import plan_digest

        return plan_digest(self)

    def to_bytes(self) -> bytes:
        """Serialize; ``from_bytes`` gives an equal plan."""
        from transfer_exec.plan_bytes import encode_plan

        return encode_plan(self)

    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        """Read ``to_bytes``' output; safe on untrusted bytes.

        Raises
        ------
        PlanBytesError
            If the bytes are truncated, altered, of another version, or break a law of plans.
        """
        from transfer_exec.plan_bytes import decode_plan

        return decode_plan(data)
