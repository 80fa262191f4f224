"""fingerprint: the same number for any layout, another for any change."""

from __future__ import annotations

from dataclasses import replace
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra._digest_kernels import block_weights
from layout_algebra.errors import MapError
from layout_algebra.fingerprint import fingerprint, fingerprint_cells, plan_fingerprints, wire_bits
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.interpreted import MODES, kernels_run

SIZE = 9000
SPACE = CheckpointSpace(
    [TensorSpec("a", (3, 1500), "BF16"), TensorSpec("b", (SIZE - 4510,), "BF16"), TensorSpec("f", (10,), "F32")]
)
RNG = np.random.default_rng(7)
VALUES = RNG.integers(0, 2**16, SIZE - 10, dtype=np.uint16)
FLOATS = RNG.standard_normal(10).astype(np.float32)


def weight(i: int, width: int) -> int:
    """The definition, on Python integers: of id ``i`` in a dtype of ``width`` bytes."""
    mask = 2**64 - 1

    def mix(state: int) -> int:
        state = state * 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    word, place = divmod((i & 4095) * min(width, 4), 4)
    return (mix((i >> 12) + 1) | 1) * ((mix(word + 1) >> 32 | 1) << 8 * place) & mask


def whole() -> tuple[SourceMap, dict[str, np.ndarray]]:
    ids = {"p": np.arange(1, SIZE - 9), "q": np.arange(SIZE - 9, SIZE + 1)}
    return SourceMap.from_ids(SPACE, ids), {"p": VALUES, "q": FLOATS}


def test_is_the_weighted_sum() -> None:
    got = fingerprint(*whole())
    bits = [*VALUES.tolist(), *FLOATS.view(np.uint32).tolist()]
    for name in SPACE.names:
        start, stop = SPACE.id_range(name)
        width = SPACE.spec(name).element_type.item_bytes
        assert got[name] == sum(bits[i - 1] * weight(i, width) for i in range(start, stop)) % 2**64


@settings(max_examples=30)
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


