# Triton types these functions, not mypy:
# mypy: ignore-errors
"""The one GPU kernel: every program of a launch moves one tile of one row, or some small rows.

Addresses are int64 and become pointers here. A tile's kind tells the compiler what it may rely on: both sides
contiguous (vector loads and stores), contiguous along different axes (a transpose, through shared memory), or nothing.
Floats change in integers where the hardware would lose a NaN's sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE, LINES, SMALL, CROSS, ANY = (tl.constexpr(kind) for kind in range(5))
"""Kinds of tiles: part of a long run; several runs of a row; several rows of a few words; a transpose; any strides."""

FIELDS = tl.constexpr(8)
CODES = tl.constexpr(32)
COPIES = tl.constexpr(4)
ALIGNED = tl.constexpr(31)
"""Of a LINE: words of 8 bytes at multiples of 16."""


@triton.jit
def move_tiles(
    rows, tiles, first, LINE_WORDS: tl.constexpr, SMALL_ROWS: tl.constexpr, SMALL_WORDS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Move tile ``first + program``, one of ``(row, first run, first word, kind * CODES + code)``.

    A row is ``(source, source stride, source step, target, target stride, target step, length, count)``; codes below
    ``COPIES`` are words of 1, 2, 4 and 8 bytes, the others conversions.
    """
    tile = tiles + (first + tl.program_id(0).to(tl.int64)) * 4
    row = rows + tl.load(tile) * FIELDS
    run = tl.load(tile + 1)
    word = tl.load(tile + 2)
    kind = tl.load(tile + 3) // CODES
    code = tl.load(tile + 3) % CODES
    if code == 0:
        _copy(row, run, word, kind, tl.int8, 1, LINE_WORDS, SMALL_ROWS, SMALL_WORDS, SIDE)
    elif code == 1:
        _copy(row, run, word, kind, tl.int16, 2, LINE_WORDS, SMALL_ROWS, SMALL_WORDS, SIDE)
    elif code == 2:
        _copy(row, run, word, kind, tl.int32, 4, LINE_WORDS, SMALL_ROWS, SMALL_WORDS, SIDE)
    elif code == 3:
        _copy(row, run, word, kind, tl.int64, 8, LINE_WORDS, SMALL_ROWS, SMALL_WORDS, SIDE)
    elif code == ALIGNED:
        _line(row, run, word, tl.int64, 8, 16, LINE_WORDS)
    else:
        _convert(row, run, word, kind, code - COPIES, LINE_WORDS, SIDE)


