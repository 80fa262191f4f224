"""The row sweep as a stream: second differences in, in order, affine rectangles out as soon as they end.

Neither all differences nor all rectangles need to be there at once, so that an irregular parameter costs memory for
what it ends up as, not for the way there.

>>> parts = [(np.array([0]), np.array([1])), (np.array([4, 5]), np.array([3, -4]))]
>>> [str(copy) for copy in rectangles(Sweep((3, 4)).run(parts)).slice_copies()]     # 1 2 3 4, then 5 6 7 8, and so on
['0+(3:4,4:1) <- 1+(3:4,4:1)']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from layout_algebra._chain_kernels import CHAIN_FIELDS, PIECE_FIELDS
from layout_algebra._run_kernels import CONSTANT, COPY, runs_of_row
from layout_algebra._sweep_kernels import sweep
from layout_algebra.dtypes import IdArray
from layout_algebra.slice_copy import CopyTable
from layout_algebra.views import view_of

Entries = tuple[IdArray, IdArray]
"""Flat places, ascending, each once, and the second differences there."""

ANY_ID = 1 << 62
_NO_CONSTANTS = np.empty(0, dtype=np.int64)
_HELD_ROWS = 3
"""A rectangle is out at the latest when so many more rows have been seen."""


class Sweep:
    """One sweep over one parameter.

    Parameters
    ----------
    shape
        The parameter's.
    modulus
        Second differences are given modulo this, more than ``2 * top``; 0 says that they are exact.
    top
        Ids are ``1..top``.
    constants
        Numbers past ``top`` that stand for constants, ascending.

    Attributes
    ----------
    dirty
        Whether some element was neither an id, nor a constant, nor 0; to be asked at the end.
    constant_tables
        What was a constant: rectangles whose source start is its number.
    """

    def __init__(
        self, shape: Sequence[int], modulus: int = 0, top: int = ANY_ID, constants: IdArray = _NO_CONSTANTS
    ) -> None:
        self._rows, self._width = view_of(shape)
        self._ring = modulus, top, constants
        self.dirty = False
        self.constant_tables: list[CopyTable] = []

    def run(self, parts: Iterable[Entries]) -> Iterator[tuple[CopyTable, int]]:
        """All rectangles of ids.

        Parameters
        ----------
        parts
            Second differences; parts follow each other.

        Yields
        ------
        tuple
                Rectangles, and a flat place: all rectangles that end before it have been given.
        """
        yield from self._run_in_one_row(parts) if self._rows == 1 else self._run_over_rows(parts)

    def _run_over_rows(self, parts: Iterable[Entries]) -> Iterator[tuple[CopyTable, int]]:
        nothing = np.empty(0, dtype=np.int64)
        row, above, used = 0, -1, 0
        chains, chain_count = np.empty((8, CHAIN_FIELDS), dtype=np.int64), 0
        columns, bends, steps = nothing, nothing, nothing
        waiting = _Waiting()
        for part in _with_end(parts):
            if not waiting.enough(part, (row + 2) * self._width):
                continue
            # fmt: off
            (
                pieces, count, dirty, entry, row, above, chains, chain_count, columns, bends, steps, used,
            ) = sweep(
                waiting.place, waiting.value, part is None, self._rows, self._width, *self._ring,
                row, above, chains, chain_count, columns, bends, steps, used,
            )
            # fmt: on
            waiting.drop(entry)
            self.dirty = self.dirty or dirty
            reached = self._rows if part is None else row - _HELD_ROWS
            yield self._copies_of(pieces[:count]), reached * self._width

    def _run_in_one_row(self, parts: Iterable[Entries]) -> Iterator[tuple[CopyTable, int]]:
        """What the sweep over rows would do, without holding the whole row."""
        column, value, slope = -1, 0, 0
        waiting = _Waiting()
        for part in _with_end(parts):
            if not waiting.enough(part, column):
                continue
            places, values = waiting.place, waiting.value
            known = self._width if part is None else int(places[-1]) + 1
            runs, count, dirty, column, value, slope = runs_of_row(
                places, values, len(places), known, self._width, column, value, slope, *self._ring
            )
            waiting.drop(int(np.searchsorted(places, column, side="right")))
            self.dirty = self.dirty or dirty
            pieces = np.zeros((count, PIECE_FIELDS), dtype=np.int64)
            pieces[:, 1] = runs[:count, 0]
            pieces[:, 2] = 1
            pieces[:, 3:5] = runs[:count, 1:3]
            pieces[:, 6:] = runs[:count, 4:]
            yield self._copies_of(pieces), column

    def _copies_of(self, pieces: IdArray) -> CopyTable:
        """The ids among some pieces; constants are put aside."""
        if len(self._ring[2]):
            self.constant_tables.append(self._table(pieces[pieces[:, 7] == CONSTANT]))
            pieces = pieces[pieces[:, 7] == COPY]
        return self._table(pieces)

    def _table(self, pieces: IdArray) -> CopyTable:
        row, column, height, length, number, step, slope, _ = pieces.T
        table = np.zeros((len(pieces), 8), dtype=np.int64)
        table[:, 0] = row * self._width + column
        table[:, 1] = number
        table[:, 2] = height
        table[:, 3] = np.where(height > 1, self._width, 0)
        table[:, 4] = np.where(height > 1, step, 0)
        table[:, 5] = length
        table[:, 6] = length > 1
        table[:, 7] = np.where(length > 1, slope, 0)
        return CopyTable(table)


class _Waiting:
    """Second differences that the sweep has not used up, and those that have come since."""

    def __init__(self) -> None:
        self.place = self.value = np.empty(0, dtype=np.int64)
        self._others: list[Entries] = []

    def enough(self, part: Entries | None, needed: int) -> bool:
        """Add a part, or None at the end; whether the places now reach ``needed``, or all are there."""
        if part is not None:
            if len(part[0]):
                self._others.append(part)
            if not self._others or self._others[-1][0][-1] < needed:
                return False
        if self._others:
            self.place = np.concatenate([self.place, *(places for places, _ in self._others)])
            self.value = np.concatenate([self.value, *(values for _, values in self._others)])
            self._others.clear()
        return True

    def drop(self, count: int) -> None:
        """Forget the first so many."""
        self.place, self.value = self.place[count:], self.value[count:]


def _with_end(parts: Iterable[Entries]) -> Iterator[Entries | None]:
    yield from parts
    yield None


def rectangles(parts: Iterable[tuple[CopyTable, int]]) -> CopyTable:
    """All that ``Sweep.run`` yields, sorted by target start."""
    rows = np.concatenate([np.empty((0, 8), dtype=np.int64), *(table.rows for table, _ in parts)])
    return CopyTable(rows[np.argsort(rows[:, 0], kind="stable")])
