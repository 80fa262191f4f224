"""Grids of numbers, cut by windows without listing their rows.

A grid ``(start, length, stride, count, step)`` is the numbers ``start + i * step + j * stride`` with ``i < count`` and
``j < length``, rows ascending and one behind the other. What of it lies in a window ``low:high`` is at most a part of
one row, whole rows, and a part of another: three blocks of rows and columns, however many rows there are.

>>> grid = np.array([[10, 4, 1, 5, 100]])    # 10..13, 110..113, ... 410..413
>>> cut_grids(grid, np.array([112]), np.array([312])).tolist()      # grid, row, rows, column, columns
[[0, 1, 1, 2, 2], [0, 2, 1, 0, 4], [0, 3, 1, 0, 2]]
"""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray


def cut_grids(grids: IdArray, low: IdArray, high: IdArray) -> IdArray:
    """Blocks of every grid inside its window.

    Parameters
    ----------
    grids
        Start, length, stride, count, step; int64, shape ``(n, 5)``. Strides are not negative, and with several rows
        each ends before the next begins; a stride of 0 repeats one number.
    low, high
        Half-open windows; shape ``(n,)``.

    Returns
    -------
    numpy.ndarray
        Grid's position, first row, rows, first column, columns; int64, shape ``(m, 5)``, at most three a grid. Every
        number of a grid that lies in its window is in exactly one block, and no other number is.
    """
    start, length, stride, count, step = grids.T
    step = np.where(count > 1, step, 1)
    reach = (length - 1) * stride + 1
    first = np.where(count > 1, np.maximum((low - start - reach) // step + 1, 0), 0)
    last = np.where(count > 1, np.minimum((high - 1 - start) // step, count - 1), 0)
    head = _columns(start + first * step, length, stride, low, high)
    tail = _columns(start + last * step, length, stride, low, high)
    touched = first <= last
    cut_head = touched & (head[1] - head[0] < length)
    cut_tail = touched & (tail[1] - tail[0] < length) & (first < last)
    body, rows = first + cut_head, last - first + 1 - cut_head - cut_tail
    owner = np.arange(len(grids), dtype=np.int64)
    one, nothing = np.ones_like(owner), np.zeros_like(owner)
    blocks = (
        (cut_head & (head[1] > head[0]), (owner, first, one, head[0], head[1] - head[0])),
        (touched & (rows > 0), (owner, body, rows, nothing, length)),
        (cut_tail & (tail[1] > tail[0]), (owner, last, one, tail[0], tail[1] - tail[0])),
    )
    return np.concatenate([np.stack([field[kept] for field in fields], axis=1) for kept, fields in blocks])


def _columns(start: IdArray, length: IdArray, stride: IdArray, low: IdArray, high: IdArray) -> tuple[IdArray, IdArray]:
    """Half-open range of the columns of one row per grid that lie in the windows."""
    step = np.maximum(stride, 1)
    begin = np.clip(-((start - low) // step), 0, length)
    end = np.clip(-((start - high) // step), 0, length)
    same = stride == 0
    begin[same] = np.where(start < low, length, 0)[same]
    end[same] = np.where(start < high, length, 0)[same]
    return begin, end
