"""Recovery: second differences back to ids, exactly, and to the same rectangles on every way there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from layout_algebra import diff2
from layout_algebra import recover as recover_module
from layout_algebra.diff2 import encode
from layout_algebra.errors import MapError, ProbeError
from layout_algebra.recover import (
    Recovery,
    canonical_of_ids,
    constant_ids,
    recover,
    rectangles_of_ids,
    without,
)
from layout_algebra.residues import FLOAT_CODES, Decoding, Pass, plan_passes
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from tests.interpreted import MODES, kernels_run
from tests.oracle import ids_of_rows
from tests.strategies import Ids, id_matrices

NOTHING = np.empty((0, 2), dtype=np.int64)

BF16 = FLOAT_CODES.decoding("BF16")
assert BF16 is not None
NAN = np.uint16(0x7FC1)
Words = npt.NDArray[np.uint16]


def memory_of(ids: Ids, one: Pass) -> Words:
    """What a loader leaves that copies these ids into memory filled with NaN."""
    table = FLOAT_CODES.table("BF16", one).astype(np.uint16)
    return np.ascontiguousarray(np.where(ids > 0, table[ids % one.modulus], NAN))


def recovered(memories: Sequence[Words], passes: Sequence[Pass], shape: tuple[int, ...], total: int) -> Recovery:
    decoding: Decoding = BF16  # type: ignore[assignment]
    diffs = [encode(memory, shape, decoding, one) for memory, one in zip(memories, passes, strict=True)]
    return recover(diffs, passes, shape, total)


def check_rectangles(table: CopyTable, ids: Ids) -> None:
    """The table says these ids, in rectangles of the last axis, by target."""
    assert ids_of_rows(table.rows, ids.size).tolist() == np.maximum(ids, 0).reshape(-1).tolist()
    assert table.axes == 2
    assert (np.diff(table.target_starts) > 0).all()


def check(ids: Ids, total: int) -> None:
    """Plain ids, residues and slice copies of the ids lead to the same rectangles."""
    table = rectangles_of_ids(ids)
    check_rectangles(table, ids)
    passes = plan_passes(FLOAT_CODES, total)
    found = recovered([memory_of(ids, one) for one in passes], passes, ids.shape, total)
    assert found.copies.rows.tolist() == canonical_of_ids(ids).rows.tolist()
    assert len(found.constants) == 0
    assert without(table, NOTHING, ids.shape).rows.tolist() == table.rows.tolist()
    shuffled = np.random.default_rng(len(table)).permutation(table.expand(np.full(len(table), -1)).rows)
    assert without(CopyTable(shuffled), NOTHING, ids.shape).rows.tolist() == table.rows.tolist()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=80)
@given(id_matrices(), st.integers(0, 10**7), st.sampled_from([0, 1, 10**12, 2**49]))
@example(np.array([[1, 2, 3, 0], [4, 5, 6, 0]]), 0, 0)
@example(np.array([[0, 1, 2, 3]]), 0, 0)  # 0 lies on the run's own line
@example(np.array([[3], [2], [1], [0]]), 0, 0)
@example(np.array([[5, 10, 11, 12, 13]]), 0, 0)  # a lone element before a longer run
@example(np.array([[1, 3, 9], [2, 6, 10], [3, 9, 11], [4, 12, 12]]), 0, 0)  # steps that differ along a row
@example(np.array([[1, 1, 1, 1], [2, 3, 4, 5], [3, 5, 7, 9]]), 0, 0)  # the same, wider than high
@example(np.array([[9, 9], [6, 6], [3, 3], [0, 0]]), 0, 0)  # a band that ends in a row of holes
def test_recovery_is_exact(mode: str, ids: Ids, above: int, shift: int) -> None:
    ids = np.where(ids > 0, ids + shift, 0)
    with kernels_run(mode):
        check(ids, max(int(ids.max()), 1) + above)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 2, 3), (3, 2)])
def test_recovery_on_every_small_matrix(shape: tuple[int, ...]) -> None:
    for listed in itertools.product(range(3), repeat=int(np.prod(shape))):
        check(np.array(listed, dtype=np.int64).reshape(shape), 2)


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (3, 2), (2, 3)])
def test_plain_ids_on_every_small_matrix(shape: tuple[int, int]) -> None:
    for listed in itertools.product(range(-1, 3), repeat=6):
        ids = np.array(listed, dtype=np.int64).reshape(shape)
        table = rectangles_of_ids(ids)
        out = np.zeros(6, dtype=np.int64)
        table.write_ids(out)
        assert out.tolist() == [max(value, 0) for value in listed]
        assert int(table.elements.sum()) == sum(value > 0 for value in listed)


def rectangles(ids: npt.ArrayLike) -> list[str]:
    return [str(copy) for copy in rectangles_of_ids(np.asarray(ids, dtype=np.int64)).slice_copies()]


def test_regular_layouts_are_one_rectangle() -> None:
    tensor = np.arange(1, 241).reshape(12, 20)
    assert rectangles(tensor) == ["0+(12:20,20:1) <- 1+(12:20,20:1)"]
    assert rectangles(tensor.T) == ["0+(20:12,12:1) <- 1+(20:1,12:20)"]
    assert rectangles(tensor[3:7]) == ["0+(4:20,20:1) <- 61+(4:20,20:1)"]
    assert rectangles(tensor[:, 5:10]) == ["0+(12:5,5:1) <- 6+(12:20,5:1)"]
    assert rectangles(tensor[::-1, ::-2]) == ["0+(12:10,10:1) <- 240+(12:-20,10:-2)"]
    assert rectangles(np.broadcast_to(tensor[0], (6, 20))) == ["0+(6:20,20:1) <- 1+(6:0,20:1)"]
    assert rectangles(np.full((3, 4), 7)) == ["0+(3:4,4:1) <- 7+(3:0,4:0)"]
    assert rectangles(np.pad(tensor, ((1, 2), (3, 4)))) == ["30+(12:27,20:1) <- 1+(12:20,20:1)"]
    assert rectangles(np.arange(1, 25).reshape(2, 3, 4, 1)) == ["0+(6:4,4:1) <- 1+(6:4,4:1)"]
    assert rectangles(5) == ["0+() <- 5+()"]
    assert rectangles(np.zeros((0, 3))) == []
    assert rectangles(np.zeros((4, 3))) == []


def test_a_lone_element_joins_the_longer_run_that_follows() -> None:
    assert rectangles([5, 10, 11, 12]) == ["0+() <- 5+()", "1+(3:1) <- 10+(3:1)"]
    assert rectangles([5, 10, 11]) == ["0+(2:1) <- 5+(2:5)", "2+() <- 11+()"]
    assert rectangles([5, 10, 0, 11, 12]) == ["0+(2:1) <- 5+(2:5)", "3+(2:1) <- 11+(2:1)"]
    rows = np.array([40, 1, 2, 3])[:, None] * 10 + np.arange(4)
    assert rectangles(rows) == ["0+(4:1) <- 400+(4:1)", "4+(3:4,4:1) <- 10+(3:10,4:1)"]


def test_steps_that_differ_along_a_row_make_the_fewer_pieces() -> None:
    product = (1 + np.arange(3))[:, None] * (1 + np.arange(5))
    assert rectangles(product) == ["0+(5:1) <- 1+(5:1)", "5+(5:1) <- 2+(5:2)", "10+(5:1) <- 3+(5:3)"]
    assert rectangles(product.T) == ["0+(5:3) <- 1+(5:1)", "1+(5:3) <- 2+(5:2)", "2+(5:3) <- 3+(5:3)"]


def test_holes_split_a_run_they_lie_on() -> None:
    assert rectangles([3, 2, 1, 0]) == ["0+(3:1) <- 3+(3:-1)"]
    assert rectangles([2, 4, -1, 8, 10]) == ["0+(2:1) <- 2+(2:2)", "3+(2:1) <- 8+(2:2)"]
    assert rectangles([[0, 0], [5, 6], [10, 11], [0, 0], [20, 21]]) == [
        "2+(2:2,2:1) <- 5+(2:5,2:1)",
        "8+(2:1) <- 20+(2:1)",
    ]


@pytest.mark.parametrize("axis", [0, 1])
def test_permuted_rows_and_columns_stay_whole(axis: int) -> None:
    tensor = np.arange(1, 64 * 48 + 1).reshape(64, 48)
    ids = np.take(tensor, np.random.default_rng(axis).permutation(tensor.shape[axis]), axis=axis)
    check(ids, tensor.size)
    assert len(rectangles_of_ids(ids)) <= tensor.shape[axis]


@pytest.mark.parametrize("window", [1, 40, 1 << 20])
def test_long_and_short_chunks_are_joined_in_order(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of many chunks are joined at once, up to some length; plain arrays between them one by one."""
    monkeypatch.setattr(diff2, "CHUNK_ELEMENTS", 256)
    monkeypatch.setattr(recover_module, "_WINDOW_ELEMENTS", window)
    ids = np.arange(1, 2401).reshape(60, 40)
    ids[16:36] = np.random.default_rng(window).permutation(ids[16:36].reshape(-1)).reshape(20, 40)
    ids[41, 7:9] = 0
    ids[50:, 3:] += 5
    one = plan_passes(FLOAT_CODES, 3000)[0]
    decoding: Decoding = BF16  # type: ignore[assignment]
    kinds = [chunk.is_dense for chunk in encode(memory_of(ids, one), ids.shape, decoding, one).chunks]
    assert kinds[:2] == [False, False]
    assert any(kinds)
    assert kinds[-2:] == [False, False]
    check(ids, 3000)


