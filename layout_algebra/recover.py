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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra._kernels import entries_of_ids
from layout_algebra._sweep_kernels import CONSTANT, COPY, sweep
from layout_algebra.diff2 import Diff2, view_of
from layout_algebra.dtypes import IdArray
from layout_algebra.residues import Pass
from layout_algebra.slice_copy import CopyTable

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


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    """What the code passes say about one parameter.

    Attributes
    ----------
    copies
        Affine rectangles of ids in ``1..N``; a function of those ids and the shape alone. No element of them held
        a non-code in any pass. Verification still has to decide whether they are copies.
    constants
        Rectangles outside ``copies`` whose elements had equal bits, a code, in every pass: the source start is the
        code's number (``bits = (number + base) << shift``), source strides are 0.

    Elements in neither are: outside in every pass (empty or opaque, see ``Diff2.outside``), outside in some passes only
    (opaque), all residues 0 (code number 0 in every pass, a constant if verification agrees), or a number past N (opaque).
    A rectangle of ``copies`` with source strides 0 may as well be a constant: see ``constant_of_id``.
    """

    copies: CopyTable
    constants: CopyTable


def recover(
    diffs: Sequence[Diff2], passes: Sequence[Pass], shape: Sequence[int], total_elements: int
) -> Recovery:
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
        If diffs and passes do not belong together.
    """
    raise NotImplementedError


def constant_ids(passes: Sequence[Pass]) -> IdArray:
    """The number that an element seems to be when it holds one code in every pass.

    Entry ``i`` is for code number ``i``; int64, shape ``(largest modulus,)``.
    """
    raise NotImplementedError


def rectangles_of_copies(table: CopyTable, shape: Sequence[int]) -> CopyTable:
    """The same rectangles as ``rectangles_of_ids`` of the table's ids, without listing them.

    Use it after dropping rows of ``Recovery.copies`` (opaque pieces), so that the rest is in normal form again.
    Targets must be disjoint.

    Raises
    ------
    MapError
        If targets overlap.
    """
    raise NotImplementedError


def without(table: CopyTable, removed: IdArray, shape: Sequence[int]) -> CopyTable:
    """The rectangles of a table's ids after some elements became empty.

    Parameters
    ----------
    table
        Copies of a parameter of that shape, targets disjoint.
    removed
        Flat indices as sorted, disjoint, half-open intervals, int64 of shape ``(n, 2)``; they may lie outside the copies.
    """
    raise NotImplementedError