def test_words_weights_are_odd_and_all_different() -> None:
    table = block_weights()
    assert len(set(table.tolist())) == 4096
    assert np.all(table & 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "width"), [("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)])
def test_every_width_place_and_stride_is_the_weighted_sum(dtype: str, width: int, mode: str) -> None:
    """Runs that begin anywhere in a word, at any address, backwards, spread out, and side by side as columns."""
    space = CheckpointSpace([TensorSpec("w", (9000,), dtype)])
    rng = np.random.default_rng(width)
    layouts = [np.arange(first, first + length) for first in (1, 2, 3, 4, 4090, 8189) for length in (1, 2, 7, 40)]
    layouts += [np.arange(4300, 4000, -1), np.arange(4000, 4400).reshape(20, 20).T]
    layouts += [np.arange(1, 9000)[: 70 * 128].reshape(70, 128).T, np.arange(3500, 5000).reshape(3, 500).T]
    with kernels_run(mode):
        for ids in layouts:
            room = rng.integers(0, 256, (ids.size + 9) * width, dtype=np.uint8)
            for skip in range(0, 8, width):
                memory = room[skip : skip + ids.size * width].view(f"u{width}").reshape(ids.shape)
                got = fingerprint(SourceMap.from_ids(space, {"p": ids}), {"p": memory})["w"]
                pairs = zip(ids.reshape(-1).tolist(), memory.reshape(-1).tolist(), strict=True)
                assert got == sum(bits * weight(i, width) for i, bits in pairs) % 2**64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "width"), [("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)])
def test_long_runs_are_the_weighted_sum(dtype: str, width: int, mode: str) -> None:
    """Of several blocks of ids, which are read side by side, with parts of blocks around them."""
    space = CheckpointSpace([TensorSpec("w", (40_000,), dtype)])
    room = np.random.default_rng(width).integers(0, 256, 40_001 * width, dtype=np.uint8)
    weights = [weight(i, width) for i in range(40_001)]
    with kernels_run(mode):
        for first, length in ((4096, 16_384), (4096, 16_383), (777, 39_000), (1, 40_000)):
            memory = room[width : (length + 1) * width].view(f"u{width}")
            got = fingerprint(SourceMap.from_ids(space, {"p": np.arange(first, first + length)}), {"p": memory})["w"]
            bits = memory.tolist()
            assert got == sum(map(mul, bits, weights[first : first + length])) % 2**64


CORRUPTIONS = ("flipped bit", "swapped pair", "stale tensor", "shifted run")
DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "I64": np.uint64}


def layouts_of(first: int) -> dict[str, np.ndarray]:
    """A parameter of every kind, of ids that follow each other from ``first`` on: 2,704 of them."""
    ids = first + np.arange(2704).reshape(-1, 4, 13)
    parts = np.split(ids.reshape(-1), np.cumsum([520, 520, 520, 520, 312]))
    whole_rows = parts[0].reshape(40, 13)
    return {
        "contiguous": whole_rows,
        "transposed": parts[1].reshape(40, 13).T,
        "columns": parts[2].reshape(10, 52)[:, 5:31],
        "fused": np.concatenate([parts[3].reshape(20, 26)[:7], parts[3].reshape(20, 26)[13:]]),
        "stacked": np.stack([parts[4].reshape(3, 8, 13)[index].T for index in (2, 0, 1)]),
        "padded": np.pad(parts[5].reshape(24, 13), ((0, 3), (0, 2))),
        "every other": parts[2].reshape(10, 52)[:, 32::2],
        "backwards": parts[3].reshape(20, 26)[7:13].reshape(-1)[::-1],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_one_of_2500_corruptions_of_a_kind_is_seen(kind: str, dtype: str) -> None:
    """Of elements of every width, in parameters of every layout; in two sets of ids, with one digest plan for all."""
    store = DTYPES[dtype]
    ids = layouts_of(1500)  # over the edge of a block of weights
    space = CheckpointSpace([TensorSpec("a", (2000,), dtype), TensorSpec("b", (3000,), dtype)])
    source_map = SourceMap.from_ids(space, ids, dict.fromkeys(ids, dtype))
    rng = np.random.default_rng(CORRUPTIONS.index(kind))

    def version() -> dict[str, np.ndarray]:
        return {n: rng.integers(0, np.iinfo(store).max, i.shape, dtype=store, endpoint=True) for n, i in ids.items()}

    old, memory = version(), version()
    plan = plan_fingerprints(source_map, [RunTable.from_ids(np.arange(1 + part, 5001, 2)) for part in range(2)])
    assert set(plan.parameters) == set(ids)
    want = plan.sums(memory)
    for _ in range(2500):
        name = str(rng.choice(list(ids)))
        copied = np.flatnonzero(ids[name])  # what is padding does not count
        right = memory[name].reshape(-1)[copied]
        wrong = right.copy()
        while np.array_equal(wrong, right):
            low, high = np.sort(rng.choice(len(wrong), 2, replace=False))
            if kind == "flipped bit":
                wrong[low] ^= wrong.dtype.type(1 << int(rng.integers(8 * wrong.itemsize)))
            elif kind == "swapped pair":
                wrong[[low, high]] = right[[high, low]]
            elif kind == "stale tensor":
                wrong[low : high + 1] = old[name].reshape(-1)[copied][low : high + 1]
            else:
                wrong[low : high + 1] = np.roll(right[low : high + 1], 1)
        spoiled = memory[name].copy()
        spoiled.reshape(-1)[copied] = wrong
        assert (plan.sums({**memory, name: spoiled}) != want).any()
    assert np.array_equal(plan.sums(memory), want)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_add_up_and_are_of_one_size(count: int) -> None:
    space = CheckpointSpace([TensorSpec("a", (2000, 3000), "F32"), TensorSpec("b", (4000,), "BF16")])
    start = space.id_range("b")[0]
    ids = {
        "a": np.arange(1, 6_000_001).reshape(2000, 3000)[:, 100:2900],
        "b": np.arange(start, start + 4000)[::-1],
        "wide": np.arange(start, start + 4000),
    }
    source_map = SourceMap.from_ids(space, ids, {"a": "F32", "b": "BF16", "wide": "F32"})
    rng = np.random.default_rng(count)
    memory = {"a": rng.integers(0, 2**32, (2000, 2800), dtype=np.uint32)}
    memory |= {"b": rng.integers(0, 2**16, 4000, dtype=np.uint16), "wide": np.ones(4000, np.float32)}
    halves = [RunTable.from_intervals([each]) for each in ((1, 4_000_000), (4_000_000, start + 3990))]
    plan = plan_fingerprints(source_map, halves)
    shares = plan.shares(count)
    assert len(shares) == min(count, 5)  # of 4 MiB at least
    sizes = [sum(int(part.rows[:, 1].sum()) for part in share.parts) for share in shares]
    assert max(sizes[:-1], default=0) <= 1.2 * sum(sizes) / len(sizes) or count == 1
    total = np.sum([share.sums(memory) for share in shares], axis=0, dtype=np.uint64)
    assert np.array_equal(total, plan.sums(memory))


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_split_by_places(seed: int) -> None:
    """Every element is in one part; what is not even in memory, or of another dtype, stays with the rest."""
    space = CheckpointSpace([TensorSpec("a", (40, 50), "F32"), TensorSpec("b", (4000,), "BF16")])
    rng = np.random.default_rng(seed)
    start = space.id_range("b")[0]
    a = np.arange(1, 2001).reshape(40, 50)
    ids = {
        "a": [a, a[::2], a.T][seed % 3],
        "b": np.roll(np.arange(start, start + 4000), 5),
        "wide": np.arange(1) + start,
    }
    dtypes = {"a": "F32", "b": "BF16", "wide": "F32"}
    plan = plan_fingerprints(SourceMap.from_ids(space, ids, dtypes), [RunTable.from_intervals([(1, start + 3990)])])
    memory = {"a": rng.integers(0, 2**32, ids["a"].shape, dtype=np.uint32)}
    memory |= {"b": rng.integers(0, 2**16, 4000, dtype=np.uint16), "wide": np.ones(1, np.float32)}
    places = {}
    for name, array in memory.items():
        edges = np.unique(rng.integers(0, array.size + 1, 2 * int(rng.integers(0, 6))))
        places[name] = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    inside, rest = plan.split(places)
    for part in inside:
        assert part.parameter != "wide"
        begin, stop = part.rows[:, 2], part.rows[:, 2] + part.rows[:, 1]
        assert all(any(low <= x < high for low, high in places[part.parameter]) for x in begin)
        assert all(any(low < x <= high for low, high in places[part.parameter]) for x in stop)
    found = replace(plan, parts=inside).sums(memory) + rest.sums(memory)
    assert np.array_equal(found, plan.sums(memory))
    assert plan.split({})[0] == ()


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
    with pytest.raises(MapError, match="p: memory is >u2, in foreign byte order"):
        fingerprint(source_map, {**memory, "p": VALUES.astype(">u2")})
    with pytest.raises(MapError, match="p: memory is list; expected a numpy array"):
        fingerprint(source_map, {**memory, "p": VALUES.tolist()})
