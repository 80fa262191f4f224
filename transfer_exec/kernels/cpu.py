"""The CPU backend: numba loops that release the GIL, over tables that are made once.

Rows are sorted by what they ask for: contiguous pieces, transposes, and the rest. Each kind has its own loops, compiled
for the elements that occur, and a table of no more columns than it reads. Work is split into shares of equal bytes,
which threads of our own take one after another. Targets that nobody reads soon are streamed past the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray
from layout_algebra.signal_safe import ThreadPool
from transfer_exec.conversions import COPY_WIDTHS, PAIRS, SOURCE_BYTES
from transfer_exec.kernels._crossed import SCRATCH_BYTES, copy_crossed
from transfer_exec.kernels._floats import BRAIN, DOUBLE, HALF, SINGLE
from transfer_exec.kernels._memory import copy_bytes, observe, publish
from transfer_exec.kernels._pieces import copy_grids, copy_list, copy_piece, expect
from transfer_exec.kernels._shares import split_evenly, uniform_rows
from transfer_exec.kernels._strided import copy_strided
from transfer_exec.kernels._vectors import Unit, fence
from transfer_exec.kernels.base import RowColumn

_STREAMED_BYTES = 8 << 20
"""A round of this size is not found in the cache by whoever reads it next."""
_SHARE_BYTES = 1 << 20
_SHARES_PER_THREAD = 4
_LINE = 64
_AHEAD_ROWS = 2
_SMALLEST_CROSSED_BYTES = 32
_UNITS = {"BF16": BRAIN, "F16": HALF, "F32": SINGLE, "F64": DOUBLE}

_T = TypeVar("_T")
Scratch = npt.NDArray[np.uint8]
Call = Callable[[Scratch], None]
"""One kernel with its table."""


class CpuKernels:
    """Numba kernels on the calling thread and on a few threads of their own.

    Parameters
    ----------
    threads
        How many threads share a job, the caller's among them. Others are made when the first job needs them.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = max(int(threads), 1)
        self._pool: ThreadPool | None = None
        self._scratch: deque[Scratch] = deque()

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "cpu"

    def prepare(self, rows: IdArray, *, packing: bool) -> CpuJob:
        """See `Kernels.prepare`; compiles the loops that the rows need."""
        rows = uniform_rows(rows)
        sizes = rows[:, RowColumn.LENGTH] * rows[:, RowColumn.COUNT] * SOURCE_BYTES[rows[:, RowColumn.CODE]]
        total = int(sizes.sum())
        streams = not packing or total >= _STREAMED_BYTES
        shares = min(self._threads * _SHARES_PER_THREAD, total // _SHARE_BYTES) if self._threads > 1 else 1
        parts = split_evenly(rows, max(shares, 1)) if len(rows) else []
        if len(parts) > 1 and self._pool is None:
            self._pool = ThreadPool(self._threads - 1, "transload-copy")
        helpers = min(self._threads, len(parts)) - 1
        return CpuJob(
            tuple(_calls(part, streams=streams) for part in parts), self._pool, max(helpers, 0), self._scratch
        )


@dataclass(frozen=True, slots=True, eq=False)
class CpuJob:
    """Shares of equal work, each some kernels with their tables.

    Attributes
    ----------
    shares
        What is to be done, in any order.
    pool, helpers
        How many of the pool's threads help the caller's.
    scratch
        Small arrays that no running thread uses; those of one `CpuKernels` share them.
    """

    shares: tuple[tuple[Call, ...], ...]
    pool: ThreadPool | None
    helpers: int
    scratch: deque[Scratch]

    def run(self) -> None:
        """Copy every element of every row."""
        left = deque(self.shares)
        pool = self.pool
        helping = [pool.submit(self._work, left) for _ in range(self.helpers)] if pool is not None else []
        try:
            self._work(left)
        finally:
            for each in helping:
                each.result()

    def _work(self, left: deque[tuple[Call, ...]]) -> None:
        """Do shares until none is left."""
        scratch = _pop(self.scratch)
        if scratch is None:
            scratch = np.empty(SCRATCH_BYTES, dtype=np.uint8)
        while (share := _pop(left)) is not None:
            for call in share:
                call(scratch)
        self.scratch.append(scratch)


def _pop(items: deque[_T]) -> _T | None:
    """The next item, if other threads have left one."""
    try:
        return items.popleft()
    except IndexError:
        return None


def _calls(rows: IdArray, *, streams: bool) -> tuple[Call, ...]:
    """The kernels for some uniform rows."""
    code, length, count = rows[:, RowColumn.CODE], rows[:, RowColumn.LENGTH], rows[:, RowColumn.COUNT]
    item = SOURCE_BYTES[code]
    copies = code < len(COPY_WIDTHS)
    reads_on = rows[:, RowColumn.SOURCE_STRIDE] == item
    pieces = copies & reads_on & (rows[:, RowColumn.TARGET_STRIDE] == item)
    crossed = copies & reads_on & ~pieces & (rows[:, RowColumn.TARGET_STEP] == item) & (count > 1)
    crossed &= np.minimum(length, count) * item >= _SMALLEST_CROSSED_BYTES
    out = []
    if (listed := pieces & (count == 1)).any():
        out.append(_listed(rows if listed.all() else rows[listed], streams=streams))
    if (grids := pieces & (count > 1)).any():
        out.append(_gridded(rows[grids], streams=streams))
    rest = ~pieces & ~crossed
    for number in np.unique(code[crossed]).tolist():
        out.append(_crossed(rows[crossed & (code == number)], streams=streams))
    for number in np.unique(code[rest]).tolist():
        out.append(_strided(rows[rest & (code == number)], number, streams=streams))
    return tuple(out)


def _listed(rows: IdArray, *, streams: bool) -> Call:
    pieces = np.stack([rows[:, RowColumn.SOURCE], rows[:, RowColumn.TARGET]], axis=1)
    sizes = rows[:, RowColumn.LENGTH] * SOURCE_BYTES[rows[:, RowColumn.CODE]]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(sizes)) + 1])
    off_line = np.bitwise_or.reduceat(pieces[:, 1] | sizes, starts) % _LINE
    lines = np.where(off_line == 0, sizes[starts] // _LINE, 0)
    groups = np.stack([sizes[starts], starts, np.append(starts[1:], len(rows)), lines], axis=1)
    copy_list(pieces[:0], groups[:0], streams)
    return lambda _: copy_list(pieces, groups, streams)


def _gridded(rows: IdArray, *, streams: bool) -> Call:
    sides = (RowColumn.SOURCE, RowColumn.SOURCE_STEP, RowColumn.TARGET, RowColumn.TARGET_STEP)
    sizes = rows[:, RowColumn.LENGTH] * SOURCE_BYTES[rows[:, RowColumn.CODE]]
    grids = np.column_stack([rows[:, sides], sizes, rows[:, RowColumn.COUNT]])
    copy_grids(grids[:0], streams)
    return lambda _: copy_grids(grids, streams)


def _crossed(rows: IdArray, *, streams: bool) -> Call:
    unit: Unit = np.empty(0, dtype=f"u{SOURCE_BYTES[rows[0, RowColumn.CODE]]}")
    source = (RowColumn.SOURCE, RowColumn.SOURCE_STEP, RowColumn.COUNT)
    target = (RowColumn.TARGET, RowColumn.TARGET_STRIDE, RowColumn.LENGTH)
    table = np.ascontiguousarray(rows[:, source + target])
    copy_crossed(table[:0], np.empty(SCRATCH_BYTES, dtype=np.uint8), unit, streams)
    return lambda scratch: copy_crossed(table, scratch, unit, streams)


def _strided(rows: IdArray, code: int, *, streams: bool) -> Call:
    of, to = _units(code)
    table = np.ascontiguousarray(rows)
    copy_strided(table[:0], of, to, streams)
    return lambda _: copy_strided(table, of, to, streams)


def _units(code: int) -> tuple[Unit, Unit]:
    if code < len(COPY_WIDTHS):
        unit: Unit = np.empty(0, dtype=f"u{COPY_WIDTHS[code]}")
        return unit, unit
    source, target = PAIRS[code - len(COPY_WIDTHS)]
    return np.empty(0, dtype=_UNITS[source]), np.empty(0, dtype=_UNITS[target])


@kernel
def copy_ranges(rows: IdArray, streams: bool) -> None:
    """Copy ranges of bytes, which do not overlap.

    Parameters
    ----------
    rows
        Source address, target address, bytes; int64, shape ``(n, 3)``, contiguous.
    streams
        Whether targets leave the cache.
    """
    last = rows.shape[0] - 1
    for row in range(rows.shape[0]):
        if streams:
            soon = min(row + _AHEAD_ROWS, last)
            expect(rows[soon, 1], rows[soon, 0], rows[soon, 2], streams)
            copy_piece(rows[row, 1], rows[row, 0], rows[row, 2], streams)
        else:
            copy_bytes(rows[row, 1], rows[row, 0], rows[row, 2])
    if streams:
        fence()


@kernel
def publish_word(address: int, value: int) -> None:
    """Store a 64-bit word with release order."""
    publish(address, np.uint64(value))


@kernel
def read_word(address: int) -> int:
    """Load a 64-bit word with acquire order."""
    return int(observe(address))
