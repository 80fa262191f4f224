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
        """Look at every hop once; workers are numbered in the order given."""
        number = {worker: position for position, worker in enumerate(workers)}
        counts = np.array([len(route.hops) for route in routes], dtype=np.int64)
        total = int(counts.sum())

        def column(values: Iterator[int]) -> IdArray:
            return np.fromiter(values, dtype=np.int64, count=total)

        stages, sources, targets = (chain.from_iterable(route.hops for route in routes) for _ in range(3))
        return HopTable(
            counts=counts,
            route=np.repeat(np.arange(len(routes)), counts),
            stage=column(hop.stage._value_ for hop in stages),
            source=column(number.get(hop.source, -1) for hop in sources),
            target=column(number.get(hop.target, -1) for hop in targets),
        )
