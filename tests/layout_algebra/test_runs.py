"""RunTable: set laws against Python sets, on random and on all small inputs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.errors import LayoutError
from layout_algebra.runs import RunTable, overlaps

id_sets = st.sets(st.integers(0, 60), max_size=40)
runs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 5), st.integers(1, 9), st.integers(1, 6)).map(list), max_size=6
)


def table(ids: set[int]) -> RunTable:
    return RunTable.from_ids(sorted(ids))


def check_pair(left: set[int], right: set[int]) -> None:
    a, b = table(left), table(right)
    assert set(a.ids().tolist()) == left
    assert a.elements == len(left)
    for made, wanted in (
        (a.intersect(b), left & right),
        (a.union(b), left | right),
        (a.subtract(b), left - right),
    ):
        assert made.ids().tolist() == sorted(wanted)
        assert made.same_as(table(wanted)), "equal sets have equal tables"


@given(id_sets, id_sets)
def test_set_laws(left: set[int], right: set[int]) -> None:
    check_pair(left, right)


def test_set_laws_on_every_small_pair() -> None:
    universe = range(5)
    subsets = [set(c) for size in range(6) for c in itertools.combinations(universe, size)]
    for left, right in itertools.product(subsets, repeat=2):
        check_pair(left, right)


@given(runs)
def test_runs_mean_the_ids_they_list(rows: list[list[int]]) -> None:
    wanted = {
        start + step * stride + inside
        for start, length, stride, count in rows
        for step in range(count)
        for inside in range(length)
    }
    made = RunTable.from_runs(rows)
    assert made.ids().tolist() == sorted(wanted)
    assert RunTable.from_runs(made.runs).same_as(made)
    assert made.same_as(table(wanted))


@given(id_sets, st.integers(0, 45), st.integers(0, 45))
def test_slice_is_by_rank(ids: set[int], first: int, last: int) -> None:
    assert table(ids).slice(first, max(first, last)).ids().tolist() == sorted(ids)[first : max(first, last)]


@given(id_sets, st.lists(st.integers(0, 40), max_size=4))
def test_split_partitions(ids: set[int], cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    parts = table(ids).split(cuts)
    assert len(parts) == len(cuts) + 1
    assert [i for part in parts for i in part.ids().tolist()] == sorted(ids)


def test_regular_sets_are_one_run() -> None:
    columns = RunTable.from_ids([row * 8 + column for row in range(100) for column in (2, 3)])
    assert columns.runs.tolist() == [[2, 2, 8, 100]]
    assert len(RunTable.from_ids(range(0, 30, 3))) == 1


def test_ids_past_32_bits() -> None:
    start = 6_417_285_120
    made = RunTable.from_runs([[start, 25_165_824, 2**33, 2]])
    assert made.elements == 2 * 25_165_824
    assert made.intersect(RunTable.from_intervals([[start + 2**33, start + 2**33 + 1]])).ids().tolist() == [
        start + 2**33
    ]


@pytest.mark.parametrize("row", [[-1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 2], [5, 2, -3, 2]])
def test_bad_runs_are_refused(row: list[int]) -> None:
    with pytest.raises(LayoutError, match="run"):
        RunTable.from_runs([row])


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8),
    st.sets(st.integers(0, 40), max_size=20),
)
def test_overlaps_lists_every_pair_once(left: list[tuple[int, int]], right_ids: set[int]) -> None:
    spans = np.array([(start, start + length) for start, length in left], dtype=np.int64).reshape(-1, 2)
    right = table(right_ids).intervals
    mine, theirs = overlaps(spans, right)
    wanted = [
        (i, j)
        for i in range(len(spans))
        for j in range(len(right))
        if max(spans[i, 0], right[j, 0]) < min(spans[i, 1], right[j, 1])
    ]
    assert list(zip(mine.tolist(), theirs.tolist(), strict=True)) == wanted
