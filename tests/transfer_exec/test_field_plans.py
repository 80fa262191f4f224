"""Plans of the field's cases: replication, padding, flat and empty shards, shared ranks, huge ids, small buffers."""

from __future__ import annotations

import numpy as np
import pytest
from plan_oracle import Case, replay

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import correspond
from layout_algebra.shardings import expert_stack, fsdp1_flat, fsdp2, fused_qkv, padded_vocab
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import BudgetError, TopologyError, UnheldError
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.topology import Node, Topology

Maps = dict[str, SourceMap]


def cluster(trainers: int, engines: int, size: int, per_node: int = 8) -> Topology:
    return Topology.uniform(
        trainers=trainers,
        engines=engines,
        engine_size=size,
        workers_per_node=per_node,
        nic_bytes_per_s=50e9,
        local_bytes_per_s=900e9,
    )


def planned(holders: Maps, needers: Maps, topology: Topology, buffer_bytes: int = 1 << 20) -> Plan:
    """Plan, and replay it id by id."""
    demand = correspond(holders, needers)
    plan = make_plan(demand, topology, buffer_bytes=buffer_bytes)
    sides = [{w: frozenset(m.held().ids().tolist()) for w, m in side.items()} for side in (holders, needers)]
    replay(plan, Case(demand.space, *sides), topology, buffer_bytes)
    return plan


def vectors(**rows: int) -> CheckpointSpace:
    return CheckpointSpace(TensorSpec(name, (count, 1), "BF16") for name, count in rows.items())


@pytest.mark.parametrize("per_node", [4, 2])
def test_p05_replicated_heads_are_cut_between_their_owners(per_node: int) -> None:
    """Each key-value element crosses into a node once; its two owners receive a distinct slice each."""
    space = vectors(q=8, k=4, v=4)
    q, k, v = (whole(space, name) for name in "qkv")

    def rank(r: int, degree: int) -> SourceMap:
        return declare(space, {"qkv": fused_qkv(q, k, v, rank=r, degree=degree, heads=4, kv_heads=2)})

    holders = {f"trainer/{r}": rank(r, 2) for r in range(2)}
    needers = {f"engine/0/{r}": rank(r, 4) for r in range(4)}
    plan = planned(holders, needers, cluster(2, 1, 4, per_node))
    kv = needers["engine/0/2"].held().intersect(needers["engine/0/3"].held())
    assert kv.elements == 4, "key and value head 1, two rows each"
    received = [set(move.runs.intersect(kv).ids().tolist()) for move in plan.moves() if move.stage is Stage.RECEIVE]
    parts = [part for part in received if part]
    assert sorted(len(part) for part in parts) == [2, 2]
    assert parts[0].isdisjoint(parts[1])
    assert [plan.bytes_received(f"engine/0/{r}", Stage.RECEIVE) for r in range(4)] == [8] * 4


def test_p09_equal_local_names_are_told_apart_by_their_ids() -> None:
    space = vectors(**{f"e{number}": 1 for number in range(4)})
    experts = [whole(space, f"e{number}") for number in range(4)]

    def rank(r: int) -> SourceMap:
        return declare(space, {"experts.w": expert_stack(experts, rank=r, degree=2)})

    holders = {"trainer/0": declare(space, {"experts.w": expert_stack(experts)})}
    needers = {f"engine/{e}/{r}": rank(r) for e in range(2) for r in range(2)}
    plan = planned(holders, needers, cluster(1, 2, 2, 1))
    demand = correspond(holders, needers)
    assert [group.needers for group in demand.classes] == [("engine/0/0", "engine/1/0"), ("engine/0/1", "engine/1/1")]
    assert plan.bytes_sent("trainer/0") == space.total_bytes
    assert {w: plan.bytes_received(w) for w in needers} == dict.fromkeys(needers, 4)


def test_p15_vocabulary_padding_is_never_sent() -> None:
    space = vectors(embed=10)
    embed = whole(space, "embed")

    def side(prefix: str, rows: int) -> Maps:
        return {
            f"{prefix}/{r}": declare(space, {"e": padded_vocab(embed, rank=r, degree=2, padded_rows=rows)})
            for r in range(2)
        }

    plan = planned(side("trainer", 16), side("engine/0", 12), cluster(2, 1, 2, 2))
    moved = {(m.source, m.target): m.runs.ids().tolist() for m in plan.moves()}
    assert moved == {
        ("trainer/0", "engine/0/0"): [1, 2, 3, 4, 5, 6],
        ("trainer/0", "engine/0/1"): [7, 8],
        ("trainer/1", "engine/0/1"): [9, 10],
    }


