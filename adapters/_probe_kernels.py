"""Loops of the probe: periodic memory, keeping and clearing parameters, and comparing them with what a map predicts.

Every kernel takes and returns arrays and numbers only; arrays of bits are unsigned integers as wide as the element.
Inner loops run over slices from index zero, which is what LLVM turns into vector instructions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from adapters.torch_bits import Bits
from layout_algebra._digest_kernels import random_word
from layout_algebra._jit import kernel
from layout_algebra._prefetch import AHEAD_BYTES, PAGE_BYTES, prefetch
from layout_algebra._scan_kernels import differ
from layout_algebra.dtypes import IdArray
from transfer_exec.kernels._pieces import copy_piece
from transfer_exec.kernels._vectors import fence

_BLOCK = 2048
_KEPT_BYTES = 1 << 14
_STREAMED_BYTES = 1 << 22
_LONG_PERIOD_BYTES = 1 << 10


@kernel
def keep_and_clear(live: Bits, kept: Bits, value: np.unsignedinteger[npt.NBitBase]) -> None:
    """Copy ``live`` into ``kept`` and overwrite it with ``value``, block by block while it is in cache.

    ``kept`` is fresh memory, so that its lines are in cache too: the system has just zeroed them.
    """
    block = _KEPT_BYTES // live.itemsize
    for start in range(0, len(live), block):
        source = live[start : start + block]
        for page in range(_KEPT_BYTES, 2 * _KEPT_BYTES, PAGE_BYTES):
            prefetch(source.ctypes.data + page)
        copy_piece(kept[start : start + block].ctypes.data, source.ctypes.data, source.nbytes, False)
        for index in range(len(source)):
            source[index] = value


@kernel
def stream_bits(source: Bits, target: Bits) -> None:
    """Copy one contiguous array into another, which is not read into the cache for that."""
    copy_piece(target.ctypes.data, source.ctypes.data, source.nbytes, True)
    fence()


@kernel
def random_floats(
    out: Bits, sign_seed: np.uint64, seed: np.uint64, mantissa_bits: int, first: int, count: int, sign: int
) -> None:
    """Random bits of a float format, all mantissas and a range of exponents alike.

    Parameters
    ----------
    out
        Result.
    sign_seed, seed
        Of the signs, and of all else.
    mantissa_bits, first, count
        The format's stored mantissa, its smallest exponent field, and how many follow on each other.
    sign
        0 for positive numbers, 1 for signs of their seed, 2 for the opposite.
    """
    top = np.uint64(8 * out.itemsize - 1)
    width = np.uint64(mantissa_bits)
    mask = (np.uint64(1) << width) - np.uint64(1)
    for number in range(len(out)):
        word = random_word(seed, number)
        # The exponent comes from the lowest 16 bits, the mantissa from others, or from another word.
        exponent = (word & np.uint64(0xFFFF)) * np.uint64(count) >> np.uint64(16)
        mantissa = (word >> np.uint64(16) if mantissa_bits <= 48 else random_word(~seed, number)) & mask
        bits = (exponent + np.uint64(first)) << width | mantissa
        if sign:
            bits |= (random_word(sign_seed, number) >> np.uint64(63) ^ np.uint64(sign - 1)) << top
        out[number] = bits


@kernel
def fill_periodic(out: Bits, table: Bits, phase: int) -> None:
    """``out[i] = table[(phase + i) % len(table)]``; what a cache would not hold is not read into it for that."""
    item = out.itemsize
    period = len(table)
    streams = len(out) * item >= _STREAMED_BYTES and period * item >= _LONG_PERIOD_BYTES
    done = 0
    at = phase % period
    while done < len(out):
        run = min(period - at, len(out) - done)
        copy_piece(out.ctypes.data + done * item, table.ctypes.data + at * item, run * item, streams)
        done += run
        at = 0
    fence()


@kernel
def first_difference(data: Bits, table: Bits, phase: int) -> int:
    """First index at which ``data`` is not what ``fill_periodic`` made it, or -1."""
    period = len(table)
    done = 0
    at = phase % period
    while done < len(data):
        run = min(period - at, len(data) - done, _BLOCK)
        if differ(data[done : done + run], table[at : at + run]):
            for index in range(run):
                if data[done + index] != table[at + index]:
                    return done + index
        done += run
        at += run
        if at == period:
            at = 0
    return -1


@kernel
def _clear(counter: IdArray) -> None:
    for axis in range(len(counter)):
        counter[axis] = 0


@kernel
def check_rows(
    live: Bits,
    rows: IdArray,
    bad: npt.NDArray[np.uint8],
    starts: IdArray,
    which: IdArray,
    tables: npt.NDArray[np.unsignedinteger[npt.NBitBase]],
) -> None:
    """Mark the slice copies whose elements are not what their ids predict.

    Parameters
    ----------
    live
        Flat bits of one parameter.
    rows
        Slice copies as ``CopyTable.rows``.
    bad
        One flag a row; set, never cleared, and a row that is set already is not looked at.
    starts, which
        Ids from ``starts[k]`` on (up to ``starts[k + 1]``) are predicted by ``tables[which[k]]``, or by nothing if that
        is negative.
    tables
        Shape ``(dtypes, period)``: for an id its bits in the parameter's dtype, at ``id % period``.
    """
    axes = (rows.shape[1] - 2) // 3
    period = tables.shape[1]
    counter = np.zeros(axes, dtype=np.int64)
    last = 2 + 3 * (axes - 1)
    for row in range(len(rows)):
        if bad[row] != 0:
            continue
        _clear(counter)
        target, source = rows[row, 0], rows[row, 1]
        length, target_step, source_step = rows[row, last], rows[row, last + 1], rows[row, last + 2]
        while True:
            if not _inner_agrees(live, target, target_step, source, source_step, length, starts, which, tables, period):
                bad[row] = 1
                break
            axis = axes - 2
            while axis >= 0:
                counter[axis] += 1
                target += rows[row, 3 + 3 * axis]
                source += rows[row, 4 + 3 * axis]
                if counter[axis] < rows[row, 2 + 3 * axis]:
                    break
                target -= rows[row, 2 + 3 * axis] * rows[row, 3 + 3 * axis]
                source -= rows[row, 2 + 3 * axis] * rows[row, 4 + 3 * axis]
                counter[axis] = 0
                axis -= 1
            if axis < 0:
                break


@kernel
def _inner_agrees(
    live: Bits,
    target: int,
    target_step: int,
    source: int,
    source_step: int,
    length: int,
    starts: IdArray,
    which: IdArray,
    tables: npt.NDArray[np.unsignedinteger[npt.NBitBase]],
    period: int,
) -> bool:
    """Whether one line of a slice copy holds what its ids predict."""
    left = length
    while left > 0:
        segment = 0
        if len(starts) > 1:
            segment = int(np.searchsorted(starts, source, side="right")) - 1
        run = left
        if len(starts) > 1 and source_step > 0 and segment + 1 < len(starts):
            run = min(run, (starts[segment + 1] - 1 - source) // source_step + 1)
        elif len(starts) > 1 and source_step < 0:
            run = min(run, (source - starts[segment]) // -source_step + 1)
        if which[segment] < 0:
            return False
        table = tables[which[segment]]
        at = source % period
        step = source_step % period
        if source_step == 1 and target_step == 1:
            done = 0
            while done < run:
                part = min(period - at, run - done, PAGE_BYTES // live.itemsize)
                prefetch(live.ctypes.data + (target + done) * live.itemsize + AHEAD_BYTES)
                if differ(live[target + done : target + done + part], table[at : at + part]):
                    return False
                done += part
                at += part
                if at == period:
                    at = 0
        else:
            here = target
            for _ in range(run):
                if live[here] != table[at]:
                    return False
                here += target_step
                at += step
                if at >= period:
                    at -= period
        target += run * target_step
        source += run * source_step
        left -= run
    return True


@kernel
def mark_rows(mask: npt.NDArray[np.uint8], rows: IdArray) -> None:
    """Set the bit of every element that some slice copy writes; ``mask`` has one bit an element."""
    axes = (rows.shape[1] - 2) // 3
    counter = np.zeros(axes, dtype=np.int64)
    last = 2 + 3 * (axes - 1)
    for row in range(len(rows)):
        _clear(counter)
        target = rows[row, 0]
        length, step = rows[row, last], rows[row, last + 1]
        while True:
            here = target
            left = length
            while left > 0:
                if step == 1 and left >= 8 and here & 7 == 0:
                    mask[here >> 3] = 255
                    here += 8
                    left -= 8
                else:
                    mask[here >> 3] |= np.uint8(1 << (here & 7))
                    here += step
                    left -= 1
            axis = axes - 2
            while axis >= 0:
                counter[axis] += 1
                target += rows[row, 3 + 3 * axis]
                if counter[axis] < rows[row, 2 + 3 * axis]:
                    break
                target -= rows[row, 2 + 3 * axis] * rows[row, 3 + 3 * axis]
                counter[axis] = 0
                axis -= 1
            if axis < 0:
                break


@kernel
def _grown(table: IdArray) -> IdArray:
    """The same rows with room for as many again. (A slice assignment would compile ten times as long.)"""
    larger = np.empty((2 * len(table), 2), dtype=np.int64)
    for row in range(len(table)):
        larger[row, 0] = table[row, 0]
        larger[row, 1] = table[row, 1]
    return larger


@kernel
def steady_runs(
    live: Bits, kept: Bits, mask: npt.NDArray[np.uint8], limit: int
) -> tuple[IdArray, npt.NDArray[np.uint64], IdArray]:
    """Runs of one constant over the elements whose mask bit is clear.

    Returns
    -------
    tuple
        Runs ``(start, stop, kind)``, kind 1 where every element equals its kept bits and 0 where all are one
        constant; those constants; and half-open intervals of the elements that ``limit`` runs could not hold.
    """
    runs = np.empty((limit, 3), dtype=np.int64)
    values = np.empty(limit, dtype=np.uint64)
    count = 0
    spilled = np.empty((16, 2), dtype=np.int64)
    spills = 0
    size = len(live)
    index = 0
    while index < size:
        if index & 7 == 0 and mask[index >> 3] == 255:
            index += 8
            continue
        if mask[index >> 3] >> (index & 7) & 1:
            index += 1
            continue
        as_kept = index
        while as_kept < size and not mask[as_kept >> 3] >> (as_kept & 7) & 1 and live[as_kept] == kept[as_kept]:
            as_kept += 1
        as_one = index + 1
        while as_one < size and not mask[as_one >> 3] >> (as_one & 7) & 1 and live[as_one] == live[index]:
            as_one += 1
        stop = max(as_kept, as_one)
        if count < limit:
            runs[count, 0] = index
            runs[count, 1] = stop
            runs[count, 2] = 1 if as_kept > as_one else 0
            values[count] = live[index]
            count += 1
        elif spills and spilled[spills - 1, 1] == index:
            spilled[spills - 1, 1] = stop
        else:
            if spills == len(spilled):
                spilled = _grown(spilled)
            spilled[spills, 0] = index
            spilled[spills, 1] = stop
            spills += 1
        index = stop
    return runs[:count].copy(), values[:count].copy(), spilled[:spills].copy()


@kernel
def check_steady(
    live: Bits, kept: Bits, runs: IdArray, values: npt.NDArray[np.uint64], bad: npt.NDArray[np.uint8]
) -> None:
    """Mark the runs of ``steady_runs`` that no longer hold their constants."""
    for row in range(len(runs)):
        start, stop, kind = runs[row, 0], runs[row, 1], runs[row, 2]
        if kind == 1:
            for index in range(start, stop):
                if live[index] != kept[index]:
                    bad[row] = 1
                    break
        else:
            for index in range(start, stop):
                if live[index] != values[row]:
                    bad[row] = 1
                    break


@kernel
def mask_intervals(mask: npt.NDArray[np.uint8], size: int) -> IdArray:
    """Maximal half-open intervals of the elements whose bit is set; int64, shape ``(n, 2)``."""
    out = np.empty((16, 2), dtype=np.int64)
    count = 0
    index = 0
    while index < size:
        if index & 7 == 0 and mask[index >> 3] == 0:
            index += 8
            continue
        if not mask[index >> 3] >> (index & 7) & 1:
            index += 1
            continue
        start = index
        while index < size and mask[index >> 3] >> (index & 7) & 1:
            if index & 7 == 0 and mask[index >> 3] == 255:
                index += 8
            else:
                index += 1
        if count == len(out):
            out = _grown(out)
        out[count, 0] = start
        out[count, 1] = min(index, size)
        count += 1
    return out[:count].copy()


@kernel
def digest_blocks(live: Bits, intervals: IdArray, size: int, out: npt.NDArray[np.uint64]) -> None:
    """Mix the elements of some half-open intervals into one number a block of ``size`` elements."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    for row in range(len(intervals)):
        for index in range(intervals[row, 0], intervals[row, 1]):
            block = index // size
            mixed = (out[block] ^ np.uint64(live[index])) * factor
            out[block] = mixed ^ (mixed >> np.uint64(29))
