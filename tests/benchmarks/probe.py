"""Discovery of a 1 GB bfloat16 worker: time against the worker's own plain load, memory against its parameters.

The worker is a mixture-of-experts model on one rank: fused qkv, gate and up side by side, experts stacked, 1,235
checkpoint tensors. A plain load fills it from real tensors of that size that are in memory already. Memory is what the
probe holds at its peak beside the copy of the parameters, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from adapters.cli.benchmark import Row, interleaved_medians
from adapters.probing import probe
from layout_algebra.space import CheckpointSpace, TensorSpec

LAYERS, EXPERTS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 49, 1024, 384, 16, 4, 128, 32_000

Live = dict[str, torch.Tensor]


def moe_space(layers: int = LAYERS, experts: int = EXPERTS) -> CheckpointSpace:
    """The checkpoint: names and shapes as Hugging Face writes them."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at = f"layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate.weight": (experts, HIDDEN),
        }
        for expert in range(experts):
            shapes |= {
                f"{at}.mlp.experts.{expert}.gate_proj.weight": (INNER, HIDDEN),
                f"{at}.mlp.experts.{expert}.up_proj.weight": (INNER, HIDDEN),
                f"{at}.mlp.experts.{expert}.down_proj.weight": (HIDDEN, INNER),
            }
    return CheckpointSpace(TensorSpec(name, shape, "BF16") for name, shape in shapes.items())


def moe_parameters(layers: int = LAYERS, experts: int = EXPERTS) -> Live:
    """The worker's tensors, filled with something."""
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    live = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at = f"layers.{layer}"
        live |= {
            f"{at}.self_attn.qkv_proj.weight": (qkv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate.weight": (experts, HIDDEN),
            f"{at}.mlp.experts.w13_weight": (experts, 2 * INNER, HIDDEN),
            f"{at}.mlp.experts.w2_weight": (experts, HIDDEN, INNER),
        }
    return {name: torch.full(shape, 0.02, dtype=torch.bfloat16) for name, shape in live.items()}


def moe_load(live: Live, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The worker's loader: one copy a checkpoint tensor."""
    rows = {"q_proj": (0, HEADS), "k_proj": (HEADS, KV_HEADS), "v_proj": (HEADS + KV_HEADS, KV_HEADS)}
    for name, tensor in weights:
        parts = name.split(".")
        if ".experts." in name:
            at, expert, kind = ".".join(parts[:4]), int(parts[4]), parts[5]
            if kind == "down_proj":
                live[f"{at}.w2_weight"][expert].copy_(tensor)
            else:
                first = 0 if kind == "gate_proj" else INNER
                live[f"{at}.w13_weight"][expert, first : first + INNER].copy_(tensor)
        elif parts[-2] in rows:
            first, heads = rows[parts[-2]]
            fused = live[".".join([*parts[:-2], "qkv_proj.weight"])]
            fused[first * HEAD_DIM : (first + heads) * HEAD_DIM].copy_(tensor)
        else:
            live[name].copy_(tensor)


def rows() -> list[Row]:
    """The benchmark's rows."""
    return [time_row(), memory_row()]


def time_row(repeats: int = 5) -> Row:
    """Seconds of a probe against seconds of a plain load, in turns."""
    space, live = moe_space(), moe_parameters()
    real = [(spec.name, torch.full(spec.shape, 0.01, dtype=torch.bfloat16)) for spec in space.specs]
    value, floor = interleaved_medians(
        lambda: probe(lambda weights: moe_load(live, weights), live, space),
        lambda: moe_load(live, real),
        repeats=repeats,
    )
    return Row.against_floor("probe 1GB", value=value, unit="s", floor=floor, bar=12.0)


def memory_row() -> Row:
    """Bytes that a probe holds at its peak beside the copy of the parameters, against the parameters' bytes."""
    command = [sys.executable, "-c", "from tests.benchmarks.probe import peak_bytes; print(*peak_bytes())"]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    beside, parameters = (int(word) for word in done.stdout.split()[-2:])
    return Row.against_floor("memory 1GB", value=float(beside), unit="bytes", floor=float(parameters), bar=0.15)


def peak_bytes() -> tuple[int, int]:
    """Peak memory of one probe of the worker beside the copy of its parameters, and its parameters' bytes.

    Kernels are compiled by a small probe before, and the kernel's own peak counter is set back (Linux only).
    """
    small = moe_parameters(1, 2)
    probe(lambda weights: moe_load(small, weights), small, moe_space(1, 2))
    space, live = moe_space(), moe_parameters()
    parameters = sum(tensor.nbytes for tensor in live.values())
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    probe(lambda weights: moe_load(live, weights), live, space)
    return _status_bytes("VmHWM") - before - parameters, parameters


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")
