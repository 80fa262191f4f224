"""Public bug reports about names, duplicates, buffers and element values: what a probe must find, id by id."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.probing import live_tensors, probe
from layout_algebra.errors import LoaderWroteNothingError
from layout_algebra.space import CheckpointSpace
from tests.fakes import Live, Worker, bits_of, ids, ids_by_running, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]


def check(worker: Worker, space: CheckpointSpace, **expected: str) -> None:
    found = worker.probe(space)
    for name, text in expected.items():
        assert found.ids(name.replace("__", ".")).reshape(-1).tolist() == ids(space, text), name


def test_one_tensor_under_two_names() -> None:
    space = space_of(embed=("F32", 2))
    storage = noisy(2)
    both = Worker({"embed": storage, "lm_head": storage}, lambda live, weights: live["embed"].copy_(weights["embed"]))
    check(both, space, embed="embed.0 embed.1", lm_head="embed.0 embed.1")

    def copy_twice(live: Live, weights: Weights) -> None:
        live["embed"].copy_(weights["embed"])
        live["lm_head"].copy_(weights["embed"])

    check(
        Worker({"embed": noisy(2), "lm_head": noisy(2)}, copy_twice),
        space,
        embed="embed.0 embed.1",
        lm_head="embed.0 embed.1",
    )


def test_two_writers_of_one_storage_leave_the_last() -> None:
    space = space_of(embed=("F32", 2), lm_head=("F32", 2))
    storage = noisy(2)

    def body(live: Live, weights: Weights) -> None:
        live["embed"].copy_(weights["embed"])
        live["lm_head"].copy_(weights["lm_head"])

    worker = Worker({"embed": storage, "lm_head": storage}, body)
    found = worker.probe(space)
    assert found.ids("embed").tolist() == ids(space, "lm_head.0 lm_head.1")
    assert found.coverage().unused_tensors == ("embed",)


def test_views_of_one_storage() -> None:
    space = space_of(q=("F32", 2, 3), k=("F32", 1, 3))
    fused = noisy((3, 3))

    def body(live: Live, weights: Weights) -> None:
        live["q"].copy_(weights["q"])
        live["k"].copy_(weights["k"])

    worker = Worker({"fused": fused, "q": fused[:2], "k": fused[2:], "column": fused[:, 1]}, body)
    found = worker.probe(space)
    rows = ids(space, " ".join([*(f"q.{index}" for index in range(6)), *(f"k.{index}" for index in range(3))]))
    assert found.ids("fused").reshape(-1).tolist() == rows
    assert found.ids("q").reshape(-1).tolist() == rows[:6]
    assert found.ids("k").reshape(-1).tolist() == rows[6:]
    assert found.ids("column").tolist() == rows[1::3]


def test_views_of_another_dtype_on_one_storage() -> None:
    space = space_of(w=("F32", 6))
    raw = noisy(24, torch.uint8)

    def body(live: Live, weights: Weights) -> None:
        live["w"][1:5].copy_(weights["w"][:4])

    worker = Worker({"raw": raw, "w": raw.view(torch.float32)}, body)
    found = worker.probe(space)
    assert found.ids("w").tolist() == ids(space, "EMPTY w.0 w.1 w.2 w.3 EMPTY")
    assert found.ids("raw").tolist() == [0] * 4 + [-1] * 16 + [0] * 4


def test_names_nobody_uses_are_listed() -> None:
    space = space_of(a=("F32", 2), mtp__b=("F32", 2))
    found = Worker({"a": noisy(2)}, lambda live, weights: live["a"].copy_(weights["a"])).probe(space)
    assert found.coverage().unused_tensors == ("mtp.b",)


def test_nothing_matched_is_an_error() -> None:
    space = space_of(m__l__0__w=("F32", 2), n__w=("F32", 2))

    def body(live: Live, weights: Weights) -> None:
        for name in set(live) & set(weights):
            live[name].copy_(weights[name])

    worker = Worker({"l.0.w": noisy(2)}, body)
    with keeps_bits(worker.live), pytest.raises(LoaderWroteNothingError, match="names it knows"):
        probe(worker.load_weights, worker.live, space)


def test_buffers_beside_parameters() -> None:
    space = space_of(bias=("F32", 2), w=("F32", 2))
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(noisy(2))
    module.register_buffer("bias", noisy(2))
    module.register_buffer("cos", noisy(4), persistent=False)
    module.register_buffer("map", torch.tensor([7, -3]))

    def load_weights(weights: object) -> None:
        loaded = dict(weights)  # type: ignore[call-overload]
        module.w.data.copy_(loaded["w"])
        module.bias.copy_(loaded["bias"])

    before = bits_of(live_tensors(module))
    found = probe(load_weights, live_tensors(module), space)
    assert found.ids("bias").tolist() == ids(space, "bias.0 bias.1")
    assert found.ids("cos").tolist() == [0] * 4
    assert found.ids("map").tolist() == [0] * 2
    assert bits_of(live_tensors(module)) == before


@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("checkpoint", ["F32", "BF16", "F16"])
def test_every_pair_of_float_dtypes_is_a_copy(checkpoint: str, parameter: torch.dtype) -> None:
    space = space_of(bias=(checkpoint, 40))
    worker = Worker({"bias": noisy(40, parameter)}, lambda live, weights: live["bias"].copy_(weights["bias"].flip(0)))
    found = worker.probe(space)
    assert found.ids("bias").tolist() == list(range(40, 0, -1))
    assert found.dtype("bias") == {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}.get(
        str(parameter), "F64"
    )


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 300), ("F16", 5000), ("F32", 70_000)])
def test_more_elements_than_exact_small_integers(dtype: str, size: int) -> None:
    space = space_of(w=(dtype, size))
    kept = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    worker = Worker({"w": noisy(size, kept)}, lambda live, weights: live["w"].copy_(weights["w"].flip(0)))
    assert np.array_equal(worker.probe(space).ids("w"), np.arange(size, 0, -1))


def test_loaders_that_refuse_or_clamp_odd_values() -> None:
    space = space_of(w=("F32", 64))

    def refuse(live: Live, weights: Weights) -> None:
        if not bool((weights["w"] > 0).all() and weights["w"].isfinite().all()):
            raise ValueError("weights must be positive")
        live["w"].copy_(weights["w"])

    check(Worker({"w": noisy(64)}, refuse), space, w=" ".join(f"w.{index}" for index in range(64)))

    def clamp(live: Live, weights: Weights) -> None:
        live["w"].copy_(weights["w"].clamp(-65504, 65504))

    check(Worker({"w": noisy(64)}, clamp), space, w=" ".join(f"w.{index}" for index in range(64)))


def test_a_mixed_checkpoint_into_one_parameter() -> None:
    space = space_of(a=("BF16", 40), b=("F32", 40), c=("F16", 40))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(torch.cat([weights[name].to(live["p"].dtype) for name in "abc"]))
        live["back"].copy_(torch.cat([weights[name].to(live["back"].dtype) for name in "abc"]).flip(0))

    worker = Worker({"p": noisy(120), "back": noisy(120, torch.float64)}, body)
    found = worker.probe(space)
    for name, truth in ids_by_running(worker, space).items():
        assert (found.ids(name) == truth).all()
    assert len(found.slice_copies("p")) == 1


def test_a_space_of_nothing() -> None:
    space = CheckpointSpace([])
    with pytest.raises(LoaderWroteNothingError):
        probe(lambda weights: None, {"p": torch.zeros(2)}, space)
