"""Sets of element ids as sorted strided runs.

A run ``(start, length, stride, count)`` is ``count`` stretches of ``length`` consecutive ids, ``stride`` apart: the
columns 2:4 of a 3 x 8 matrix whose ids begin at 1 are the one run ``(3, 2, 8, 3)``. The set operations work on the
plain intervals below; runs are how a table is kept, printed and sent. Equal sets have equal tables.

>>> columns = RunTable.from_runs([(3, 2, 8, 3)])
>>> columns.ids().tolist()
[3, 4, 11, 12, 19, 20]
>>> columns.intersect(RunTable.from_intervals([[4, 12]]))
RunTable([4, 1, 1, 1], [11, 1, 1, 1])
>>> columns.slice(1, 4).ids().tolist()
[4, 11, 12]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LayoutError

_MIN_COUNT = 3


@dataclass(frozen=True, eq=False)
class RunTable:
    """A set of ids >= 0 in its unique normal form.

    Attributes
    ----------
    runs
        int64, shape ``(n, 4)``: start, length, stride, count; sorted by start, made by the constructors below.
    """

    runs: IdArray

    @staticmethod
    def empty() -> RunTable:
        """The empty set."""
        return RunTable(np.empty((0, 4), dtype=np.int64))

    @staticmethod
    def from_intervals(intervals: npt.ArrayLike) -> RunTable:
        """The union of half-open intervals ``(start, stop)``, in any order, overlapping or not; shape ``(n, 2)``."""
        array = np.asarray(intervals, dtype=np.int64).reshape(-1, 2)
        return RunTable(_compress(merge_intervals(array)))

    @staticmethod
    def from_runs(runs: npt.ArrayLike) -> RunTable:
        """The union of runs ``(start, length, stride, count)``, in any order; shape ``(n, 4)``.

        Raises
        ------
        LayoutError
            If a start is negative or a length or count is below 1, or a step of several stretches is not positive.
        """
        array = np.asarray(runs, dtype=np.int64).reshape(-1, 4)
        bad = (array[:, 0] < 0) | (array[:, 1] < 1) | (array[:, 3] < 1) | ((array[:, 3] > 1) & (array[:, 2] < 1))
        if bad.any():
            raise LayoutError(f"run {array[bad][0].tolist()}: expected start >= 0, length, count and stride >= 1")
        return RunTable.from_intervals(expand_runs(array))

    @staticmethod
    def from_ids(ids: npt.ArrayLike) -> RunTable:
        """The set of some ids, in any order, repeated or not."""
        unique = np.unique(np.asarray(ids, dtype=np.int64))
        if not len(unique):
            return RunTable.empty()
        breaks = np.flatnonzero(np.diff(unique) != 1) + 1
        starts = np.concatenate([unique[:1], unique[breaks]])
        stops = np.concatenate([unique[breaks - 1], unique[-1:]]) + 1
        return RunTable.from_intervals(np.stack([starts, stops], axis=1))

    @cached_property
    def intervals(self) -> IdArray:
        """The set as maximal half-open intervals, ascending; shape ``(n, 2)``, read-only."""
        expanded = merge_intervals(expand_runs(self.runs))
        expanded.setflags(write=False)
        return expanded

    @cached_property
    def elements(self) -> int:
        """Number of ids."""
        return int((self.runs[:, 1] * self.runs[:, 3]).sum())

    def ids(self) -> IdArray:
        """Every id, ascending: the definition. int64, shape ``(elements,)``."""
        return expand_ranges(self.intervals[:, 0], self.intervals[:, 1] - self.intervals[:, 0])

    def __len__(self) -> int:
        return len(self.runs)

    def __bool__(self) -> bool:
        return len(self.runs) > 0

    def __repr__(self) -> str:
        shown = ", ".join(str(run) for run in self.runs[:4].tolist())
        return f"RunTable({shown}{', ...' if len(self.runs) > 4 else ''})"

    def same_as(self, other: RunTable) -> bool:
        """Whether both are the same set."""
        return np.array_equal(self.runs, other.runs)

    def union(self, *others: RunTable) -> RunTable:
        """Ids in any of the tables."""
        return RunTable.from_intervals(np.concatenate([self.intervals, *(other.intervals for other in others)]))

    def intersect(self, other: RunTable) -> RunTable:
        """Ids in both."""
        mine, theirs = overlaps(self.intervals, other.intervals)
        starts = np.maximum(self.intervals[mine, 0], other.intervals[theirs, 0])
        stops = np.minimum(self.intervals[mine, 1], other.intervals[theirs, 1])
        return RunTable(_compress(np.stack([starts, stops], axis=1)))

    def subtract(self, other: RunTable) -> RunTable:
        """Ids here and not in the other."""
        if not self or not other:
            return self
        edges = other.intervals
        low = min(int(self.intervals[0, 0]), int(edges[0, 0]))
        high = max(int(self.intervals[-1, 1]), int(edges[-1, 1]))
        starts = np.concatenate([[low], edges[:, 1]])
        stops = np.concatenate([edges[:, 0], [high]])
        gaps = np.stack([starts, stops], axis=1)
        return self.intersect(RunTable.from_intervals(gaps[stops > starts]))

    def slice(self, first: int, last: int) -> RunTable:
        """The ids of rank ``first:last`` in ascending order."""
        intervals = self.intervals
        lengths = intervals[:, 1] - intervals[:, 0]
        ends = np.cumsum(lengths)
        begins = ends - lengths
        starts = intervals[:, 0] + np.clip(first - begins, 0, lengths)
        stops = intervals[:, 0] + np.clip(last - begins, 0, lengths)
        kept = stops > starts
        return RunTable(_compress(np.stack([starts[kept], stops[kept]], axis=1)))

    def split(self, cuts: Sequence[int]) -> tuple[RunTable, ...]:
        """Consecutive parts between ascending ranks: ``split([a, b])`` is ranks ``0:a``, ``a:b`` and ``b:elements``."""
        edges = [0, *cuts, self.elements]
        return tuple(self.slice(first, last) for first, last in pairwise(edges))


def expand_ranges(starts: IdArray, lengths: IdArray) -> IdArray:
    """Concatenate ``arange(start, start + length)`` for every pair, without a Python loop."""
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    ranges: IdArray = np.arange(total, dtype=np.int64) + np.repeat(starts - offsets, lengths)
    return ranges


def merge_intervals(intervals: IdArray) -> IdArray:
    """Sort half-open intervals, drop the empty, and fuse those that overlap or touch."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return np.empty((0, 2), dtype=np.int64)
    # Which begin belongs to which end is of no account: before a begin as many must have ended as have begun.
    begins, ends = np.sort(intervals[:, 0]), np.sort(intervals[:, 1])
    opens = np.ones(len(intervals), dtype=bool)
    opens[1:] = begins[1:] > ends[:-1]
    firsts = np.flatnonzero(opens)
    lasts = np.concatenate([firsts[1:], [len(intervals)]]) - 1
    return np.stack([begins[firsts], ends[lasts]], axis=1)


