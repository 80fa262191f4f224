"""The values of ``symbolic``: formulas of a parameter, of a rank's map, and what they are for one rank.

A copy is kept the way a person says it, "rows ``512*r`` on of q_proj to rows 0 on of qkv_proj, 512 rows": places along
the axes of a tensor and of a parameter. Flat starts and strides follow from those (``source_start``,
``target_strides``, ...).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from layout_algebra.boxes import REPEAT
from layout_algebra.errors import FormulaError, LayoutError
from layout_algebra.name_bytes import Template
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, natural_key
from layout_algebra.symbolic_mesh import columns_of

if TYPE_CHECKING:
    from layout_algebra.symbolic_proof import Proof


@dataclass(frozen=True, slots=True)
class SymbolicAxis:
    """One axis of a copy.

    Attributes
    ----------
    count
        Extent; the copy is absent on ranks where it is 0.
    dim, step
        The coordinate of the tensor it walks (see ``SymbolicCopy.moving``) and how far per position; ``REPEAT`` if
        every position copies the same elements.
    axis, stride
        The parameter's axis it walks and how far per position; axis 0 where the copy sees the parameter flat.
    """

    count: sympy.Expr
    dim: int
    step: sympy.Expr
    axis: int
    stride: sympy.Expr


@dataclass(frozen=True, slots=True)
class SymbolicCopy:
    """A slice copy whose numbers are formulas.

    Attributes
    ----------
    template, numbers
        The name of the tensor that the first element comes from.
    moving
        Which of the numbers are coordinates: a stack of experts walks along one. Coordinates are counted with these
        first, then the axes of ``view``.
    view
        The tensor's shape, or ``(elements,)`` where the copy sees it flat.
    at
        Place of the first element along every axis of ``view``.
    to
        Where it goes: index along every axis of the parameter, or one flat index if ``flat``.
    axes
        From there.
    """

    template: Template
    numbers: tuple[sympy.Expr, ...]
    moving: tuple[int, ...]
    view: tuple[int, ...]
    at: tuple[sympy.Expr, ...]
    to: tuple[sympy.Expr, ...]
    flat: bool
    axes: tuple[SymbolicAxis, ...]

    @property
    def extents(self) -> tuple[sympy.Expr, ...]:
        """Extent of every axis."""
        return tuple(axis.count for axis in self.axes)

    @property
    def source_start(self) -> sympy.Expr:
        """Flat index, in its tensor, of the first element."""
        return sympy.Add(*(place * _after(self.view, k) for k, place in enumerate(self.at)))

    def coordinate(self, dim: int) -> sympy.Expr:
        """A coordinate of the first element."""
        first = len(self.moving)
        found: sympy.Expr = self.numbers[self.moving[dim]] if dim < first else self.at[dim - first]
        return found

    @property
    def source_strides(self) -> tuple[sympy.Expr | None, ...]:
        """Elements of the tensor per position of every axis; None for one that walks from tensor to tensor."""
        first = len(self.moving)
        return tuple(
            sympy.Integer(0) if axis.dim == REPEAT else
            None if axis.dim < first else axis.step * _after(self.view, axis.dim - first)
            for axis in self.axes
        )  # fmt: skip

    def target_start(self, shape: tuple[sympy.Expr, ...]) -> sympy.Expr:
        """Flat index, in a parameter of that shape, of the first element."""
        steps = [sympy.Integer(1)] if self.flat else [_after(shape, k) for k in range(len(shape))]
        start: sympy.Expr = sympy.expand(sympy.Add(*(p * step for p, step in zip(self.to, steps, strict=True))))
        return start

    def target_strides(self, shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
        """Elements of a parameter of that shape per position of every axis."""
        return tuple(axis.stride * (1 if self.flat else _after(shape, axis.axis)) for axis in self.axes)


@dataclass(frozen=True, slots=True)
class SymbolicNames:
    """Tensors that an opaque parameter depends on: one name, or several that differ in one number."""

    template: Template
    numbers: tuple[sympy.Expr, ...]
    moving: int | None
    count: sympy.Expr


@dataclass(frozen=True, slots=True)
class SymbolicParameter:
    """A parameter of every rank.

    Attributes
    ----------
    shape, dtype
        Of the live tensor.
    copies
        In the order of their targets; disjoint on every rank.
    opaque
        Runs of opaque elements as formulas: start, length, stride, count.
    depends_on
        Checkpoint tensors that the opaque elements are computed from.
    """

    shape: tuple[sympy.Expr, ...]
    dtype: str
    copies: tuple[SymbolicCopy, ...]
    opaque: tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr], ...] = ()
    depends_on: tuple[SymbolicNames, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicMap:
    """The source maps of a family of ranks.

    Attributes
    ----------
    space
        The checkpoint.
    degree
        The one degree the formulas are for, or None: any degree for which they give whole numbers.
    parameters
        By name, in natural order.
    """

    space: CheckpointSpace
    degree: int | None
    parameters: Mapping[str, SymbolicParameter]

    def __post_init__(self) -> None:
        ordered = {name: self.parameters[name] for name in sorted(self.parameters, key=natural_key)}
        object.__setattr__(self, "parameters", ordered)

    def __getitem__(self, parameter: str) -> SymbolicParameter:
        found = self.parameters.get(parameter)
        if found is None:
            raise FormulaError(f"{parameter}: no such parameter in a family of {len(self.parameters)}")
        return found

    def instantiate(self, rank: int, degree: int) -> SourceMap:
        """One rank's map, in canonical form.

        Raises
        ------
        FormulaError
            If there is no such rank, or a formula gives no whole number, a tensor that the checkpoint does not have
            or a place outside its tensor or parameter; the message names the parameter.
        """
        from layout_algebra.symbolic_rank import RankMaker

        self.check_rank(rank, degree)
        maker = RankMaker(self.space, rank, degree)
        made = {name: maker.parameter(name, entry) for name, entry in self.parameters.items()}
        try:
            return SourceMap(self.space, made)
        except LayoutError as error:
            raise FormulaError(f"rank {rank} of {degree}: {error}") from error

    def check_rank(self, rank: int, degree: int) -> None:
        """Raise FormulaError if the family has no such rank."""
        if degree < 1 or not 0 <= rank < degree:
            raise FormulaError(f"rank {rank} of {degree}: expected a rank in 0:{degree}")
        if self.degree is not None and degree != self.degree:
            raise FormulaError(
                f"rank {rank} of {degree}: the formulas were fitted to degree {self.degree} alone; fit them to maps of "
                "two degrees or more to use them at others"
            )
        columns = self.mesh_columns
        if degree % columns:
            raise FormulaError(
                f"rank {rank} of {degree}: the formulas are of a mesh of {columns} columns; expected a degree that is "
                "a multiple of it"
            )

    @property
    def mesh_columns(self) -> int:
        """How many columns the mesh has of which the formulas speak; 1 if of none."""
        found = (columns_of(copy) for entry in self.parameters.values() for copy in entry.copies)
        return math.lcm(*(columns for columns in found if columns is not None))

    def explain(self, parameter: str, degree: int | None = None) -> str:
        """One line a slice copy, as a person reads it.

        Parameters
        ----------
        degree
            Put in for ``d``; by default it stays a letter.
        """
        from layout_algebra.symbolic_text import explained

        return explained(self.space, parameter, self[parameter], degree)

    def prove(
        self,
        degree: int | None = None,
        *,
        tensors: Collection[str] | None = None,
        replicas: bool | Collection[str] | Mapping[str, int] = False,
    ) -> Proof:
        """Decide whether all ranks together hold every checkpoint element exactly once.

        Parameters
        ----------
        degree
            Decide for this degree, on the ids; by default for all degrees, by an argument on the formulas.
        tensors
            Names or glob patterns of the tensors to look at; all by default.
        replicas
            Tensors (names or glob patterns) that may be held several times; True for all. A mapping says exactly how
            many times.

        Raises
        ------
        FormulaError
            If the formulas mean nothing for that degree, or a pattern names no tensor.
        """
        from layout_algebra.symbolic_proof import prove

        return prove(self, degree, tensors=tensors, replicas=replicas)

    def to_bytes(self) -> bytes:
        """Serialize, checkpoint included; the size does not depend on the degree."""
        from layout_algebra.symbolic_bytes import encode_symbolic

        return encode_symbolic(self)

    @staticmethod
    def from_bytes(data: bytes) -> SymbolicMap:
        """Read ``to_bytes``' output; safe on untrusted bytes, which are never evaluated as text.

        Raises
        ------
        FormulaError
            If the bytes are truncated, altered, of another version, or contradict themselves.
        """
        from layout_algebra.symbolic_bytes import decode_symbolic

        return decode_symbolic(data)

    def same_as(self, other: SymbolicMap) -> bool:
        """Whether both have the same formulas for the same checkpoint."""
        return (
            self.degree == other.degree
            and self.space == other.space
            and dict(self.parameters) == dict(other.parameters)
        )


def _after(shape: tuple[sympy.Expr | int, ...], axis: int) -> sympy.Expr:
    """Elements per position of an axis, row-major."""
    return sympy.Mul(*shape[axis + 1 :])
