"""SourceMap: ids in, ids out; digests; bytes; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layout_algebra.errors import MapBytesError, MapError
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

SPACE = CheckpointSpace(
    [TensorSpec("a", (3, 4), "BF16"), TensorSpec("b.2", (5,), "BF16"), TensorSpec("b.10", (7,), "BF16")]
)
N = SPACE.total_elements

id_arrays = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), elements=st.integers(-1, N)
)
id_maps = st.dictionaries(st.text(min_size=1, max_size=6), id_arrays, max_size=4)


@given(id_maps)
def test_ids_come_back(ids: dict[str, np.ndarray]) -> None:
    made = SourceMap.from_ids(SPACE, ids)
    assert set(made.parameters) == set(ids)
    for name, array in ids.items():
        assert made.ids(name).shape == array.shape
        assert np.array_equal(made.ids(name), array)
        assert made.dtype(name) == "BF16"
        rebuilt = np.zeros(array.size, dtype=np.int64)
        for copy in made.slice_copies(name):
            rebuilt[copy.target.indices()] = copy.source.indices()
        assert np.array_equal(rebuilt, np.maximum(array.reshape(-1), 0))
    cover = made.coverage()
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(array.reshape(-1) for array in ids.values())])
    assert (cover.copied_elements, cover.empty_elements, cover.opaque_elements) == (
        int((flat > 0).sum()),
        int((flat == 0).sum()),
        int((flat == -1).sum()),
    )
    used = {SPACE.locate(int(i))[0] for i in flat if i > 0}
    assert set(cover.unused_tensors) == set(SPACE.names) - used
    assert set(made.opaque) == {name for name, array in ids.items() if (array == -1).any()}
    assert made.held().ids().tolist() == sorted({int(i) for i in flat if i > 0})


@given(id_maps)
def test_bytes_round_trip_and_order_has_no_effect(ids: dict[str, np.ndarray]) -> None:
    made = SourceMap.from_ids(SPACE, ids)
    again = SourceMap.from_bytes(made.to_bytes())
    assert again.same_as(made)
    assert again.space == SPACE
    assert all(np.array_equal(again.ids(name), ids[name]) for name in ids)
    turned = SourceMap.from_ids(SPACE, dict(reversed(ids.items())))
    assert turned.digest() == made.digest()
    assert turned.to_bytes() == made.to_bytes()


@given(id_arrays, id_arrays)
def test_digests_are_equal_exactly_when_ids_are(left: np.ndarray, right: np.ndarray) -> None:
    same = left.shape == right.shape and np.array_equal(left, right)
    a, b = (SourceMap.from_ids(SPACE, {"p": ids}) for ids in (left, right))
    assert (a.digest() == b.digest()) == same


@given(id_maps)
def test_strips_say_where_every_id_lives(ids: dict[str, np.ndarray]) -> None:
    made = SourceMap.from_ids(SPACE, ids)
    wanted = sorted(
        (int(i), position, flat)
        for position, name in enumerate(made.parameters)
        for flat, i in enumerate(ids[name].reshape(-1))
        if i > 0
    )
    rows = made.strips.rows
    listed = sorted((i + k, p, f + k * s) for i, n, p, f, s in rows.tolist() for k in range(n))
    assert listed == wanted
    homes = [(i + k, p, f + k * s) for i, n, p, f, s in made.strips.disjoint().rows.tolist() for k in range(n)]
    assert sorted(i for i, _, _ in homes) == sorted({i for i, _, _ in wanted})
    assert set(homes) <= set(wanted)
    some = RunTable.from_ids(sorted({i for i, _, _ in wanted})[::2])
    cut, ranks = made.strips.within(some.intervals)
    order = some.ids().tolist()
    got = sorted((i + k, p, f + k * s) for i, n, p, f, s in cut.rows.tolist() for k in range(n))
    assert got == [row for row in wanted if row[0] in set(order)]
    assert all(order[rank] == row[0] for rank, row in zip(ranks.tolist(), cut.rows.tolist(), strict=True))


def test_a_stack_of_experts_is_one_slice_copy() -> None:
    space = CheckpointSpace(
        TensorSpec(f"experts.{e}.{name}", (4, 6), "BF16") for e in range(12) for name in ("down", "up")
    )
    ids = np.stack([np.arange(24).reshape(4, 6)[:, 2:4] + space.element_id(f"experts.{e}.down", 0) for e in range(12)])
    made = SourceMap.from_ids(space, {"w": ids, "t": ids.transpose(0, 2, 1).copy()})
    assert [str(copy) for copy in made.slice_copies("w")] == ["0+(12:8,4:2,2:1) <- 3+(12:48,4:6,2:1)"]
    assert [copy.shape for copy in made.slice_copies("t")] == [(12, 2, 4)]


def test_dtypes_are_named_where_they_cannot_be_told() -> None:
    space = CheckpointSpace([TensorSpec("f", (2,), "F32"), TensorSpec("h", (2,), "BF16")])
    with pytest.raises(MapError, match="p: copies tensors of BF16, F32"):
        SourceMap.from_ids(space, {"p": np.array([1, 3])})
    assert SourceMap.from_ids(space, {"p": np.array([1, 3])}, {"p": "F32"}).dtype("p") == "F32"
    assert SourceMap.from_ids(space, {"p": np.array([3, 4])}).dtype("p") == "BF16"


def test_refusals_name_the_parameter() -> None:
    for bad in (np.array([N + 1]), np.array([-2]), np.array([1, 2**64 - 1], dtype=np.uint64)):
        with pytest.raises(MapError, match=r"p: ids run from"):
            SourceMap.from_ids(SPACE, {"p": bad})
    with pytest.raises(MapError, match=r"p: ids are no array: .*inhomogeneous"):
        SourceMap.from_ids(SPACE, {"p": [[1, 2], [3]]})  # type: ignore[dict-item]
    for arguments, words in (
        ((None, {}), "space is a NoneType"),
        ((SPACE, None), "ids is a NoneType"),
        ((SPACE, {"p": np.array([1])}, "F32"), "dtypes is a str"),
    ):
        with pytest.raises(MapError, match=words):
            SourceMap.from_ids(*arguments)  # type: ignore[arg-type]
    with pytest.raises(MapError, match="p: ids are float64"):
        SourceMap.from_ids(SPACE, {"p": np.array([1.0])})  # type: ignore[dict-item]
    with pytest.raises(MapError, match="q: no such parameter"):
        SourceMap.from_ids(SPACE, {"p": np.array([1])}).ids("q")
    whole = SliceCopy(Strided(1, (4,), (1,)), Strided(0, (4,), (1,)))
    for shape, copies in (((3,), [whole]), ((4,), [whole, whole])):
        with pytest.raises(MapError, match="p: "):
            SourceMap(SPACE, {"p": ParameterMap(shape, "BF16", CopyTable.of(copies), RunTable.empty())})
    outside = SliceCopy(Strided(N, (2,), (1,)), Strided(0, (2,), (1,)))
    with pytest.raises(MapError, match="reads ids"):
        SourceMap(SPACE, {"p": ParameterMap((2,), "BF16", CopyTable.of([outside]), RunTable.empty())})
    with pytest.raises(MapError, match=r"depends on nothing\.here"):
        SourceMap(
            SPACE, {"p": ParameterMap((2,), "BF16", CopyTable.empty(), RunTable.from_ids([0]), ("nothing.here",))}
        )


def test_offsets_past_32_bits_are_exact() -> None:
    space = CheckpointSpace([TensorSpec(f"e.{e}", (4096, 6144), "BF16") for e in range(256)])
    stack = SliceCopy(
        Strided(1, (256, 4096 * 6144), (4096 * 6144, 1)), Strided(0, (256, 4096 * 6144), (4096 * 6144, 1))
    )
    entry = ParameterMap((256, 4096, 6144), "BF16", CopyTable.of([stack]), RunTable.empty())
    made = SourceMap.from_bytes(SourceMap(space, {"w": entry}).to_bytes())
    assert made.strips.rows.tolist() == [[1, 256 * 4096 * 6144, 0, 0, 1]]
    cut, _ = made.strips.within(np.array([[6_417_285_121, 6_417_285_123]]))
    assert cut.rows.tolist() == [[6_417_285_121, 2, 0, 6_417_285_120, 1]]


def test_altered_bytes_are_never_a_map() -> None:
    data = SourceMap.from_ids(SPACE, {"p": np.arange(1, 13).reshape(3, 4), "q": np.array([0, -1, 5])}).to_bytes()
    for cut in (0, 7, 23, 24, len(data) - 1):
        with pytest.raises(MapBytesError):
            SourceMap.from_bytes(data[:cut])
    rng = np.random.default_rng(0)
    for _ in range(500):
        wrong = bytearray(data)
        wrong[rng.integers(len(wrong))] ^= 1 << rng.integers(8)
        with pytest.raises(MapBytesError):
            SourceMap.from_bytes(bytes(wrong))
    with pytest.raises(MapBytesError):
        SourceMap.from_bytes("text")  # type: ignore[arg-type]
