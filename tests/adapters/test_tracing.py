"""Tracing: what a loader of torch operations copies, against plain ids and against the probe."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch

from adapters.probing import live_tensors, probe
from adapters.tracing import TracedMap, trace
from layout_algebra.errors import (
    LoaderRaisedError,
    LoaderWroteNothingError,
    MapError,
    ParameterReplacedError,
    TracingError,
)
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.test_probing_fuzz import Step, random_moves, random_shape
from tests.fakes import Live, Worker, bits_of, ids_by_running, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
BF16 = torch.bfloat16
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def traced(worker: Worker, space: CheckpointSpace) -> TracedMap:
    """Trace through the public surface, and insist that no live tensor changed, nor its version."""
    before = dict(worker.live)
    versions = {name: tensor._version for name, tensor in before.items()}
    with keeps_bits(worker.live):
        found = trace(worker.load_weights, lambda: worker.live, space)
    assert {name: tensor._version for name, tensor in before.items()} == versions
    return found


def loader(live: dict[str, torch.Tensor], **tensors: object) -> Callable[[Callable[[Live, Weights], object]], tuple]:
    """Put a body, its live tensors and its checkpoint into the table below."""

    def put(body: Callable[[Live, Weights], object]) -> tuple[Worker, CheckpointSpace]:
        made = Worker(live, body), space_of(**tensors)
        MOVERS[body.__name__] = made
        return made

    return put


MOVERS: dict[str, tuple[Worker, CheckpointSpace]] = {}


@loader({"p": noisy((6, 4))}, x=("F32", 6, 8))
def columns(live: Live, weights: Weights) -> None:
    live["p"].data.copy_(weights["x"].chunk(2, dim=1)[1])


@loader({"p": noisy((3, 8), BF16)}, x=("F32", 6, 8))
def rows_cast(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"].narrow(0, 3, 3).to(live["p"].dtype))


@loader({"p": noisy((3, 8))}, x=("BF16", 6, 8))
def rows_widened(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"][3:])


@loader({"qkv": noisy((8, 5), BF16)}, q=("BF16", 8, 5), k=("BF16", 4, 5), v=("BF16", 4, 5))
def fused_qkv(live: Live, weights: Weights) -> None:
    place = 0
    for name in "qkv":
        rows = weights[name].shape[0] // 2
        live["qkv"].narrow(0, place, rows).copy_(weights[name].narrow(0, rows, rows))
        place += rows


@loader({"p": noisy((16, 5), BF16)}, q=("BF16", 8, 5), k=("BF16", 4, 5), v=("BF16", 4, 5))
def fused_by_groups(live: Live, weights: Weights) -> None:
    live["p"].copy_(torch.cat([weights[name].reshape(4, -1, 5) for name in "qkv"], dim=1).reshape(16, 5))


@loader({"p": noisy((12, 3))}, g=("F32", 6, 3), u=("F32", 6, 3))
def interleaved(live: Live, weights: Weights) -> None:
    live["p"][0::2] = weights["g"]
    live["p"][1::2] = weights["u"]


@loader({"w2": noisy((4, 6, 5), BF16), "w13": noisy((4, 10, 6), BF16)}, **{
    f"e{n}__{name}": ("BF16", *shape) for n in range(4) for name, shape in
    (("g", (5, 6)), ("u", (5, 6)), ("d", (6, 5)))
})  # fmt: skip
def stacked_experts(live: Live, weights: Weights) -> None:
    live["w2"].copy_(torch.stack([weights[f"e{n}.d"] for n in range(4)]))
    for n in range(4):
        live["w13"][n, :5].copy_(weights[f"e{n}.g"])
        live["w13"].data[n][5:].copy_(weights[f"e{n}.u"])


@loader({"p": noisy((4, 6, 5))}, x=("F32", 4, 5, 6))
def transposed(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"].transpose(1, 2).contiguous())


@loader({"p": noisy((12, 3))}, x=("F32", 10, 3))
def padded_vocabulary(live: Live, weights: Weights) -> None:
    live["p"].zero_()
    live["p"][:10] = weights["x"]


@loader({"flat": noisy(11)}, a=("F32", 3, 4), b=("F32", 5), c=("F32", 2, 3))
def flat_shard(live: Live, weights: Weights) -> None:
    whole = torch.zeros(26, dtype=live["flat"].dtype)
    whole[:12].copy_(weights["a"].reshape(-1))
    whole[12:17].view(5).copy_(weights["b"])
    whole[18:24].view(2, 3).copy_(weights["c"])
    live["flat"].copy_(whole[10:21])


@loader({"s": noisy(()), "two": noisy(2), "both": noisy(2), "filled": noisy(3)}, x=("F32",), y=("F32", 1))
def scalars(live: Live, weights: Weights) -> None:
    live["s"].copy_(weights["x"])
    live["two"][0] = weights["x"]
    live["two"][1] = weights["y"][0]
    live["both"].copy_(weights["y"].expand(2))
    live["filled"].fill_(weights["x"])


@loader({"e": noisy((0, 4)), "x": noisy(3)}, e=("F32", 0, 4), w=("F32", 5, 4), x=("F32", 3))
def empty_shards(live: Live, weights: Weights) -> None:
    live["e"].copy_(weights["w"][5:])
    live["e"].copy_(weights["e"])
    live["x"].copy_(weights["x"])


@loader({"p": noisy((6, 4), BF16)}, x=("BF16", 4, 6))
def staged(live: Live, weights: Weights) -> None:
    first = torch.empty(24, dtype=live["p"].dtype)
    first.view(4, 6).copy_(weights["x"])
    second = torch.zeros_like(live["p"])
    second.copy_(first.view(4, 6).t())
    live["p"].copy_(second.clone())


@loader({"p": noisy((8, 3)), "q": noisy((5, 8))}, x=("F32", 8, 3), y=("F32", 5, 8))
def permuted(live: Live, weights: Weights) -> None:
    order = torch.arange(8).view(2, 2, 2).transpose(1, 2).reshape(-1)
    live["p"].copy_(weights["x"].index_select(0, order))
    live["q"].copy_(weights["y"][:, torch.tensor([7, 1, 1, 4, -2, 0, 3, 2])])


@loader({"p": noisy((6, 3)), "q": noisy((4, 4)), "r": noisy(6)}, x=("F32", 4, 3), y=("F32", 4, 4), z=("F32", 6))
def scattered(live: Live, weights: Weights) -> None:
    live["p"][torch.tensor([5, 0, 3, 2])] = weights["x"]
    live["q"].index_copy_(1, torch.tensor([2, 0, 3, 1]), weights["y"])
    live["r"][torch.tensor([True, False, True, True, False, False])] = weights["z"][1:4]


@loader({"p": noisy((7, 5)), "q": noisy((4, 6)), "r": noisy((6, 9))}, x=("F32", 7, 5), y=("F32", 4, 6), z=("F32", 3, 3))
def rolled_flipped_repeated(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"].roll((2, -1), (0, 1)))
    live["q"].copy_(weights["y"].flip(0, 1))
    live["r"].copy_(weights["z"].t().repeat(2, 3))


@loader(
    {"p": noisy((6, 8)), "q": noisy((4, 4)), "r": noisy((3, 4)), "s": noisy((4, 4))},
    x=("F32", 4, 5),
    y=("F32", 4, 4),
)
def padded_masked_gathered(live: Live, weights: Weights) -> None:
    live["p"].copy_(torch.nn.functional.pad(weights["x"], (1, 2, 0, 2)))
    live["q"].copy_(torch.where(torch.eye(4, dtype=torch.bool), weights["y"], weights["x"][:, 1:]))
    live["r"].copy_(weights["y"].gather(0, torch.tensor([[3, 2, 1, 0], [0, 0, 1, 1], [2, 3, 2, 3]])))
    live["s"].copy_(weights["y"].tril(-1).masked_fill(torch.ones(4, 4).triu(3).bool(), 0))


@loader({"p": noisy((5, 4)), "q": noisy(4), "r": noisy((3, 4))}, x=("F32", 2, 4), y=("F32", 3, 4), z=("F32", 4))
def several_at_once(live: Live, weights: Weights) -> None:
    torch._foreach_copy_([live["q"], live["r"]], [weights["z"], weights["y"].flip(1)])
    torch.cat([weights["y"], weights["x"]], out=live["p"])


@loader({"p": noisy((2, 3, 4, 2)), "q": noisy((9, 4))}, x=("F32", 6, 8), y=("F32", 12, 3))
def blocked(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"].view(2, 3, 4, 2).permute(0, 1, 2, 3))
    live["q"].copy_(weights["y"].reshape(9, 4))
    live["q"][2:7, 1:3] = weights["y"].view(4, 9)[0:2].t()[3:8]


@loader({"p": noisy((3, 4)), "q": noisy((4, 3)), "tied": noisy(6)}, x=("F32", 3, 4), y=("F32", 6))
def later_writes_win(live: Live, weights: Weights) -> None:
    live["p"].copy_(weights["x"])
    live["p"][1:, ::2].copy_(weights["x"][:2, 1::2])
    live["q"].copy_(live["p"].t())
    live["p"][0].zero_()
    live["tied"].copy_(weights["y"])
    live["tied"].copy_(live["tied"].flip(0))


@loader({"p": noisy((4, 5)), "q": noisy(20)}, x=("F32", 20), y=("F32", 4, 5))
def irregular_strides(live: Live, weights: Weights) -> None:
    flat = torch.zeros(24, dtype=live["p"].dtype)
    flat[:20].copy_(weights["x"])
    live["p"].copy_(flat.as_strided((4, 5), (5, 2), 0))
    live["q"].copy_(weights["y"].t().reshape(-1))
    live["q"].as_strided((3, 2), (7, 3)).copy_(weights["y"].as_strided((3, 2), (3, 4)))


@pytest.mark.parametrize("name", MOVERS)
def test_traced_ids_are_those_that_the_loader_gives_to_ids(name: str) -> None:
    worker, space = MOVERS[name]
    found = traced(worker, space)
    for parameter, truth in ids_by_running(worker, space).items():
        assert (found.source_map.ids(parameter) == truth).all(), parameter
        assert found.operations(parameter) == ()
    assert found.source_map.opaque == ()


@pytest.mark.parametrize("name", MOVERS)
def test_traced_and_probed_maps_have_one_digest(name: str) -> None:
    worker, space = MOVERS[name]
    assert traced(worker, space).source_map.digest() == worker.probe(space).digest()


def random_mover(random: np.random.Generator) -> tuple[Worker, CheckpointSpace]:
    """A checkpoint, and a worker whose loader places rearranged tensors into slices of its parameters."""
    names = [f"t{number}" for number in range(int(random.integers(1, 6)))]
    space = CheckpointSpace(TensorSpec(name, random_shape(random), str(random.choice(list(FLOATS)))) for name in names)
    live: Live = {}
    chains: dict[str, list[tuple[str, list[Step], int]]] = {}
    for number in range(int(random.integers(1, 4))):
        parts, place = [], int(random.integers(0, 3))
        for _ in range(int(random.integers(1, 4))):
            source = str(random.choice(names))
            value = torch.zeros(space.spec(source).shape)
            moves = random_moves(random, value, int(random.integers(0, 5)))
            for move in moves:
                value = move(value)
            parts.append((source, moves, place))
            place += value.numel() + int(random.integers(0, 3))
        chains[f"p{number}"] = parts
        dtype = list(FLOATS.values())[int(random.integers(3))]
        kept = noisy(max(place, 1), dtype, seed=int(random.integers(1 << 30)))
        if random.random() < 0.3:
            kept = noisy((max(place, 1), 2), dtype)[:, 1]
        elif place and random.random() < 0.5:
            divisors = [d for d in range(1, place + 1) if place % d == 0]
            kept = kept.reshape(int(random.choice(divisors)), -1)
        live[f"p{number}"] = kept

    def body(live: Live, weights: Weights) -> None:
        for name, parts in chains.items():
            flat = live[name].flatten()
            for source, moves, place in parts:
                value = weights[source]
                for move in moves:
                    value = move(value)
                flat[place : place + value.numel()] = value.reshape(-1).to(flat.dtype)
            live[name].copy_(flat.reshape(live[name].shape))

    return Worker(live, body), space


@pytest.mark.parametrize("seed", range(12))
def test_random_movers(seed: int) -> None:
    random = np.random.default_rng(5000 + seed)
    for _ in range(10):
        worker, space = random_mover(random)
        truth = ids_by_running(worker, space)
        if any((numbers > 0).any() for numbers in truth.values()):
            found = traced(worker, space).source_map
            for name, numbers in truth.items():
                assert (found.ids(name) == numbers).all(), name


@pytest.mark.parametrize("seed", range(3))
def test_random_movers_as_probed(seed: int) -> None:
    random = np.random.default_rng(6000 + seed)
    for _ in range(8):
        worker, space = random_mover(random)
        if any((numbers > 0).any() for numbers in ids_by_running(worker, space).values()):
            assert traced(worker, space).source_map.digest() == worker.probe(space).digest()


def test_tied_storage_views_and_buffers() -> None:
    space = space_of(q=("F32", 2, 3), k=("F32", 1, 3))
    fused = noisy((3, 3))
    raw = noisy(24, torch.uint8)

    def body(live: Live, weights: Weights) -> None:
        live["q"].copy_(weights["q"])
        live["fused"][2:].copy_(weights["k"])
        live["w"][1:4].copy_(weights["k"][0])

    live = {"fused": fused, "q": fused[:2], "column": fused[:, 1], "alias": fused.view(9), "raw": raw}
    live |= {"w": raw.view(torch.float32), "untouched": noisy(4, torch.int64)}
    worker = Worker(live, body)
    found = traced(worker, space)
    assert found.source_map.ids("alias").tolist() == [4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert found.source_map.ids("column").tolist() == [5, 8, 2]
    assert found.source_map.ids("w").tolist() == [0, 1, 2, 3, 0, 0]
    assert found.source_map.ids("raw").tolist() == [0] * 4 + [-1] * 12 + [0] * 8
    assert found.operations("raw") == ("view(U8)",)
    assert found.source_map.depends_on("raw") == ("k",)
    assert (found.source_map.ids("untouched") == 0).all()


def test_memory_that_the_loader_reaches_by_another_name() -> None:
    """Closures over a flat storage, over parts that are no parameters, and over another tensor at the same address."""
    flat = noisy(20)
    array = np.zeros(8, dtype=np.float32)
    live = {"a": flat[2:8].view(2, 3), "b": flat[10:14], "c": torch.from_numpy(array[:6])}

    def body(live: Live, weights: Weights) -> None:
        flat[1:8].copy_(weights["x"][:7])
        flat[9:15] = weights["x"][:6]
        torch.from_numpy(array)[3:8].copy_(weights["x"][:5])

    found = traced(Worker(live, body), space_of(x=("F32", 8))).source_map
    assert found.ids("a").reshape(-1).tolist() == [2, 3, 4, 5, 6, 7]
    assert found.ids("b").tolist() == [2, 3, 4, 5]
    assert found.ids("c").tolist() == [0, 0, 0, 1, 2, 3]
    assert not array.any()


def by_data(live: Live, new: torch.Tensor) -> None:
    live["w"].data = new


def by_set(live: Live, new: torch.Tensor) -> None:
    live["w"].set_(new)


def by_entry(live: Live, new: torch.Tensor) -> None:
    live["w"] = torch.nn.Parameter(new, requires_grad=False)


@pytest.mark.parametrize("replace", [by_data, by_set, by_entry])
@pytest.mark.parametrize("source", ["kept", "made"])
def test_replaced_parameters(replace: Callable[[Live, torch.Tensor], None], source: str) -> None:
    space = space_of(w=("F32", 3, 2))

    def body(live: Live, weights: Weights) -> None:
        new = weights["w"].t() if source == "kept" else weights["w"].flip(0).t().contiguous()
        replace(live, new)

    worker = Worker({"w": noisy((2, 3))}, body)
    expected = [[1, 3, 5], [2, 4, 6]] if source == "kept" else [[5, 3, 1], [6, 4, 2]]
    assert traced(worker, space).source_map.ids("w").tolist() == expected
    worker.live["w"].add_(0)


@pytest.mark.parametrize("listed", ["owners", "views"])
def test_a_module_stays_usable_whatever_was_listed(listed: str) -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    before = module.weight.detach().clone()

    def load_weights(weights: object) -> None:
        module.weight = torch.nn.Parameter(dict(weights)["w"].t().contiguous())  # type: ignore[call-overload]

    def parameters() -> Live:
        found = live_tensors(module)
        return found if listed == "owners" else {name: tensor.detach() for name, tensor in found.items()}

    found = trace(load_weights, parameters, space_of(w=("F32", 3, 2)))
    assert found.source_map.ids("weight").tolist() == [[1, 3, 5], [2, 4, 6]]
    assert torch.equal(module.weight, before)
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=0.1))
    space = CheckpointSpace(
        TensorSpec(name, tuple(tensor.shape), "I64" if tensor.dtype == torch.int64 else "F32")
        for name, tensor in module.state_dict().items()
    )
    before = bits_of(live_tensors(module))
    found = trace(lambda w: module.load_state_dict(dict(w), assign=assign), lambda: live_tensors(module), space)
    for name in space.names:
        first, last = space.id_range(name)
        assert found.source_map.ids(name).reshape(-1).tolist() == list(range(first, last))
    assert bits_of(live_tensors(module)) == before


def test_overlapping_and_odd_live_memory() -> None:
    """Live tensors over one address range but of several storages, and at a distance of no whole element."""
    array = np.zeros(40, dtype=np.uint8)
    first, second = torch.from_numpy(array[:32].view(np.float32)), torch.from_numpy(array[8:40].view(np.float32))
    worker = Worker({"a": first, "b": second}, lambda live, weights: live["b"].copy_(weights["x"]))
    assert traced(worker, space_of(x=("F32", 8))).source_map.ids("a").tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    odd = torch.from_numpy(array[1:9].view(np.uint8))
    with pytest.raises(TracingError, match="no whole number of elements"):
        trace(worker.load_weights, {"a": first[:4], "b": second, "odd": odd.view(torch.int16)}, space_of(x=("F32", 8)))


def test_memory_does_not_grow_with_sizes() -> None:
    """1,200 tensors into a stack of 2.5 GB: no page of it, nor of the checkpoint, comes into being."""
    space = CheckpointSpace(TensorSpec(f"e.{n}", (1024, 1024), "BF16") for n in range(1200))
    live = {"w": torch.empty(1200, 1024, 1024, dtype=BF16)}

    def load_weights(weights: object) -> None:
        for number, (_, tensor) in enumerate(weights):  # type: ignore[arg-type]
            live["w"].data[number].copy_(tensor.t().contiguous())

    process = psutil.Process()
    before = process.memory_info().rss
    found = trace(load_weights, live, space).source_map
    assert process.memory_info().rss - before < 300 << 20
    assert [str(copy) for copy in found.slice_copies("w")] == [
        "0+(1200:1048576,1024:1024,1024:1) <- 1+(1200:1048576,1024:1,1024:1024)"
    ]


def test_generators_inference_mode_and_progress() -> None:
    space = space_of(x=("F32", 4, 2), y=("F32", 4))
    live = {"x": noisy((2, 4)), "y": noisy(4)}
    steps: list[tuple[str, int, int]] = []

    def load_weights(weights: object) -> object:
        with torch.inference_mode():
            for name, tensor in weights:  # type: ignore[attr-defined]
                live[name].copy_(tensor.reshape(-1).reshape(live[name].shape))
                yield name

    found = trace(load_weights, live, space, progress=lambda *step: steps.append(step))
    assert found.source_map.ids("x").reshape(-1).tolist() == list(range(1, 9))
    assert steps == [("tracing load_weights", 0, 2), ("tracing load_weights", 1, 2)]
    with pytest.raises(MapError, match="nobody"):
        found.operations("nobody")


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (lambda live, weights: None, LoaderWroteNothingError, "names it knows"),
        (lambda live, weights: live["p"].copy_(weights["x"][:3]), LoaderRaisedError, "RuntimeError"),
        (lambda live, weights: [live["p"].copy_(weights["x"]), 1 // 0], LoaderRaisedError, "ZeroDivisionError"),
        (lambda live, weights: live.update(p=weights["x"][:3]), ParameterReplacedError, "became F32 \\(3,\\)"),
        (lambda live, weights: live.update(z=weights["x"]), ParameterReplacedError, "z: appeared"),
    ],
)
def test_what_goes_wrong_is_named_and_leaves_no_trace(
    body: Callable[[Live, Weights], object], error: type[Exception], match: str
) -> None:
    live = {"p": noisy(6)}
    worker = Worker(live, body)
    with keeps_bits(live), pytest.raises(error, match=match):
        trace(worker.load_weights, lambda: worker.live, space_of(x=("F32", 6)))
    assert live["p"]._version == 0


def test_the_callers_tensors_are_those_of_before_when_parameters_is_a_mapping() -> None:
    live = {"p": noisy(6)}
    with keeps_bits(live):
        found = trace(lambda weights: live["p"].copy_(dict(weights)["x"]), live, space_of(x=("F32", 6)))
    assert found.source_map.same_as(probe(lambda w: live["p"].copy_(dict(w)["x"]), live, space_of(x=("F32", 6))))
