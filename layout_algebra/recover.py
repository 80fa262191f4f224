"""Second differences -> copies: one sweep over the rows, for probed residues, plain ids and slice copies alike.

Seen as a matrix (``view_of``), a parameter's ids are cut in two steps. Where a row continues the two rows above it,
all rows that do so form a band, and the band is cut into columns on which ids are affine in both directions; any other
row is cut alone, into maximal affine runs. Then runs that repeat on successive rows form a column of numbers, which
is cut into maximal affine stretches the same way. In both directions a pair whose second half begins a longer stretch
gives it up: a lone element joins the longer run that follows. Ids only are cut: an element with id 0 is in no
rectangle, though 0 may lie on a run's own line.

Every decision looks at ids and at differences of ids, never at what led there, so the result is a function of the ids
and the shape. The sweep carries the row's second differences (and what they change by per row) at the few columns where
they are not 0, and costs time in the number of pieces, not of elements.

>>> import numpy as np
>>> [str(copy) for copy in rectangles_of_ids(np.array([[1, 2, 3, 0], [4, 5, 6, 0]])).slice_copies()]
['0+(2:4,3:1) <- 1+(2:3,3:1)']
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra._kernels import (
    entries_of_ids,
    entries_of_rectangles,
    join_dense,
    join_entries,
    pieces_inside,
)
from layout_algebra._lift_kernels import write_window
from layout_algebra.diff2 import Chunk, Diff2
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import MapError, ProbeError
from layout_algebra.lifting import lift_slabs
from layout_algebra.residues import Pass, join, product_of
from layout_algebra.slice_copy import CopyTable
from layout_algebra.sweeping import Entries, Sweep, rectangles
from layout_algebra.views import forward, rectangles_in_view, unrolled_pieces, view_of

_WINDOW_ELEMENTS = 1 << 20
_SPARSE = 64
"""With fewer elements than this to a rectangle, ids are listed window by window instead of counting with rectangles."""


def rectangles_of_ids(ids: IdArray) -> CopyTable:
    """Cut plain ids into affine rectangles: the reference for every other way to the same rectangles.

    Parameters
    ----------
    ids
        int64, of the parameter's shape; > 0 is a copy, 0 empty, -1 opaque.

    Returns
    -------
    CopyTable
        Two axes, disjoint targets, by target start. A function of which ids are > 0, their values and the shape.
    """
    return rectangles(Sweep(ids.shape).run(_listed(ids)))


def canonical_of_ids(ids: IdArray) -> CopyTable:
    """``rectangles_of_ids``, lifted: the canonical form of plain ids."""
    return lift_slabs(Sweep(ids.shape).run(_listed(ids)), ids.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    """What the code passes say about one parameter.

    Attributes
    ----------
    copies
        Ids in ``1..N`` in canonical form, ``canonical_of_ids`` of those ids. No element of them lay outside the codes
        in any pass. Verification still has to decide whether they are copies.
    constants
        Rectangles whose elements had equal bits in every pass and no id: the source start is the code's number
        (``bits = (number + base) << shift``), source strides are 0.

    An element in neither was outside in every pass (empty or opaque, see ``Diff2.outside``), or outside in some passes
    only (opaque), or held code number 0 in every pass (a constant, or opaque), or names a number past N (opaque). A
    rectangle of copies with source strides 0 may as well be a constant: see ``constant_ids``.
    """

    copies: CopyTable
    constants: CopyTable


def recover(diffs: Sequence[Diff2], passes: Sequence[Pass], shape: Sequence[int], total_elements: int) -> Recovery:
    """Join what every pass left of one parameter into affine rectangles of ids.

    Parameters
    ----------
    diffs
        One a pass, in the order of ``passes``, of one parameter.
    passes
        As ``plan_passes`` made them.
    shape
        The parameter's shape.
    total_elements
        N: ids are ``1..N``.

    Raises
    ------
    ProbeError
        If diffs and passes do not belong together, or cannot name that many ids.
    """
    modulus = product_of(passes)
    if [diff.of_pass for diff in diffs] != list(passes) or any(diff.shape != tuple(shape) for diff in diffs):
        raise ProbeError(
            f"second differences of shapes {[diff.shape for diff in diffs]} under {[diff.of_pass for diff in diffs]}; "
            f"expected {tuple(shape)} under {list(passes)}"
        )
    if modulus <= 2 * total_elements:
        raise ProbeError(
            f"moduli with product {modulus:,} cannot tell {total_elements:,} ids and their differences apart"
        )
    sweep = Sweep(shape, modulus, total_elements)
    copies = lift_slabs(sweep.run(_joined(diffs, passes)), shape)
    constants = CopyTable.empty()
    strays = sweep.dirty
    if strays:
        named = constant_ids(passes)
        number_of = np.flatnonzero(named > total_elements)
        number_of = number_of[np.argsort(named[number_of], kind="stable")]
        sweep = Sweep(shape, modulus, total_elements, named[number_of])
        copies = lift_slabs(sweep.run(_joined(diffs, passes)), shape)
        fixed = CopyTable.concatenate(sweep.constant_tables).rows.copy()
        fixed[:, 1] = number_of[np.searchsorted(named[number_of], fixed[:, 1])]
        constants = CopyTable(fixed)
    partly = _partly_outside(diffs)
    if strays or len(partly):
        # What stood outside the ids moved cuts between bands; without it they depend on ids alone.
        copies = canonical_without(copies, partly, shape)
    return Recovery(copies, constants)


def constant_ids(passes: Sequence[Pass]) -> IdArray:
    """The number that an element seems to hold when its bits are one code in every pass.

    Entry ``i`` is for code number ``i``; int64, shape ``(largest modulus,)``. A code beyond a pass's modulus is outside
    in that pass and counts as residue 0.
    """
    numbers = np.arange(max(one.modulus for one in passes), dtype=np.int64)
    residues = [np.where(numbers < one.modulus, numbers * one.inverse % one.modulus, 0) for one in passes]
    return join(residues, passes)


def ring_of(passes: Sequence[Pass]) -> tuple[IdArray, IdArray]:
    """The passes' moduli, and the inverse modulo each of the product of those before it; int64."""
    moduli = [one.modulus for one in passes]
    inverses = [pow(math.prod(moduli[:k]), -1, one) for k, one in enumerate(moduli)]
    return np.array(moduli, dtype=np.int64), np.array(inverses, dtype=np.int64)


