"""Programs that keep every link's time low: first the highest, then those of each group of links.

Columns are fractions that put bytes on links, sums tie fractions together. ``solve`` minimizes the longest time of
any link. With that time as a limit it avoids detours, and then minimizes for each kind of link the longest time of all
and of each group, so that work that is not at the bottleneck is shared out as well.

>>> program = LevelProgram(speeds=[1.0, 3.0], groups=[(0, 0), (0, 1)], unit_s=1.0)
>>> columns = [program.column([(0, 8)]), program.column([(1, 8)])]
>>> program.sum([(column, 1.0) for column in columns], 1.0)
>>> solution = program.solve()
>>> [round(value, 6) for value in solution.values], round(solution.longest_s, 6)
([0.25, 0.75], 2.0)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer_exec.solver import Triplets, minimize

_SLACK = 1e-7
"""How much longer than the optimum, relatively, the second program's solution may be."""
_DETOUR = 10.0
"""Weight per link of detours beside the times of links: more than any detour can gain off the bottleneck."""

Loads = Iterable[tuple[int, float]]
"""(link, bytes)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of all columns, and the longest time of any link in seconds: the least possible, or short enough."""

    values: tuple[float, ...]
    longest_s: float


class LevelProgram:
    """A program that is being written down.

    Parameters
    ----------
    speeds
        Bytes per second of every link.
    groups
        (kind, place) of every link.
    unit_s
        About as long as the result, to keep the numbers near one.
    """

    def __init__(self, *, speeds: Sequence[float], groups: Sequence[tuple[int, int]], unit_s: float) -> None:
        self._speeds, self._groups, self._unit_s = [float(speed) for speed in speeds], groups, unit_s
        self._loads = Triplets()
        self._constants: dict[int, float] = {}
        self._sums = Triplets()
        self._totals: list[float] = []
        self._detours: list[float] = []
        self._later = Triplets()

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self._detours)

    def constant(self, loads: Loads) -> None:
        """Bytes that are on links whatever the values; negative entries of columns take from them."""
        for link, count in loads:
            self._constants[link] = self._constants.get(link, 0) + count

    def column(self, loads: Loads, detour: float = 0.0, *, later: Loads = ()) -> int:
        """A fraction that puts so many bytes on links if it is one; returns its number.

        ``later`` is what it will probably put on links that this program does not decide; it is shared out like the
        rest, but no time of such a link is part of the optimum.
        """
        number = len(self._detours)
        self._detours.append(detour)
        for link, count in loads:
            value = count / (self._speeds[link] * self._unit_s)
            if value:
                self._loads.add(link, number, value)
        for link, count in later:
            self._later.add(link, number, count / (self._speeds[link] * self._unit_s))
        return number

    def sum(self, terms: Iterable[tuple[int, float]], total: float) -> None:
        """Columns times factors that must add up to a total."""
        for column, factor in terms:
            self._sums.add(len(self._totals), column, factor)
        self._totals.append(total)

    def solve(self, *, enough_s: float = 0.0) -> Solution | None:
        """The best values, or None if the solver gives up.

        Parameters
        ----------
        enough_s
            A time that is short enough: no detour is taken to be faster than this.
        """
        links, loads, constants = self._rows()
        if not self.columns:
            return Solution((), max(constants, default=0.0) * self._unit_s)
        if enough_s:
            at_once = self._share_out(links, loads, constants, enough_s / self._unit_s)
            if at_once is not None:
                return Solution(at_once, enough_s)
        longest = Triplets(list(range(len(links))), [self.columns] * len(links), [-1.0] * len(links))
        found = minimize(
            [0.0] * self.columns + [1.0],
            loads.extended(longest),
            [-constant for constant in constants],
            self._sums,
            self._totals,
        )
        if found is None:
            return None
        optimum = float(found[self.columns])
        better = self._share_out(links, loads, constants, optimum)
        return Solution(self._fractions(found) if better is None else better, optimum * self._unit_s)

    def _fractions(self, values: npt.NDArray[np.float64]) -> tuple[float, ...]:
        return tuple(np.maximum(values[: self.columns], 0.0).tolist())

    def key(self) -> bytes:
        """Digest of everything that the values depend on: programs of one key have the same values."""
        links, loads, constants = self._rows()
        places = {place: number for number, place in enumerate(sorted({self._groups[link] for link in links}))}
        state = hashlib.blake2b(digest_size=16)
        for whole in (loads.rows, loads.columns, self._sums.rows, self._sums.columns, self._later.columns):
            state.update(np.array([len(whole), *whole], dtype=np.int64).tobytes())
        for real in (loads.values, self._sums.values, constants, self._totals, self._detours):
            state.update(np.array([len(real), *real], dtype=np.float64).tobytes())
        state.update(repr([(self._groups[link][0], places[self._groups[link]]) for link in links]).encode())
        return state.digest()

    def _rows(self) -> tuple[list[int], Triplets, list[float]]:
        """Links that anything loads, what columns put on them by row, and what is on them anyhow; in units of time."""
        links = sorted(set(self._loads.rows) | {link for link, count in self._constants.items() if count})
        row_of = {link: row for row, link in enumerate(links)}
        loads = Triplets([row_of[link] for link in self._loads.rows], self._loads.columns, self._loads.values)
        return links, loads, [self._constants.get(link, 0) / (self._speeds[link] * self._unit_s) for link in links]

    def _share_out(
        self, links: list[int], loads: Triplets, constants: list[float], optimum: float
    ) -> tuple[float, ...] | None:
        """The second program: the same columns, then the longest time of each group of links and of each kind."""
        groups = sorted({self._groups[link] for link in links})
        number_of = {group: self.columns + number for number, group in enumerate(groups)}
        kinds = sorted({kind for kind, _ in groups})
        kind_of = {kind: self.columns + len(groups) + number for number, kind in enumerate(kinds)}
        places = Counter(kind for kind, _ in groups)
        costs = [_DETOUR * len(links) * detour for detour in self._detours]
        costs += [1.0 / places[kind] for kind, _ in groups] + [1.0] * len(kinds)
        caps = Triplets()
        for row, link in enumerate(links):
            caps.add(row, number_of[self._groups[link]], -1.0)
        limits = [-constant for constant in constants]
        for group, number in number_of.items():
            caps.add(len(limits), number, 1.0)
            caps.add(len(limits), kind_of[group[0]], -1.0)
            limits.append(0.0)
        for number in kind_of.values():
            caps.add(len(limits), number, 1.0)
            limits.append(optimum * (1 + _SLACK))
        self._share_out_later(caps, limits, costs)
        found = minimize(costs, loads.extended(caps), limits, self._sums, self._totals)
        return None if found is None else self._fractions(found)

    def _share_out_later(self, caps: Triplets, limits: list[float], costs: list[float]) -> None:
        """Rows for what is decided later: the longest time of each kind of such links is part of the costs."""
        links = sorted(set(self._later.rows))
        kinds = sorted({self._groups[link][0] for link in links})
        number_of = {kind: len(costs) + number for number, kind in enumerate(kinds)}
        row_of = {link: len(limits) + number for number, link in enumerate(links)}
        for link, column, value in zip(self._later.rows, self._later.columns, self._later.values, strict=True):
            caps.add(row_of[link], column, value)
        for link, row in row_of.items():
            caps.add(row, number_of[self._groups[link][0]], -1.0)
        limits += [0.0] * len(links)
        costs += [1.0] * len(kinds)
