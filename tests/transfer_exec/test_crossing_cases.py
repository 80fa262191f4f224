"""The field's cases, from a trainer's memory to a rollout's, by value and by byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from layout_algebra.correspondence import correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import ProgramError
from transfer_exec.executor import Executor
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology

Layouts = Mapping[str, Mapping[str, np.ndarray]]


def space_of(**tensors: tuple[object, ...]) -> CheckpointSpace:
    """``space_of(w=("F32", 2, 3))``."""
    return CheckpointSpace(TensorSpec(name, tuple(shape), str(dtype)) for name, (dtype, *shape) in tensors.items())


def ids_of(space: CheckpointSpace, name: str) -> np.ndarray:
    """A tensor's ids in its shape."""
    return np.arange(*space.id_range(name)).reshape(space.spec(name).shape)


@dataclass
class Crossed:
    """A finished crossing; needers' memory began as 99 everywhere, holders' padding as NaN."""

    plan: Plan
    report: TransferReport
    memory: dict[str, dict[str, np.ndarray]]
    maps: dict[str, SourceMap]

    def __getitem__(self, worker: str) -> list[float]:
        (only,) = self.memory[worker].values()
        return only.tolist()


def crossed(
    space: CheckpointSpace, held: Layouts, needed: Layouts, *, workers_per_node: int = 1, buffer_bytes: int = 1 << 20
) -> Crossed:
    """Cross F32 tensors whose elements' values are their flat index, plus 1000 for each tensor before them."""
    maps = {w: SourceMap.from_ids(space, dict(p)) for w, p in [*held.items(), *needed.items()]}
    engines = {name.rsplit("/", 1)[0] for name in needed}
    topology = Topology.uniform(
        trainers=len(held),
        engines=len(engines),
        engine_size=len(needed) // len(engines),
        workers_per_node=workers_per_node,
        nic_bytes_per_s=1e9,
        local_bytes_per_s=1e10,
    )
    plan = make_plan(
        correspond({w: maps[w] for w in held}, {w: maps[w] for w in needed}), topology, buffer_bytes=buffer_bytes
    )
    value = np.full(space.total_elements + 1, np.nan, dtype=np.float32)
    for position, name in enumerate(space.names):
        start, stop = space.id_range(name)
        value[start:stop] = np.arange(stop - start) + 1000 * position
    memory = {w: {p: np.array(value[ids]) for p, ids in layouts.items()} for w, layouts in held.items()}
    memory |= {w: {p: np.full(i.shape, 99, np.float32) for p, i in layouts.items()} for w, layouts in needed.items()}
    report = run_in_process(plan, maps, memory, inspect=poison)
    return Crossed(plan, report, memory, maps)


def poison(executors: Mapping[str, Executor]) -> None:
    """NaN in every buffer."""
    for executor in executors.values():
        for slots in executor.buffers.memory.values():
            for memory in slots:
                memory[:] = 0xFF


def rows(*picked: int) -> np.ndarray:
    """Ids of a one-column tensor that begins at id 1."""
    return np.array(picked) + 1


# T08


def test_t08_strided_sources_and_targets() -> None:
    """Columns, transposes, reversed and broadcast sources; targets inside larger memory; guard bytes stay."""
    space = space_of(a=("F32", 3, 2))
    ids = ids_of(space, "a")
    expected = np.array([[0, 2], [4, 6], [8, 10]], dtype=np.float32)
    sources = {
        "columns": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        "transposed": expected.T.copy().T,
        "reversed": expected[::-1, ::-1].copy()[::-1, ::-1],
    }
    for name, source in sources.items():
        assert source.tolist() == expected.tolist()
        for cut in (slice(1, 3), slice(2, 0, -1), slice(0, 4, 2)):
            buf = np.full((3, 4), 7, dtype=np.float32)
            run_pair(space, ids, source, buf[:, cut])
            assert buf[:, cut].tolist() == expected.tolist(), (name, cut)
            assert sorted(buf.reshape(-1).tolist()) == sorted([7.0] * 6 + [0, 2, 4, 6, 8, 10])


