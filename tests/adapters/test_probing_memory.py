"""Loaders that exchange, tie, turn or free the memory of live tensors: every bit comes back, or a name is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from adapters.probing import live_tensors, probe
from layout_algebra.errors import LayoutError, LoaderRaisedError, ProbeError
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from tests.fakes import Worker, keeps_bits, noisy, space_of

Pairs = Iterable[tuple[str, torch.Tensor]]
Act = Callable[[torch.nn.Module], object]


class Held(torch.nn.Module):
    """Parameters ``a`` and ``b`` of eight numbers, and integers ``m`` and ``n``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((8,), 1.0))
        self.b = torch.nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("m", torch.full((3,), 3))
        self.register_buffer("n", torch.full((3,), 4))


SPACE = space_of(w=("F32", 8))


def probed(held: torch.nn.Module, act: Act, space: CheckpointSpace = SPACE) -> SourceMap:
    """The map of a loader that copies ``w`` into ``a`` after it has done something to the module."""

    def load_weights(pairs: Pairs) -> None:
        loaded = dict(pairs)
        act(held)
        held.a.data.copy_(loaded["w"])  # type: ignore[union-attr,operator]

    return probe(load_weights, lambda: live_tensors(held), space)


def exchange(held: torch.nn.Module) -> None:
    held.a, held.b = held.b, held.a


def exchange_data(held: torch.nn.Module) -> None:
    held.a.data, held.b.data = held.b.data, held.a.data  # type: ignore[union-attr]


def exchange_integers(held: torch.nn.Module) -> None:
    held.m, held.n = held.n, held.m


def rotate(held: torch.nn.Module) -> None:
    first = held.a.data
    held.a.data, held.b.data = held.b.data.clone(), first  # type: ignore[union-attr]


def tie(held: torch.nn.Module) -> None:
    held.b.data = held.a.data  # type: ignore[union-attr]


@pytest.mark.parametrize("act", [exchange, exchange_data, exchange_integers, rotate, tie])
def test_every_name_has_its_own_bits_again(act: Act) -> None:
    held = Held()
    with suppress(ProbeError):  # what is loaded into other memory each time may be refused
        assert probed(held, act).ids("a").tolist() == list(range(1, 9))
    for name, value in (("a", 1), ("b", 2), ("m", 3), ("n", 4)):
        assert set(getattr(held, name).tolist()) == {value}, name


