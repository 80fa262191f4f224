"""The GPU backend: bit-equal to the reference under Triton's interpreter, and ahead-of-time code for two GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.transfer_exec.ahead_of_time import compile_ahead, usage
from transfer_exec.kernels._triton_kernels import move_tiles
from transfer_exec.kernels.reference import ReferenceKernels
from transfer_exec.kernels.triton import LINE_WORDS, SIDE, SMALL_ROWS, SMALL_WORDS, WARPS, TritonKernels, tiles_of

HERE = Path(__file__).resolve().parent
SHAPES = {"LINE_WORDS": LINE_WORDS, "SMALL_ROWS": SMALL_ROWS, "SMALL_WORDS": SMALL_WORDS, "SIDE": SIDE}


def test_every_kind_of_tile_agrees_with_the_reference() -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "triton_interpreted.py")], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("ok ")


@pytest.mark.parametrize("capability", [90, 100])
def test_it_compiles_ahead_of_time_without_spills(
    capability: int, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    signature = {"rows": "*i64", "tiles": "*i64", "first": "i64", **dict.fromkeys(SHAPES, "constexpr")}
    made = compile_ahead(move_tiles, signature, SHAPES, warps=WARPS, capability=capability)
    registers, spilled = usage(made, tmp_path, record_property)
    assert spilled == 0
    assert registers <= 128  # four programs of four warps a multiprocessor at least
    # Long runs move 16 bytes a thread and load; a transpose passes through shared memory.
    assert "ld.global.v2.b64" in made.asm["ptx"]
    assert "st.global.v2.b64" in made.asm["ptx"]
    assert made.metadata.shared >= SIDE * SIDE * 8


def test_tiles_cover_every_word_once() -> None:
    rng = np.random.default_rng(2)
    rows = np.zeros((300, 9), dtype=np.int64)
    rows[:, 6] = rng.integers(0, 3000, 300)
    rows[:, 7] = rng.integers(0, 40, 300)
    rows[:, 8] = 1
    rows[:, 0] = 1 << 20
    rows[:, 3] = 1 << 40
    rows[:, [1, 4]] = rng.choice([2, 4], (300, 2))
    rows[:, 2] = 8000
    rows[:, 5] = 9000
    table, tiles = tiles_of(rows)
    covered, word_bytes = np.zeros((2, len(table)), dtype=np.int64)
    for row, run, word, how in tiles.tolist():
        length, count = table[row, 6:].tolist()
        word_bytes[row : row + (run if how // 32 == 2 else 1)] = 1 << min(how % 32, 3)
        match how // 32:
            case 0:
                covered[row] += min(LINE_WORDS, length - word)
            case 1:
                covered[row] += min(LINE_WORDS // length, count - run) * length
            case 2:
                covered[row : row + run] += table[row : row + run, 6]
            case _:
                covered[row] += min(SIDE, length - word) * min(SIDE, count - run)
    assert np.array_equal(covered, table[:, 6] * table[:, 7])
    assert int((covered * word_bytes).sum()) == int((rows[:, 6] * rows[:, 7]).sum()) * 2


def test_rows_are_prepared_without_a_gpu_and_the_reference_is_an_equal_backend() -> None:
    empty = np.empty((0, 9), dtype=np.int64)
    job = TritonKernels("cpu").prepare(empty, packing=True)
    assert (job.rows.shape, job.tiles.shape) == ((0, 8), (0, 4))
    assert (TritonKernels("cpu").name, ReferenceKernels().name) == ("triton", "reference")
