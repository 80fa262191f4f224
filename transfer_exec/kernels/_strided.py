"""Rows of any strides, and rows that change dtype: element by element, neighbours sixteen at a time."""

from __future__ import annotations

from layout_algebra._jit import kernel
from layout_algebra._prefetch import prefetch
from layout_algebra.dtypes import IdArray
from transfer_exec.kernels._floats import TOGETHER, move, move_block, stream_block
from transfer_exec.kernels._vectors import Unit, fence

_TILE_COUNT = 64
_TILE_LENGTH = 8  # as many lines as a cache set has ways: strides that are powers of two fall into one set
_AHEAD_BYTES = 1024


@kernel
def copy_strided(rows: IdArray, of: Unit, to: Unit, streams: bool) -> None:
    """Copy rows of one pair of dtypes.

    Parameters
    ----------
    rows
        Columns of `RowColumn`; the code is not read.
    of, to
        Elements of the source and of the target; see `transfer_exec.kernels._floats`.
    streams
        Whether targets leave the cache.
    """
    last = rows.shape[0] - 1
    for row in range(rows.shape[0]):
        source, source_stride, source_step = rows[row, 0], rows[row, 1], rows[row, 2]
        target, target_stride, target_step = rows[row, 3], rows[row, 4], rows[row, 5]
        length, count = rows[row, 6], rows[row, 7]
        if source_stride == of.itemsize and target_stride == to.itemsize:
            soon = rows[min(row + 1, last), 0]
            for at in range(0, min(_AHEAD_BYTES, length * of.itemsize), 64):
                prefetch(soon + at)
            for i in range(count):
                _move_line(target + i * target_step, source + i * source_step, length, of, to, streams)
            continue
        tile = _TILE_LENGTH if count > 1 else length
        for i0 in range(0, count, _TILE_COUNT):
            for j0 in range(0, length, tile):
                for i in range(i0, min(i0 + _TILE_COUNT, count)):
                    to_row, from_row = target + i * target_step, source + i * source_step
                    for j in range(j0, min(j0 + tile, length)):
                        move(to, to_row + j * target_stride, of, from_row + j * source_stride)
    fence()


@kernel
def _move_line(target: int, source: int, length: int, of: Unit, to: Unit, streams: bool) -> None:
    """Neighbours to neighbours."""
    done = 0
    if streams and target % to.itemsize == 0 and length >= 4 * TOGETHER:
        while (target + done * to.itemsize) & 31:
            move(to, target + done * to.itemsize, of, source + done * of.itemsize)
            done += 1
        while done <= length - TOGETHER:
            stream_block(to, target + done * to.itemsize, of, source + done * of.itemsize)
            done += TOGETHER
    while done <= length - TOGETHER:
        move_block(to, target + done * to.itemsize, of, source + done * of.itemsize)
        done += TOGETHER
    while done < length:
        move(to, target + done * to.itemsize, of, source + done * of.itemsize)
        done += 1
