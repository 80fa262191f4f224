"""The normal form of a parameter's slice copies: few, regular, and a function of the ids alone.

Recovery cuts a parameter into affine rectangles, a cut that depends only on its ids and shape. ``lift`` then merges
regular repeats of equal pieces into one more axis, for as long as that makes fewer pieces: a stack of experts
becomes one slice copy with one more axis. Since both steps are functions of the ids, two programs for one shape have
equal normal forms exactly when they have equal ids.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> rows = [SliceCopy(Strided(1 + 8 * e, (2,), (1,)), Strided(2 * e, (2,), (1,))) for e in range(3)]
>>> [str(copy) for copy in canonical(rows, (3, 2)).slice_copies()]
['0+(3:2,2:1) <- 1+(3:8,2:1)']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.recover import rectangles_of_copies
from layout_algebra.slice_copy import CopyTable, SliceCopy

MAX_AXES = 8
_MAX_PERIOD = 8


def canonical(copies: Iterable[SliceCopy], shape: Sequence[int]) -> CopyTable:
    """The normal form of some slice copies of one parameter, without listing their ids.

    Parameters
    ----------
    copies
        In any order, with disjoint targets.
    shape
        The parameter's shape.

    Returns
    -------
    CopyTable
        The same ids. ``canonical(p, shape).rows`` equals ``canonical(q, shape).rows`` if and only if p and q give
        every element the same id; both equal ``lift(rectangles_of_ids(ids))``.

    Raises
    ------
    MapError
        If targets overlap or leave the parameter, or an id is below 1.
    """
    return lift(rectangles_of_copies(CopyTable.of(copies), shape))


def lift(table: CopyTable) -> CopyTable:
    """Merge regular repeats into axes, coalesce axes that continue each other, and drop unit axes.

    Parameters
    ----------
    table
        Pieces with disjoint targets, as recovery emits them.

    Returns
    -------
    CopyTable
        The same ids in at most as many pieces, sorted by target start, with as few axes as the widest piece needs.
    """
    rows = _coalesce_axes(_sorted(table.rows))
    period = 1
    while period <= _MAX_PERIOD and (rows.shape[1] - 2) // 3 < MAX_AXES:
        merged = _merge_repeats(rows, period)
        if merged is None:
            period += 1
        else:
            rows = _coalesce_axes(_sorted(merged))
            period = 1
    return CopyTable(_drop_unit_axes(rows))


def _sorted(rows: IdArray) -> IdArray:
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _drop_unit_axes(rows: IdArray) -> IdArray:
    """Move every row's unit axes to the front and cut those that all rows share."""
    axes = (rows.shape[1] - 2) // 3
    if not len(rows):
        return np.empty((0, 5), dtype=np.int64)
    body = rows[:, 2:].reshape(len(rows), axes, 3).copy()
    unit = body[:, :, 0] == 1
    body[unit] = (1, 0, 0)
    order = np.argsort(~unit, axis=1, kind="stable")
    body = np.take_along_axis(body, order[:, :, None], axis=1)
    spare = min(int(unit.sum(axis=1).min()), axes - 1)
    return np.concatenate([rows[:, :2], body[:, spare:].reshape(len(rows), -1)], axis=1)


def _coalesce_axes(rows: IdArray) -> IdArray:
    """Fuse neighbouring axes where the outer one continues the inner one in target and source alike."""
    rows = _drop_unit_axes(rows)
    axes = (rows.shape[1] - 2) // 3
    for _ in range(axes - 1):
        body = rows[:, 2:].reshape(len(rows), -1, 3)
        if body.shape[1] < 2:
            break
        changed = False
        for axis in range(body.shape[1] - 1, 0, -1):
            outer, inner = body[:, axis - 1], body[:, axis]
            fuse = (
                (outer[:, 0] > 1)
                & (inner[:, 0] > 1)
                & (outer[:, 1] == inner[:, 0] * inner[:, 1])
                & (outer[:, 2] == inner[:, 0] * inner[:, 2])
            )
            if fuse.any():
                inner[fuse, 0] *= outer[fuse, 0]
                outer[fuse] = (1, 0, 0)
                changed = True
        rows = _drop_unit_axes(np.concatenate([rows[:, :2], body.reshape(len(rows), -1)], axis=1))
        if not changed:
            break
    return rows


def _merge_repeats(rows: IdArray, period: int) -> IdArray | None:
    """Merge progressions of pieces that stand ``period`` apart; None if there is none.

    Pieces i, i + period, i + 2 * period, ... form a progression when all but their starts agree and their starts
    advance by one step. Each piece joins the first progression that reaches it. Two pieces alone are none: any
    two equal shapes would merge, and a gate half and an up half read better as the two copies they are.
    """
    count = len(rows)
    if count <= period:
        return None
    same = np.all(rows[period:, 2:] == rows[:-period, 2:], axis=1)
    steps = rows[period:, :2] - rows[:-period, :2]
    lead = _progressions(same, steps, period)
    if lead is None:
        return None
    heads = np.flatnonzero(lead == np.arange(count))
    lengths = np.bincount(lead, minlength=count)[heads]
    axis = np.zeros((len(heads), 3), dtype=np.int64)
    axis[:, 0] = lengths
    many = lengths > 1
    axis[many, 1:] = steps[heads[many]]
    head_rows = rows[heads]
    return np.concatenate([head_rows[:, :2], axis, head_rows[:, 2:]], axis=1)


def _progressions(same: npt.NDArray[np.bool_], steps: IdArray, period: int) -> IdArray | None:
    """For every piece the head of its progression, or None if no progression has three pieces."""
    count = len(same) + period
    lead = np.arange(count, dtype=np.int64)
    merged = False
    for offset in range(period):
        link = same[offset::period]
        if not len(link):
            continue
        step = steps[offset::period]
        # A piece goes on from its predecessor's step; a change of step starts a new progression after the break.
        turn = np.ones(len(link), dtype=bool)
        turn[1:] = np.any(step[1:] != step[:-1], axis=1) | ~link[:-1]
        joined = link & ~turn
        # A progression is a first link followed by equal steps: at least two links.
        first_of_pair = np.zeros(len(link), dtype=bool)
        first_of_pair[:-1] = joined[1:]
        whole = joined | (first_of_pair & link)
        # Where two progressions meet, the earlier one keeps the shared piece.
        starts = whole & turn
        shared = np.zeros(len(link), dtype=bool)
        shared[1:] = starts[1:] & whole[:-1]
        whole &= ~shared
        if not whole.any():
            continue
        merged = True
        members = np.zeros(len(link) + 1, dtype=bool)
        members[1:] = whole
        position = np.arange(len(link) + 1, dtype=np.int64)
        heads = np.maximum.accumulate(np.where(members, 0, position))
        lead[offset::period] = offset + heads * period
    return lead if merged else None
