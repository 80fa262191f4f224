"""SliceCopy and CopyTable: the definition, expansion, bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.errors import MapError
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided

axes = st.lists(st.tuples(st.integers(1, 4), st.integers(-7, 7), st.integers(-7, 7)), max_size=4)


def copy_of(rows: list[tuple[int, int, int]], target: int, source: int) -> SliceCopy:
    shape = tuple(row[0] for row in rows)
    return SliceCopy(
        Strided(source, shape, tuple(row[2] for row in rows)), Strided(target, shape, tuple(row[1] for row in rows))
    )


def pairs(copy: SliceCopy) -> list[tuple[int, int]]:
    """Plain loops over the definition."""
    out = []
    for index in itertools.product(*(range(extent) for extent in copy.shape)):
        target = copy.target.start + sum(i * s for i, s in zip(index, copy.target.strides, strict=True))
        source = copy.source.start + sum(i * s for i, s in zip(index, copy.source.strides, strict=True))
        out.append((target, source))
    return out


@given(st.lists(st.tuples(axes, st.integers(0, 50), st.integers(1, 50)), max_size=4))
def test_tables_mean_their_copies(listed: list[tuple[list[tuple[int, int, int]], int, int]]) -> None:
    copies = [copy_of(*row) for row in listed]
    table = CopyTable.of(copies)
    wanted = [pair for copy in copies for pair in pairs(copy)]
    assert [pair for copy in table.slice_copies() for pair in pairs(copy)] == wanted
    assert table.elements.tolist() == [copy.elements for copy in copies]
    flat = table.expand(np.full(len(table), -1))
    assert list(zip(flat.target_starts.tolist(), flat.source_starts.tolist(), strict=True)) == wanted
    for inner in range(table.axes):
        rows = table.expand(np.full(len(table), inner)).slice_copies()
        assert sorted(pair for copy in rows for pair in pairs(copy)) == sorted(wanted)
    for copy, low, high in zip(copies, *table.bounds(of="target"), strict=True):
        assert (low, high) == (min(t for t, _ in pairs(copy)), max(t for t, _ in pairs(copy)))
    runs = [(b, n, s, c) for b, n, s, c in table.source_runs()[0].tolist()]
    read = {b + step * s + inside for b, n, s, c in runs for step in range(c) for inside in range(n)}
    assert read == {s for _, s in wanted}
    assert CopyTable.concatenate([CopyTable.of([copy]) for copy in copies]).slice_copies() == table.slice_copies()
    for copy in copies:
        assert copy.target.indices().reshape(-1).tolist() == [t for t, _ in pairs(copy)]


def test_source_runs_do_not_unroll_rows() -> None:
    columns = copy_of([(12, 8, 48), (4, 2, 6), (2, 1, 1)], 0, 3)
    assert CopyTable.of([columns]).source_runs()[0].shape == (12, 4)
    transposed = copy_of([(4096, 1, 6144), (6144, 4096, 1)], 0, 1)
    assert CopyTable.of([transposed]).source_runs()[0].tolist() == [[1, 4096 * 6144, 4096 * 6144, 1]]
    shard = copy_of([(4096, 1, 6144), (768, 4096, 1)], 0, 1)
    assert CopyTable.of([shard]).source_runs()[0].tolist() == [[1, 768, 6144, 4096]]


def test_refusals() -> None:
    with pytest.raises(MapError, match="extents >= 1"):
        Strided(0, (0,), (1,))
    with pytest.raises(MapError, match="one stride per extent"):
        Strided(0, (2,), ())
    with pytest.raises(MapError, match="source shape"):
        SliceCopy(Strided(0, (2,), (1,)), Strided(0, (3,), (1,)))
    with pytest.raises(MapError, match="copy table of shape"):
        CopyTable(np.zeros((1, 4), dtype=np.int64))


def test_tables_cannot_be_changed() -> None:
    table = CopyTable.of([copy_of([(2, 1, 1)], 0, 1)])
    with pytest.raises(ValueError, match="read-only"):
        table.rows[0, 0] = 5
