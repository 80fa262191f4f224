"""Loaders that misbehave: each is served or refused by name, and every tensor keeps its bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from adapters import probe_live
from adapters.probing import live_tensors, probe
from layout_algebra.errors import (
    LoaderRaisedError,
    LoaderWroteNothingError,
    ParameterReplacedError,
    ProbeError,
    UnsupportedDtypeError,
)
from layout_algebra.source_map import SourceMap
from tests.fakes import Live, Worker, bits_of, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
Pairs = Iterable[tuple[str, torch.Tensor]]

SPACE = space_of(a=("F32", 5, 8), b=("F32", 40))


def everything() -> Live:
    """Tensors of many kinds, full of random bits."""
    return {
        "a": noisy((5, 8)),
        "b": noisy(40, torch.bfloat16),
        "turned": noisy((8, 5), torch.float16).T,
        "scalar": noisy((), torch.float64),
        "none": noisy((0, 3)),
        "table": noisy(7, torch.int64),
        "flags": noisy(9, torch.bool),
        "float8": noisy(6, torch.float8_e5m2),
        "complex": noisy(3, torch.complex64),
    }


def load_both(live: Live, weights: Weights) -> None:
    live["a"].copy_(weights["a"])
    live["b"].copy_(weights["b"])


def check_both(found: SourceMap) -> None:
    assert found.ids("a").reshape(-1).tolist() == list(range(1, 41))
    assert found.ids("b").tolist() == list(range(41, 81))


def test_every_kind_of_tensor_keeps_its_bits() -> None:
    found = Worker(everything(), load_both).probe(SPACE)
    check_both(found)
    assert found.coverage().empty_elements == 40 + 1 + 7 + 9 + 6 + 3


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_loader_that_raises_half_way(call: int, error: type[BaseException]) -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        live["table"].fill_(5)
        live["flags"].fill_(True)
        live["turned"].zero_()
        if worker.loads >= call:
            raise error("no more")

    worker = Worker(everything(), body)
    with keeps_bits(worker.live):
        if error is ValueError:
            with pytest.raises(LoaderRaisedError, match="ValueError: no more") as caught:
                probe(worker.load_weights, worker.live, SPACE)
            assert isinstance(caught.value.__cause__, ValueError)
        else:
            with pytest.raises(error):
                probe(worker.load_weights, worker.live, SPACE)


def test_a_loader_that_writes_nothing() -> None:
    worker = Worker(everything(), lambda live, weights: None)
    with keeps_bits(worker.live), pytest.raises(LoaderWroteNothingError, match=r"none of the .* elements"):
        probe(worker.load_weights, worker.live, SPACE)


def test_a_loader_that_writes_constants_only() -> None:
    worker = Worker(everything(), lambda live, weights: live["a"].fill_(1.0))
    with keeps_bits(worker.live), pytest.raises(LoaderWroteNothingError):
        probe(worker.load_weights, worker.live, SPACE)


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda tensor: tensor.mul_(2), lambda tensor: tensor.add_(1)])
def test_a_loader_that_writes_into_its_input(
    change: Callable[[torch.Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        for tensor in weights.values():
            change(tensor)

    worker = Worker(everything(), body)
    check_both(worker.probe(SPACE))
    assert "private copies" in caplog.text
    assert worker.loads == 6, "one pass is repeated, the others get copies at once"


def test_a_loader_that_scales_its_input_before_it_copies() -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        live["b"].copy_(weights["b"].mul_(0.5))

    found = Worker(everything(), body).probe(SPACE)
    assert found.ids("a").reshape(-1).tolist() == list(range(1, 41))
    assert (found.ids("b") == -1).all()


def test_a_loader_that_keeps_its_input_as_a_parameter() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(noisy((5, 8)))
    module.b = torch.nn.Parameter(noisy(40))
    first = bits_of(live_tensors(module))

    def load_weights(pairs: Pairs) -> None:
        weights = dict(pairs)
        module.a.data = weights["a"]
        module.b = torch.nn.Parameter(weights["b"])

    check_both(probe(load_weights, lambda: live_tensors(module), SPACE))
    assert bits_of(live_tensors(module)) == first
    module.a.data.add_(1)
    module.b.data.add_(1)


def test_a_loader_that_keeps_its_input_and_raises() -> None:
    held = {"a": torch.nn.Parameter(noisy((5, 8))), "b": torch.nn.Parameter(noisy(40))}

    def load_weights(pairs: Pairs) -> None:
        for name, tensor in pairs:
            held[name].data = tensor
        raise ValueError("too late")

    with keeps_bits({name: tensor.data for name, tensor in held.items()}):
        before = bits_of(held)
        with pytest.raises(LoaderRaisedError, match="too late"):
            probe(load_weights, held, SPACE)
        assert bits_of(held) == before


def test_a_loader_that_replaces_parameters() -> None:
    def body(live: Live, weights: Weights) -> None:
        live["a"] = weights["a"].clone()
        live["b"].data = weights["b"].to(torch.bfloat16)

    worker = Worker(everything(), body)
    first = dict(worker.live)
    check_both(worker.probe(SPACE))
    assert worker.live["a"] is not first["a"]
    assert worker.live["b"] is first["b"]


@pytest.mark.parametrize("shape", [(40,), (5, 4), (0, 8)])
@pytest.mark.parametrize("from_call", [1, 3])
def test_a_live_tensor_that_changes_its_size(shape: tuple[int, ...], from_call: int) -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        if worker.loads >= from_call:
            live["a"].data = torch.zeros(shape)

    worker = Worker(everything(), body)
    with keeps_bits(worker.live), pytest.raises(ParameterReplacedError, match=r"a: F32 \(5, 8\) became F32"):
        probe(worker.load_weights, worker.live, SPACE)


def test_a_storage_that_is_freed_keeps_its_bits() -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        live["a"].untyped_storage().resize_(0)
        raise ValueError("gone")

    worker = Worker(everything(), body)
    with keeps_bits(worker.live), pytest.raises(LoaderRaisedError):
        probe(worker.load_weights, worker.live, SPACE)
    worker.live["a"].untyped_storage().resize_(0)


@pytest.mark.parametrize("gone", [True, False])
def test_names_that_come_and_go(gone: bool) -> None:
    live = everything()
    kept = dict(live)

    def load_weights(pairs: Pairs) -> None:
        load_both(live, dict(pairs))
        if gone:
            live.pop("b")
        else:
            live["new"] = torch.zeros(3)

    with keeps_bits(kept), pytest.raises(ParameterReplacedError, match="is gone" if gone else "new: appeared"):
        probe(load_weights, lambda: live, SPACE)


def test_a_loader_that_takes_some_of_its_input() -> None:
    live = everything()

    def load_weights(pairs: Pairs) -> None:
        for name, tensor in pairs:
            live[name].copy_(tensor)
            break

    found = probe(load_weights, live, SPACE)
    assert found.coverage().unused_tensors == ("b",)


def test_a_loader_that_reads_its_input_twice() -> None:
    """The second time it gets every tensor in its own shape, whatever became of the first."""
    live = everything()

    def load_weights(pairs: Pairs) -> None:
        for wanted in "ba":
            for name, tensor in pairs:
                assert tensor.shape == SPACE.spec(name).shape
                if name == wanted:
                    live[name].copy_(tensor)
                tensor.unsqueeze_(0)

    check_both(probe(load_weights, live, SPACE))


def test_a_loader_that_calls_next() -> None:
    live = everything()

    def load_weights(pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        name, tensor = next(pairs)
        live[name].copy_(tensor)
        for name, tensor in pairs:
            assert name == "b"
            live[name].copy_(tensor)

    check_both(probe(load_weights, live, SPACE))  # type: ignore[arg-type]


def test_a_loader_that_is_a_generator() -> None:
    live = everything()

    def load_weights(pairs: Pairs) -> Iterator[str]:
        for name, tensor in pairs:
            live[name].copy_(tensor)
            yield name

    check_both(probe(load_weights, live, SPACE))


def test_a_loader_that_is_a_coroutine() -> None:
    async def load_weights(pairs: Pairs) -> None:
        raise AssertionError("never runs")

    live = everything()
    with keeps_bits(live), pytest.raises(LoaderRaisedError, match="coroutine"):
        probe(load_weights, live, SPACE)


def test_a_loader_that_fills_parameters_that_require_gradients() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(noisy((5, 8)))
    module.b = torch.nn.Parameter(noisy(40))

    def load_weights(pairs: Pairs) -> None:
        for name, tensor in pairs:
            module.get_parameter(name).copy_(tensor)

    before = bits_of(live_tensors(module))
    check_both(probe(load_weights, live_tensors(module), SPACE))
    assert bits_of(live_tensors(module)) == before
    assert module.a.requires_grad


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        (torch.zeros(2, device="meta"), ProbeError, "odd: .*meta"),
        (torch.zeros(2).to_sparse(), ProbeError, "odd: .*sparse"),
        (torch.zeros(2, dtype=torch.complex128), UnsupportedDtypeError, "odd: dtype torch.complex128"),
        ([1.0, 2.0], ProbeError, "odd: expected a torch tensor, got list"),
    ],
)
def test_live_tensors_that_cannot_be_read(tensor: torch.Tensor, error: type[Exception], match: str) -> None:
    live = everything()
    worker = Worker({**live, "odd": tensor}, load_both)
    with keeps_bits(live), pytest.raises(error, match=match):
        probe(worker.load_weights, worker.live, SPACE)
    assert worker.loads == 0


def test_a_checkpoint_larger_than_the_memory_limit() -> None:
    live = everything()
    worker = Worker(live, load_both)
    with keeps_bits(live), pytest.raises(ProbeError, match="memory_limit_bytes is 1,000"):
        probe(worker.load_weights, live, SPACE, memory_limit_bytes=1000)
    assert worker.loads == 0


def test_progress_counts_loads() -> None:
    seen: list[tuple[str, int, int]] = []
    worker = Worker(everything(), load_both)
    probe(worker.load_weights, worker.live, SPACE, progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == [
        "keeping parameters",
        *(f"code pass {number} of 3" for number in (1, 2, 3)),
        "joining passes",
        "verification A",
        "verification B",
        "giving parameters back",
    ]
    assert [step[1] for step in seen] == [0, 0, 1, 2, 3, 3, 4, 5]
    assert {step[2] for step in seen} == {5}


def test_what_loaders_see() -> None:
    """Tensors look like owned ones: aligned, at an offset of zero, storage of their size, addresses of their own."""
    places: list[list[int]] = []

    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        for tensor in weights.values():
            assert tensor.data_ptr() % 64 == 0
            assert not tensor._is_view()
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.is_contiguous()
            assert bool((tensor.isfinite() & (tensor != 0)).all())
            assert tensor.view(torch.int32).shape == tensor.shape
        places.append([tensor.data_ptr() for tensor in weights.values()])

    many = space_of(a=("F32", 5, 8), b=("F32", 40), **{f"x{n}": ("F32", 1919) for n in range(50)})
    Worker(everything(), body).probe(many)
    assert all(len(set(listed)) == 52 for listed in places)
    assert [spec.name for spec in many.specs][:4] == ["a", "b", "x0", "x1"]


def test_ranks_make_the_same_number_of_loads() -> None:
    """A loader that communicates hangs unless every rank calls it equally often, whatever one of them does."""
    barrier = threading.Barrier(3, timeout=20)
    lock = threading.Barrier(3, timeout=20)
    votes: list[int] = [0, 0, 0]
    loads = [0, 0, 0]
    found: dict[int, SourceMap | Exception] = {}

    def run(rank: int) -> None:
        def agree(mine: int) -> int:
            votes[rank] = mine
            lock.wait()
            highest = max(votes)
            lock.wait()
            return highest

        def body(live: Live, weights: Weights) -> None:
            barrier.wait()
            loads[rank] += 1
            load_both(live, weights)
            if rank == 1:
                weights["a"].zero_()
            if rank == 2 and bool((weights["b"] < 0).any()):
                raise ValueError("negative")

        worker = Worker(everything(), body)
        with keeps_bits(worker.live):
            try:
                found[rank] = probe(worker.load_weights, worker.live, SPACE, agree=agree)
            except ProbeError as error:
                found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [3 + 1 + 1 + 2] * 3, "three passes, one repeated, one refused, two of verification"
    for outcome in found.values():
        assert isinstance(outcome, SourceMap), outcome
        check_both(outcome)


def test_an_error_on_one_rank_stops_all() -> None:
    highest = [0]

    def agree(mine: int) -> int:
        return max(mine, highest[0])

    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        highest[0] = 2 if worker.loads == 2 else 0

    worker = Worker(everything(), body)
    with keeps_bits(worker.live), pytest.raises(LoaderRaisedError, match="on another rank"):
        probe(worker.load_weights, worker.live, SPACE, agree=agree)
    assert worker.loads == 2


def test_a_loader_that_refuses_all_of_verification() -> None:
    def body(live: Live, weights: Weights) -> None:
        load_both(live, weights)
        if worker.loads > 3:
            raise ValueError(f"call {worker.loads}")

    worker = Worker(everything(), body)
    with keeps_bits(worker.live), pytest.raises(LoaderRaisedError, match="call 6"):
        probe(worker.load_weights, worker.live, SPACE)


@pytest.mark.parametrize(("limit", "says"), [(None, "sign not verified"), (256.0, "range not verified")])
def test_a_loader_that_refuses_some_numbers(limit: float | None, says: str, caplog: pytest.LogCaptureFixture) -> None:
    def body(live: Live, weights: Weights) -> None:
        for tensor in weights.values():
            if bool((tensor <= 0).any()) or (limit is not None and bool((tensor > limit).any())):
                raise ValueError("out of range")
        load_both(live, weights)

    check_both(Worker(everything(), body).probe(SPACE))
    assert says in caplog.text


def test_an_interrupt_while_parameters_are_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    live = everything()
    done: list[str] = []
    keep = probe_live._Piece.keep_and_clear

    def keep_some(piece: probe_live._Piece) -> None:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(piece.of.name)
        keep(piece)

    monkeypatch.setattr(probe_live._Piece, "keep_and_clear", keep_some)
    worker = Worker(live, load_both)
    with keeps_bits(live), pytest.raises(KeyboardInterrupt):
        probe(worker.load_weights, live, SPACE)
    assert len(done) == 4
    assert worker.loads == 0


def test_content_too_irregular_for_the_memory_limit() -> None:
    space = space_of(x=("F32", 1000, 1000))
    order = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(0))

    def body(live: Live, weights: Weights) -> None:
        live["x"].copy_(weights["x"].reshape(-1)[order])

    live = {"x": noisy(1_000_000)}
    worker = Worker(live, body)
    with keeps_bits(live), pytest.raises(ProbeError, match=r"x: .*too irregular .*memory_limit_bytes"):
        probe(worker.load_weights, live, space, memory_limit_bytes=6_000_000)
    found = worker.probe(space)
    assert (torch.from_numpy(found.ids("x")) == order + 1).all()


def test_a_callable_that_fails_after_a_load() -> None:
    live = everything()
    worker = Worker(live, load_both)

    def parameters() -> Live:
        if worker.loads > 1:
            raise RuntimeError("the module is gone")
        return live

    with keeps_bits(live), pytest.raises(ProbeError, match="the module is gone"):
        probe(worker.load_weights, parameters, SPACE)


def test_an_unusable_tensor_on_one_rank_stops_all() -> None:
    votes = iter([3])
    live = everything()
    worker = Worker(live, load_both)
    with keeps_bits(live), pytest.raises(ProbeError, match="another rank"):
        probe(worker.load_weights, live, SPACE, agree=lambda mine: next(votes))
    assert worker.loads == 0
