"""Kernels: every conversion bit-equal to torch, every stride bit-equal to the reference, jitted and interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from transfer_exec.conversions import COPY_WIDTHS, PAIRS, SOURCE_BYTES, TARGET_BYTES, code_of
from transfer_exec.errors import ProgramError
from transfer_exec.kernels.cpu import CpuKernels, copy_ranges, publish_word, read_word
from transfer_exec.kernels.reference import ReferenceKernels

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ROOT = Path(__file__).resolve().parents[2]


def convert(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Through the CPU kernel, contiguous on both sides."""
    out = torch.zeros(len(values), dtype=FLOATS[target])
    code = code_of(source, target)
    row = [values.data_ptr(), values.element_size(), 0, out.data_ptr(), out.element_size(), 0, len(values), 1, code]
    CpuKernels().prepare(np.array([row], dtype=np.int64)).run()
    return out


def assert_converts_like_torch(values: torch.Tensor, source: str, target: str) -> None:
    """Bits equal torch's; a NaN stays a NaN of the same sign (its payload differs within torch itself)."""
    got, expected = convert(values, source, target), values.to(FLOATS[target])
    numbers = ~values.isnan()
    bits = BITS[got.element_size()]
    assert torch.equal(got[numbers].view(bits), expected[numbers].view(bits))
    assert bool(got[~numbers].isnan().all())
    assert torch.equal(got[~numbers].signbit(), values[~numbers].signbit())


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in ("BF16", "F16")])
def test_every_16_bit_pattern(source: str, target: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(FLOATS[source])
    assert_converts_like_torch(patterns, source, target)


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] in ("F32", "F64")])
def test_wide_sources_around_every_rounding_edge(source: str, target: str) -> None:
    """Random bits of all exponents, and every 16-bit value with its neighbours and midpoints."""
    rng = np.random.default_rng(5)
    unsigned = np.uint32 if source == "F32" else np.uint64
    raw = rng.integers(0, np.iinfo(unsigned).max, 200_000, dtype=unsigned, endpoint=True)
    random_bits = torch.from_numpy(raw.view(np.float32 if source == "F32" else np.float64).copy())
    steps = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    edges = []
    for narrow in (torch.bfloat16, torch.float16):
        exact = steps.view(narrow).to(FLOATS[source])
        after = (steps + 1).view(narrow).to(FLOATS[source])
        middle = exact + (after - exact) / 2
        edges += [exact, middle, torch.nextafter(middle, exact), torch.nextafter(middle, after)]
    assert_converts_like_torch(torch.cat([random_bits, *edges]), source, target)


def test_no_conversion_between_other_types() -> None:
    with pytest.raises(ProgramError, match="no conversion from I32 to F32"):
        code_of("I32", "F32")


def random_rows(rng: np.random.Generator, source: np.ndarray, target: np.ndarray, count: int) -> np.ndarray:
    """Rows with random strides, signs and shapes; targets disjoint: each row owns a slice of the target."""
    rows = []
    room = len(target) // count
    for number in range(count):
        code = int(rng.integers(0, len(COPY_WIDTHS) + len(PAIRS)))
        width_in, width_out = int(SOURCE_BYTES[code]), int(TARGET_BYTES[code])
        length, outer = int(rng.integers(1, 70)), int(rng.integers(1, 70))
        while length * outer * width_out * 6 > room:
            length, outer = max(length // 2, 1), max(outer // 2, 1)
        sides = []
        for width, base, space, disjoint in ((width_in, source, len(source), False), (width_out, target, room, True)):
            inner = width * int(rng.integers(1, 3))
            step = inner * (length + int(rng.integers(0, 2)))
            if rng.integers(0, 2):
                step, inner = width * int(rng.integers(1, 3)), width * 2 * (outer + int(rng.integers(0, 2)))
            if not disjoint and rng.integers(0, 4) == 0:
                inner = 0
            signs = rng.choice([-1, 1], 2)
            begin = 0 if not disjoint else number * room
            reach = (length - 1) * inner + (outer - 1) * step + width
            assert reach <= space
            start = begin - begin % 8 + (8 if begin % 8 else 0)
            start += (length - 1) * inner * int(signs[0] < 0) + (outer - 1) * step * int(signs[1] < 0)
            sides += [base.ctypes.data + start, inner * int(signs[0]), step * int(signs[1])]
        rows.append([*sides, length, outer, code])
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize("seed", range(40))
def test_any_strides_agree_with_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 120, 1 << 17, dtype=np.uint8)  # no exponent of all ones: NaN payloads are compared above
    fast, slow = (np.full(1 << 20, 0xA5, dtype=np.uint8) for _ in range(2))
    rows = random_rows(rng, source, fast, 12)
    CpuKernels(threads=int(rng.integers(1, 3))).prepare(rows).run()
    rows[:, 3] += slow.ctypes.data - fast.ctypes.data
    ReferenceKernels().prepare(rows).run()
    assert np.array_equal(fast, slow)


def test_threads_share_the_work_and_agree() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    one, two = np.zeros_like(source), np.zeros_like(source)
    chunk = 1 << 18
    rows = [[source.ctypes.data + at, 1, 0, 0, 1, 0, chunk, 1, 0] for at in range(0, len(source), chunk)]
    for target, kernels in ((one, CpuKernels()), (two, CpuKernels(threads=3))):
        bound = np.array(rows, dtype=np.int64)
        bound[:, 3] = target.ctypes.data + np.arange(len(bound)) * chunk
        kernels.prepare(bound).run()
        assert np.array_equal(source, target)


def test_ranges_and_words() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    ranges = np.array([[0, 60, 4], [10, 0, 0], [32, 8, 16]], dtype=np.uint64)
    copy_ranges(ranges, source.ctypes.data, target.ctypes.data)
    expected = np.zeros(64, dtype=np.uint8)
    expected[60:] = source[:4]
    expected[8:24] = source[32:48]
    assert np.array_equal(target, expected)
    word = np.zeros(1, dtype=np.uint64)
    publish_word(word.ctypes.data, (1 << 63) - 1)
    assert read_word(word.ctypes.data) == (1 << 63) - 1 == int(word[0])


INTERPRETED = """
import sys
sys.path.insert(0, "tests/transfer_exec")
import numpy as np, torch, numba
assert numba.config.DISABLE_JIT
import test_kernels as t
patterns = torch.arange(0, 1 << 16, 37, dtype=torch.int32).to(torch.int16)
for source, target in t.PAIRS:
    if source in ("BF16", "F16"):
        t.assert_converts_like_torch(patterns.view(t.FLOATS[source]), source, target)
    else:
        numbers = torch.cat([patterns.view(torch.float16), patterns.view(torch.float16) * 3e-5]).to(t.FLOATS[source])
        t.assert_converts_like_torch(numbers * 1.0001, source, target)
for seed in range(2):
    t.test_any_strides_agree_with_the_reference(seed)
t.test_ranges_and_words()
print("interpreted")
"""


def test_the_same_loops_interpreted() -> None:
    """numba switched off: the kernels' Python meaning."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "interpreted" in done.stdout
