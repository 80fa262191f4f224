"""The GPU kernel under Triton's interpreter, against the reference; a script of its own, since Triton decides when it
is imported whether it interprets. Prints ``ok`` and the number of rows compared.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from test_kernels import FLOATS, random_rows

from transfer_exec.conversions import PAIRS, SOURCE_BYTES, TARGET_BYTES, code_of
from transfer_exec.kernels.reference import ReferenceKernels
from transfer_exec.kernels.triton import LINE_WORDS, SIDE, SMALL_ROWS, SMALL_WORDS, TritonKernels

GUARD = 0xA5


def compare(rows: np.ndarray, target: np.ndarray) -> int:
    """Every byte of the target, rows' own and those around them, as the reference leaves it."""
    TritonKernels("cpu").prepare(rows, packing=True).run()
    expected = np.full_like(target, GUARD)
    moved = rows.copy()
    moved[:, 3] += expected.ctypes.data - target.ctypes.data
    ReferenceKernels().prepare(moved, packing=True).run()
    different = np.flatnonzero(target != expected)
    assert not len(different), f"{len(different)} bytes differ, the first at {different[0]}"
    return len(rows)


def random_strides(seed: int) -> int:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 120, 1 << 17, dtype=np.uint8)
    target = np.full(1 << 20, GUARD, dtype=np.uint8)
    return compare(random_rows(rng, source, target, 12), target)


def pieces(size: int, count: int, gap: int, code: int, seed: int) -> int:
    """Contiguous pieces in random order, each a row, ``gap`` elements apart."""
    rng = np.random.default_rng(seed)
    width, out = int(SOURCE_BYTES[code]), int(TARGET_BYTES[code])
    source = rng.integers(0, 120, size * count * width, dtype=np.uint8)
    target = np.full((size + gap) * count * out + 8, GUARD, dtype=np.uint8)
    rows = np.zeros((count, 9), dtype=np.int64)
    rows[:, 0] = source.ctypes.data + rng.permutation(count) * size * width
    rows[:, 3] = target.ctypes.data + np.arange(count) * (size + gap) * out
    rows[:, [1, 4, 6, 7, 8]] = width, out, size, 1, code
    return compare(rows, target)


def transposes(rows: int, columns: int, code: int, swapped: bool) -> int:
    width = int(SOURCE_BYTES[code])
    rng = np.random.default_rng(rows)
    source = rng.integers(0, 120, rows * columns * width, dtype=np.uint8)
    target = np.full(rows * columns * width, GUARD, dtype=np.uint8)
    row = [source.ctypes.data, width, columns * width, target.ctypes.data, rows * width, width, columns, rows, code]
    if swapped:
        row = [row[0], row[2], row[1], row[3], row[5], row[4], rows, columns, code]
    return compare(np.array([row], dtype=np.int64), target)


def conversions(source: str, target: str) -> int:
    """Bits equal torch's, and a NaN keeps its sign; one of BF16 comes back from F32 as it was."""
    wide = np.random.default_rng(3).integers(0, 1 << 64, 1 << 10, dtype=np.uint64)
    edges = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    some = edges[::7]
    exact = torch.cat([some.view(kind).to(torch.float64) for kind in (torch.bfloat16, torch.float16)])
    middle = exact + (exact.roll(-1) - exact) / 2
    numbers = torch.cat([exact, middle, torch.from_numpy(wide.view(np.float64).copy())])
    values = edges.view(FLOATS[source]) if source in ("BF16", "F16") else numbers.to(FLOATS[source])
    if source == "F32":
        values = torch.cat([values, (edges.to(torch.int32) << 16).view(torch.float32)])
    out = torch.zeros(len(values), dtype=FLOATS[target])
    code = code_of(source, target)
    row = [values.data_ptr(), values.element_size(), 0, out.data_ptr(), out.element_size(), 0, len(values), 1, code]
    TritonKernels("cpu").prepare(np.array([row], dtype=np.int64), packing=True).run()
    expected, nan = values.to(FLOATS[target]), values.isnan()
    assert torch.equal(out[~nan].view(torch.uint8), expected[~nan].view(torch.uint8))
    assert bool(out[nan].isnan().all())
    assert torch.equal(out[nan].signbit(), values[nan].signbit())
    if (source, target) == ("F32", "BF16"):
        first = (values[nan].view(torch.int32) >> 16).to(torch.int16)
        assert torch.equal(out[nan].view(torch.int16), torch.where(first & 0x7F == 0, first | 0x40, first))
    return 1


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy says so when a number is too large for an F16
    compared = sum(random_strides(seed) for seed in range(12))
    for code in range(4):
        compared += pieces(LINE_WORDS * 2 + 3, 3, 0, code, code) + pieces(LINE_WORDS // 2, 5, 3, code, code)
        compared += pieces(SMALL_WORDS, SMALL_ROWS + 1, 0, code, code) + pieces(1, 3 * SMALL_ROWS, 1, code, code)
        for swapped in (False, True):
            compared += transposes(SIDE * 2 + 1, SIDE - 1, code, swapped) + transposes(3, 200, code, swapped)
    compared += pieces(64, 300, 0, 0, 9) + pieces(17, 40, 5, code_of("F32", "BF16"), 1)
    compared += pieces(LINE_WORDS + 5, 3, 1, code_of("BF16", "F32"), 2)
    compared += sum(conversions(*pair) for pair in PAIRS)
    TritonKernels("cpu").prepare(np.empty((0, 9), dtype=np.int64), packing=True).run()
    print("ok", compared)


if __name__ == "__main__":
    main()
