"""Linear programs over SciPy's HiGHS: the one place that calls it.

>>> less = Triplets([0, 0], [0, 1], [1.0, 1.0])                   # a + b <= 3
>>> equal = Triplets([0], [0], [1.0])                             # a == 1
>>> minimize([0.0, -1.0], less, [3.0], equal, [1.0]).tolist()     # largest b
[1.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse


@dataclass(frozen=True, slots=True)
class Triplets:
    """A sparse matrix that is being written down: row, column and value of every entry."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, column: int, value: float) -> None:
        """One more entry; entries of one place add up."""
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)

    def extended(self, other: Triplets) -> Triplets:
        """The entries of both."""
        return Triplets(self.rows + other.rows, self.columns + other.columns, self.values + other.values)


def minimize(
    costs: Sequence[float], less: Triplets, limits: Sequence[float], equal: Triplets, totals: Sequence[float]
) -> npt.NDArray[np.float64] | None:
    """A vertex that minimizes costs over values >= 0, or None if the solver finds none.

    ``less`` times the values is at most ``limits``; ``equal`` times the values is ``totals``. The same numbers give
    the same vertex.
    """
    shape = (len(limits), len(costs)), (len(totals), len(costs))
    matrices = [
        sparse.csr_matrix((each.values, (each.rows, each.columns)), shape=size)  # type: ignore[no-untyped-call]
        for each, size in zip((less, equal), shape, strict=True)
    ]
    found = optimize.linprog(  # type: ignore[attr-defined, no-untyped-call]
        costs, matrices[0], limits, matrices[1], totals, bounds=(0, None), method="highs"
    )
    return np.asarray(found.x, dtype=np.float64) if found.status == 0 else None
