"""Contiguous pieces: long ones are streamed line by line, short ones are a few loads and stores."""

from __future__ import annotations

from layout_algebra._jit import inlined, kernel
from layout_algebra._prefetch import prefetch
from layout_algebra.dtypes import IdArray
from transfer_exec.kernels._memory import copy_bytes
from transfer_exec.kernels._vectors import copy1, copy2, copy4, copy8, copy16, copy32, fence, stream32

_AHEAD_BYTES = 4096
_AHEAD_PIECES = 32
_AHEAD_OF_ONE = 1024


@kernel
def copy_piece(target: int, source: int, size: int, streams: bool) -> None:
    """Copy bytes; ends of a range that overlap in its middle cover every size with two stores."""
    if streams and size >= 64:
        head = -target & 63
        if head:
            copy_short(target, source, head)
        at = head
        last = size - 64
        while at <= last:
            stream32(target + at, source + at)
            stream32(target + at + 32, source + at + 32)
            at += 64
        if at < size:
            copy_short(target + at, source + at, size - at)
    elif size <= 256:
        copy_short(target, source, size)
    else:
        copy_bytes(target, source, size)


@inlined
def copy_short(target: int, source: int, size: int) -> None:
    """Copy a few bytes."""
    if size >= 32:
        at = 0
        while at <= size - 32:
            copy32(target + at, source + at)
            at += 32
        copy32(target + size - 32, source + size - 32)
    elif size >= 16:
        copy16(target, source)
        copy16(target + size - 16, source + size - 16)
    elif size >= 8:
        copy8(target, source)
        copy8(target + size - 8, source + size - 8)
    elif size >= 4:
        copy4(target, source)
        copy4(target + size - 4, source + size - 4)
    elif size >= 2:
        copy2(target, source)
        copy2(target + size - 2, source + size - 2)
    elif size == 1:
        copy1(target, source)


@inlined
def expect(target: int, source: int, size: int, streams: bool) -> None:
    """Fetch the beginning of a piece that will be copied soon."""
    for at in range(0, min(size, _AHEAD_OF_ONE), 64):
        prefetch(source + at)
    if not streams or size < 64:
        prefetch(target)


@kernel
def copy_list(pieces: IdArray, groups: IdArray, streams: bool) -> None:
    """Copy listed pieces.

    Parameters
    ----------
    pieces
        Source and target of every piece; int64, shape ``(n, 2)``.
    groups
        Stretches of pieces of one size: bytes of a piece, first piece, stop, and the lines of a piece if all targets
        are whole cache lines, otherwise 0; int64, shape ``(m, 4)``.
    streams
        Whether targets leave the cache.
    """
    last = pieces.shape[0] - 1
    for group in range(groups.shape[0]):
        size, start, stop, lines = groups[group, 0], groups[group, 1], groups[group, 2], groups[group, 3]
        ahead = max(min(_AHEAD_BYTES // size, _AHEAD_PIECES), 1)
        if streams and lines == 1:
            for k in range(start, stop):
                prefetch(pieces[min(k + ahead, last), 0])
                source, target = pieces[k, 0], pieces[k, 1]
                stream32(target, source)
                stream32(target + 32, source + 32)
        elif streams and 1 < lines <= _AHEAD_OF_ONE // 64:
            for k in range(start, stop):
                source, target, soon = pieces[k, 0], pieces[k, 1], pieces[min(k + ahead, last), 0]
                for at in range(0, lines * 64, 64):
                    prefetch(soon + at)
                    stream32(target + at, source + at)
                    stream32(target + at + 32, source + at + 32)
        elif size < 64:
            for k in range(start, stop):
                prefetch(pieces[min(k + ahead, last), 0])
                prefetch(pieces[min(k + ahead, last), 1])
                copy_short(pieces[k, 1], pieces[k, 0], size)
        else:
            for k in range(start, stop):
                soon = min(k + ahead, last)
                expect(pieces[soon, 1], pieces[soon, 0], size, streams)
                copy_piece(pieces[k, 1], pieces[k, 0], size, streams)
    fence()


@kernel
def copy_grids(grids: IdArray, streams: bool) -> None:
    """Copy evenly spaced pieces of one size.

    Parameters
    ----------
    grids
        Source, step of the source, target, step of the target, bytes of a piece, number of pieces; int64, shape
        ``(n, 6)``.
    streams
        Whether targets leave the cache.
    """
    for row in range(grids.shape[0]):
        source, source_step, target, target_step = grids[row, 0], grids[row, 1], grids[row, 2], grids[row, 3]
        size, count = grids[row, 4], grids[row, 5]
        ahead = max(min(_AHEAD_BYTES // size, _AHEAD_PIECES), 1)
        for k in range(count):
            soon = min(k + ahead, count - 1)
            expect(target + soon * target_step, source + soon * source_step, size, streams)
            copy_piece(target + k * target_step, source + k * source_step, size, streams)
    fence()
