"""Maps as bytes: they come back equal, they are small, and strangers' bytes do no harm."""

from __future__ import annotations

import hashlib
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.blocks import declare
from layout_algebra.errors import LayoutError, MapBytesError, MapError
from layout_algebra.map_bytes import MAGIC, MAX_BYTES, MapRow, decode_map, encode_map
from layout_algebra.name_bytes import decode_names, encode_names, join_name, split_name
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import Budget, Packed, pack_table, seal, unpack_table, unseal
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.layout_algebra.kimi_k2 import checkpoint, rollout_rank

SPACE = CheckpointSpace(
    [TensorSpec("a", (3, 4), "BF16"), TensorSpec("b.2", (5,), "F32"), TensorSpec("b.10", (7,), "BF16")]
)

odd_names = st.one_of(
    st.text(min_size=1, max_size=12),
    st.text(alphabet="0123456789.a", min_size=1, max_size=20),
    st.text(alphabet=st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), min_size=1, max_size=4),
    st.sampled_from(
        ["%d", "%", "{}", "layers.007.w", "l." + "9" * 16, "x" * 10_000, "\x00", "\u0661\u0662", "1", "1.2.3"]
    ),
)


def plain_of(data: bytes) -> bytes:
    return unseal(data, MAGIC, what="a source map", limit=MAX_BYTES, error=MapBytesError)


def resealed(change: object) -> bytes:
    return seal(MAGIC, msgspec.msgpack.encode(change))


def sample_map() -> SourceMap:
    ids = {
        "layers.0.p": np.arange(1, 13).reshape(3, 4),
        "layers.1.p": np.array([[1, 5, 9], [2, 6, 10]]),
        "q": np.array([0, -1, 13, 14, -1, -1, 0]),
        "opaque": np.full((2, 3), -1),
    }
    dtypes = {"layers.0.p": "BF16", "layers.1.p": "F32", "q": "F32", "opaque": "BF16"}
    made = SourceMap.from_ids(SPACE, ids, dtypes)
    rows = {name: made[name] for name in made.parameters}
    needy = rows["opaque"]
    rows["opaque"] = ParameterMap(needy.shape, needy.dtype, needy.copies, needy.opaque, ("b.2", "b.10"))
    return SourceMap(SPACE, rows)


@given(st.lists(odd_names, unique=True, max_size=12))
def test_names_come_back_exactly(names: list[str]) -> None:
    packed, order = encode_names(names)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=type(packed))
    again = decode_names(packed, Budget(1000), MapBytesError)
    assert again == [names[position] for position in order.tolist()]
    assert all(join_name(*split_name(name)) == name for name in names)


@given(st.integers(0, 5), st.integers(0, 4), st.data())
def test_tables_come_back_exactly(count: int, columns: int, data: st.DataObject) -> None:
    values = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
    cells = data.draw(st.lists(values, min_size=count * columns, max_size=count * columns))
    table = np.array(cells, dtype=np.int64).reshape(count, columns)
    assert np.array_equal(unpack_table(pack_table(table), Budget(20), MapBytesError), table)


def test_a_map_comes_back_equal() -> None:
    made = sample_map()
    again = SourceMap.from_bytes(made.to_bytes())
    assert again.same_as(made)
    assert again.space == SPACE
    for name in made.parameters:
        assert np.array_equal(again.ids(name), made.ids(name))
        assert again.dtype(name) == made.dtype(name)
    assert again.depends_on("opaque") == ("b.2", "b.10")
    assert SourceMap.from_bytes(bytearray(made.to_bytes())).same_as(made)


@given(st.permutations(["layers.0.p", "layers.1.p", "q", "opaque"]))
def test_order_of_parameters_changes_nothing(order: list[str]) -> None:
    made = sample_map()
    turned = SourceMap(SPACE, {name: made[name] for name in order})
    assert turned.digest() == made.digest()
    assert turned.to_bytes() == made.to_bytes()


def test_odd_and_long_names_survive() -> None:
    names = ["x" * 10_000, "l." + "9" * 40, "\ud800", "a\nb", "layers.007.w", "layers.7.w", "\u0661"]
    space = CheckpointSpace(TensorSpec(name, (2,), "BF16") for name in names)
    made = SourceMap.from_ids(space, {name: np.array([space.id_range(name)[0], 0]) for name in names})
    again = SourceMap.from_bytes(made.to_bytes())
    assert again.same_as(made)
    assert set(again.parameters) == set(names)


def test_a_rank_of_kimi_k2_with_its_checkpoint_is_small() -> None:
    """Bar: 200,000 bytes. The whole model is made by the same code; eight layers keep the test short."""
    layers = 8
    space = checkpoint(layers)
    assert len(checkpoint(1)) + 60 * 1166 == 69_975
    made = declare(space, rollout_rank(space, rank=7, degree=32, layers=layers))
    data = made.to_bytes()
    assert len(space) == 15 + 7 * 1166
    assert len(data) < 4_000
    again = SourceMap.from_bytes(data)
    assert again.same_as(made)
    assert again["model.layers.3.mlp.experts.w13_weight"].shape == (12, 4096, 7168)


