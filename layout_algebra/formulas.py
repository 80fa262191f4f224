"""Formulas in rank ``r`` and degree ``d``: sympy expressions of a few kinds, evaluated exactly, safe as bytes.

>>> shard = integer(4096) * RANK / DEGREE
>>> shard, value_of(shard, 3, 8), value_of(shard, 1, 3)
(4096*r/d, Fraction(1536, 1), Fraction(4096, 3))
>>> show(4096 * (RANK + 1)), show(sympy.ceiling(10 / DEGREE))
('4096*(r+1)', 'ceil(10/d)')

Formulas travel as integers in prefix order, never as text, so nothing is parsed or evaluated by name when they are
read. Kinds: integers, fractions, ``r``, ``d``, sums, products, small powers of r and d, floor, ceiling, Min, Max.

>>> formula_of(tokens_of(shard)) == shard
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import sympy

from layout_algebra.errors import FormulaError

RANK = sympy.Symbol("r", integer=True, nonnegative=True)
"""A rank's index within its group."""
DEGREE = sympy.Symbol("d", integer=True, positive=True)
"""The group's size."""


_INTEGER, _RATIO, _RANK, _DEGREE, _POWER, _FLOOR, _CEILING, _ADD, _MUL, _MIN, _MAX = range(11)
_MANY: dict[int, type[sympy.Basic]] = {_ADD: sympy.Add, _MUL: sympy.Mul, _MIN: sympy.Min, _MAX: sympy.Max}
_ONE: dict[int, type[sympy.Basic]] = {_FLOOR: sympy.floor, _CEILING: sympy.ceiling}
_MAX_TOKENS = 512
_MAX_DEPTH = 12
_MAX_ARGUMENTS = 16
_MAX_POWER = 4
_MAX_INTEGER = 1 << 62


def integer(value: int) -> sympy.Expr:
    """An integer as a formula."""
    return made(sympy.Integer(value))


def value_of(formula: sympy.Expr, rank: int, degree: int) -> Fraction:
    """The exact value for a rank and a degree.

    Raises
    ------
    FormulaError
        If the formula has a part of no known kind, or divides by zero.
    """
    return _value(formula, rank, degree)


