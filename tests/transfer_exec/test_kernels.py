"""Kernels: every conversion bit-equal to torch, every stride bit-equal to the reference, jitted and interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from layout_algebra.fingerprint import wire_bits
from transfer_exec.conversions import COPY_WIDTHS, PAIRS, SOURCE_BYTES, TARGET_BYTES, code_of
from transfer_exec.errors import ProgramError
from transfer_exec.kernels._shares import split_evenly
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
    CpuKernels().prepare(np.array([row], dtype=np.int64), packing=True).run()
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


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] in ("BF16", "F16") and pair[0][0] == "F"])
def test_digests_read_wide_numbers_as_kernels_narrow_them(pair: tuple[str, str]) -> None:
    """All bits, those of NaN too: a trainer digests its masters, a rollout what was packed of them."""
    if pair == ("F16", "BF16"):
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    else:
        raw = np.random.default_rng(1).integers(0, 2**64, 100_000, dtype=np.uint64)
        values = torch.from_numpy(raw.view(np.float64) if pair[0] == "F64" else raw.view(np.float32))
        near = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(values.dtype)
        values = torch.cat([values, near, torch.tensor([1.0009765625 + 2**-11 + 2**-40]).to(values.dtype)])
    got = convert(values, *pair).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(got, wire_bits(values.numpy(), *pair))


def test_every_bf16_pattern_comes_back_from_f32() -> None:
    """Signaling NaNs too: a rollout's F32 digests are those of the BF16 that was sent."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide = convert(patterns, "BF16", "F32")
    assert torch.equal(wide.view(torch.int32), patterns.view(torch.int16).to(torch.int32) << 16)
    assert torch.equal(convert(wide, "F32", "BF16").view(torch.int16), patterns.view(torch.int16))
    assert np.array_equal(wire_bits(wide.numpy(), "F32", "BF16"), patterns.view(torch.int16).numpy().view(np.uint16))
    lost = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert lost.isnan().all(), "NaNs whose first bits are all zero"
    assert convert(lost, "F32", "BF16").isnan().all()


def test_no_conversion_between_other_types() -> None:
    with pytest.raises(ProgramError, match="no conversion from I32 to F32"):
        code_of("I32", "F32")


def random_rows(
    rng: np.random.Generator, source: np.ndarray, target: np.ndarray, count: int, *, aligned: bool = True
) -> np.ndarray:
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
            assert reach + 8 <= space
            start = begin + (-begin % 8 if aligned else int(rng.integers(0, 9)))
            start += (length - 1) * inner * int(signs[0] < 0) + (outer - 1) * step * int(signs[1] < 0)
            sides += [base.ctypes.data + start, inner * int(signs[0]), step * int(signs[1])]
        rows.append([*sides, length, outer, code])
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize("seed", range(40))
def test_any_strides_agree_with_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packing = seed % 2 == 0  # small rounds are packed through the cache, and assembled past it
    source = rng.integers(0, 120, 1 << 17, dtype=np.uint8)  # no exponent of all ones: NaN payloads are compared above
    fast, slow = (np.full(1 << 20, 0xA5, dtype=np.uint8) for _ in range(2))
    rows = random_rows(rng, source, fast, 12, aligned=False)
    CpuKernels(threads=int(rng.integers(1, 3))).prepare(rows, packing=packing).run()
    rows[:, 3] += slow.ctypes.data - fast.ctypes.data
    ReferenceKernels().prepare(rows, packing=packing).run()
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
        kernels.prepare(bound, packing=True).run()
        assert np.array_equal(source, target)


def filled(rng: np.random.Generator, size: int) -> np.ndarray:
    """Random bytes, from a cache line on."""
    raw = rng.integers(0, 256, size + 64, dtype=np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size]


