"""The atom of every layout: an n-dimensional affine copy.

A ``SliceCopy`` says that for every multi-index ``i`` inside ``shape`` the parameter element at flat index
``target.start + sum(i * target.strides)`` holds checkpoint element ``source.start + sum(i * source.strides)``.
A transpose is nothing but another stride order, a broadcast is a source stride of 0.

>>> piece = SliceCopy(Strided(1, (2, 3), (3, 1)), Strided(0, (2, 3), (1, 2)))   # a (2, 3) tensor, transposed
>>> piece.source.indices().tolist(), piece.target.indices().tolist()
([[1, 2, 3], [4, 5, 6]], [[0, 2, 4], [1, 3, 5]])

``CopyTable`` is many of them in one integer array, which is what the fast code works on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import MapError


@dataclass(frozen=True, slots=True)
class Strided:
    """An affine function from multi-indices to integers.

    Attributes
    ----------
    start
        Value at the origin.
    shape
        Extents, all >= 1.
    strides
        Step per axis, of any sign.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or any(extent < 1 for extent in self.shape):
            raise MapError(f"{self.shape} with strides {self.strides}: expected one stride per extent, extents >= 1")

    def indices(self) -> IdArray:
        """Every value, as an int64 array of this shape: the definition."""
        out = np.full(self.shape, self.start, dtype=np.int64)
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = np.arange(extent, dtype=np.int64) * stride
            out += steps.reshape([-1 if other == axis else 1 for other in range(len(self.shape))])
        return out

    def __str__(self) -> str:
        axes = ",".join(f"{extent}:{stride}" for extent, stride in zip(self.shape, self.strides, strict=True))
        return f"{self.start}+({axes})"


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """One affine copy from checkpoint ids (``source``) to flat parameter indices (``target``), of one shape."""

    source: Strided
    target: Strided

    def __post_init__(self) -> None:
        if self.source.shape != self.target.shape:
            raise MapError(f"source shape {self.source.shape} differs from target shape {self.target.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the copy."""
        return self.source.shape

    @property
    def elements(self) -> int:
        """Number of parameter elements written."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.target} <- {self.source}"


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Slice copies of one parameter as an array, one row each.

    Attributes
    ----------
    rows
        int64, shape ``(n, 2 + 3 * axes)``: target start, source start, then (extent, target stride, source
        stride) for every axis, outermost first. Unused axes have extent 1 and strides 0, and stand in front.
    """

    rows: IdArray

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[1] < 5 or (self.rows.shape[1] - 2) % 3:
            raise MapError(f"a copy table of shape {self.rows.shape}: expected (n, 2 + 3 * axes), axes >= 1")
        rows = np.ascontiguousarray(self.rows, dtype=np.int64)
        rows.setflags(write=False)
        object.__setattr__(self, "rows", rows)

    @staticmethod
    def empty() -> CopyTable:
        """No copies at all."""
        return CopyTable(np.empty((0, 5), dtype=np.int64))

    @staticmethod
    def of(copies: Iterable[SliceCopy]) -> CopyTable:
        """The table of some slice copies, in their order."""
        listed = tuple(copies)
        axes = max([1, *(len(copy.shape) for copy in listed)])
        rows = np.zeros((len(listed), 2 + 3 * axes), dtype=np.int64)
        rows[:, 2::3] = 1
        for row, copy in zip(rows, listed, strict=True):
            row[:2] = copy.target.start, copy.source.start
            used = len(copy.shape)
            if used:
                row[2 + 3 * (axes - used) :] = np.stack(
                    [copy.shape, copy.target.strides, copy.source.strides], 1
                ).ravel()
        return CopyTable(rows)

    @staticmethod
    def concatenate(tables: Sequence[CopyTable]) -> CopyTable:
        """All rows of some tables, in order."""
        axes = max([1, *(table.axes for table in tables)])
        rows = np.zeros((sum(len(table) for table in tables), 2 + 3 * axes), dtype=np.int64)
        rows[:, 2::3] = 1
        done = 0
        for table in tables:
            part = rows[done : done + len(table)]
            part[:, :2] = table.rows[:, :2]
            part[:, 2 + 3 * (axes - table.axes) :] = table.rows[:, 2:]
            done += len(table)
        return CopyTable(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def axes(self) -> int:
        """Axes per row, unit axes included."""
        return int(self.rows.shape[1] - 2) // 3

    @property
    def target_starts(self) -> IdArray:
        """Flat parameter index of every copy's origin."""
        return self.rows[:, 0]

    @property
    def source_starts(self) -> IdArray:
        """Element id of every copy's origin."""
        return self.rows[:, 1]

    @property
    def extents(self) -> IdArray:
        """Shape ``(n, axes)``."""
        return self.rows[:, 2::3]

    @property
    def target_strides(self) -> IdArray:
        """Shape ``(n, axes)``."""
        return self.rows[:, 3::3]

    @property
    def source_strides(self) -> IdArray:
        """Shape ``(n, axes)``."""
        return self.rows[:, 4::3]

    @property
    def elements(self) -> IdArray:
        """Elements written by every copy."""
        counts: IdArray = np.prod(self.extents, axis=1, dtype=np.int64)
        return counts

    def slice_copies(self) -> tuple[SliceCopy, ...]:
        """The rows as values; unit axes are dropped."""
        out = []
        for row in self.rows.tolist():
            axes = [(row[k], row[k + 1], row[k + 2]) for k in range(2, len(row), 3) if row[k] != 1]
            shape = tuple(axis[0] for axis in axes)
            target = Strided(row[0], shape, tuple(axis[1] for axis in axes))
            out.append(SliceCopy(Strided(row[1], shape, tuple(axis[2] for axis in axes)), target))
        return tuple(out)

    def bounds(self, *, of: str) -> tuple[IdArray, IdArray]:
        """Smallest and largest target index (``of="target"``) or id (``of="source"``) of every copy, inclusive."""
        starts = self.target_starts if of == "target" else self.source_starts
        strides = self.target_strides if of == "target" else self.source_strides
        reach = (self.extents - 1) * strides
        return starts + np.minimum(reach, 0).sum(axis=1), starts + np.maximum(reach, 0).sum(axis=1)

    def expand(self, inner: IdArray) -> CopyTable:
        """Unroll every axis but one: the same copies as one-dimensional rows.

        Parameters
        ----------
        inner
            For every row the axis to keep, or -1 to unroll all of them; shape ``(n,)``.

        Returns
        -------
        CopyTable
            With one axis; rows of one input row stay together, in row-major order of its unrolled axes.
        """
        rows = self.rows
        index = np.arange(len(rows))
        extents = self.extents.copy()
        kept = np.zeros((len(rows), 3), dtype=np.int64)
        kept[:, 0] = 1
        has = inner >= 0
        for column in range(3):
            kept[has, column] = rows[index[has], 2 + 3 * inner[has] + column]
        extents[index[has], inner[has]] = 1
        of_row, places = unroll(extents)
        out = np.empty((len(of_row), 5), dtype=np.int64)
        out[:, :2] = rows[of_row, :2]
        out[:, 2:] = kept[of_row]
        out[:, 0] += (places * self.target_strides[of_row]).sum(axis=1)
        out[:, 1] += (places * self.source_strides[of_row]).sum(axis=1)
        return CopyTable(out)

    def source_runs(self) -> tuple[IdArray, IdArray]:
        """The ids that the copies read, as strided runs without unrolling rows.

        Returns
        -------
        tuple
            Runs (start, length, stride, count), int64 of shape ``(m, 4)``, and the row that each belongs to. Runs of
            copies that read an id twice overlap. ``m`` is the number of rows where ids form at most two nested
            progressions.
        """
        rows = np.arange(len(self))
        extents, steps = self.extents.copy(), np.abs(self.source_strides)
        start = self.bounds(of="source")[0]
        extents[steps == 0] = 1
        order = np.argsort(np.where(extents == 1, np.iinfo(np.int64).max, steps), axis=1, kind="stable")
        length, stride, count = np.ones_like(start), np.zeros_like(start), np.ones_like(start)
        outer = np.ones_like(extents)
        for place in range(self.axes):
            axis = order[:, place]
            extent, step = extents[rows, axis], steps[rows, axis]
            many = extent > 1
            joins = many & (count == 1) & (step == length)
            opens = many & ~joins & (count == 1) & (step > length)
            goes_on = many & ~joins & ~opens & (step == stride * count)
            length[joins] *= extent[joins]
            stride[opens], count[opens] = step[opens], extent[opens]
            count[goes_on] *= extent[goes_on]
            rest = many & ~joins & ~opens & ~goes_on
            outer[rows[rest], axis[rest]] = extent[rest]
        of_row, places = unroll(outer)
        begin = start[of_row] + (places * steps[of_row]).sum(axis=1)
        runs = np.stack([begin, length[of_row], np.maximum(stride, length)[of_row], count[of_row]], axis=1)
        return runs, of_row

    def write_ids(self, out: IdArray) -> None:
        """Write every copy's ids into a flat int64 array of the parameter's size: the definition, in bulk."""
        flat = self.expand(np.full(len(self), -1, dtype=np.int64))
        out[flat.target_starts] = flat.source_starts


def unroll(extents: IdArray) -> tuple[IdArray, IdArray]:
    """Every multi-index of every row of extents, in row-major order.

    Returns
    -------
    tuple
        Row of each, shape ``(m,)``, and the multi-index, shape ``(m, axes)``.
    """
    repeats = np.prod(extents, axis=1, dtype=np.int64)
    of_row = np.repeat(np.arange(len(extents)), repeats)
    local = np.arange(len(of_row), dtype=np.int64) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    places = np.empty((len(of_row), extents.shape[1]), dtype=np.int64)
    for axis in range(extents.shape[1] - 1, -1, -1):
        local, places[:, axis] = np.divmod(local, extents[of_row, axis])
    return of_row, places
