"""How the parts of some routes spread over rounds: what a program keeps of a plan's schedule.

A plan's schedule is of all its routes. A buffer has some of them, so it keeps the same facts of those: a few numbers a
route where parts are equal, and the pieces of each where groups of ids stay together. Either gives the *pieces* of
every part, consecutive ids of a route that travel in one round.

>>> equal = of_routes(Schedule.of(np.array([7, 1, 4]), rounds=3), np.array([2, 0]))
>>> pieces_of(equal).T.tolist()                                      # part, first rank, ids, round, ids before
[[0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [0, 2, 2, 2, 0], [1, 0, 3, 0, 0], [1, 3, 2, 1, 0], [1, 5, 2, 2, 0]]
>>> sums_by_round(equal, np.array([2, 4]), np.array([0, 0]), 1).tolist()
[[14, 10, 12]]
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges
from transfer_exec.schedule import GroupedSchedule, Schedule

Spread: TypeAlias = Schedule | GroupedSchedule
"""How the ids of some routes spread over rounds."""


def of_routes(schedule: Spread, routes: IdArray) -> Spread:
    """The same for some routes, in the order given."""
    if isinstance(schedule, Schedule):
        return Schedule(schedule.rounds, schedule.every[routes], schedule.extra[routes], schedule.offset[routes])
    counts = np.diff(schedule.bounds)[routes]
    rows = expand_ranges(schedule.bounds[routes], counts)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return GroupedSchedule(schedule.rounds, schedule.table[rows], bounds, schedule.sizes[rows])


def pieces_of(schedule: Spread) -> IdArray:
    """Part, first rank, ids, round, and the ids of the part that travel before in that round; shape ``(5, pieces)``."""
    if isinstance(schedule, Schedule):
        counted = schedule.elements(0, schedule.rounds)
        first = np.cumsum(counted, axis=1) - counted
        part, number = np.nonzero(counted)
        return np.stack([part, first[part, number], counted[part, number], number, np.zeros_like(part)])
    part = np.repeat(np.arange(len(schedule.bounds) - 1), np.diff(schedule.bounds))
    first, number, inside = schedule.table.T
    return np.stack([part, first, schedule.sizes, number, inside])


def part_elements(schedule: Spread) -> IdArray:
    """Ids of every part, all rounds together."""
    if isinstance(schedule, Schedule):
        return schedule.every * schedule.rounds + schedule.extra
    ends = np.concatenate([[0], np.cumsum(schedule.sizes)]).astype(np.int64)
    counted: IdArray = np.diff(ends[schedule.bounds])
    return counted


def sums_by_round(schedule: Spread, item_bytes: IdArray, group: IdArray, groups: int) -> IdArray:
    """Bytes of groups of parts in every round; shape ``(groups, rounds)``.

    Where parts are equal, the rounds that have an element more of one are consecutive, so it adds to three places and
    not to every round.
    """
    change = np.zeros((groups, schedule.rounds + 1), dtype=np.int64)
    if isinstance(schedule, GroupedSchedule):
        part, _, sizes, number, _ = pieces_of(schedule)
        np.add.at(change, (group[part], number), sizes * item_bytes[part])
        return change[:, :-1]
    begin, end = schedule.offset, schedule.offset + schedule.extra
    over = end > schedule.rounds
    np.add.at(change, (group, np.zeros_like(group)), (schedule.every + over) * item_bytes)
    np.add.at(change, (group, begin), item_bytes)
    np.add.at(change, (group, np.where(over, end - schedule.rounds, end)), -item_bytes)
    summed: IdArray = np.cumsum(change, axis=1)[:, :-1]
    return summed
