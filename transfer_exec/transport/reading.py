"""What is read of a peer in every update: located once, in batches, with what is to be digested as it lands.

A batch is what one thread moves before it looks whether to go on. Strips are what a caller wants digested
(`layout_algebra.fingerprint`), by offsets in own memory as reads count through it: two tensors may be one memory, and
what comes for both of them is digested once. Rows are cut where a strip begins or ends, so that each has one or none:

>>> import numpy as np
>>> strips = Strips.of(np.array([[8, 8, 50, 2, 0]]))
>>> batch = Batch.of(np.array([[100, 900, 0, 24]]), strips)
>>> [(call.mine.tolist(), call.theirs.tolist()) for call in batch.read]
[([[100, 8], [116, 8]], [[900, 8], [916, 8]])]
>>> [(each.mine.tolist(), each.theirs.tolist(), each.strips.tolist()) for each in batch.read_digested]
[([[108, 8]], [[908, 8]], [[50, 0]])]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layout_algebra._digest_kernels import digest_strips, tables
from layout_algebra.dtypes import IdArray
from layout_algebra.runs import overlaps, with_gaps
from transfer_exec.errors import TransportError
from transfer_exec.kernels._landing import copy_digested, memory_of, read_digested
from transfer_exec.kernels.cpu import copy_ranges
from transfer_exec.transport.process_memory import RANGES, Ranges, ranges_of, read_process
from transfer_exec.transport.ranges import cut_long, group_edges
from transfer_exec.transport.stretches import MAPPED, Stretches

Sums = npt.NDArray[np.uint64]
"""What digests are added to."""

_PIECE_BYTES = 256 << 10
"""What was read is digested out of the cache that is a processor's own; a call of the system takes microseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Strips:
    """What is to be digested of own memory.

    Attributes
    ----------
    line
        All offsets, in order: first offset, the one after the last, first id, bytes of an element, number of the sum;
        int64, shape ``(n, 5)``. What is between two strips has elements of 0 bytes.
    """

    line: IdArray

    @staticmethod
    def of(rows: IdArray) -> Strips:
        """Of disjoint rows: offset, bytes, first id, bytes of an element, number of the sum; int64, ``(n, 5)``."""
        rows = rows[np.argsort(rows[:, 0])]
        line, which = with_gaps(np.stack([rows[:, 0], rows[:, 0] + rows[:, 1]], axis=1))
        return Strips(np.concatenate([line, np.append(rows[:, 2:], [[0, 0, 0]], axis=0)[which]], axis=1))


NO_STRIPS = Strips.of(np.empty((0, 5), dtype=np.int64))
"""Nothing is digested."""


class CopyDigested(NamedTuple):
    """Copies out of mapped memory; what is digested is what is copied, on its way.

    Attributes
    ----------
    item_bytes, phase
        Of the elements, and what their source addresses leave when divided by it.
    rows
        Source, own target and bytes; int64, shape ``(n, 3)``.
    strips
        Of every row the first id, and the number of its sum; int64, shape ``(n, 2)``.
    """

    item_bytes: int
    phase: int
    rows: IdArray
    strips: IdArray

    def run(self, sums: Sums | None) -> None:
        """Copy, and digest if sums are given."""
        if sums is None:
            copy_ranges(self.rows, True)
        else:
            copy_digested(
                self.rows, self.strips, memory_of(self.item_bytes, self.phase), *tables(self.item_bytes), sums
            )


class ReadDigested(NamedTuple):
    """Reads of another process's memory; what is digested is what has landed, piece by piece.

    Attributes
    ----------
    item_bytes, phase
        Of the elements, and what their own addresses leave when divided by it.
    mine, theirs
        Address and bytes of every range, here and there; int64, shape ``(n, 2)``.
    strips
        Of every range the first id, and the number of its sum; int64, shape ``(n, 2)``.
    pieces
        First range, the one after the last, and bytes of what is digested at once; int64, shape ``(m, 3)``.
    """

    item_bytes: int
    phase: int
    mine: IdArray
    theirs: IdArray
    strips: IdArray
    pieces: IdArray

    def run(self, pid: int, sums: Sums | None) -> None:
        """Read, and digest if sums are given; TransportError as `read_process`."""
        if sums is None:
            read_process(pid, self._plain())
            return
        memory, given = memory_of(self.item_bytes, self.phase), tables(self.item_bytes)
        done = read_digested(pid, self.mine, self.theirs, self.strips, self.pieces, memory, *given, sums)
        if done < len(self.pieces):
            read_process(pid, self._plain())  # says what is wrong
            raise TransportError(f"process {pid}: piece {done} of {len(self.pieces)} could be read in part only")

    def digest(self, sums: Sums) -> None:
        """Digest what has landed, if others have moved it."""
        memory = memory_of(self.item_bytes, self.phase)
        lengths, begins = self.mine[:, 1] // self.item_bytes, (self.mine[:, 0] - memory.ctypes.data) // self.item_bytes
        first, number = self.strips.T
        digest_strips(memory, np.stack([first, lengths, begins, np.ones_like(first), number], axis=1), sums)

    def _plain(self) -> tuple[Ranges, ...]:
        """The same to be read only."""
        return ranges_of(np.stack([self.mine[:, 0], self.theirs[:, 0], self.mine[:, 1]], axis=1))


