# numba types these functions, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, arg-type, call-arg"
"""Several elements at once: streaming stores, transposes of small tiles.

As in `transfer_exec.kernels._memory`, every function has a slow meaning used when numba is switched off, and LLVM
vector instructions behind it otherwise, which every processor has in some width. A *streamed* store goes to memory
without its cache line being read before; ``fence`` makes streamed bytes visible to other threads before anything that
is stored after it.

A *unit* is an empty array whose dtype says what elements are, so that one kernel is compiled once per element.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from transfer_exec.kernels._memory import Word, copy_bytes

Unit = npt.NDArray[np.generic]
"""An empty array that stands for a kind of element."""

_WORD = ir.IntType(64)
_LANE_BYTES = 16


def copy1(target: int, source: int) -> None:
    """Copy 1 bytes at any addresses."""
    copy_bytes(target, source, 1)


def copy2(target: int, source: int) -> None:
    """Copy 2 bytes at any addresses."""
    copy_bytes(target, source, 2)


def copy4(target: int, source: int) -> None:
    """Copy 4 bytes at any addresses."""
    copy_bytes(target, source, 4)


def copy8(target: int, source: int) -> None:
    """Copy 8 bytes at any addresses."""
    copy_bytes(target, source, 8)


def copy16(target: int, source: int) -> None:
    """Copy 16 bytes at any addresses."""
    copy_bytes(target, source, 16)


def copy32(target: int, source: int) -> None:
    """Copy 32 bytes at any addresses."""
    copy_bytes(target, source, 32)


def stream32(target: int, source: int) -> None:
    """Copy 32 bytes; the target is a multiple of 32 and its cache line is not kept."""
    copy_bytes(target, source, 32)


def fence() -> None:
    """Everything stored before is visible before anything stored after."""


def cross(unit: Unit, source: int, step: int, target: int, pitch: int) -> None:
    """Transpose a tile: ``2 * n`` rows of 16 bytes, ``step`` apart, to ``n`` rows of 32 bytes, ``pitch`` apart.

    ``n`` is the number of elements in 16 bytes.
    """
    item = unit.dtype.itemsize
    for column in range(_LANE_BYTES // item):
        for row in range(2 * _LANE_BYTES // item):
            copy_bytes(target + column * pitch + row * item, source + row * step + column * item, item)


def load(unit: Unit, address: int) -> Word:
    """The element at an address, as an unsigned integer."""
    raw = ctypes.string_at(int(address), unit.dtype.itemsize)
    return int.from_bytes(raw, "little")


def store(unit: Unit, address: int, value: Word) -> None:
    """Store an element."""
    ctypes.memmove(int(address), int(value).to_bytes(unit.dtype.itemsize, "little"), unit.dtype.itemsize)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _stream(builder, value, place, align):
    builder.store(value, place, align=align).set_metadata(
        "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    )


def _block_copier(size, *, streams=False):
    vector = ir.IntType(size * 8) if size <= 8 else ir.VectorType(_WORD, size // 8)

    @intrinsic
    def copy(typing_context, target, source):
        def build(context, builder, signature, arguments):
            value = builder.load(_pointer(builder, arguments[1], vector), align=1)
            place = _pointer(builder, arguments[0], vector)
            if streams:
                _stream(builder, value, place, size)
            else:
                builder.store(value, place, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), build

    return copy


_stream32 = _block_copier(32, streams=True)


@intrinsic
def _fence(typing_context):
    def build(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _cross(typing_context, unit, source, step, target, pitch):
    """Interleave halves of rows ``log2(n)`` times, both 16-byte lanes of a 32-byte vector at once."""
    element = ir.IntType(unit.dtype.bitwidth)
    lanes = _LANE_BYTES * 8 // unit.dtype.bitwidth
    lane, vector = ir.VectorType(element, lanes), ir.VectorType(element, 2 * lanes)

    def shuffle(builder, left, right, order):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
        return builder.shuffle_vector(left, right, mask)

    def halves(offset):
        places = [half * lanes + offset + k for half in range(2) for k in range(lanes // 2)]
        return [place for pair in ((p, p + 2 * lanes) for p in places) for place in pair]

    def build(context, builder, signature, arguments):
        _, from_, apart, to, pitch_ = arguments

        def row(number):
            address = builder.add(from_, builder.mul(apart, _WORD(number)))
            return builder.load(_pointer(builder, address, lane), align=1)

        rows = [shuffle(builder, row(k), row(k + lanes), list(range(2 * lanes))) for k in range(lanes)]
        stages = lanes.bit_length() - 1
        for _ in range(stages):
            rows = [
                shuffle(builder, rows[k], rows[k + lanes // 2], halves(offset))
                for k in range(lanes // 2)
                for offset in (0, lanes // 2)
            ]
        for number, value in enumerate(rows):
            address = builder.add(to, builder.mul(pitch_, _WORD(number)))
            builder.store(value, _pointer(builder, address, vector), align=1)
        return context.get_dummy_value()

    return types.void(unit, types.int64, types.int64, types.int64, types.int64), build


@intrinsic
def _load(typing_context, unit, address):
    kind = ir.IntType(unit.dtype.bitwidth)

    def build(context, builder, signature, arguments):
        return builder.load(_pointer(builder, arguments[1], kind), align=1)

    return unit.dtype(unit, types.int64), build


@intrinsic
def _store(typing_context, unit, address, value):
    kind = ir.IntType(unit.dtype.bitwidth)

    def build(context, builder, signature, arguments):
        builder.store(arguments[2], _pointer(builder, arguments[1], kind), align=1)
        return context.get_dummy_value()

    return types.void(unit, types.int64, unit.dtype), build


def _compile_copy(meaning: Callable[[int, int], None], size: int) -> None:
    instruction = _block_copier(size)

    @overload(meaning)
    def compiled(target, source):
        return lambda target, source: instruction(target, source)


_compile_copy(copy1, 1)
_compile_copy(copy2, 2)
_compile_copy(copy4, 4)
_compile_copy(copy8, 8)
_compile_copy(copy16, 16)
_compile_copy(copy32, 32)


@overload(stream32)
def _compiled_stream32(target, source):
    return lambda target, source: _stream32(target, source)


@overload(fence)
def _compiled_fence():
    return lambda: _fence()


@overload(cross)
def _compiled_cross(unit, source, step, target, pitch):
    return lambda unit, source, step, target, pitch: _cross(unit, source, step, target, pitch)


@overload(load)
def _compiled_load(unit, address):
    return lambda unit, address: _load(unit, address)


@overload(store)
def _compiled_store(unit, address, value):
    return lambda unit, address, value: _store(unit, address, value)
