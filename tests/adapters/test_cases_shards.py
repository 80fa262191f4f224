"""Public bug reports about uneven, empty, flat and strided shards: what a probe must find, id by id."""

from __future__ import annotations

import pytest
import torch

from adapters.probing import probe
from layout_algebra.correspondence import correspond
from layout_algebra.space import CheckpointSpace
from tests.fakes import Live, Worker, bits_of, ids, ids_by_running, keeps_bits, noisy, space_of
from transfer_exec.in_process import run_in_process
from transfer_exec.planner import make_plan
from transfer_exec.topology import Topology

Weights = dict[str, torch.Tensor]


def check(worker: Worker, space: CheckpointSpace, **expected: str) -> None:
    found = worker.probe(space)
    for name, text in expected.items():
        assert found.ids(name).reshape(-1).tolist() == ids(space, text), name


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (3, 3), (6, 1)])
def test_uneven_chunks(first: int, rows: int) -> None:
    space = space_of(w=("F32", 7, 2))

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"][first : first + rows])

    written = " ".join(f"w.{index}" for index in range(2 * first, 2 * (first + rows)))
    check(Worker({"w": noisy((rows, 2))}, body), space, w=written)


@pytest.mark.parametrize("offset", [0, 4, 5, 6])
def test_an_empty_shard_beside_a_filled_one(offset: int) -> None:
    space = space_of(w=("F32", 5, 2), e=("F32", 0, 4), x=("F32", 2))

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"][offset : offset + live["w"].shape[0]])
        live["e"].copy_(weights["e"])
        live["x"].copy_(weights["x"])

    worker = Worker({"w": noisy((0, 2)), "e": noisy((0, 4)), "x": noisy(2)}, body)
    found = worker.probe(space)
    assert found.ids("w").shape == (0, 2)
    assert found.ids("e").shape == (0, 4)
    assert found.ids("x").tolist() == ids(space, "x.0 x.1")
    assert found.coverage().unused_tensors == ("w",)


def test_a_rank_that_holds_nothing() -> None:
    space = space_of(w=("F32", 1, 4))

    def body(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"][1:])

    assert Worker({"w": noisy((0, 4))}, body).probe(space).ids("w").shape == (0, 4)
    assert Worker({}, lambda live, weights: None).probe(space).parameters == ()


@pytest.mark.parametrize(("tensor_rank", "data_rank"), [(t, d) for t in range(2) for d in range(4)])
def test_swiglu_shards_under_two_axes(tensor_rank: int, data_rank: int) -> None:
    expected = [[[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [6, 7], [12, 13], [14, 15]]][tensor_rank][data_rank]
    space = space_of(w=("BF16", 16, 3))

    def body(live: Live, weights: Weights) -> None:
        gate, up = weights["w"].chunk(2)
        swizzled = torch.cat([gate.chunk(2)[tensor_rank], up.chunk(2)[tensor_rank]])
        live["w"].copy_(swizzled[2 * data_rank : 2 * data_rank + 2])

    found = Worker({"w": noisy((2, 3), torch.bfloat16)}, body).probe(space).ids("w")
    assert found.tolist() == [[1 + 3 * row + column for column in range(3)] for row in expected]


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("rank", range(4))
def test_flat_shards_cut_through_rows_and_tensors(rank: int, gap: int) -> None:
    space = space_of(a=("F32", 3, 4), b=("F32", 5))
    words = [f"a.{index}" for index in range(12)] + ["EMPTY"] * gap + [f"b.{index}" for index in range(5)]
    words += ["EMPTY"] * (20 - len(words))

    def body(live: Live, weights: Weights) -> None:
        flat = torch.zeros(20, dtype=live["flat"].dtype)
        flat[:12] = weights["a"].reshape(-1)
        flat[12 + gap : 17 + gap] = weights["b"]
        live["flat"].copy_(flat[5 * rank : 5 * rank + 5])

    check(Worker({"flat": noisy(5)}, body), space, flat=" ".join(words[5 * rank : 5 * rank + 5]))


def test_scalars_into_every_small_shape() -> None:
    space = space_of(s=("F32",), t=("F32",))

    def body(live: Live, weights: Weights) -> None:
        live["scalar"].copy_(weights["s"])
        live["one"].copy_(weights["s"])
        live["two"][0] = weights["s"]
        live["two"][1] = weights["t"]
        live["both"].copy_(weights["s"].expand(2))

    worker = Worker({"scalar": noisy(()), "one": noisy(1), "two": noisy(2), "both": noisy(2)}, body)
    check(worker, space, scalar="s.0", one="s.0", two="s.0 t.0", both="s.0 s.0")
    assert worker.probe(space).ids("scalar").shape == ()


def test_strided_targets_and_guarded_neighbours() -> None:
    space = space_of(w=("F32", 3, 4))
    buffer = noisy((3, 8))
    before = buffer.clone().view(torch.int32)

    def body(live: Live, weights: Weights) -> None:
        live["columns"].copy_(weights["w"][:, ::2])
        live["turned"].copy_(weights["w"].T)

    live = {"columns": buffer[:, 1:3], "turned": noisy((3, 4)).T}
    worker = Worker(live, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all()
    assert torch.equal(buffer.view(torch.int32), before)


def test_a_source_that_is_broadcast() -> None:
    space = space_of(w=("F32", 3))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["w"].expand(4, 3))
        live["q"].copy_(weights["w"][:, None].expand(3, 4))

    worker = Worker({"p": noisy((4, 3)), "q": noisy((3, 4))}, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all()


@pytest.mark.parametrize("nothing", [{}, {"w": (0, 4)}, {"w": (0, 4), "scale": (3, 0)}])
def test_ranks_with_nothing_among_others(nothing: dict[str, tuple[int, ...]]) -> None:
    """Three trainers, one without an element; two rollout ranks, one with an empty shard: found, planned, moved."""
    space = space_of(w=("F32", 4, 4), unused=("BF16", 3))
    rows = {"trainer/0": (0, 2), "trainer/2": (2, 4), "engine/0/0": (0, 4)}
    memory: dict[str, Live] = {worker: {"w": noisy((stop - start, 4))} for worker, (start, stop) in rows.items()}
    for worker in ("trainer/1", "engine/0/1"):
        memory[worker] = {name: torch.empty(shape) for name, shape in nothing.items()}
    votes: list[int] = []

    def agree(mine: int) -> int:
        votes.append(mine)
        return mine

    maps, loads = {}, []
    for worker, live in memory.items():
        start, stop = rows.get(worker, (0, 0))

        def body(live: Live, weights: Weights, start: int = start, stop: int = stop) -> None:
            if "w" in live:
                live["w"].copy_(weights["w"][start:stop])

        rank = Worker(live, body)
        with keeps_bits(live):
            maps[worker] = probe(rank.load_weights, live, space, agree=agree)
        loads.append((rank.loads, len(votes)))
        votes.clear()
    assert len(set(loads)) == 1, "a rank with nothing takes part in every load and vote"
    assert maps["trainer/1"].coverage().copied_elements == 0
    assert maps["trainer/1"].parameters == tuple(sorted(nothing))
    needers = {worker: maps[worker] for worker in ("engine/0/0", "engine/0/1")}
    holders = {worker: maps[worker] for worker in maps if worker not in needers}
    cluster = Topology.uniform(
        trainers=3, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    run_in_process(make_plan(correspond(holders, needers), cluster, buffer_bytes=16), maps, memory)
    sent = torch.cat([memory["trainer/0"]["w"], memory["trainer/2"]["w"]])
    assert bits_of({"w": sent}) == bits_of(memory["engine/0/0"])
