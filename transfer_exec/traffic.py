"""Traffic: how many bytes go from whom to whom in which stage, and nothing about why.

A ``Plan`` obeys laws; what other systems do does not. Both give a ``Traffic``, which is all that a simulation needs:
flows by stage, the rounds they are cut into, and how much every worker packs and assembles.

>>> flows = [Flow(0, "t", "a", 8), Flow(1, "a", "b", 8)]
>>> traffic = Traffic.of_flows("relay", holders=("t",), needers=("a", "b"), stages=("out", "on"), flows=flows,
...                            packed_bytes={"t": 8}, buffer_bytes=4, lower_bound_s=1.0)
>>> traffic.rounds
2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from transfer_exec.errors import BudgetError, PlanError
from transfer_exec.plan import Plan, Stage


class Flow(NamedTuple):
    """All bytes that one worker sends another in one stage of an update."""

    stage: int
    source: str
    target: str
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What crosses a cluster in one update.

    Attributes
    ----------
    name
        Whose traffic it is, as a person reads it.
    holders, needers
        All workers of either side, those without traffic included.
    stages
        Names of the stages that every round passes, in order.
    flows
        By stage, source and target, at most one each, none empty.
    packed_bytes
        Distinct bytes that a worker packs; workers that pack nothing are left out.
    rounds
        Every flow is cut into this many equal parts, and part k passes in round k.
    lower_bound_s
        No lawful plan of the same demand is faster.
    """

    name: str
    holders: tuple[str, ...]
    needers: tuple[str, ...]
    stages: tuple[str, ...]
    flows: tuple[Flow, ...]
    packed_bytes: Mapping[str, int]
    rounds: int
    lower_bound_s: float

    def __post_init__(self) -> None:
        known = set(self.workers)
        for flow in self.flows:
            if not {flow.source, flow.target} <= known or not 0 <= flow.stage < len(self.stages):
                raise PlanError(f"{self.name}: {flow} names an unknown worker or stage")
            if flow.source == flow.target or flow.bytes < 1:
                raise PlanError(f"{self.name}: {flow}: expected two workers and at least one byte")
        if self.rounds < 1:
            raise PlanError(f"{self.name}: {self.rounds} rounds; expected at least 1")

    @property
    def workers(self) -> tuple[str, ...]:
        """Holders, then needers."""
        return self.holders + self.needers

    @staticmethod
    def of(plan: Plan) -> Traffic:
        """The traffic of a plan; what gateways forward is a stage of its own."""
        legs = [route.legs() for route in plan.routes]
        forwards = any(1 in each for each in legs)
        packed: dict[str, int] = {}
        for route in plan.routes:
            packed[route.holder] = packed.get(route.holder, 0) + route.bytes
        return Traffic(
            name="plan",
            holders=plan.holders,
            needers=plan.needers,
            stages=("receive", "external", "forward", "internal") if forwards else ("receive", "external", "internal"),
            flows=_added(
                Flow(
                    hop.stage.value + leg + (forwards and hop.stage is Stage.INTERNAL),
                    hop.source,
                    hop.target,
                    route.bytes,
                )
                for route, each in zip(plan.routes, legs, strict=True)
                for hop, leg in zip(route.hops, each, strict=True)
            ),
            packed_bytes=packed,
            rounds=plan.rounds,
            lower_bound_s=plan.lower_bound_s,
        )

    @staticmethod
    def of_flows(
        name: str,
        *,
        holders: tuple[str, ...],
        needers: tuple[str, ...],
        stages: tuple[str, ...],
        flows: Iterable[Flow],
        packed_bytes: Mapping[str, int],
        buffer_bytes: int,
        lower_bound_s: float,
    ) -> Traffic:
        """Traffic in the fewest rounds that keep what a worker receives in one stage, and packs, under a budget.

        Raises
        ------
        BudgetError
            If the budget is below one byte.
        """
        if buffer_bytes < 1:
            raise BudgetError(f"buffer_bytes is {buffer_bytes}; expected at least 1")
        added = _added(flows)
        filled: dict[tuple[int, str], int] = {}
        for flow in added:
            key = (flow.stage, flow.target)
            filled[key] = filled.get(key, 0) + flow.bytes
        most = max([*filled.values(), *packed_bytes.values()], default=0)
        rounds = max(1, -(-most // buffer_bytes))
        return Traffic(name, holders, needers, stages, added, dict(packed_bytes), rounds, lower_bound_s)

    def bytes_sent(self, worker: str) -> int:
        """Bytes a worker sends in one update."""
        return sum(flow.bytes for flow in self.flows if flow.source == worker)

    def bytes_received(self, worker: str) -> int:
        """Bytes a worker receives in one update."""
        return sum(flow.bytes for flow in self.flows if flow.target == worker)


def _added(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    totals: dict[tuple[int, str, str], int] = {}
    for flow in flows:
        key = (flow.stage, flow.source, flow.target)
        totals[key] = totals.get(key, 0) + flow.bytes
    return tuple(Flow(*key, count) for key, count in sorted(totals.items()) if count)
