"""One rank of a family: formulas in, a parameter's map out, every number checked against its tensor.

Formulas may come from a stranger, so nothing here trusts them: a copy must stay inside its tensor and its parameter,
the tensor must have the shape that the copy expects, and a rank's map is made of a bounded number of pieces.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import sympy

from layout_algebra.boxes import REPEAT
from layout_algebra.canonical import canonical_table
from layout_algebra.errors import FormulaError, LayoutError
from layout_algebra.formulas import integer_of
from layout_algebra.name_bytes import join_name
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap
from layout_algebra.space import MAX_ELEMENTS, CheckpointSpace, natural_key
from layout_algebra.symbolic_map import SymbolicCopy, SymbolicNames, SymbolicParameter
from layout_algebra.views import view_of

MAX_PIECES = 1 << 24
"""Most pieces that one rank's map is made of, before regular ones are merged."""


class PieceBudget:
    """How many pieces may still be made."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_PIECES

    def spend(self, pieces: int, name: str) -> None:
        """Take from the budget; FormulaError when it is overdrawn."""
        self.left -= pieces
        if self.left < 0:
            raise FormulaError(f"{name}: a rank's map of more than {MAX_PIECES} pieces")


class RankMaker:
    """Makes the parameters of one rank."""

    def __init__(self, space: CheckpointSpace, rank: int, degree: int) -> None:
        self._space = space
        self._rank, self._degree = rank, degree
        self._budget = PieceBudget()

    def parameter(self, name: str, entry: SymbolicParameter) -> ParameterMap:
        """One parameter in canonical form.

        Raises
        ------
        FormulaError
            If a formula gives no whole number, or a place outside its tensor or parameter.
        """
        shape = tuple(self._number(extent, name, f"extent {k}") for k, extent in enumerate(entry.shape))
        if any(extent < 0 for extent in shape) or math.prod(shape) >= MAX_ELEMENTS:
            raise FormulaError(f"{name}: shape {shape} for rank {self._rank} of {self._degree} cannot be")
        rows = [row for k, copy in enumerate(entry.copies) for row in self._rows(f"{name}: copy {k}", copy, shape)]
        runs = [[self._number(each, name, "an opaque run") for each in run] for run in entry.opaque]
        try:
            copies = self._canonical(name, rows, shape)
            opaque = self._opaque(name, runs, math.prod(shape))
        except LayoutError as error:
            raise FormulaError(
                f"{name}: formulas contradict themselves for rank {self._rank} of {self._degree}: {error}"
            ) from error
        depends = [tensor for names in entry.depends_on for tensor in self._names(name, names)]
        return ParameterMap(shape, entry.dtype, copies, opaque, tuple(sorted(depends, key=natural_key)))

    def _number(self, formula: sympy.Expr, name: str, what: str) -> int:
        return integer_of(formula, self._rank, self._degree, what=f"{name}: {what}")

    def _canonical(self, name: str, rows: list[list[int]], shape: tuple[int, ...]) -> CopyTable:
        if not rows:
            return CopyTable.empty()
        table = np.zeros((len(rows), max(5, *map(len, rows))), dtype=np.int64)
        table[:, 2::3] = 1
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        # Axes that walk neither along a row of the last axis nor down a column are unrolled to get the normal form.
        width = view_of(shape)[1]
        extents = table[:, 2::3].astype(np.float64)
        kept = [np.where(table[:, 3::3] == unit, extents, 1).max(axis=1) for unit in {1, width}]
        pieces = (np.prod(extents, axis=1) / np.prod(kept, axis=0)).sum()
        self._budget.spend(int(pieces), name)
        return canonical_table(CopyTable(table), shape)

    def _opaque(self, name: str, runs: list[list[int]], size: int) -> RunTable:
        kept = [run for run in runs if run[1] > 0 and run[3] > 0]
        for start, length, stride, count in kept:
            if start < 0 or stride < 0 or start + length + stride * (count - 1) > size:
                raise FormulaError(f"opaque elements reach outside 0:{size}")
            self._budget.spend(count, name)
        return RunTable.from_runs(kept)

    def _names(self, name: str, names: SymbolicNames) -> list[str]:
        """Tensors that an opaque parameter depends on."""
        first = [self._number(number, name, "a tensor's number") for number in names.numbers]
        count = self._number(names.count, name, "how many tensors it depends on") if names.moving is not None else 1
        if not 0 <= count <= len(self._space) or min(first, default=0) < 0:
            raise FormulaError(f"{name}: depends on {count} tensors of {len(self._space)}")
        out = []
        for step in range(count):
            out.append(join_name(names.template, [n + step * (k == names.moving) for k, n in enumerate(first)]))
            if out[-1] not in self._space:
                raise FormulaError(f"{name}: depends on {out[-1]}, which is not in the checkpoint")
        return out

    def _rows(self, name: str, copy: SymbolicCopy, shape: tuple[int, ...]) -> list[list[int]]:
        """A copy's rows of a copy table: one a tensor."""
        counts = [self._number(axis.count, name, "an extent") for axis in copy.axes]
        if any(count < 1 for count in counts):
            return []
        moving = len(copy.moving)
        at = [self._number(place, name, "a source index") for place in copy.at]
        steps = [self._number(axis.step, name, "a source step") for axis in copy.axes]
        to = [self._number(place, name, "a target index") for place in copy.to]
        strides = [self._number(axis.stride, name, "a target step") for axis in copy.axes]
        extents = (math.prod(shape),) if copy.flat else shape
        goes = [(axis.axis, stride, count) for axis, stride, count in zip(copy.axes, strides, counts, strict=True)]
        comes = [(axis.dim - moving, step, count) for axis, step, count in zip(copy.axes, steps, counts, strict=True)]
        self._check_inside(name, to, goes, extents)
        self._check_inside(name, at, comes, copy.view)
        into = [math.prod(extents[k + 1 :]) for k in range(len(extents))]
        out_of = [math.prod(copy.view[k + 1 :]) for k in range(len(copy.view))]
        start = sum(place * unit for place, unit in zip(to, into, strict=True))
        offset = sum(place * unit for place, unit in zip(at, out_of, strict=True))
        tail: list[int] = []
        walks: list[tuple[int, int, int, int]] = []
        for axis, step, count, stride in zip(copy.axes, steps, counts, strides, strict=True):
            target = stride * into[axis.axis]
            if 0 <= axis.dim < moving:
                walks.append((copy.moving[axis.dim], step, count, target))
            else:
                tail += [count, target, 0 if axis.dim == REPEAT else step * out_of[axis.dim - moving]]
        self._budget.spend(math.prod(count for _, _, count, _ in walks), name)
        numbers = [self._number(each, name, "a number of a tensor's name") for each in copy.numbers]
        rows = []
        for places in product(*(range(count) for _, _, count, _ in walks)):
            own, shift = list(numbers), 0
            for (number, step, _, target), place in zip(walks, places, strict=True):
                own[number] += step * place
                shift += target * place
            rows.append([start + shift, self._first_id(name, copy, own) + offset, *tail])
        return rows

    def _first_id(self, name: str, copy: SymbolicCopy, numbers: list[int]) -> int:
        """First id of a tensor, which must have the shape that the copy expects."""
        tensor = join_name(copy.template, numbers)
        if min(numbers, default=0) < 0 or tensor not in self._space:
            raise FormulaError(f"{name} is from {tensor}, which is not in the checkpoint")
        shape = self._space.spec(tensor).shape
        if shape != copy.view and copy.view != (math.prod(shape),):
            raise FormulaError(f"{name} is from {tensor} as if of shape {copy.view}; it is {shape}")
        return self._space.id_range(tensor)[0]

    def _check_inside(
        self, name: str, at: list[int], axes: list[tuple[int, int, int]], extents: tuple[int, ...]
    ) -> None:
        """Every place between 0 and its extent."""
        low, high = list(at), list(at)
        for axis, step, count in axes:
            if axis >= 0:
                low[axis] += min(0, step * (count - 1))
                high[axis] += max(0, step * (count - 1))
        if any(first < 0 or last >= extent for first, last, extent in zip(low, high, extents, strict=True)):
            raise FormulaError(
                f"{name} covers {low} to {high} of a tensor of shape {extents} for rank {self._rank} of {self._degree}"
            )
