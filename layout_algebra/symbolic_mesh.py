"""Ranks as a mesh of two dimensions: tensor and data parallel ranks, say.

A mesh of ``rows`` x ``columns`` is numbered row by row, ``r = columns*row + column``, so a formula of it is one in rank
and degree: the row is ``floor(r/columns)``. The number of columns is a number; that of rows is ``d/columns``.

>>> flat_points({((1, 0), (2, 4)): None, ((0, 3), (2, 4)): None})
({(4, 8): None, (3, 8): None}, 4)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import sympy

from layout_algebra.errors import FormulaError
from layout_algebra.formulas import DEGREE, RANK

if TYPE_CHECKING:
    from layout_algebra.source_map import SourceMap
    from layout_algebra.symbolic_map import SymbolicAxis, SymbolicCopy

MeshPoint = tuple[tuple[int, int], tuple[int, int]]
"""Row and column of a rank, and how many there are of either."""


def flat_points(
    maps: Mapping[tuple[int, int], SourceMap] | Mapping[MeshPoint, SourceMap],
) -> tuple[dict[tuple[int, int], SourceMap], int | None]:
    """Points of a mesh as ranks and degrees, and the number of its columns; None where there is no mesh.

    Raises
    ------
    FormulaError
        If a point is neither, lies outside its mesh, or the number of columns differs.
    """
    flat: dict[tuple[int, int], SourceMap] = {}
    columns: set[int | None] = set()
    for (rank, degree), sample in maps.items():
        if isinstance(rank, int) and isinstance(degree, int):
            columns.add(None)
            flat[rank, degree] = sample
            continue
        if isinstance(rank, int) or isinstance(degree, int) or len(rank) != 2 or len(degree) != 2:
            raise FormulaError(
                f"rank {rank} of {degree}: expected numbers, or pairs for a mesh of two dimensions; of a mesh with "
                "more, fit two dimensions at a time and hold the others fixed"
            )
        if not all(0 <= index < size for index, size in zip(rank, degree, strict=True)):
            raise FormulaError(f"rank {rank} of {degree}: no such rank in a mesh of that shape")
        columns.add(degree[1])
        flat[rank[0] * degree[1] + rank[1], degree[0] * degree[1]] = sample
    if len(columns) > 1:
        raise FormulaError(
            f"samples of meshes with {', '.join(map(str, sorted(each or 0 for each in columns)))} columns (0: no "
            "mesh); formulas hold for any number of rows: put the dimension that varies first, and fit every number of "
            "columns by itself"
        )
    return flat, columns.pop()


@lru_cache(maxsize=1 << 14)
def columns_of(copy: SymbolicCopy) -> int | None:
    """How many columns the mesh has that a copy's formulas speak of; None if they speak of none."""
    places = [copy.coordinate(dim) for dim in range(len(copy.moving) + len(copy.view))]
    formulas = [*places, *(each for axis in copy.axes for each in (axis.count, axis.step))]
    sizes = {RANK / floor.args[0] for formula in formulas for floor in formula.atoms(sympy.floor)}
    size = sizes.pop() if len(sizes) == 1 else None
    return int(size) if isinstance(size, sympy.Integer) else None


def by_one_index(
    low: sympy.Expr, axes: tuple[SymbolicAxis, ...], size: sympy.Expr, columns: int
) -> tuple[str, sympy.Expr, tuple[SymbolicAxis, ...], sympy.Expr] | None:
    """A coordinate as formulas of the one index of a mesh that moves it, and how many there are of that.

    Gives the index in words, start and axes with it in place of the rank, and its degree; None where both move it.
    """
    row, column = sympy.symbols("row column", integer=True, nonnegative=True)

    def split(formula: sympy.Expr) -> sympy.Expr:
        turned = formula.subs({RANK: columns * row + column, DEGREE: columns * DEGREE}, simultaneous=True)
        out: sympy.Expr = sympy.expand(turned.subs(sympy.floor(column / columns), 0))
        return out

    place = split(low)
    walks = [(split(axis.count), split(axis.step)) for axis in axes]
    symbols = place.free_symbols.union(*(each.free_symbols for pair in walks for each in pair))
    if {row, column} <= symbols:
        return None
    index, name, ranks = (column, " of columns", sympy.Integer(columns))
    if column not in symbols:
        index, name, ranks = (row, " of rows", size if size == DEGREE else size / columns)
    turned = tuple(
        replace(axis, count=count.subs(index, RANK), step=step.subs(index, RANK))
        for axis, (count, step) in zip(axes, walks, strict=True)
    )
    return name, place.subs(index, RANK), turned, ranks
