"""Kernels for exact second differences: of plain ids, and of rectangles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import inlined, kernel

Ints = npt.NDArray[np.int64]


@kernel
def doubled(array: Ints) -> Ints:
    """A copy with twice the room."""
    out = np.empty(2 * len(array), dtype=np.int64)
    out[: len(array)] = array
    return out


@inlined
def id_or_zero(number: int) -> int:
    """Ids count, empty and opaque are 0."""
    return number if number > 0 else 0


@kernel
def entries_of_ids(ids: Ints) -> tuple[Ints, Ints, int]:
    """Second differences along both axes of a matrix of ids: flat places in order, values, and how many.

    Numbers below 1 count as 0. Rows that continue the two above them are found by a loop that compilers vectorize.
    """
    rows, width = ids.shape
    position = np.empty(64, dtype=np.int64)
    value = np.empty(64, dtype=np.int64)
    count = 0
    bend = np.zeros(width + 2, dtype=np.int64)
    for row in range(rows):
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
                position[count] = row * width + column
                value[count] = second
                count += 1
    return position, value, count
