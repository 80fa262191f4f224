"""Two loads less, or one: verification A names the ids of long pieces as well, in place of the later code passes.

A's numbers are random with a prime period, so a few dozen of them in a row stand in the table at one place only, and
that place is the id modulo the period. The code passes made so far tell where pieces begin and end; around those places
the ids are looked up, and become the second differences that one more pass would have left. One code pass is enough
where its modulus and a period that is no larger than practical name all ids; else only the last pass is left out.

Nothing is believed for that. Every element of every named piece is compared with what its id predicts, in A and in B,
and one disagreement anywhere sends the worker to the other code passes and another verification. Short pieces,
constants, several readings and irregular content are not named here: more passes with other numbers say more about
them.

>>> table = np.random.default_rng(0).integers(0, 1 << 16, 1009).astype(np.uint16)
>>> places = np.array([-1, -1])
>>> name_elements(table[100:140], 40, np.array([0, 39]), *Lookup.of(table[None]), WINDOW, places), places.tolist()
(True, [100, 139])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from adapters._naming_kernels import distinct, elements_behind, join_names, name_elements, outside_holds, places_around
from adapters.probe_checking import check_steady, finish, verify_watched
from adapters.probe_codes import AllClaims, CodePasses, feeding
from adapters.probe_feed import PERIOD_BYTES, Pattern
from adapters.probe_live import BACKGROUND, LiveTensor
from adapters.probe_moves import MoveWatch
from adapters.probe_readings import Reading
from adapters.probe_settle import distinct_ids
from adapters.probe_verify import VERIFY_PERIOD, Claims, Prediction, Range, predict, steady_claims, verification_pair
from adapters.probe_worker import ProbedWorker
from adapters.torch_bits import Bits
from layout_algebra.diff2 import Diff2
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import LoaderRaisedError
from layout_algebra.lifting import lift_slabs
from layout_algebra.recover import ring_of
from layout_algebra.residues import Pass, coded_dtypes
from layout_algebra.space import CheckpointSpace
from layout_algebra.sweeping import Entries, Sweep
from layout_algebra.views import view_of

MOST_PERIOD = 1 << 22
"""Of verification's table: a longer one takes longer to make than a load that it saves."""
WORTH_ELEMENTS = 1 << 24
"""Smaller checkpoints always get all code passes: a load of them costs nothing."""
FEWEST_CODES = 1000
"""Of one code pass that is to be enough: among fewer, too many second differences are 0 by chance."""
FEWEST_IDS = 64
"""Fewer distinct ids to a piece, or elements to a constant, may agree by chance."""
WINDOW = 24
"""Neighbours that name an element: even single bytes hold 160 random bits then."""

_MOST_PLACES = 1 << 16


class Lookup(NamedTuple):
    """Tables of random numbers, one a row, their places by number, and the numbers in that order."""

    tables: Bits
    orders: IdArray
    ranked: Bits

    @staticmethod
    def of(tables: Bits) -> Lookup:
        """Sort each table."""
        orders = np.argsort(tables, axis=1, kind="stable")
        return Lookup(tables, orders, np.take_along_axis(tables, orders, axis=1))


class _Joined(NamedTuple):
    """What is the same for all tensors of one reading.

    Attributes
    ----------
    lookup
        A's numbers in the parameter's dtype, a table for every dtype that is fed.
    ring
        ``ring_of`` the code passes made so far and A.
    total_elements
        Of the checkpoint.
    """

    lookup: Lookup
    ring: tuple[IdArray, IdArray]
    total_elements: int


class NamingPlan(NamedTuple):
    """How ids are named before all code passes are made.

    Attributes
    ----------
    passes
        How many code passes come first.
    period
        Of verification's numbers.
    """

    passes: int
    period: int


def is_worth_naming(space: CheckpointSpace) -> bool:
    """Whether loads of a checkpoint cost something."""
    return space.total_elements >= WORTH_ELEMENTS


