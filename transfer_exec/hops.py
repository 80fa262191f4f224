"""The hops of many routes as arrays: large plans have millions of them, and every look at all of them is one of these.

>>> from layout_algebra.runs import RunTable
>>> from transfer_exec.plan import Hop, Route, Stage
>>> hops = (Hop(Stage.RECEIVE, "t", "a"), Hop(Stage.INTERNAL, "a", "b"))
>>> table = HopTable.of([Route(RunTable.from_ids([1, 2]), 4, "t", hops)], ("t", "a", "b"))
>>> table.stage.tolist(), table.source.tolist(), table.target.tolist()
([0, 2], [0, 1], [1, 2])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from layout_algebra.dtypes import IdArray

if TYPE_CHECKING:
    from transfer_exec.plan import Route


@dataclass(frozen=True, slots=True, eq=False)
class HopTable:
    """Hops of all routes, in order.

    Attributes
    ----------
    counts
        Hops of every route; int64, shape ``(routes,)``.
    route, stage, source, target
        Of every hop; workers by number, -1 for one that is none of those given. int64, shape ``(hops,)``.
    """

    counts: IdArray
    route: IdArray
    stage: IdArray
    source: IdArray
    target: IdArray

    @staticmethod
    def of(routes: Sequence[Route], workers: Sequence[str]) -> HopTable:
        """Look at every hop once; workers are numbered in the order given.

        Routes of one plan share the objects of equal hops, so names are looked up once for each object.
        """
        number = {worker: position for position, worker in enumerate(workers)}
        counts = np.array([len(route.hops) for route in routes], dtype=np.int64)
        distinct = {id(hop): hop for route in routes for hop in route.hops}
        place = dict(zip(distinct, range(len(distinct)), strict=True))
        everywhere = map(id, chain.from_iterable(route.hops for route in routes))
        which = np.fromiter(map(place.__getitem__, everywhere), dtype=np.int64, count=int(counts.sum()))

        def column(values: Iterator[int]) -> IdArray:
            return np.fromiter(values, dtype=np.int64, count=len(distinct))[which]

        return HopTable(
            counts=counts,
            route=np.repeat(np.arange(len(routes)), counts),
            stage=column(hop.stage._value_ for hop in distinct.values()),
            source=column(number.get(hop.source, -1) for hop in distinct.values()),
            target=column(number.get(hop.target, -1) for hop in distinct.values()),
        )

    def chunks(self, routes: int) -> Iterator[tuple[int, HopTable]]:
        """The hops of so many routes at a time, which count from 0 in each table, and the first one's number."""
        ends = np.cumsum(self.counts)
        for first in range(0, len(self.counts), routes):
            counts = self.counts[first : first + routes]
            rows = slice(int(ends[first] - counts[0]), int(ends[first + len(counts) - 1]))
            yield (
                first,
                HopTable(counts, self.route[rows] - first, *(c[rows] for c in (self.stage, self.source, self.target))),
            )