@pytest.mark.parametrize("packing", [True, False])
def test_pieces_of_every_size_and_alignment(packing: bool) -> None:
    """Sizes around every branch, each at another place of a line; what stands between the targets is not touched."""
    rng = np.random.default_rng(3)
    sizes = [*range(1, 200), 255, 256, 257, 320, 1024, 1088, 4097]
    source, target, expected = (
        filled(rng, 1 << 20),
        np.zeros(1 << 20, dtype=np.uint8),
        np.zeros(1 << 20, dtype=np.uint8),
    )
    rows, at = [], 0
    for number, size in enumerate([*sizes, *sizes]):
        at += int(rng.integers(1, 100)) if number % 3 else -at % 64
        start = int(rng.integers(0, len(source) - size)) if number % 2 else 64 * number
        rows.append([source.ctypes.data + start, 1, 0, target.ctypes.data + at, 1, 0, size, 1, 0])
        expected[at : at + size] = source[start : start + size]
        at += size
    CpuKernels().prepare(np.array(rows, dtype=np.int64), packing=packing).run()
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("size", [64, 128, 192, 1024, 1344, 48])
def test_many_pieces_of_one_size(size: int) -> None:
    """Whole cache lines in random order, and one group of them that is not."""
    rng = np.random.default_rng(size)
    source = filled(rng, 300 * size)
    target = np.zeros(300 * size + 192, dtype=np.uint8)
    target = target[-target.ctypes.data % 64 :]
    order = rng.permutation(300)
    for offset in (0, 8):
        rows = np.zeros((300, 9), dtype=np.int64)
        rows[:, 0], rows[:, 1] = source.ctypes.data + order * size, 1
        rows[:, 3], rows[:, 4] = target.ctypes.data + offset + np.arange(300) * size, 1
        rows[:, 6:8] = size, 1
        CpuKernels().prepare(rows, packing=False).run()
        assert np.array_equal(target[offset : offset + 300 * size].reshape(300, size), source.reshape(300, size)[order])


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(1, 300), (33, 70), (129, 513), (300, 31), (256, 256), (5, 1000)])
def test_transposes(item: int, height: int, width: int) -> None:
    """Matrices with room between their rows, at any address; either axis may be the rows' inner one."""
    rng = np.random.default_rng([item, height, width])
    for number in range(4):
        from_pitch, to_pitch = (size * item + int(rng.integers(0, 80)) * (number % 2) for size in (width, height))
        source = filled(rng, height * from_pitch + 64)
        target = np.full(width * to_pitch + 128, 0xA5, dtype=np.uint8)
        begin = int(rng.integers(0, 64)) if number < 2 else -target.ctypes.data % 64
        row = [source.ctypes.data, item, from_pitch, target.ctypes.data + begin, to_pitch, item, width, height]
        if number % 2:
            row = [row[k] for k in (0, 2, 1, 3, 5, 4, 7, 6)]
        CpuKernels().prepare(np.array([[*row, item.bit_length() - 1]], dtype=np.int64), packing=number == 0).run()
        expected = np.full_like(target, 0xA5)
        cells = np.lib.stride_tricks.as_strided(source, (height, width, item), (from_pitch, item, 1))
        room = np.lib.stride_tricks.as_strided(expected[begin:], (width, height, item), (to_pitch, item, 1))
        room[...] = cells.transpose(1, 0, 2)
        assert np.array_equal(target, expected)


@pytest.mark.parametrize("pair", PAIRS)
def test_casts_of_every_length_and_alignment(pair: tuple[str, str]) -> None:
    """The vector loops, their heads and their tails do what single elements do."""
    rng = np.random.default_rng(7)
    of, to = (FLOATS[name].itemsize for name in pair)
    numbers = torch.from_numpy(rng.standard_normal(4096)).to(FLOATS[pair[0]])
    source = numbers.view(torch.uint8).numpy()
    expected = numbers.to(FLOATS[pair[1]]).view(torch.uint8).numpy()
    for length in (1, 15, 16, 17, 63, 64, 65, 200, 1000):
        for offset in (0, to, 3, 32 - to):
            target = np.zeros(1000 * to + 128, dtype=np.uint8)
            begin = -target.ctypes.data % 64 + offset
            row = [source.ctypes.data + of, of, 0, target.ctypes.data + begin, to, 0, length, 1, code_of(*pair)]
            CpuKernels().prepare(np.array([row], dtype=np.int64), packing=False).run()
            assert np.array_equal(target[begin : begin + length * to], expected[to : (length + 1) * to])
            assert not target[:begin].any()
            assert not target[begin + length * to :].any()


