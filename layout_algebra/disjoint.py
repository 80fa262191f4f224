"""Do two claims of a parameter meet in one element? Decided on the pieces, without listing elements.

A piece is a box: a start and nested axes. Pieces whose ranges are apart are disjoint. Where ranges cross, all pieces
of the group are seen as rows of one matrix, whose width is the longest stride among them: two pieces meet exactly
where their rows and their columns do, and columns are the same question with one axis less.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> def copy(start: int, *axes: tuple[int, int]) -> SliceCopy:
...     shape, strides = tuple(a for a, _ in axes), tuple(b for _, b in axes)
...     return SliceCopy(Strided(1, shape, strides), Strided(start, shape, strides))
>>> even_rows, odd_rows = copy(0, (3, 8), (4, 1)), copy(4, (3, 8), (4, 1))
>>> pieces_meet(CopyTable.of([even_rows, odd_rows]), RunTable.empty())
False
>>> pieces_meet(CopyTable.of([even_rows, odd_rows]), RunTable.from_ids([13]))
True
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable

_VISITS = 1 << 26
"""Pieces that may be looked at, over all matrices of one parameter, before listing elements is tried instead."""
_LISTED_ELEMENTS = 1 << 26
"""Largest parameter whose elements are listed."""


class UndecidedError(Exception):
    """The pieces are too irregular to decide, and the parameter too large to list."""


def pieces_meet(copies: CopyTable, opaque: RunTable, elements: int | None = None) -> bool:
    """Whether an element is claimed twice, by two copies, twice by one, or by a copy and as opaque.

    Parameters
    ----------
    copies, opaque
        Inside the parameter, with extents >= 1.
    elements
        Size of the parameter, by default the end of its last claim.

    Raises
    ------
    UndecidedError
        If the pieces are irregular and the parameter is larger than 2**26 elements.
    """
    starts, extents, strides = _claims(copies, opaque)
    if not len(starts):
        return False
    if bool(np.any((strides == 0) & (extents > 1))):
        return True
    if elements is None:
        elements = int((starts + ((extents - 1) * strides).sum(axis=1)).max()) + 1
    if float(np.prod(extents.astype(np.float64), axis=1).sum()) > elements:
        return True
    try:
        return _Meeting(_VISITS).meets(starts, extents, strides)
    except UndecidedError:
        if elements > _LISTED_ELEMENTS:
            raise
    return _listed_meet(starts, extents, strides, elements)


def nested(extents: IdArray, strides: IdArray) -> npt.NDArray[np.bool_]:
    """For every piece whether each stride exceeds the reach of the axes inside it, so that no element comes twice.

    Axes must be sorted by falling stride, unit axes with stride 0 last.
    """
    reach = (extents - 1) * strides
    inside = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] - reach
    good: npt.NDArray[np.bool_] = np.all((strides > inside) | (extents == 1), axis=1)
    return good


def _claims(copies: CopyTable, opaque: RunTable) -> tuple[IdArray, IdArray, IdArray]:
    """Starts, extents and strides of all pieces, strides positive and falling, unit axes last."""
    axes = max(copies.axes, 2)
    extents = np.ones((len(copies) + len(opaque), axes), dtype=np.int64)
    strides = np.zeros_like(extents)
    starts = np.concatenate([copies.bounds(of="target")[0], opaque.runs[:, 0]])
    extents[: len(copies), : copies.axes] = copies.extents
    strides[: len(copies), : copies.axes] = np.abs(copies.target_strides)
    extents[len(copies) :, 0], strides[len(copies) :, 0] = opaque.runs[:, 3], opaque.runs[:, 2]
    extents[len(copies) :, 1], strides[len(copies) :, 1] = opaque.runs[:, 1], 1
    strides[extents == 1] = 0
    order = np.argsort(-strides - (extents > 1), axis=1, kind="stable")
    return starts, np.take_along_axis(extents, order, axis=1), np.take_along_axis(strides, order, axis=1)


class _Meeting:
    """One decision, and how many pieces it may still look at."""

    __slots__ = ("visits",)

    def __init__(self, visits: int) -> None:
        self.visits = visits

    def meets(self, starts: IdArray, extents: IdArray, strides: IdArray) -> bool:
        """Whether any two pieces share an element, or one holds it twice."""
        if not bool(nested(extents, strides).all()):
            raise UndecidedError
        order = np.argsort(starts, kind="stable")
        starts, extents, strides = starts[order], extents[order], strides[order]
        stops = starts + ((extents - 1) * strides).sum(axis=1)
        opens = np.ones(len(starts), dtype=bool)
        opens[1:] = starts[1:] > np.maximum.accumulate(stops)[:-1]
        heads = np.append(np.flatnonzero(opens), len(starts))
        for group in np.flatnonzero(np.diff(heads) > 1):
            part = slice(heads[group], heads[group + 1])
            if self._group_meets(starts[part], extents[part], strides[part]):
                return True
        return False

    def _group_meets(self, starts: IdArray, extents: IdArray, strides: IdArray) -> bool:
        width = int(strides.max())
        if width <= 1:
            return True
        starts = starts - int(starts.min())
        row, column = starts // width, starts % width
        outer = strides[:, 0] == width
        height = np.where(outer, extents[:, 0], 1)
        extents, strides = _without_first(extents, strides, outer)
        row, height, column, extents, strides = _cut_at_rows(row, height, column, extents, strides, width)
        edges = np.unique(np.concatenate([row, row + height]))
        seen: set[bytes] = set()
        for edge in edges[:-1].tolist():
            self.visits -= len(row) + 64
            if self.visits < 0:
                raise UndecidedError
            active = np.flatnonzero((row <= edge) & (row + height > edge))
            if len(active) > 1 and (key := active.tobytes()) not in seen:
                seen.add(key)
                if self.meets(column[active], extents[active], strides[active]):
                    return True
        return False


def _without_first(extents: IdArray, strides: IdArray, outer: npt.NDArray[np.bool_]) -> tuple[IdArray, IdArray]:
    """Drop the first axis of the pieces marked; the others keep theirs."""
    width = extents.shape[1]
    kept = np.arange(width) + outer[:, None]
    padded_extents = np.concatenate([extents, np.ones((len(extents), 1), dtype=np.int64)], axis=1)
    padded_strides = np.concatenate([strides, np.zeros((len(extents), 1), dtype=np.int64)], axis=1)
    return np.take_along_axis(padded_extents, kept, axis=1), np.take_along_axis(padded_strides, kept, axis=1)


def _cut_at_rows(
    row: IdArray, height: IdArray, column: IdArray, extents: IdArray, strides: IdArray, width: int
) -> tuple[IdArray, IdArray, IdArray, IdArray, IdArray]:
    """Cut pieces that run past the end of a row into a head, whole rows and a tail."""
    reach = ((extents - 1) * strides).sum(axis=1)
    crosses = column + reach >= width
    if not crosses.any():
        return row, height, column, extents, strides
    kept = ~crosses
    row0, height0, column0 = row[crosses], height[crosses], column[crosses]
    extents0, strides0 = extents[crosses], strides[crosses]
    count, step = extents0[:, 0], strides0[:, 0]
    inner = reach[crosses] - (count - 1) * step
    # Cutting along the longest axis alone is exact if it fits the row and nothing inside it crosses.
    if bool(np.any((step == 0) | (width % np.maximum(step, 1) != 0) | (column0 % np.maximum(step, 1) + inner >= step))):
        raise UndecidedError
    per_row = width // step
    head = np.minimum(count, per_row - column0 // step)
    body = (count - head) // per_row
    tail = count - head - body * per_row
    if bool(np.any((height0 > 1) & (body > 0))):
        raise UndecidedError
    at_start = column0 % step
    parts = [(row[kept], height[kept], column[kept], extents[kept], strides[kept])]
    for part_row, part_height, part_column, part_count in (
        (row0, height0, column0, head),
        (row0 + 1, np.where(height0 > 1, height0, body), at_start, np.where(body > 0, per_row, 0)),
        (row0 + 1 + body, height0, at_start, tail),
    ):
        some = part_count > 0
        part_extents = extents0[some].copy()
        part_extents[:, 0] = part_count[some]
        part_strides = strides0[some].copy()
        part_strides[part_extents[:, 0] == 1, 0] = 0
        parts.append((part_row[some], part_height[some], part_column[some], part_extents, part_strides))
    rows, heights, columns, all_extents, all_strides = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(-all_strides, axis=1, kind="stable")
    return (
        rows,
        heights,
        columns,
        np.take_along_axis(all_extents, order, axis=1),
        np.take_along_axis(all_strides, order, axis=1),
    )


def _listed_meet(starts: IdArray, extents: IdArray, strides: IdArray, elements: int) -> bool:
    """Mark every element, piece by piece."""
    marks = np.zeros(elements, dtype=bool)
    for start, shape, steps in zip(starts.tolist(), extents.tolist(), strides.tolist(), strict=True):
        flat = np.full(1, start, dtype=np.int64)
        for extent, step in zip(shape, steps, strict=True):
            flat = (flat[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
        if len(np.unique(flat)) != len(flat) or bool(marks[flat].any()):
            return True
        marks[flat] = True
    return False
