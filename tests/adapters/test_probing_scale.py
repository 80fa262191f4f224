"""Checkpoints far larger than memory: ids past 2**32, a rank of Kimi-K2's shape, memory bounded, progress shown.

All of Kimi-K2's 69,975 tensors at their real size are a case of `transload bench probe`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from adapters.probing import probe
from layout_algebra.diff2 import encode
from layout_algebra.errors import ProbeError
from layout_algebra.recover import recover
from layout_algebra.residues import FLOAT_CODES, plan_passes
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.layout_algebra import kimi_k2

LAYERS = 9

Weights = Iterable[tuple[str, torch.Tensor]]


def small_kimi() -> CheckpointSpace:
    """Nine of Kimi-K2's layers, with all their experts, and their sides a 32nd as long."""
    shrunk = (
        TensorSpec(spec.name, tuple(max(1, extent // 32) for extent in spec.shape), spec.dtype)
        for spec in kimi_k2.checkpoint(LAYERS).specs
    )
    return CheckpointSpace(shrunk)


def test_a_rank_of_kimi_k2s_shape_in_small() -> None:
    space = small_kimi()
    assert len(space) > 9_000
    hidden, width, local = kimi_k2.HIDDEN // 32, kimi_k2.EXPERT // 32, range(96, 108)
    layers = (1, 5, LAYERS - 1)
    live = {f"{layer}.w13": torch.zeros(len(local), 2 * width, hidden, dtype=torch.bfloat16) for layer in layers}
    live |= {f"{layer}.bias": torch.zeros(12, dtype=torch.float32) for layer in layers}

    def load(weights: Weights) -> None:
        fed = 0
        for name, tensor in weights:
            fed += 1
            parts = name.split(".")
            if len(parts) < 5 or int(parts[2]) not in layers:
                continue
            layer = parts[2]
            if parts[4] == "experts" and int(parts[5]) in local and parts[6] != "down_proj":
                first = 0 if parts[6] == "gate_proj" else width
                live[f"{layer}.w13"][int(parts[5]) - local.start, first : first + width].copy_(tensor)
            elif name.endswith("e_score_correction_bias"):
                live[f"{layer}.bias"].copy_(tensor)
        assert fed == len(space)

    seen: list[tuple[int, int]] = []
    found = probe(
        load, live, space, progress=lambda what, done, of: seen.append((done, of)), memory_limit_bytes=64 << 20
    )
    assert seen[-1][0] == seen[-1][1] >= 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for layer in layers:
        assert len(found.slice_copies(f"{layer}.w13")) <= 2
        ids = found.ids(f"{layer}.w13")
        for place, expert in enumerate(local):
            for part, first in (("gate_proj", 0), ("up_proj", width)):
                start, stop = space.id_range(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight")
                assert np.array_equal(ids[place, first : first + width].ravel(), np.arange(start, stop))
        start, stop = space.id_range(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        assert found.ids(f"{layer}.bias").tolist() == list(range(start, stop))
    assert len(found.to_bytes()) < 200_000


def test_a_limit_below_the_largest_tensor_is_refused_before_loading() -> None:
    space = small_kimi()
    with pytest.raises(ProbeError, match="about its largest tensor; memory_limit_bytes is 1,000,000"):
        probe(lambda weights: pytest.fail("loaded"), {"w": torch.zeros(3)}, space, memory_limit_bytes=1_000_000)


def test_ids_past_two_to_the_32() -> None:
    """Stacks of [512, 2048, 4096] as 512 tensors a stack; the worker keeps the ends of the last one's last."""
    shape = (2048, 4096)
    space = CheckpointSpace(TensorSpec(f"{layer}.experts.{e}", shape, "BF16") for layer in range(2) for e in range(512))
    assert space.total_elements == 2**33
    live = {"rows": torch.zeros(40, 4096, dtype=torch.bfloat16), "columns": torch.zeros(7, 2048, dtype=torch.float32)}

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "1.experts.511":
                live["rows"].copy_(tensor[-40:])
            elif name == "0.experts.511":
                live["columns"].copy_(tensor[:, -7:].T)

    found = probe(load, live, space)
    last = space.total_elements
    assert np.array_equal(found.ids("rows").ravel(), np.arange(last - 40 * 4096 + 1, last + 1))
    end = space.id_range("0.experts.511")[1]
    assert end > 2**32
    grid = np.arange(end - 2048 * 4096, end).reshape(shape)
    assert np.array_equal(found.ids("columns"), grid[:, -7:].T)


def test_places_past_two_to_the_31_in_one_parameter() -> None:
    """A parameter of 2.2e9 elements that was never touched but at its end, scanned in chunks: 4.4 GB of zero pages."""
    shape, total = (37, 14336, 4096), 10**7
    memory = np.zeros(shape, dtype=np.uint16)
    assert memory.size > 2**31
    ids = np.arange(1, 1 + 5 * 4096).reshape(5, 4096)
    diffs = []
    passes = plan_passes(FLOAT_CODES, total)
    decoding = FLOAT_CODES.decoding("BF16")
    assert decoding is not None
    for one in passes:
        memory[-1, -5:] = FLOAT_CODES.table("BF16", one)[ids % one.modulus]
        diffs.append(encode(memory, shape, decoding, one))
    assert max(diff.nbytes for diff in diffs) < 100_000
    found = recover(diffs, passes, shape, total)
    assert [str(copy) for copy in found.copies.slice_copies()] == [
        f"{memory.size - 5 * 4096}+({5 * 4096}:1) <- 1+({5 * 4096}:1)"
    ]
