"""Loaders that compute: nothing they compute is ever called a copy, and what they copy beside it still is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fakes import Live, Worker, ids_by_running, noisy, space_of

Weights = dict[str, torch.Tensor]
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def quantized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax() / 127
    return (x / scale).round().clamp(-127, 127) * scale


def cut_to(dtype: torch.dtype) -> Compute:
    return lambda x, y: x.to(dtype).to(x.dtype)


COMPUTED: dict[str, Compute] = {
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: x.relu(),
    "max of two": torch.maximum,
    "min of two": torch.minimum,
    "larger magnitude": lambda x, y: torch.where(x.abs() > y.abs(), x, y),
    "clamp": lambda x, y: x.clamp(-4, 4),
    "clamp below": lambda x, y: x.clamp_min(1.0),
    "clamp above": lambda x, y: x.clamp_max(1.0),
    "clamp wide": lambda x, y: x.clamp(-448, 448),
    "scale": lambda x, y: x * 3,
    "double": lambda x, y: x * 2,
    "negate": lambda x, y: -x,
    "scale near one": lambda x, y: x * 1.01,
    "add a little": lambda x, y: x + 2**-6,
    "add one": lambda x, y: x + 1,
    "sum of two": lambda x, y: x + y,
    "mean of two": lambda x, y: (x + y) / 2,
    "row mean": lambda x, y: x.mean(dim=-1, keepdim=True).expand_as(x),
    "row max": lambda x, y: x.amax(dim=-1, keepdim=True).expand_as(x),
    "row median": lambda x, y: x.float().median(dim=-1, keepdim=True).values.expand_as(x).to(x.dtype),
    "sort": lambda x, y: x.sort(dim=-1).values,
    "sort all": lambda x, y: x.reshape(-1).sort(descending=True).values.reshape(x.shape),
    "sign": lambda x, y: x.sign(),
    "step": lambda x, y: (x > 0).to(x.dtype),
    "reciprocal": lambda x, y: 1 / x,
    "minus exp": lambda x, y: -torch.exp(x.float()).to(x.dtype),
    "softmax": lambda x, y: x.float().softmax(-1).to(x.dtype),
    "to float8 and back": cut_to(torch.float8_e4m3fn),
    "round": lambda x, y: x.round(),
    "quantize and dequantize": quantized,
    "cumulative sum": lambda x, y: x.float().cumsum(-1).to(x.dtype),
    "normalize": lambda x, y: torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype),
    "select by sign": lambda x, y: torch.where(x > 0, x, y),
}


SAME_OF_ONE = {"row mean", "row max", "row median", "sort", "sort all", "cumulative sum", "softmax"}
"""What makes of a single element that element, or a constant."""
OFTEN_SAME_OF_ONE = {"clamp wide", "quantize and dequantize"}
"""What makes of most single elements that element: they tell too little."""


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 40)])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_elements_are_never_copies(name: str, dtype: str, shape: tuple[int, int]) -> None:
    compute = COMPUTED[name]
    space = space_of(x=(dtype, *shape), y=(dtype, *shape), z=(dtype, 50))
    kept = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]

    def body(live: Live, weights: Weights) -> None:
        live["p"].copy_(compute(weights["x"], weights["y"]))
        live["beside"][:50].copy_(weights["z"])
        live["beside"][50:].copy_(compute(weights["x"], weights["y"]).reshape(-1))
        live["plain"].copy_(weights["x"])

    size = shape[0] * shape[1]
    worker = Worker({"p": noisy(shape, kept), "beside": noisy(50 + size, kept), "plain": noisy(shape, kept)}, body)
    found = worker.probe(space)
    if shape == (1, 1) and name in SAME_OF_ONE:
        assert found.ids("p").tolist() == [[0 if name == "softmax" else 1]]
    elif shape != (1, 1) or name not in OFTEN_SAME_OF_ONE:
        assert (found.ids("p") <= 0).all(), "computed elements are called copies"
        assert (found.ids("p") == -1).any()
        assert (found.ids("beside")[50:] <= 0).all()
    assert found.ids("beside")[:50].tolist() == list(range(space.element_id("z", 0), space.element_id("z", 0) + 50))
    assert found.ids("plain").reshape(-1).tolist() == list(range(1, 1 + size))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cast_down_and_up_again_is_no_copy(narrow: torch.dtype) -> None:
    space = space_of(x=("F32", 6, 7))
    worker = Worker({"p": noisy((6, 7))}, lambda live, weights: live["p"].copy_(weights["x"].to(narrow)))
    assert (worker.probe(space).ids("p") == -1).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 2.5, -3.0, float("inf"), float("nan"), 2**-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_with_a_constant_is_empty(value: float, dtype: torch.dtype) -> None:
    space = space_of(x=("F32", 6, 7))

    def body(live: Live, weights: Weights) -> None:
        live["p"].fill_(value)
        live["p"][1:7, 2:9].copy_(weights["x"])

    found = Worker({"p": noisy((8, 12), dtype)}, body).probe(space).ids("p")
    expected = np.zeros((8, 12), dtype=np.int64)
    expected[1:7, 2:9] = np.arange(1, 43).reshape(6, 7)
    assert (found == expected).all()


def test_a_table_that_the_loader_computes_anew_is_empty() -> None:
    space = space_of(x=("F32", 4))

    def body(live: Live, weights: Weights) -> None:
        live["cos"].copy_(torch.arange(64).float().cos().reshape(8, 8))
        live["p"].copy_(weights["x"])

    live = {"cos": torch.arange(64).float().cos().reshape(8, 8), "p": noisy(4)}
    found = Worker(live, body).probe(space)
    assert (found.ids("cos") == 0).all()
    assert (Worker({**live, "cos": noisy((8, 8))}, body).probe(space).ids("cos") == 0).all()


def test_integers_made_of_floats_are_opaque_and_untouched_ones_empty() -> None:
    space = space_of(x=("F32", 8, 8))

    def body(live: Live, weights: Weights) -> None:
        scale = weights["x"].abs().amax(dim=1, keepdim=True) / 127
        live["q"].copy_((weights["x"] / scale).round().to(torch.int8))
        live["scale"].copy_(scale)
        live["sevens"].fill_(7)
        live["float8"].copy_(weights["x"].to(torch.float8_e4m3fn))

    live = {
        "q": noisy((8, 8), torch.int8),
        "scale": noisy((8, 1)),
        "sevens": noisy(5, torch.int64),
        "untouched": noisy(9, torch.int32),
        "flags": noisy(9, torch.bool),
        "float8": noisy((8, 8), torch.float8_e4m3fn),
    }
    found = Worker(live, body).probe(space)
    assert (found.ids("q") == -1).all()
    assert (found.ids("scale") <= 0).all()
    assert (found.ids("float8") == -1).all()
    for name in ("sevens", "untouched", "flags"):
        assert (found.ids(name) == 0).all(), name


def test_one_element_off_is_seen() -> None:
    random = np.random.default_rng(3)
    space = space_of(x=("F32", 8, 9))
    for _ in range(20):
        at, other = random.integers(0, 72, 2)

        def body(live: Live, weights: Weights, at: int = int(at), other: int = int(other)) -> None:
            live["p"].copy_(weights["x"])
            live["p"].view(-1)[at] = weights["x"].reshape(-1)[other]

        worker = Worker({"p": noisy((8, 9))}, body)
        assert (worker.probe(space).ids("p") == ids_by_running(worker, space)["p"]).all()


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3"])
def test_a_few_selected_elements_in_a_long_copy_are_seen(dtype: str) -> None:
    """Of two tensors far apart a maximum often picks the same one in every pass; the rest of its run is a copy."""
    random = np.random.default_rng(5)
    size = 20_000
    space = space_of(a=(dtype, size), between=(dtype, 1234), b=(dtype, size))
    kept = {"F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}[dtype]
    where = torch.from_numpy(np.sort(random.permutation(size)[: size // 100]))

    def body(live: Live, weights: Weights) -> None:
        a, b = weights["a"].float(), weights["b"].float()
        out = a.clone()
        out[where] = torch.maximum(a, b)[where]
        live["p"].copy_(out)

    found = Worker({"p": noisy(size, kept)}, body).probe(space)
    ids = found.ids("p")
    assert (ids[where.numpy()] <= 0).all(), "a computed element is called a copy"
    own = np.arange(size) + space.element_id("a", 0)
    assert ((ids == own) | (ids == -1)).all()
    assert (ids == own).mean() > 0.5
    assert set(found.depends_on("p")) >= {"a", "b"}
