"""One family of boxes, one box a rank, as formulas of where it lies in its tensor.

Each coordinate of a box is explained on its own, by the ways in which layouts cut an axis, simplest first: all of it,
equal parts, heads that are replicated when ranks are many, windows of ceil size, a fixed part, equal parts of a fixed
part, and at last whatever the basis of ``formula_search`` gives. Only a window explains why a rank has no box.

>>> rows = Family((10,), (None,), ([Box((0,), 0, (BoxAxis(0, 1, 3, 1),))], [Box((9,), 0, ())]))    # ten rows, d = 4
>>> found = source_formulas(Search([(0, 4), (3, 4)]), rows.of(0), rows, [])
>>> found.lows, found.slots[0].count
((Min(10, 3*r),), -Min(10, 3*r) + Min(10, 3*r + 3))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from layout_algebra.boxes import REPEAT, Box, BoxAxis
from layout_algebra.formula_search import Cut, Part, Search, Values, heads_of
from layout_algebra.formulas import RANK

_MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class Family:
    """Boxes of one tensor, or of tensors that differ in a number, for every sample.

    Attributes
    ----------
    view
        Extents of the coordinates; a number's extent is that of all numbers in the checkpoint, None if those have gaps.
    bases
        Where each coordinate begins: the least number for a number of the name, 0 or None for an axis.
    boxes
        For every sample its boxes by target start.
    """

    view: tuple[int | None, ...]
    bases: tuple[int | None, ...]
    boxes: tuple[list[Box], ...]

    @property
    def most(self) -> int:
        """Most boxes that a sample has."""
        return max(map(len, self.boxes))

    @property
    def ignored(self) -> tuple[bool, ...]:
        """Samples with fewer boxes than others but not none, such as rank 0 of 1, on which neighbours are one box.

        They take no part in the search; the formulas must give them all the same in the end.
        """
        return tuple(0 < len(boxes) < self.most for boxes in self.boxes)

    def of(self, number: int) -> list[Box | None]:
        """The number-th box of every sample; None where there is none or the sample is ignored."""
        most = self.most
        return [boxes[number] if len(boxes) == most else None for boxes in self.boxes]


@dataclass(frozen=True, slots=True)
class Slot:
    """One axis of the family: step and count as formulas, and the target strides of the samples that show one."""

    dim: int
    step: sympy.Expr
    count: sympy.Expr
    counts: tuple[int | None, ...]
    strides: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The slot that a window cuts, positions of the window before the box, and how many positions windows share."""

    slot: int
    before: sympy.Expr
    total: int


@dataclass(frozen=True, slots=True)
class SourceFormulas:
    """Where a family of boxes lies: its least coordinates, its slots, and the window if one cuts it."""

    lows: tuple[sympy.Expr, ...]
    slots: tuple[Slot, ...]
    window: Window | None


@dataclass(frozen=True, slots=True)
class WindowHint:
    """A parameter axis as a row of equal windows.

    Attributes
    ----------
    widths, before
        For every sample the width of a whole window, and the box's place in it (None where there is no box).
    total
        How many positions the windows share, if it is known already.
    """

    widths: tuple[int, ...]
    before: tuple[int | None, ...]
    total: int | None


class _Column:
    """One coordinate: what the samples show of it."""

    def __init__(self, dim: int, extent: int | None, base: int, boxes: Sequence[Box | None]) -> None:
        self.dim, self.extent, self.base = dim, extent, base
        self.lows: Values = [None if box is None else box.at[dim] - base for box in boxes]
        self.slots = _aligned(dim, boxes, needed=extent != 1)


