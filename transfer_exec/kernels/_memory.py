# numba types these functions, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, call-arg"
"""Memory by address, for compiled loops and for the same loops interpreted.

Every function here has a slow meaning in ctypes, used when numba is switched off, and an LLVM instruction behind it
otherwise. Addresses are int64. ``publish`` stores a 64-bit word after everything that was stored before it
(release), ``observe`` loads one before everything that is loaded after it (acquire): with them one process hands
bytes to another without a lock, on any processor.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Word: TypeAlias = int | np.int64 | np.uint64 | np.uint32 | np.uint16 | np.uint8
"""An integer, compiled or interpreted."""

_WORD = ir.IntType(64)


def copy_bytes(target: Word, source: Word, size: Word) -> None:
    """Copy ``size`` bytes; the two ranges do not overlap."""
    ctypes.memmove(int(target), int(source), int(size))


def publish(address: int, value: Word) -> None:
    """Store a 64-bit word at an aligned address, after everything stored before."""
    ctypes.c_uint64.from_address(int(address)).value = int(value)


def observe(address: int) -> int:
    """Load a 64-bit word from an aligned address, before everything loaded after."""
    return ctypes.c_uint64.from_address(int(address)).value


@intrinsic
def _copy(typing_context, target, source, size):
    def build(context, builder, signature, arguments):
        to, start, count = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, cgutils.voidptr_t), builder.inttoptr(start, cgutils.voidptr_t), count, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic
def _observe(typing_context, address):
    def build(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.uint64(types.int64), build


@intrinsic
def _publish(typing_context, address, value):
    def build(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store_atomic(arguments[1], place, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), build


@overload(copy_bytes)
def _compiled_copy(target, source, size):
    return lambda target, source, size: _copy(target, source, size)


@overload(observe)
def _compiled_observe(address):
    return lambda address: _observe(address)


@overload(publish)
def _compiled_publish(address, value):
    return lambda address, value: _publish(address, value)
