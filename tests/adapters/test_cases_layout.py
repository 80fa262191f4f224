"""Public bug reports about packing and layout: what a probe must find, id by id."""

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


@pytest.mark.parametrize("head_dim", [1, 2])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_qkv_by_groups_and_concatenated(head_dim: int, heads: int, groups: int, ranks: int) -> None:
    space = space_of(
        q=("BF16", heads * head_dim, 3), k=("BF16", groups * head_dim, 3), v=("BF16", groups * head_dim, 3)
    )

    def parts(weights: Weights) -> list[torch.Tensor]:
        return [weights[name].reshape(groups, -1, 3) for name in "qkv"]

    for rank in range(ranks):
        mine = slice(rank * groups // ranks, (rank + 1) * groups // ranks)

        def by_groups(live: Live, weights: Weights, mine: slice = mine) -> None:
            live["p"].copy_(torch.cat(parts(weights), dim=1)[mine].reshape(live["p"].shape))

        def concatenated(live: Live, weights: Weights, mine: slice = mine) -> None:
            live["p"].copy_(torch.cat([part[mine].reshape(-1, 3) for part in parts(weights)]))

        rows = (heads + 2 * groups) * head_dim // ranks
        maps = []
        for body in (by_groups, concatenated):
            worker = Worker({"p": noisy((rows, 3), torch.bfloat16)}, body)
            found = worker.probe(space).ids("p")
            assert (found == ids_by_running(worker, space)["p"]).all()
            maps.append(found)
        assert heads != groups or ranks == 2 or (maps[0] != maps[1]).any()


def test_fused_qkv_written_down() -> None:
    space = space_of(q=("F32", 4, 1), k=("F32", 2, 1), v=("F32", 2, 1))
    order = "q.0 q.1 k.0 v.0 q.2 q.3 k.1 v.1"

    def body(live: Live, weights: Weights) -> None:
        q, k, v = (weights[name].reshape(2, -1, 1) for name in "qkv")
        live["p"].copy_(torch.cat([q, k, v], dim=1).reshape(8, 1))

    check(Worker({"p": noisy((8, 1))}, body), space, p=order)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 4, 8, 1, 5, 9]), (1, [2, 6, 10, 3, 7, 11])])
def test_qkv_permuted_before_the_cut(rank: int, expected: list[int]) -> None:
    space = space_of(w=("F32", 12, 1))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["w"].reshape(3, 4, 1).transpose(0, 1).reshape(12, 1)[6 * rank : 6 * rank + 6])

    check(Worker({"p": noisy((6, 1))}, body), space, p=" ".join(f"w.{index}" for index in expected))