def test_one_object_under_two_names_is_told(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()

    def join(held: torch.nn.Module) -> None:
        held.b = held.a

    probed(held, join)
    assert set(held.a.tolist()) == {1.0}
    assert "b is one object with others since load_weights" in caplog.text


@pytest.mark.parametrize("shape", [(3, 3), (2, 3)], ids=["square", "not square"])
def test_a_parameter_that_the_loader_turns(shape: tuple[int, int]) -> None:
    held = torch.nn.Module()
    before = torch.arange(float(np.prod(shape))).reshape(shape)
    held.w = torch.nn.Parameter(before.clone())
    space = space_of(w=("F32", *shape))

    def load_weights(pairs: Pairs) -> None:
        loaded = dict(pairs)["w"]
        target = held.w.data if held.w.shape == shape and held.w.is_contiguous() else held.w.data.t()  # type: ignore[union-attr,operator]
        target.copy_(loaded)
        held.w = torch.nn.Parameter(target.t())

    with suppress(ProbeError):
        found = probe(load_weights, lambda: live_tensors(held), space)
        assert found.ids("w").tolist() == np.arange(1, 1 + before.numel()).reshape(shape).T.tolist()
    assert torch.equal(held.w.detach(), before)


@pytest.mark.parametrize("untied", ["a", "b"])
def test_tied_parameters_that_the_first_load_unties(untied: str) -> None:
    held = Held()
    held.b = held.a

    def untie(held: torch.nn.Module) -> None:
        if held.a is held.b:
            setattr(held, untied, torch.nn.Parameter(torch.full((8,), 5.0)))

    found = probed(held, untie)
    assert found.ids("a").tolist() == list(range(1, 9))
    assert found.ids("b").tolist() == [0] * 8
    assert set(held.a.tolist()) == {1.0}


@pytest.mark.parametrize("size", [0, 8], ids=["freed", "shrunk"])
def test_memory_that_is_not_there(size: int) -> None:
    held = Held()
    held.b.untyped_storage().resize_(size)
    with pytest.raises(ProbeError, match=rf"b: its memory has {size} of the 32 bytes that torch\.float32 \(8,\) takes"):
        probed(held, lambda held: None)
    held = Held()
    with pytest.raises(ProbeError, match=rf"b: its memory has {size} of the 32 bytes"):
        probed(held, lambda held: held.b.untyped_storage().resize_(size))  # type: ignore[union-attr]
    assert set(held.a.tolist()) == {1.0}
    assert set(held.b.tolist()) == {2.0}, "grown again, and given back"


def test_a_loader_that_is_an_async_generator() -> None:
    async def load_weights(pairs: Pairs) -> AsyncIterator[str]:
        for name, _ in pairs:
            yield name

    with pytest.raises(LoaderRaisedError, match="load_weights is an async generator"):
        probe(load_weights, {"p": torch.zeros(8)}, SPACE)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (lambda: {"p": torch.nn.LazyLinear(3).weight}, "p: is not initialized"),
        (lambda: {"p": nested()}, "p: a .* has no plain memory"),
        (lambda: {"p": fake()}, "p: its memory has 0 of the 12 bytes"),
        (lambda: {3: torch.zeros(2)}, "3: a live tensor's name is int; expected a string"),
        (lambda: [torch.zeros(2)], "parameters: got list; expected live tensors by name"),
        (lambda: {}["gone"], "`parameters` raised KeyError: 'gone'"),
        (torch.nn.Linear(2, 2), r"parameters is a module; give `lambda: live_tensors\(module\)`"),
        (None, "parameters: got NoneType"),
    ],
)
def test_parameters_that_are_none(parameters: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        probe(lambda pairs: None, parameters, SPACE)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [torch.view_as_real, torch.real, torch.imag, torch.angle, torch.abs])
def test_no_part_of_a_complex_number_looks_like_padding(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    space = space_of(c=("C64", 6), w=("F32", 8))
    target = torch.zeros_like(part(torch.zeros(6, dtype=torch.complex64)))
    live = {"p": target, "w": torch.zeros(8)}

    def load_weights(pairs: Pairs) -> None:
        loaded = dict(pairs)
        live["p"].copy_(part(loaded["c"]))
        live["w"].copy_(loaded["w"])

    found = probe(load_weights, live, space)
    assert np.all(found.ids("p") == -1)
    assert found.depends_on("p") == ("c",)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_may_only_be_read_is_named(tmp_path: Path) -> None:
    """A write there would end the process."""
    np.arange(4096, dtype=np.float32).tofile(tmp_path / "table")
    table = torch.from_numpy(np.memmap(tmp_path / "table", dtype=np.float32, mode="r"))
    live = {"w": noisy(8), "table": table[1000:], "other": noisy(8)}
    with (
        keeps_bits({"w": live["w"]}),
        pytest.raises(ProbeError, match="table: lies in memory that this process may only"),
    ):
        probe(lambda pairs: None, live, space_of(w=("F32", 8)))
    live["table"] = torch.from_numpy(np.memmap(tmp_path / "table", dtype=np.float32, mode="c"))
    worker = Worker(live, lambda live, weights: live["w"].copy_(weights["w"]))
    assert (worker.probe(space_of(w=("F32", 8))).ids("w") > 0).all()


def test_a_rank_that_cannot_be_kept_is_told_to_the_others() -> None:
    votes: list[int] = []

    def agree(mine: int) -> int:
        votes.append(mine)
        return 2 if len(votes) == 2 else mine

    live = {"w": noisy(8)}
    with keeps_bits(live), pytest.raises(ProbeError, match="keeping the live tensors failed on another rank"):
        probe(lambda pairs: None, live, space_of(w=("F32", 8)), agree=agree)
