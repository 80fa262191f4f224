"""Kernels on tables of slice copies: merge pieces that repeat, tidy their axes, list the ids of a window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel

Ints = npt.NDArray[np.int64]


@kernel
def tidy_axes(rows: Ints) -> int:
    """Drop unit axes and fuse an axis that continues its inner neighbour, in place; the most axes a row still has.

    Axes that are left stand last, behind axes of extent 1 and strides 0.
    """
    axes = (rows.shape[1] - 2) // 3
    most = 0
    for k in range(len(rows)):
        row = rows[k]
        first = axes
        for axis in range(axes - 1, -1, -1):
            at, inner = 2 + 3 * axis, 2 + 3 * first
            extent, target, source = row[at], row[at + 1], row[at + 2]
            if extent == 1:
                continue
            if first < axes and target == row[inner] * row[inner + 1] and source == row[inner] * row[inner + 2]:
                row[inner] *= extent
                continue
            first -= 1
            row[inner - 3] = extent
            row[inner - 2] = target
            row[inner - 1] = source
        for axis in range(first):
            row[2 + 3 * axis] = 1
            row[3 + 3 * axis] = 0
            row[4 + 3 * axis] = 0
        most = max(most, axes - first)
    return most


@kernel
def repeats(rows: Ints, period: int, length: Ints) -> int:
    """Find progressions of pieces that stand ``period`` apart; how many pieces join one before them.

    ``length`` gets how many pieces a progression has at its first piece, 0 at the others, and 1 where there is none.
    """
    size, fields = rows.shape
    joined = 0
    for k in range(size):
        length[k] = 1
    for k in range(size - 2 * period):
        if length[k] != 1:
            continue
        last = k + period
        target, source = rows[last, 0] - rows[k, 0], rows[last, 1] - rows[k, 1]
        count = 1
        while last < size and rows[last, 0] - rows[last - period, 0] == target:
            if rows[last, 1] - rows[last - period, 1] != source:
                break
            same = True
            for field in range(2, fields):
                same = same and rows[last, field] == rows[k, field]
            if not same:
                break
            count += 1
            last += period
        if count > 2:
            length[k] = count
            for member in range(1, count):
                length[k + member * period] = 0
            joined += count - 1
    return joined


@kernel
def merged(rows: Ints, period: int, length: Ints, kept: int) -> Ints:
    """The ``kept`` pieces that ``repeats`` leaves, with one more axis in front."""
    size, fields = rows.shape
    out = np.empty((kept, fields + 3), dtype=np.int64)
    count = 0
    for k in range(size):
        if length[k] == 0:
            continue
        row = out[count]
        row[0] = rows[k, 0]
        row[1] = rows[k, 1]
        row[2] = length[k]
        row[3] = row[4] = 0
        if length[k] > 1:
            row[3] = rows[k + period, 0] - rows[k, 0]
            row[4] = rows[k + period, 1] - rows[k, 1]
        for field in range(2, fields):
            row[field + 3] = rows[k, field]
        count += 1
    return out


@kernel
def join_continued(rows: Ints) -> int:
    """Let a piece whose outermost axis goes on in another piece take that one in; how many are left, at the front.

    Rows are sorted by target start, axes are tidy.
    """
    size, fields = rows.shape
    for k in range(size - 1, -1, -1):
        outer = 2
        while outer < fields - 3 and rows[k, outer] == 1:
            outer += 3
        extent, step, change = rows[k, outer], rows[k, outer + 1], rows[k, outer + 2]
        target, source = rows[k, 0] + extent * step, rows[k, 1] + extent * change
        low, high = k + 1, size
        while low < high:
            middle = (low + high) // 2
            if rows[middle, 0] < target:
                low = middle + 1
            else:
                high = middle
        if extent == 1 or low == size or rows[low, 0] != target or rows[low, 1] != source or rows[low, 2] < 1:
            continue
        same = True
        for field in range(2, fields):
            same = same and (field == outer or rows[low, field] == rows[k, field])
        if same:
            rows[k, outer] += rows[low, outer]
            rows[low, 2] = -abs(rows[low, 2])
    kept = 0
    for k in range(size):
        if rows[k, 2] > 0:
            for field in range(fields):
                rows[kept, field] = rows[k, field]
            kept += 1
    return kept


@kernel
def signatures(rows: Ints, out: Ints) -> None:
    """One number a piece from its axes and the way to the next piece, for all but the last."""
    size, fields = rows.shape
    for k in range(size - 1):
        mixed = (rows[k + 1, 0] - rows[k, 0]) * 0x5851F42D4C957F2D + rows[k + 1, 1] - rows[k, 1]
        for field in range(2, fields):
            mixed = (mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D + rows[k, field]
        out[k] = mixed


@kernel
def write_window(rows: Ints, first: int, last: int, out: Ints) -> None:
    """Write the ids of the flat places ``first .. last - 1`` into ``out``.

    Target strides are not negative. An axis is entered only where it meets the window.
    """
    axes = (rows.shape[1] - 2) // 3
    target = np.zeros(axes + 1, dtype=np.int64)
    source = np.zeros(axes + 1, dtype=np.int64)
    reach = np.zeros(axes + 1, dtype=np.int64)
    index = np.zeros(axes + 1, dtype=np.int64)
    stop = np.zeros(axes + 1, dtype=np.int64)
    for k in range(len(rows)):
        row = rows[k]
        for axis in range(axes - 1, -1, -1):
            reach[axis] = reach[axis + 1] + (row[2 + 3 * axis] - 1) * row[3 + 3 * axis]
        target[0], source[0] = row[0], row[1]
        axis, entered = 0, True
        while axis >= 0:
            extent, step, change = row[2 + 3 * axis], row[3 + 3 * axis], row[4 + 3 * axis]
            if entered:
                # Of this axis the indices from which the inner axes reach the window.
                low, high = 0, extent
                if step > 0:
                    low = max(0, -((target[axis] + reach[axis + 1] - first) // step))
                    high = min(extent, (last - 1 - target[axis]) // step + 1)
                elif target[axis] >= last or target[axis] + reach[axis + 1] < first:
                    high = 0
                index[axis], stop[axis] = low, high
            if index[axis] >= stop[axis]:
                axis -= 1
                entered = False
                continue
            if axis < axes - 1:
                target[axis + 1] = target[axis] + index[axis] * step
                source[axis + 1] = source[axis] + index[axis] * change
                index[axis] += 1
                axis += 1
                entered = True
                continue
            for at in range(index[axis], stop[axis]):
                out[target[axis] + at * step - first] = source[axis] + at * change
            axis -= 1
            entered = False
