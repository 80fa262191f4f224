"""Where boxes go: indices and steps along a parameter's axes as formulas, and from them the parameter's shape.

Fused parameters are stacked end to end, so the end of one box is the likeliest start of the next, and the end of the
last the likeliest extent. What is no box along the parameter's axes (a reshaped tensor) is placed by flat index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import sympy

from layout_algebra.boxes import Box
from layout_algebra.errors import FormulaError
from layout_algebra.formula_search import Cut, Search, Values
from layout_algebra.formulas import integer
from layout_algebra.symbolic_boxes import Slot, SourceFormulas
from layout_algebra.symbolic_map import SymbolicAxis


class Placed(NamedTuple):
    """A family of boxes in its parameter: as in ``SymbolicCopy``."""

    to: tuple[sympy.Expr, ...]
    flat: bool
    axes: tuple[SymbolicAxis, ...]


class Targets:
    """One parameter: the shapes of its samples, and the ends of what was placed so far."""

    def __init__(self, search: Search, shapes: Sequence[tuple[int, ...]]) -> None:
        self._search = search
        self._shapes = shapes
        self._rank = len(shapes[0])
        self._ends: list[list[sympy.Expr]] = [[] for _ in range(self._rank)]
        self._widths: list[sympy.Expr] = []
        self._counts: list[sympy.Expr] = []

    def place(self, boxes: Sequence[Box | None], source: SourceFormulas) -> Placed:
        """Formulas of where a family of boxes goes.

        Raises
        ------
        FormulaError
            If there are none; the message says of what.
        """
        self._counts += [slot.count for slot in source.slots if not slot.count.is_Integer]
        if source.window is not None:
            total = source.window.total
            whole = sympy.ceiling(sympy.Integer(total) / self._search.degree)
            self._widths += [whole, Cut(total, 0, total).formulas(self._search)[1]]
        found = self._along_axes(boxes, source) if self._rank else None
        return found if found is not None else self._flat(boxes, source)

    def shape(self) -> tuple[sympy.Expr, ...]:
        """Formulas of the parameter's shape.

        Raises
        ------
        FormulaError
            If some extent has none.
        """
        out = []
        for axis in range(self._rank):
            wanted = [shape[axis] for shape in self._shapes]
            hints = [*reversed(self._ends[axis]), *self._widths, *self._counts]
            found = self._search.find(wanted, list(dict.fromkeys(hints)))
            if found is None:
                raise FormulaError(f"no formula gives extent {axis} of its shape: {self.shown(wanted)}")
            out.append(found)
        return tuple(out)

    def shown(self, values: Values) -> str:
        """Samples and values, for a message."""
        pairs = [
            f"{value} on rank {rank} of {degree}"
            for value, (rank, degree) in zip(values, self._search.points, strict=True)
            if value is not None
        ]
        more = len(pairs) - 8
        return ", ".join(pairs[:8]) + (f" and {more} more" if more > 0 else "")

    def _along_axes(self, boxes: Sequence[Box | None], source: SourceFormulas) -> Placed | None:
        """By the parameter's own axes; None if some slot does not walk along one."""
        after = [[math.prod(shape[k + 1 :]) for k in range(self._rank)] for shape in self._shapes]
        digits: list[list[int | None]] = []
        for axis in range(self._rank):
            digits.append(
                [
                    None if box is None or not shape[axis] else box.start // steps[axis] % shape[axis]
                    for box, shape, steps in zip(boxes, self._shapes, after, strict=True)
                ]
            )
        cut = -1 if source.window is None else source.window.slot
        walks = []
        for place, slot in enumerate(source.slots):
            along = self._axis_of(slot, digits, after)
            if along is None:
                return None
            stride = self._stride_of(slot, [steps[along] for steps in after])
            if stride is None:
                return None
            walks.append((along, stride, place == cut))
        to = []
        for axis in range(self._rank):
            window = source.window
            hints = [window.before for walk in walks if walk[2] and walk[0] == axis and window is not None]
            hints += reversed(self._ends[axis])
            # On one degree an end is a number like any other; where both fit, the end is what other degrees have too.
            found = self._search.first(hints, digits[axis])
            hints += [slot.count for slot in source.slots]
            found = self._search.find(digits[axis], list(dict.fromkeys(hints))) if found is None else found
            if found is None:
                return None
            to.append(found)
        for axis in range(self._rank):
            reach = [
                (slot.count - 1) * walk[1] for slot, walk in zip(source.slots, walks, strict=True) if walk[0] == axis
            ]
            end = sympy.expand(to[axis] + sympy.Add(*reach) + 1)
            if end not in self._ends[axis]:
                self._ends[axis].append(end)
        axes = [
            SymbolicAxis(slot.count, slot.dim, slot.step, walk[0], walk[1])
            for slot, walk in zip(source.slots, walks, strict=True)
            if slot.count != 1
        ]
        return Placed(tuple(to), False, tuple(axes))

    def _axis_of(self, slot: Slot, digits: Sequence[Values], after: Sequence[Sequence[int]]) -> int | None:
        """The parameter axis that a slot walks along on every sample that shows it."""
        shown = [k for k, stride in enumerate(slot.strides) if stride is not None]
        for axis in range(self._rank):
            if all(self._walks(slot, k, digits[axis][k], after[k][axis], self._shapes[k][axis]) for k in shown):
                return axis
        return None

    @staticmethod
    def _walks(slot: Slot, sample: int, start: int | None, unit: int, extent: int) -> bool:
        stride, count = slot.strides[sample], slot.counts[sample]
        if stride is None or count is None or start is None or not unit or stride % unit:
            return False
        return 0 <= start + (count - 1) * (stride // unit) < extent

    def _stride_of(self, slot: Slot, units: Sequence[int]) -> sympy.Expr | None:
        """Steps along the axis per position."""
        shown: Values = [
            None if stride is None else stride // unit for stride, unit in zip(slot.strides, units, strict=True)
        ]
        if all(each is None for each in shown):
            return integer(1)
        constant = self._search.constant(shown)
        # As with starts: packed tightly is likelier than a number that only one degree has.
        tight = None if constant == 1 else self._search.first(self._counts, shown)
        return tight if tight is not None else self._search.find(shown, self._counts)

    def _flat(self, boxes: Sequence[Box | None], source: SourceFormulas) -> Placed:
        """By flat index."""
        starts: Values = [None if box is None else box.start for box in boxes]
        hints = [] if source.window is None else [source.window.before]
        to = self._search.find(starts, [*hints, *self._counts])
        if to is None:
            raise FormulaError(f"no formula gives the target start of a copy: {self.shown(starts)}")
        axes = []
        for slot in source.slots:
            strides = self._stride_of(slot, [1] * len(self._shapes))
            if strides is None:
                raise FormulaError(f"no formula gives the target stride of a copy: {self.shown(slot.strides)}")
            if slot.count != 1:
                axes.append(SymbolicAxis(slot.count, slot.dim, slot.step, 0, strides))
        return Placed((to,), True, tuple(axes))