def test_any_permutation_is_exact() -> None:
    for shape in ((1, 3000), (3000, 1), (60, 50)):
        check(np.random.default_rng(shape[0]).permutation(3000).reshape(shape) + 1, 10**9)


def test_the_largest_ids_do_not_overflow() -> None:
    """Slope times height is far beyond 64 bits on the way; only ids have to fit."""
    total = 2**50 - 1
    ids = np.zeros((3000, 70), dtype=np.int64)
    ids[:, :30] = total - 10**9 * np.arange(3000)[:, None] - np.arange(30)
    ids[:, 30:60] = 1 + (2**50 // 3001) * np.arange(3000)[:, None] + np.arange(30)
    ids[7:2900, 60:] = np.array([1, total])[np.arange(2893) % 2, None]
    passes = plan_passes(FLOAT_CODES, total)
    assert len(passes) == 5
    table = rectangles_of_ids(ids)
    found = recovered([memory_of(ids, one) for one in passes], passes, ids.shape, total)
    assert np.array_equal(found.copies.rows, canonical_of_ids(ids).rows)
    out = np.zeros(ids.size, dtype=np.int64)
    table.write_ids(out)
    assert np.array_equal(out.reshape(ids.shape), ids)


def test_scalars_and_empty_parameters() -> None:
    for ids in (np.array(7), np.zeros((0, 4), dtype=np.int64), np.zeros((3, 2), dtype=np.int64), np.array([[[9]]])):
        check(ids, 10)


def test_passes_that_disagree_leave_no_copy() -> None:
    """Elements that held a code in some passes only, or a number past N, are in nothing; the rest is in normal form."""
    rng = np.random.default_rng(11)
    total = 2000
    ids = np.arange(1, 601).reshape(20, 30)
    passes = plan_passes(FLOAT_CODES, total)
    memories = [memory_of(ids, one) for one in passes]
    spoilt = rng.random(ids.shape) < 0.1
    memories[1][spoilt] = NAN
    scrambled = ~spoilt & (rng.random(ids.shape) < 0.1)
    for memory, one in zip(memories, passes, strict=True):
        memory[scrambled] = rng.permutation(FLOAT_CODES.bits("BF16", one.modulus))[: scrambled.sum()]
    left = np.where(spoilt | scrambled, 0, ids)
    found = recovered(memories, passes, ids.shape, total)
    assert found.copies.rows.tolist() == canonical_of_ids(left).rows.tolist()
    assert len(found.constants) == 0


@pytest.mark.parametrize("total", [1, 7, 11, 12, 13, 19, 20])
def test_runs_end_at_the_last_id(total: int) -> None:
    """Numbers past N lie on the runs' own lines, at either end, along rows and down columns."""
    passes = plan_passes(FLOAT_CODES, total)
    up = np.arange(1, 25).reshape(4, 6)
    for ids in (up, up.T, up[::-1], up[:, ::-1], up.T[::-1], up.reshape(1, 24), up[::-1, :1]):
        found = recovered([memory_of(ids, one) for one in passes], passes, ids.shape, total)
        wanted = canonical_of_ids(np.where(ids <= total, ids, 0))
        assert found.copies.rows.tolist() == wanted.rows.tolist()


def test_numbers_past_the_last_id_do_not_move_cuts() -> None:
    """Two columns with steps of their own beside a column of garbage that changes from row to row."""
    rows = np.arange(12)
    ids = np.stack([1 + rows, 101 + 2 * rows, 0 * rows], axis=1)
    passes = plan_passes(FLOAT_CODES, 200)
    memories = [memory_of(ids, one) for one in passes]
    for memory, one in zip(memories, passes, strict=True):
        memory[:, 2] = np.random.default_rng(one.modulus).permutation(FLOAT_CODES.bits("BF16", 1900))[:12]
    found = recovered(memories, passes, ids.shape, 200)
    assert [str(copy) for copy in found.copies.slice_copies()] == ["0+(12:3) <- 1+(12:1)", "1+(12:3) <- 101+(12:2)"]
    assert found.copies.rows.tolist() == canonical_of_ids(ids).rows.tolist()


def test_constants_of_several_numbers_are_pieces_of_their_own() -> None:
    numbers = np.array([[896, 896, 7, 7], [897, 897, 7, 8], [898, 898, 7, 9], [5, 6, 7, 8]])
    passes = plan_passes(FLOAT_CODES, 100)
    memory = FLOAT_CODES.bits("BF16")[numbers].astype(np.uint16)
    found = recovered([memory] * len(passes), passes, numbers.shape, 100)
    assert len(found.copies) == 0
    assert ids_of_rows(found.constants.rows, 16).tolist() == numbers.reshape(-1).tolist()
    assert not found.constants.source_strides.any()


@settings(max_examples=60)
@given(id_matrices(), st.integers(1, 1918), st.data())
def test_constants_that_are_codes_are_told_apart(ids: Ids, number: int, data: st.DataObject) -> None:
    """Padding with ones, say: equal bits in every pass, which no id of a small checkpoint would leave."""
    total = int(ids.max()) + 5
    passes = plan_passes(FLOAT_CODES, total)
    constant = np.array(data.draw(st.lists(st.booleans(), min_size=ids.size, max_size=ids.size))).reshape(ids.shape)
    memories = [np.where(constant, FLOAT_CODES.bits("BF16")[number], memory_of(ids, one)) for one in passes]
    found = recovered([memory.astype(np.uint16) for memory in memories], passes, ids.shape, total)
    left = np.where(constant, 0, ids)
    assume(constant_ids(passes)[number] > total)
    assert found.copies.rows.tolist() == canonical_of_ids(left).rows.tolist()
    assert ids_of_rows(found.constants.rows, ids.size).tolist() == (constant.reshape(-1) * number).tolist()
    assert not found.constants.source_strides.any()


def test_a_constant_names_the_id_that_its_residues_name() -> None:
    passes = plan_passes(FLOAT_CODES, 10**9)
    named = constant_ids(passes)
    for number in (0, 1, 896, 1914):
        for one in passes:
            assert one.multiplier * int(named[number]) % one.modulus == number
    assert [int(named[1917]) % one.modulus for one in passes] == [1917, 0, 0], "outside in two passes"


@settings(max_examples=60)
@given(id_matrices(), st.data())
def test_removing_elements(ids: Ids, data: st.DataObject) -> None:
    removed = np.array(data.draw(st.lists(st.booleans(), min_size=ids.size, max_size=ids.size)), dtype=np.int8)
    intervals = np.flatnonzero(np.diff(removed, prepend=0, append=0)).reshape(-1, 2)
    left = np.where(removed.reshape(ids.shape) == 1, 0, ids)
    table = without(rectangles_of_ids(ids), intervals, ids.shape)
    assert table.rows.tolist() == rectangles_of_ids(left).rows.tolist()


def test_bad_copies_are_refused() -> None:
    def copies(*parts: tuple[int, int, int, int]) -> CopyTable:
        return CopyTable.of([SliceCopy(Strided(s, (n,), (1,)), Strided(t, (n,), (step,))) for t, s, n, step in parts])

    with pytest.raises(MapError, match="overlap"):
        without(copies((0, 1, 4, 1), (3, 9, 2, 1)), NOTHING, (2, 4))
    with pytest.raises(MapError, match="overlap"):
        without(copies((0, 1, 4, 0)), NOTHING, (2, 4))
    with pytest.raises(MapError, match=r"write 0\.\.9 of a parameter of 8"):
        without(copies((0, 1, 4, 3)), NOTHING, (2, 4))
    with pytest.raises(MapError, match="ids begin at 1"):
        without(copies((0, 0, 4, 1)), NOTHING, (2, 4))


def test_passes_must_belong_together() -> None:
    ids = np.arange(1, 13).reshape(3, 4)
    passes = plan_passes(FLOAT_CODES, 10**6)
    decoding: Decoding = BF16  # type: ignore[assignment]
    diffs = [encode(memory_of(ids, one), ids.shape, decoding, one) for one in passes]
    with pytest.raises(ProbeError, match="expected"):
        recover(diffs[::-1], passes, ids.shape, 10**6)
    with pytest.raises(ProbeError, match="expected"):
        recover(diffs, passes, (4, 3), 10**6)
    with pytest.raises(ProbeError, match="cannot tell"):
        recover(diffs, passes, ids.shape, 10**12)
