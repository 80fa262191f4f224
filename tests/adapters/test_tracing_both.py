"""Both extractors side by side, and real loaders under the trace: weight loaders as engines write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from adapters.checkpoint import Checkpoint
from adapters.probing import live_tensors, probe
from adapters.trace_compare import differences
from adapters.tracing import trace
from layout_algebra.errors import ProbeError, TracingError
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, bits_of, keeps_bits, noisy, space_of

Weights = dict[str, torch.Tensor]
Pairs = Iterable[tuple[str, torch.Tensor]]


def both(worker: Worker, space: CheckpointSpace, said: list[str]) -> SourceMap:
    with keeps_bits(worker.live):
        return probe(
            worker.load_weights,
            lambda: worker.live,
            space,
            extractor="both",
            progress=lambda what, done, total: said.append(what),
        )


def test_extractors_by_name() -> None:
    worker = Worker({"p": noisy((3, 2))}, lambda live, weights: live["p"].copy_(weights["x"].t()))
    space = space_of(x=("F32", 2, 3))
    found = [
        probe(worker.load_weights, worker.live, space, extractor=extractor).digest()  # type: ignore[arg-type]
        for extractor in ("probe", "trace", "both")
    ]
    assert len(set(found)) == 1
    with pytest.raises(ProbeError, match="'guess'"):
        probe(worker.load_weights, worker.live, space, extractor="guess")  # type: ignore[arg-type]
    with pytest.raises(TracingError):
        probe(lambda weights: dict(weights)["x"].sum().item(), worker.live, space, extractor="trace")


def test_an_opaque_element_that_the_probe_knows_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def body(live: Live, weights: Weights) -> None:
        live["p"].zero_()
        live["p"].add_(weights["x"])
        live["q"].copy_(weights["x"])

    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        found = both(Worker({"p": noisy(40), "q": noisy(40)}, body), space_of(x=("F32", 40)), said)
    assert found.ids("p").tolist() == list(range(1, 41))
    text = "p: 40 elements are copies by the probe and opaque by the trace"
    assert text in said
    assert text in caplog.text


def test_a_loader_that_cannot_be_traced_is_reported_and_probed() -> None:
    def body(live: Live, weights: Weights) -> None:
        assert weights["x"].isfinite().all()
        live["p"].copy_(weights["x"])

    said: list[str] = []
    found = both(Worker({"p": noisy(40)}, body), space_of(x=("F32", 40)), said)
    assert found.ids("p").tolist() == list(range(1, 41))
    assert any("could not be traced" in text and "_local_scalar_dense" in text for text in said)


@pytest.mark.parametrize("other", ["another element", "nothing"])
def test_a_loader_that_changes_its_mind_is_a_contradiction(other: str) -> None:
    calls = []

    def body(live: Live, weights: Weights) -> None:
        calls.append(1)
        if len(calls) > 1:
            live["p"].copy_(weights["x"])
        elif other == "another element":
            live["p"].copy_(weights["x"].flip(0))
        live["q"].copy_(weights["x"])

    with pytest.raises(ProbeError, match=r"contradict each other: p: 40 elements are copies"):
        both(Worker({"p": noisy(40), "q": noisy(40)}, body), space_of(x=("F32", 40)), [])


def test_differences_count_every_kind() -> None:
    space = space_of(x=("F32", 9))
    one = SourceMap.from_ids(space, {"p": np.array([1, 2, 3, 0, -1, 6, 7]), "q": np.array([1])})
    two = SourceMap.from_ids(space, {"p": np.array([1, 9, 0, 4, 5, -1, 7]), "q": np.array([1])})
    assert [(str(found), found.contradiction) for found in differences(one, two)] == [
        (
            "p: 1 elements are copies of different checkpoint elements, such as element 1: x[1:2] by the probe, "
            "x[8:9] by the trace",
            True,
        ),
        ("p: 1 elements are copies by the probe and empty by the trace", True),
        ("p: 1 elements are empty by the probe and copies by the trace", True),
        ("p: 1 elements are copies by the probe and opaque by the trace", False),
        ("p: 1 elements are opaque by the probe and copies by the trace", False),
    ]
    with pytest.raises(ProbeError, match="q: only one"):
        differences(one, SourceMap.from_ids(space, {"p": np.array([1])}))


class Column(nn.Module):
    """Cut along the output axis; several checkpoint tensors in one parameter, as engines fuse them."""

    def __init__(self, rank: int, degree: int, sizes: list[int], width: int) -> None:
        super().__init__()
        self.rank, self.degree, self.sizes = rank, degree, sizes
        self.weight = nn.Parameter(noisy((sum(sizes) // degree, width), torch.bfloat16), requires_grad=False)
        self.weight.output_dim = 0
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        if shard is None:
            for number, part in enumerate(loaded.split(self.sizes, param.output_dim)):
                self.weight_loader(param, part, number)
            return
        size = self.sizes[shard] // self.degree
        target = param.data.narrow(param.output_dim, sum(self.sizes[:shard]) // self.degree, size)
        part = loaded.narrow(param.output_dim, self.rank * size, size)
        assert target.shape == part.shape
        target.copy_(part)


class Experts(nn.Module):
    """Some experts' halves in one stack, the others skipped; an expert map outside of the module's tensors."""

    def __init__(self, rank: int, experts: int, inner: int, width: int) -> None:
        super().__init__()
        self.experts = experts
        self.map = {rank * experts + local: local for local in range(experts)}
        self.w13 = nn.Parameter(noisy((experts, 2 * inner, width), torch.bfloat16), requires_grad=False)
        self.w2 = nn.Parameter(noisy((experts, width, inner), torch.bfloat16), requires_grad=False)

    def load(self, expert: int, kind: str, loaded: torch.Tensor) -> None:
        local = self.map.get(expert)
        if local is None:
            return
        if kind == "down":
            self.w2.data[local].copy_(loaded)
        else:
            half = self.w13.shape[1] // 2
            self.w13.data[local].narrow(0, 0 if kind == "gate" else half, half).copy_(loaded)


class Engine(nn.Module):
    """One rank of an engine, with the loader and the post-processing that such engines have."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = Column(rank, 2, [8, 4, 4], 6)
        self.experts = Experts(rank, 2, 5, 6)
        self.embed = nn.Parameter(noisy((6, 6), torch.bfloat16), requires_grad=False)
        self.head = self.embed
        self.register_buffer("bias", noisy(4))
        self.register_buffer("cos", noisy(8), persistent=False)

    def load_weights(self, weights: Pairs) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            if name in ("q", "k", "v"):
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, "qkv".index(name))
            elif name == "embed":
                first = self.rank * 6
                part = tensor[first : min(first + 6, tensor.shape[0])]
                self.embed.data[: part.shape[0]].copy_(part)
                self.embed.data[part.shape[0] :].fill_(0)
            elif name == "bias":
                self.bias.copy_(tensor.to(torch.float32))
            else:
                _, expert, kind = name.split(".")
                self.experts.load(int(expert), kind, tensor)
        swapped = torch.cat([self.experts.w13[:, 5:], self.experts.w13[:, :5]], dim=1)
        self.experts.w13 = nn.Parameter(swapped.transpose(1, 2).contiguous().transpose(1, 2), requires_grad=False)
        return loaded


