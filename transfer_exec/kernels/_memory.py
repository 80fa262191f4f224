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
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Word: TypeAlias = int | np.int64 | np.uint64 | np.uint32 | np.uint16 | np.uint8
"""An integer, compiled or interpreted."""


def copy_bytes(target: Word, source: Word, size: Word) -> None:
    """Copy ``size`` bytes; the two ranges do not overlap."""
    ctypes.memmove(int(target), int(source), int(size))


def words16(address: int, count: int) -> npt.NDArray[np.uint16]:
    """``count`` 16-bit words as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint16 * int(count)).from_address(int(address)))


def words32(address: int, count: int) -> npt.NDArray[np.uint32]:
    """``count`` 32-bit words as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * int(count)).from_address(int(address)))


def load8(address: int) -> int:
    """The byte at an address."""
    return ctypes.c_uint8.from_address(int(address)).value


def load16(address: int) -> int:
    """The 16-bit word at an address."""
    return ctypes.c_uint16.from_address(int(address)).value


def load32(address: int) -> int:
    """The 32-bit word at an address."""
    return ctypes.c_uint32.from_address(int(address)).value


def load64(address: int) -> int:
    """The 64-bit word at an address."""
    return ctypes.c_uint64.from_address(int(address)).value


def load_double(address: int) -> float:
    """The F64 at an address."""
    return ctypes.c_double.from_address(int(address)).value


def store8(address: int, value: Word) -> None:
    """Store a byte."""
    ctypes.c_uint8.from_address(int(address)).value = int(value)


def store16(address: int, value: Word) -> None:
    """Store a 16-bit word."""
    ctypes.c_uint16.from_address(int(address)).value = int(value)


def store32(address: int, value: Word) -> None:
    """Store a 32-bit word."""
    ctypes.c_uint32.from_address(int(address)).value = int(value)


def store64(address: int, value: Word) -> None:
    """Store a 64-bit word."""
    ctypes.c_uint64.from_address(int(address)).value = int(value)


def store_double(address: int, value: float) -> None:
    """Store an F64."""
    ctypes.c_double.from_address(int(address)).value = float(value)


def publish(address: int, value: Word) -> None:
    """Store a 64-bit word at an aligned address, after everything stored before."""
    ctypes.c_uint64.from_address(int(address)).value = int(value)


def observe(address: int) -> int:
    """Load a 64-bit word from an aligned address, before everything loaded after."""
    return ctypes.c_uint64.from_address(int(address)).value


@intrinsic
def _pointer(typing_context, address):
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@intrinsic
def _copy(typing_context, target, source, size):
    def build(context, builder, signature, arguments):
        to, start, count = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, cgutils.voidptr_t), builder.inttoptr(start, cgutils.voidptr_t), count, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


def _loader(result, bits, *, order=""):
    llvm = ir.DoubleType() if result == types.float64 else ir.IntType(bits)

    @intrinsic
    def load(typing_context, address):
        def build(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], llvm.as_pointer())
            if order:
                return builder.load_atomic(place, order, bits // 8)
            return builder.load(place, align=bits // 8)

        return result(types.int64), build

    return load


def _storer(value, bits, *, order=""):
    llvm = ir.DoubleType() if value == types.float64 else ir.IntType(bits)

    @intrinsic
    def store(typing_context, address, given):
        def build(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], llvm.as_pointer())
            if order:
                builder.store_atomic(arguments[1], place, order, bits // 8)
            else:
                builder.store(arguments[1], place, align=bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, value), build

    return store


_load8, _load16, _load32, _load64 = (
    _loader(word, bits) for word, bits in ((types.uint8, 8), (types.uint16, 16), (types.uint32, 32), (types.uint64, 64))
)
_store8, _store16, _store32, _store64 = (
    _storer(word, bits) for word, bits in ((types.uint8, 8), (types.uint16, 16), (types.uint32, 32), (types.uint64, 64))
)
_load_double, _store_double = _loader(types.float64, 64), _storer(types.float64, 64)
_observe, _publish = _loader(types.uint64, 64, order="acquire"), _storer(types.uint64, 64, order="release")


@overload(copy_bytes)
def _compiled_copy(target, source, size):
    return lambda target, source, size: _copy(target, source, size)


@overload(words16)
def _compiled_words16(address, count):
    return lambda address, count: carray(_pointer(address), count, np.uint16)


@overload(words32)
def _compiled_words32(address, count):
    return lambda address, count: carray(_pointer(address), count, np.uint32)


def _compile_load(meaning: Callable[[int], object], instruction) -> None:
    @overload(meaning)
    def compiled(address):
        return lambda address: instruction(address)


def _compile_store(meaning: Callable[..., None], instruction) -> None:
    @overload(meaning)
    def compiled(address, value):
        return lambda address, value: instruction(address, value)


_compile_load(load8, _load8)
_compile_load(load16, _load16)
_compile_load(load32, _load32)
_compile_load(load64, _load64)
_compile_load(load_double, _load_double)
_compile_load(observe, _observe)
_compile_store(store8, _store8)
_compile_store(store16, _store16)
_compile_store(store32, _store32)
_compile_store(store64, _store64)
_compile_store(store_double, _store_double)
_compile_store(publish, _publish)