def test_u01_ceil_sized_chunks() -> None:
    space = vectors(w=7)
    holders = {f"trainer/{r}": declare(space, {"w": fsdp2(whole(space, "w"), rank=r, degree=3)}) for r in range(3)}
    plan = planned(holders, {"engine/0/0": declare(space, {"w": whole(space, "w")})}, cluster(3, 1, 1))
    assert [plan.bytes_sent(f"trainer/{r}") for r in range(3)] == [6, 6, 2]


@pytest.mark.parametrize(("rows", "sizes"), [(5, [8, 8, 4, 0]), (3, [4, 4, 4, 0])])
def test_u03_empty_shards_and_empty_tensors(rows: int, sizes: list[int]) -> None:
    space = CheckpointSpace([TensorSpec("w", (rows, 2), "BF16"), TensorSpec("e", (0, 4), "F32")])

    def shard(r: int, degree: int) -> SourceMap:
        return declare(
            space,
            {n: fsdp2(whole(space, n), rank=r, degree=degree) for n in ("w", "e")},
            {"w": "BF16", "e": "F32"},
        )

    holders = {f"trainer/{r}": shard(r, 4) for r in range(4)}
    plan = planned(holders, {"engine/0/0": shard(0, 1)}, cluster(4, 1, 1))
    assert [plan.bytes_sent(f"trainer/{r}") for r in range(4)] == sizes
    assert plan.holders == tuple(holders), "the empty rank is a member of the plan"


def test_u07_flat_shards_cut_through_rows_to_columns() -> None:
    space = CheckpointSpace([TensorSpec("a", (3, 4), "BF16"), TensorSpec("b", (5,), "BF16")])
    parts = [whole(space, name) for name in "ab"]
    holders = {f"trainer/{r}": declare(space, {"flat": fsdp1_flat(parts, rank=r, degree=4)}) for r in range(4)}
    needers = {f"engine/0/{r}": declare(space, {"a": parts[0].shard(1, r, 2)}) for r in range(2)}
    plan = planned(holders, needers, cluster(4, 1, 2))
    to_first = {m.source: m.runs.ids().tolist() for m in plan.moves() if m.target == "engine/0/0"}
    assert to_first == {"trainer/0": [1, 2, 5], "trainer/1": [6, 9, 10]}
    assert plan.bytes_sent("trainer/3") == 0


def test_u13_a_trainer_that_holds_nothing() -> None:
    space = vectors(a=4, b=6)
    one, other = (declare(space, {name: whole(space, name)}) for name in "ab")
    both = declare(space, {name: whole(space, name) for name in "ab"})
    holders = {"trainer/0": one, "trainer/1": declare(space, {}), "trainer/2": other}
    plan = planned(holders, {"engine/0/0": both, "engine/0/1": both}, cluster(3, 1, 2))
    assert plan.bytes_sent("trainer/1") == 0
    assert all(move.runs for move in plan.moves())


def test_n01_a_tied_tensor_has_two_owners() -> None:
    """Embedding on the first pipeline rank, head on the last, both from `embed`; one copy crosses."""
    space = vectors(embed=8)
    embed = whole(space, "embed")
    needers = {"engine/0/0": declare(space, {"embed": embed}), "engine/0/1": declare(space, {"lm_head": embed})}
    plan = planned({"trainer/0": declare(space, {"embed": embed})}, needers, cluster(1, 1, 2))
    assert plan.bytes_sent("trainer/0") == space.total_bytes
    apart = planned({"trainer/0": declare(space, {"embed": embed})}, needers, cluster(1, 1, 2, 1))
    assert apart.bytes_sent("trainer/0") == space.total_bytes


def test_n03_target_and_draft_share_a_rank_and_one_wire_copy() -> None:
    space = vectors(**{"a": 4, "embed": 6, "mtp.b": 2})
    target = declare(space, {name: whole(space, name) for name in ("a", "embed")})
    draft = declare(space, {name: whole(space, name) for name in ("embed", "mtp.b")})
    topology = Topology(
        [
            Node.of("t", ["trainer/0"], nic_bytes_per_s=1.0, local_bytes_per_s=9.0),
            Node.of(
                "e", ["engine/0/0", "engine/0/0/draft"], nic_bytes_per_s=1.0, local_bytes_per_s=9.0, shared_nic=True
            ),
        ]
    )
    everything = declare(space, {name: whole(space, name) for name in space.names})
    plan = planned({"trainer/0": everything}, {"engine/0/0": target, "engine/0/0/draft": draft}, topology)
    assert plan.bytes_sent("trainer/0") == space.total_bytes
    assert plan.lower_bound_s == plan.load_s == space.total_bytes / 1.0


