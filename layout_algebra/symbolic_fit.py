"""From the maps of a few ranks to the formulas of all of them.

Per parameter: its slice copies become boxes of named tensors (``boxes``), each family of boxes gets formulas of where
it lies in its tensor (``symbolic_boxes``), then of where it goes (``symbolic_targets``), last the parameter's shape.
Parameters that look alike, such as those of a model's layers, are solved once. At the end every sample is made again
from the formulas and compared; what differs is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import sympy

from layout_algebra.boxes import Box, Piece, cut_at_tensors
from layout_algebra.canonical import canonical_table
from layout_algebra.errors import FormulaError
from layout_algebra.formula_search import Search
from layout_algebra.formulas import RANK, integer
from layout_algebra.name_bytes import Template, split_name
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace
from layout_algebra.symbolic_boxes import SourceFormulas, WindowHint, offset_of, source_formulas
from layout_algebra.symbolic_groups import Candidate, Group, GroupNames, ways
from layout_algebra.symbolic_map import SymbolicCopy, SymbolicMap, SymbolicNames, SymbolicParameter
from layout_algebra.symbolic_mesh import MeshPoint, flat_points
from layout_algebra.symbolic_targets import Targets


def fit(maps: Mapping[tuple[int, int], SourceMap] | Mapping[MeshPoint, SourceMap]) -> SymbolicMap:
    """Find the formulas of a family of ranks.

    Parameters
    ----------
    maps
        Source map per (rank, degree), or per ((row, column), (rows, columns)) of a mesh of two dimensions, such as data
        and tensor parallel ranks. A few ranks of two or three degrees are enough for layouts in equal parts; a layout
        with ceil-sized parts, or of replicated heads, shows itself only at degrees where it is uneven or replicated.
        With one degree the formulas hold for that degree alone. Those of a mesh are in ``r = columns*row + column`` and
        ``d = rows*columns``, for the number of columns that all samples have, and any number of rows.

    Returns
    -------
    SymbolicMap
        Whose ``instantiate`` equals every given map. The fit is exact: no number is rounded.

    Raises
    ------
    FormulaError
        Where no formula fits: the message names the parameter, which of its numbers, and the ranks and values.
    """
    if not maps:
        raise FormulaError("no maps to fit: give the maps of a few ranks as {(rank, degree): map}")
    by_rank, columns = flat_points(maps)
    points = sorted(by_rank, key=lambda point: (point[1], point[0]))
    for rank, degree in points:
        if degree < 1 or not 0 <= rank < degree:
            raise FormulaError(f"rank {rank} of {degree}: expected a rank in 0:{degree}")
    samples = [by_rank[point] for point in points]
    space = samples[0].space
    for point, sample in zip(points, samples, strict=True):
        if sample.space is not space and sample.space != space:
            raise FormulaError(f"{_rank(point)} has another checkpoint than {_rank(points[0])}")
        if sample.parameters != samples[0].parameters:
            other = sorted(set(sample.parameters) ^ set(samples[0].parameters))
            raise FormulaError(
                f"{other[0]}: a parameter on {_rank(point)} or {_rank(points[0])} only, and {len(other) - 1} more; "
                "fit each pipeline stage by itself"
            )
    fitter = _Fitter(space, points, columns)
    parameters = {name: fitter.parameter(name, [sample[name] for sample in samples]) for name in samples[0].parameters}
    degrees = {degree for _, degree in points}
    family = SymbolicMap(space, degrees.pop() if len(degrees) == 1 else None, parameters)
    for point, sample in zip(points, samples, strict=True):
        _verify(family, point, sample)
    return family


def _rank(point: tuple[int, int]) -> str:
    return f"rank {point[0]} of {point[1]}"


def _verify(family: SymbolicMap, point: tuple[int, int], sample: SourceMap) -> None:
    """The sample again from its formulas."""
    made = family.instantiate(*point)
    for name in sample.parameters:
        given, again = sample[name], made[name]
        copies = given.copies
        if not np.array_equal(copies.rows, again.copies.rows) and len(copies):
            copies = canonical_table(copies, given.shape)
        what = _difference(given, again, copies)
        if what is not None:
            raise FormulaError(
                f"{name}: formulas that the other samples suggest are wrong for {_rank(point)}: {what}; the layout has "
                "none of the known forms, or these samples show too little of it"
            )


def _difference(given: ParameterMap, again: ParameterMap, copies: CopyTable) -> str | None:
    """What a sample has and its formulas do not give, or None."""
    if given.shape != again.shape:
        return f"shape {again.shape}, expected {given.shape}"
    if not np.array_equal(copies.rows, again.copies.rows):
        wanted, made = (list(map(str, table.slice_copies())) for table in (copies, again.copies))
        first = next(
            (k for k, (w, m) in enumerate(zip(wanted, made, strict=False)) if w != m), min(len(wanted), len(made))
        )
        shown = [each[first] if first < len(each) else "none" for each in (made, wanted)]
        return f"copy {first} is {shown[0]}, expected {shown[1]}"
    if not given.opaque.same_as(again.opaque):
        return f"opaque elements {again.opaque}, expected {given.opaque}"
    if given.depends_on != again.depends_on:
        return f"depends on {', '.join(again.depends_on)}, expected {', '.join(given.depends_on)}"
    return None


@dataclass(frozen=True, slots=True)
class _Solved:
    """A parameter's formulas before its tensors get their names."""

    shape: tuple[sympy.Expr, ...]
    copies: tuple[tuple[int, tuple[int, ...] | None, tuple[sympy.Expr, ...], SymbolicCopy], ...]


