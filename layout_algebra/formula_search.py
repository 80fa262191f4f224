"""Find the formula that gives some integers at some ranks and degrees, exactly, simplest first.

Candidates from the structure of a layout (``hints``: an extent of the checkpoint, the end of the piece before) go
first. Then come multiples and sums of the basis ``1, 1/d, r/d, r, d``, solved in fractions; a sum counts only if there
are more different samples than unknowns, so that what was not fitted has confirmed it.

>>> search = Search([(0, 2), (1, 2), (0, 4), (3, 4)])
>>> search.find([0, 512, 0, 768])
1024*r/d
>>> search.find([5, 5, 3, 1], hints=[sympy.Min(10, 3 * RANK), 5 - RANK])     # nothing fits
>>> Search([(0, 4), (1, 4), (3, 4)]).find([7, 9, 13])                       # one degree: d is 4
2*r + 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import sympy

from layout_algebra.errors import FormulaError
from layout_algebra.formulas import DEGREE, RANK, made, value_of

Values = Sequence[int | None]
"""One value per sample; None where the sample says nothing."""

_MOST_HEADS = 1 << 12


class Search:
    """Samples at points (rank, degree) and the basis that tells them apart.

    Parameters
    ----------
    points
        Rank and degree of every sample.
    inner
        Where ranks are a mesh of ``degree / inner`` rows of ``inner`` ranks: formulas in either index are tried too.

    Attributes
    ----------
    parts
        The two indices of a mesh as searches of their own; empty where ranks are no mesh.
    """

    def __init__(self, points: Sequence[tuple[int, int]], inner: int | None = None) -> None:
        self.points = tuple(points)
        degrees = sorted({degree for _, degree in points})
        self.degree: sympy.Expr = DEGREE if len(degrees) > 1 else sympy.Integer(degrees[0])
        """``d``, or the one degree of all samples."""
        self.complete = len(degrees) == 1 and {rank for rank, _ in points} == set(range(degrees[0]))
        """Whether every rank of the one degree is a sample."""
        basis = [1 / self.degree, RANK / self.degree, RANK, self.degree] if len(degrees) > 1 else [RANK]
        self.parts: tuple[Part, ...] = ()
        if inner is not None:
            row, place = sympy.floor(RANK / inner), RANK - inner * sympy.floor(RANK / inner)
            self.parts = (
                Part(Search([(rank // inner, degree // inner) for rank, degree in points]), row, DEGREE / inner),
                Part(Search([(rank % inner, inner) for rank, _ in points]), place, sympy.Integer(inner)),
            )
            basis = [*basis, row / self.degree, row, place]
        self._basis: tuple[sympy.Expr, ...] = tuple(sympy.sympify(each) for each in basis)

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - lives as long as one fit
    def values(self, formula: sympy.Expr) -> tuple[Fraction, ...] | None:
        """The formula at every point; None if it has no value somewhere."""
        try:
            return tuple(value_of(formula, rank, degree) for rank, degree in self.points)
        except FormulaError:
            return None

    def fits(self, formula: sympy.Expr, wanted: Values) -> bool:
        """Whether the formula has every wanted value."""
        have = self.values(formula)
        return have is not None and all(
            value is None or value == found for value, found in zip(wanted, have, strict=True)
        )

    def first(self, hints: Sequence[sympy.Expr], wanted: Values) -> sympy.Expr | None:
        """The first candidate that fits."""
        return next((hint for hint in hints if self.fits(hint, wanted)), None)

    def constant(self, wanted: Values) -> sympy.Expr | None:
        """The one value of all samples."""
        given = {value for value in wanted if value is not None}
        return sympy.Integer(given.pop()) if len(given) == 1 else None

    def find(self, wanted: Values, hints: Sequence[sympy.Expr] = ()) -> sympy.Expr | None:
        """The simplest formula with the wanted values; None if there is none in the basis.

        Parameters
        ----------
        wanted
            At least one value that is not None.
        hints
            Candidates, likelier ones first; tried as they are and with a constant added.
        """
        constant = self.constant(wanted)
        if constant is not None:
            return constant
        exact = self.first(hints, wanted)
        if exact is not None:
            return exact
        places = [place for place, value in enumerate(wanted) if value is not None]
        targets = [Fraction(wanted[place] or 0) for place in places]
        for hint in hints:
            column = self.values(hint)
            if column is not None:
                shift = targets[0] - column[places[0]]
                if all(target - column[place] == shift for place, target in zip(places, targets, strict=True)):
                    shifted: sympy.Expr = hint + sympy.Rational(shift.numerator, shift.denominator)
                    return shifted
        for part in self.parts:
            inside = part.search.find(wanted)
            if inside is not None:
                return part.turned(inside)
        columns = [(each, self.values(each)) for each in dict.fromkeys((*self._basis, *hints))]
        atoms = [(each, [column[place] for place in places]) for each, column in columns if column is not None]
        atoms = [(each, column) for each, column in atoms if len(set(column)) > 1]
        one = (sympy.Integer(1), [Fraction(1)] * len(places))
        for terms in _sums(atoms, one):
            found = self._solve(terms, targets)
            if found is not None:
                return found
        return None

    def _solve(self, terms: Sequence[tuple[sympy.Expr, list[Fraction]]], targets: list[Fraction]) -> sympy.Expr | None:
        """Coefficients that give the targets, if they are unique and more samples confirm them than were used."""
        rows = {tuple(column[k] for _, column in terms): targets[k] for k in range(len(targets))}
        surplus = 0 if self.complete else 1
        if len(rows) < len(terms) + surplus:
            return None
        factors = _coefficients([[*row, value] for row, value in rows.items()], len(terms))
        if factors is None or any(
            sum(f * c[k] for f, (_, c) in zip(factors, terms, strict=True)) != targets[k] for k in range(len(targets))
        ):
            return None
        return sympy.Add(
            *(sympy.Rational(f.numerator, f.denominator) * each for f, (each, _) in zip(factors, terms, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One index of a mesh: a search in which it is the rank, and what its rank and degree are of the whole mesh."""

    search: Search
    rank: sympy.Expr
    degree: sympy.Expr

    def turned(self, formula: sympy.Expr) -> sympy.Expr:
        """A formula of this part's rank and degree, in rank and degree of the mesh."""
        return made(formula.subs({RANK: self.rank, DEGREE: self.degree}, simultaneous=True))


