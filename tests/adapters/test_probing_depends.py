"""Opaque parameters name the checkpoint tensors they are computed from: not too few, and exactly where one can tell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from adapters.probe_depends import spelled
from adapters.probing import probe
from layout_algebra.errors import ProbeError
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]


def many(count: int, *shape: int, dtype: str = "F32") -> CheckpointSpace:
    return CheckpointSpace(TensorSpec(f"t{number}", shape, dtype) for number in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 100])
def test_a_block_of_one_tensor_spells_it(count: int) -> None:
    digits = max(1, (count - 1).bit_length())
    for number in range(count):
        ones = np.array([[bool(number >> digit & 1) for digit in range(digits)]])
        assert np.flatnonzero(spelled(~ones, ones, count)).tolist() == [number]
        unclear = ones.copy()
        unclear[0, 0] = False
        zeros = ~ones
        zeros[0, 0] = False
        alike = [other for other in range(count) if other >> 1 == number >> 1]
        assert digits == 1 or np.flatnonzero(spelled(zeros, unclear, count)).tolist() == alike
    nothing = np.zeros((1, digits), dtype=bool)
    assert not spelled(nothing, nothing, count).any()


@pytest.mark.parametrize("tensor", [0, 5, 36])
def test_one_tensor_is_named_exactly(tensor: int) -> None:
    space = many(37, 3, 4)

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(-weights[f"t{tensor}"].exp())
        live["copy"].copy_(weights["t7"])

    found = Worker({"p": noisy((3, 4)), "copy": noisy((3, 4))}, body).probe(space)
    assert found.depends_on("p") == (f"t{tensor}",)
    assert found.depends_on("copy") == ()
    assert set(found.staged_tensors()) == {f"t{tensor}"}


def test_quantized_stacks_name_every_expert_and_nothing_else() -> None:
    space = many(40, 16, 32, dtype="BF16")
    experts = [3, 9, 10, 25, 38]

    def body(live: Live, weights: Weights) -> None:
        for slot, expert in enumerate(experts):
            value = weights[f"t{expert}"].float()
            scale = value.abs().amax(dim=1, keepdim=True) / 127
            live["q"][slot].copy_((value / scale).round().to(torch.int8))
            live["scale"][slot].copy_(scale)

    found = Worker({"q": noisy((5, 16, 32), torch.int8), "scale": noisy((5, 16, 1))}, body).probe(space)
    for name in ("q", "scale"):
        assert (found.ids(name) == -1).all()
        assert found.depends_on(name) == tuple(f"t{expert}" for expert in experts)


@pytest.mark.parametrize("merge", ["amax", "amin", "sum", "sign", "abs amax"])
def test_merged_scalars_name_all_their_sources(merge: str) -> None:
    random = np.random.default_rng(5)
    space = many(23)
    for _ in range(4):
        chosen = sorted(int(number) for number in random.choice(23, 3, replace=False))

        def body(live: Live, weights: Weights, chosen: list[int] = chosen) -> None:
            values = torch.stack([weights[f"t{number}"] for number in chosen])
            merged = {
                "amax": values.amax(),
                "amin": values.amin(),
                "sum": values.sum(),
                "sign": ((values > 0) * torch.tensor([1, 2, 4])).sum().float(),
                "abs amax": values.abs().amax(),
            }[merge]
            live["scale"].copy_(merged)
            live["copy"].copy_(weights["t0"])

        found = Worker({"scale": noisy(()), "copy": noisy(())}, body).probe(space)
        if found.opaque:
            assert set(found.depends_on("scale")) >= {f"t{number}" for number in chosen}


@pytest.mark.parametrize("merge", [torch.median, torch.amax, torch.amin])
def test_selections_element_by_element_name_all_their_sources(merge: Callable[..., object]) -> None:
    space = many(23, 64)
    chosen = [2, 11, 20]

    def body(live: Live, weights: Weights) -> None:
        merged = merge(torch.stack([weights[f"t{number}"] for number in chosen]), dim=0)
        live["p"].copy_(merged[0] if isinstance(merged, tuple) else merged)

    found = Worker({"p": noisy(64)}, body).probe(space)
    assert (found.ids("p") == -1).all()
    assert set(found.depends_on("p")) >= {f"t{number}" for number in chosen}


def test_copies_beside_opaque_elements_are_not_dependencies() -> None:
    space = space_of(x=("F32", 64), y=("F32", 64), z=("F32", 64))

    def body(live: Live, weights: Weights) -> None:
        live["p"][0].copy_(weights["x"])
        live["p"][1].copy_(weights["y"] * 3)

    found = Worker({"p": noisy((2, 64))}, body).probe(space)
    assert (found.ids("p")[0] > 0).all()
    assert found.depends_on("p") == ("y",)


def test_a_loader_that_differs_from_call_to_call() -> None:
    space = space_of(x=("F32", 40), y=("F32", 3))

    def body(live: Live, weights: Weights) -> None:
        live["y"].copy_(weights["y"])
        live["x"].copy_(weights["x"] if worker.loads % 2 else weights["x"].flip(0))

    worker = Worker({"x": noisy(40), "y": noisy(3)}, body)
    with keeps_bits(worker.live), pytest.raises(ProbeError, match="x: two loads of the same checkpoint"):
        probe(worker.load_weights, worker.live, space)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("BF16", torch.bfloat16), ("F32", torch.float32), ("F8_E4M3", torch.float8_e4m3fn)]
)
@pytest.mark.parametrize("elements", [64, 3000])
def test_a_loader_that_loads_a_tensor_once_only(dtype: str, kind: torch.dtype, elements: int) -> None:
    """What its first load left stays: it looked like a constant, which no update would have changed."""
    space = space_of(x=(dtype, elements), y=("BF16", 3))
    loaded: set[str] = set()

    def body(live: Live, weights: Weights) -> None:
        live["y"].copy_(weights["y"])
        if "x" not in loaded:
            loaded.add("x")
            live["x"].copy_(weights["x"])

    worker = Worker({"x": noisy(elements, kind), "y": noisy(3, torch.bfloat16)}, body)
    with (
        keeps_bits(worker.live),
        pytest.raises(ProbeError, match=r"x: .* elements hold what one load of the probe left"),
    ):
        probe(worker.load_weights, worker.live, space)


def test_a_table_that_every_load_writes_anew_is_no_rest_of_a_load() -> None:
    space = space_of(x=("F32", 40))
    table = torch.arange(128.0, 250.0)

    def body(live: Live, weights: Weights) -> None:
        live["x"].copy_(weights["x"])
        live["table"].copy_(table)

    found = Worker({"x": noisy(40), "table": table.clone()}, body).probe(space)
    assert (found.ids("table") == 0).all()


def test_fresh_garbage_in_padding_is_opaque_and_depends_on_nothing() -> None:
    space = space_of(x=("F32", 40, 8))

    def body(live: Live, weights: Weights) -> None:
        live["p"][:40].copy_(weights["x"])
        live["p"][40:].copy_(torch.rand(3, 8))

    found = Worker({"p": noisy((43, 8))}, body).probe(space)
    assert (found.ids("p")[:40] > 0).all()
    assert (found.ids("p")[40:] == -1).all()
    assert found.depends_on("p") == ()


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs amax": lambda w: w.abs().amax(),
    "amax": lambda w: w.amax(),
    "amin": lambda w: w.amin(),
    "median": lambda w: w.abs().median(),
    "sum": lambda w: w.sum(),
    "not zero": lambda w: (w != 0).sum(),
}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "F16", "BF16"])
@pytest.mark.parametrize("elements", [40, 1000, 20_000])
def test_reductions_of_any_dtype_and_size_name_what_they_reduce(dtype: str, elements: int) -> None:
    """Two patterns that both hold nearly all numbers of a byte have one maximum: it seemed to come from nowhere."""
    space = many(3, elements, dtype=dtype)
    live = {"copy": noisy(4), **{name: noisy(()) for name in REDUCTIONS}}

    def body(live: Live, weights: Weights) -> None:
        live["copy"].copy_(weights["t1"].float()[:4])
        for name, reduce in REDUCTIONS.items():
            live[name].copy_(reduce(weights["t1"].float()))

    found = Worker(live, body).probe(space)
    assert set(found.opaque) >= {"abs amax", "amax", "sum"}
    assert {found.depends_on(name) for name in found.opaque} == {("t1",)}


def test_a_choice_that_does_not_change_in_the_search_names_what_it_chose_before() -> None:
    """What a scalar of few numbers steers, for instance, may go one way in the code passes and another ever after."""
    space = space_of(a=("BF16", 50, 64), b=("BF16", 50, 64))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["a" if worker.loads <= 3 else "b"])

    worker = Worker({"p": noisy((50, 64), torch.bfloat16)}, body)
    found = worker.probe(space)
    assert (found.ids("p") == -1).all()
    assert found.depends_on("p") == ("a", "b")


def test_what_depends_on_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    space = space_of(x=("F32", 40, 8))
    calls = iter(range(1000))

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(weights["x"])
        live["warm"].fill_(min(next(calls), 3))

    found = Worker({"p": noisy((40, 8)), "warm": noisy(4)}, body).probe(space)
    assert (found.opaque, found.depends_on("warm")) == (("warm",), ())
    assert "warm: load_weights writes 4 elements of it that change with no checkpoint tensor alone" in caplog.text


def test_loads_grow_with_the_logarithm() -> None:
    loads = []
    for count in (8, 64, 512):
        worker = Worker({"p": noisy(4)}, lambda live, weights: live["p"].copy_(weights["t3"] * 3))
        assert worker.probe(many(count, 4)).depends_on("p") == ("t3",)
        loads.append(worker.loads)
    assert loads == [5 + 6 + 3 * digits for digits in (3, 6, 9)]
