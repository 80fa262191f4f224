"""Public bug reports about loading and post-processing: what a probe must find, id by id."""

from __future__ import annotations

import pytest
import torch

from adapters.probing import probe
from layout_algebra.errors import LoaderWroteNothingError
from layout_algebra.space import CheckpointSpace
from tests.fakes import Live, Worker, ids, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]


def check(worker: Worker, space: CheckpointSpace, **expected: str) -> None:
    found = worker.probe(space)
    for name, text in expected.items():
        assert found.ids(name).reshape(-1).tolist() == ids(space, text), name


def test_load_and_post_processing_are_one_black_box() -> None:
    space = space_of(g=("F32", 2, 3), u=("F32", 2, 3))

    def load(live: Live, weights: Weights) -> None:
        live["w13"][0, 0:2].copy_(weights["g"])
        live["w13"][0, 2:4].copy_(weights["u"])

    def load_and_swap(live: Live, weights: Weights) -> None:
        load(live, weights)
        live["w13"].copy_(live["w13"].roll(2, dims=1))

    gate = " ".join(f"g.{index}" for index in range(6))
    up = " ".join(f"u.{index}" for index in range(6))
    live = {"w13": noisy((1, 4, 3))}
    check(Worker(live, load), space, w13=f"{gate} {up}")
    check(Worker(live, load_and_swap), space, w13=f"{up} {gate}")


def test_padding_rows_stay_empty() -> None:
    space = space_of(b=("F32", 6))

    def body(live: Live, weights: Weights) -> None:
        live["p"][0:3].copy_(weights["b"][0:3])
        live["p"][4:7].copy_(weights["b"][3:6])

    check(Worker({"p": torch.zeros(8)}, body), space, p="b.0 b.1 b.2 EMPTY b.3 b.4 b.5 EMPTY")


def test_the_map_is_of_the_tensor_that_the_module_holds_in_the_end() -> None:
    space = space_of(w=("F32", 4))

    def replace(live: Live, weights: Weights) -> None:
        live["w"] = weights["w"].flip(0).contiguous()

    worker = Worker({"w": noisy(4)}, replace)
    check(worker, space, w="w.3 w.2 w.1 w.0")
    stale = {"w": noisy(4)}
    with keeps_bits(stale), pytest.raises(LoaderWroteNothingError, match="a callable"):
        probe(worker.load_weights, stale, space)


def test_derived_arrays_are_ordinary_parameters() -> None:
    space = space_of(kvb=("F32", 4, 2))

    def body(live: Live, weights: Weights) -> None:
        live["kvb"].copy_(weights["kvb"])
        live["ukT"].copy_(live["kvb"][0::2].T)
        live["uv"].copy_(live["kvb"][1::2])

    worker = Worker({"kvb": noisy((4, 2)), "ukT": noisy((2, 2)), "uv": noisy((2, 2))}, body)
    check(worker, space, ukT="kvb.0 kvb.4 kvb.1 kvb.5", uv="kvb.2 kvb.3 kvb.6 kvb.7")


def test_post_processing_that_permutes_in_place() -> None:
    space = space_of(w=("F32", 4))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["w"])
        live["p"].copy_(live["p"][torch.tensor([2, 0, 3, 1])])

    check(Worker({"p": noisy(4)}, body), space, p="w.2 w.0 w.3 w.1")


def test_packed_scales_are_opaque() -> None:
    space = space_of(s=("F32", 2, 4))

    def body(live: Live, weights: Weights) -> None:
        exponents = (weights["s"].contiguous().view(torch.int32) >> 23) & 255
        packed = exponents[:, 0] | exponents[:, 1] << 8 | exponents[:, 2] << 16 | exponents[:, 3] << 24
        live["scale"].copy_(packed[:, None])

    check(Worker({"scale": noisy((2, 1), torch.int32)}, body), space, scale="OPAQUE OPAQUE")


@pytest.mark.parametrize("rank", [0, 1])
def test_arithmetic_is_opaque_and_its_neighbour_a_copy(rank: int) -> None:
    space = space_of(A_log=("BF16", 4), D=("BF16", 4))
    mine = slice(2 * rank, 2 * rank + 2)

    def computing(live: Live, weights: Weights) -> None:
        live["A"].copy_(-torch.exp(weights["A_log"][mine].float()))
        live["D"].copy_(weights["D"][mine])

    def copying(live: Live, weights: Weights) -> None:
        live["A"].copy_(weights["A_log"][mine].float())
        live["D"].copy_(weights["D"][mine])

    live = {"A": noisy(2), "D": noisy(2)}
    plain = f"D.{2 * rank} D.{2 * rank + 1}"
    check(Worker(live, computing), space, A="OPAQUE OPAQUE", D=plain)
    check(Worker(live, copying), space, A=f"A_log.{2 * rank} A_log.{2 * rank + 1}", D=plain)


@pytest.mark.parametrize(("rank", "expected"), [(0, "qkv.0 qkv.1 qkv.4 qkv.6"), (1, "qkv.2 qkv.3 qkv.5 qkv.7")])
def test_equal_names_and_shapes_do_not_make_a_row_shard(rank: int, expected: str) -> None:
    space = space_of(qkv=("F32", 8, 1))

    def body(live: Live, weights: Weights) -> None:
        q, k, v = weights["qkv"].split([4, 2, 2])
        live["qkv"].copy_(torch.cat([q[2 * rank : 2 * rank + 2], k[rank : rank + 1], v[rank : rank + 1]]))

    check(Worker({"qkv": noisy((4, 1))}, body), space, qkv=expected)


def test_permutation_kept_in_an_integer_buffer_steers_the_loader() -> None:
    space = space_of(w=("F32", 4))
    order = torch.tensor([2, 0, 3, 1])

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["w"][live["order"]])

    check(Worker({"p": noisy(4), "order": order}, body), space, p="w.2 w.0 w.3 w.1", order="EMPTY " * 4)
