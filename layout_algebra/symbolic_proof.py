"""Do all ranks of a family together hold every checkpoint element exactly once?

For one degree the answer is counted on the ids. For all degrees it is an argument on the formulas, made for every copy
by itself: along one coordinate the parts of successive ranks meet (``start(r+1) == start(r) + count(r)``) and their
outer ends are fixed numbers, along the others they are fixed; so all ranks together hold one fixed box exactly once,
and whether fixed boxes tile the checkpoint is again counted on the ids. Where the argument does not go through, some
degrees are counted to find one that fails; if none does, the answer is "undecided", never a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import sympy

from layout_algebra.boxes import REPEAT
from layout_algebra.coverage_faults import Expectation, Fault, Holding
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import FormulaError
from layout_algebra.formulas import DEGREE, RANK, same, show
from layout_algebra.name_bytes import join_name
from layout_algebra.slice_copy import CopyTable
from layout_algebra.symbolic_mesh import by_one_index, columns_of

if TYPE_CHECKING:
    from layout_algebra.space import CheckpointSpace
    from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy, SymbolicMap

_TRIED_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer, and how it was found.

    Attributes
    ----------
    holds
        True, False, or None where it is undecided.
    kind
        ``"counted"``: on the ids of every rank of one degree. ``"symbolic"``: by an argument on the formulas, for all
        degrees for which they give whole numbers.
    degree
        Of a counted proof; of a symbolic one the degree of its counterexample, or the only one it speaks of.
    faults
        What is missing or held too often, at most 16.
    steps
        The argument, a line a copy; where there is none, why.
    """

    holds: bool | None
    kind: str
    degree: int | None
    faults: tuple[Fault, ...]
    steps: tuple[str, ...]

    def __str__(self) -> str:
        answer = {True: "proved", False: "refuted", None: "undecided"}[self.holds]
        scope = "all degrees, by formulas" if self.degree is None else f"degree {self.degree}"
        how = ", counted on the ids" if self.kind == "counted" else ""
        reasons = self.steps if self.holds is None else ()
        return "\n".join([f"{answer} ({scope}{how})", *(f"  {each}" for each in (*self.faults, *reasons))])


def prove(
    family: SymbolicMap,
    degree: int | None,
    *,
    tensors: Collection[str] | None,
    replicas: bool | Collection[str] | Mapping[str, int],
) -> Proof:
    """See ``SymbolicMap.prove``."""
    expected = Expectation(family.space, tensors, replicas)
    if degree is not None:
        faults = _counted(family, degree, expected)
        return Proof(not faults, "counted", degree, faults, (f"the ids of {degree} ranks",))
    gaps, steps = _argue(family, expected)
    if not gaps:
        return Proof(True, "symbolic", family.degree, (), tuple(steps))
    for tried in _TRIED_DEGREES if family.degree is None else (family.degree,):
        try:
            faults = _counted(family, tried, expected)
        except FormulaError:
            continue
        if faults:
            return Proof(False, "symbolic", tried, faults, tuple(gaps))
    return Proof(None, "symbolic", None, (), tuple(gaps))


def _counted(family: SymbolicMap, degree: int, expected: Expectation) -> tuple[Fault, ...]:
    """Faults of one degree, on the ids of all its ranks."""
    holdings = [Holding.of_map(family.instantiate(rank, degree)) for rank in range(degree)]
    return expected.faults(holdings, degree=degree)


class _Fixed(NamedTuple):
    """What all ranks together hold of one copy: a fixed box, once or on several ranks."""

    lows: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]
    once: bool
    reason: str


class _NoArgument(Exception):
    """Why a copy's parts are not known to meet."""


def _argue(family: SymbolicMap, expected: Expectation) -> tuple[list[str], list[str]]:
    """What stands against the argument (nothing if it goes through), and its steps."""
    gaps, steps = [], []
    once, several = [np.empty((0, 4), dtype=np.int64)], [np.empty((0, 4), dtype=np.int64)]
    for name, entry in family.parameters.items():
        for copy in entry.copies:
            what = f"{name} from {'{}'.join(copy.template)}"
            try:
                fixed = _fixed(copy, family.degree)
                runs = _runs(family.space, copy, fixed)
            except _NoArgument as gap:
                gaps.append(f"{what}: {gap}")
                continue
            steps.append(f"{what}: {fixed.reason}")
            (once if fixed.once else several).append(runs)
    if gaps:
        return gaps, steps
    # Two ranks that hold everything held once, and everything held several times, show what is wrong.
    held_once, held_more = np.concatenate(once), np.concatenate(several)
    single, more = Holding.of_runs(held_once), Holding.of_runs(held_more)
    known = Expectation(family.space, None, False)
    known.times = np.where(np.abs(expected.times) == 1, expected.times, 0)
    if bool(np.any(expected.times > 1)):
        gaps.append("an exact number of replicas above one depends on the degree; name one")
    times_two = Holding(np.concatenate([held_more, held_more]), 2 * more.elements)
    gaps += [str(fault) for fault in known.faults([single, times_two], degree=2)]
    return gaps, steps


