"""count_rounds: the fewest rounds that fit, exactly counted; budgets that hold no element."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.runs import RunTable
from transfer_exec.errors import BudgetError
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.rounds import checked_budget, count_rounds, rounds_worth

WORKERS = ("a0", "a1", "b0", "b1")
WAYS = [
    (Hop(Stage.RECEIVE, "t0", "a0"), Hop(Stage.INTERNAL, "a0", "a1")),
    (Hop(Stage.RECEIVE, "t0", "a1"), Hop(Stage.EXTERNAL, "a1", "b0"), Hop(Stage.INTERNAL, "b0", "b1")),
    (Hop(Stage.RECEIVE, "t0", "b1"), Hop(Stage.EXTERNAL, "b1", "a0")),
]


def routes_of(rows: list[tuple[int, int, int]]) -> tuple[Route, ...]:
    out, start = [], 1
    for elements, item_bytes, way in rows:
        out.append(Route(RunTable.from_intervals([[start, start + elements]]), item_bytes, "t0", WAYS[way]))
        start += elements
    return tuple(out)


def fits(routes: tuple[Route, ...], rounds: int, buffer_bytes: int) -> bool:
    """Counted part by part."""
    plan = Plan("s", ("t0",), WORKERS, (0, 1, 1, 2, 2), routes, rounds, buffer_bytes, 1.0, "", 1.0, 1.0)
    for number in range(rounds):
        uses: Counter[tuple[str, Stage | None]] = Counter()
        for index, route in enumerate(routes):
            size = plan.part_elements(index, number) * route.item_bytes
            uses["t0", None] += size
            for hop in route.hops:
                uses[hop.target, hop.stage] += size
        if max(uses.values()) > buffer_bytes:
            return False
    return True


rows = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2)), min_size=1, max_size=6)


@settings(max_examples=150)
@given(rows, st.integers(8, 60))
def test_the_smallest_number_that_fits(drawn: list[tuple[int, int, int]], buffer_bytes: int) -> None:
    routes = routes_of(drawn)
    rounds = count_rounds(routes, buffer_bytes)
    assert fits(routes, rounds, buffer_bytes)
    packed = sum(route.bytes for route in routes)
    for fewer in range(max(1, packed // buffer_bytes), rounds):
        assert not fits(routes, fewer, buffer_bytes)


def test_many_short_routes_still_end() -> None:
    routes = routes_of([(1, 8, number % 3) for number in range(400)])
    rounds = count_rounds(routes, 8)
    assert rounds == 400
    assert fits(routes, rounds, 8)


def test_a_buffer_for_everything_is_one_round() -> None:
    assert count_rounds(routes_of([(100, 8, 0), (50, 4, 1)]), 1 << 20) == 1
    assert count_rounds((), 1) == 1


def test_a_buffer_below_one_element() -> None:
    with pytest.raises(BudgetError, match=r"buffer_bytes is 7, and one element \(id 3, packed by t0\) has 8 bytes"):
        count_rounds(routes_of([(2, 4, 0), (3, 8, 1)]), 7)


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "64", None, float("nan"), float("inf"), 2**70])
def test_a_budget_that_is_none(budget: object) -> None:
    with pytest.raises(
        BudgetError, match=r"buffer_bytes is .*; expected (a whole number of bytes, at least 1|at most)"
    ):
        checked_budget(budget)
    assert checked_budget(np.int64(7)) == 7


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, "2", None])
def test_a_depth_that_is_none(depth: object) -> None:
    with pytest.raises(BudgetError, match=r"depth is .*; expected a whole number of rounds under way, at least 1"):
        checked_budget(64, None, depth)


@pytest.mark.parametrize("overhead", [-1, "1", True, float("nan"), float("inf")])
def test_an_overhead_that_is_none(overhead: object) -> None:
    with pytest.raises(BudgetError, match=r"round_overhead_s is .*; expected seconds of at least 0"):
        checked_budget(64, overhead)


def test_more_rounds_than_the_budget_needs_where_they_are_worth_it() -> None:
    routes = routes_of([(100, 4, 0)])
    assert count_rounds(routes, 400) == 1
    assert count_rounds(routes, 400, at_least=7) == 7
    assert count_rounds(routes, 400, at_least=1000) == 100, "never more than elements"
    assert count_rounds(routes, 40, at_least=3) == 10, "the budget counts first"


def test_rounds_worth_their_overhead() -> None:
    """The number is the best of its own estimate."""
    for load_s, overhead_s, depth in [(0.3, 1e-3, 2), (1.0, 2e-2, 3), (0.01, 1.0, 2)]:
        showing_s = (min(depth, 3) - 1) * load_s
        costs = {rounds: showing_s / rounds + rounds * overhead_s for rounds in range(1, 65)}
        assert costs[rounds_worth(load_s, overhead_s, depth)] <= min(costs.values()) * 1.02
    assert rounds_worth(1.0, 1e-3, 1) == 1
    assert rounds_worth(0.0, 1e-3, 2) == 1
    assert rounds_worth(1.0, 0.0, 2) == 64
    for bad in [(1.0, -1.0, 2), (1.0, float("nan"), 2), (1.0, 1.0, 0)]:
        with pytest.raises(BudgetError):
            rounds_worth(*bad)
