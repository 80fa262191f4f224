"""Kernels that make sorted lists of second differences: from plain ids, from rectangles, and by joining passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra._run_kernels import grown

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]


@kernel
def doubled(array: Ints) -> Ints:
    """A copy with twice the room."""
    out = np.empty(2 * len(array), dtype=np.int64)
    for k in range(len(array)):
        out[k] = array[k]
    return out


@kernel
def id_or_zero(number: int) -> int:
    """Ids count, empty and opaque are 0."""
    return number if number > 0 else 0


@kernel
def entries_of_ids(ids: Ints, known: int, place: int) -> tuple[Ints, Ints, int]:
    """Second differences along both axes of a matrix of ids: flat places in order, values, and how many.

    The first ``known`` rows, at most two, are only what stands above the others; ``place`` is the flat place of the row
    after them. Numbers below 1 count as 0. Rows that continue the two above them are found by a loop that compilers
    vectorize.
    """
    rows, width = ids.shape
    position = np.empty(64, dtype=np.int64)
    value = np.empty(64, dtype=np.int64)
    count = 0
    bend = np.zeros(width + 2, dtype=np.int64)
    for row in range(known, rows):
        here = ids[row]
        above = ids[row - 1] if row > 0 else here
        higher = ids[row - 2] if row > 1 else here
        weight1 = 2 if row > 0 else 0
        weight2 = 1 if row > 1 else 0
        some = 0
        for column in range(width):
            second = (
                id_or_zero(here[column]) - weight1 * id_or_zero(above[column]) + weight2 * id_or_zero(higher[column])
            )
            bend[column + 2] = second
            some |= second
        if some == 0:
            continue
        for column in range(width):
            second = bend[column + 2] - 2 * bend[column + 1] + bend[column]
            if second != 0:
                if count == len(position):
                    position, value = doubled(position), doubled(value)
                position[count] = place + (row - known) * width + column
                value[count] = second
                count += 1
    return position, value, count


@kernel
def join_entries(
    place: Ints, value: npt.NDArray[np.integer], starts: Ints, moduli: Ints, inverses: Ints
) -> tuple[Ints, Ints, int]:
    """Merge the passes' sorted lists by place and name each joint residue by one number.

    Parameters
    ----------
    place, value
        The lists one after another; pass k has entries ``starts[k] .. starts[k + 1] - 1``. Where a pass has none at a
        place its residue is 0.
    moduli
        Of the passes; ``inverses[k]`` is the inverse, modulo the k-th, of the product of those before it.

    Returns
    -------
    tuple
        Places, ascending, numbers modulo the product of the moduli, and how many.
    """
    passes = len(moduli)
    out_place = np.empty(len(place), dtype=np.int64)
    out_value = np.empty(len(place), dtype=np.int64)
    heads = starts.copy()
    count = 0
    while True:
        least = np.int64(1) << 62
        for k in range(passes):
            if heads[k] < starts[k + 1]:
                least = min(least, place[heads[k]])
        if least == np.int64(1) << 62:
            break
        total, radix = np.int64(0), np.int64(1)
        for k in range(passes):
            residue = np.int64(0)
            if heads[k] < starts[k + 1] and place[heads[k]] == least:
                residue = np.int64(value[heads[k]])
                heads[k] += 1
            digit = (residue - total % moduli[k]) % moduli[k] * inverses[k] % moduli[k]
            total += radix * digit
            radix *= moduli[k]
        out_place[count] = least
        out_value[count] = total
        count += 1
    return out_place, out_value, count


@kernel
def join_dense(values: Words, place: int, moduli: Ints, inverses: Ints) -> tuple[Ints, Ints, int]:
    """Like ``join_entries`` for passes that hold a residue at every place from ``place`` on: one row each."""
    passes, size = values.shape
    out_place = np.empty(size, dtype=np.int64)
    out_value = np.empty(size, dtype=np.int64)
    count = 0
    for k in range(size):
        total, radix = np.int64(0), np.int64(1)
        for one in range(passes):
            digit = (np.int64(values[one, k]) - total % moduli[one]) % moduli[one] * inverses[one] % moduli[one]
            total += radix * digit
            radix *= moduli[one]
        if total != 0:
            out_place[count] = place + k
            out_value[count] = total
            count += 1
    return out_place, out_value, count


@kernel
def entries_of_rectangles(pieces: Ints, rows: int, width: int) -> tuple[Ints, Ints, int]:
    """Second differences of affine rectangles, up to 16 of each, in no order and not yet summed.

    ``pieces`` has columns row, column, rows, columns, id, step per row, step per column, weight. Of a stretch
    ``p, p + q, ...`` of n numbers with zeros around it the second differences are ``p``, ``q - p`` at its start and
    ``-(p + n * q)``, ``p + (n - 1) * q`` after its end; along the rows p and q are themselves such numbers.
    """
    place = np.empty(16 * len(pieces), dtype=np.int64)
    value = np.empty(16 * len(pieces), dtype=np.int64)
    count = 0
    for piece in range(len(pieces)):
        row, column, height, length = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3]
        number, step, slope, weight = pieces[piece, 4], pieces[piece, 5], pieces[piece, 6], pieces[piece, 7]
        for k in range(4):
            # The k-th row difference, as a number at the first column and what it changes by per column.
            if k == 0:
                at_row, first, change = row, number, slope
            elif k == 1:
                at_row, first, change = row + 1, step - number, -slope
            elif k == 2:
                at_row, first, change = row + height, -(number + height * step), -slope
            else:
                at_row, first, change = row + height + 1, number + (height - 1) * step, slope
            if at_row >= rows:
                continue
            for j in range(4):
                if j == 0:
                    at_column, second = column, first
                elif j == 1:
                    at_column, second = column + 1, change - first
                elif j == 2:
                    at_column, second = column + length, -(first + length * change)
                else:
                    at_column, second = column + length + 1, first + (length - 1) * change
                if at_column < width and second != 0:
                    place[count] = at_row * width + at_column
                    value[count] = weight * second
                    count += 1
    return place, value, count


@kernel
def pieces_inside(pieces: Ints, width: int, spans: Ints) -> tuple[Ints, int]:
    """The parts of affine rectangles that lie in spans of flat indices, as rectangles of one row, of weight -1.

    ``pieces`` as in ``entries_of_rectangles``; ``spans`` sorted and disjoint, shape ``(n, 2)``.
    """
    out = np.empty((16, 8), dtype=np.int64)
    count = 0
    for piece in range(len(pieces)):
        row, column, height, length = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3]
        number, step, slope = pieces[piece, 4], pieces[piece, 5], pieces[piece, 6]
        for k in range(height):
            start = (row + k) * width + column
            stop = start + length
            low, high = 0, len(spans)
            while low < high:
                middle = (low + high) // 2
                if spans[middle, 1] <= start:
                    low = middle + 1
                else:
                    high = middle
            while low < len(spans) and spans[low, 0] < stop:
                first, last = max(start, spans[low, 0]), min(stop, spans[low, 1])
                if count == len(out):
                    out = grown(out, count + 1)
                out[count, 0] = row + k
                out[count, 1] = column + first - start
                out[count, 2] = 1
                out[count, 3] = last - first
                out[count, 4] = number + k * step + (first - start) * slope
                out[count, 5] = 0
                out[count, 6] = slope
                out[count, 7] = -1
                count += 1
                low += 1
    return out, count
