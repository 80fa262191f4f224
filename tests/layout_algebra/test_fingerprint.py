"""fingerprint: the same number for any layout, another for any change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.errors import MapError
from layout_algebra.fingerprint import fingerprint, fingerprint_cells, plan_fingerprints, wire_bits
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

SIZE = 9000
SPACE = CheckpointSpace(
    [TensorSpec("a", (3, 1500), "BF16"), TensorSpec("b", (SIZE - 4510,), "BF16"), TensorSpec("f", (10,), "F32")]
)
RNG = np.random.default_rng(7)
VALUES = RNG.integers(0, 2**16, SIZE - 10, dtype=np.uint16)
FLOATS = RNG.standard_normal(10).astype(np.float32)


def weight(i: int) -> int:
    """The definition, on Python integers."""
    mask = 2**64 - 1

    def mix(state: int) -> int:
        state = state * 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    return (mix((i >> 12) + 1) | 1) * (mix((i & 4095) + 1) >> 32 | 1) & mask


def whole() -> tuple[SourceMap, dict[str, np.ndarray]]:
    ids = {"p": np.arange(1, SIZE - 9), "q": np.arange(SIZE - 9, SIZE + 1)}
    return SourceMap.from_ids(SPACE, ids), {"p": VALUES, "q": FLOATS}


def test_is_the_weighted_sum() -> None:
    got = fingerprint(*whole())
    bits = [*VALUES.tolist(), *FLOATS.view(np.uint32).tolist()]
    for name in SPACE.names:
        start, stop = SPACE.id_range(name)
        assert got[name] == sum(bits[i - 1] * weight(i) for i in range(start, stop)) % 2**64


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_shards_add_up_in_any_layout(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, ranks, SIZE - 10)
    total: dict[str, int] = {}
    for rank in range(ranks):
        mine = np.flatnonzero(owner == rank) + 1
        mine = rng.permutation(mine) if seed % 2 else mine
        ids = np.concatenate([mine, mine[:5]]).reshape(1, -1)
        part = fingerprint(SourceMap.from_ids(SPACE, {"x": ids}), {"x": VALUES[ids - 1]})
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    want = fingerprint(*whole())
    assert total == {name: want[name] for name in ("a", "b")}


CORRUPTIONS = ("flipped bit", "swapped pair", "stale tensor", "shifted run")


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_one_of_2500_corruptions_of_a_kind_is_seen(kind: str) -> None:
    """Three dtypes, a transposed parameter and two sets of ids; one digest plan for all of it."""
    space = CheckpointSpace(
        [TensorSpec("a", (30, 50), "BF16"), TensorSpec("b", (700,), "F32"), TensorSpec("c", (900,), "U8")]
    )
    ids = {"at": np.arange(1, 1501).reshape(30, 50).T, "b": np.arange(1501, 2201), "c": np.arange(2201, 3101)}
    source_map = SourceMap.from_ids(space, ids)
    rng = np.random.default_rng(CORRUPTIONS.index(kind))
    width = {"at": np.uint16, "b": np.uint32, "c": np.uint8}

    def version() -> dict[str, np.ndarray]:
        return {n: rng.integers(0, np.iinfo(w).max, ids[n].shape, dtype=w, endpoint=True) for n, w in width.items()}

    old, memory = version(), version()
    plan = plan_fingerprints(source_map, [RunTable.from_ids(np.arange(1 + part, 3101, 2)) for part in range(2)])
    assert set(plan.parameters) == set(ids)
    want = plan.sums(memory)
    for _ in range(2500):
        name = str(rng.choice(list(ids)))
        right = memory[name].reshape(-1)
        wrong = right.copy()
        while np.array_equal(wrong, right):
            low, high = np.sort(rng.choice(len(wrong), 2, replace=False))
            if kind == "flipped bit":
                wrong[low] ^= wrong.dtype.type(1 << int(rng.integers(8 * wrong.itemsize)))
            elif kind == "swapped pair":
                wrong[[low, high]] = right[[high, low]]
            elif kind == "stale tensor":
                wrong[low : high + 1] = old[name].reshape(-1)[low : high + 1]
            else:
                wrong[low : high + 1] = np.roll(right[low : high + 1], 1)
        assert (plan.sums({**memory, name: wrong.reshape(ids[name].shape)}) != want).any()
    assert np.array_equal(plan.sums(memory), want)


def test_cells_are_parts_of_tensors() -> None:
    source_map, memory = whole()
    cells = [RunTable.from_ids(np.arange(1 + rank, SIZE + 1, 3)) for rank in range(3)]
    sums = fingerprint_cells(source_map, memory, cells)
    assert sum(int(value) for value in sums) % 2**64 == sum(fingerprint(source_map, memory).values()) % 2**64
    assert fingerprint_cells(source_map, memory, []).shape == (0,)


def test_wider_and_strided_memory_counts_in_wire_bits() -> None:
    want = fingerprint(*whole())
    ids = np.arange(1, SIZE - 9)
    wide = (VALUES.astype(np.uint32) << 16).view(np.float32)
    nan = np.isnan(wide)
    held = SourceMap.from_ids(SPACE, {"p": ids[~nan]}, {"p": "F32"})
    narrow = SourceMap.from_ids(SPACE, {"p": ids[~nan]})
    assert fingerprint(held, {"p": wide[~nan]}) == fingerprint(narrow, {"p": VALUES[~nan]})
    strided = np.stack([VALUES, VALUES[::-1]], axis=1)[:, 0]
    assert fingerprint(SourceMap.from_ids(SPACE, {"p": ids}), {"p": strided})["a"] == want["a"]


@pytest.mark.parametrize(("wire", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F64", torch.float64)])
def test_conversions_round_as_torch_does(wire: str, dtype: torch.dtype) -> None:
    bits = np.concatenate(
        [RNG.integers(0, 2**32, 100_000, dtype=np.uint32), np.array([0, 1 << 31, 0x7F800000, 0xFF800000])]
    )
    values = bits.astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    got = wire_bits(values, "F32", wire)
    want = torch.from_numpy(values).to(dtype)
    assert np.array_equal(got, want.view({2: torch.uint16, 8: torch.uint64}[got.itemsize]).numpy())


def test_missing_or_misshapen_memory_is_named() -> None:
    source_map, memory = whole()
    with pytest.raises(MapError, match="q: no memory given"):
        fingerprint(source_map, {"p": VALUES})
    with pytest.raises(MapError, match=r"p: memory is uint16 of shape \(5,\)"):
        fingerprint(source_map, {**memory, "p": VALUES[:5]})
    with pytest.raises(MapError, match="p: memory is float32"):
        fingerprint(source_map, {**memory, "p": VALUES.astype(np.float32)})
