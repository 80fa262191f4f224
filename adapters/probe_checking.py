"""Verification loads: what was fed is what every claimed copy must hold, and constants must stay.

``probe_verify`` has the numbers and the claims; here the loads are made, with tamer numbers for a loader that refuses
the first ones, and every live tensor is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from adapters.probe_codes import AllClaims, feeding
from adapters.probe_feed import Pattern
from adapters.probe_live import LiveTensor
from adapters.probe_readings import Reading
from adapters.probe_verify import Prediction, Range, predict, verification_pair
from adapters.probe_worker import ProbedWorker
from adapters.probe_writes import WriteWatch
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LoaderRaisedError
from layout_algebra.residues import coded_dtypes
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.space import CheckpointSpace

Choice = npt.NDArray[np.bool_]


def verify(worker: ProbedWorker, claims: AllClaims) -> tuple[Range, dict[str, IdArray]]:
    """Run both verification passes, with tamer numbers for a loader that refuses the first ones.

    Returns
    -------
    tuple
        The numbers that it stood, and the elements of every live tensor that it loaded twice.
    """
    dtypes = coded_dtypes(worker.space)
    for values in Range:
        try:
            a, b = verification_pair(dtypes, values)
            worker.load(feeding(a), "verification A", partial(compare, worker, claims, a))
            lost = verify_watched(worker, claims, b)
        except LoaderRaisedError as error:
            if values is Range.NARROW:
                raise
            worker.note(f"{error}; trying again with tamer numbers")
        else:
            if values is not Range.SIGNED:
                worker.note(f"load_weights refused the wider numbers of verification: {values.value}")
            return values, lost
    raise AssertionError("unreachable: the last range returns or raises")


def verify_watched(worker: ProbedWorker, claims: AllClaims, pattern: Pattern) -> dict[str, IdArray]:
    """Verification B; its result are the elements of every live tensor that the loader loaded twice.

    They are watched for only where some checkpoint element is held nowhere: else no load was lost.
    """
    watch = None if _holds_all(worker.space, claims) else WriteWatch()

    def read() -> dict[str, IdArray]:
        compare(worker, claims, pattern)
        return {} if watch is None else {one.name: watch.lost(one.tensor) for one in worker.live}

    return worker.load(feeding(pattern), "verification B", read, watch)


def compare(worker: ProbedWorker, claims: AllClaims, pattern: Pattern) -> None:
    """Refute what does not hold after a load of some pattern."""
    check_copies(worker, claims, worker.live, (pattern,))
    check_steady(worker, claims)


def check_steady(worker: ProbedWorker, claims: AllClaims) -> None:
    """Refute constants that changed."""
    for one in worker.live:
        bits, kept = one.bits(), worker.keeper.kept(one.name)
        for mine in claims[one.name]:
            mine.check_steady(bits, kept)


def check_copies(
    worker: ProbedWorker,
    claims: AllClaims,
    live: Sequence[LiveTensor],
    patterns: Sequence[Pattern],
    choice: Choice | None = None,
) -> None:
    """Refute copies that do not hold what they were fed; ``choice`` as ``predict`` takes it."""
    predictions: dict[Reading, Prediction] = {}
    pending: list[Callable[[], None]] = []
    for one in live:
        bits = one.bits()
        for mine in claims[one.name]:
            if len(mine.copies) and mine.reading is not None:
                if mine.reading not in predictions:
                    predictions[mine.reading] = predict(worker.space, patterns, one.dtype, mine.reading, choice)
                pending.append(mine.check_copies(bits, predictions[mine.reading], worker.executor))
                if not one.in_place:
                    finish(pending)
    finish(pending)


def finish(pending: list[Callable[[], None]]) -> None:
    """Wait for what ``Claims.check_copies`` began."""
    while pending:
        pending.pop(0)()


def _holds_all(space: CheckpointSpace, claims: AllClaims) -> bool:
    """Whether every checkpoint element seems to be held."""
    tables = [one.copies for several in claims.values() for one in several]
    if sum(int(table.elements.sum()) for table in tables) < space.total_elements:
        return False
    return RunTable.from_runs(CopyTable.concatenate(tables).source_runs()[0]).elements == space.total_elements
