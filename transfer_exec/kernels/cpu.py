"""The CPU backend: numba loops that release the GIL.

A stretch that is contiguous on both sides is one ``memcpy``; everything else goes element by element in small
tiles, so that a transpose finds its cache lines again. Work is split over threads of our own by bytes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray
from transfer_exec.conversions import PAIRS, SOURCE_BYTES
from transfer_exec.kernels._convert import BF16, F16, F32, F64, Bits, narrow, widen
from transfer_exec.kernels._memory import (
    copy_bytes,
    load8,
    load16,
    load32,
    load64,
    observe,
    publish,
    store8,
    store16,
    store32,
    store64,
)
from transfer_exec.kernels.base import RowColumn

_TILE_COUNT = 64
_TILE_LENGTH = 8  # as many lines as a cache set has ways: strides that are powers of two fall into one set
_BLOCK = 512
_MIN_BYTES_PER_THREAD = 1 << 20
_KIND = {"BF16": BF16, "F16": F16, "F32": F32, "F64": F64}
_SOURCE_KIND = tuple(_KIND[source] for source, _ in PAIRS)
_TARGET_KIND = tuple(_KIND[target] for _, target in PAIRS)


class CpuKernels:
    """Numba kernels on the calling thread, or on a few threads of their own.

    Parameters
    ----------
    threads
        How many threads share a call. The pool is made at the first call that uses it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = max(int(threads), 1)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "cpu"

    def prepare(self, rows: IdArray) -> CpuJob:
        """See `Kernels.prepare`; compiles what the rows need."""
        if not len(rows):
            return CpuJob((), None)
        copy_rows(rows[:0])
        sizes = rows[:, RowColumn.LENGTH] * rows[:, RowColumn.COUNT] * SOURCE_BYTES[rows[:, RowColumn.CODE]]
        total = int(sizes.sum())
        parts = min(self._threads, max(total // _MIN_BYTES_PER_THREAD, 1), len(rows))
        if parts == 1:
            return CpuJob((rows,), None)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="transload-copy")
        cuts = np.searchsorted(np.cumsum(sizes), np.arange(1, parts) * total // parts)
        return CpuJob(tuple(part for part in np.split(rows, cuts) if len(part)), self._pool)


@dataclass(frozen=True, slots=True, eq=False)
class CpuJob:
    """Rows cut into parts of equal work, each for one thread of the pool, or the only one for the caller's."""

    parts: tuple[IdArray, ...]
    pool: ThreadPoolExecutor | None

    def run(self) -> None:
        """Copy every element of every row."""
        if self.pool is None:
            for part in self.parts:
                copy_rows(part)
            return
        futures: list[Future[None]] = [self.pool.submit(copy_rows, part) for part in self.parts]
        for future in futures:
            future.result()


@kernel
def copy_rows(rows: IdArray) -> None:
    """Copy rows of `RowColumn` columns."""
    scratch = np.empty(_BLOCK, dtype=np.uint32)
    for row in range(rows.shape[0]):
        source, source_stride, source_step = rows[row, 0], rows[row, 1], rows[row, 2]
        target, target_stride, target_step = rows[row, 3], rows[row, 4], rows[row, 5]
        length, count, code = rows[row, 6], rows[row, 7], rows[row, 8]
        if code >= 4:
            if length >= count:
                for i in range(count):
                    _convert(
                        code,
                        source + i * source_step,
                        source_stride,
                        target + i * target_step,
                        target_stride,
                        length,
                        scratch,
                    )
            else:
                for j in range(length):
                    _convert(
                        code,
                        source + j * source_stride,
                        source_step,
                        target + j * target_stride,
                        target_step,
                        count,
                        scratch,
                    )
            continue
        item = 1 << code
        if source_stride == item and target_stride == item and length * item >= 32:
            for i in range(count):
                copy_bytes(target + i * target_step, source + i * source_step, length * item)
        elif code == 0:
            _copy8(source, source_stride, source_step, target, target_stride, target_step, length, count)
        elif code == 1:
            _copy16(source, source_stride, source_step, target, target_stride, target_step, length, count)
        elif code == 2:
            _copy32(source, source_stride, source_step, target, target_stride, target_step, length, count)
        else:
            _copy64(source, source_stride, source_step, target, target_stride, target_step, length, count)


@kernel
def copy_ranges(descriptors: npt.NDArray[np.uint64], source: int, target: int) -> None:
    """Copy byte ranges ``(source offset, target offset, bytes)`` from one address to another."""
    rows = descriptors.view(np.int64)
    for row in range(rows.shape[0]):
        copy_bytes(target + rows[row, 1], source + rows[row, 0], rows[row, 2])


@kernel
def publish_word(address: int, value: int) -> None:
    """Store a 64-bit word with release order."""
    publish(address, np.uint64(value))


@kernel
def read_word(address: int) -> int:
    """Load a 64-bit word with acquire order."""
    return int(observe(address))


@kernel
def _convert(
    code: int, source: int, source_stride: int, target: int, target_stride: int, count: int, scratch: Bits
) -> None:
    begin = 0
    while begin < count:
        size = min(count - begin, _BLOCK)
        widen(_SOURCE_KIND[code - 4], source + begin * source_stride, source_stride, size, scratch)
        narrow(_TARGET_KIND[code - 4], scratch, target + begin * target_stride, target_stride, size)
        begin += size


@kernel
def _copy8(
    source: int, source_stride: int, source_step: int, target: int, target_stride: int, target_step: int,
    length: int, count: int,
) -> None:  # fmt: skip
    tile = _TILE_LENGTH if count > 1 else length
    for i0 in range(0, count, _TILE_COUNT):
        for j0 in range(0, length, tile):
            for i in range(i0, min(i0 + _TILE_COUNT, count)):
                for j in range(j0, min(j0 + tile, length)):
                    store8(
                        target + i * target_step + j * target_stride,
                        load8(source + i * source_step + j * source_stride),
                    )


@kernel
def _copy16(
    source: int, source_stride: int, source_step: int, target: int, target_stride: int, target_step: int,
    length: int, count: int,
) -> None:  # fmt: skip
    tile = _TILE_LENGTH if count > 1 else length
    for i0 in range(0, count, _TILE_COUNT):
        for j0 in range(0, length, tile):
            for i in range(i0, min(i0 + _TILE_COUNT, count)):
                for j in range(j0, min(j0 + tile, length)):
                    store16(
                        target + i * target_step + j * target_stride,
                        load16(source + i * source_step + j * source_stride),
                    )


@kernel
def _copy32(
    source: int, source_stride: int, source_step: int, target: int, target_stride: int, target_step: int,
    length: int, count: int,
) -> None:  # fmt: skip
    tile = _TILE_LENGTH if count > 1 else length
    for i0 in range(0, count, _TILE_COUNT):
        for j0 in range(0, length, tile):
            for i in range(i0, min(i0 + _TILE_COUNT, count)):
                for j in range(j0, min(j0 + tile, length)):
                    store32(
                        target + i * target_step + j * target_stride,
                        load32(source + i * source_step + j * source_stride),
                    )


@kernel
def _copy64(
    source: int, source_stride: int, source_step: int, target: int, target_stride: int, target_step: int,
    length: int, count: int,
) -> None:  # fmt: skip
    tile = _TILE_LENGTH if count > 1 else length
    for i0 in range(0, count, _TILE_COUNT):
        for j0 in range(0, length, tile):
            for i in range(i0, min(i0 + _TILE_COUNT, count)):
                for j in range(j0, min(j0 + tile, length)):
                    store64(
                        target + i * target_step + j * target_stride,
                        load64(source + i * source_step + j * source_stride),
                    )
