"""Deployment files: the shipped ones are what they say; layouts agree with plain ones; mistakes are named."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from adapters.deployments import Deployment, DeploymentError, read_deployment
from adapters.deployments_layouts import Fsdp, Megatron, Rollout, pipeline_layers, rollout_maps, trainer_maps
from adapters.deployments_models import model_of
from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from transfer_exec import make_plan, simulate
from transfer_exec.bound import lower_bound
from transfer_exec.demand import place_demand
from transfer_exec.links import Links

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deployments"
TINY_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 4, "vocab_size": 10,
}  # fmt: skip
TINY_LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4,
    "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "n_routed_experts": 4, "n_shared_experts": 1,
    "vocab_size": 10,
}  # fmt: skip


def test_every_shipped_file_is_tested_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*SHIPPED, "figure2-same", "figure2-cross"}


SHIPPED = {  # bytes, workers
    "moonlight-16b": (31.9e9, 16),
    "qwen3-30b-a3b": (61.1e9, 32),
    "qwen3-235b-a22b": (470.2e9, 128),
    "kimi-k2": (2.05e12, 512),
    "qwen3-32b": (65.5e9, 32),
    "glm-5.2": (1.49e12, 96),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_models_have_the_published_size(name: str) -> None:
    deployment = read_deployment(FOLDER / f"{name}.toml")
    size, workers = SHIPPED[name]
    assert deployment.model.space().total_bytes == pytest.approx(size, rel=0.01)
    assert len(deployment.topology().workers) == workers


def planned(name: str) -> tuple[Deployment, float, float]:
    deployment = read_deployment(FOLDER / f"{name}.toml")
    _, holders, needers = deployment.maps()
    topology = deployment.topology()
    plan = make_plan(correspond(holders, needers), topology, buffer_bytes=deployment.update.buffer_bytes)
    assert plan.load_s <= 1.001 * plan.lower_bound_s
    slow, fast = (simulate(plan, topology, round_overhead_s=overhead).ratio_to_bound for overhead in (1e-3, 1e-4))
    assert 1.0 <= fast <= slow
    return deployment, plan.lower_bound_s, slow


@pytest.mark.parametrize(("name", "bound_s"), [("moonlight-16b", 79.8e-3), ("qwen3-30b-a3b", 152.8e-3)])
def test_plans_and_timelines_of_the_smaller_ones(name: str, bound_s: float) -> None:
    _, bound, ratio = planned(name)
    assert bound == pytest.approx(bound_s, rel=0.005)
    assert ratio <= 1.08


def test_the_dense_model() -> None:
    assert planned("qwen3-32b")[2] <= 1.08


def test_bounds_of_the_larger_ones() -> None:
    deployment = read_deployment(FOLDER / "kimi-k2.toml")
    _, holders, needers = deployment.maps()
    assert len({id(each) for each in holders.values()}) == 256
    assert len({id(each) for each in needers.values()}) == 32
    demand = correspond(holders, needers)
    links = Links.of(deployment.topology(), demand.holders, demand.needers)
    assert 1.28 <= lower_bound(place_demand(demand, links), links).seconds <= 1.34
    assert demand.needed_bytes == deployment.model.space().total_bytes


def test_figure_two() -> None:
    same, cross = (read_deployment(FOLDER / f"figure2-{name}.toml") for name in ("same", "cross"))
    _, holders, needers = same.maps()
    pairs = {
        (holder, needer) for group in correspond(holders, needers).classes
        for needer in group.needers for holder in group.holders if len(group.holders) == 1
    }  # fmt: skip
    assert pairs == {(f"trainer/{rank}", f"engine/0/{rank}") for rank in range(4)}, "one to one"
    _, holders, needers = cross.maps()
    holding: dict[str, set[str]] = {needer: set() for needer in needers}
    for group in correspond(holders, needers).classes:
        for needer in group.needers:
            holding[needer] |= set(group.holders)
    assert all(sources == set(holders) for sources in holding.values()), "every rollout needs every trainer"


def ids_by_tensor(space: CheckpointSpace, source_map: SourceMap) -> set[int]:
    return set(source_map.held().ids().tolist())


@pytest.mark.parametrize("config", [TINY_MOE, TINY_LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize(
    "layout",
    [Megatron(tp=2, pp=3, dp=2, ep=2, etp=2), Megatron(tp=2, cp=2, ep=4), Fsdp(3), Fsdp(4, dp=2)],
    ids=str,
)
def test_trainers_hold_everything_and_replicas_the_same(config: dict[str, object], layout: Megatron | Fsdp) -> None:
    model = model_of(config)
    space = model.space()
    maps = trainer_maps(model, space, layout)
    held = set().union(*(ids_by_tensor(space, each) for each in maps.values()))
    assert held == set(range(1, space.total_elements + 1))
    if isinstance(layout, Fsdp):
        shards = [ids_by_tensor(space, maps[f"trainer/{rank}"]) for rank in range(layout.shards)]
        assert sum(map(len, shards)) == space.total_elements, "each id once"
        assert all(maps[f"trainer/{rank}"] is maps[f"trainer/{rank % layout.shards}"] for rank in range(len(maps)))


@pytest.mark.parametrize("config", [TINY_MOE, TINY_LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("layout", [Rollout(2, tp=4, ep=4), Rollout(1, tp=2, dp=2, pp=3, ep=2), Rollout(2)], ids=str)
def test_every_engine_has_the_whole_model(config: dict[str, object], layout: Rollout) -> None:
    model = model_of(config)
    space = model.space()
    maps = rollout_maps(model, space, layout)
    for engine in range(layout.engines):
        mine = [each for name, each in maps.items() if name.startswith(f"engine/{engine}/")]
        assert set().union(*(ids_by_tensor(space, each) for each in mine)) == set(range(1, space.total_elements + 1))


def test_moved_layers_equal_declared_ones() -> None:
    """A layer that was moved from another holds what numpy says it holds."""
    model = model_of(TINY_MOE)
    space = model.space()
    rank = trainer_maps(model, space, Megatron(tp=2, dp=2, ep=4))["trainer/3"]
    for layer in range(3):
        at = f"model.layers.{layer}."

        def ids(name: str, at: str = at) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
            start, stop = space.id_range(at + name + ".weight")
            return np.arange(start, stop).reshape(space.spec(at + name + ".weight").shape)

        parts = [ids(f"self_attn.{name}_proj").reshape(2, -1, 8)[1] for name in "qkv"]
        assert (rank.ids(at + "self_attn.qkv_proj") == np.concatenate(parts)).all()
        assert (rank.ids(at + "self_attn.o_proj") == ids("self_attn.o_proj")[:, 4:]).all()
        gate_up = np.concatenate([ids("mlp.experts.3.gate_proj"), ids("mlp.experts.3.up_proj")])
        assert (rank.ids(at + "mlp.experts.w13") == gate_up[None]).all()
        assert (rank.ids(at + "mlp.experts.w2") == ids("mlp.experts.3.down_proj")[None]).all()


def test_pipeline_stages_are_in_order_and_near_equal() -> None:
    stages = [pipeline_layers(61, stage, 8) for stage in range(8)]
    assert [len(stage) for stage in stages] == [8] * 5 + [7] * 3
    assert [layer for stage in stages for layer in stage] == list(range(61))


def text_of(name: str = "figure2-same") -> str:
    return (FOLDER / f"{name}.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus_per_node = 4", "gpus_per_node = 8", "trainer: tp 2 x pp 2 x cp 1 x dp 1 multiply to 4"),
        ("engines = 1", "engines = 2", "rollout: engines 2 x tp 2 x dp 1 x pp 2 multiply to 8"),
        ("pp = 2\nep = 2\n\n[rollout]", "pp = 2\nep = 4\n\n[rollout]", "trainer: ep 4 x etp 1 do not divide"),
        ("nic_bytes_per_s = 50e9", "nic_bytes_per_s = 0", "cluster.nic_bytes_per_s: 0; expected a number above zero"),
        ("num_experts = 2", "num_expert = 2", "model.num_experts: is missing"),
        ("num_experts = 2", "num_experts = -2", "model.num_experts: -2"),
        ('"qwen3_moe"', '"gpt9"', "model.model_type: 'gpt9'"),
        ("nodes = 1", "node = 1", "unknown key 'node'; did you mean nodes?"),
        ("[rollout]", "[rollouts]", "unknown key 'rollouts'; did you mean rollout?"),
        ("nodes = 1", "nodes = ", "no TOML"),
        ("tp = 2", "tp = 2.5", "trainer.tp: 2.5; expected a whole number"),
    ],
)
def test_mistakes_are_named_with_file_and_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in text_of()
    path.write_text(text_of().replace(old, new, 1))
    with pytest.raises(DeploymentError) as caught:
        read_deployment(path).maps()
    assert words in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_what_does_not_divide_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text_of().replace("num_attention_heads = 4", "num_attention_heads = 3"))
    with pytest.raises(DeploymentError, match=r"trainer: model\.layers\.0\.self_attn\.qkv_proj"):
        read_deployment(path).maps()


def test_a_config_file_beside_it(tmp_path: Path) -> None:
    table = tomllib.loads(text_of())
    (tmp_path / "config.json").write_text(json.dumps({**table["model"], "torch_dtype": "bfloat16"}))
    path = tmp_path / "mine.toml"
    head, tail = text_of().split("[model]")[0], text_of()[text_of().index("[cluster]") :]
    path.write_text(f'{head}[model]\nconfig = "config.json"\n\n{tail}')
    assert read_deployment(path).model == read_deployment(FOLDER / "figure2-same.toml").model
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DeploymentError, match="is no JSON"):
        read_deployment(path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DeploymentError, match="cannot be read"):
        read_deployment(path)


@pytest.mark.parametrize("name", [*SHIPPED, "figure2-same"])
def test_tensors_are_those_of_transformers(name: str) -> None:
    """On the meta device the model of transformers has as many elements, experts stacked or not."""
    numbers = tomllib.loads(text_of(name))["model"]
    kind = {"kimi_k2": "deepseek_v3"}.get(numbers["model_type"], numbers["model_type"])
    heads = numbers.get("num_key_value_heads", numbers["num_attention_heads"])
    more = {"q_lora_rank": numbers.get("q_lora_rank"), "num_key_value_heads": heads, "pad_token_id": None}
    del numbers["model_type"]
    config = transformers.AutoConfig.for_model(kind, **{**numbers, **more})
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(each.numel() for each in theirs.parameters())
    counted += sum(each.numel() for key, each in theirs.named_buffers() if key.endswith("e_score_correction_bias"))
    assert read_deployment(FOLDER / f"{name}.toml").model.space().total_elements == counted
