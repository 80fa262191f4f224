"""Transposes: rows whose neighbours in the source are not neighbours in the target.

A block of the source, so many rows of 256 bytes that its transpose has rows of 256 bytes too, is turned by small tiles
in registers into a scratch array that stays in the cache, and leaves it row by row in whole cache lines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray
from transfer_exec.kernels._pieces import copy_piece
from transfer_exec.kernels._vectors import Unit, cross, fence, load, store

SIDE_BYTES = 256
SCRATCH_BYTES = SIDE_BYTES * SIDE_BYTES + 64
"""Room for the largest block, and to begin at a cache line."""


@kernel
def copy_crossed(rows: IdArray, scratch: npt.NDArray[np.uint8], unit: Unit, streams: bool) -> None:
    """Transpose matrices.

    Parameters
    ----------
    rows
        Source, step of its rows, number of its rows, target, step of its rows, number of its rows, all in bytes but
        the numbers; int64, shape ``(n, 6)``. Both sides' rows are contiguous.
    scratch
        `SCRATCH_BYTES` of this thread's own.
    unit
        The elements; 1, 2, 4 or 8 bytes wide.
    streams
        Whether targets leave the cache.
    """
    item = unit.itemsize
    side = SIDE_BYTES // item
    room = scratch.ctypes.data
    room += -room & 63
    for row in range(rows.shape[0]):
        source, source_step, height = rows[row, 0], rows[row, 1], rows[row, 2]
        target, target_step, width = rows[row, 3], rows[row, 4], rows[row, 5]
        # The first block is cut so that the later ones begin at a cache line of the target.
        first = side - (target % SIDE_BYTES) // item if target % item == 0 else side
        top = 0
        bottom = min(first, height)
        while top < height:
            for left in range(0, width, side):
                right = min(left + side, width)
                _turn_block(
                    unit, source + top * source_step + left * item, source_step, bottom - top, right - left, room
                )
                size = (bottom - top) * item
                for column in range(left, right):
                    place = room + (column - left) * SIDE_BYTES
                    copy_piece(target + column * target_step + top * item, place, size, streams)
            top = bottom
            bottom = min(bottom + side, height)
    fence()


@kernel
def _turn_block(unit: Unit, source: int, step: int, height: int, width: int, room: int) -> None:
    """The transpose of a block, in rows of `SIDE_BYTES`."""
    item = unit.itemsize
    across, down = 16 // item, 32 // item
    whole_height, whole_width = height - height % down, width - width % across
    for top in range(0, whole_height, down):
        for left in range(0, whole_width, across):
            cross(unit, source + top * step + left * item, step, room + left * SIDE_BYTES + top * item, SIDE_BYTES)
    for row in range(height):
        begin = whole_width if row < whole_height else 0
        for column in range(begin, width):
            store(unit, room + column * SIDE_BYTES + row * item, load(unit, source + row * step + column * item))
