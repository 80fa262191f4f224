"""Clusters joined by thin links: one copy crosses, gateways forward it, and every bit lands."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from crossing import random_crossing
from plan_oracle import Case, replay
from test_run_in_process import cross

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.simulate import simulate
from transfer_exec.topology import ClusterLink, Engine, Node, Topology
from transfer_exec.transport.loopback import LoopbackPolicy

SPACE = CheckpointSpace([TensorSpec("w", (1200,), "U8")])
WHOLE = declare(SPACE, {"w": whole(SPACE, "w")})


def joined(clusters: dict[str, list[list[str]]], *, link: float, nic: float = 10.0) -> Topology:
    """Nodes of some workers in some clusters, links of one speed between all of them."""
    nodes = [
        Node.of(f"{name} {number}", workers, nic_bytes_per_s=nic, local_bytes_per_s=100.0, cluster=name)
        for name, groups in clusters.items()
        for number, workers in enumerate(groups)
    ]
    links = [ClusterLink(pair, link) for pair in combinations(clusters, 2)]
    rollouts = [worker for node in nodes for worker in node.workers if worker.startswith("engine")]
    names = dict.fromkeys(worker.rpartition("/")[0] for worker in rollouts)
    engines = [Engine(name, tuple(w for w in rollouts if w.rpartition("/")[0] == name)) for name in names]
    return Topology(nodes, engines, links)


def planned(topology: Topology, buffer_bytes: int = 100) -> Plan:
    """Everybody has, or needs, the whole tensor; checked id by id."""
    sides: list[dict[str, SourceMap]] = [{}, {}]
    for worker in topology.workers:
        sides[worker.startswith("engine")][worker] = WHOLE
    plan = make_plan(correspond(*sides), topology, buffer_bytes=buffer_bytes)
    everything = frozenset(range(1, 1201))
    case = Case(SPACE, dict.fromkeys(sides[0], everything), dict.fromkeys(sides[1], everything))
    replay(plan, case, topology, buffer_bytes)
    return plan


def crossing_bytes(plan: Plan, topology: Topology) -> dict[tuple[str, str], int]:
    """Bytes between clusters, each way."""
    out: dict[tuple[str, str], int] = {}
    for move in plan.moves():
        pair = tuple(topology.nodes[topology.node_of(worker)].cluster for worker in (move.source, move.target))
        if pair[0] != pair[1]:
            out[pair] = out.get(pair, 0) + move.bytes  # type: ignore[index]
    return out  # type: ignore[return-value]


def engine(first: int, count: int, size: int = 2) -> list[list[str]]:
    """Nodes of one engine each."""
    return [[f"engine/{number}/{rank}" for rank in range(size)] for number in range(first, first + count)]


def test_needed_on_both_sides() -> None:
    topology = joined({"east": [["trainer/0", "trainer/1"], *engine(0, 2)], "west": engine(2, 3)}, link=0.5)
    plan = planned(topology)
    assert crossing_bytes(plan, topology) == {("east", "west"): SPACE.total_bytes}
    assert plan.bound_link == "link from cluster east to west"
    assert plan.load_s == plan.lower_bound_s == SPACE.total_bytes / 0.5
    assert sum(plan.bytes_sent(worker) for worker in plan.holders) == SPACE.total_bytes


def test_needed_on_the_far_side_only() -> None:
    topology = joined({"east": [["trainer/0"]], "west": engine(0, 3)}, link=0.5)
    plan = planned(topology)
    assert crossing_bytes(plan, topology) == {("east", "west"): SPACE.total_bytes}
    assert {move.stage for move in plan.moves() if move.source == "trainer/0"} == {Stage.RECEIVE}


def test_held_and_needed_on_both_sides() -> None:
    """Trainers send one copy together, so each side gets from the other what its own trainers did not send."""
    topology = joined(
        {"east": [["trainer/0"], *engine(0, 1)], "west": [["trainer/1"], *engine(1, 1)]}, link=1.0, nic=100.0
    )
    plan = planned(topology)
    between = crossing_bytes(plan, topology)
    assert sum(between.values()) == SPACE.total_bytes
    assert set(between.values()) == {SPACE.total_bytes // 2}, "both directions work at once"
    assert plan.load_s == plan.lower_bound_s == SPACE.total_bytes / 2


def test_held_on_both_sides_and_needed_on_one() -> None:
    """The far trainers could help; the copy does not cross a link that it need not."""
    topology = joined({"east": [["trainer/0"], *engine(0, 2)], "west": [["trainer/1"]]}, link=1e9)
    plan = planned(topology)
    assert crossing_bytes(plan, topology) == {}
    assert plan.bytes_sent("trainer/1") == 0
    assert plan.lower_bound_s == plan.load_s, "the bound counts the trainers that may send"


@pytest.mark.parametrize("home", ["east", "south"])
def test_three_clusters(home: str) -> None:
    """Trainers beside rollouts, or in a cluster of their own: into each cluster that needs it a copy comes once."""
    clusters = {"east": engine(0, 2), "south": [], "west": engine(2, 2)}
    if home == "east":
        clusters["south"] = engine(4, 1)
    clusters[home] = [["trainer/0"], *clusters[home]]
    topology = joined(clusters, link=0.5)
    between = crossing_bytes(planned(topology), topology)
    needing = {"east", "west"} | ({"south"} if home == "east" else set())
    into = {name: sum(count for pair, count in between.items() if pair[1] == name) for name in clusters}
    assert into == {name: SPACE.total_bytes * (name in needing and name != home) for name in clusters}


def test_the_timeline_of_a_gateway_by_hand() -> None:
    """1,200 bytes from t to a in 120 s, over the link to a gateway in 600 s, from there to the other node in 120 s."""
    topology = joined({"east": [["trainer/0"], *engine(0, 1, 1)], "west": engine(1, 2, 1)}, link=2.0)
    plan = planned(topology, buffer_bytes=1200)
    assert plan.rounds == 1
    line = simulate(plan, topology)
    assert line.end_to_end_s == pytest.approx(120 + 600 + 120)
    assert line.binding_link == "link from cluster east to west"


@pytest.mark.parametrize("seed", range(24))
def test_every_bit_lands(seed: int) -> None:
    """Random layouts, nodes and clusters, trainers beside rollouts or not, over a network that delays and reorders."""
    rng = np.random.default_rng(seed)
    made = random_crossing(rng)
    workers = [*made.held, *made.needed]
    clusters: dict[str, list[list[str]]] = {}
    for number in range(int(rng.integers(3, 7))):
        clusters.setdefault(("east", "west", "south")[number % int(rng.integers(2, 4))], []).append([])
    groups = [group for nodes in clusters.values() for group in nodes]
    for worker in workers:
        groups[int(rng.integers(0, len(groups)))].append(worker)
    topology = joined(clusters, link=float(rng.choice([0.1, 5.0, 1e9])))
    buffer_bytes = int(rng.choice([8, 24, 100, 1 << 20]))
    sides = [{worker: made.maps[worker] for worker in side} for side in (made.held, made.needed)]
    plan = make_plan(correspond(*sides, cast=True), topology, buffer_bytes=buffer_bytes)
    ids = [{w: frozenset(made.maps[w].held().ids().tolist()) for w in side} for side in (made.held, made.needed)]
    replay(plan, Case(made.space, *ids), topology, buffer_bytes)
    cross(made, plan, rng, policy=LoopbackPolicy(seed=seed, max_delay=7, reorder=True))


def test_a_worker_that_receives_first_and_is_a_gateway() -> None:
    """Each side's trainer sends half; the only node pair forwards both legs between the same two workers."""
    topology = joined(
        {"east": [["trainer/0"], *engine(0, 2, 1)], "west": [["trainer/1"], *engine(2, 2, 1)]}, link=1.0, nic=100.0
    )
    plan = planned(topology)
    legs = {
        (hop.source, hop.target, leg)
        for route in plan.routes
        for hop, leg in zip(route.hops, route.legs(), strict=True)
    }
    both = {pair[:2] for pair in legs if pair[2] == 0} & {pair[:2] for pair in legs if pair[2] == 1}
    assert both, "some pair of workers exchanges in both legs"
    memory = {worker: {"w": np.full(1200, 7, dtype=np.uint8)} for worker in plan.needers}
    memory |= {worker: {"w": np.arange(1200).astype(np.uint8)} for worker in plan.holders}
    run_in_process(plan, dict.fromkeys(plan.workers, WHOLE), memory)
    assert all(np.array_equal(memory[worker]["w"], memory["trainer/0"]["w"]) for worker in plan.needers)
