"""Grids, tiles, route runs and parts, each against its elements listed one by one."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from crossing import random_crossing
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import grids, hops, parts
from transfer_exec.errors import ProgramError
from transfer_exec.grids import cut_grids
from transfer_exec.parts import of_routes, part_elements, pieces_of, sums_by_round
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.route_runs import RouteRuns
from transfer_exec.schedule import GroupedSchedule, Groups, Schedule
from transfer_exec.tiles import Share, Tile, TileTable

small = st.integers(1, 5)


@given(
    st.lists(st.tuples(st.integers(0, 40), small, st.integers(0, 3), small, st.integers(0, 6)), max_size=4), st.data()
)
@settings(max_examples=200)
def test_cut_grids(drawn: list[tuple[int, ...]], data: st.DataObject) -> None:
    rows = [(s, n, a, c, (n - 1) * a + 1 + gap) for s, n, a, c, gap in drawn]
    windows = [sorted(data.draw(st.tuples(st.integers(-5, 120), st.integers(-5, 120)))) for _ in rows]
    low, high = np.array(windows, dtype=np.int64).reshape(-1, 2).T
    blocks = cut_grids(np.array(rows, dtype=np.int64).reshape(-1, 5), low, high)
    seen = sorted(
        (grid, i, j)
        for grid, row, many, column, columns in blocks.tolist()
        for i in range(row, row + many)
        for j in range(column, column + columns)
    )
    expected = [
        (grid, i, j)
        for grid, (start, length, stride, count, step) in enumerate(rows)
        for i in range(count)
        for j in range(length)
        if windows[grid][0] <= start + i * step + j * stride < windows[grid][1]
    ]
    assert seen == expected
    assert len(blocks) <= 3 * len(rows)


@st.composite
def copies(draw: st.DrawFn) -> SliceCopy:
    axes = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    source = tuple(draw(st.sampled_from([1, 1, -1, 0, 2, 3, 4, 5, 8, 12])) for _ in range(axes))
    target = tuple(draw(st.sampled_from([1, 2, 3, -1, 4, 7, 20])) for _ in range(axes))
    return SliceCopy(Strided(draw(st.integers(60, 80)), shape, source), Strided(200, shape, target))


@st.composite
def sorted_runs(draw: st.DrawFn) -> np.ndarray:
    drawn = draw(st.lists(st.tuples(st.integers(0, 160), small, st.integers(0, 9), st.integers(1, 6)), max_size=5))
    rows = sorted((start, length, length + gap, count) for start, length, gap, count in drawn)
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def cells_of(table: TileTable) -> list[list[tuple[int, int]]]:
    """Every id of every tile and the element that holds it."""
    return [
        [
            (
                row[Tile.START] + i * row[Tile.STRIDE] + j,
                row[Tile.INDEX] + i * row[Tile.INDEX_STEP] + j * row[Tile.INDEX_STRIDE],
            )
            for i in range(row[Tile.COUNT])
            for j in range(row[Tile.LENGTH])
        ]
        for row in table.rows.tolist()
    ]


@given(st.lists(st.lists(copies(), max_size=2), max_size=2), sorted_runs())
@settings(max_examples=300)
def test_tiles_are_their_copies_and_what_they_share_with_runs(tensors: list[list[SliceCopy]], runs: np.ndarray) -> None:
    table = TileTable.of([CopyTable.of(each) for each in tensors])
    cells = cells_of(table)
    held = sorted(
        (tensor, *cell)
        for tensor, mine in zip(table.rows[:, Tile.TENSOR].tolist(), cells, strict=True)
        for cell in mine
    )
    assert held == sorted(
        (tensor, element, index)
        for tensor, each in enumerate(tensors)
        for copy in each
        for element, index in zip(copy.source.indices().ravel(), copy.target.indices().ravel(), strict=True)
    )
    ranks = [
        {start + i * stride + j: i * length + j for i in range(count) for j in range(length)}
        for start, length, stride, count in runs.tolist()
    ]
    seen = sorted(
        (
            row[Share.TILE],
            row[Share.RUN],
            row[Share.INDEX] + i * row[Share.INDEX_STEP] + j * int(table.rows[row[Share.TILE], Tile.INDEX_STRIDE]),
            row[Share.RANK] + i * row[Share.RANK_STEP] + j,
        )
        for row in table.within(runs).tolist()
        for i in range(row[Share.COUNT])
        for j in range(row[Share.LENGTH])
    )
    assert seen == sorted(
        (tile, run, index, rank[element])
        for tile, mine in enumerate(cells)
        for run, rank in enumerate(ranks)
        for element, index in mine
        if element in rank
    )


def test_a_matrix_shares_a_block_whatever_its_rows() -> None:
    """4096 rows of a half of the columns, transposed; against a quarter of the columns, and against an interval."""
    copy = SliceCopy(Strided(1025, (1024, 4096), (1, 2048)), Strided(0, (1024, 4096), (4096, 1)))
    table = TileTable.of([CopyTable.of([copy])])
    assert len(table.rows) == 1
    columns = table.within(np.array([[1537, 512, 2048, 4096]]))
    assert columns.tolist() == [[0, 0, 512, 4096, 512 * 4096, 1, 0, 512]]
    interval = table.within(np.array([[2000, 2048 * 1000, 2048 * 1000, 1]]))
    assert interval[:, [Share.LENGTH, Share.COUNT]].tolist() == [[49, 1], [1024, 999], [975, 1]]


SPACE = CheckpointSpace(
    [
        TensorSpec("a", (4, 6), "BF16"),
        TensorSpec("b", (0, 3), "F32"),
        TensorSpec("c", (5,), "F16"),
        TensorSpec("d", (3, 6), "F16"),
        TensorSpec("e", (7,), "F32"),
    ]
)


def plan_of(*ids: list[int], width: int = 2) -> Plan:
    routes = sorted(
        (Route(RunTable.from_ids(each), width, "t", (Hop(Stage.RECEIVE, "t", "e"),)) for each in ids),
        key=lambda route: int(route.runs.runs[0, 0]),
    )
    return Plan(SPACE.digest(), ("t",), ("e",), (0, 1), tuple(routes), 2, 999, 1.0, "t", 1.0, 1.0)


@given(st.lists(st.integers(0, 3), min_size=47, max_size=47), st.integers(2, 8))
@settings(max_examples=150)
def test_route_runs_are_the_routes(owner: list[int], step: int) -> None:
    """Arbitrary and regular sets, over edges of tensors and of dtypes."""
    if step < 8:
        owner = [position // 3 % step % 4 for position in range(47)]
    ids = [[i + 1 for i in range(47) if owner[i] == route] for route in range(4)]
    plan = plan_of(*(each for each in ids if each))
    found = RouteRuns.of(plan, SPACE)
    seen: dict[tuple[int, int], int] = {}
    for row, load, rank, dtype in zip(found.runs.tolist(), found.load, found.rank, found.dtype, strict=True):
        members = [row[0] + i * row[2] + j for i in range(row[3]) for j in range(row[1])]
        tensors = {SPACE.locate(member)[0] for member in members}
        assert {SPACE.dtype_numbers[0][SPACE.spec(name).dtype] for name in tensors} == {dtype}
        assert len(tensors) == 1 or row[3] == 1
        for place, member in enumerate(members):
            assert seen.setdefault((int(load), int(rank) + place), member) == member
    for route, load in zip(plan.routes, found.load_of_route.tolist(), strict=True):
        mine = route.runs.ids().tolist()
        assert [seen.pop((load, rank)) for rank in range(len(mine))] == mine
    assert not seen
    assert bool(np.all(np.diff(found.runs[:, 0]) >= 0))


def test_twins_are_one_load() -> None:
    runs = RunTable.from_ids([1, 2, 3])
    hops = (Hop(Stage.RECEIVE, "t", "e"),), (Hop(Stage.INTERNAL, "u", "f"),)
    routes = tuple(Route(runs, 2, holder, way) for holder, way in zip("tu", hops, strict=True))
    plan = Plan(SPACE.digest(), ("t", "u"), ("e", "f"), (0, 2, 1, 2), routes, 2, 999, 1.0, "t", 1.0, 1.0)
    found = RouteRuns.of(plan, SPACE)
    assert found.load_of_route.tolist() == [0, 0]
    assert found.runs.tolist() == [[1, 3, 3, 1]]


def test_routes_of_another_checkpoint_are_refused() -> None:
    with pytest.raises(ProgramError, match="route 0 names ids past 54"):
        RouteRuns.of(plan_of([50, 60]), SPACE)
    with pytest.raises(ProgramError, match=r"route 0 moves .* as 4 bytes an element"):
        RouteRuns.of(plan_of([1, 2], width=4), SPACE)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 6), st.data())
@settings(max_examples=150)
def test_parts_of_some_routes(sizes: list[int], rounds: int, data: st.DataObject) -> None:
    """Equal parts and parts of groups alike, against the plan's own spans."""
    total = sum(sizes)
    ends = np.cumsum(sizes)
    intervals = [np.array([[end - size + 1, end + 1]]) for end, size in zip(ends.tolist(), sizes, strict=True)]
    starts = np.array(sorted({1} | data.draw(st.sets(st.integers(1, total)))))
    numbers = np.array([data.draw(st.integers(0, rounds - 1)) for _ in starts])
    whole: Schedule | GroupedSchedule = Schedule.of(np.array(sizes), rounds)
    if data.draw(st.booleans()):
        whole = GroupedSchedule.of(intervals, Groups(starts, numbers), rounds)
    routes = data.draw(st.permutations(range(len(sizes))))[: data.draw(st.integers(1, len(sizes)))]
    mine = of_routes(whole, np.array(routes))
    assert part_elements(mine).tolist() == [sizes[route] for route in routes]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part, first, count, number, before in pieces_of(mine).T.tolist():
        spans = seen.setdefault((part, number), [])
        assert before == sum(stop - start for start, stop in spans)
        spans.append((first, first + count))
    for part, route in enumerate(routes):
        for number in range(rounds):
            assert seen.get((part, number), []) == whole.spans(route, number)
    width, group = np.array([1 + part % 3 for part in range(len(routes))]), np.array(routes) % 2
    expected = np.zeros((2, rounds), dtype=np.int64)
    np.add.at(expected, group, whole.elements(0, rounds, np.array(routes)) * width[:, None])
    assert sums_by_round(mine, width, group, 2).tolist() == expected.tolist()
    if isinstance(mine, GroupedSchedule):
        again = GroupedSchedule.of_pieces(rounds, np.diff(mine.bounds), mine.table[:, 1], mine.sizes)
        assert again.table.tolist() == mine.table.tolist()
        assert again.bounds.tolist() == mine.bounds.tolist()


def test_examples_in_docstrings() -> None:
    for module in (grids, hops, parts):
        assert doctest.testmod(module).attempted > 1
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("seed", range(4))
def test_route_runs_of_random_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=2, buffer_bytes=64)
    found = RouteRuns.of(plan, crossing.space)
    elements = np.bincount(found.load, weights=found.runs[:, 1] * found.runs[:, 3])
    for route, load in zip(plan.routes, found.load_of_route.tolist(), strict=True):
        assert elements[load] == route.runs.elements