def without(table: CopyTable, removed: IdArray, shape: Sequence[int]) -> CopyTable:
    """The rectangles of a table's ids after some elements became empty.

    Parameters
    ----------
    table
        Copies of a parameter of that shape, targets disjoint.
    removed
        Flat indices as sorted, disjoint, half-open intervals, int64 of shape ``(n, 2)``; they may lie anywhere.

    Raises
    ------
    MapError
        If targets overlap or leave the parameter, or an id is below 1.
    """
    left = _Left(table, removed, shape)
    return left.checked(rectangles(Sweep(shape).run(left.entries())))


def canonical_without(table: CopyTable, removed: IdArray, shape: Sequence[int]) -> CopyTable:
    """``without``, lifted: the canonical form of what is left."""
    left = _Left(table, removed, shape)
    return left.checked(lift_slabs(Sweep(shape).run(left.entries()), shape))


class _Left:
    """Copies of one parameter less some of its elements, as second differences."""

    def __init__(self, table: CopyTable, removed: IdArray, shape: Sequence[int]) -> None:
        self._rows, self._width = view_of(shape)
        if len(table):
            low, high = table.bounds(of="target")
            size = self._rows * self._width
            if int(low.min()) < 0 or int(high.max()) >= size:
                raise MapError(f"slice copies write {low.min()}..{high.max()} of a parameter of {size} elements")
            if int(table.bounds(of="source")[0].min()) < 1:
                raise MapError(f"slice copies read id {table.bounds(of='source')[0].min()}; ids begin at 1")
        self._table = table
        self._removed = np.ascontiguousarray(removed, dtype=np.int64)
        self._elements = int(table.elements.sum())

    def entries(self) -> Iterator[Entries]:
        """Second differences of what is left, counted with rectangles, or from ids where those would be too many."""
        sparse = unrolled_pieces(self._table, self._width) * _SPARSE <= self._rows * self._width + _WINDOW_ELEMENTS
        return self._counted() if sparse else self._windows()

    def checked(self, found: CopyTable) -> CopyTable:
        """What the sweep made of the entries.

        Raises
        ------
        MapError
            If copies overlap.
        """
        if int(found.elements.sum()) != self._elements:
            raise MapError(
                f"slice copies overlap: {self._elements} elements are written, {found.elements.sum()} of them different"
            )
        return found

    def _counted(self) -> Iterator[Entries]:
        pieces = rectangles_in_view(self._table, self._width)
        holes, hole_count = pieces_inside(pieces, self._width, self._removed)
        holes = holes[:hole_count]
        self._elements -= int(holes[:, 3].sum())
        place, value, count = entries_of_rectangles(np.concatenate([pieces, holes]), self._rows, self._width)
        yield _summed(place[:count], value[:count])

    def _windows(self) -> Iterator[Entries]:
        table = forward(self._table)
        starts = table[:, 0]
        if np.any(starts[1:] < starts[:-1]):
            table = table[np.argsort(starts, kind="stable")]
        low, high = CopyTable(table).bounds(of="target")
        reached = np.maximum.accumulate(high)
        rows = max(1, _WINDOW_ELEMENTS // self._width)
        window = np.zeros((2, self._width), dtype=np.int64)
        for first in range(0, self._rows, rows):
            height = min(rows, self._rows - first)
            known = min(first, 2)
            above = window[-known:] if known else window[:0]
            window = np.zeros((known + height, self._width), dtype=np.int64)
            window[:known] = above
            begin, end = first * self._width, (first + height) * self._width
            part = table[np.searchsorted(reached, begin) : np.searchsorted(low, end)]
            flat = window[known:].reshape(-1)
            # An element that is written twice counts once: the sum of what is found shows it.
            write_window(part, begin, end, flat)
            for start, stop in self._removed[
                np.searchsorted(self._removed[:, 1], begin, side="right") : np.searchsorted(self._removed[:, 0], end)
            ].tolist():
                inside = flat[max(start - begin, 0) : stop - begin]
                self._elements -= int(np.count_nonzero(inside))
                inside[:] = 0
            place, value, count = entries_of_ids(window, known, begin)
            yield place[:count], value[:count]


def _listed(ids: IdArray) -> Iterator[Entries]:
    """Second differences of plain ids, some rows at a time."""
    rows, width = view_of(ids.shape)
    matrix = np.ascontiguousarray(ids, dtype=np.int64).reshape(rows, width)
    step = max(1, _WINDOW_ELEMENTS // width)
    for first in range(0, rows, step):
        known = min(first, 2)
        place, value, count = entries_of_ids(matrix[first - known : first + step], known, first * width)
        yield place[:count], value[:count]


def _joined(diffs: Sequence[Diff2], passes: Sequence[Pass]) -> Iterator[Entries]:
    """All passes' second differences as one list of numbers modulo the product of the moduli, a chunk at a time."""
    ring = ring_of(passes)
    for group in _groups(diffs):
        if any(chunk.is_dense for chunk in group[0]):
            start, end = group[0][0].start, group[0][0].stop
            for first in range(start, end, _WINDOW_ELEMENTS):
                stop = min(first + _WINDOW_ELEMENTS, end)
                residues = np.stack([chunk.residues(first, stop) for chunk in group[0]])
                place, value, count = join_dense(residues, first, *ring)
                yield place[:count], value[:count]
            continue
        lists = [chunk.entries() for chunks in zip(*group, strict=True) for chunk in chunks if len(chunk.values)]
        starts = np.cumsum([0, *(sum(len(chunk.values) for chunk in chunks) for chunks in zip(*group, strict=True))])
        if lists:
            places, values = (np.concatenate(parts) for parts in zip(*lists, strict=True))
            place, value, count = join_entries(places, values, starts, *ring)
            yield place[:count], value[:count]


def _groups(diffs: Sequence[Diff2]) -> Iterator[list[Sequence[Chunk]]]:
    """The chunks of all passes in order: a dense one alone, others as many together as make one list of some length."""
    group: list[Sequence[Chunk]] = []
    size = 0
    for chunks in zip(*(diff.chunks for diff in diffs), strict=True):
        length = sum(len(chunk.values) for chunk in chunks)
        dense = any(chunk.is_dense for chunk in chunks)
        if group and (dense or size + length > _WINDOW_ELEMENTS):
            yield group
            group, size = [], 0
        group.append(chunks)
        size += length
        if dense:
            yield group
            group, size = [], 0
    if group:
        yield group


def _partly_outside(diffs: Sequence[Diff2]) -> IdArray:
    """Elements that held a code in some passes only, as intervals of flat indices; shape ``(n, 2)``."""
    parts = [np.empty((0, 2), dtype=np.int64)]
    for chunks in zip(*(diff.chunks for diff in diffs), strict=True):
        if not any(len(chunk.runs) or len(chunk.bits) for chunk in chunks):
            continue
        first = chunks[0].runs[:, :2]
        if all(not len(chunk.bits) and np.array_equal(chunk.runs[:, :2], first) for chunk in chunks):
            continue
        masks = [chunk.is_outside() for chunk in chunks]
        some = np.logical_or.reduce(masks) & ~np.logical_and.reduce(masks)
        edges = np.flatnonzero(np.diff(some.view(np.int8), prepend=0, append=0))
        parts.append(edges.reshape(-1, 2) + chunks[0].start)
    spans = np.concatenate(parts)
    goes_on = np.zeros(len(spans), dtype=np.bool_)
    goes_on[1:] = spans[1:, 0] == spans[:-1, 1]
    return np.stack([spans[~goes_on, 0], spans[np.append(~goes_on[1:], True)[: len(spans)], 1]], axis=1)


def _summed(place: IdArray, value: IdArray) -> tuple[IdArray, IdArray]:
    """Sort a list of second differences by place and add up those of one place."""
    if not len(place):
        return place, value
    order = np.argsort(place, kind="stable")
    place, value = place[order], value[order]
    heads = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]]))
    place, value = place[heads], np.add.reduceat(value, heads)
    kept = value != 0
    return place[kept], value[kept]
