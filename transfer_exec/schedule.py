"""Which elements of a route travel in which round.

Of a route with ``q * rounds + m`` elements every round carries q, and m rounds in a row, around the end if need be,
carry one more. Those m begin where the route before left off, so that over all routes the rounds differ by one
element at most; a route shorter than the number of rounds has q = 0 and spreads the same way.

>>> plan = Schedule.of(np.array([7, 1, 4]), rounds=3)
>>> [[plan.spans(route, number) for number in range(3)] for route in range(3)]
[[[(0, 3)], [(3, 5)], [(5, 7)]], [[], [(0, 1)], []], [[(0, 1)], [(1, 2)], [(2, 4)]]]

Where ids stay together, each group of them has a round, and a route's part is what it carries of the round's groups:

>>> groups = Groups(starts=np.array([1, 4, 6]), rounds=np.array([0, 1, 0]))
>>> together = GroupedSchedule.of([np.array([[2, 7]])], groups, rounds=2)               # ids 2 3 | 4 5 | 6
>>> [together.spans(0, number) for number in range(2)]
[[(0, 2), (4, 5)], [(2, 4)]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Equal parts.

    Attributes
    ----------
    rounds
        At least 1.
    every
        Elements that each round carries, per route.
    extra
        Rounds that carry one more, per route; below ``rounds``.
    offset
        The first of those rounds, per route.
    """

    rounds: int
    every: IdArray
    extra: IdArray
    offset: IdArray

    @staticmethod
    def of(sizes: IdArray, rounds: int) -> Schedule:
        """Spread routes of these many elements over the rounds."""
        every, extra = sizes // rounds, sizes % rounds
        return Schedule(rounds, every, extra, (np.cumsum(extra) - extra) % rounds)

    def elements(self, first: int, last: int, routes: IdArray | slice = slice(None)) -> IdArray:
        """Elements of every route, or some, in rounds ``first:last``; shape ``(routes, last - first)``."""
        late = (np.arange(first, last, dtype=np.int64)[None, :] - self.offset[routes][:, None]) % self.rounds
        counted: IdArray = self.every[routes][:, None] + (late < self.extra[routes][:, None])
        return counted

    def spans(self, route: int, number: int) -> list[tuple[int, int]]:
        """Half-open ranges of the ranks of one route's ids that travel in one round, ascending, none empty."""
        every, extra, offset = int(self.every[route]), int(self.extra[route]), int(self.offset[route])
        wrapped = max(offset + extra - self.rounds, 0)

        def before(limit: int) -> int:
            return every * limit + min(limit, wrapped) + min(max(limit - offset, 0), extra - wrapped)

        first, last = before(number), before(number + 1)
        return [(first, last)] if first < last else []


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Ids that travel in one round.

    Attributes
    ----------
    starts
        First id of every group, ascending; a group ends where the next begins. int64, shape ``(groups,)``.
    rounds
        Its round.
    """

    starts: IdArray
    rounds: IdArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupedSchedule:
    """Parts that keep groups of ids together.

    Attributes
    ----------
    rounds
        At least 1.
    table
        First rank, round, and rank in the round's part of every piece, by route and rank; int64, shape ``(pieces, 3)``.
    bounds
        Where each route's pieces begin.
    sizes
        Elements of every piece.
    """

    rounds: int
    table: IdArray
    bounds: IdArray
    sizes: IdArray

    @staticmethod
    def of(intervals: Sequence[IdArray], groups: Groups, rounds: int) -> GroupedSchedule:
        """Cut routes with these intervals of ids; every id is in a group."""
        counts, numbers, sizes = [], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for mine in intervals:
            group, _, count = cut_by_groups(mine, groups.starts)
            number = groups.rounds[group]
            opens = np.ones(len(number), dtype=bool)
            opens[1:] = number[1:] != number[:-1]
            heads = np.flatnonzero(opens)
            counts.append(len(heads))
            numbers.append(number[heads])
            sizes.append(np.add.reduceat(count, heads))
        pieces = np.array(counts, dtype=np.int64)
        return GroupedSchedule.of_pieces(rounds, pieces, np.concatenate(numbers), np.concatenate(sizes))

    @staticmethod
    def of_pieces(rounds: int, counts: IdArray, number: IdArray, sizes: IdArray) -> GroupedSchedule:
        """From the pieces of every route, in order: how many, and the round and ids of each."""
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        part = np.repeat(np.arange(len(counts)), counts)
        reached = np.cumsum(sizes) - sizes
        first = reached - reached[bounds[part]]
        order = np.lexsort((number, part))
        before = np.cumsum(sizes[order]) - sizes[order]
        key = part * rounds + number
        inside = np.empty_like(before)
        inside[order] = before - before[np.searchsorted(key[order], key[order])]
        return GroupedSchedule(rounds, np.stack([first, number, inside], axis=1), bounds, sizes)

    def elements(self, first: int, last: int, routes: IdArray | slice = slice(None)) -> IdArray:
        """As ``Schedule.elements``."""
        chosen = np.arange(len(self.bounds) - 1)[routes]
        out = np.zeros((len(chosen), last - first), dtype=np.int64)
        for row, route in zip(out, chosen.tolist(), strict=True):
            mine = slice(self.bounds[route], self.bounds[route + 1])
            number = self.table[mine, 1]
            inside = (number >= first) & (number < last)
            np.add.at(row, number[inside] - first, self.sizes[mine][inside])
        return out

    def spans(self, route: int, number: int) -> list[tuple[int, int]]:
        """As ``Schedule.spans``."""
        mine = slice(self.bounds[route], self.bounds[route + 1])
        here = self.table[mine, 1] == number
        first = self.table[mine, 0][here]
        return list(zip(first.tolist(), (first + self.sizes[mine][here]).tolist(), strict=True))


def cut_by_groups(intervals: IdArray, starts: IdArray) -> tuple[IdArray, IdArray, IdArray]:
    """Stretches of a sorted set of ids that lie in one group: group, rank of the first id, elements."""
    lengths = intervals[:, 1] - intervals[:, 0]
    begins = np.cumsum(lengths) - lengths
    first = np.searchsorted(starts, intervals[:, 0], side="right") - 1
    last = np.searchsorted(starts, intervals[:, 1] - 1, side="right") - 1
    counts = last - first + 1
    owner = np.repeat(np.arange(len(intervals)), counts)
    group = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rank = begins[owner] + np.maximum(starts[group] - intervals[owner, 0], 0)
    return group, rank, np.diff(np.append(rank, lengths.sum()))