class Batch(NamedTuple):
    """Rows that are read at once.

    Attributes
    ----------
    mapped
        Source, own target and bytes of what this process has mapped: int64, shape ``(n, 3)``.
    read
        All others.
    copy_digested, read_digested
        The same of what is digested as it lands; not among those two.
    """

    mapped: IdArray
    read: tuple[Ranges, ...]
    copy_digested: tuple[CopyDigested, ...] = ()
    read_digested: tuple[ReadDigested, ...] = ()

    @staticmethod
    def of(rows: IdArray, strips: Strips) -> Batch:
        """Rows of own target, source as it was reached, own offset, bytes; int64."""
        target, source, offset, size = rows.T
        line = strips.line
        of, where = overlaps(np.stack([offset, offset + size], axis=1), line[:, :2])
        begin, stop = np.maximum(offset[of], line[where, 0]), np.minimum((offset + size)[of], line[where, 1])
        into, item_bytes = begin - offset[of], line[where, 3]
        target, source = target[of] + into, source[of] + into
        first = line[where, 2] + (begin - line[where, 0]) // np.maximum(item_bytes, 1)
        is_mapped = source >= MAPPED
        source = source - np.where(is_mapped, MAPPED, 0)
        phase = np.where(is_mapped, source, target) % np.maximum(item_bytes, 1)
        cut = np.stack([target, source, stop - begin, first, line[where, 4]], axis=1)
        kind = 16 * item_bytes + 2 * phase + is_mapped
        copied, read = [], []
        for each in np.unique(kind[item_bytes > 0]).tolist():
            some, width, left = cut[kind == each], each // 16, each % 16 // 2
            if each % 2:
                copied.append(CopyDigested(width, left, _columns(some, 1, 0, 2), _columns(some, 3, 4)))
            else:
                read.append(_read_digested(width, left, some))
        mapped_rows = _columns(cut[kind == 1], 1, 0, 2)
        return Batch(mapped_rows, ranges_of(cut[kind == 0][:, :3]), tuple(copied), tuple(read))

    def move(self, pid: int, sums: Sums | None) -> None:
        """Copy everything, of a process what is not mapped, and digest what is to be if sums are given."""
        if len(self.mapped):
            copy_ranges(self.mapped, True)
        read_process(pid, self.read)
        for copied in self.copy_digested:
            copied.run(sums)
        for read in self.read_digested:
            read.run(pid, sums)

    def compile(self) -> None:
        """Compile what `move` runs, or read it from disk."""
        none = np.zeros(0, dtype=np.uint64)
        for copied in self.copy_digested:
            copied._replace(rows=copied.rows[:0], strips=copied.strips[:0]).run(none)
        for read in self.read_digested:
            read._replace(pieces=read.pieces[:0]).run(0, none)

    def unmapped(self) -> Iterator[tuple[int, int, int]]:
        """Own target, source and bytes of every range that is not mapped."""
        ends = [*((call.mine, call.theirs) for call in self.read), *((e.mine, e.theirs) for e in self.read_digested)]
        for mine, theirs in ends:
            for (target, size), (source, _) in zip(mine.tolist(), theirs.tolist(), strict=True):
                yield target, source, size


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What is read of a peer in every update, checked and located once.

    Attributes
    ----------
    peer
        Who lends it.
    batches
        In order.
    lent
        What the peer lent when this was prepared.
    """

    peer: str
    batches: tuple[Batch, ...]
    lent: Stretches


def _columns(rows: IdArray, *columns: int) -> IdArray:
    return np.ascontiguousarray(rows[:, list(columns)])


def _read_digested(item_bytes: int, phase: int, rows: IdArray) -> ReadDigested:
    """Of rows of target, source, bytes, first id, number of the sum."""
    cut, owner = cut_long(rows[:, :3], _PIECE_BYTES)
    first = rows[owner, 3] + (cut[:, 0] - rows[owner, 0]) // item_bytes
    edges = group_edges(cut[:, 2], _PIECE_BYTES, RANGES)
    pieces = np.stack([edges[:-1], edges[1:], np.add.reduceat(cut[:, 2], edges[:-1])], axis=1)
    strips = np.stack([first, rows[owner, 4]], axis=1)
    return ReadDigested(item_bytes, phase, _columns(cut, 0, 2), _columns(cut, 1, 2), strips, pieces)
