"""The division of classes: optimal against a program over whole paths and against brute force, shared out, rounded."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import topologies
from plan_oracle import Case
from scipy.optimize import linprog

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.balance import balance
from transfer_exec.bound import lower_bound
from transfer_exec.demand import place_demand
from transfer_exec.demand_laws import check_demand
from transfer_exec.hops import HopTable
from transfer_exec.links import Links
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import largest_load_s, make_plan
from transfer_exec.routes import make_routes
from transfer_exec.shares import link_loads, longest_s
from transfer_exec.spread import spread_demands
from transfer_exec.topology import Topology

Tensors = dict[str, tuple[int, list[str], list[str]]]
"""Per tensor: elements of 2 bytes, holders, needers."""


def correspondence_of(tensors: Tensors, workers: list[str]) -> Correspondence:
    space = CheckpointSpace(TensorSpec(name, (size,), "BF16") for name, (size, _, _) in tensors.items())

    def maps(prefix: str, side: int) -> dict[str, object]:
        mine = [worker for worker in workers if worker.startswith(prefix)]
        return {
            worker: declare(space, {name: whole(space, name) for name, row in tensors.items() if worker in row[side]})
            for worker in mine
        }

    return correspond(maps("trainer", 1), maps("engine", 2))  # type: ignore[arg-type]


def ways(
    holders: list[str], needers: list[str], rollouts: list[str], node_of: dict[str, int], topology: Topology
) -> list[list[tuple]]:
    """Every lawful way of one element, as lists of (source, target); nothing of the planner is used."""

    def cluster(worker: str) -> str:
        return topology.nodes[node_of[worker]].cluster

    held_at = {node_of[worker] for worker in holders}
    needing = sorted({node_of[worker] for worker in needers})
    local = [node for node in needing if node in held_at]
    remote = [node for node in needing if node not in held_at]
    doors = [[worker for worker in rollouts if node_of[worker] == node] for node in remote]
    needing_clusters = {topology.nodes[node].cluster for node in remote}
    near = needing_clusters & {cluster(holder) for holder in holders}
    sources = [[worker for worker in holders if node_of[worker] == node] for node in local]
    out = []
    for inside in itertools.product(*sources):
        fixed = [(source, n) for source in inside for n in needers if node_of[n] == node_of[source]]
        if not remote:
            out.append(fixed)
            continue
        for entries in itertools.product(*doors):
            passed = [(door, n) for door in entries for n in needers if node_of[n] == node_of[door] and n != door]
            for holder, *roots in itertools.product(
                holders, *([d for d in entries if cluster(d) == each] for each in sorted(needing_clusters))
            ):
                for first in roots:
                    if near and not (cluster(holder) in near and cluster(first) == cluster(holder)):
                        continue
                    root_of = {cluster(root): root for root in roots}
                    sent = [(holder, first), *((first, root) for root in roots if root != first)]
                    sent += [(root_of[cluster(door)], door) for door in entries if door not in roots]
                    out.append(fixed + sent + passed)
    return out


def loads_of(topology: Topology, hops: list[tuple[str, str]], node_of: dict[str, int]) -> Counter:
    """Seconds per link and byte of one way."""
    out: Counter = Counter()
    for source, target in hops:
        a, b = topology.nodes[node_of[source]], topology.nodes[node_of[target]]
        if a is b:
            out["local out", source] += 1 / a.local_bytes_per_s
            out["local in", target] += 1 / a.local_bytes_per_s
            continue
        for node, worker, way in ((a, source, "out"), (b, target, "in")):
            nic = next(nic for nic in node.nics if worker in nic.workers)
            out[way, nic.workers] += 1 / (nic.egress_bytes_per_s if way == "out" else nic.ingress_bytes_per_s)
        if a.cluster != b.cluster:
            link = next(link for link in topology.links if set(link.clusters) == {a.cluster, b.cluster})
            out["link", a.cluster, b.cluster] += 1 / link.bytes_per_s
    return out


def best_by_paths(tensors: Tensors, topology: Topology, workers: list[str]) -> float:
    """The optimum over all mixtures of whole ways, one variable per tensor and way."""
    node_of = {worker: topology.node_of(worker) for worker in workers}
    rollouts = [worker for worker in workers if worker.startswith("engine")]
    columns, owner = [], []
    for number, (size, holders, needers) in enumerate(tensors.values()):
        for way in ways(holders, needers, rollouts, node_of, topology) if needers else []:
            columns.append(Counter({k: v * size * 2 for k, v in loads_of(topology, way, node_of).items()}))
            owner.append(number)
    keys = sorted({key for column in columns for key in column}, key=str)
    if not keys:
        return 0.0
    scale = max(max(column.values(), default=0.0) for column in columns) or 1.0
    less = np.array([[column[key] / scale for column in columns] + [-1.0] for key in keys])
    used = sorted(set(owner))
    equal = np.array([[float(o == number) for o in owner] + [0.0] for number in used])
    cost = [0.0] * len(columns) + [1.0]
    found = linprog(cost, less, np.zeros(len(keys)), equal, np.ones(len(used)), bounds=(0, None))
    assert found.status == 0
    return float(found.fun) * scale


@st.composite
def tensor_cases(draw: st.DrawFn) -> tuple[Tensors, list[str], Topology]:
    trainers = [f"trainer/{rank}" for rank in range(draw(st.integers(1, 3)))]
    rollouts = [f"engine/{e}/{r}" for e in range(draw(st.integers(1, 3))) for r in range(draw(st.integers(1, 2)))]
    some_trainers = st.lists(st.sampled_from(trainers), min_size=1, max_size=3, unique=True)
    some_rollouts = st.lists(st.sampled_from(rollouts), max_size=4, unique=True)
    tensors = {
        f"w{number}": (draw(st.integers(1, 9)) << 20, sorted(draw(some_trainers)), sorted(draw(some_rollouts)))
        for number in range(draw(st.integers(1, 4)))
    }
    workers = trainers + rollouts
    empty = frozenset[int]()
    case = Case(CheckpointSpace([]), dict.fromkeys(trainers, empty), dict.fromkeys(rollouts, empty))
    return tensors, workers, draw(topologies(case))


@settings(max_examples=100)
@given(tensor_cases())
def test_the_optimum_is_that_of_all_lawful_mixtures(drawn: tuple[Tensors, list[str], Topology]) -> None:
    tensors, workers, topology = drawn
    plan = make_plan(correspondence_of(tensors, workers), topology, buffer_bytes=1 << 30)
    best = best_by_paths(tensors, topology, workers)
    assert plan.optimum_s == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert plan.load_s <= best * (1 + 1e-4) + 1e-12, "rounding to elements costs next to nothing"
    assert plan.lower_bound_s <= best * (1 + 1e-9)


@settings(max_examples=60)
@given(tensor_cases())
def test_pouring_is_lawful_and_no_better_than_the_optimum(drawn: tuple[Tensors, list[str], Topology]) -> None:
    tensors, workers, topology = drawn
    demand = correspondence_of(tensors, workers)
    links = Links.of(topology, demand.holders, demand.needers)
    placed = place_demand(demand, links)
    poured = spread_demands(placed, links)
    for one, share in zip(placed, poured.shares, strict=True):
        if one.remote:
            assert sum(part for _, part in share.holders) == pytest.approx(1)
            assert sum(part for _, part in share.first) == pytest.approx(1)
            for site, parts in zip(one.remote, share.entries, strict=True):
                own = sum(part for door, part in (*share.first, *share.gateways) if door in site.doors)
                assert own + sum(part for _, part in parts) == pytest.approx(1)
        for parts in share.sources:
            assert sum(part for _, part in parts) == pytest.approx(1)
        assert sum(part for _, part in share.crossings) == pytest.approx(1 if one.remote else 0)
    assert poured.optimum_s == pytest.approx(longest_s(link_loads(placed, poured.shares, links), links))
    assert poured.optimum_s >= best_by_paths(tensors, topology, workers) * (1 - 1e-9)


def test_brute_force_over_single_elements() -> None:
    """Two trainers share 4 elements, two nodes of two need them: every assignment of whole elements, enumerated."""
    topology = Topology.uniform(
        trainers=2, engines=2, engine_size=2, workers_per_node=2, nic_bytes_per_s=1.0, local_bytes_per_s=4.0
    )
    workers = ["trainer/0", "trainer/1", "engine/0/0", "engine/0/1", "engine/1/0", "engine/1/1"]
    node_of = {worker: topology.node_of(worker) for worker in workers}
    one_way = ways(workers[:2], workers[2:], workers[2:], node_of, topology)
    per_way = [loads_of(topology, way, node_of) for way in one_way]
    best = min(max(sum(mix, Counter()).values()) for mix in itertools.combinations_with_replacement(per_way, 4)) * 2
    tensors: Tensors = {"w": (4, workers[:2], workers[2:])}
    plan = make_plan(correspondence_of(tensors, workers), topology, buffer_bytes=64)
    assert plan.load_s == best == 4.0
    assert plan.optimum_s == pytest.approx(4.0)


def test_work_off_the_bottleneck_is_shared_out() -> None:
    """One trainer is the bottleneck; the rollouts of a node still take a distinct part each."""
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=4, workers_per_node=4, nic_bytes_per_s=1.0, local_bytes_per_s=10.0
    )
    rollouts = [f"engine/0/{rank}" for rank in range(4)]
    plan = make_plan(
        correspondence_of({"w": (1000, ["trainer/0"], rollouts)}, ["trainer/0", *rollouts]), topology, buffer_bytes=4096
    )
    assert plan.bound_link == "egress of all trainers"
    assert [plan.bytes_received(worker, Stage.RECEIVE) for worker in rollouts] == [500] * 4


def test_workers_that_do_not_need_a_class_let_it_in_only_where_it_helps() -> None:
    topology = Topology.uniform(
        trainers=2, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1.0, local_bytes_per_s=10.0
    )
    workers = ["trainer/0", "trainer/1", "engine/0/0", "engine/0/1"]
    both = workers[:2]
    alike: Tensors = {"a": (1000, both, ["engine/0/0"]), "b": (1000, both, ["engine/0/1"])}
    plan = make_plan(correspondence_of(alike, workers), topology, buffer_bytes=1 << 20)
    assert all(hop.stage.name == "RECEIVE" for route in plan.routes for hop in route.hops)
    uneven: Tensors = {"a": (3000, both, ["engine/0/0"]), "b": (1000, both, ["engine/0/1"])}
    plan = make_plan(correspondence_of(uneven, workers), topology, buffer_bytes=1 << 20)
    assert plan.load_s == pytest.approx(4000.0), "a quarter of `a` comes in through the other worker"
    assert plan.bytes_sent("engine/0/1") == 2000


def plan_by_nodes(demand: Correspondence, topology: Topology) -> Plan:
    """As `make_plan`, with the program in two steps whatever its size."""
    links = Links.of(topology, demand.holders, demand.needers)
    placed = place_demand(demand, links)
    bound = lower_bound(placed, links)
    division = balance(placed, links, bound_s=bound.seconds, columns=-1)
    routes = make_routes(demand, placed, division.shares, links)
    plan = Plan(
        space_digest=demand.space.digest(),
        holders=demand.holders,
        needers=demand.needers,
        nodes=links.node,
        routes=routes,
        rounds=1,
        buffer_bytes=1 << 40,
        lower_bound_s=bound.seconds,
        bound_link=bound.link,
        optimum_s=division.optimum_s,
        load_s=largest_load_s(routes, links, HopTable.of(routes, links.workers)),
        clusters=links.cluster,
    )
    check_demand(plan, demand)
    return plan


@settings(max_examples=100)
@given(tensor_cases())
def test_two_steps_are_lawful_and_never_better_than_they_say(drawn: tuple[Tensors, list[str], Topology]) -> None:
    tensors, workers, topology = drawn
    plan = plan_by_nodes(correspondence_of(tensors, workers), topology)
    best = best_by_paths(tensors, topology, workers)
    assert plan.optimum_s <= best * (1 + 1e-6) + 1e-12, "the first step leaves rows out, so it is a bound"
    assert plan.load_s >= best * (1 - 1e-4) - 1e-12


def test_two_steps_reach_the_optimum_on_like_nodes() -> None:
    """Two pipeline stages, experts over eight ranks of two nodes, three engines; shared parts and single owners."""
    topology = Topology.uniform(
        trainers=8, engines=3, engine_size=8, workers_per_node=4, nic_bytes_per_s=1e6, local_bytes_per_s=18e6
    )
    trainers = [f"trainer/{rank}" for rank in range(8)]
    rollouts = [f"engine/{e}/{r}" for e in range(3) for r in range(8)]
    tensors: Tensors = {}
    for stage in range(2):
        half = trainers[4 * stage : 4 * stage + 4]
        tensors[f"attention.{stage}"] = (1_000_000, half, rollouts)
        for rank in range(8):
            owners = [half[rank % 4]]
            tensors[f"experts.{stage}.{rank}"] = (300_000, owners, [f"engine/{e}/{rank}" for e in range(3)])
    demand = correspondence_of(tensors, [*trainers, *rollouts])
    whole_plan = make_plan(demand, topology, buffer_bytes=1 << 30)
    stepwise = plan_by_nodes(demand, topology)
    assert stepwise.optimum_s == pytest.approx(whole_plan.optimum_s, rel=1e-6)
    assert stepwise.load_s == pytest.approx(whole_plan.optimum_s, rel=1e-4)
    assert whole_plan.load_s == pytest.approx(whole_plan.lower_bound_s, rel=1e-4)
