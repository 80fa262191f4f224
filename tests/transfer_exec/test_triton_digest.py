"""Digests on a GPU: equal to the CPU's under Triton's interpreter, and ahead-of-time code for two GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from layout_algebra.fingerprint import plan_fingerprints
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.transfer_exec.ahead_of_time import compile_ahead, usage
from transfer_exec.errors import ProgramError
from transfer_exec.kernels._triton_digest import digest_tiles
from transfer_exec.kernels.triton_digest import LANES, WARPS, DeviceDigest, device_parts, tiles_of_strips

HERE = Path(__file__).resolve().parent


def test_it_agrees_with_the_cpu() -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "triton_digest_interpreted.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.removeprefix("ok ")) > 100


@pytest.mark.parametrize("capability", [90, 100])
def test_it_compiles_ahead_of_time_without_spills(
    capability: int, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    signature = {"tiles": "*i64", "first": "i64", "weights": "*i64", "out": "*i64", "LANES": "constexpr"}
    made = compile_ahead(digest_tiles, signature, {"LANES": LANES}, warps=WARPS, capability=capability)
    registers, spilled = usage(made, tmp_path, record_property)
    assert spilled == 0
    assert registers <= 64  # eight programs of four warps a multiprocessor at least
    assert "atom.global" in made.asm["ptx"] or "red." in made.asm["ptx"]


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_tiles_have_every_element_once(item_bytes: int) -> None:
    rng = np.random.default_rng(item_bytes)
    starts = 1 + np.cumsum(rng.integers(0, 3000, 200)) * 3
    rows = np.stack([starts, rng.integers(1, 9000, 200), starts * 2, rng.choice([1, 1, 1, 5, -2], 200)], axis=1)
    rows = np.column_stack([rows, np.arange(200)])
    tiles = tiles_of_strips(rows, 1 << 20, item_bytes)
    each = np.where(tiles[:, 5] == 0, max(4 // item_bytes, 1), 1)
    counted = np.zeros(200, dtype=np.int64)
    np.add.at(counted, tiles[:, 6], tiles[:, 2] * each)
    assert np.array_equal(counted, rows[:, 1])
    assert np.all(tiles[:, 3] + tiles[:, 2] <= 4096)
    assert np.all(tiles[tiles[:, 5] == 0, 0] % 4 == 0)


def test_what_cannot_be_digested_in_place_is_left_to_the_host() -> None:
    space = CheckpointSpace([TensorSpec("a", (6,), "BF16")])
    ids = {"wide": np.arange(1, 3), "turned": np.arange(3, 7).reshape(2, 2)}
    plan = plan_fingerprints(
        SourceMap.from_ids(space, ids, {"wide": "F32", "turned": "BF16"}), [RunTable.from_intervals([(1, 7)])]
    )
    tensors = {"wide": torch.zeros(2), "turned": torch.zeros(2, 2, dtype=torch.bfloat16)}
    here, others = device_parts(plan, tensors)
    assert ([part.parameter for part in here], [part.parameter for part in others]) == (["turned"], ["wide"])
    assert not device_parts(plan, {"turned": tensors["turned"].t()})[0]
    with pytest.raises(ProgramError, match="wide: expected a contiguous tensor in BF16"):
        DeviceDigest(plan, tensors)
