"""Which elements of a route travel in which round.

Of a route with ``q * rounds + m`` elements every round carries q, and m rounds in a row, around the end if need be,
carry one more. Those m begin where the route before left off, so that over all routes the rounds differ by one
element at most; a route shorter than the number of rounds has q = 0 and spreads the same way.

>>> plan = Schedule.of(np.array([7, 1, 4]), rounds=3)
>>> [[plan.span(route, number) for number in range(3)] for route in range(3)]
[[(0, 3), (3, 5), (5, 7)], [(0, 0), (0, 1), (1, 1)], [(0, 1), (1, 2), (2, 4)]]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Spans of element ranks per route and round.

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

    def span(self, route: int, number: int) -> tuple[int, int]:
        """Half-open range of the ranks of one route's ids that travel in one round."""
        every, extra, offset = int(self.every[route]), int(self.extra[route]), int(self.offset[route])
        wrapped = max(offset + extra - self.rounds, 0)

        def before(limit: int) -> int:
            return every * limit + min(limit, wrapped) + min(max(limit - offset, 0), extra - wrapped)

        return before(number), before(number + 1)

    def elements(self, first: int, last: int) -> IdArray:
        """Elements of every route in rounds ``first:last``; shape ``(routes, last - first)``."""
        numbers = np.arange(first, last, dtype=np.int64)
        counted: IdArray = self.every[:, None] + (
            (numbers[None, :] - self.offset[:, None]) % self.rounds < self.extra[:, None]
        )
        return counted