@pytest.mark.parametrize("rank", range(4))
def test_more_ranks_than_kv_heads_replicate(rank: int) -> None:
    space = space_of(q=("F32", 8, 2), k=("F32", 4, 2), v=("F32", 4, 2), norm=("F32", 4))

    def body(live: Live, weights: Weights) -> None:
        head = rank // 2
        cuts = [weights["q"][2 * rank : 2 * rank + 2], *(weights[name][2 * head : 2 * head + 2] for name in "kv")]
        live["qkv"].copy_(torch.cat(cuts))
        live["norm"].copy_(weights["norm"][2 * head : 2 * head + 2])

    worker = Worker({"qkv": noisy((6, 2)), "norm": noisy(2)}, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all()
    head = rank // 2
    assert found.ids("norm").tolist() == ids(space, f"norm.{2 * head} norm.{2 * head + 1}")


@pytest.mark.parametrize("inner", [2, 3])
@pytest.mark.parametrize("rank", [None, 0])
def test_interleaved_and_transposed_experts(inner: int, rank: int | None) -> None:
    space = space_of(gu=("F32", 1, 2, 2 * inner), down=("F32", 1, inner, 2))
    mine = slice(0, inner if rank is None else 1)

    def body(live: Live, weights: Weights) -> None:
        columns = weights["gu"].transpose(1, 2)
        live["w13"].copy_(torch.cat([columns[:, 0::2][:, mine], columns[:, 1::2][:, mine]], dim=1))
        live["w2"].copy_(weights["down"].transpose(1, 2)[:, :, mine])

    width = inner if rank is None else 1
    worker = Worker({"w13": noisy((1, 2 * width, 2)), "w2": noisy((1, 2, width))}, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all(), name
    if inner == 2:
        written = [[0, 4], [2, 6], [1, 5], [3, 7]] if rank is None else [[0, 4], [1, 5]]
        assert (found.ids("w13") - space.id_range("gu")[0])[0].tolist() == written
    assert len(found.slice_copies("w13")) <= 2


def test_expert_stacks_name_experts_by_id() -> None:
    space = space_of(**{f"e{n}__w": ("BF16", 1) for n in range(12)})

    def stacked(names: list[str]) -> Worker:
        def body(live: Live, weights: Weights) -> None:
            live["w"].copy_(torch.stack([weights[name] for name in names]))

        return Worker({"w": noisy((12, 1), torch.bfloat16)}, body)

    right = [f"e{n}.w" for n in range(12)]
    for names in (right, sorted(right)):
        check(stacked(names), space, w=" ".join(f"{name}.0" for name in names))


def test_redundant_and_moved_expert_slots() -> None:
    space = space_of(**{f"e{n}": ("F32", 2) for n in range(4)})
    for slots in ([0, 1, 2], [3, 0, 1], [2, 0, 3], [1, 2, 2]):

        def body(live: Live, weights: Weights, slots: list[int] = slots) -> None:
            for slot, expert in enumerate(slots):
                live["w"][slot].copy_(weights[f"e{expert}"])

        expected = " ".join(f"e{expert}.{index}" for expert in slots for index in range(2))
        check(Worker({"w": noisy((3, 2))}, body), space, w=expected)


def test_layers_under_local_names() -> None:
    space = space_of(**{f"l{n}__w": ("F32", 2) for n in range(8)})
    for held in ([0, 1, 4, 5], [2, 3, 6, 7]):

        def body(live: Live, weights: Weights, held: list[int] = held) -> None:
            for local, layer in enumerate(held):
                live[f"layers.{local}"].copy_(weights[f"l{layer}.w"])

        worker = Worker({f"layers.{local}": noisy(2) for local in range(4)}, body)
        found = worker.probe(space)
        for local, layer in enumerate(held):
            assert found.ids(f"layers.{local}").tolist() == ids(space, f"l{layer}.w.0 l{layer}.w.1")
        assert len(found.coverage().unused_tensors) == 4


def test_block_scales_that_overlap_report_the_last_writer() -> None:
    space = space_of(s=("F32", 4))

    def body(live: Live, weights: Weights) -> None:
        live["p"][0:2].copy_(weights["s"][0:2])
        live["p"][1:3].copy_(weights["s"][2:4])

    check(Worker({"p": noisy(3)}, body), space, p="s.0 s.2 s.3")


@pytest.mark.parametrize("pad_value", [None, 0.0, 1.0, float("nan")])
def test_vocabulary_padded_differently_on_every_side(pad_value: float | None) -> None:
    space = space_of(emb=("BF16", 10, 2))
    for rows, first, last in ((6, 0, 6), (6, 6, 10), (8, 0, 8), (8, 8, 10)):

        def body(live: Live, weights: Weights, first: int = first, last: int = last) -> None:
            if pad_value is not None:
                live["emb"].fill_(pad_value)
            live["emb"][: last - first].copy_(weights["emb"][first:last])

        written = [f"emb.{index}" for index in range(2 * first, 2 * last)]
        padding = ["EMPTY"] * (2 * (rows - last + first))
        check(Worker({"emb": noisy((rows, 2), torch.bfloat16)}, body), space, emb=" ".join(written + padding))


def test_rotary_row_permutation() -> None:
    space = space_of(q=("F32", 16, 3), k=("F32", 8, 3), b=("F32", 16))

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.reshape(-1, 2, 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)

    def body(live: Live, weights: Weights) -> None:
        for name in ("q", "k", "b"):
            live[name].copy_(halves(weights[name]))

    worker = Worker({"q": noisy((16, 3)), "k": noisy((8, 3)), "b": noisy(16)}, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all()
    assert (found.ids("b")[:4] - space.id_range("b")[0]).tolist() == [0, 2, 1, 3]


def test_halves_swapped_follow_the_engine() -> None:
    space = space_of(g=("F32", 2, 1), u=("F32", 2, 1), s=("F32", 2))

    def gate_first(live: Live, weights: Weights) -> None:
        live["w"].copy_(torch.cat([weights["g"], weights["u"]]))
        live["s"].copy_(weights["s"])

    def up_first(live: Live, weights: Weights) -> None:
        live["w"].copy_(torch.cat([weights["u"], weights["g"]]))
        live["s"].copy_(weights["s"].flip(0))

    live = {"w": noisy((4, 1)), "s": noisy(2)}
    check(Worker(live, gate_first), space, w="g.0 g.1 u.0 u.1", s="s.0 s.1")
    check(Worker(live, up_first), space, w="u.0 u.1 g.0 g.1", s="s.1 s.0")
