# numba types these functions, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
"""Copy and digest in one go: what has just been copied is in the cache, and digesting it there costs next to nothing.

Memory is read by address, through one array of elements that spans all of it (`memory_of`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from layout_algebra._digest_kernels import AHEAD_BYTES, sum_run
from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray
from transfer_exec.kernels._pieces import copy_piece, expect
from transfer_exec.kernels._vectors import fence

_BLOCK_BYTES = 2048
"""Digested and copied in turns, out of the cache nearest to the processor."""
_AHEAD_ROWS = 2
_FIRST_ADDRESS = 4096
_LAST_ADDRESS = 1 << 48
_LINE = 64
_WORD = ir.IntType(64)


@cache
def memory_of(item_bytes: int, phase: int) -> npt.NDArray[np.unsignedinteger]:
    """All memory that a process can have, as elements at addresses that leave ``phase`` when divided by their width."""
    first = _FIRST_ADDRESS + phase
    described = {
        "data": (first, False),
        "shape": ((_LAST_ADDRESS - first) // item_bytes,),
        "typestr": f"<u{item_bytes}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def read_ranges(pid: int, mine: int, theirs: int, count: int) -> int:
    """``process_vm_readv`` of as many ranges, whose addresses and lengths are at two addresses; its answer."""
    return int(ctypes.CDLL(None).process_vm_readv(pid, *_sized(mine, count), *_sized(theirs, count), ctypes.c_ulong(0)))


def _sized(address: int, count: int) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    return ctypes.c_void_p(int(address)), ctypes.c_ulong(int(count))


@intrinsic
def _read_ranges(typing_context, pid, mine, theirs, count):
    def build(context, builder, signature, arguments):
        number, place = ir.IntType(32), cgutils.voidptr_t
        kind = ir.FunctionType(_WORD, [number, place, _WORD, place, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "process_vm_readv")
        process, here, there, ranges = arguments
        here, there = (builder.inttoptr(address, place) for address in (here, there))
        return builder.call(function, [builder.trunc(process, number), here, ranges, there, ranges, _WORD(0)])

    return types.int64(types.int64, types.int64, types.int64, types.int64), build


@overload(read_ranges)
def _compiled_read_ranges(pid, mine, theirs, count):
    return lambda pid, mine, theirs, count: _read_ranges(pid, mine, theirs, count)


@kernel
def copy_digested(
    rows: IdArray,
    strips: IdArray,
    memory: npt.NDArray[np.unsignedinteger],
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint64],
) -> None:
    """Copy ranges of elements past the cache, and digest them as they are copied.

    Parameters
    ----------
    rows
        Source address, target address, bytes; int64, shape ``(n, 3)``, contiguous.
    strips
        Of every row the first id, and the number of its sum; int64, shape ``(n, 2)``.
    memory
        From `memory_of`, in which the sources lie.
    shift, weights, word_weights
        From `layout_algebra._digest_kernels.tables`.
    sums
        What is added to.
    """
    base, item_bytes = memory.ctypes.data, memory.itemsize
    last = rows.shape[0] - 1
    for row in range(rows.shape[0]):
        source, target, size = rows[row, 0], rows[row, 1], rows[row, 2]
        first, label, soon = strips[row, 0], strips[row, 1], min(row + _AHEAD_ROWS, last)
        if size < _BLOCK_BYTES:
            expect(rows[soon, 1], rows[soon, 0], rows[soon, 2], True)
        done = 0
        while done < size:
            # Blocks end with a cache line of the target if elements do, and none is short; what the next reads is asked
            # for early.
            count = (_BLOCK_BYTES - ((target + done) & (_LINE - 1))) & -item_bytes
            if size - done - count < _BLOCK_BYTES // 2:
                count = size - done
            ahead = count if done + count < size else rows[soon, 0] - source - done
            start, of = (source + done - base) // item_bytes, count // item_bytes
            first_id = first + done // item_bytes
            sums[label] += sum_run(memory, start, first_id, of, shift, weights, word_weights, ahead)
            copy_piece(target + done, source + done, count, True)
            done += count
    fence()


@kernel
def read_digested(
    pid: int,
    mine: IdArray,
    theirs: IdArray,
    strips: IdArray,
    pieces: IdArray,
    memory: npt.NDArray[np.unsignedinteger],
    shift: int,
    weights: npt.NDArray[np.uint64],
    word_weights: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint64],
) -> int:
    """Read another process's memory a piece at a time, and digest each where it has landed.

    Parameters
    ----------
    pid
        The process.
    mine, theirs
        Address and bytes of every range, here and there; int64, shape ``(n, 2)``, contiguous.
    strips
        Of every range the first id, and the number of its sum; int64, shape ``(n, 2)``.
    pieces
        First range, the one after the last, and bytes of what is read by one call; int64, shape ``(m, 3)``.
    memory
        From `memory_of`, in which the targets lie.
    shift, weights, word_weights, sums
        As for `copy_digested`.

    Returns
    -------
    int
        How many pieces were read; fewer than there are if the system refused one, or read it in part.
    """
    base, item_bytes = memory.ctypes.data, memory.itemsize
    here, there = mine.ctypes.data, theirs.ctypes.data
    for piece in range(pieces.shape[0]):
        start, stop, size = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        if read_ranges(pid, here + 16 * start, there + 16 * start, stop - start) != size:
            return piece
        for row in range(start, stop):
            place = (mine[row, 0] - base) // item_bytes
            of = mine[row, 1] // item_bytes
            sums[strips[row, 1]] += sum_run(
                memory, place, strips[row, 0], of, shift, weights, word_weights, AHEAD_BYTES
            )
    return int(pieces.shape[0])