def test_t08_torch_views() -> None:
    space = space_of(a=("BF16", 3, 2))
    ids = ids_of(space, "a")
    source = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)[:, ::2]
    buf = torch.full((4, 4), 7, dtype=torch.bfloat16)
    target = buf.T[:3, 1:3]
    run_pair(space, ids, source, target)
    assert target.tolist() == [[0, 2], [4, 6], [8, 10]]
    target[...] = 7
    assert buf.eq(7).all(), "only the view was written"


def test_t08_broadcast_sources_are_read_and_broadcast_targets_refused() -> None:
    space = space_of(a=("F32", 3, 2))
    ids = ids_of(space, "a")
    target = np.zeros((3, 2), dtype=np.float32)
    run_pair(space, ids, np.broadcast_to(np.float32(5), (3, 2)), target)
    assert target.tolist() == [[5, 5]] * 3
    source = np.ones((3, 2), dtype=np.float32)
    line = np.zeros(2, dtype=np.float32)
    overlapping = np.lib.stride_tricks.as_strided(line, (3, 2), (0, 4))
    with pytest.raises(ProgramError, match=r"a on engine/0/0: .*overlaps itself"):
        run_pair(space, ids, source, overlapping)
    assert line.tolist() == [0, 0]


def run_pair(space: CheckpointSpace, ids: np.ndarray, source: object, target: object) -> TransferReport:
    """One trainer, one rollout, one parameter each, in several rounds."""
    (name,) = space.names
    source_map = SourceMap.from_ids(space, {name: ids})
    maps = {"trainer/0": source_map, "engine/0/0": source_map}
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    demand = correspond({"trainer/0": source_map}, {"engine/0/0": source_map})
    plan = make_plan(demand, topology, buffer_bytes=8)
    return run_in_process(plan, maps, {"trainer/0": {name: source}, "engine/0/0": {name: target}}, inspect=poison)


# T10


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_t10_tensors_larger_than_the_buffer(depth: int) -> None:
    space = space_of(a=("F16", 20), b=("F16", 4), c=("F16", 12), d=("F16", 17))
    layout = {name: ids_of(space, name) for name in space.names}
    source_map = SourceMap.from_ids(space, layout)
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    plan = make_plan(correspond({"trainer/0": source_map}, {"engine/0/0": source_map}), topology, buffer_bytes=16)
    sizes: dict[str, int] = {}

    def measure(executors: Mapping[str, Executor]) -> None:
        sizes.update({worker: executor.buffers.total_bytes for worker, executor in executors.items()})

    values = {name: np.arange(ids.size, dtype=np.float16) + 100 * k for k, (name, ids) in enumerate(layout.items())}
    target = {name: np.zeros_like(value) for name, value in values.items()}
    maps = {"trainer/0": source_map, "engine/0/0": source_map}
    report = run_in_process(plan, maps, {"trainer/0": values, "engine/0/0": target}, depth=depth, inspect=measure)
    assert all(np.array_equal(target[name], values[name]) for name in values)
    assert sizes == {"trainer/0": depth * 16, "engine/0/0": depth * 16}, "106 bytes in 7 rounds of at most 16"
    assert {each.staging_bytes for each in report.workers.values()} == {depth * 16}
    assert {each.depth for each in report.workers.values()} == {depth}
    assert plan.rounds == 7


# L03, P15: padding


def test_l03_padding_is_never_sent_nor_touched() -> None:
    space = space_of(b=("F32", 6))
    held = {"trainer/0": {"b": ids_of(space, "b")}}
    needed = {"engine/0/0": {"p": np.array([1, 2, 3, 0, 4, 5, 6, 0])}}
    first = crossed(space, held, needed)
    assert first["engine/0/0"] == [0, 1, 2, 99, 3, 4, 5, 99]
    assert first.plan.bytes_received("engine/0/0") == 24
    before = first.memory["engine/0/0"]["p"].copy()
    run_in_process(first.plan, first.maps, first.memory, version=1, inspect=poison)
    assert before.tobytes() == first.memory["engine/0/0"]["p"].tobytes()


