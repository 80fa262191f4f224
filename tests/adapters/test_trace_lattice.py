"""Grids against plain sets of pairs."""

from __future__ import annotations

import random

import pytest

from adapters.trace_lattice import Axis, Grid, Irregular, meet, minus, nested


def pairs(grid: Grid) -> list[tuple[int, int]]:
    places, numbers = grid.pairs()
    return list(zip(places.tolist(), numbers.tolist(), strict=True))


def plain(start: int, other: int, axes: tuple[Axis, ...]) -> list[tuple[int, int]]:
    out = [(start, other)]
    for extent, step, other_step in axes:
        out = [(place + i * step, number + i * other_step) for place, number in out for i in range(extent)]
    return out


def some_axes(rng: random.Random) -> tuple[int, int, tuple[Axis, ...]]:
    """Axes of a nested layout with gaps, or any axes at all."""
    axes: list[Axis] = []
    if rng.random() < 0.6:
        step = 1
        for _ in range(rng.randint(0, 3)):
            step *= rng.choice([1, 1, 2, 3])
            extent = rng.randint(1, 5)
            axes.append((extent, step, rng.randint(-9, 9)))
            step = step * extent + (rng.randint(0, 3) if rng.random() < 0.3 else 0)
    else:
        axes = [(rng.randint(0, 5), rng.randint(-6, 12), rng.randint(-9, 9)) for _ in range(rng.randint(0, 3))]
    rng.shuffle(axes)
    return rng.randint(0, 30), rng.randint(0, 1000), tuple(axes)


@pytest.mark.parametrize("seed", range(8))
def test_against_plain_pairs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        one, two = some_axes(rng), some_axes(rng)
        lefts, rights = nested(*one), nested(*two)
        assert sorted(pair for grid in lefts for pair in pairs(grid)) == sorted(plain(*one))
        for left in lefts:
            for right in (grid for grid in rights if all(axis[1] for axis in grid.axes)):
                mine, theirs = pairs(left), pairs(right)
                met = [(a, b) for place, a in mine for other, b in theirs if place == other]
                assert sorted(pair for grid in meet(left, right) for pair in pairs(grid)) == sorted(met)
                taken = {place for place, _ in theirs}
                rest = minus(left, right)
                kept = [pair for pair in mine if pair[0] not in taken]
                assert sorted(pair for grid in rest for pair in pairs(grid)) == sorted(kept)
                assert all(is_nested(grid) for grid in rest)
        for grid in lefts:
            assert sorted(pair[::-1] for back in grid.inverse() for pair in pairs(back)) == sorted(pairs(grid))


def is_nested(grid: Grid) -> bool:
    reach = 0
    for extent, step, _ in reversed([axis for axis in grid.axes if axis[1]]):
        if step <= reach:
            return False
        reach += (extent - 1) * step
    return True


def test_regular_views_of_any_size_stay_few() -> None:
    rows = Grid(0, 0, ((1 << 20, 1 << 20, 1 << 20), (1 << 10, 1, 1)))
    whole = Grid(0, 5, ((1 << 40, 1, 1),))
    assert meet(rows, whole) == [Grid(0, 5, ((1 << 20, 1 << 20, 1 << 20), (1 << 10, 1, 1)))]
    assert len(minus(whole, rows)) <= 3
    assert sum(grid.elements for grid in minus(whole, rows)) == (1 << 40) - (1 << 30)


def test_strides_that_do_not_divide_each_other() -> None:
    few = meet(Grid(0, 0, ((100, 7, 1),)), Grid(0, 0, ((100, 5, 1),)))
    assert sum(grid.elements for grid in few) == len({7 * i for i in range(100)} & {5 * i for i in range(100)})
    with pytest.raises(Irregular):
        meet(Grid(0, 0, ((10_000, 7, 1),)), Grid(0, 0, ((10_000, 5, 1),)))
