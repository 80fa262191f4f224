"""A parameter's formulas as a person reads them: one line a copy, slices left and right.

>>> from layout_algebra.space import TensorSpec
>>> from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy
>>> space = CheckpointSpace([TensorSpec("q_proj", (4096, 64), "BF16")])
>>> zero, one, rows, columns = (sympy.Integer(number) for number in (0, 1, 512, 64))
>>> half = SymbolicCopy(("q_proj",), (), (), (4096, 64), (512 * RANK, zero), (zero, zero), False,
...                     (SymbolicAxis(rows, 0, one, 0, one), SymbolicAxis(columns, 1, one, 1, one)))
>>> print(explained(space, "qkv_proj", SymbolicParameter((sympy.Integer(768), columns), "BF16", (half,)), None))
qkv_proj[0:512, :] = q_proj[512*r : 512*(r+1), :]

An axis that is no plain slice on both sides gets a letter: ``w13[e, 0:2048, :] = experts.{12*r+e}.gate[:, :] for e in
0:12``. A tensor whose axes arrive in another order is followed by ``.T`` or ``.transpose(...)``. Where ranks hold
windows of ceil size, ``c`` is the window's size and ``n`` as many elements as there are on the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from layout_algebra.boxes import REPEAT
from layout_algebra.formulas import DEGREE, RANK, same, show
from layout_algebra.name_bytes import join_name
from layout_algebra.space import CheckpointSpace
from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy, SymbolicNames, SymbolicParameter

_LETTERS = "ijklmopqstuvwxyz"
_LENGTH = sympy.Symbol("n", positive=True)


def explained(space: CheckpointSpace, parameter: str, entry: SymbolicParameter, degree: int | None) -> str:
    """The lines of one parameter.

    Parameters
    ----------
    degree
        Put in for ``d`` if given.
    """
    shape = tuple(_at(extent, degree) for extent in entry.shape)
    lines = [_Line(space, copy, shape, degree).text(parameter) for copy in entry.copies]
    for run in entry.opaque:
        start, length, stride, count = (_at(number, degree) for number in run)
        whole = start == 0 and count == 1 and same(length, sympy.Mul(*shape))
        what = "" if whole else f".flat[{_span(start, start + length)}]"
        more = f", {show(count)} times {show(stride)} apart," if count != 1 else ""
        names = [_names(each, degree) for each in entry.depends_on]
        lines.append(f"{parameter}{what}{more} is computed" + (f" from {', '.join(names)}" if names else ""))
    return "\n".join(lines) or f"{parameter}[{', '.join(f'0:{show(extent)}' for extent in shape)}] is empty"


def _at(formula: sympy.Expr, degree: int | None) -> sympy.Expr:
    return formula if degree is None else formula.subs(DEGREE, degree)


def _names(names: SymbolicNames, degree: int | None) -> str:
    """Tensors that an opaque parameter is computed from: ``experts.{12*r : 12*(r+1)}.w``."""
    text = names.template[0]
    for place, (number, after) in enumerate(zip(names.numbers, names.template[1:], strict=True)):
        first = _at(number, degree)
        moves = place == names.moving
        text += (f"{{{_span(first, first + _at(names.count, degree))}}}" if moves else show(first)) + after
    return text


class _Line:
    """One copy with numbers put in and letters given to the axes that are no slices."""

    def __init__(
        self, space: CheckpointSpace, copy: SymbolicCopy, shape: tuple[sympy.Expr, ...], degree: int | None
    ) -> None:
        widths = sorted({each for axis in copy.axes for each in _at(axis.count, degree).atoms(sympy.ceiling)
                         if not each.has(RANK)}, key=str)  # fmt: skip
        self._sizes = {width: sympy.Symbol("c" if len(widths) == 1 else f"c{k}", integer=True, positive=True)
                       for k, width in enumerate(widths)}  # fmt: skip
        self._degree, self._copy = degree, copy
        self._extents = (sympy.Mul(*shape),) if copy.flat else shape
        self._flat_target = copy.flat and len(shape) > 1
        self._flat_source = _flat_source(space, copy)
        self._axes = [
            SymbolicAxis(self._put(a.count), a.dim, self._put(a.step), a.axis, self._put(a.stride)) for a in copy.axes
        ]
        self._letters = self._lettered()

    def text(self, parameter: str) -> str:
        copy, axes, first = self._copy, self._axes, len(self._copy.moving)
        left, right = [], []
        for k, (place, extent) in enumerate(zip(copy.to, self._extents, strict=True)):
            walk = [(n, axis.stride) for n, axis in enumerate(axes) if axis.axis == k]
            left.append(self._index(self._put(place), self._put(extent), walk))
        for k, (place, size) in enumerate(zip(copy.at, copy.view, strict=True)):
            walk = [(n, axis.step) for n, axis in enumerate(axes) if axis.dim == first + k]
            right.append(self._index(self._put(place), sympy.Integer(size), walk, exact=True))
        target = f"{parameter}{'.flat' if self._flat_target else ''}{_brackets(left)}"
        source = f"{self._tensor()}{'.flat' if self._flat_source else ''}{_brackets(right)}{self._turned()}"
        loops = "".join(f" for {self._letters[n]} in 0:{show(axes[n].count)}" for n in sorted(self._letters))
        shown = f"{target} = {source}{loops}"
        sizes = [f"{letter} = {show(width)}" for width, letter in self._sizes.items() if str(letter) in _words(shown)]
        return shown + (f", {', '.join(sizes)}" if sizes else "")

    def _put(self, formula: sympy.Expr) -> sympy.Expr:
        put: sympy.Expr = _at(formula, self._degree).xreplace(self._sizes)
        return put

    def _tensor(self) -> str:
        """The tensor's name; numbers that are formulas in braces."""
        copy = self._copy
        text = copy.template[0]
        for place, after in enumerate(copy.template[1:]):
            dim = copy.moving.index(place) if place in copy.moving else None
            walk = [(n, axis.step) for n, axis in enumerate(self._axes) if axis.dim == dim]
            number = self._put(copy.numbers[place])
            shown = self._sum(number, walk)
            text += (f"{{{shown}}}" if walk or not number.is_Integer else shown) + after
        return text

    def _lettered(self) -> dict[int, str]:
        """Letters of the axes that cannot be slices: numbers of names, repeats, steps, two along one axis."""
        out: dict[int, str] = {}
        free = iter(_LETTERS)
        moving = len(self._copy.moving)
        for number, axis in enumerate(self._axes):
            others = [other for other in self._axes if other is not axis]
            shared = any(other.axis == axis.axis or other.dim == axis.dim for other in others)
            if axis.dim < moving or axis.dim == REPEAT or shared or axis.step != 1 or axis.stride != 1:
                named = 0 <= axis.dim < moving and "e" not in out.values()
                out[number] = "e" if named else next(free)
        return out

    def _index(
        self, start: sympy.Expr, extent: sympy.Expr, walk: Sequence[tuple[int, sympy.Expr]], *, exact: bool = False
    ) -> str:
        """One index: a slice, ``:``, or a sum of letters."""
        if not walk:
            return ":" if extent == 1 else show(start)
        if len(walk) > 1 or walk[0][0] in self._letters:
            return self._sum(start, walk)
        count = self._axes[walk[0][0]].count
        if start == 0 and same(count, extent):
            return ":"
        return _span(start, start + (_LENGTH if count.has(sympy.Min) and not exact else count))

    def _sum(self, start: sympy.Expr, walk: Sequence[tuple[int, sympy.Expr]]) -> str:
        parts = [] if start == 0 else [show(start)]
        for number, step in walk:
            factor = f"({show(step)})" if step.is_Add else show(step)
            parts.append(self._letters[number] if step == 1 else f"{factor}*{self._letters[number]}")
        return "+".join(parts).replace("+-", "-") or "0"

    def _turned(self) -> str:
        """How the slices of the tensor must be turned to stand as in the parameter."""
        sliced = [axis for number, axis in enumerate(self._axes) if number not in self._letters]
        by_tensor = sorted(sliced, key=lambda axis: axis.dim)
        by_parameter = sorted(sliced, key=lambda axis: axis.axis)
        if by_tensor == by_parameter:
            return ""
        order = [by_tensor.index(axis) for axis in by_parameter]
        return ".T" if order == [1, 0] else f".transpose({', '.join(map(str, order))})"


def _flat_source(space: CheckpointSpace, copy: SymbolicCopy) -> bool:
    """Whether the copy sees a tensor flat that is not."""
    numbers = [number.subs({RANK: 0, DEGREE: 1}) for number in copy.numbers]
    if not all(number.is_Integer for number in numbers):
        return False
    tensor = join_name(copy.template, [int(number) for number in numbers])
    return tensor in space and len(space.spec(tensor).shape) > len(copy.view)


def _span(start: sympy.Expr, stop: sympy.Expr) -> str:
    plain = stop.has(RANK) and not stop.has(sympy.Min, sympy.Max, sympy.floor, _LENGTH)
    first, last = show(start), show(sympy.factor(stop) if plain else stop)
    return f"{first}:{last}" if first.isdigit() and last.isdigit() else f"{first} : {last}"


def _words(text: str) -> set[str]:
    """The letters that stand alone in a text."""
    return set("".join(each if each.isalnum() else " " for each in text).split())


def _brackets(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]" if parts else ""