def test_p15_vocabularies_padded_differently() -> None:
    space = space_of(e=("F32", 10))
    pad = np.zeros(6, dtype=np.int64)
    done = crossed(
        space,
        {"trainer/0": {"e": rows(*range(8))}, "trainer/1": {"e": np.concatenate([rows(8, 9), pad])}},
        {"engine/0/0": {"e": rows(*range(6))}, "engine/0/1": {"e": np.concatenate([rows(6, 7, 8, 9), pad[:2]])}},
        workers_per_node=2,
    )
    assert done["engine/0/0"] == [0, 1, 2, 3, 4, 5]
    assert done["engine/0/1"] == [6, 7, 8, 9, 99, 99]
    assert sum(done.report.bytes_sent(trainer) for trainer in ("trainer/0", "trainer/1")) == 40


# N07: dtypes


def test_n07_fp32_stays_fp32_beside_bf16() -> None:
    space = space_of(bias=("F32", 6), w=("BF16", 6))
    layout = {name: ids_of(space, name) for name in space.names}
    source_map = SourceMap.from_ids(space, layout)
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    plan = make_plan(correspond({"trainer/0": source_map}, {"engine/0/0": source_map}), topology, buffer_bytes=1000)
    bias = torch.tensor([6.90, 6.91, 6.92, 6.93, 6.94, 6.95])
    memory = {
        "trainer/0": {"bias": bias, "w": torch.randn(6).bfloat16()},
        "engine/0/0": {"bias": torch.zeros(6), "w": torch.zeros(6, dtype=torch.bfloat16)},
    }
    run_in_process(plan, {"trainer/0": source_map, "engine/0/0": source_map}, memory, inspect=poison)
    assert torch.equal(memory["engine/0/0"]["bias"], bias)
    assert len(set(memory["engine/0/0"]["bias"].tolist())) == 6
    assert torch.equal(memory["engine/0/0"]["w"], memory["trainer/0"]["w"])


@pytest.mark.parametrize("holder", ["BF16", "F32", "F64"])
@pytest.mark.parametrize("needer", ["BF16", "F16", "F32", "F64"])
def test_conversions_on_the_way(holder: str, needer: str) -> None:
    """A wider holder is rounded when packed, a needer gets the wire's value in its own dtype; NaN stays NaN."""
    space = space_of(w=("BF16", 9))
    ids = {"w": ids_of(space, "w")}
    maps = {
        "trainer/0": SourceMap.from_ids(space, ids, {"w": holder}),
        "engine/0/0": SourceMap.from_ids(space, ids, {"w": needer}),
    }
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    demand = correspond({"trainer/0": maps["trainer/0"]}, {"engine/0/0": maps["engine/0/0"]}, cast=True)
    plan = make_plan(demand, topology, buffer_bytes=4)
    values = [1.0, 1.00390625, -1.01171875, 3e38, -0.0, 1e-40, float("inf"), float("nan"), 65520.0]
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    source = torch.tensor(values, dtype=torch.float64).to(kinds[holder])
    target = torch.zeros(9, dtype=kinds[needer])
    run_in_process(plan, maps, {"trainer/0": {"w": source}, "engine/0/0": {"w": target}}, inspect=poison)
    expected = source.to(torch.bfloat16).to(kinds[needer])
    numbers = ~expected.isnan()
    assert torch.equal(target[numbers], expected[numbers])
    assert torch.equal(target.isnan(), expected.isnan())
    assert bool(target[4].signbit())


# P04, P05, P06, P17: permutations and replicas


def test_p04_heads_interleaved_before_the_cut() -> None:
    space = space_of(qkv=("F32", 12))
    done = crossed(
        space,
        {"trainer/0": {"w": rows(0, 4, 8, 1, 5, 9)}, "trainer/1": {"w": rows(2, 6, 10, 3, 7, 11)}},
        {"engine/0/0": {"w": rows(0, 1, 4, 5, 8, 9)}, "engine/0/1": {"w": rows(2, 3, 6, 7, 10, 11)}},
    )
    assert done["engine/0/0"] == [0, 1, 4, 5, 8, 9]
    assert done["engine/0/1"] == [2, 3, 6, 7, 10, 11]
    sources = {move.source for move in done.plan.moves() if move.target == "engine/0/0"}
    assert sources == {"trainer/0"}


