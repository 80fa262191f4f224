"""Wide floats, a block at a time, through F32 bits: ``widen`` reads any of them, ``narrow`` writes any.

F32 holds every BF16 and F16 exactly, and torch rounds F64 to the 16-bit floats by way of F32, so F32 in the middle is
right for every pair. Blocks live in a small scratch array. A NaN keeps its sign and turns quiet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import inlined, kernel
from transfer_exec.kernels._memory import (
    Word,
    load16,
    load32,
    load_double,
    store16,
    store32,
    store_double,
    words16,
    words32,
)

Bits = npt.NDArray[np.uint32]
"""F32 bit patterns."""

BF16, F16, F32, F64 = 0, 1, 2, 3
"""Numbers of the wide floats, in the order of `transfer_exec.conversions`."""


@inlined
def half_to_single(half: Word) -> Word:
    """F32 bits of F16 bits."""
    sign = (half & 0x8000) << 16
    rest = half & 0x7FFF
    mantissa = half & 0x3FF
    if rest >= 0x7C00:
        if mantissa:
            return sign | 0x7FC00000 | (mantissa << 13)
        return sign | 0x7F800000
    if rest >= 0x400:
        return sign | ((rest << 13) + 0x38000000)
    # Below the smallest normal number: the leading bit becomes the implicit one.
    if mantissa == 0:
        return sign
    exponent = 113
    while mantissa < 0x400:
        mantissa <<= 1
        exponent -= 1
    return sign | (exponent << 23) | ((mantissa & 0x3FF) << 13)


@inlined
def single_to_half(single: Word) -> Word:
    """F16 bits of F32 bits, rounded to nearest even."""
    sign = (single >> 16) & 0x8000
    rest = single & 0x7FFFFFFF
    if rest > 0x7F800000:
        return sign | 0x7E00 | ((rest >> 13) & 0x3FF)
    if rest >= 0x477FF000:
        return sign | 0x7C00
    if rest >= 0x38800000:
        return sign | ((rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13)
    if rest <= 0x33000000:
        return sign
    # Subnormal results: shift the mantissa with its implicit bit into units of 2**-24, then round.
    shift = 126 - (rest >> 23)
    mantissa = (rest & 0x7FFFFF) | 0x800000
    kept = mantissa >> shift
    cut = mantissa & ((1 << shift) - 1)
    middle = 1 << (shift - 1)
    if cut > middle or (cut == middle and (kept & 1) == 1):
        kept += 1
    return sign | kept


@inlined
def single_to_brain(single: Word) -> Word:
    """BF16 bits of F32 bits, rounded to nearest even."""
    if (single & 0x7FFFFFFF) > 0x7F800000:
        return (single >> 16) | 0x40
    return (single + 0x7FFF + ((single >> 16) & 1)) >> 16


@kernel
def widen(kind: int, address: int, stride: int, count: int, out: Bits) -> None:
    """Read ``count`` floats of one kind, ``stride`` bytes apart, as F32 bits."""
    if kind == BF16 and stride == 2:
        words = words16(address, count)
        for k in range(count):
            out[k] = np.uint32(words[k]) << np.uint32(16)
    elif kind == BF16:
        for k in range(count):
            out[k] = np.int64(load16(address + k * stride)) << 16
    elif kind == F16:
        for k in range(count):
            out[k] = half_to_single(np.int64(load16(address + k * stride)))
    elif kind == F32:
        for k in range(count):
            out[k] = load32(address + k * stride)
    else:
        values = out.view(np.float32)
        for k in range(count):
            values[k] = np.float32(load_double(address + k * stride))


@kernel
def narrow(kind: int, bits: Bits, address: int, stride: int, count: int) -> None:
    """Write ``count`` F32 bit patterns as floats of one kind, ``stride`` bytes apart."""
    if kind == BF16 and stride == 2:
        words = words16(address, count)
        for k in range(count):
            words[k] = single_to_brain(np.int64(bits[k]))
    elif kind == BF16:
        for k in range(count):
            store16(address + k * stride, np.uint16(single_to_brain(np.int64(bits[k]))))
    elif kind == F16:
        for k in range(count):
            store16(address + k * stride, np.uint16(single_to_half(np.int64(bits[k]))))
    elif kind == F32 and stride == 4:
        wide = words32(address, count)
        for k in range(count):
            wide[k] = bits[k]
    elif kind == F32:
        for k in range(count):
            store32(address + k * stride, bits[k])
    else:
        values = bits.view(np.float32)
        for k in range(count):
            store_double(address + k * stride, np.float64(values[k]))
