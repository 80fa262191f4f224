"""Ids -> affine rectangles (interim)."""

from __future__ import annotations

import numpy as np

from collections.abc import Sequence
from dataclasses import dataclass

from layout_algebra.diff2 import Diff2
from layout_algebra.dtypes import IdArray
from layout_algebra.residues import Pass
from layout_algebra.slice_copy import CopyTable


def rectangles_of_ids(ids: IdArray) -> CopyTable:
    flat = ids.reshape(-1)
    n = len(flat)
    rows = []
    i = 0
    while i < n:
        if flat[i] <= 0:
            i += 1
            continue
        j = i + 1
        if j < n and flat[j] > 0:
            step = flat[j] - flat[i]
            while j < n and flat[j] > 0 and flat[j] - flat[j - 1] == step:
                j += 1
            if j - i == 2 and j < n and flat[j] > 0 and step != 1:
                j = i + 1
        step = int(flat[i + 1] - flat[i]) if j - i > 1 else 0
        rows.append([i, flat[i], j - i, 1, step])
        i = j
    return CopyTable(np.array(rows, dtype=np.int64).reshape(-1, 5))


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