@pytest.mark.slow
def test_the_whole_of_kimi_k2_is_small() -> None:
    space = checkpoint()
    assert len(space) == 69_975
    data = declare(space, rollout_rank(space, rank=7, degree=32)).to_bytes()
    assert len(data) < 10_000
    assert len(SourceMap.from_bytes(data).space) == 69_975


def test_irregular_maps_cost_a_few_bytes_an_element() -> None:
    rng = np.random.default_rng(0)
    space = CheckpointSpace([TensorSpec("w", (20_000,), "BF16")])
    made = SourceMap.from_ids(space, {"p": rng.permutation(20_000) + 1})
    data = made.to_bytes()
    assert len(data) < 20_000 * 6
    assert SourceMap.from_bytes(data).same_as(made)


def test_other_versions_and_cuts_are_named() -> None:
    data = sample_map().to_bytes()
    with pytest.raises(MapBytesError, match="not a source map of this version"):
        SourceMap.from_bytes(b"TLMAP\x00\x00\x01" + data[8:])
    with pytest.raises(MapBytesError, match="shorter than its header"):
        SourceMap.from_bytes(data[:20])
    for cut in (24, 25, len(data) // 2, len(data) - 1):
        with pytest.raises(MapBytesError, match="truncated or altered"):
            SourceMap.from_bytes(data[:cut])
    with pytest.raises(MapBytesError, match="incomplete"):
        SourceMap.from_bytes(_sealed_short(data))


def _sealed_short(data: bytes) -> bytes:
    """The zlib stream cut off, with the digest made right."""
    body = data[24:-3]
    return MAGIC + hashlib.blake2b(body, digest_size=16).digest() + body


def test_bombs_stop_at_their_limits() -> None:
    """Streams that unpack to zeros, tables that claim billions of rows, names that repeat, stretches without end."""
    space = [[[], []], [], [0, 1, b"\x00"]]
    table = lambda rows, columns: [rows, columns, b"\x00" * columns]  # noqa: E731
    bombs: list[object] = [
        b"\x00" * 30_000_000,
        [[[[[b"x" * 1000]], [[10**7, 0, b""]]], [[[1], "BF16"]], table(10**7, 1)], [[], []], [], table(0, 5), [],
         table(0, 4), table(0, 1)],
        [space, [[[b"p"]], [[1, 0, b""]]], [[[4], "BF16"]], table(2**40, 5), [], table(0, 4), table(0, 1)],
        [space, [[[b"p"]], [[2**60, 0, b""]]], [[[4], "BF16"]], table(1, 5), [], table(0, 4), table(0, 1)],
    ]  # fmt: skip
    tracemalloc.start()
    for bomb in bombs:
        began = time.monotonic()
        with pytest.raises(MapBytesError):
            SourceMap.from_bytes(resealed(bomb))
        assert time.monotonic() - began < 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 29


def bad_map(name: str, shape: tuple[int, ...], copies: list[SliceCopy], opaque: RunTable | None = None) -> bytes:
    row = MapRow(name, shape, "BF16", CopyTable.of(copies), opaque or RunTable.empty(), ())
    return encode_map(SPACE, [row])


def copy(source: int, target: int, *axes: tuple[int, int, int]) -> SliceCopy:
    shape = tuple(axis[0] for axis in axes)
    return SliceCopy(
        Strided(source, shape, tuple(axis[1] for axis in axes)), Strided(target, shape, tuple(axis[2] for axis in axes))
    )


def test_claims_that_meet_are_refused_though_their_number_fits() -> None:
    """Two copies of one row into the other, a copy into an opaque element: the counts alone would pass."""
    row = copy(1, 0, (4, 1, 1))
    good = [row, copy(5, 4, (4, 1, 1))]
    assert decode_map(bad_map("p", (3, 4), good))[1][0].name == "p"
    with pytest.raises(MapBytesError, match="p: two of its claims meet"):
        decode_map(bad_map("p", (3, 4), [row, copy(5, 3, (4, 1, 1))]))
    with pytest.raises(MapBytesError, match="p: two of its claims meet"):
        decode_map(bad_map("p", (3, 4), [copy(1, 0, (3, 1, 4)), copy(5, 1, (3, 1, 3))]))
    with pytest.raises(MapBytesError, match="p: two of its claims meet"):
        decode_map(bad_map("p", (3, 4), [row], RunTable.from_ids([2])))
    with pytest.raises(MapBytesError, match="p: two of its claims meet"):
        decode_map(bad_map("p", (3, 4), [copy(1, 0, (2, 1, 1), (2, 1, 1))]))
    assert decode_map(bad_map("p", (3, 4), [row], RunTable.from_ids([4])))[1][0].opaque


@pytest.mark.parametrize(
    "copies",
    [
        [copy(0, 0, (4, 1, 1))],
        [copy(20, 0, (8, 1, 1))],
        [copy(1, 9, (4, 1, 1))],
        [copy(1, 2, (4, 1, -1))],
        [copy(1, 0, (2**33, 0, 2**31))],
        [copy(1, 0, (2**32, 0, 1), (2**32, 0, 1))],
        [copy(1, 0, (3, 2**62, 1))],
        [copy(2**62, 0, (2, 1, 1))],
    ],
)
def test_copies_outside_their_tensors_are_refused(copies: list[SliceCopy]) -> None:
    with pytest.raises(MapBytesError):
        SourceMap.from_bytes(bad_map("p", (3, 4), copies))


def test_well_formed_lies_are_refused() -> None:
    """The structure is right and the digest too; the contents contradict each other."""
    honest = msgspec.msgpack.decode(plain_of(sample_map().to_bytes()))
    assert SourceMap.from_bytes(resealed(honest)).same_as(sample_map())
    tried = 0

    def refused(path: list[int], value: object) -> None:
        nonlocal tried
        lie = msgspec.msgpack.decode(plain_of(sample_map().to_bytes()))
        inner = lie
        for step in path[:-1]:
            inner = inner[step]
        assert inner[path[-1]] != value
        inner[path[-1]] = value
        with pytest.raises(MapBytesError):
            SourceMap.from_bytes(resealed(lie))
        tried += 1

    for path in ([0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [0, 2], [1], [1, 0], [1, 1], [2], [3], [4], [5], [6]):
        for value in (None, [], 7, b"", "x", [[]], [[1, 1, b"\x00"]], [1, 1, b"\x00"], [3, 1, b"\x01\x00"]):
            if value != [] or path not in ([4],):
                refused(path, value)
    names = msgspec.msgpack.decode(plain_of(sample_map().to_bytes()))[0][0][0]
    refused([0, 0, 0], [*names[:-1], names[0]])
    refused([0, 0, 0], [*names[:-1], [b"\xff\xfe"]])
    for spec in ([[-1], "BF16"], [[2**51], "BF16"], [[3, 4], "NOPE"], [[1] * 65, "BF16"]):
        refused([2, 0], spec)
        refused([0, 1, 0], spec)
    assert tried > 100


def test_mutated_bytes_raise_only_our_errors() -> None:
    """2,000 mutations, half of them with the digest made right: our errors or an equal-minded map, in bounded time."""
    rng = np.random.default_rng(1)
    data = sample_map().to_bytes()
    plain = plain_of(data)
    survived = 0
    for trial in range(2_000):
        target = bytearray(data if trial % 2 else plain)
        for _ in range(rng.integers(1, 4)):
            where = int(rng.integers(len(target)))
            match int(rng.integers(4)):
                case 0:
                    target[where] ^= 1 << int(rng.integers(8))
                case 1:
                    target[where] = int(rng.integers(256))
                case 2:
                    del target[where : where + int(rng.integers(1, 5))]
                case _:
                    target[where:where] = rng.integers(0, 256, int(rng.integers(1, 9)), dtype=np.uint8).tobytes()
        mutated = bytes(target) if trial % 2 else seal(MAGIC, bytes(target))
        began = time.monotonic()
        try:
            found = SourceMap.from_bytes(mutated)
        except LayoutError:
            pass
        else:
            survived += 1
            for name in found.parameters:
                ids = found.ids(name) if found[name].elements < 10**6 else np.zeros(1)
                assert int(ids.max(initial=0)) <= found.space.total_elements
            assert SourceMap.from_bytes(found.to_bytes()).same_as(found)
        assert time.monotonic() - began < 10
    assert 0 < survived < 600


def test_what_could_not_be_read_back_is_not_written() -> None:
    wide = CopyTable.of([SliceCopy(Strided(1, (2,) * 33, (0,) * 33), Strided(0, (2,) * 33, (0,) * 33))])
    with pytest.raises(MapError, match="can be read back"):
        encode_map(SPACE, [MapRow("p", (2**33,), "BF16", wide, RunTable.empty(), ())])


def test_unpacking_is_paid_from_one_budget() -> None:
    table = pack_table(np.zeros((10, 3), dtype=np.int64))
    budget = Budget(50)
    unpack_table(table, budget, MapBytesError)
    with pytest.raises(MapBytesError, match="more numbers than the 20"):
        unpack_table(table, budget, MapBytesError)
    for broken in (Packed(10, 3, b"\x00\x00"), Packed(10, 3, b"\x00\x00\x00\x00"), Packed(10, 1, b"\x03" * 31)):
        with pytest.raises(MapBytesError):
            unpack_table(broken, Budget(50), MapBytesError)
