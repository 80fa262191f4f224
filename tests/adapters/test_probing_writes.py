"""Two loads that write one element: the last one counts, and the probe says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from adapters.probe_writes import WriteWatch
from adapters.probing import probe
from layout_algebra.source_map import SourceMap
from tests.fakes import Live, Worker, ids, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
Body = Callable[[Live, Weights], object]


def twice(found: SourceMap, name: str) -> list[int]:
    elements: list[int] = found[name].written_twice.ids().tolist()
    return elements


@pytest.mark.parametrize(
    ("partitions", "rows", "expected", "lost"),
    [
        ((192, 192), 3, "a.0 b.0 b.1", [1]),
        ((64, 64, 64, 64), 2, "b.0 d.0", [0, 1]),
        ((128, 256), 3, "a.0 b.0 b.1", []),
    ],
)
def test_block_scales_rounded_apart_overlap(
    partitions: tuple[int, ...], rows: int, expected: str, lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets are rounded down and sizes up, block 128: neighbours write one row."""
    sizes = [-(-size // 128) for size in partitions]
    space = space_of(**{name: ("F32", size) for name, size in zip("abcd", sizes, strict=False)})

    def body(live: Live, weights: Weights) -> None:
        offset = 0
        for name, size in zip("abcd", partitions, strict=False):
            first = offset // 128
            live["scale"].narrow(0, first, len(weights[name])).copy_(weights[name])
            offset += size

    steps: list[str] = []
    worker = Worker({"scale": noisy(rows)}, body)
    with keeps_bits(worker.live):
        found = probe(worker.load_weights, worker.live, space, progress=lambda what, done, total: steps.append(what))
    assert found.ids("scale").tolist() == ids(space, expected)
    assert twice(found, "scale") == lost
    assert found.written_twice == (("scale",) if lost else ())
    said = f"scale: {len(lost):,} elements are loaded twice, such as element"
    assert (said in caplog.text) == bool(lost)
    assert any(said in step for step in steps) == bool(lost)
    assert worker.loads == 5, "no load is spent on it"


def test_slices_of_one_tensor_that_overlap() -> None:
    space = space_of(s=("F32", 4))

    def body(live: Live, weights: Weights) -> None:
        live["p"][0:2].copy_(weights["s"][0:2])
        live["p"][1:3].copy_(weights["s"][2:4])

    found = Worker({"p": noisy(3)}, body).probe(space)
    assert found.ids("p").tolist() == ids(space, "s.0 s.2 s.3")
    assert twice(found, "p") == [1]
    plain = SourceMap.from_ids(space, {"p": found.ids("p")})
    assert found.digest() == plain.digest(), "a remark on the loader is no part of the layout"
    assert SourceMap.from_bytes(found.to_bytes()).digest() == found.digest()


def test_two_names_of_one_memory(caplog: pytest.LogCaptureFixture) -> None:
    space = space_of(embed=("BF16", 6, 4), head=("BF16", 6, 4))
    shared = noisy((6, 4), torch.bfloat16)

    def body(live: Live, weights: Weights) -> None:
        live["embed"].copy_(weights["embed"])
        live["head"].copy_(weights["head"])

    found = Worker({"embed": shared, "head": shared}, body).probe(space)
    assert found.ids("embed").reshape(-1).tolist() == list(range(*space.id_range("head")))
    assert found.written_twice == ("embed", "head")
    assert "embed and head: 24 elements are loaded twice" in caplog.text


@pytest.mark.parametrize("copied", [False, True], ids=["the tensor itself", "a copy of it"])
def test_one_tensor_loaded_under_both_names_of_one_memory_loses_nothing(
    copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    space = space_of(embed=("F32", 6, 4))
    shared = noisy((6, 4), torch.bfloat16)

    def body(live: Live, weights: Weights) -> None:
        live["embed"].copy_(weights["embed"])
        live["head"].copy_(weights["embed"].clone() if copied else weights["embed"])

    found = Worker({"embed": shared, "head": shared}, body).probe(space)
    assert found.ids("head").reshape(-1).tolist() == list(range(*space.id_range("embed")))
    assert found.written_twice == ()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def order_of(*pieces: int) -> torch.Tensor:
    return torch.tensor(pieces)


def permuting(live: Live, weights: Weights) -> None:
    live["p"][:4].copy_(weights["w"][:4])
    live["p"][:4].copy_(live["p"][:4][order_of(2, 0, 3, 1)])


def filling(live: Live, weights: Weights) -> None:
    live["p"].zero_()
    live["p"].copy_(torch.zeros_like(live["p"]))
    live["p"][2:6].copy_(weights["w"][:4])


def sharding(live: Live, weights: Weights) -> None:
    live["p"][0::2].copy_(weights["w"][:4])
    live["p"][1::2].copy_(weights["w"][6:10])


def staging(live: Live, weights: Weights) -> None:
    stage = torch.empty(4)
    for part in range(2):
        stage.copy_(weights["w"][6 * part : 6 * part + 4])
        live["p"][4 * part : 4 * part + 4].copy_(stage)


def indexing(live: Live, weights: Weights) -> None:
    live["p"][order_of(0, 1, 2)] = weights["w"][:3]
    live["p"][order_of(4, 5, 6)] = weights["w"][5:8]


@pytest.mark.parametrize("body", [permuting, filling, sharding, staging, indexing])
def test_what_is_no_second_load(body: Body, caplog: pytest.LogCaptureFixture) -> None:
    space = space_of(w=("F32", 12))
    found = Worker({"p": noisy(8)}, body).probe(space)
    assert found.coverage().copied_elements > 0
    assert found.written_twice == ()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def random_view(random: np.random.Generator, base: torch.Tensor) -> torch.Tensor:
    """A random slice of a random slice of a tensor, with steps and in any order of axes."""
    for axis in range(base.ndim):
        first, last = sorted(random.integers(0, base.shape[axis] + 1, 2).tolist())
        base = base.transpose(0, axis)[first : max(last, first + 1) : int(random.integers(1, 4))].transpose(0, axis)
    return base.permute(*random.permutation(base.ndim).tolist())


@pytest.mark.parametrize("seed", range(8))
def test_overlaps_of_random_views_against_counting(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(40):
        shape = tuple(random.integers(1, 8, int(random.integers(1, 4))).tolist())
        held = torch.zeros(shape)
        live = held.permute(*random.permutation(len(shape)).tolist()) if random.random() < 0.3 else held
        count = torch.zeros(shape, dtype=torch.int64)
        places = torch.arange(held.numel()).reshape(shape)
        with WriteWatch() as watch:
            for number in range(int(random.integers(1, 5))):
                state = random.bit_generator.state
                target = random_view(random, held)
                random.bit_generator.state = state
                count.view(-1)[random_view(random, places).reshape(-1)] += 1
                target.copy_(torch.arange(1.0, 1 + target.numel()).reshape(target.shape) + 1000 * number)
        order = live.stride()
        expected = (count > 1).as_strided(live.shape, order).reshape(-1)
        assert watch.lost(live).tolist() == torch.nonzero(expected).reshape(-1).tolist()


def test_a_loader_beside_torch_is_watched_without_harm() -> None:
    """What numpy writes is not seen; a loader that raises is not hidden."""
    space = space_of(w=("F32", 12))

    def body(live: Live, weights: Weights) -> None:
        held = live["p"].numpy()
        held[0:4] = weights["w"][0:4].numpy()
        held[2:6] = weights["w"][6:10].numpy()

    found = Worker({"p": noisy(8)}, body).probe(space)
    assert found.ids("p").tolist() == ids(space, "w.0 w.1 w.6 w.7 w.8 w.9 EMPTY EMPTY")
    assert found.written_twice == ()