@pytest.mark.parametrize("shares", [1, 2, 3, 7, 16])
def test_shares_have_every_element_once_and_equal_bytes(shares: int) -> None:
    """One long run, one matrix, one transpose and many small pieces: cut, they copy what they copied whole."""
    rng = np.random.default_rng(shares)
    source = filled(rng, 3 << 20)
    rows = [
        [0, 2, 0, 4, 2, 0, 300_000, 1, 1],
        [600_000, 1, 3000, 600_064, 1, 2000, 2000, 200, 0],
        [1_200_000, 2, 1000, 1_200_064, 600, 2, 500, 300, 1],
        [1_500_000, 4, 0, 1_500_064, 2, 0, 90_000, 1, code_of("F32", "BF16")],
        *([2_000_000 + 100 * k, 1, 0, 2_000_000 + 100 * k, 1, 0, 96, 1, 0] for k in range(8000)),
    ]
    table = np.array(rows, dtype=np.int64)
    table[:, 0] += source.ctypes.data
    source.view(np.uint8)[:] &= 0x3F  # no NaN among what is converted
    whole, cut = np.zeros(3 << 20, dtype=np.uint8), np.zeros(3 << 20, dtype=np.uint8)
    parts = split_evenly(table, shares)
    assert len(parts) == shares
    sizes = [int((p[:, 6] * p[:, 7] * np.maximum(SOURCE_BYTES, TARGET_BYTES)[p[:, 8]]).sum()) for p in parts]
    assert max(sizes) - sum(sizes) / shares < 33_000, "a transpose is cut where 32 rows begin"
    for target, given in ((whole, [table]), (cut, parts)):
        for part in given:
            moved = part.copy()
            moved[:, 3] += target.ctypes.data
            ReferenceKernels().prepare(moved, packing=True).run()
    assert np.array_equal(whole, cut)
    assert len(split_evenly(table[:1], shares)) == shares, "one row is cut too"
    fast = np.zeros_like(whole)
    table[:, 3] += fast.ctypes.data
    job = CpuKernels(threads=3).prepare(table, packing=True)
    for _ in range(2):
        job.run()
    assert np.array_equal(whole, fast)


def test_ranges_and_words() -> None:
    source, target = np.arange(4096, dtype=np.uint16).view(np.uint8), np.zeros((2, 8192), dtype=np.uint8)
    ranges = np.array([[0, 60, 4], [10, 0, 0], [32, 8, 16], [101, 64, 999], [3000, 1071, 5001]], dtype=np.int64)
    for streams in (False, True):
        rows = ranges + np.array([source.ctypes.data, target[int(streams)].ctypes.data, 0])
        copy_ranges(rows, streams)
        copy_ranges(rows[:0], streams)
    expected = np.zeros(8192, dtype=np.uint8)
    for begin, to, size in ranges.tolist():
        expected[to : to + size] = source[begin : begin + size]
    assert np.array_equal(target[0], expected)
    assert np.array_equal(target[1], expected)
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
t.test_pieces_of_every_size_and_alignment(False)
t.test_many_pieces_of_one_size(128)
for item in (1, 2, 4, 8):
    t.test_transposes(item, 33, 70)
t.test_casts_of_every_length_and_alignment(("F32", "BF16"))
t.test_ranges_and_words()
from test_reading import test_batches_digest_what_they_move
np.seterr(over="ignore")
for seed in range(4):
    test_batches_digest_what_they_move(seed)
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


PLAIN = """
import sys
sys.path.insert(0, "tests/transfer_exec")
import numba
from numba.core.registry import cpu_target
assert "+f16c" not in cpu_target.target_context.codegen().magic_tuple()[2]
import test_kernels as t
t.test_every_16_bit_pattern("F16", "F32")
t.test_wide_sources_around_every_rounding_edge("F32", "F16")
t.test_casts_of_every_length_and_alignment(("F32", "F16"))
t.test_transposes(2, 33, 70)
t.test_pieces_of_every_size_and_alignment(False)
print("plain")
"""


def test_a_processor_without_extensions() -> None:
    """Compiled for the least that a processor of this kind has."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "plain" in done.stdout