def source_formulas(
    search: Search, boxes: Sequence[Box | None], family: Family, windows: Sequence[WindowHint]
) -> SourceFormulas | None:
    """Formulas of a family of boxes; None if there are none.

    Parameters
    ----------
    boxes
        One a sample, None where the sample has none.
    windows
        Ways in which the parameter may be a row of windows.
    """
    columns = []
    for dim, (extent, base) in enumerate(zip(family.view, family.bases, strict=True)):
        columns.append(_Column(dim, extent, base or 0, boxes))
    repeats = _aligned(REPEAT, boxes, needed=False)
    if repeats is None or any(column.slots is None for column in columns):
        return None
    ignored = family.ignored
    absent = any(box is None and not skip for box, skip in zip(boxes, ignored, strict=True))
    cuts = [_cut_of_any(search, column) for column in columns]
    window: Window | None = None
    if absent or any(cut is None for cut in cuts):
        doubtful = [dim for dim, cut in enumerate(cuts) if cut is None]
        found = None
        for dim in doubtful[:1] if doubtful else range(len(columns)):
            found = _window_of_any(search, columns[dim], ignored, windows)
            if found is not None:
                cuts[dim] = found[0]
                slot = sum(len(column.slots or ()) for column in columns[:dim])
                window = None if found[1] is None else Window(slot, *found[1])
                break
        if absent and found is None:
            return None
    cuts = [_anything(search, column) if cut is None else cut for column, cut in zip(columns, cuts, strict=True)]
    slots: list[Slot] = []
    lows = []
    for column, cut in zip(columns, cuts, strict=True):
        if cut is None or column.slots is None:
            return None
        lows.append(cut[0] + column.base)
        slots += _slots(column.dim, column.slots, cut[1])
    for each in repeats:
        count = search.find(_counts(each))
        if count is None:
            return None
        slots += _slots(REPEAT, [each], [(sympy.Integer(0), count)])
    return SourceFormulas(tuple(lows), tuple(slots), window)


_AlignedSlot = list[tuple[int | None, int, int | None] | None]
"""For every sample step, count and target stride; step and stride are None where the count is 1."""
_Explained = tuple[sympy.Expr, list[tuple[sympy.Expr, sympy.Expr]]]
"""Least coordinate (from the base), and step and count of every slot."""


def _slots(dim: int, aligned: Sequence[_AlignedSlot], formulas: Sequence[tuple[sympy.Expr, sympy.Expr]]) -> list[Slot]:
    return [
        Slot(dim, step, count, tuple(_counts(each)), tuple(None if one is None else one[2] for one in each))
        for each, (step, count) in zip(aligned, formulas, strict=True)
    ]


def _counts(slot: _AlignedSlot) -> list[int | None]:
    return [None if one is None else one[1] for one in slot]


def _aligned(dim: int, boxes: Sequence[Box | None], *, needed: bool) -> list[_AlignedSlot] | None:
    """The boxes' axes along one coordinate, matched from sample to sample; None if they do not match."""
    own = [None if box is None else [axis for axis in box.axes if axis.dim == dim] for box in boxes]
    model = max((axes for axes in own if axes is not None), key=len, default=[])
    if not model and not needed:
        return []
    steps = [axis.step for axis in model] or [1]
    slots: list[_AlignedSlot] = [[] for _ in steps]
    for axes in own:
        if axes is None:
            placed: list[tuple[int | None, int, int | None] | None] = [None] * len(steps)
        elif len(axes) == len(steps):
            placed = [(axis.step, axis.count, axis.stride) for axis in axes]
        else:
            found = _placed(axes, steps)
            if found is None:
                return None
            placed = found
        for slot, one in zip(slots, placed, strict=True):
            slot.append(one)
    return slots