ENGINE = [TensorSpec(name, shape, "BF16") for name, shape in (
    ("q", (8, 6)), ("k", (4, 6)), ("v", (4, 6)), ("embed", (10, 6)), ("bias", (4,)),
    *((f"e.{n}.{kind}", (6, 5) if kind == "down" else (5, 6)) for n in range(4) for kind in ("gate", "up", "down")),
)]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_weight_loaders_of_an_engine(rank: int) -> None:
    engine, space = Engine(rank), CheckpointSpace(ENGINE)
    before = bits_of(live_tensors(engine))
    found = trace(engine.load_weights, lambda: live_tensors(engine), space).source_map
    assert bits_of(live_tensors(engine)) == before
    first = space.element_id(f"e.{2 * rank}.up", 0)
    assert found.ids("experts.w13")[0, :5].reshape(-1).tolist() == list(range(first, first + 30))
    assert (found.ids("embed")[4:] > 0).all() == (rank == 0)
    assert (found.ids("cos") == 0).all()
    assert found.opaque == ()
    probed = probe(engine.load_weights, lambda: live_tensors(engine), space)
    assert found.digest() == probed.digest()
    assert bits_of(live_tensors(engine)) == before


def test_a_model_of_transformers_that_fuses_its_experts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    space = Checkpoint.open(tmp_path).space

    @torch.no_grad()
    def load_weights(pairs: Pairs) -> None:
        fresh = type(model).from_pretrained(None, config=config, state_dict=dict(pairs), dtype=model.dtype)
        live = live_tensors(model)
        for name, tensor in fresh.state_dict().items():
            live[name].copy_(tensor)

    before = bits_of(live_tensors(model))
    found = trace(load_weights, lambda: live_tensors(model), space).source_map
    assert bits_of(live_tensors(model)) == before
    assert found.coverage().unused_tensors == ()
    assert found.digest() == probe(load_weights, lambda: live_tensors(model), space).digest()
