"""Discovery at size, and the correspondence of 512 ranks.

    probe 1GB, probe 4GB    a worker of a mixture of experts, against its own plain load from memory
    memory 1GB, memory 4GB  what that probe holds at its peak beside the copy of the parameters, against these
    probe Kimi-K2 rank      experts of two of its layers, from all 69,975 checkpoint tensors, against a load of them all
    memory Kimi-K2 rank     its peak beside the copy of the parameters, against the default limit
    scan                    reading 1 GB of codes into second differences, against a memcpy of as many bytes
    permutation N           a probe of N elements in random order; the floor is the smallest one's time, scaled to N
    permutation exponent    of the time in N
    swizzle 59M             16 x 16 swizzles over a stack of experts, against a plain load
    memory swizzle 59M      its peak beside the copy of the parameters, against the residues of three passes
    correspond 512          Kimi-K2 on 256 trainer and 256 rollout ranks, against 10 s
    memory correspond 512   that process's peak memory, against 3 GiB

Tensors that a plain load reads are in memory already, each in its own (those of Kimi-K2 share one). Peaks are taken in
a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from adapters.cli.benchmark import Row, interleaved_medians
from adapters.deployments import read_deployment
from adapters.probing import DEFAULT_MEMORY_LIMIT_BYTES, LoadWeights, probe
from layout_algebra.correspondence import correspond
from layout_algebra.diff2 import encode
from layout_algebra.residues import FLOAT_CODES, plan_passes
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.layout_algebra import kimi_k2

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


def cases() -> dict[str, Callable[[], list[Row]]]:
    """What can be asked for alone."""
    return {
        "probe 1GB": lambda: probe_rows("1GB", LAYERS),
        "probe 4GB": lambda: probe_rows("4GB", 4 * LAYERS),
        "probe Kimi-K2 rank": kimi_rows,
        "scan": scan_rows,
        "permutation": permutation_rows,
        "swizzle 59M": swizzle_rows,
        "correspond 512": correspond_rows,
    }


def rows() -> list[Row]:
    """The benchmark's rows."""
    return [row for case in cases().values() for row in case()]


def probe_rows(size: str, layers: int, repeats: int = 5) -> list[Row]:
    """Seconds of a probe against seconds of a plain load, in turns; and its memory."""
    value, floor = _probe_and_plain_load(layers, repeats)
    return [
        Row.against_floor(f"probe {size}", value=value, unit="s", floor=floor, bar=8.0),
        peak_row(f"memory {size}", f"moe_worker({layers})", 0.15),
    ]


def _probe_and_plain_load(layers: int, repeats: int) -> tuple[float, float]:
    """Medians; the worker's memory is free again afterwards."""
    space, live = moe_space(layers), moe_parameters(layers)
    real = [(spec.name, torch.full(spec.shape, 0.01, dtype=torch.bfloat16)) for spec in space.specs]
    return interleaved_medians(
        lambda: probe(lambda weights: moe_load(live, weights), live, space),
        lambda: moe_load(live, real),
        repeats=repeats,
    )


Worker = tuple[LoadWeights, Live, CheckpointSpace]


def moe_worker(layers: int = LAYERS, experts: int = EXPERTS) -> Worker:
    """Loader, live tensors and checkpoint of a mixture of experts."""
    live = moe_parameters(layers, experts)
    return lambda weights: moe_load(live, weights), live, moe_space(layers, experts)


