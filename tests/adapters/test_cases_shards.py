"""Public bug reports about uneven, empty, flat and strided shards: what a probe must find, id by id."""

from __future__ import annotations

import pytest
import torch

from layout_algebra.space import CheckpointSpace
from tests.fakes import Live, Worker, ids, ids_by_running, noisy, space_of

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