def overlaps(left: IdArray, right: IdArray) -> tuple[IdArray, IdArray]:
    """Every pair of overlapping intervals: row numbers in ``left`` and in ``right``.

    ``right`` must be sorted and disjoint; ``left`` may be in any order. Pairs come in the order of ``left``.
    """
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    return np.repeat(np.arange(len(left)), counts), expand_ranges(first, counts)


def with_gaps(intervals: IdArray) -> tuple[IdArray, IdArray]:
    """Sorted, disjoint intervals and the gaps around them, from 0 on, none empty; and which is which: -1 is a gap."""
    edges = np.concatenate([[0], intervals.reshape(-1), [np.iinfo(np.int64).max]])
    line = np.stack([edges[:-1], edges[1:]], axis=1)
    which = np.full(len(line), -1, dtype=np.int64)
    which[1::2] = np.arange(len(intervals))
    filled = line[:, 1] > line[:, 0]
    return line[filled], which[filled]


def expand_runs(runs: IdArray) -> IdArray:
    """The half-open intervals of runs ``(start, length, stride, count)``, in the runs' order; shape ``(m, 2)``."""
    counts = runs[:, 3]
    steps = expand_ranges(np.zeros(len(runs), dtype=np.int64), counts)
    starts = np.repeat(runs[:, 0], counts) + steps * np.repeat(runs[:, 2], counts)
    return np.stack([starts, starts + np.repeat(runs[:, 1], counts)], axis=1)


def _compress(intervals: IdArray) -> IdArray:
    """Fold regular sequences of three or more equal intervals into runs, greedily from the left."""
    count = len(intervals)
    lengths = intervals[:, 1] - intervals[:, 0]
    if count < _MIN_COUNT:
        return np.stack([intervals[:, 0], lengths, lengths, np.ones(count, dtype=np.int64)], axis=1)
    steps = np.diff(intervals[:, 0])
    linked = lengths[1:] == lengths[:-1]
    # Link i joins interval i to i + 1; it goes on from link i - 1 when both hold and step alike.
    goes_on = np.zeros(count - 1, dtype=bool)
    goes_on[1:] = linked[1:] & linked[:-1] & (steps[1:] == steps[:-1])
    in_chain = goes_on.copy()
    in_chain[:-1] |= goes_on[1:]
    chain_opens = in_chain & ~goes_on
    # An interval shared by two chains stays with the earlier one, which costs the later one its first link.
    lost = np.zeros(count - 1, dtype=bool)
    lost[1:] = chain_opens[1:] & in_chain[:-1]
    in_chain &= ~lost
    joined = np.zeros(count, dtype=bool)
    joined[1:] = in_chain
    heads = np.flatnonzero(~joined)
    counts = np.diff(np.concatenate([heads, [count]]))
    strides = lengths[heads].copy()
    several = counts > 1
    strides[several] = steps[heads[several]]
    return np.stack([intervals[heads, 0], lengths[heads], strides, counts], axis=1)
