"""Reading probed memory: second differences and elements without a code, against loops over every element."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra import diff2
from layout_algebra.diff2 import Diff2, encode
from layout_algebra.errors import ProbeError
from layout_algebra.residues import FLOAT_CODES, Decoding, Pass, plan_passes
from layout_algebra.views import view_of
from tests.interpreted import MODES, kernels_run
from tests.oracle import runs_of_equal, second_differences
from tests.strategies import Ids, id_matrices

PASSES = plan_passes(FLOAT_CODES, 10**6)
STRANGE = {
    "BF16": [0x0000, 0x8000, 0x7FC1, 0x7F80, 0xFF80, 0xBF80, 0x3BFF, 0x4380, 0xFFFF],
    "F16": [0x0000, 0x8000, 0x7E01, 0x7C00, 0xBC00, 0x1FF8, 0x5C00, 0x3C01, 0x3C04],
    "F32": [0x00000000, 0x80000000, 0x7FC00001, 0x3F800001, 0x3F808000, 0xBF800000, 0x3BFF0000, 0x43800000],
    "F64": [0, 1 << 63, 0x3FF0000000000001, 0xBFF0000000000000, 0x3F7FE00000000000, 0x4070000000000000],
}
"""Zeros, NaNs, infinities, negative codes, the numbers just outside the codes, and codes with one more mantissa bit."""


def decoding(dtype: str) -> Decoding:
    found = FLOAT_CODES.decoding(dtype)
    assert found is not None
    return found


def memory_of(ids: Ids, dtype: str, one: Pass, strange: int = 0) -> npt.NDArray[np.generic]:
    """What a loader leaves that copies these ids and fills the rest with numbers that are no code."""
    bits = FLOAT_CODES.table(dtype, one)[ids % one.modulus]
    others = np.array(STRANGE[dtype], dtype=bits.dtype)
    return np.where(ids > 0, bits, others[(np.arange(ids.size).reshape(ids.shape) // 2 + strange) % len(others)])


def check(ids: Ids, dtype: str, one: Pass, strange: int = 0) -> Diff2:
    memory = memory_of(ids, dtype, one, strange)
    found = encode(memory, ids.shape, decoding(dtype), one)
    rows, width = view_of(ids.shape)
    wanted = second_differences(ids.reshape(rows, width) % one.modulus).reshape(-1) % one.modulus
    places, values = found.entries()
    assert places.tolist() == np.flatnonzero(wanted).tolist()
    assert values.tolist() == wanted[wanted != 0].tolist()
    runs = runs_of_equal(memory.reshape(-1).tolist(), (ids <= 0).reshape(-1).tolist())
    signed = [[start, stop, value - (1 << 64) if value >> 63 else value] for start, stop, value in runs]
    assert found.outside().tolist() == signed
    for chunk in found.chunks:
        assert chunk.is_outside().tolist() == (ids.reshape(-1)[chunk.start : chunk.stop] <= 0).tolist()
    return found


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60)
@given(id_matrices(), st.sampled_from(sorted(STRANGE)), st.sampled_from(PASSES), st.integers(1, 40), st.integers(0, 8))
def test_encode_is_the_second_difference(mode: str, ids: Ids, dtype: str, one: Pass, chunk: int, strange: int) -> None:
    with pytest.MonkeyPatch.context() as patch, kernels_run(mode):
        patch.setattr(diff2, "CHUNK_ELEMENTS", chunk)
        check(ids, dtype, one, strange)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 5), "F16"), ((2, 3), "BF16"), ((3, 2), "F32"), ((5, 1), "F64")])
def test_encode_on_every_small_matrix(shape: tuple[int, int], dtype: str) -> None:
    for listed in itertools.product(range(3), repeat=shape[0] * shape[1]):
        check(np.array(listed, dtype=np.int64).reshape(shape), dtype, PASSES[sum(listed) % 3])


@pytest.mark.parametrize("dtype", sorted(STRANGE))
@pytest.mark.parametrize("shape", [(3, 5000), (1, 9000), (4500, 2), (700, 3, 5)])
@pytest.mark.parametrize("chunk", [1000, 1 << 21])
def test_blocks_and_chunks_leave_no_seams(
    dtype: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff2, "CHUNK_ELEMENTS", chunk)
    rng = np.random.default_rng(len(shape) * chunk + shape[0])
    size = int(np.prod(shape))
    ids = np.arange(1, size + 1, dtype=np.int64)
    for start in rng.integers(0, size, 6):
        ids[start : start + rng.integers(1, size // 4)] += rng.integers(1, 99)
    ids[size // 2 : size // 2 + size // 5] = 0
    check(ids.reshape(shape), dtype, PASSES[0])


def test_a_rectangle_leaves_at_most_sixteen_entries() -> None:
    ids = np.zeros((200, 300), dtype=np.int64)
    ids[20:150, 30:240] = 1 + 1000 * np.arange(130)[:, None] + np.arange(210)
    memory = np.where(ids > 0, memory_of(ids, "BF16", PASSES[2]), np.uint16(0x7FC1))
    found = encode(memory, ids.shape, decoding("BF16"), PASSES[2])
    assert len(found.entries()[0]) <= 16
    assert found.dense_bytes == 0
    assert len(found.outside()) == 130 + 1


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_irregular_content_is_kept_whole_up_to_a_limit(dtype: str) -> None:
    rng = np.random.default_rng(3)
    ids = rng.permutation(20000) + 1
    found = check(ids, dtype, PASSES[0])
    assert found.dense_bytes == 2 * ids.size
    assert found.nbytes == found.dense_bytes
    memory = memory_of(ids, dtype, PASSES[0])
    with pytest.raises(ProbeError, match=r"layers\.3\.odd: .* too irregular"):
        encode(memory, ids.shape, decoding(dtype), PASSES[0], name="layers.3.odd", dense_limit_bytes=2 * ids.size - 1)
    encode(memory, ids.shape, decoding(dtype), PASSES[0], dense_limit_bytes=2 * ids.size)


def test_irregular_bits_without_a_code_are_kept_whole() -> None:
    ids = np.zeros((50, 40), dtype=np.int64)
    rng = np.random.default_rng(4)
    memory = rng.integers(0, 1 << 16, ids.shape).astype(np.uint16) | np.uint16(0x8000)
    memory[10:20] = FLOAT_CODES.table("BF16", PASSES[0])[np.arange(1, 401).reshape(10, 40)]
    ids[10:20] = np.arange(1, 401).reshape(10, 40)
    found = encode(memory, ids.shape, decoding("BF16"), PASSES[0])
    assert found.chunks[0].bits.tolist() == memory.reshape(-1).tolist()
    assert found.outside().tolist() == runs_of_equal(memory.reshape(-1).tolist(), (ids == 0).reshape(-1).tolist())
    assert found.chunks[0].is_outside().tolist() == (ids == 0).reshape(-1).tolist()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_breaks_anywhere_in_long_runs_are_seen(seed: int, dtype: str) -> None:
    """Runs of consecutive ids are passed by comparing; a break of any kind, however near to the last, ends that."""
    random = np.random.default_rng(seed)
    width = int(random.choice([1, 2, 3, 17, 64, 1000, 2500]))
    ids = np.arange(1, 30 * 2500 // width * width + 1)
    for _ in range(int(random.integers(0, 12))):
        at = int(random.integers(0, len(ids)))
        kind = int(random.integers(4))
        if kind == 0:
            ids[at:] += int(random.choice([1, -1, 1919, 1917, 7919]))
        elif kind == 1:
            ids[at] = int(random.integers(0, 10**6))
        elif kind == 2:
            ids[at : at + int(random.integers(1, 5000))] = 0
        else:
            part = ids[at : at + int(random.integers(1, 5000))]
            part[:] = part[::-1].copy()
    check(np.abs(ids).reshape(-1, width), dtype, PASSES[seed % 3])


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff2, "CHUNK_ELEMENTS", 64)
    ids = np.arange(1, 3001).reshape(60, 50)
    ids[17:30] = 0
    memory = memory_of(ids, "F16", PASSES[1])
    alone = encode(memory, ids.shape, decoding("F16"), PASSES[1])
    with ThreadPoolExecutor(2) as executor:
        together = encode(memory, ids.shape, decoding("F16"), PASSES[1], executor=executor)
    assert len(alone.chunks) > 40
    for mine, theirs in zip(alone.entries(), together.entries(), strict=True):
        assert np.array_equal(mine, theirs)
    assert np.array_equal(alone.outside(), together.outside())


@pytest.mark.parametrize(
    "memory", [np.zeros(5, np.uint16), np.zeros(6, np.uint32), np.zeros((6, 2), np.uint16)[:, 0]], ids=str
)
def test_memory_must_fit(memory: npt.NDArray[np.generic]) -> None:
    with pytest.raises(ProbeError, match="bias: memory is"):
        encode(memory, (6,), decoding("BF16"), PASSES[0], name="bias")


def test_signed_views_and_empty_parameters() -> None:
    ids = np.arange(1, 13).reshape(3, 4)
    memory = memory_of(ids, "BF16", PASSES[0]).view(np.int16)
    assert encode(memory, ids.shape, decoding("BF16"), PASSES[0]).entries()[0].tolist() == [0, 4, 5]
    nothing = encode(np.empty((0, 4), np.uint16), (0, 4), decoding("BF16"), PASSES[0])
    assert nothing.chunks == ()
    assert nothing.entries()[0].tolist() == []
    assert nothing.outside().shape == (0, 3)
