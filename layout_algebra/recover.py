"""Second differences -> affine rectangles: one sweep over the rows, for probed residues and plain ids alike.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra._kernels import entries_of_ids, entries_of_rectangles, join_entries, pieces_inside
from layout_algebra._run_kernels import CONSTANT, COPY
from layout_algebra._sweep_kernels import sweep
from layout_algebra.diff2 import Diff2
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import MapError, ProbeError
from layout_algebra.residues import Pass, join, product_of
from layout_algebra.slice_copy import CopyTable
from layout_algebra.views import rectangles_in_view, view_of

_NO_CONSTANTS = np.empty(0, dtype=np.int64)
_ANY_ID = 1 << 62


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
    rows, width = view_of(ids.shape)
    matrix = np.ascontiguousarray(ids, dtype=np.int64).reshape(rows, width)
    position, value, count = entries_of_ids(matrix)
    pieces, found, _ = sweep(position[:count], value[:count], rows, width, 0, _ANY_ID, _NO_CONSTANTS)
    return _table(pieces[:found], width, COPY)


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    """What the code passes say about one parameter.

    Attributes
    ----------
    copies
        Affine rectangles of ids in ``1..N``: ``rectangles_of_ids`` of those ids. No element of them lay outside the
        codes in any pass. Verification still has to decide whether they are copies.
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
    rows, width = view_of(shape)
    place, value = _joined(diffs, passes)
    pieces, found, strays = sweep(place, value, rows, width, modulus, total_elements, _NO_CONSTANTS)
    constants = CopyTable.empty()
    if strays:
        named = constant_ids(passes)
        number_of = np.flatnonzero(named > total_elements)
        number_of = number_of[np.argsort(named[number_of], kind="stable")]
        pieces, found, _ = sweep(place, value, rows, width, modulus, total_elements, named[number_of])
        fixed = _table(pieces[:found], width, CONSTANT).rows.copy()
        fixed[:, 1] = number_of[np.searchsorted(named[number_of], fixed[:, 1])]
        constants = CopyTable(fixed)
    copies = _table(pieces[:found], width, COPY)
    partly = _partly_outside(diffs)
    if strays or len(partly):
        # What stood outside the ids moved cuts between bands; without it they depend on ids alone.
        copies = without(copies, partly, shape)
    return Recovery(copies, constants)


def constant_ids(passes: Sequence[Pass]) -> IdArray:
    """The number that an element seems to hold when its bits are one code in every pass.

    Entry ``i`` is for code number ``i``; int64, shape ``(largest modulus,)``. A code beyond a pass's modulus is outside
    in that pass and counts as residue 0.
    """
    numbers = np.arange(max(one.modulus for one in passes), dtype=np.int64)
    residues = [np.where(numbers < one.modulus, numbers * one.inverse % one.modulus, 0) for one in passes]
    return join(residues, passes)


def rectangles_of_copies(table: CopyTable, shape: Sequence[int]) -> CopyTable:
    """The same rectangles as ``rectangles_of_ids`` of the table's ids, without listing the ids.

    Use it after dropping rows of ``Recovery.copies`` (opaque pieces), so that the rest is in normal form again.

    Raises
    ------
    MapError
        If targets overlap or leave the parameter, or an id is below 1.
    """
    return without(table, np.empty((0, 2), dtype=np.int64), shape)


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
    rows, width = view_of(shape)
    if len(table):
        low, high = table.bounds(of="target")
        if int(low.min()) < 0 or int(high.max()) >= rows * width:
            raise MapError(f"slice copies write {low.min()}..{high.max()} of a parameter of {rows * width} elements")
        if int(table.bounds(of="source")[0].min()) < 1:
            raise MapError(f"slice copies read id {table.bounds(of='source')[0].min()}; ids begin at 1")
    pieces = rectangles_in_view(table, width)
    holes, hole_count = pieces_inside(pieces, width, np.ascontiguousarray(removed, dtype=np.int64))
    holes = holes[:hole_count]
    place, value, count = entries_of_rectangles(np.concatenate([pieces, holes]), rows, width)
    place, value = _summed(place[:count], value[:count])
    found, found_count, _ = sweep(place, value, rows, width, 0, _ANY_ID, _NO_CONSTANTS)
    out = _table(found[:found_count], width, COPY)
    left = int(table.elements.sum()) - int(holes[:, 3].sum())
    if int(out.elements.sum()) != left:
        raise MapError(f"slice copies overlap: {left} elements are written, {out.elements.sum()} of them different")
    return out


def _joined(diffs: Sequence[Diff2], passes: Sequence[Pass]) -> tuple[IdArray, IdArray]:
    """All passes' second differences as one list of numbers modulo the product of the moduli."""
    lists = [diff.entries() for diff in diffs]
    starts = np.cumsum([0, *(len(places) for places, _ in lists)], dtype=np.int64)
    moduli = [one.modulus for one in passes]
    inverses = [pow(math.prod(moduli[:k]), -1, modulus) for k, modulus in enumerate(moduli)]
    place, value, count = join_entries(
        np.concatenate([places for places, _ in lists]),
        np.concatenate([values for _, values in lists]),
        starts,
        np.array(moduli, dtype=np.int64),
        np.array(inverses, dtype=np.int64),
    )
    return place[:count], value[:count]


def _partly_outside(diffs: Sequence[Diff2]) -> IdArray:
    """Elements that held a code in some passes only, as intervals of flat indices; shape ``(n, 2)``."""
    parts = [np.empty((0, 2), dtype=np.int64)]
    for chunks in zip(*(diff.chunks for diff in diffs), strict=True):
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


def _table(pieces: IdArray, width: int, kind: int) -> CopyTable:
    """The sweep's pieces of one kind as a copy table."""
    pieces = pieces[pieces[:, 7] == kind]
    row, column, height, length, number, step, slope, _ = pieces.T
    table = np.zeros((len(pieces), 8), dtype=np.int64)
    table[:, 0] = row * width + column
    table[:, 1] = number
    table[:, 2] = height
    table[:, 3] = np.where(height > 1, width, 0)
    table[:, 4] = np.where(height > 1, step, 0)
    table[:, 5] = length
    table[:, 6] = np.where(length > 1, 1, 0)
    table[:, 7] = np.where(length > 1, slope, 0)
    return CopyTable(table[np.argsort(table[:, 0], kind="stable")])