def _placed(axes: Sequence[BoxAxis], steps: Sequence[int]) -> list[tuple[int | None, int, int | None] | None] | None:
    """Fewer axes than slots: by equal step, an axis that runs on into the next slot cut in two; None if that fails."""
    out: list[tuple[int | None, int, int | None] | None] = [(None, 1, None)] * len(steps)
    for axis in axes:
        if axis.step not in steps:
            return None
        place, step, count, stride = steps.index(axis.step), axis.step, axis.count, axis.stride
        while place > 0 and step * count > steps[place - 1]:
            upper = steps[place - 1]
            if upper % step or count % (upper // step):
                return None
            out[place] = (step, upper // step, stride)
            step, count, stride = upper, count // (upper // step), stride * (upper // step)
            place -= 1
        out[place] = (step, count, stride)
    return out


def _steps(search: Search, column: _Column) -> list[sympy.Expr] | None:
    """Formula of every slot's step."""
    out = []
    for slot in column.slots or ():
        shown = [None if one is None else one[0] for one in slot]
        step = sympy.Integer(1) if all(each is None for each in shown) else search.find(shown, [search.degree])
        if step is None:
            return None
        out.append(step)
    return out


def _cut_of_any(search: Search, column: _Column) -> _Explained | None:
    """``_cut`` by the rank, or by one index of a mesh."""
    found = _cut(search, column)
    for part in search.parts:
        if found is None:
            inside = _cut(part.search, column)
            found = None if inside is None else _turned(part, inside)
    return found


def _window_of_any(
    search: Search, column: _Column, ignored: Sequence[bool], hints: Sequence[WindowHint]
) -> tuple[_Explained, tuple[sympy.Expr, int] | None] | None:
    """``_window`` by the rank, or by one index of a mesh."""
    found = _window(search, column, ignored, hints)
    for part in search.parts:
        if found is None:
            inside = _window(part.search, column, ignored, hints)
            if inside is not None:
                before = None if inside[1] is None else (part.turned(inside[1][0]), inside[1][1])
                found = _turned(part, inside[0]), before
    return found


def _turned(part: Part, found: _Explained) -> _Explained:
    return part.turned(found[0]), [(part.turned(step), part.turned(count)) for step, count in found[1]]


def _cut(search: Search, column: _Column) -> _Explained | None:
    """A coordinate whose every sample has a box, explained by the usual cuts; None if by none of them."""
    slots, extent, lows = column.slots or [], column.extent, column.lows
    steps = _steps(search, column)
    if steps is None:
        return None
    if len(slots) != 1 or steps[0] != 1:
        return _several(search, column, steps)
    counts = _counts(slots[0])
    low = search.constant(lows)
    count = search.constant(counts)
    if extent is not None:
        if low == 0 and count == extent:
            return low, [(steps[0], count)]
        even = sympy.Integer(extent) / search.degree
        if search.fits(even, counts) and search.fits(RANK * even, lows):
            return RANK * even, [(steps[0], even)]
        heads = heads_of(search, lows, counts, extent)
        if heads is not None:
            return heads[0], [(steps[0], heads[1])]
    if low is not None and count is not None:
        return low, [(steps[0], count)]
    part = _part(search, lows, counts, extent)
    return None if part is None else (part[0], [(steps[0], part[1])])


def _part(search: Search, lows: Values, counts: Values, extent: int | None) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Equal parts, or heads, of a fixed part of the axis."""
    sizes = {count * degree for count, (_, degree) in zip(counts, search.points, strict=True) if count is not None}
    start = min(low for low in lows if low is not None)
    if len(sizes) == 1:
        even = sympy.Integer(next(iter(sizes))) / search.degree
        shifts = {
            low - rank * (next(iter(sizes)) // degree)
            for low, (rank, degree) in zip(lows, search.points, strict=True)
            if low is not None
        }
        if len(shifts) == 1 and min(shifts) >= 0 and (extent is None or min(shifts) + next(iter(sizes)) <= extent):
            return sympy.Integer(min(shifts)) + RANK * even, even
    rows = min(count for count in counts if count is not None)
    if rows < 1:
        return None
    inside: Values = [None if low is None else low - start for low in lows]
    for parts in range(2, _MOST_PARTS + 1):
        if extent is not None and start + rows * parts > extent:
            break
        heads = heads_of(search, inside, counts, rows * parts)
        if heads is not None:
            return sympy.Integer(start) + heads[0], heads[1]
    return None


def _several(search: Search, column: _Column, steps: list[sympy.Expr]) -> _Explained | None:
    """A coordinate of no slot, several slots, or steps other than 1: every number by its own formula."""
    slots = column.slots or []
    counts = []
    for slot, step in zip(slots, steps, strict=True):
        hints = [] if column.extent is None else [sympy.ceiling((column.extent - RANK) / step)]
        count = search.find(_counts(slot), hints)
        if count is None:
            return None
        counts.append(count)
    walks = [RANK * count * step for count, step in zip(counts, steps, strict=True)]
    if column.extent is not None:
        walks.append(RANK * column.extent / search.degree)
    low = search.find(column.lows, walks)
    return None if low is None else (low, list(zip(steps, counts, strict=True)))


def _anything(search: Search, column: _Column) -> _Explained | None:
    """Whatever the basis gives, where every sample has a box."""
    steps = _steps(search, column)
    return None if steps is None else _several(search, column, steps)


def _window(
    search: Search, column: _Column, ignored: Sequence[bool], hints: Sequence[WindowHint]
) -> tuple[_Explained, tuple[sympy.Expr, int] | None] | None:
    """A coordinate cut by windows of ceil size, and what is before it in the window and how many positions there are.

    The windows are of the coordinate itself, or of a longer row of positions in which the tensor lies somewhere.
    """
    slots, extent = column.slots or [], column.extent
    if len(slots) != 1 or extent is None or any(one is not None and one[0] not in (None, 1) for one in slots[0]):
        return None
    lows = column.lows
    shown = _counts(slots[0])
    counts: Values = [0 if one is None and not skip else one for one, skip in zip(shown, ignored, strict=True)]
    equal = [hint for hint in hints if equal_total(search, hint) is not None]
    found = _windows(search, lows, counts, extent, [(hint, [equal_total(search, hint)]) for hint in equal])
    if found is not None:
        return found
    own = Cut(extent, 0, extent)
    if own.fits(search, lows, counts, [None] * len(lows)):
        low, count, _ = own.formulas(search)
        return (low, [(sympy.Integer(1), count)]), None
    return _windows(search, lows, counts, extent, [(hint, totals_of(search, hint)) for hint in hints])


def _windows(
    search: Search,
    lows: Values,
    counts: Values,
    extent: int,
    hints: Sequence[tuple[WindowHint, Sequence[int | None]]],
) -> tuple[_Explained, tuple[sympy.Expr, int] | None] | None:
    """The first row of windows, of those given with the numbers of positions they may share, that explains a box."""
    for hint, totals in hints:
        offset = offset_of(search, lows, hint)
        for total in totals if offset is not None else ():
            if offset is None or total is None or offset + extent > total:
                continue
            cut = Cut(total, offset, extent)
            if cut.fits(search, lows, counts, hint.before):
                low, count, before = cut.formulas(search)
                return (low, [(sympy.Integer(1), count)]), (before, total)
    return None


def equal_total(search: Search, hint: WindowHint) -> int | None:
    """The positions that equal windows share, padding included; None if it differs from degree to degree."""
    totals = {width * degree for width, (_, degree) in zip(hint.widths, search.points, strict=True)}
    return totals.pop() if len(totals) == 1 else None


def offset_of(search: Search, lows: Values, hint: WindowHint) -> int | None:
    """Where the tensor begins among the positions of all windows; None if the samples disagree."""
    offsets = {
        rank * width + before - low
        for low, width, before, (rank, _) in zip(lows, hint.widths, hint.before, search.points, strict=True)
        if low is not None and before is not None
    }
    offset = offsets.pop() if len(offsets) == 1 else -1
    return offset if offset >= 0 else None


def totals_of(search: Search, hint: WindowHint) -> list[int]:
    """How many positions ceil-sized windows may share, likelier ones first."""
    widths = [(width, degree) for width, (_, degree) in zip(hint.widths, search.points, strict=True)]
    low = max((width - 1) * degree + 1 for width, degree in widths)
    high = min(width * degree for width, degree in widths)
    likely = [] if hint.total is None else [hint.total]
    return [total for total in dict.fromkeys([*likely, high, low]) if low <= total <= high]
