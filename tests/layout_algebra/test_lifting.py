"""Very many pieces: streams, windows and slabs leave the same canonical form on every way to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_algebra import lifting, recover
from layout_algebra.canonical import canonical_table
from layout_algebra.diff2 import encode
from layout_algebra.lifting import MANY_PIECES, lift, slab_elements
from layout_algebra.recover import canonical_of_ids, canonical_without, rectangles_of_ids, without
from layout_algebra.residues import FLOAT_CODES, plan_passes
from layout_algebra.slice_copy import CopyTable
from tests.oracle import ids_of_rows
from tests.strategies import Ids, id_matrices

NOTHING = np.empty((0, 2), dtype=np.int64)


def probed(ids: Ids, total: int) -> CopyTable:
    """What code passes over memory with these ids recover."""
    passes, decoding = plan_passes(FLOAT_CODES, total), FLOAT_CODES.decoding("BF16")
    assert decoding is not None
    diffs = []
    for one in passes:
        memory = np.where(ids > 0, FLOAT_CODES.table("BF16", one).astype(np.uint16)[ids % one.modulus], 0x7FC1)
        diffs.append(encode(memory.astype(np.uint16), ids.shape, decoding, one))
    return recover.recover(diffs, passes, ids.shape, total).copies


def check(ids: Ids) -> CopyTable:
    made = canonical_of_ids(ids)
    assert ids_of_rows(made.rows, ids.size).tolist() == np.maximum(ids, 0).reshape(-1).tolist()
    assert np.array_equal(probed(ids, max(int(ids.max()), 1)).rows, made.rows)
    assert np.array_equal(canonical_table(made, ids.shape).rows, made.rows)
    single = made.expand(np.full(len(made), -1))
    shuffled = CopyTable(np.random.default_rng(len(made)).permutation(single.rows))
    assert np.array_equal(canonical_table(shuffled, ids.shape).rows, made.rows)
    assert np.array_equal(without(shuffled, NOTHING, ids.shape).rows, rectangles_of_ids(ids).rows)
    return made


@pytest.mark.parametrize("sparse", [1, 1 << 40], ids=["counted", "windows"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(id_matrices(), st.integers(1, 40), st.integers(1, 20), st.sampled_from([0, 2, 5]))
def test_small_windows_and_slabs(
    sparse: int, monkeypatch: pytest.MonkeyPatch, ids: Ids, window: int, slab: int, many: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recover, "_WINDOW_ELEMENTS", window)
        patch.setattr(recover, "_SPARSE", sparse)
        patch.setattr(lifting, "_SLAB_ELEMENTS", slab)
        patch.setattr(lifting, "MANY_PIECES", many)
        check(ids)
        check(ids.reshape(-1))
        half = ids.size // 2
        left = np.where(np.arange(ids.size).reshape(ids.shape) < half, 0, ids)
        removed = np.array([[0, half]]) if half else np.empty((0, 2), dtype=np.int64)
        rest = canonical_without(canonical_of_ids(ids), removed, ids.shape)
        assert np.array_equal(rest.rows, canonical_of_ids(left).rows)


def xor_swizzle(experts: int, rows: int, columns: int) -> Ids:
    """Within every tile of 16 x 16 the column number is xor-ed with the row number."""
    where = np.arange(columns) ^ (np.arange(rows) % 16)[:, None]
    ids = np.arange(1, experts * rows * columns + 1).reshape(experts, rows, columns)
    return np.ascontiguousarray(np.take_along_axis(ids, np.broadcast_to(where, ids.shape), axis=2))


def test_a_swizzle_of_any_size_is_a_few_copies() -> None:
    small, large = xor_swizzle(1, 64, 128), xor_swizzle(2, 512, 1024)
    assert len(rectangles_of_ids(large)) > MANY_PIECES
    assert len(check(small)) == 34
    made = canonical_of_ids(large)
    assert len(made) == 34
    assert np.array_equal(probed(large, large.size).rows, made.rows)
    assert np.array_equal(canonical_table(made, large.shape).rows, made.rows)


def test_blocked_kernels_are_few_copies() -> None:
    ids = np.arange(1, 4 * 64 * 96 + 1)
    blocks = ids.reshape(4, 4, 16, 6, 16)
    for order in ((0, 1, 3, 2, 4), (0, 1, 3, 4, 2), (0, 3, 1, 2, 4)):
        assert len(check(np.ascontiguousarray(blocks.transpose(order)).reshape(4, 64, 96))) <= 3
    pairs = ids.reshape(4, 4, 16, 48, 2).transpose(0, 1, 3, 2, 4)
    assert len(check(np.ascontiguousarray(pairs).reshape(4, 64, 96))) == 1


def test_what_repeats_at_a_long_period_is_merged() -> None:
    """A tile's 24 pieces of odd shapes, 40 times: as many copies as one tile has."""
    lengths = np.random.default_rng(3).integers(3, 9, 24)
    tile = 1 + np.concatenate([np.arange(length) * 2 + 100 * k for k, length in enumerate(lengths)])
    ids = tile + 5000 * np.arange(40)[:, None]
    assert len(check(ids)) <= 24
    assert len(check(ids.reshape(-1))) <= 24


def test_slabs_are_whole_inner_axes_or_a_power_of_two() -> None:
    assert slab_elements((64, 512, 1024)) == 1 << 20
    assert slab_elements((7, 512, 1024)) == 1 << 20
    assert slab_elements((100, 3, 1000)) == 300_000
    assert slab_elements((10**6, 768)) == 768 << 10
    assert slab_elements((10**9,)) == slab_elements((2, 10**9)) == 1 << 20
    assert slab_elements(()) == 1


def test_two_alike_are_no_repeat_and_order_does_not_count() -> None:
    rows = np.array([[8 * k, 1 + 100 * k, 3, 1, 1] for k in range(6)])
    assert lift(CopyTable(rows[[0, 5]])).rows.tolist() == rows[[0, 5]].tolist()
    whole = lift(CopyTable(rows))
    assert whole.rows.tolist() == [[0, 1, 6, 8, 100, 3, 1, 1]]
    assert lift(CopyTable(rows[::-1])).rows.tolist() == whole.rows.tolist()
