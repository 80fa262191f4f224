"""simulate: small cases solved by hand, and what must hold of every timeline."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import make_plan, simulate
from transfer_exec.errors import BudgetError, PlanError
from transfer_exec.topology import Nic, Node, Topology
from transfer_exec.traffic import Flow, Traffic

NEVER = 1e9


def cluster(nic: float, *names: str, local: float = NEVER) -> Topology:
    """One node for each worker."""
    return Topology([Node.of(name, [name], nic_bytes_per_s=nic, local_bytes_per_s=local) for name in names])


def traffic(
    flows: list[Flow], *, rounds: int = 1, stages: tuple[str, ...] = ("one", "two"), packed: int = 0
) -> Traffic:
    names = sorted({name for flow in flows for name in (flow.source, flow.target)})
    holders = tuple(name for name in names if name in ("t", "u"))
    needers = tuple(name for name in names if name not in ("t", "u"))
    return Traffic("case", holders, needers, stages, tuple(sorted(flows)), {"t": packed} if packed else {}, rounds, 1.0)


def test_one_message_takes_bytes_over_bandwidth() -> None:
    line = simulate(traffic([Flow(0, "t", "a", 12)]), cluster(3.0, "t", "a"))
    assert line.end_to_end_s == 4.0
    assert line.stalls_s == {"t": 4.0, "a": 4.0}
    assert (line.binding_link, line.binding_s) == ("NIC egress of t", 4.0)


def test_messages_share_a_link_until_the_shorter_one_has_arrived() -> None:
    # Both get 1 byte/s of 2; a's 2 bytes are there after 2 s, then b gets 2 byte/s for its other 4.
    line = simulate(traffic([Flow(0, "t", "a", 2), Flow(0, "t", "b", 6)]), cluster(2.0, "t", "a", "b"))
    assert line.stalls_s == {"t": 4.0, "a": 2.0, "b": 4.0}
    assert line.stall_s == pytest.approx(10 / 3)


def test_max_min_gives_what_a_slow_link_leaves_to_the_others() -> None:
    # c takes in 1 byte/s only, so of t's 4 bytes/s the other message gets 3.
    nodes = [Node.of("t", ["t"], nic_bytes_per_s=4.0, local_bytes_per_s=NEVER)]
    nodes += [Node("a", (Nic(("a",), 4.0, 4.0),), NEVER), Node("c", (Nic(("c",), 1.0, 1.0),), NEVER)]
    line = simulate(traffic([Flow(0, "t", "a", 9), Flow(0, "t", "c", 3)]), Topology(nodes))
    assert line.stalls_s == {"t": 3.0, "a": 3.0, "c": 3.0}


def test_two_stages_follow_each_other_in_a_single_round() -> None:
    line = simulate(traffic([Flow(0, "t", "a", 4), Flow(1, "a", "b", 4)]), cluster(1.0, "t", "a", "b"))
    assert line.end_to_end_s == 8.0
    assert line.stalls_s == {"t": 4.0, "a": 8.0, "b": 8.0}


def test_stages_of_neighbouring_rounds_overlap() -> None:
    # 4 rounds of 1 s a stage: the second stage of one round runs beside the first of the next.
    flows = [Flow(0, "t", "a", 4), Flow(1, "a", "b", 4)]
    assert simulate(traffic(flows, rounds=4), cluster(1.0, "t", "a", "b")).end_to_end_s == 5.0
    assert simulate(traffic(flows, rounds=4), cluster(1.0, "t", "a", "b"), depth=1).end_to_end_s == 8.0


def test_many_rounds_repeat_the_steady_pace() -> None:
    flows = [Flow(0, "t", "a", 1000), Flow(1, "a", "b", 1000)]
    line = simulate(traffic(flows, rounds=1000), cluster(1.0, "t", "a", "b"))
    assert line.round_s == 1.0
    assert line.end_to_end_s == pytest.approx(1001.0)


def test_round_overheads_hide_behind_messages_in_a_deep_pipeline_only() -> None:
    # By hand: 1 s before every round, 4 s of bytes. Depth 1: 5 s a round. Depth 2: only the first one shows.
    flows = [Flow(0, "t", "a", 12)]
    where = cluster(1.0, "t", "a")
    assert simulate(traffic(flows, rounds=3), where, round_overhead_s=1.0, depth=1).end_to_end_s == 15.0
    assert simulate(traffic(flows, rounds=3), where, round_overhead_s=1.0, depth=2).end_to_end_s == 13.0


def test_message_overheads_add_up_in_a_stage() -> None:
    flows = [Flow(0, "t", "a", 2), Flow(0, "t", "b", 2), Flow(1, "a", "b", 2)]
    line = simulate(traffic(flows), cluster(1.0, "t", "a", "b"), message_overhead_s=0.5)
    # Two to post (1 s), 4 bytes through t's NIC, one to post (0.5 s), 2 bytes.
    assert line.end_to_end_s == 7.5


def test_packing_and_assembling_take_their_time() -> None:
    flows = [Flow(0, "t", "a", 8)]
    line = simulate(traffic(flows, packed=8), cluster(2.0, "t", "a"), pack_bytes_per_s=4.0, assemble_bytes_per_s=8.0)
    assert line.end_to_end_s == 2.0 + 4.0 + 1.0
    # In four rounds 1 s of bytes each; packing (0.5 s) and assembling (0.25 s) run beside them.
    line = simulate(
        traffic(flows, packed=8, rounds=4), cluster(2.0, "t", "a"), pack_bytes_per_s=4.0, assemble_bytes_per_s=8.0
    )
    assert line.end_to_end_s == 0.5 + 4.0 + 0.25


def test_local_links_and_infinite_ones() -> None:
    node = Node.of("n", ["t", "a"], nic_bytes_per_s=1.0, local_bytes_per_s=4.0)
    assert simulate(traffic([Flow(0, "t", "a", 8)]), Topology([node])).end_to_end_s == 2.0
    free = Node.of("n", ["t", "a"], nic_bytes_per_s=1.0, local_bytes_per_s=math.inf)
    assert simulate(traffic([Flow(0, "t", "a", 8)]), Topology([free])).end_to_end_s == 0.0


def test_nothing_to_move_takes_no_time() -> None:
    empty = Traffic("none", ("t",), ("a",), ("one",), (), {}, 1, 0.0)
    line = simulate(empty, cluster(1.0, "t", "a"), round_overhead_s=1.0)
    assert (line.end_to_end_s, line.stall_s, line.binding_link, line.ratio_to_bound) == (0.0, 0.0, "", 1.0)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"depth": 0}, "depth"),
        ({"round_overhead_s": -1.0}, "round_overhead_s"),
        ({"message_overhead_s": math.nan}, "message_overhead_s"),
        ({"pack_bytes_per_s": 0.0}, "pack_bytes_per_s"),
        ({"assemble_bytes_per_s": -1.0}, "assemble_bytes_per_s"),
    ],
)
def test_settings_that_make_no_sense_are_named(bad: dict[str, float], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        simulate(traffic([Flow(0, "t", "a", 8)]), cluster(1.0, "t", "a"), **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flow", "word"),
    [
        (Flow(0, "t", "x", 8), "unknown"),
        (Flow(5, "t", "a", 8), "unknown"),
        (Flow(0, "t", "t", 8), "two workers"),
        (Flow(0, "t", "a", 0), "at least one byte"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(flow: Flow, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        Traffic("bad", ("t",), ("a",), ("one",), (flow,), {}, 1, 1.0)
    with pytest.raises(BudgetError):
        Traffic.of_flows(
            "bad", holders=(), needers=(), stages=(), flows=[], packed_bytes={}, buffer_bytes=0, lower_bound_s=0.0
        )


@settings(max_examples=60)
@given(st.data())
def test_no_plan_beats_its_load_and_a_slower_cluster_is_no_faster(data: st.DataObject) -> None:
    case = data.draw(cases())
    topology = data.draw(topologies(case))
    plan = make_plan(case.correspondence(), topology, buffer_bytes=data.draw(st.integers(8, 100)))
    depth = data.draw(st.integers(1, 4))
    line = simulate(plan, topology, depth=depth)
    assert line.binding_s == pytest.approx(plan.load_s)
    assert line.end_to_end_s >= plan.load_s * (1 - 1e-9)
    assert line.end_to_end_s >= max(line.stalls_s.values(), default=0.0)
    slower = simulate(plan, topology, depth=depth, round_overhead_s=1.0, message_overhead_s=0.1)
    assert slower.end_to_end_s >= line.end_to_end_s * (1 - 1e-9)
    # Every stage of every round takes at most what all its bytes take alone.
    moved = sum(hop_bytes for hop_bytes in (route.bytes * len(route.hops) for route in plan.routes))
    slowest = min(
        [float(nic.egress_bytes_per_s) for node in topology.nodes for nic in node.nics]
        + [link.bytes_per_s for link in topology.links]
    )
    assert line.end_to_end_s <= moved / min(slowest, 1.0) + 1e-9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_small_messages_late_on_the_clock_arrive(depth: int) -> None:
    # 1,000 bytes take less than the clock can show after 0.08 s of large ones: the loop once never ended.
    flows = [Flow(0, "t", "a", 4_000_000_000), Flow(0, "t", "b", 1_001), Flow(1, "a", "b", 1_003), Flow(1, "b", "c", 7)]
    line = simulate(traffic(flows, rounds=7), cluster(50e9, "t", "a", "b", "c"), depth=depth, round_overhead_s=1e-3)
    assert 0.08 <= line.end_to_end_s < 0.1


def test_several_messages_over_links_without_a_limit() -> None:
    node = Node.of("n", ["t", "u", "a", "b"], nic_bytes_per_s=1.0, local_bytes_per_s=math.inf)
    flows = [Flow(0, "t", "a", 8), Flow(0, "t", "b", 8), Flow(0, "u", "a", 8), Flow(0, "u", "b", 8)]
    line = simulate(traffic([*flows, Flow(1, "a", "b", 8)], rounds=3), Topology([node]), round_overhead_s=1.0)
    assert line.end_to_end_s == 3.0


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 10**9])
def test_rounds_that_are_not_simulated_take_no_less_than_the_busiest_link_needs(depth: int) -> None:
    """Its backlog had not built up in the first rounds, whose pace was taken for all 116."""
    space = CheckpointSpace([TensorSpec("w", (2882,), "BF16")])

    def part(stop: int, start: int = 1) -> SourceMap:
        return SourceMap.from_ids(space, {"p": np.arange(start, stop + 1)})

    topology = Topology(
        [
            Node.of("n0", ["trainer/0", "engine/0/0"], nic_bytes_per_s=(10e9, 200e6), local_bytes_per_s=10e9),
            Node.of("n1", ["engine/1/0"], nic_bytes_per_s=(1e9, 10e9), local_bytes_per_s=5.1e9),
            Node.of("n2", ["engine/2/0"], nic_bytes_per_s=(25e9, 6.9e9), local_bytes_per_s=25e9),
        ]
    )
    needers = {"engine/0/0": part(2882, 38), "engine/1/0": part(1510), "engine/2/0": part(1872)}
    plan = make_plan(correspond({"trainer/0": part(2882)}, needers), topology, buffer_bytes=50)
    assert plan.rounds > 100
    found = simulate(plan, topology, depth=depth)
    assert found.ratio_to_bound >= 1
    assert found.end_to_end_s >= found.binding_s
