"""Descriptor lists as arrays: neighbours become one, and what crosses a seam between registrations becomes two.

A device may not register a region whole; the library then registers pieces of one size, and no write crosses from one
to the next on either side, whatever length was asked for.

>>> import numpy as np
>>> rows = np.array([[0, 990, 4], [4, 994, 12], [40, 2000, 1]], dtype=np.uint64)
>>> merge_neighbours(rows).tolist()
[[0, 990, 16], [40, 2000, 1]]
>>> cut_at_seams(merge_neighbours(rows).astype(np.int64), column=1, piece_bytes=1000).tolist()
[[0, 990, 10], [10, 1000, 6], [40, 2000, 1]]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges


def merge_neighbours(descriptors: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One descriptor for those that continue each other in every column before the last; empty ones are dropped."""
    rows = descriptors[descriptors[:, -1] > 0]
    if len(rows) < 2:
        return rows
    ends = rows[:-1, :-1] + rows[:-1, -1:]
    heads = np.flatnonzero(np.append(True, (ends != rows[1:, :-1]).any(axis=1)))
    merged = rows[heads]
    merged[:, -1] = np.add.reduceat(rows[:, -1], heads)
    return merged


def cut_at_seams(rows: IdArray, *, column: int, piece_bytes: int) -> IdArray:
    """Cut rows of ``(source offset, target offset, bytes)`` wherever one side crosses a multiple of ``piece_bytes``."""
    begins = rows[:, column]
    first, last = begins // piece_bytes, (begins + rows[:, 2] - 1) // piece_bytes
    if np.array_equal(first, last):
        return rows
    counts = last - first + 1
    owner = np.repeat(np.arange(len(rows)), counts)
    nth = expand_ranges(np.zeros(len(rows), dtype=np.int64), counts)
    seam = (first[owner] + nth) * piece_bytes
    start = np.maximum(seam, begins[owner])
    stop = np.minimum(seam + piece_bytes, begins[owner] + rows[owner, 2])
    out = rows[owner].copy()
    out[:, :2] += (start - begins[owner])[:, None]
    out[:, 2] = stop - start
    return out


def cut_long(rows: IdArray, most_bytes: int) -> tuple[IdArray, IdArray]:
    """Cut rows of two places and bytes that are longer than some bytes; also which row each is of."""
    counts = -(-rows[:, 2] // most_bytes)
    owner = np.repeat(np.arange(len(rows)), counts)
    skipped = expand_ranges(np.zeros(len(rows), dtype=np.int64), counts) * most_bytes
    out = rows[owner]
    out[:, :2] += skipped[:, None]
    out[:, 2] = np.minimum(out[:, 2] - skipped, most_bytes)
    return out, owner


def group_edges(sizes: IdArray, most_bytes: int, most_rows: int) -> IdArray:
    """Where groups of consecutive rows begin, and the last ends: of so many rows at most, below twice so many bytes.

    No row may have more than ``most_bytes``.
    """
    # A group ends where the next row would be the first past a multiple of its bytes, or of its rows.
    before = np.cumsum(sizes) - sizes
    full = (np.diff(before // most_bytes) > 0) | (np.diff(np.arange(len(sizes)) // most_rows) > 0)
    return np.concatenate([[0], np.flatnonzero(full) + 1, [len(sizes)]])