class _Fitter:
    """What all parameters of one fit share: the search, the checkpoint by template, and what was solved before."""

    def __init__(self, space: CheckpointSpace, points: Sequence[tuple[int, int]], columns: int | None) -> None:
        self._space = space
        self._points = tuple(points)
        self._search = Search(points, columns)
        self._sources = [split_name(name) for name in space.names]
        self._siblings: dict[Template, list[tuple[int, ...]]] = {}
        for template, numbers in self._sources:
            self._siblings.setdefault(template, []).append(numbers)
        self._solved: dict[object, _Solved] = {}

    def parameter(self, name: str, entries: Sequence[ParameterMap]) -> SymbolicParameter:
        """One parameter's formulas from its entry in every sample."""
        # A rank that keeps nothing of a parameter says nothing of its dtype.
        dtypes = list(dict.fromkeys(entry.dtype for entry in entries if entry.elements)) or [entries[0].dtype]
        if len(dtypes) > 1 or len({len(entry.shape) for entry in entries}) > 1:
            seen = {
                f"{entry.dtype}{list(entry.shape)}": point for entry, point in zip(entries, self._points, strict=True)
            }
            shown = "; ".join(f"{kind} on {_rank(point)}" for kind, point in seen.items())
            raise FormulaError(f"{name}: dtype or number of axes differs from rank to rank: {shown}")
        shapes = [entry.shape for entry in entries]
        try:
            names, groups = self._groups([cut_at_tensors(self._space, entry.copies) for entry in entries])
            key = (tuple(shapes), tuple(groups))
            solved = self._solved.get(key)
            if solved is None:
                solved = self._solved[key] = self._solve(shapes, groups, names)
            opaque, depends = self._opaque(entries, solved.shape), self._depends([e.depends_on for e in entries])
        except FormulaError as error:
            raise FormulaError(f"{name}: {error}") from error
        copies = [_named(names[group], fixed, lows, copy) for group, fixed, lows, copy in solved.copies]
        return SymbolicParameter(solved.shape, dtypes[0], tuple(copies), opaque, depends)

    def _groups(self, pieces: Sequence[list[Piece]]) -> tuple[list[GroupNames], list[Group]]:
        """Pieces by template, which numbers move, and what the checkpoint has along them."""
        by_template: dict[Template, list[list[Piece]]] = {}
        for sample, listed in enumerate(pieces):
            for piece in listed:
                template = self._sources[piece.tensor][0]
                by_template.setdefault(template, [[] for _ in pieces])[sample].append(piece)
        names, groups = [], []
        for template, group in by_template.items():
            numbers = {self._sources[piece.tensor][1] for listed in group for piece in listed}
            shapes = {self._space.specs[piece.tensor].shape for listed in group for piece in listed}
            if len(shapes) > 1:
                raise FormulaError(f"copies from {'{}'.join(template)} tensors of several shapes: {sorted(shapes)}")
            first = min(numbers)
            moving = tuple(k for k in range(len(first)) if len({each[k] for each in numbers}) > 1)
            extents, bases = self._along(template, first, moving)
            relative = tuple(
                tuple((tuple(self._sources[p.tensor][1][k] for k in moving), p.offset, p.start, p.axes) for p in listed)
                for listed in group
            )
            names.append(GroupNames(template, first, moving))
            groups.append(Group(shapes.pop(), extents, bases, relative))
        return names, groups

    def _along(
        self, template: Template, first: tuple[int, ...], moving: tuple[int, ...]
    ) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """How many numbers the checkpoint has along every moving one, and the least; None where there are gaps."""
        if not moving:
            return (), ()
        alike = [
            each
            for each in self._siblings[template]
            if all(each[k] == first[k] for k in range(len(first)) if k not in moving)
        ]
        values = [sorted({each[k] for each in alike}) for k in moving]
        grid = math.prod(len(each) for each in values) == len(alike)
        extents = tuple(len(each) if grid and each[-1] - each[0] == len(each) - 1 else None for each in values)
        return extents, tuple(each[0] for each in values)

    def _solve(
        self, shapes: Sequence[tuple[int, ...]], groups: Sequence[Group], names: Sequence[GroupNames]
    ) -> _Solved:
        """Formulas of one parameter."""
        sources: list[tuple[Candidate, int, SourceFormulas]] = []
        ends = self._ends(shapes, groups)
        for number, group in enumerate(groups):
            for candidates in ways(number, group, flat_first=len(shapes[0]) == 1):
                found = self._sources_of(candidates, shapes, ends)
                if found is not None:
                    sources += found
                    break
            else:
                raise FormulaError(self._misfit(group, names[number]))
        targets = Targets(self._search, shapes)
        copies = []
        for candidate, which, source in sorted(sources, key=lambda each: _order(each[0].family.of(each[1]))):
            group = groups[candidate.group]
            try:
                placed = targets.place(candidate.family.of(which), source)
            except FormulaError as error:
                raise FormulaError(f"from {'{}'.join(names[candidate.group].template)}: {error}") from error
            moving = 0 if candidate.fixed is not None else len(group.extents)
            view = tuple(extent or 0 for extent in candidate.family.view[moving:])
            copy = SymbolicCopy((), (), (), view, source.lows[moving:], placed.to, placed.flat, placed.axes)
            copies.append((candidate.group, candidate.fixed, source.lows[:moving], copy))
        return _Solved(targets.shape(), tuple(copies))

    def _sources_of(
        self, candidates: Sequence[Candidate], shapes: Sequence[tuple[int, ...]], ends: Mapping[int, int]
    ) -> list[tuple[Candidate, int, SourceFormulas]] | None:
        """Source formulas of every box of every candidate; None if one has none."""
        out = []
        for candidate in candidates:
            for which in range(candidate.family.most):
                boxes = candidate.family.of(which)
                source = source_formulas(self._search, boxes, candidate.family, self._hints(boxes, shapes, ends))
                if source is None:
                    return None
                out.append((candidate, which, source))
        return out

    def _ends(self, shapes: Sequence[tuple[int, ...]], groups: Sequence[Group]) -> dict[int, int]:
        """For every parameter axis that may be a row of windows, where the last tensor in it ends."""
        ends: dict[int, int] = {}
        for number, group in enumerate(groups):
            for candidates in ways(number, group, flat_first=len(shapes[0]) == 1):
                for candidate in candidates:
                    for which in range(candidate.family.most):
                        boxes = candidate.family.of(which)
                        for axis, hint in self._hints_by_axis(boxes, shapes, {}):
                            for dim, extent in enumerate(candidate.family.view):
                                lows = [None if box is None else box.at[dim] for box in boxes]
                                offset = offset_of(self._search, lows, hint)
                                if offset is not None and extent is not None:
                                    ends[axis] = max(ends.get(axis, 0), offset + extent)
                break
        return ends

    def _hints(
        self, boxes: Sequence[Box | None], shapes: Sequence[tuple[int, ...]], ends: Mapping[int, int]
    ) -> list[WindowHint]:
        return [hint for _, hint in self._hints_by_axis(boxes, shapes, ends)]

    def _hints_by_axis(
        self, boxes: Sequence[Box | None], shapes: Sequence[tuple[int, ...]], ends: Mapping[int, int]
    ) -> Iterator[tuple[int, WindowHint]]:
        """Every parameter axis as a row of windows in which a family of boxes has its place."""
        for axis in range(len(shapes[0])):
            units = [math.prod(shape[axis + 1 :]) for shape in shapes]
            whole: dict[int, int] = {}
            for shape, (_, degree) in zip(shapes, self._points, strict=True):
                # The last window may be short.
                whole[degree] = max(whole.get(degree, 0), shape[axis])
            if not all(units) or not all(whole.values()):
                continue
            widths = tuple(whole[degree] for _, degree in self._points)
            before = tuple(
                None if box is None else box.start // unit % width
                for box, unit, width in zip(boxes, units, widths, strict=True)
            )
            yield axis, WindowHint(widths, before, ends.get(axis))

    def _misfit(self, group: Group, names: GroupNames) -> str:
        """Which samples of a group of pieces have what, for a message."""
        shown = []
        for point, listed in list(zip(self._points, group.pieces, strict=True))[:6]:
            first = listed[0] if listed else None
            what = (
                "nothing" if first is None else f"{len(listed)} copies, the first from flat index {first[1]} of number"
            )
            numbers = "" if first is None else f" {list(first[0])}: {[count for count, _, _ in first[3]]}"
            shown.append(f"{_rank(point)} has {what}{numbers}".replace(" of number []", ""))
        return (
            f"no formula in rank and degree gives the source of its copies from {'{}'.join(names.template)}: "
            + "; ".join(shown)
            + ("; ..." if len(self._points) > 6 else "")
            + ("" if self._search.parts else ". If ranks are a mesh of two dimensions, give ranks and degrees as pairs")
        )

    def _opaque(
        self, entries: Sequence[ParameterMap], shape: tuple[sympy.Expr, ...]
    ) -> tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr], ...]:
        """Formulas of the opaque runs."""
        tables = [entry.opaque.runs for entry in entries]
        if not any(len(table) for table in tables):
            return ()
        if len({len(table) for table in tables}) > 1:
            raise FormulaError(f"samples have {[len(table) for table in tables]} runs of opaque elements")
        size = sympy.Mul(*shape)
        out = []
        for run in range(len(tables[0])):
            found = [
                self._search.find([int(table[run, column]) for table in tables], [size, *shape]) for column in range(4)
            ]
            start, length, stride, count = found
            if start is None or length is None or stride is None or count is None:
                seen = "; ".join(f"{t[run].tolist()} on {_rank(p)}" for t, p in zip(tables, self._points, strict=True))
                raise FormulaError(f"no formula gives its opaque elements, as (start, length, stride, count): {seen}")
            out.append((start, length, stride, count))
        return tuple(out)

    def _depends(self, tensors: Sequence[tuple[str, ...]]) -> tuple[SymbolicNames, ...]:
        """Formulas of the names that an opaque parameter depends on."""
        by_template: dict[Template, list[list[tuple[int, ...]]]] = {}
        for sample, names in enumerate(tensors):
            for name in names:
                template, numbers = split_name(name)
                by_template.setdefault(template, [[] for _ in tensors])[sample].append(numbers)
        out = []
        for template, listed in by_template.items():
            if all(each == listed[0] for each in listed):
                out += [
                    SymbolicNames(template, tuple(map(integer, numbers)), None, integer(1)) for numbers in listed[0]
                ]
                continue
            found = self._range_of_names(listed)
            if found is None:
                raise FormulaError(f"no formula gives which {'{}'.join(template)} its opaque elements depend on")
            moving, low, count = found
            formulas = [integer(number) for number in listed[0][0]]
            formulas[moving] = low
            out.append(SymbolicNames(template, tuple(formulas), moving, count))
        return tuple(out)

    def _range_of_names(self, listed: Sequence[list[tuple[int, ...]]]) -> tuple[int, sympy.Expr, sympy.Expr] | None:
        """Names that differ in one number, without gaps on any sample: which number, the least, and how many."""
        rows = [numbers for each in listed for numbers in each]
        moving = [k for k in range(len(rows[0])) if len({numbers[k] for numbers in rows}) > 1]
        if len(moving) != 1 or not all(listed):
            return None
        values = [sorted(numbers[moving[0]] for numbers in each) for each in listed]
        if any(each != list(range(each[0], each[0] + len(each))) for each in values):
            return None
        count = self._search.find([len(each) for each in values])
        low = None if count is None else self._search.find([each[0] for each in values], [RANK * count])
        return None if count is None or low is None else (moving[0], low, count)


def _named(
    names: GroupNames, fixed: tuple[int, ...] | None, lows: tuple[sympy.Expr, ...], copy: SymbolicCopy
) -> SymbolicCopy:
    numbers = [sympy.Integer(number) for number in names.first]
    values = lows if fixed is None else [sympy.Integer(number) for number in fixed]
    for place, value in zip(names.moving, values, strict=True):
        numbers[place] = value
    moving = names.moving if fixed is None else ()
    return replace(copy, template=names.template, numbers=tuple(numbers), moving=moving)


def _order(boxes: Sequence[Box | None]) -> tuple[int, int]:
    """Copies are placed in the order of the first sample that has them."""
    return next((sample, box.start) for sample, box in enumerate(boxes) if box is not None)