def _fixed(copy: SymbolicCopy, degree: int | None) -> _Fixed:
    """The box that all ranks together hold of a copy."""
    size = DEGREE if degree is None else sympy.Integer(degree)
    columns = columns_of(copy)
    lows: list[int] = []
    axes: list[tuple[int, int, int]] = []
    moves: dict[str, str] = {}
    shared = any(axis.dim == REPEAT for axis in copy.axes)
    for dim in range(len(copy.moving) + len(copy.view)):
        own = tuple(axis for axis in copy.axes if axis.dim == dim)
        along, place, walks, ranks = "", copy.coordinate(dim), own, size
        if columns is not None:
            split = by_one_index(place, own, size, columns)
            if split is None:
                raise _NoArgument(f"start {show(place)} moves with both indices of the mesh")
            along, place, walks, ranks = split
        low, slots, how = _along(place, walks, ranks)
        lows.append(low)
        axes += [(dim, step, count) for step, count in slots]
        if how is not None:
            how = f"along coordinate {dim}{along} {how}"
            if along in moves:
                raise _NoArgument(f"it moves along several coordinates: {moves[along]}; {how}")
            moves[along] = how
            shared = shared or " heads of " in how
    reason = " and ".join(moves.values()) if moves else "the same on every rank"
    # Ranks of a mesh that differ in an index along which nothing moves hold the same.
    once = len(moves) == (1 if columns is None else 2)
    return _Fixed(tuple(lows), tuple(axes), once and not shared, reason)