def test_p05_replicated_kv_heads() -> None:
    """4 q heads, 2 kv heads, D=2: every k and v row has two owners and crosses to the node once."""
    space = space_of(q=("F32", 8), k=("F32", 4), v=("F32", 4), norm=("F32", 4))
    q, k, v, norm = (ids_of(space, name) for name in ["q", "k", "v", "norm"])
    held = {
        f"trainer/{r}": {
            "qkv": np.concatenate([q[4 * r : 4 * r + 4], k[2 * r : 2 * r + 2], v[2 * r : 2 * r + 2]]),
            "n": norm,
        }
        for r in range(2)
    }
    needed = {}
    for r in range(4):
        kv = slice(2 * (r // 2), 2 * (r // 2) + 2)
        needed[f"engine/0/{r}"] = {"qkv": np.concatenate([q[2 * r : 2 * r + 2], k[kv], v[kv]]), "n": norm[kv]}
    done = crossed(space, held, needed, workers_per_node=4, buffer_bytes=16)
    for r in range(4):
        assert done.memory[f"engine/0/{r}"]["qkv"].tolist() == expected_p05(space, r)
    assert np.array_equal(done.memory["engine/0/2"]["qkv"][2:], done.memory["engine/0/3"]["qkv"][2:])
    total = sum(done.report.bytes_sent(f"trainer/{r}") for r in range(2))
    assert total == 4 * (8 + 4 + 4 + 4), "each element left the trainers once"
    received = [done.report.bytes_received(f"engine/0/{r}", Stage.RECEIVE) for r in range(4)]
    assert sum(received) == total


def expected_p05(space: CheckpointSpace, rank: int) -> list[float]:
    base = {name: 1000 * space.position(name) for name in space.names}
    kv = 2 * (rank // 2)
    return [
        base["q"] + 2 * rank, base["q"] + 2 * rank + 1,
        base["k"] + kv, base["k"] + kv + 1,
        base["v"] + kv, base["v"] + kv + 1,
    ]  # fmt: skip


@pytest.mark.parametrize(("hidden", "inner"), [(2, 2), (2, 3)])
def test_p06_transposed_and_interleaved_experts(hidden: int, inner: int) -> None:
    """Values show a missing transpose even where the shape is square."""
    space = space_of(gu=("F32", 1, hidden, 2 * inner), down=("F32", 1, inner, hidden))
    gu, down = ids_of(space, "gu"), ids_of(space, "down")
    w13 = np.concatenate([gu[0, :, 0::2].T, gu[0, :, 1::2].T])[None]
    w2 = down.transpose(0, 2, 1)
    cut = [np.concatenate([w13[0, r : r + 1], w13[0, inner + r : inner + r + 1]]) for r in range(inner)]
    done = crossed(
        space,
        {"trainer/0": {"gu": gu, "down": down}},
        {
            "engine/0/0": {"w13": w13, "w2": w2},
            "engine/1/0": {"w13": cut[0], "w2": w2[:, :, :1]},
        },
        buffer_bytes=12,
    )
    flat = 2 * inner
    at = 1000 * space.position("gu")
    expected = [[at + h * flat + 2 * i + part for h in range(hidden)] for part in range(2) for i in range(inner)]
    assert done.memory["engine/0/0"]["w13"][0].tolist() == expected
    low = 1000 * space.position("down")
    assert done.memory["engine/0/0"]["w2"][0].tolist() == [
        [low + i * hidden + h for i in range(inner)] for h in range(hidden)
    ]
    assert done.memory["engine/1/0"]["w13"].tolist() == [expected[0], expected[inner]]
    if inner == 2:
        assert (np.array(expected) - at).tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_p17_rotary_rows() -> None:
    """Pairs become halves in every head, q and k with their own head counts, 4 q heads and 2 kv heads."""
    space = space_of(q=("F32", 16), k=("F32", 8), b=("F32", 8))
    order = np.array([0, 2, 1, 3])

    def halves(name: str) -> np.ndarray:
        return ids_of(space, name).reshape(-1, 4)[:, order].reshape(-1)

    names = space.names
    done = crossed(
        space,
        {"trainer/0": {name: ids_of(space, name) for name in names}},
        {"engine/0/0": {name: halves(name) for name in names}},
        buffer_bytes=20,
    )
    for position, name in enumerate(names):
        heads = space.spec(name).elements // 4
        expected = [1000 * position + 4 * head + row for head in range(heads) for row in (0, 2, 1, 3)]
        assert done.memory["engine/0/0"][name].tolist() == expected


# U05, U07, U10: shards


def test_u05_swiglu_under_tensor_and_data_parallel() -> None:
    space = space_of(w=("F32", 16))
    shards = [(0, 1), (2, 3), (8, 9), (10, 11), (4, 5), (6, 7), (12, 13), (14, 15)]
    held = {f"trainer/{k}": {"w": rows(*shard)} for k, shard in enumerate(shards)}
    needed = {"engine/0/0": {"w": rows(*range(16))}}
    done = crossed(space, held, needed)
    assert done["engine/0/0"] == list(range(16))
    quarter = {f"engine/0/{r}": {"w": rows(2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r)} for r in range(4)}
    done = crossed(space, held, quarter, workers_per_node=4)
    assert done["engine/0/0"] == [0, 1, 8, 9]
    sources = {m.source for m in done.plan.moves() if m.runs.ids()[0] in (1, 2, 9, 10) and m.stage is Stage.RECEIVE}
    assert sources == {"trainer/0", "trainer/2"}


@pytest.mark.parametrize("gap", [0, 1])
def test_u07_flat_shards_cut_through_rows_and_tensors(gap: int) -> None:
    space = space_of(a=("F32", 3, 4), b=("F32", 5))
    a, b = ids_of(space, "a"), ids_of(space, "b")
    flat = np.concatenate([a.reshape(-1), np.zeros(gap, dtype=np.int64), b, np.zeros(3 - gap, dtype=np.int64)])
    held = {f"trainer/{r}": {"flat": part} for r, part in enumerate(np.split(flat, 4))}
    needed = {f"engine/0/{r}": {"a": a[:, 2 * r : 2 * r + 2], "b": b} for r in range(2)}
    done = crossed(space, held, needed, workers_per_node=2, buffer_bytes=8)
    for r in range(2):
        assert done.memory[f"engine/0/{r}"]["a"].tolist() == [[4 * i + 2 * r, 4 * i + 2 * r + 1] for i in range(3)]
        assert done.memory[f"engine/0/{r}"]["b"].tolist() == [1000 + k for k in range(5)]
    assert sum(done.report.bytes_sent(f"trainer/{r}") for r in range(4)) == 4 * 17


def test_u10_scalars() -> None:
    space = space_of(s=("F32",), t=("F32",))
    s, t = ids_of(space, "s"), ids_of(space, "t")
    assert s.shape == ()
    needed = {
        "engine/0/0": {
            "scalar": s,
            "one": s.reshape(1),
            "fused": np.array([int(s), int(t)]),
            "both": np.array([int(s), int(s)]),
        }
    }
    done = crossed(space, {"trainer/0": {"s": s, "t": t}}, needed)
    got = {name: value.tolist() for name, value in done.memory["engine/0/0"].items()}
    assert got == {"scalar": 0.0, "one": [0.0], "fused": [0.0, 1000.0], "both": [0.0, 0.0]}
    assert done.report.bytes_sent("trainer/0") == 8


def test_widths_of_the_table() -> None:
    """The cases above run on F32; every other width crosses bit for bit."""
    for dtype in ("BOOL", "U8", "F8_E4M3", "F8_E8M0", "I16", "U32", "I64", "C64", "F64"):
        storage = dtype_of(dtype).storage
        assert storage is not None
        space = space_of(a=(dtype, 7))
        raw = np.random.default_rng(1).integers(0, 2 if dtype == "BOOL" else 256, 7 * storage.itemsize, dtype=np.uint8)
        source, target = raw.view(storage), np.zeros(7, dtype=storage)
        run_pair(space, ids_of(space, "a")[::-1].copy(), source, target)
        assert source.tobytes() == target.tobytes()