def plan_naming(space: CheckpointSpace, passes: Sequence[Pass], limit_bytes: int) -> NamingPlan:
    """One code pass if it and a longer period tell all ids apart, else all but the last.

    Parameters
    ----------
    space
        The checkpoint.
    passes
        All code passes.
    limit_bytes
        Bound on the buffer that feeds.
    """
    dtypes = coded_dtypes(space)
    # Numbers of one byte stand in a long table too often for neighbours to be found quickly.
    most = MOST_PERIOD if all(dtype_of(dtype).bits > 8 for dtype in dtypes) else VERIFY_PERIOD
    most = max(VERIFY_PERIOD, min(most, limit_bytes // (len(dtypes) * PERIOD_BYTES or 1)))
    least = max(VERIFY_PERIOD, 2 * space.total_elements // passes[0].modulus + 1)
    if passes[0].modulus >= FEWEST_CODES and least <= most:
        return NamingPlan(1, _next_prime(least))
    return NamingPlan(len(passes) - 1, VERIFY_PERIOD)


def _next_prime(least: int) -> int:
    while any(least % number == 0 for number in range(2, math.isqrt(least) + 1)):
        least += 1
    return least


def verify_by_name(
    worker: ProbedWorker, codes: CodePasses, plan: NamingPlan, watch: MoveWatch
) -> tuple[AllClaims, dict[str, IdArray]] | None:
    """Both verification passes without the later code passes before them.

    Returns
    -------
    tuple or None
        Claims that stood both passes, none refuted, and the elements of every tensor that were loaded twice. None, on
        all ranks, where some rank's tensors need all code passes or some claim did not stand.
    """
    if worker.vote(int(bool(watch.looked_by) or not _suits(worker, codes, watch))):
        return None
    left_out = len(codes.passes) - plan.passes
    worker.expect(-left_out)
    wasted = 0
    try:
        a, b = verification_pair(coded_dtypes(worker.space), Range.SIGNED, plan.period)
        named = worker.load(feeding(a), "verification A", partial(_name_and_compare, worker, codes, plan, a))
        wasted += 1
        claims = named or {}
        if not worker.vote(int(named is None or not _stands(claims))):
            lost = verify_watched(worker, claims, b)
            wasted += 1
            if not worker.vote(int(not _stands(claims))):
                return claims, lost
        worker.tell("some content is computed or irregular; making all code passes")
    except LoaderRaisedError as error:
        worker.note(f"{error}; making all code passes first")
    worker.expect(left_out + wasted)
    return None


def _stands(claims: AllClaims) -> bool:
    """Whether nothing is refuted."""
    return all(one.opaque_elements() is None for several in claims.values() for one in several)


def _suits(worker: ProbedWorker, codes: CodePasses, watch: MoveWatch) -> bool:
    """Whether what the code passes left so far looks like long copies and background only, put there by seen calls."""
    for one in worker.live:
        readings = codes.readings(one)
        if not readings or not one.tensor.numel():
            continue
        diffs = codes.diffs(one, readings[0])
        if len(readings) > 1 or not one.in_place or not _is_plain(one, diffs):
            return False
        written = any(len(chunk.values) for diff in diffs for chunk in diff.chunks)
        if written and not watch.wrote(one.tensor):
            return False
    return True


def _is_plain(one: LiveTensor, diffs: Sequence[Diff2]) -> bool:
    """Whether passes left few places, and outside of codes the background or long constants, the same in each."""
    if sum(len(chunk.values) for diff in diffs for chunk in diff.chunks) > _MOST_PLACES:
        return False
    if any(len(chunk.bits) for diff in diffs for chunk in diff.chunks):
        return False
    runs = diffs[0].outside()
    if not all(np.array_equal(runs, diff.outside()) for diff in diffs[1:]):
        return False
    long = runs[:, 1] - runs[:, 0] >= FEWEST_IDS
    return bool(np.all(long | (runs[:, 2] == BACKGROUND.get(one.dtype, -1))))


def _name_and_compare(worker: ProbedWorker, codes: CodePasses, plan: NamingPlan, pattern: Pattern) -> AllClaims | None:
    """After a load of A: claims of every tensor, compared with it; None if some tensor cannot be named."""
    claims = dict(codes.steady)
    pending: list[Callable[[], None]] = []
    try:
        # Naming is one of the executor's jobs: others compare meanwhile, and no thread more than there are cores runs.
        if not worker.executor.submit(_name_all, worker, codes, plan, pattern, claims, pending).result():
            return None
    finally:
        finish(pending)
    check_steady(worker, claims)
    return claims


def _name_all(
    worker: ProbedWorker,
    codes: CodePasses,
    plan: NamingPlan,
    pattern: Pattern,
    claims: AllClaims,
    pending: list[Callable[[], None]],
) -> bool:
    """Name all tensors, the largest first, and begin to compare each; whether all have names."""
    known: dict[Reading, tuple[Prediction, _Joined]] = {}
    ring = ring_of([*codes.passes[: plan.passes], Pass(plan.period, 1)])
    for one in sorted(worker.live, key=lambda one: -one.tensor.nbytes):
        live, kept = one.bits(), worker.keeper.kept(one.name)
        for reading in codes.readings(one):
            if reading not in known:
                prediction = predict(worker.space, (pattern,), one.dtype, reading)
                known[reading] = prediction, _Joined(Lookup.of(prediction.tables), ring, worker.space.total_elements)
            prediction, joined = known[reading]
            found = _claims_of_names(one, live, kept, codes.diffs(one, reading), reading, joined)
            if found is None:
                return False
            claims[one.name] = [found]
            pending.append(found.check_copies(live, prediction, worker.executor))
    return True


def _claims_of_names(
    one: LiveTensor, live: Bits, kept: Bits, diffs: Sequence[Diff2], reading: Reading, joined: _Joined
) -> Claims | None:
    """Claims of one tensor while it holds A's numbers, or None."""
    outside = diffs[0].outside()
    if len(outside) and not outside_holds(live, outside):
        return None
    entries = _joined_entries(live, view_of(one.shape)[1], diffs, outside, joined)
    if entries is None:
        return None
    # Every pass has the same elements outside and they count as 0: what the sweep finds odd is in no copy, nor there.
    sweep = Sweep(one.shape, math.prod(joined.ring[0].tolist()), joined.total_elements)
    copies = lift_slabs(sweep.run([entries]), one.shape)
    if sweep.dirty or int(copies.elements.sum()) + int((outside[:, 1] - outside[:, 0]).sum()) != len(live):
        return None
    if len(copies) and int(distinct_ids(copies).min()) < FEWEST_IDS:
        return None
    return steady_claims(live, kept, one.shape, one.dtype, copies=copies, code_bits=reading.code_bits, reading=reading)


def _joined_entries(
    live: Bits, width: int, diffs: Sequence[Diff2], outside: IdArray, joined: _Joined
) -> Entries | None:
    """Second differences of ids, at the places where code passes have some, by those passes and the tables.

    Parameters
    ----------
    live
        Flat bits, under verification A, of a matrix with rows of ``width``.
    diffs
        What the code passes left of it.
    outside
        Elements that count as 0, as ``Diff2.outside`` gives them.
    joined
        The tables, and how numbers of all passes are joined.

    Returns
    -------
    tuple or None
        None if the neighbours of some element do not name it.
    """
    lists = [diff.entries() for diff in diffs]
    place, value = np.concatenate([one[0] for one in lists]), np.concatenate([one[1] for one in lists])
    places = distinct(place)
    if len(lists) == 1:
        # A second difference that is 0 modulo one number may be none of 0: but not all of those around a corner.
        places = places_around(places, width, len(live))
    elements, numbers = elements_behind(places, width, outside)
    if not name_elements(live, width, elements, *joined.lookup, WINDOW, numbers):
        return None
    starts = np.cumsum([0, *(len(one[0]) for one in lists)])
    found, total, count = join_names(place, value, starts, places, width, elements, numbers, *joined.ring)
    return found[:count], total[:count]