def heads_of(search: Search, lows: Values, counts: Values, extent: int) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Start and count where few heads are shared out, then replicated, over many ranks.

    With ``h`` rows a head and ``k`` heads the count is ``max(extent/d, h)`` and the start ``h*floor(k*r/d)``.
    """
    given = [count for count in counts if count is not None]
    rows = min(given)
    if rows < 1 or extent % rows or extent // rows > _MOST_HEADS:
        return None
    heads = extent // rows
    for low, count, (rank, degree) in zip(lows, counts, search.points, strict=True):
        if count is not None and count * degree != max(extent, rows * degree):
            return None
        if low is not None and low != rows * (rank * heads // degree):
            return None
    start = rows * sympy.floor(RANK * heads / search.degree)
    return start, sympy.Max(sympy.Integer(extent) / search.degree, rows)


@dataclass(frozen=True, slots=True)
class Cut:
    """``total`` positions in ceil-sized windows, one a rank, and a tensor at ``offset`` that is ``extent`` long."""

    total: int
    offset: int
    extent: int

    def of(self, rank: int, degree: int) -> tuple[int, int, int]:
        """First element of the tensor in a rank's window, how many, and positions of the window before them."""
        width = -(-self.total // degree)
        low = min(self.extent, max(0, width * rank - self.offset))
        high = min(self.extent, max(0, width * (rank + 1) - self.offset))
        return low, high - low, max(0, self.offset - width * rank)

    def fits(self, search: Search, lows: Values, counts: Values, before: Values) -> bool:
        """Whether every sample is like that."""
        return all(
            wanted is None or wanted == found
            for sample, point in zip(zip(lows, counts, before, strict=True), search.points, strict=True)
            for wanted, found in zip(sample, self.of(*point), strict=True)
        )

    def formulas(self, search: Search) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """What ``of`` gives, as formulas."""
        width = sympy.ceiling(sympy.Integer(self.total) / search.degree)
        low = sympy.Min(self.extent, sympy.Max(0, width * RANK - self.offset))
        return low, low.subs(RANK, RANK + 1) - low, sympy.Max(0, self.offset - width * RANK)


def _sums(
    atoms: Sequence[tuple[sympy.Expr, list[Fraction]]], one: tuple[sympy.Expr, list[Fraction]]
) -> Iterator[Sequence[tuple[sympy.Expr, list[Fraction]]]]:
    """Sums to try: one term, a term and a constant, two terms, two terms and a constant."""
    for atom in atoms:
        yield [atom]
    for atom in atoms:
        yield [atom, one]
    for pair in combinations(atoms, 2):
        yield pair
    for pair in combinations(atoms, 2):
        yield [*pair, one]


def _coefficients(rows: list[list[Fraction]], unknowns: int) -> list[Fraction] | None:
    """Solve by elimination; None if there is no solution or more than one."""
    for column in range(unknowns):
        pivot = next((k for k in range(column, len(rows)) if rows[k][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column] = [value / rows[column][column] for value in rows[column]]
        for k, row in enumerate(rows):
            if k != column and row[column] != 0:
                rows[k] = [value - row[column] * lead for value, lead in zip(row, head, strict=True)]
    if any(row[unknowns] != 0 for row in rows[unknowns:]):
        return None
    return [rows[k][unknowns] for k in range(unknowns)]
