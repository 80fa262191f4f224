"""Kimi-K2's checkpoint (69,975 tensors, as transformers names them) and what one rollout rank keeps of it."""

from __future__ import annotations

from layout_algebra.blocks import Layout, concatenate, stack, whole
from layout_algebra.shardings import column_parallel, expert_stack, gate_up, row_parallel
from layout_algebra.space import CheckpointSpace, TensorSpec

HIDDEN, EXPERT, EXPERTS, LAYERS, VOCABULARY = 7168, 2048, 384, 61, 163840
ATTENTION = {
    "q_a_proj.weight": (1536, HIDDEN),
    "q_a_layernorm.weight": (1536,),
    "q_b_proj.weight": (64 * 192, 1536),
    "kv_a_proj_with_mqa.weight": (512 + 64, HIDDEN),
    "kv_a_layernorm.weight": (512,),
    "kv_b_proj.weight": (64 * 256, 512),
    "o_proj.weight": (HIDDEN, 64 * 128),
}
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def swiglu(prefix: str, width: int) -> list[TensorSpec]:
    shapes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    return [TensorSpec(f"{prefix}.{name}_proj.weight", shape, "BF16") for name, shape in shapes.items()]


def checkpoint(layers: int = LAYERS, experts: int = EXPERTS) -> CheckpointSpace:
    specs = [
        TensorSpec("model.embed_tokens.weight", (VOCABULARY, HIDDEN), "BF16"),
        TensorSpec("lm_head.weight", (VOCABULARY, HIDDEN), "BF16"),
        TensorSpec("model.norm.weight", (HIDDEN,), "BF16"),
    ]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        specs += [TensorSpec(f"{prefix}.self_attn.{name}", shape, "BF16") for name, shape in ATTENTION.items()]
        specs += [TensorSpec(f"{prefix}.{name}", (HIDDEN,), "BF16") for name in NORMS]
        if layer == 0:
            specs += swiglu(f"{prefix}.mlp", 18432)
            continue
        specs.append(TensorSpec(f"{prefix}.mlp.gate.weight", (experts, HIDDEN), "BF16"))
        specs.append(TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), "F32"))
        specs += swiglu(f"{prefix}.mlp.shared_experts", EXPERT)
        for expert in range(experts):
            specs += swiglu(f"{prefix}.mlp.experts.{expert}", EXPERT)
    return CheckpointSpace(specs)


def rollout_rank(
    space: CheckpointSpace, *, rank: int, degree: int, layers: int = LAYERS, experts: int = EXPERTS
) -> dict[str, Layout]:
    """Tensor parallel attention and dense layers, expert parallel stacks, as vLLM names them."""

    def tensor(name: str) -> Layout:
        return whole(space, name)

    out = {
        "model.embed_tokens.weight": column_parallel(tensor("model.embed_tokens.weight"), rank=rank, degree=degree),
        "lm_head.weight": column_parallel(tensor("lm_head.weight"), rank=rank, degree=degree),
        "model.norm.weight": tensor("model.norm.weight"),
    }

    def mlp(prefix: str) -> None:
        gate, up, down = (tensor(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
        out[f"{prefix}.gate_up_proj.weight"] = gate_up(gate, up, rank=rank, degree=degree)
        out[f"{prefix}.down_proj.weight"] = row_parallel(down, rank=rank, degree=degree)

    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        out[f"{attention}.fused_qkv_a_proj.weight"] = concatenate(
            [tensor(f"{attention}.q_a_proj.weight"), tensor(f"{attention}.kv_a_proj_with_mqa.weight")]
        )
        for name in (*(f"{attention}.{n}_a_layernorm.weight" for n in ("q", "kv")), *(f"{prefix}.{n}" for n in NORMS)):
            out[name] = tensor(name)
        for name in ("q_b_proj", "kv_b_proj"):
            out[f"{attention}.{name}.weight"] = column_parallel(
                tensor(f"{attention}.{name}.weight"), rank=rank, degree=degree
            )
        out[f"{attention}.o_proj.weight"] = row_parallel(tensor(f"{attention}.o_proj.weight"), rank=rank, degree=degree)
        if layer == 0:
            mlp(f"{prefix}.mlp")
            continue
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            out[f"{prefix}.mlp.{name}"] = tensor(f"{prefix}.mlp.{name}")
        mlp(f"{prefix}.mlp.shared_experts")
        local = experts // degree
        gates_and_ups = [
            concatenate([tensor(f"{prefix}.mlp.experts.{e}.{name}_proj.weight") for name in ("gate", "up")])
            for e in range(rank * local, (rank + 1) * local)
        ]
        out[f"{prefix}.mlp.experts.w13_weight"] = stack(gates_and_ups)
        out[f"{prefix}.mlp.experts.w2_weight"] = expert_stack(
            [tensor(f"{prefix}.mlp.experts.{e}.down_proj.weight") for e in range(experts)], rank=rank, degree=degree
        )
    return out