@lru_cache(maxsize=1 << 14)
def _along(
    low: sympy.Expr, axes: tuple[SymbolicAxis, ...], size: sympy.Expr
) -> tuple[int, list[tuple[int, int]], str | None]:
    """One coordinate over all ranks: least place, (step, count) of every slot, and how the parts meet if they move."""
    fixed = [axis.count.is_Integer and axis.step.is_Integer for axis in axes]
    if low.is_Integer and all(fixed):
        return int(low), [(int(axis.step), int(axis.count)) for axis in axes], None
    first = low.subs(RANK, 0)
    cyclic = _cyclic(low, axes, size)
    if cyclic is not None:
        return cyclic
    heads = _heads(low, axes, size)
    if heads is not None:
        return heads
    movers = [k for k, axis in enumerate(axes) if same(low.subs(RANK, RANK + 1), low + axis.count * axis.step)]
    if not axes and low.is_Integer is not True:
        axes_text = "single places"
        if same(low.subs(RANK, RANK + 1), low + 1):
            last = _at_end(low, size)
            if first.is_Integer and last is not None:
                return int(first), [(1, last - int(first))], f"{axes_text} follow each other from {first} to {last}"
    if not movers:
        raise _NoArgument(f"start(r+1) == start(r) + count(r) does not follow for start {show(low)}")
    mover = movers[0]
    last = _at_end(low, size)
    others = [k for k in range(len(axes)) if k != mover]
    if not first.is_Integer or last is None or not all(fixed[k] for k in others) or not axes[mover].step.is_Integer:
        raise _NoArgument(f"the ends of start {show(low)} are not fixed for all degrees")
    step = int(axes[mover].step)
    if (last - int(first)) % step:
        raise _NoArgument(f"the parts from {first} to {last} are no multiple of {step}")
    slots = [(int(axes[k].step), int(axes[k].count)) for k in others] + [(step, (last - int(first)) // step)]
    return int(first), slots, f"start(r+1) == start(r) + count(r), from {first} to {last}"


def _cyclic(
    low: sympy.Expr, axes: tuple[SymbolicAxis, ...], size: sympy.Expr
) -> tuple[int, list[tuple[int, int]], str | None] | None:
    """Rank r takes every d-th place from r on: the residues of d are a partition."""
    if len(axes) != 1 or axes[0].step != size or not same(low - low.subs(RANK, 0), RANK):
        return None
    first = low.subs(RANK, 0)
    count = axes[0].count
    if not first.is_Integer or not isinstance(count, sympy.ceiling):
        even = sympy.expand(count * size)
        if first.is_Integer and even.is_Integer:
            return int(first), [(1, int(even))], f"residues of d, from {first} to {int(first) + int(even)}"
        return None
    total = sympy.expand(count.args[0] * size + RANK)
    if not total.is_Integer:
        return None
    return int(first), [(1, int(total))], f"residues of d, from {first} to {int(first) + int(total)}"


def _heads(
    low: sympy.Expr, axes: tuple[SymbolicAxis, ...], size: sympy.Expr
) -> tuple[int, list[tuple[int, int]], str | None] | None:
    """Heads shared out, then replicated: every one is on some rank, on several if ranks are more than heads."""
    floors = low.atoms(sympy.floor)
    if len(axes) != 1 or axes[0].step != 1 or len(floors) != 1:
        return None
    floor = floors.pop()
    heads = sympy.expand(floor.args[0] * size / RANK)
    first = low.subs(RANK, 0)
    if not heads.is_Integer or not first.is_Integer:
        return None
    rows = sympy.expand((low - first) / floor)
    if not rows.is_Integer or not same(axes[0].count, sympy.Max(rows * heads / size, rows)):
        return None
    total = int(rows * heads)
    return int(first), [(1, total)], f"heads of {rows} rows, from {first} to {int(first) + total}, each on some rank"


def _at_end(low: sympy.Expr, size: sympy.Expr) -> int | None:
    """``start(d)``: where the last rank's part ends. ``d * ceil(T/d)`` is ``T`` and something that is not negative."""
    last = low.subs(RANK, size)
    if size == DEGREE:
        spare: dict[sympy.Expr, sympy.Expr] = {}
        for ceiling in sorted(last.atoms(sympy.ceiling), key=str):
            total = sympy.expand(ceiling.args[0] * DEGREE)
            if not total.is_Integer:
                return None
            rest = sympy.Symbol(f"s{len(spare)}", integer=True, nonnegative=True)
            spare[ceiling] = (total + rest) / DEGREE
        last = sympy.expand(last.xreplace(spare)) if spare else sympy.expand(last)
        if last.has(sympy.Min, sympy.Max):
            last = last.replace(lambda each: isinstance(each, (sympy.Min, sympy.Max)), _expanded)
    return int(last) if last.is_Integer else None


def _expanded(each: sympy.Expr) -> sympy.Expr:
    expanded: sympy.Expr = each.func(*(sympy.expand(argument) for argument in each.args))
    return expanded


def _runs(space: CheckpointSpace, copy: SymbolicCopy, fixed: _Fixed) -> IdArray:
    """The ids of a fixed box."""
    moving = len(copy.moving)
    after = [int(sympy.Mul(*copy.view[k + 1 :])) for k in range(len(copy.view))]
    offset = sum(place * step for place, step in zip(fixed.lows[moving:], after, strict=True))
    tail: list[int] = []
    walking = []
    for dim, step, count in fixed.axes:
        if dim < moving:
            walking.append((dim, step, count))
        else:
            tail += [count, 0, step * after[dim - moving]]
    numbers = [number.subs(RANK, 0) for number in copy.numbers]
    rows = []
    total = int(np.prod([count for _, _, count in walking], dtype=np.float64))
    if total > _MOST_ROWS or any(not number.is_Integer for number in numbers):
        raise _NoArgument(f"it walks over {total} tensors")
    for places in product(*(range(count) for _, _, count in walking)):
        own = [int(number) for number in numbers]
        for (dim, step, _), place in zip(walking, places, strict=True):
            own[copy.moving[dim]] = fixed.lows[dim] + step * place
        tensor = join_name(copy.template, own)
        if tensor not in space:
            raise _NoArgument(f"{tensor} is not in the checkpoint")
        start, stop = space.id_range(tensor)
        reach = offset + sum((tail[k] - 1) * tail[k + 2] for k in range(0, len(tail), 3))
        if offset < 0 or start + reach >= stop:
            raise _NoArgument(f"it reaches past the end of {tensor}")
        rows.append([0, start + offset, *(tail or [1, 0, 0])])
    return CopyTable(np.array(rows, dtype=np.int64).reshape(len(rows), -1)).source_runs()[0]
