"""What other systems would send for the same demand, as traffic to compare with.

None of these obey the laws of plans: receivers choose on their own, or everybody gets everything.

>>> import numpy as np
>>> from layout_algebra.correspondence import correspond
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (8,), "U8")])
>>> whole = SourceMap.from_ids(space, {"w": np.arange(1, 9)})
>>> names = ("trainer/0", "trainer/1", "engine/0/0", "engine/0/1")
>>> topology = Topology.uniform(
...     trainers=2, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1.0, local_bytes_per_s=9.0)
>>> both = correspond(dict.fromkeys(names[:2], whole), dict.fromkeys(names[2:], whole))
>>> for make in BASELINES.values():
...     traffic = make(both, topology, buffer_bytes=8)
...     print(traffic.name, [(flow.source, flow.target, flow.bytes) for flow in traffic.flows])
gather and broadcast [('engine/0/0', 'engine/0/1', 8), ('trainer/0', 'engine/0/0', 8)]
first holder [('trainer/0', 'engine/0/0', 8), ('trainer/0', 'engine/0/1', 8)]
round robin [('trainer/0', 'engine/0/0', 8), ('trainer/1', 'engine/0/1', 8)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

from layout_algebra.correspondence import Correspondence
from transfer_exec.bound import lower_bound
from transfer_exec.demand import place_demand
from transfer_exec.links import Links
from transfer_exec.rounds import checked_budget
from transfer_exec.topology import Topology
from transfer_exec.traffic import Flow, Traffic


def gather_and_broadcast(correspondence: Correspondence, topology: Topology, *, buffer_bytes: int) -> Traffic:
    """One trainer gathers all that is needed and broadcasts it to every rollout.

    The first holder of the first class gathers, each class from its own first holder. The broadcast is a ring over all
    rollouts, node by node; every rollout gets everything. All links of the ring work at once, as a collective library
    pipelines it inside; its filling is not counted, in the baseline's favour.

    Raises
    ------
    UnheldError, TopologyError, BudgetError
        As ``make_plan``.
    """
    bound_s = _bound_s(correspondence, topology)
    flows: list[Flow] = []
    packed: dict[str, int] = {}
    if correspondence.classes:
        root = correspondence.classes[0].holders[0]
        total = correspondence.needed_bytes
        for group in correspondence.classes:
            if root not in group.holders:
                flows.append(Flow(0, group.holders[0], root, group.bytes))
                _add(packed, group.holders[0], group.bytes)
        _add(packed, root, total)
        ring = sorted(correspondence.needers, key=topology.node_of)
        flows += [Flow(1, source, target, total) for source, target in pairwise([root, *ring])]
    return _traffic(
        "gather and broadcast", correspondence, ("gather", "broadcast"), flows, packed, buffer_bytes, bound_s
    )


def first_holder(correspondence: Correspondence, topology: Topology, *, buffer_bytes: int) -> Traffic:
    """Every rollout fetches each class from its first holder.

    Raises
    ------
    UnheldError, TopologyError, BudgetError
        As ``make_plan``.
    """
    return _fetched("first holder", correspondence, topology, buffer_bytes, lambda number, holders: 0)


def round_robin(correspondence: Correspondence, topology: Topology, *, buffer_bytes: int) -> Traffic:
    """Every rollout fetches each class from one of its holders, the n-th rollout that needs it from the n-th in turn.

    Raises
    ------
    UnheldError, TopologyError, BudgetError
        As ``make_plan``.
    """
    return _fetched("round robin", correspondence, topology, buffer_bytes, lambda number, holders: number % holders)


Baseline = Callable[..., Traffic]
"""``(correspondence, topology, *, buffer_bytes) -> Traffic``."""

BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {"gather and broadcast": gather_and_broadcast, "first holder": first_holder, "round robin": round_robin}
)
"""Every baseline by name."""


def _fetched(
    name: str,
    correspondence: Correspondence,
    topology: Topology,
    buffer_bytes: int,
    choose: Callable[[int, int], int],
) -> Traffic:
    bound_s = _bound_s(correspondence, topology)
    flows: list[Flow] = []
    packed: dict[str, int] = {}
    for group in correspondence.classes:
        for number, needer in enumerate(group.needers):
            flows.append(Flow(0, group.holders[choose(number, len(group.holders))], needer, group.bytes))
        for holder in {flow.source for flow in flows[-len(group.needers) :]}:
            _add(packed, holder, group.bytes)
    return _traffic(name, correspondence, ("fetch",), flows, packed, buffer_bytes, bound_s)


def _bound_s(correspondence: Correspondence, topology: Topology) -> float:
    links = Links.of(topology, correspondence.holders, correspondence.needers)
    return lower_bound(place_demand(correspondence, links), links).seconds


def _add(counted: dict[str, int], worker: str, count: int) -> None:
    counted[worker] = counted.get(worker, 0) + count


def _traffic(
    name: str,
    correspondence: Correspondence,
    stages: tuple[str, ...],
    flows: list[Flow],
    packed: dict[str, int],
    buffer_bytes: int,
    bound_s: float,
) -> Traffic:
    return Traffic.of_flows(
        name,
        holders=correspondence.holders,
        needers=correspondence.needers,
        stages=stages,
        flows=flows,
        packed_bytes=packed,
        buffer_bytes=checked_budget(buffer_bytes),
        lower_bound_s=bound_s,
    )