def kimi_worker(layers: int = 2, experts: int = 4) -> Worker:
    """Of Kimi-K2's checkpoint, all tensors of which are fed, some experts and the attention of some layers."""
    hidden, width = kimi_k2.HIDDEN, kimi_k2.EXPERT
    live: Live = {}
    for layer in range(1, layers + 1):
        at = f"model.layers.{layer}"
        live[f"{at}.w13"] = torch.zeros(experts, 2 * width, hidden, dtype=torch.bfloat16)
        live[f"{at}.w2"] = torch.zeros(experts, hidden, width, dtype=torch.bfloat16)
        live[f"{at}.o_proj"] = torch.zeros(hidden, 8192 // 8, dtype=torch.bfloat16)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parts = name.split(".")
            at = ".".join(parts[:3])
            if f"{at}.w13" not in live:
                continue
            if parts[-2] == "o_proj":
                live[f"{at}.o_proj"].copy_(tensor[:, 1024:2048])
            elif parts[4] == "experts" and int(parts[5]) < experts:
                expert, kind = int(parts[5]), parts[6]
                if kind == "down_proj":
                    live[f"{at}.w2"][expert].copy_(tensor)
                else:
                    first = 0 if kind == "gate_proj" else width
                    live[f"{at}.w13"][expert, first : first + width].copy_(tensor)

    return load, live, kimi_k2.checkpoint()


def kimi_rows() -> list[Row]:
    """A rank of 2.05 TB of checkpoint."""
    load, live, space = kimi_worker()
    memory = torch.full((max(spec.elements for spec in space.specs),), 0.01, dtype=torch.bfloat16)
    wide = torch.zeros(kimi_k2.EXPERTS)

    def plain() -> None:
        load((s.name, (memory if s.dtype == "BF16" else wide)[: s.elements].view(s.shape)) for s in space.specs)

    plain()
    value, floor = (min(_seconds(work) for _ in range(2)) for work in (lambda: probe(load, live, space), plain))
    return [
        Row.against_floor("probe Kimi-K2 rank", value=value, unit="s", floor=floor),
        peak_row("memory Kimi-K2 rank", "kimi_worker()", 1.0, floor=DEFAULT_MEMORY_LIMIT_BYTES),
    ]


def scan_rows() -> list[Row]:
    """Reading codes against copying them, both on all cores."""
    one = plan_passes(FLOAT_CODES, 1 << 30)[0]
    decoding = FLOAT_CODES.decoding("BF16")
    assert decoding is not None
    codes = np.resize(FLOAT_CODES.table("BF16", one).astype(np.uint16), (1 << 19, 1024))
    target = np.ones_like(codes)
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:

        def memcpy() -> None:
            parts = zip(np.array_split(target, cores), np.array_split(codes, cores), strict=True)
            for job in [pool.submit(np.copyto, *part) for part in parts]:
                job.result()

        value, floor = interleaved_medians(
            lambda: encode(codes, codes.shape, decoding, one, executor=pool), memcpy, repeats=7
        )
    return [Row.against_floor("scan", value=value, unit="s", floor=floor)]


def permuted_worker(elements: int) -> Worker:
    """One tensor, its elements in random order."""
    order = torch.randperm(elements, generator=torch.Generator().manual_seed(elements))
    live = {"w": torch.zeros(elements, dtype=torch.bfloat16)}
    space = CheckpointSpace([TensorSpec("w", (elements,), "BF16")])
    return lambda weights: torch.index_select(dict(weights)["w"], 0, order, out=live["w"]), live, space


def permutation_rows(sizes: tuple[int, ...] = (250_000, 1_000_000, 4_000_000)) -> list[Row]:
    """The best of three probes a size, and the slope of their logarithms."""
    seconds = []
    for elements in sizes:
        worker = permuted_worker(elements)
        probe(*worker)
        seconds.append(min(_seconds(lambda worker=worker: probe(*worker)) for _ in range(3)))  # type: ignore[misc]
    out = [
        Row.against_floor(f"permutation {n}", value=value, unit="s", floor=seconds[0] * n / sizes[0])
        for n, value in zip(sizes, seconds, strict=True)
    ]
    slope = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    return [*out, Row.against_floor("permutation exponent", value=max(slope, 1e-3), unit="1", floor=1.0, bar=1.2)]


def swizzled_worker(experts: int = 45, height: int = 1024, width: int = 1280) -> Worker:
    """A stack of experts; within tiles of 16 x 16 the column number is xor-ed with the row number."""
    where = (torch.arange(width) ^ (torch.arange(height) % 16)[:, None]).contiguous()
    live = {"w": torch.zeros(experts, height, width, dtype=torch.bfloat16)}
    space = CheckpointSpace(TensorSpec(f"experts.{e}.w", (height, width), "BF16") for e in range(experts))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            torch.gather(tensor, 1, where, out=live["w"][int(name.split(".")[1])])

    return load, live, space


def swizzle_rows() -> list[Row]:
    """Time against a plain load, memory against the residues of three passes: two bytes an element each."""
    load, live, space = swizzled_worker()
    real = [(spec.name, torch.full(spec.shape, 0.01, dtype=torch.bfloat16)) for spec in space.specs]
    probe(load, live, space)
    value = min(_seconds(lambda: probe(load, live, space)) for _ in range(2))
    floor = min(_seconds(lambda: load(real)) for _ in range(3))
    case, residues = "memory swizzle 59M", 6 * live["w"].numel()
    return [
        Row.against_floor("swizzle 59M", value=value, unit="s", floor=floor),
        peak_row(case, "swizzled_worker()", 4.0, floor=residues),
    ]


def correspond_rows() -> list[Row]:
    """Who holds what somebody needs, among 512 ranks whose maps are there."""
    seconds, peak = (float(word) for word in _apart("print(*correspond_512())").split()[-2:])
    return [
        Row.against_floor("correspond 512", value=seconds, unit="s", floor=10.0, bar=1.0),
        Row.against_floor("memory correspond 512", value=peak, unit="bytes", floor=float(3 << 30), bar=1.0),
    ]


def correspond_512() -> tuple[float, int]:
    """Seconds of the correspondence, and the process's peak memory."""
    root = Path(__file__).resolve().parents[2]
    _, holders, needers = read_deployment(root / "docs" / "deployments" / "kimi-k2.toml").maps()
    seconds = _seconds(lambda: correspond(holders, needers))
    return seconds, _status_bytes("VmHWM")


def peak_row(case: str, worker: str, bar: float, *, floor: int | None = None) -> Row:
    """Bytes a probe holds at its peak beside the copy of the parameters, against the parameters' bytes or others."""
    beside, parameters = (int(word) for word in _apart(f"print(*peak_bytes({worker}))").split()[-2:])
    return Row.against_floor(case, value=float(beside), unit="bytes", floor=float(floor or parameters), bar=bar)


def peak_bytes(worker: Worker) -> tuple[int, int]:
    """Peak memory of one probe of a worker beside the copy of its parameters, and its parameters' bytes.

    Kernels are compiled by a small probe before, and the kernel's own peak counter is set back (Linux only).
    """
    probe(*moe_worker(1, 2))
    parameters = sum(tensor.nbytes for tensor in worker[1].values())
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    probe(*worker)
    return _status_bytes("VmHWM") - before - parameters, parameters


def _apart(work: str) -> str:
    """What some work of this file prints in a process of its own."""
    command = [sys.executable, "-c", f"from tests.benchmarks.probe import *; {work}"]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment).stdout


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")
