"""lower_bound: the paper's Equation 1 on its topologies, and the links it does not speak of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.bound import Bound, lower_bound
from transfer_exec.demand import place_demand
from transfer_exec.links import Links
from transfer_exec.planner import make_plan
from transfer_exec.topology import ClusterLink, Node, Topology

GiB = 1 << 30


def bound_of(demand: Correspondence, topology: Topology) -> Bound:
    links = Links.of(topology, demand.holders, demand.needers)
    return lower_bound(place_demand(demand, links), links)


def demand_of(rows: dict[str, tuple[int, list[str], list[str]]]) -> Correspondence:
    """Per tensor: its bytes (U8), holders, needers."""
    space = CheckpointSpace(TensorSpec(name, (size,), "U8") for name, (size, _, _) in rows.items())
    sides: list[dict[str, list[str]]] = [{}, {}]
    for name, (_, *workers) in rows.items():
        for side, group in zip(sides, workers, strict=True):
            for worker in group:
                side.setdefault(worker, []).append(name)
    maps = [{w: declare(space, {n: whole(space, n) for n in names}) for w, names in side.items()} for side in sides]
    return correspond(*maps)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 64))
def test_equation_one(trainers: int, engines: int, size: int, per_node: int, mib: int) -> None:
    """Replicated trainers, engines whose ranks need a part each: T_min = max(M / B_T, max_v M_v / B_v)."""
    topology = Topology.uniform(
        trainers=trainers,
        engines=engines,
        engine_size=size,
        workers_per_node=per_node,
        nic_bytes_per_s=3.0,
        local_bytes_per_s=50.0,
    )
    part = mib << 20
    everybody = [f"trainer/{rank}" for rank in range(trainers)]
    rows = {f"w{r}": (part, everybody, [f"engine/{e}/{r}" for e in range(engines)]) for r in range(size)}
    found = bound_of(demand_of(rows), topology)
    wanted = part * size / (3.0 * trainers)
    for node in topology.nodes:
        needs = {worker.rsplit("/", 1)[1] for worker in node.workers if worker.startswith("engine")}
        wanted = max(wanted, part * len(needs) / (3.0 * len(node.workers)))
    assert found.seconds == pytest.approx(wanted)


def test_what_one_trainer_alone_holds_leaves_through_it() -> None:
    topology = Topology.uniform(
        trainers=2, engines=1, engine_size=4, workers_per_node=4, nic_bytes_per_s=1.0, local_bytes_per_s=9.0
    )
    found = bound_of(
        demand_of({"a": (10, ["trainer/0"], ["engine/0/0"]), "b": (2, ["trainer/0", "trainer/1"], ["engine/0/1"])}),
        topology,
    )
    assert found == Bound(10.0, "egress of trainer/0")


def test_the_node_that_needs_most_binds_and_is_named() -> None:
    topology = Topology.uniform(
        trainers=4, engines=1, engine_size=3, workers_per_node=2, nic_bytes_per_s=2.0, local_bytes_per_s=9.0
    )
    trainers = [f"trainer/{rank}" for rank in range(4)]
    rows = {"a": (40, trainers, ["engine/0/0", "engine/0/2"]), "b": (8, trainers, ["engine/0/2"])}
    assert bound_of(demand_of(rows), topology) == Bound(24.0, "ingress of node 3 (engine/0/2)")


def test_first_receivers_must_send_on() -> None:
    """Rollouts that send slowly: 3 nodes need 12 bytes, 24 must leave the rollouts."""
    topology = Topology(
        [
            Node.of("t", ["trainer/0"], nic_bytes_per_s=100.0, local_bytes_per_s=9.0),
            *(
                Node.of(f"e{n}", [f"engine/{n}/0"], nic_bytes_per_s=(0.5, 100.0), local_bytes_per_s=9.0)
                for n in range(3)
            ),
        ]
    )
    found = bound_of(demand_of({"a": (12, ["trainer/0"], [f"engine/{n}/0" for n in range(3)])}), topology)
    assert found == Bound(24 / 1.5, "egress of all rollouts")


def test_a_thin_link_between_clusters() -> None:
    nodes = [
        Node.of("t", ["trainer/0"], nic_bytes_per_s=10.0, local_bytes_per_s=9.0, cluster="east"),
        *(
            Node.of(f"w{n}", [f"engine/{n}/0"], nic_bytes_per_s=10.0, local_bytes_per_s=9.0, cluster="west")
            for n in range(2)
        ),
    ]
    topology = Topology(nodes, (), [ClusterLink(("west", "east"), 0.1)])
    found = bound_of(demand_of({"a": (12, ["trainer/0"], ["engine/0/0", "engine/1/0"])}), topology)
    assert found == Bound(pytest.approx(120.0), "link from cluster east to west")  # type: ignore[arg-type]


def test_links_that_bind_alike_are_named_in_one_order() -> None:
    """The name is in the plan's digest, which ranks compare whose files list the links in another order."""
    nodes = [
        Node.of(cluster, [worker], nic_bytes_per_s=50e9, local_bytes_per_s=900e9, cluster=cluster)
        for worker, cluster in (("trainer/0", "c0"), ("engine/0/0", "c1"), ("trainer/1", "c2"))
    ]
    links = [ClusterLink(pair, 1e9) for pair in (("c0", "c1"), ("c0", "c2"), ("c1", "c2"))]
    space = CheckpointSpace([TensorSpec("w", (100,), "BF16")])
    held = SourceMap.from_ids(space, {"p": np.arange(1, 101)})
    demand = correspond({"trainer/0": held, "trainer/1": held}, {"engine/0/0": held})
    plans = [make_plan(demand, Topology(nodes, [], listed), buffer_bytes=1000) for listed in (links, links[::-1])]
    assert plans[0].bound_link == plans[1].bound_link
    assert plans[0].digest() == plans[1].digest()


def test_a_node_that_holds_its_bytes_needs_no_network() -> None:
    topology = Topology([Node.of("n", ["trainer/0", "engine/0/0"], nic_bytes_per_s=1.0, local_bytes_per_s=4.0)])
    found = bound_of(demand_of({"a": (12, ["trainer/0"], ["engine/0/0"])}), topology)
    assert found == Bound(3.0, "local ingress of engine/0/0")


def test_nothing_to_move() -> None:
    topology = Topology.uniform(
        trainers=1, engines=0, engine_size=0, workers_per_node=1, nic_bytes_per_s=1.0, local_bytes_per_s=1.0
    )
    assert bound_of(demand_of({"a": (4, ["trainer/0"], [])}), topology) == Bound(0.0, "nothing has to move")
