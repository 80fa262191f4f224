"""A family's formulas as bytes: compact, versioned, checked, and harmless when they come from a stranger.

The distinct formulas stand in one table of integers (``formulas.tokens_of``); everything else refers to them by number.
Nothing is parsed or evaluated as text. What the formulas say is checked where they are used: ``instantiate`` refuses a
copy that leaves its tensor or its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import sympy

from layout_algebra.boxes import REPEAT
from layout_algebra.dtypes import dtype_of
from layout_algebra.errors import FormulaError, LayoutError
from layout_algebra.formulas import formula_of, integer, tokens_of
from layout_algebra.map_bytes import MAX_BYTES, MAX_VALUES, PackedSpace, pack_space, unpack_space
from layout_algebra.name_bytes import PackedNames, decode_names, encode_names
from layout_algebra.sealed_bytes import (
    Budget,
    Packed,
    pack_column,
    pack_table,
    seal,
    unpack_column,
    unpack_table,
    unseal,
)
from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy, SymbolicMap, SymbolicNames, SymbolicParameter

MAGIC = b"TLFORM\x00\x01"
MAX_FORMULAS = 1 << 16
MAX_COPIES = 1 << 20
_MAX_AXES = 32


class _Axis(msgspec.Struct, array_like=True, frozen=True):
    count: int
    dim: int
    step: int
    axis: int
    stride: int


class _Copy(msgspec.Struct, array_like=True, frozen=True):
    template: int
    numbers: tuple[int, ...]
    moving: tuple[int, ...]
    view: tuple[int, ...]
    at: tuple[int, ...]
    to: tuple[int, ...]
    flat: bool
    axes: tuple[_Axis, ...]


class _Names(msgspec.Struct, array_like=True, frozen=True):
    template: int
    numbers: tuple[int, ...]
    moving: int
    count: int


class _Parameter(msgspec.Struct, array_like=True, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    copies: tuple[_Copy, ...]
    opaque: tuple[tuple[int, int, int, int], ...]
    depends_on: tuple[_Names, ...]


class _Map(msgspec.Struct, array_like=True, frozen=True):
    space: PackedSpace
    degree: int
    tokens: Packed
    lengths: Packed
    templates: tuple[tuple[bytes, ...], ...]
    names: PackedNames
    forms: tuple[_Parameter, ...]
    form_of: Packed
    numbers: tuple[Packed, ...]


class _Writer:
    """Formulas, templates and forms seen so far, by number.

    A form is a parameter without the plain numbers of its tensors' names, which differ from layer to layer.
    """

    def __init__(self) -> None:
        self.forms: dict[_Parameter, int] = {}
        self.numbers: list[list[list[int]]] = []
        self._own: list[int] = []
        self.formulas: dict[sympy.Expr, int] = {}
        self.templates: dict[tuple[str, ...], int] = {}

    def formula(self, formula: sympy.Expr) -> int:
        return self.formulas.setdefault(formula, len(self.formulas))

    def many(self, formulas: Sequence[sympy.Expr]) -> tuple[int, ...]:
        return tuple(self.formula(each) for each in formulas)

    def template(self, template: tuple[str, ...]) -> int:
        return self.templates.setdefault(template, len(self.templates))

    def parameter(self, entry: SymbolicParameter) -> int:
        """The number of a parameter's form; its plain numbers are put to the form's."""
        self._own = []
        form = self.forms.setdefault(self._form(entry), len(self.forms))
        if form == len(self.numbers):
            self.numbers.append([])
        self.numbers[form].append(self._own)
        return form

    def _named(self, numbers: Sequence[sympy.Expr]) -> tuple[int, ...]:
        """Numbers of a name: formulas by number, plain ones as -1 and put aside."""
        self._own += [int(number) for number in numbers if number.is_Integer]
        return tuple(-1 if number.is_Integer else self.formula(number) for number in numbers)

    def _form(self, entry: SymbolicParameter) -> _Parameter:
        return _Parameter(
            self.many(entry.shape),
            entry.dtype,
            tuple(self._copy(copy) for copy in entry.copies),
            tuple((self.formula(a), self.formula(b), self.formula(c), self.formula(d)) for a, b, c, d in entry.opaque),
            tuple(
                _Names(
                    self.template(each.template),
                    self._named(each.numbers),
                    -1 if each.moving is None else each.moving,
                    self.formula(each.count),
                )
                for each in entry.depends_on
            ),
        )

    def _copy(self, copy: SymbolicCopy) -> _Copy:
        axes = tuple(
            _Axis(self.formula(a.count), a.dim, self.formula(a.step), a.axis, self.formula(a.stride)) for a in copy.axes
        )
        at, to = self.many(copy.at), self.many(copy.to)
        return _Copy(
            self.template(copy.template), self._named(copy.numbers), copy.moving, copy.view, at, to, copy.flat, axes
        )


def encode_symbolic(family: SymbolicMap) -> bytes:
    """Serialize a family.

    Raises
    ------
    FormulaError
        If it is larger than ``decode_symbolic`` reads.
    """
    writer = _Writer()
    names, order = encode_names(list(family.parameters))
    entries = list(family.parameters.values())
    form_of = [writer.parameter(entries[place]) for place in order.tolist()]
    tokens = [tokens_of(formula) for formula in writer.formulas]
    copies = sum(len(entry.copies) for entry in entries)
    numbers = [np.array(rows, dtype=np.int64).reshape(len(rows), -1) for rows in writer.numbers]
    plain = msgspec.msgpack.encode(
        _Map(
            pack_space(family.space),
            family.degree or 0,
            pack_column(np.array([token for each in tokens for token in each], dtype=np.int64)),
            pack_column(np.array([len(each) for each in tokens], dtype=np.int64)),
            tuple(tuple(piece.encode("utf-8", "surrogatepass") for piece in each) for each in writer.templates),
            names,
            tuple(writer.forms),
            pack_column(np.array(form_of, dtype=np.int64)),
            tuple(pack_table(table) for table in numbers),
        )
    )
    if len(plain) > MAX_BYTES or len(tokens) > MAX_FORMULAS or copies > MAX_COPIES:
        raise FormulaError(
            f"a family of {len(tokens):,} formulas, {copies:,} copies; at most {MAX_FORMULAS:,} and {MAX_COPIES:,} can "
            "be read back"
        )
    return seal(MAGIC, plain)


def decode_symbolic(data: bytes) -> SymbolicMap:
    """Read ``encode_symbolic``'s output.

    Raises
    ------
    FormulaError
        For anything that ``encode_symbolic`` of this version did not write, or that contradicts itself.
    """
    plain = unseal(data, MAGIC, what="a family of layouts", limit=MAX_BYTES, error=FormulaError)
    try:
        return _Reader(msgspec.msgpack.decode(plain, type=_Map)).family()
    except FormulaError:
        raise
    except (msgspec.MsgspecError, LayoutError, ValueError, TypeError, OverflowError) as error:
        raise FormulaError(f"a family of layouts does not decode: {error}") from error


class _Reader:
    """Everything that other parts refer to by number, checked."""

    def __init__(self, packed: _Map) -> None:
        self._packed = packed
        self._own: Iterator[int] = iter(())
        self._budget = budget = Budget(MAX_VALUES)
        self._space = unpack_space(packed.space, budget, FormulaError)
        self._names = decode_names(packed.names, budget, FormulaError)
        tokens = unpack_column(packed.tokens, budget, FormulaError).tolist()
        lengths = unpack_column(packed.lengths, budget, FormulaError).tolist()
        if len(lengths) > MAX_FORMULAS or any(length < 1 for length in lengths) or sum(lengths) != len(tokens):
            raise FormulaError(f"{len(lengths)} formulas do not share {len(tokens)} tokens")
        self._formulas = []
        at = 0
        for length in lengths:
            self._formulas.append(formula_of(tokens[at : at + length]))
            at += length
        self._templates = [tuple(piece.decode("utf-8", "surrogatepass") for piece in each) for each in packed.templates]
        if packed.degree < 0 or any(not each for each in self._templates):
            raise FormulaError("a negative degree or an empty template")

    def family(self) -> SymbolicMap:
        """The family, if its parts agree."""
        packed, names = self._packed, self._names
        form_of = unpack_column(packed.form_of, self._budget, FormulaError)
        if len(names) != len(form_of) or len(set(names)) != len(names) or len(packed.forms) != len(packed.numbers):
            raise FormulaError(f"{len(form_of)} parameters have {len(set(names))} names")
        if len(form_of) and (int(form_of.min()) < 0 or int(form_of.max()) >= len(packed.forms)):
            raise FormulaError(f"a form is outside 0:{len(packed.forms)}")
        rows = [iter(unpack_table(table, self._budget, FormulaError).tolist()) for table in packed.numbers]
        parameters = {}
        copies = 0
        for name, form in zip(names, form_of.tolist(), strict=True):
            copies += len(packed.forms[form].copies)
            row = next(rows[form], None)
            if copies > MAX_COPIES or row is None:
                raise FormulaError(f"{name}: more than {MAX_COPIES} copies, or no numbers for its names")
            self._own = iter(row)
            parameters[name] = self._parameter(name, packed.forms[form])
            if next(self._own, None) is not None:
                raise FormulaError(f"{name}: more numbers than its names have")
        return SymbolicMap(self._space, packed.degree or None, parameters)

    def _named(self, numbers: Sequence[int]) -> tuple[sympy.Expr, ...]:
        """Numbers of a name: formulas, and plain ones in their order."""
        out = []
        for number in numbers:
            plain = next(self._own, None) if number == -1 else None
            if number == -1 and plain is None:
                raise FormulaError("a name has more numbers than there are")
            out.append(self._one(number) if plain is None else integer(plain))
        return tuple(out)

    def _parameter(self, name: str, packed: _Parameter) -> SymbolicParameter:
        dtype_of(packed.dtype)
        if len(packed.shape) > _MAX_AXES:
            raise FormulaError(f"{name}: {len(packed.shape)} axes")
        return SymbolicParameter(
            self._many(packed.shape),
            packed.dtype,
            tuple(self._copy(name, copy, len(packed.shape)) for copy in packed.copies),
            tuple((self._one(a), self._one(b), self._one(c), self._one(d)) for a, b, c, d in packed.opaque),
            tuple(self._depends(name, each) for each in packed.depends_on),
        )

    def _copy(self, name: str, packed: _Copy, rank: int) -> SymbolicCopy:
        template = self._template(packed.template)
        moving, dims = packed.moving, len(packed.moving) + len(packed.view)
        good = (
            len(packed.numbers) == len(template) - 1
            and list(moving) == sorted(set(moving))
            and all(0 <= place < len(packed.numbers) for place in moving)
            and len(packed.at) == len(packed.view)
            and all(extent >= 0 for extent in packed.view)
            and len(packed.to) == (1 if packed.flat else rank)
            and len(packed.axes) <= _MAX_AXES
            and all(REPEAT <= axis.dim < dims and 0 <= axis.axis < len(packed.to) for axis in packed.axes)
        )
        if not good:
            raise FormulaError(f"{name}: a copy's parts do not belong together")
        axes = tuple(
            SymbolicAxis(self._one(a.count), a.dim, self._one(a.step), a.axis, self._one(a.stride)) for a in packed.axes
        )
        numbers, at, to = self._named(packed.numbers), self._many(packed.at), self._many(packed.to)
        return SymbolicCopy(template, numbers, moving, packed.view, at, to, packed.flat, axes)

    def _depends(self, name: str, packed: _Names) -> SymbolicNames:
        template = self._template(packed.template)
        if len(packed.numbers) != len(template) - 1 or not -1 <= packed.moving < len(packed.numbers):
            raise FormulaError(f"{name}: the names it depends on do not fit their template")
        moving = None if packed.moving < 0 else packed.moving
        return SymbolicNames(template, self._named(packed.numbers), moving, self._one(packed.count))

    def _one(self, number: int) -> sympy.Expr:
        if not 0 <= number < len(self._formulas):
            raise FormulaError(f"formula {number} of {len(self._formulas)}")
        return self._formulas[number]

    def _many(self, numbers: Sequence[int]) -> tuple[sympy.Expr, ...]:
        return tuple(self._one(number) for number in numbers)

    def _template(self, number: int) -> tuple[str, ...]:
        if not 0 <= number < len(self._templates):
            raise FormulaError(f"template {number} of {len(self._templates)}")
        return self._templates[number]
