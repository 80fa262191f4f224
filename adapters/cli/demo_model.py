"""The demo's model and how each side holds it: transformers and torch do the work, this file only calls them.

A small random Qwen3-MoE in bfloat16. Its 18 experts do not divide by four trainers, so FSDP's shards are uneven; more
than ten of them, so name order and number order differ. The checkpoint has one tensor per expert and projection; in
memory transformers stacks the experts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

__all__ = [
    "load_rollout",
    "load_trainer",
    "make_config",
    "make_optimizer",
    "prompt_logits",
    "save_trainer",
    "train_step",
    "write_random",
]

_DTYPE = torch.bfloat16
_LEARNING_RATE = 1e-2  # large enough to move every bfloat16 weight, the norms' ones included
_BATCH = (4, 32)
_PROMPT_TOKENS = 24


def make_config(layers: int) -> Qwen3MoeConfig:
    """The demo's model config: about two million parameters a layer and one million in the embeddings."""
    return Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=18,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        max_position_embeddings=512,
    )


def write_random(folder: Path, layers: int) -> None:
    """Save a random model as transformers saves it: safetensors with per-expert names, and the config."""
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(make_config(layers)).to(_DTYPE).save_pretrained(folder, max_shard_size="8MB")


def load_trainer(folder: Path, ranks: int) -> PreTrainedModel:
    """Load the folder and shard it over `ranks` with FSDP2, a group per layer and one for the rest. Collective."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=_DTYPE)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.train()
    return model


def load_rollout(folder: Path, ranks: int) -> PreTrainedModel:
    """Load the folder tensor-parallel over `ranks`, as transformers' own plan for the model says. Collective."""
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=_DTYPE, distributed_config=DistributedConfig(tp_size=ranks)
    )


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One real optimizer step on a random batch; returns the loss. Collective over the trainers."""
    tokens = torch.randint(model.config.vocab_size, _BATCH, generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def make_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def save_trainer(model: PreTrainedModel, folder: Path, *, rank: int) -> None:
    """Gather the trainers' own state to rank 0 and save it there with transformers. Collective.

    Independent of the transfer: it uses torch's state dict gathering and transformers' `save_pretrained` only.
    """
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        with torch.device("meta"):
            names = Qwen3MoeForCausalLM(model.config)
        names.save_pretrained(folder, state_dict=whole)


@torch.no_grad()
def prompt_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits [1, tokens, vocabulary] of a fixed prompt. Collective over the engine."""
    prompt = (torch.arange(_PROMPT_TOKENS) * 97 % model.config.vocab_size)[None]
    logits: torch.Tensor = model(input_ids=prompt).logits
    return logits
