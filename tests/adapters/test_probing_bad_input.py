"""What is wrong with a worker or its checkpoint is refused by name, or makes no wrong map."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from adapters.probing import probe
from layout_algebra.errors import LoaderRaisedError, ParameterReplacedError, ProbeError
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]

ODD_NAMES = [
    "with space",
    "tab\tand\nnewline",
    "dots..and...more.",
    "слой.0.вес",
    "層.12",
    "emoji.🙂.w",
    "quote'\"`\\",
    "nul\0inside",
    "%s{0}${x}",
    "\ud800lone",
    "٣.arabic digits",
    "0" * 300 + ".7",
    "x" * 10_000,
    "layer." * 1_600 + "w",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_odd_and_long_names(name: str) -> None:
    """As names of tensors and of parameters, in maps, their bytes and messages."""
    space = CheckpointSpace([TensorSpec(name, (4, 6), "F32"), TensorSpec("plain", (8,), "BF16")])

    def body(live: Live, weights: Weights) -> None:
        live[name].copy_(weights[name].T)
        live["plain"].copy_(weights["plain"])
        live[f"{name}.scaled"].copy_(weights[name] * 2)

    worker = Worker({name: noisy((6, 4)), "plain": noisy(8), f"{name}.scaled": noisy((4, 6))}, body)
    found = worker.probe(space)
    first, stop = space.id_range(name)
    assert (found.ids(name) == np.arange(first, stop).reshape(4, 6).T).all()
    assert found.opaque == (f"{name}.scaled",)
    assert found.depends_on(f"{name}.scaled") == (name,)
    again = SourceMap.from_bytes(found.to_bytes())
    assert again.digest() == found.digest()
    assert again.parameters == found.parameters

    def raising(live: Live, weights: Weights) -> None:
        raise KeyError(name)

    with pytest.raises(LoaderRaisedError) as caught:
        Worker(worker.live, raising).probe(space)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("held", [(4, 5), (3, 6), (24,), (4, 7), (5, 6), (1, 4, 6), ()])
def test_a_live_size_that_is_not_the_checkpoints(held: tuple[int, ...]) -> None:
    """A loader that copies by name raises, and its error is chained; one that cuts or pads is mapped as it does."""
    space = space_of(w=("F32", 4, 6), other=("F32", 3))

    def strict(live: Live, weights: Weights) -> None:
        live["other"].copy_(weights["other"])
        if live["w"].shape != weights["w"].shape:
            raise ValueError(f"w: {tuple(live['w'].shape)} is not {tuple(weights['w'].shape)}")
        live["w"].copy_(weights["w"])

    worker = Worker({"w": noisy(held), "other": noisy(3)}, strict)
    with keeps_bits(worker.live), pytest.raises(LoaderRaisedError, match=r"w: \(.*\) is not \(4, 6\)"):
        probe(worker.load_weights, worker.live, space)

    def fitting(live: Live, weights: Weights) -> None:
        flat = live["w"].view(-1)
        count = min(flat.numel(), 24)
        flat[:count] = weights["w"].reshape(-1)[:count]
        live["other"].copy_(weights["other"])

    found = Worker({"w": noisy(held), "other": noisy(3)}, fitting).probe(space)
    size = int(np.prod(held, dtype=int))
    expected = [*range(space.element_id("w", 0), space.element_id("w", 0) + 24), *[0] * size][:size]
    assert found.ids("w").reshape(-1).tolist() == expected


def test_a_live_tensor_that_is_only_a_placeholder() -> None:
    """Partitioned parameters say size 0 until they are gathered: a size that changes is an error, no empty tensor."""
    space = space_of(w=("F32", 6))

    def body(live: Live, weights: Weights) -> None:
        live["w"] = weights["w"].clone()

    live = {"w": torch.empty(0), "x": noisy(2)}
    worker = Worker(live, body)
    with pytest.raises(ParameterReplacedError, match=r"w: F32 \(0,\) became F32 \(6,\).*Gather"):
        probe(worker.load_weights, lambda: worker.live, space)


def map_unless_unsteady(worker: Worker, space: CheckpointSpace) -> SourceMap | None:
    """The map, or None if the probe refused the worker by the right name and for the right reason."""
    try:
        return worker.probe(space)
    except ProbeError as error:
        if not re.match(
            "p: (two loads of the same checkpoint left different|.* hold what one load of the probe left)", str(error)
        ):
            raise
        return None


def other_element(live: Live, weights: Weights, call: int) -> None:
    live["p"].copy_(weights["w"].roll(call))


def other_tensor(live: Live, weights: Weights, call: int) -> None:
    live["p"].copy_(weights["wv"[call % 2]])


def other_place(live: Live, weights: Weights, call: int) -> None:
    live["p"][call % 3 : call % 3 + 60] = weights["w"][:60]


def only_once(live: Live, weights: Weights, call: int) -> None:
    if call == 1:
        live["p"].copy_(weights["w"])


def only_at_first(live: Live, weights: Weights, call: int) -> None:
    if call <= 3:
        live["p"].copy_(weights["w"])


def not_at_the_end(live: Live, weights: Weights, call: int) -> None:
    if call != 5:
        live["p"].copy_(weights["w"])


def noise(live: Live, weights: Weights, call: int) -> None:
    live["p"].copy_(torch.randn(64, generator=torch.Generator().manual_seed(call)))


def adding(live: Live, weights: Weights, call: int) -> None:
    live["p"].copy_(weights["w"] + call)


def swapping_at_the_end(live: Live, weights: Weights, call: int) -> None:
    live["p"].copy_(weights["w"] if call < 4 else weights["v"])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I32", "F8_E4M3"])
@pytest.mark.parametrize(
    "change",
    [other_element, other_tensor, other_place, only_once, only_at_first, not_at_the_end, noise, adding,
     swapping_at_the_end],
)  # fmt: skip
def test_a_loader_that_differs_from_call_to_call(change: object, dtype: str) -> None:
    """What it does not do every time is no copy; nothing beside it suffers."""
    assert callable(change)
    space = space_of(w=(dtype, 64), v=(dtype, 64), z=(dtype, 64))
    kept = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}[dtype]

    def body(live: Live, weights: Weights) -> None:
        live["z"].copy_(weights["z"])
        wide = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
        held = {"p": live["p"].to(torch.float64)}
        change(held, wide, worker.loads)
        live["p"].copy_(held["p"].to(kept))

    worker = Worker({"p": torch.zeros(64, dtype=kept), "z": noisy(64, kept)}, body)
    found = map_unless_unsteady(worker, space)
    if found is not None:
        assert (found.ids("p") <= 0).all()
        assert found.ids("z").tolist() == list(range(*space.id_range("z")))


def test_a_loader_that_differs_in_shape_of_its_work_keeps_other_copies() -> None:
    """Half of a parameter is loaded steadily, half in turns."""
    space = space_of(w=("F32", 64), v=("F32", 64))

    def body(live: Live, weights: Weights) -> None:
        live["p"][:64].copy_(weights["w"])
        live["p"][64:].copy_(weights["w" if worker.loads % 2 else "v"])

    worker = Worker({"p": noisy(128)}, body)
    found = map_unless_unsteady(worker, space)
    if found is not None:
        assert found.ids("p")[:64].tolist() == list(range(*space.id_range("w")))
        assert (found.ids("p")[64:] == -1).all()