@lru_cache(maxsize=1 << 16)
def _value(formula: sympy.Expr, rank: int, degree: int) -> Fraction:
    if isinstance(formula, sympy.Rational):
        return Fraction(int(formula.p), int(formula.q))
    if formula == RANK:
        return Fraction(rank)
    if formula == DEGREE:
        return Fraction(degree)
    values = [_value(argument, rank, degree) for argument in formula.args if isinstance(argument, sympy.Expr)]
    if formula.is_Add:
        return sum(values, Fraction(0))
    if formula.is_Mul:
        product = Fraction(1)
        for value in values:
            product *= value
        return product
    if formula.is_Pow and values[1].denominator == 1:
        if values[0] == 0 and values[1] < 0:
            raise FormulaError(f"{formula} divides by zero for rank {rank} of {degree}")
        return Fraction(values[0] ** int(values[1]))
    if isinstance(formula, sympy.floor):
        return Fraction(values[0].numerator // values[0].denominator)
    if isinstance(formula, sympy.ceiling):
        return Fraction(-(-values[0].numerator // values[0].denominator))
    if isinstance(formula, sympy.Min):
        return min(values)
    if isinstance(formula, sympy.Max):
        return max(values)
    raise FormulaError(f"{formula}: a {type(formula).__name__} is no part of a layout formula")


def integer_of(formula: sympy.Expr, rank: int, degree: int, *, what: str) -> int:
    """The value where it must be an integer that memory can have.

    Parameters
    ----------
    what
        What the formula is of, for the message.

    Raises
    ------
    FormulaError
        If it is none, such as ``10/d`` for degree 4.
    """
    value = _value(formula, rank, degree)
    if value.denominator != 1:
        raise FormulaError(f"{what} is {show(formula)} = {value} for rank {rank} of {degree}, which is no whole number")
    if abs(value.numerator) >= _MAX_INTEGER:
        raise FormulaError(f"{what} is {show(formula)}, past 2**62 for rank {rank} of {degree}")
    return value.numerator


def tokens_of(formula: sympy.Expr) -> list[int]:
    """A formula as integers in prefix order; FormulaError if a part is of no known kind."""
    if isinstance(formula, sympy.Rational):
        return [_INTEGER, int(formula.p)] if formula.q == 1 else [_RATIO, int(formula.p), int(formula.q)]
    if formula == RANK:
        return [_RANK]
    if formula == DEGREE:
        return [_DEGREE]
    if isinstance(formula, sympy.Pow) and isinstance(formula.exp, sympy.Integer):
        return [_POWER, int(formula.exp), *tokens_of(formula.base)]
    arguments = [
        token for argument in formula.args if isinstance(argument, sympy.Expr) for token in tokens_of(argument)
    ]
    for tag, kind in _ONE.items():
        if isinstance(formula, kind):
            return [tag, *arguments]
    for tag, kind in _MANY.items():
        if isinstance(formula, kind):
            return [tag, len(formula.args), *arguments]
    raise FormulaError(f"{formula}: a {type(formula).__name__} is no part of a layout formula")


def formula_of(tokens: Sequence[int]) -> sympy.Expr:
    """Read ``tokens_of``'s output; safe on untrusted integers.

    Raises
    ------
    FormulaError
        If there is an unknown part, a part too many or too few, or a number past 2**62.
    """
    if len(tokens) > _MAX_TOKENS or any(abs(token) >= _MAX_INTEGER for token in tokens):
        raise FormulaError(f"a formula of {len(tokens)} tokens; expected at most {_MAX_TOKENS}, none past 2**62")
    reader = iter(tokens)
    try:
        formula = _read(reader, _MAX_DEPTH)
    except StopIteration:
        raise FormulaError("a formula ends too early") from None
    if next(reader, None) is not None:
        raise FormulaError("a formula goes on after its end")
    return formula


def _read(tokens: Iterator[int], depth: int) -> sympy.Expr:
    if depth < 0:
        raise FormulaError(f"a formula is nested deeper than {_MAX_DEPTH}")
    tag = next(tokens)
    if tag == _INTEGER:
        return integer(next(tokens))
    if tag == _RATIO:
        top, bottom = next(tokens), next(tokens)
        if bottom < 1:
            raise FormulaError(f"{top}/{bottom} is no fraction of a formula")
        return made(sympy.Rational(top, bottom))
    if tag == _RANK:
        return RANK
    if tag == _DEGREE:
        return DEGREE
    if tag == _POWER:
        power, base = next(tokens), _read(tokens, depth - 1)
        if abs(power) > _MAX_POWER or base not in (RANK, DEGREE) or (power < 0 and base == RANK):
            raise FormulaError(f"a power {power} in a formula; expected up to {_MAX_POWER} of r, or of d or 1/d")
        return made(sympy.Pow(base, power))
    if tag in _ONE:
        return made(_ONE[tag](_read(tokens, depth - 1)))
    if tag in _MANY and 2 <= (count := next(tokens)) <= _MAX_ARGUMENTS:
        return made(_MANY[tag](*[_read(tokens, depth - 1) for _ in range(count)]))
    raise FormulaError("a formula has a part of no known kind")


def made(formula: sympy.Basic) -> sympy.Expr:
    """What sympy made of a formula, which must be one of a number again."""
    if not isinstance(formula, sympy.Expr):
        raise FormulaError(f"{formula} is no formula of a number")
    return formula


def show(formula: sympy.Expr) -> str:
    """A formula as a person writes it, without spaces: what is added before what is taken away."""
    formula = _by_mesh_index(formula)
    if formula.free_symbols - {DEGREE} and not formula.has(sympy.Min, sympy.Max, sympy.floor):
        formula = sympy.factor_terms(formula)
    return _text(formula)


def _by_mesh_index(formula: sympy.Expr) -> sympy.Expr:
    """With ``r//n`` and ``r%n`` in place of the rank, where a formula has the columns of a mesh, ``r-n*floor(r/n)``."""
    sizes = {RANK / floor.args[0] for floor in formula.atoms(sympy.floor)}
    size = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(size, sympy.Integer):
        return formula
    row = sympy.Symbol(f"(r//{size})", integer=True, nonnegative=True)
    column = sympy.Symbol(f"(r%{size})", integer=True, nonnegative=True)
    turned = formula.subs(RANK, size * row + column).subs(sympy.floor(column / size), 0)
    if not turned.has(column):
        return formula
    return made(turned if turned.has(sympy.Min, sympy.Max) else sympy.expand(turned))


def _text(formula: sympy.Expr) -> str:
    if isinstance(formula, sympy.Add):
        terms = sorted(formula.as_ordered_terms(), key=lambda term: bool(term.could_extract_minus_sign()))
        return "".join(_signed(term) for term in terms).removeprefix("+")
    if isinstance(formula, (sympy.Mul, sympy.Pow)):
        return _quotient(formula)
    arguments = [argument for argument in formula.args if isinstance(argument, sympy.Expr)]
    for kind, name in ((sympy.floor, "floor"), (sympy.ceiling, "ceil"), (sympy.Min, "min"), (sympy.Max, "max")):
        if isinstance(formula, kind):
            texts = [_text(sympy.factor_terms(argument)) for argument in arguments]
            return f"{name}({','.join(sorted(texts, key=lambda text: (not text.isdigit(), text)))})"
    return str(formula)


def _signed(term: sympy.Expr) -> str:
    return f"-{_text(-term)}" if term.could_extract_minus_sign() else f"+{_text(term)}"


def _quotient(formula: sympy.Expr) -> str:
    """A product, with what divides it behind a slash."""
    above, below = [], []
    for factor in formula.as_ordered_factors():
        if isinstance(factor, sympy.Rational) and factor.q != 1:
            above += [] if factor.p == 1 else [str(factor.p)]
            below.append(str(factor.q))
        elif isinstance(factor, sympy.Pow) and isinstance(factor.exp, sympy.Integer) and factor.exp < 0:
            below.append(_factor(1 / factor))
        else:
            above.append(_factor(factor))
    text = "*".join(above).replace("-1*", "-", 1) or "1"
    divisor = "*".join(below)
    return f"{text}/({divisor})" if len(below) > 1 else f"{text}/{divisor}" if below else text


def _factor(factor: sympy.Expr) -> str:
    if isinstance(factor, sympy.Pow):
        return f"{_factor(factor.base)}**{factor.exp}"
    return f"({_text(factor)})" if isinstance(factor, sympy.Add) else _text(factor)


def same(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two formulas are equal by expansion; False also where that does not tell."""
    return bool(left == right or sympy.expand(left - right) == 0)