def test_m01_many_small_tensors_are_few_routes() -> None:
    space = CheckpointSpace(TensorSpec(f"layers.{number}.w", (32,), "BF16") for number in range(20_000))
    ids = np.arange(1, space.total_elements + 1).reshape(-1, 2, 32)
    maps = [SourceMap.from_ids(space, {"flat": ids[:, part]}) for part in range(2)]
    holders = {f"trainer/{r}": maps[r] for r in range(2)}
    demand = correspond(holders, {f"engine/0/{r}": maps[1 - r] for r in range(2)})
    plan = make_plan(demand, cluster(2, 1, 2), buffer_bytes=1 << 16)
    assert len(plan.routes) <= 8
    per_round = [sum(1 for move in plan.moves() if move.round == number) for number in range(2)]
    assert max(per_round) <= 8
    assert len(plan.to_bytes()) < 4096


def test_e02_ids_past_32_bits_stay_exact() -> None:
    """A stack of 256 experts, 6.4e9 elements and 12.9 GB: no memory, exact offsets."""
    space = CheckpointSpace(
        [
            TensorSpec("a", (256, 4096, 6144), "BF16"),
            TensorSpec("b", (512, 2048, 4096), "BF16"),
            TensorSpec("c", (64, 4096, 14336), "F32"),
        ]
    )

    def stacks(r: int, degree: int) -> SourceMap:
        parts = {name: whole(space, name).shard(0, r, degree) for name in "abc"}
        return declare(space, parts)

    holders = {f"trainer/{r}": stacks(r, 2) for r in range(2)}
    needers = {f"engine/{e}/{r}": stacks(r, 4) for e in range(2) for r in range(4)}
    plan = make_plan(correspond(holders, needers), cluster(2, 2, 4, 4), buffer_bytes=1 << 28)
    last = space.element_id("a", 255 * 4096 * 6144)
    assert last - space.element_id("a", 0) == 6_417_285_120
    carrying = [r for r in plan.routes if any(s <= last < e for s, e in r.runs.intervals.tolist())]
    assert len(carrying) == 1
    assert carrying[0].holder == "trainer/1"
    targets = {hop.target for hop in carrying[0].hops}
    assert {"engine/0/3", "engine/1/3"} <= targets
    assert sum(plan.bytes_sent(w) for w in holders) == space.total_bytes == 36_507_222_016
    assert sum(route.bytes for route in plan.routes) == space.total_bytes
    again = Plan.from_bytes(plan.to_bytes())
    assert again.digest() == plan.digest()
    for index, route in enumerate(plan.routes):
        counts = [plan.part_elements(index, number) for number in range(plan.rounds)]
        assert sum(counts) == route.runs.elements
    middle = plan.part(0, plan.rounds // 2)
    assert middle.elements == plan.part_elements(0, plan.rounds // 2)


def test_t10_every_round_fits_a_tiny_buffer() -> None:
    """Tensors of 40, 8 and 24 bytes of fp16 and one of 17 elements, through buffers of 16 bytes."""
    space = CheckpointSpace(
        [TensorSpec(f"t{n}", shape, "F16") for n, shape in enumerate([(4, 5), (4,), (3, 4), (17,)])]
    )
    everything = declare(space, {name: whole(space, name) for name in space.names})
    plan = planned({"trainer/0": everything}, {"engine/0/0": everything}, cluster(1, 1, 1), buffer_bytes=16)
    assert plan.rounds == -(-space.total_bytes // 16) == 7
    assert max(move.bytes for move in plan.moves()) <= 16
    with pytest.raises(BudgetError, match="one element"):
        make_plan(correspond({"t": everything}, {"e": everything}), pair(), buffer_bytes=1)


def pair() -> Topology:
    return Topology([Node.of(w, [w], nic_bytes_per_s=1.0, local_bytes_per_s=1.0) for w in ("t", "e")])


def test_what_nobody_holds_is_named() -> None:
    space = vectors(a=6, b=4)
    part = SourceMap.from_ids(space, {"p": np.array([1, 2, 5, 6])})
    everything = declare(space, {name: whole(space, name) for name in "ab"})
    with pytest.raises(
        UnheldError,
        match=r"nobody holds a\[2:4\], needed by e; b\[0:4\], needed by e\. Holders are t; give one of them",
    ):
        make_plan(correspond({"t": part}, {"e": everything}), pair(), buffer_bytes=64)
    with pytest.raises(UnheldError, match="Holders are none"):
        make_plan(correspond({}, {"e": everything}), pair(), buffer_bytes=64)


def test_a_worker_in_no_node_is_named() -> None:
    space = vectors(a=6)
    everything = declare(space, {"a": whole(space, "a")})
    with pytest.raises(TopologyError, match="stray: in no node"):
        make_plan(correspond({"t": everything}, {"stray": everything}), pair(), buffer_bytes=64)


def test_nobody_needs_anything() -> None:
    space = vectors(a=6)
    plan = planned({"t": declare(space, {"a": whole(space, "a")})}, {"e": declare(space, {})}, pair())
    assert plan.routes == ()
    assert (plan.rounds, plan.load_s, plan.optimum_s, plan.lower_bound_s) == (1, 0.0, 0.0, 0.0)