@triton.jit
def _copy(
    row, run, word, kind, WORD: tl.constexpr, WIDTH: tl.constexpr, LINE_WORDS: tl.constexpr,
    SMALL_ROWS: tl.constexpr, SMALL_WORDS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    if kind == LINE:
        _line(row, run, word, WORD, WIDTH, WIDTH, LINE_WORDS)
    elif kind == LINES:
        _copy_runs(row, run, WORD, WIDTH, LINE_WORDS)
    elif kind == SMALL:
        _copy_small(row, run, WORD, SMALL_ROWS, SMALL_WORDS)
    elif kind == CROSS:
        _copy_tile(row, run, word, WORD, WIDTH, True, SIDE)
    else:
        _copy_tile(row, run, word, WORD, WIDTH, False, SIDE)


@triton.jit
def _line(
    row, run, word, WORD: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, LINE_WORDS: tl.constexpr
):  # fmt: skip
    """A stretch of one run, contiguous on both sides."""
    pointer: tl.constexpr = tl.pointer_type(WORD)
    source = tl.load(row) + run * tl.load(row + 2) + word * WIDTH
    target = tl.load(row + 3) + run * tl.load(row + 5) + word * WIDTH
    # A hint on an integer does not survive its becoming a pointer.
    source = tl.multiple_of(source.to(pointer), ALIGN)
    target = tl.multiple_of(target.to(pointer), ALIGN)
    place = tl.arange(0, LINE_WORDS)
    left = tl.load(row + 6) - word
    if left >= LINE_WORDS:
        tl.store(target + place, tl.load(source + place))
    else:
        inside = place < left
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


@triton.jit
def _copy_runs(row, run, WORD: tl.constexpr, WIDTH: tl.constexpr, LINE_WORDS: tl.constexpr):
    i, j, inside = _places_in_runs(row, run, LINE_WORDS)
    source = tl.load(row) + i * tl.load(row + 2) + j * WIDTH
    target = tl.load(row + 3) + i * tl.load(row + 5) + j * WIDTH
    _copy_words(source, target, inside, WORD)


@triton.jit
def _places_in_runs(row, run, LINE_WORDS: tl.constexpr):
    """Run and place of as many words as whole runs of a row have."""
    length = tl.load(row + 6).to(tl.int32)
    place = tl.arange(0, LINE_WORDS)
    i = run + (place // length).to(tl.int64)
    j = (place % length).to(tl.int64)
    return i, j, (i < tl.load(row + 7)) & (place < LINE_WORDS // length * length)


@triton.jit
def _copy_words(source, target, inside, WORD: tl.constexpr):
    pointer: tl.constexpr = tl.pointer_type(WORD)
    tl.store(target.to(pointer), tl.load(source.to(pointer), mask=inside), mask=inside)


@triton.jit
def _copy_small(row, many, WORD: tl.constexpr, SMALL_ROWS: tl.constexpr, SMALL_WORDS: tl.constexpr):
    """Up to SMALL_ROWS rows in a row of the table, each of one run of at most SMALL_WORDS words."""
    pointer: tl.constexpr = tl.pointer_type(WORD)
    which = tl.arange(0, SMALL_ROWS)
    fields = row + which * FIELDS
    there = which < many
    source = tl.load(fields, mask=there, other=0).to(pointer)
    target = tl.load(fields + 3, mask=there, other=0).to(pointer)
    length = tl.load(fields + 6, mask=there, other=0)
    place = tl.arange(0, SMALL_WORDS)
    inside = place[None, :] < length[:, None]
    values = tl.load(source[:, None] + place[None, :], mask=inside)
    tl.store(target[:, None] + place[None, :], values, mask=inside)


@triton.jit
def _copy_tile(row, run, word, WORD: tl.constexpr, WIDTH: tl.constexpr, ACROSS: tl.constexpr, SIDE: tl.constexpr):
    """SIDE runs x SIDE words; across, sources are contiguous from run to run and targets within one."""
    i, j, inside = _places_in_tile(row, run, word, SIDE)
    if ACROSS:
        # Steps in words, so that the compiler sees which axis is contiguous.
        pointer: tl.constexpr = tl.pointer_type(WORD)
        source = tl.load(row).to(pointer) + i + j * (tl.load(row + 1) // WIDTH)
        target = tl.load(row + 3).to(pointer) + i * (tl.load(row + 5) // WIDTH) + j
        tl.store(target, tl.load(source, mask=inside), mask=inside)
    else:
        _copy_words(_addresses(row, i, j), _addresses(row + 3, i, j), inside, WORD)


@triton.jit
def _places_in_tile(row, run, word, SIDE: tl.constexpr):
    i = (run + tl.arange(0, SIDE))[:, None]
    j = (word + tl.arange(0, SIDE))[None, :]
    return i, j, (i < tl.load(row + 7)) & (j < tl.load(row + 6))


@triton.jit
def _addresses(side, i, j):
    return tl.load(side) + i * tl.load(side + 2) + j * tl.load(side + 1)


@triton.jit
def _convert(row, run, word, kind, pair, LINE_WORDS: tl.constexpr, SIDE: tl.constexpr):
    # Pairs are numbered as in transfer_exec.conversions: every wide float to the three others, in one order.
    source_kind = pair // 3
    target_kind = pair % 3
    target_kind += (target_kind >= source_kind).to(tl.int64)
    if kind == LINE:
        _convert_line(row, run, word, source_kind, target_kind, LINE_WORDS)
    elif kind == LINES:
        _convert_runs(row, run, source_kind, target_kind, LINE_WORDS)
    else:
        _convert_tile(row, run, word, source_kind, target_kind, SIDE)


@triton.jit
def _convert_line(row, run, word, source_kind, target_kind, LINE_WORDS: tl.constexpr):
    j = word + tl.arange(0, LINE_WORDS)
    inside = j < tl.load(row + 6)
    _narrow(_addresses(row + 3, run, j), _widen(_addresses(row, run, j), inside, source_kind), inside, target_kind)


@triton.jit
def _convert_runs(row, run, source_kind, target_kind, LINE_WORDS: tl.constexpr):
    i, j, inside = _places_in_runs(row, run, LINE_WORDS)
    _narrow(_addresses(row + 3, i, j), _widen(_addresses(row, i, j), inside, source_kind), inside, target_kind)


@triton.jit
def _convert_tile(row, run, word, source_kind, target_kind, SIDE: tl.constexpr):
    i, j, inside = _places_in_tile(row, run, word, SIDE)
    _narrow(_addresses(row + 3, i, j), _widen(_addresses(row, i, j), inside, source_kind), inside, target_kind)


@triton.jit
def _widen(source, inside, kind):
    """F32 bits of BF16, F16, F32 or F64 numbers; a NaN stays one of the same sign."""
    if kind == 0:
        bits = tl.load(source.to(tl.pointer_type(tl.int16)), mask=inside, other=0).to(tl.int32) << 16
    elif kind == 1:
        half = tl.load(source.to(tl.pointer_type(tl.int16)), mask=inside, other=0)
        wide = half.to(tl.int32) & 0xFFFF
        bits = half.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        kept = ((wide & 0x8000) << 16) | 0x7FC00000 | ((wide & 0x3FF) << 13)
        bits = tl.where((wide & 0x7FFF) > 0x7C00, kept, bits)
    elif kind == 2:
        bits = tl.load(source.to(tl.pointer_type(tl.int32)), mask=inside, other=0)
    else:
        double = tl.load(source.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
        bits = double.to(tl.float64, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        sign = (double >> 63).to(tl.int32) << 31
        bits = tl.where((double & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000, sign | 0x7FC00000, bits)
    return bits


@triton.jit
def _narrow(target, bits, inside, kind):
    """Write F32 bits as BF16, F16, F32 or F64, rounded to nearest even; a NaN stays one of the same sign."""
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if kind == 0:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = (bits >> 16) | tl.where((bits & 0x7F0000) == 0, 0x40, 0)
        brain = tl.where(is_nan, kept, rounded)
        tl.store(target.to(tl.pointer_type(tl.int16)), brain.to(tl.int16), mask=inside)
    elif kind == 1:
        half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        kept = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
        tl.store(target.to(tl.pointer_type(tl.int16)), tl.where(is_nan, kept, half).to(tl.int16), mask=inside)
    elif kind == 2:
        tl.store(target.to(tl.pointer_type(tl.int32)), bits, mask=inside)
    else:
        double = bits.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        kept = ((bits.to(tl.int64) & 0x80000000) << 32) | 0x7FF8000000000000 | ((bits.to(tl.int64) & 0x7FFFFF) << 29)
        tl.store(target.to(tl.pointer_type(tl.int64)), tl.where(is_nan, kept, double), mask=inside)
