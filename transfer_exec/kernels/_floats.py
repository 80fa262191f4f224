# numba types these functions, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, arg-type"
"""Elements on their way from one dtype to another: one at a time, or sixteen in vector registers.

Units (`transfer_exec.kernels._vectors`) name the two dtypes: equal ones mean a copy of bits, and otherwise U16 stands
for BF16, I16 for F16, U32 for F32 and U64 for F64. Wide floats meet in F32 bits: F32 holds every BF16 and F16 exactly,
and torch rounds F64 to the 16-bit floats by way of F32. Narrowing rounds to nearest even; a NaN keeps its sign and
first bits, and turns quiet if those are all zero, or if there is an F16 or F64 on its way. The functions at the top say
what is meant and run when numba is switched off; the vector code below them does the same without branches.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from transfer_exec.kernels._vectors import Unit, load, store

BRAIN, HALF, SINGLE, DOUBLE = (np.dtype(name) for name in ("u2", "i2", "u4", "u8"))
"""Units' dtypes that stand for BF16, F16, F32 and F64."""

TOGETHER = 16
"""Elements that `move_block` moves."""


def move(to: Unit, target: int, of: Unit, source: int) -> None:
    """Move one element, converted from the unit ``of`` to the unit ``to``."""
    bits = int(load(of, source))
    store(to, target, bits if of.dtype == to.dtype else _narrow(to.dtype, _widen(of.dtype, bits)))


def move_block(to: Unit, target: int, of: Unit, source: int) -> None:
    """Move `TOGETHER` neighbours to neighbours."""
    for k in range(TOGETHER):
        move(to, target + k * to.itemsize, of, source + k * of.itemsize)


def stream_block(to: Unit, target: int, of: Unit, source: int) -> None:
    """Move `TOGETHER` neighbours to neighbours, streamed; the target is a multiple of 32."""
    move_block(to, target, of, source)


def _widen(kind: np.dtype[np.generic], bits: int) -> int:
    """F32 bits of a float's bits."""
    if kind == BRAIN:
        return bits << 16
    if kind == HALF:
        return _half_to_single(bits)
    if kind == SINGLE:
        return bits
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return int(np.uint64(bits).view(np.float64).astype(np.float32).view(np.uint32))


def _narrow(kind: np.dtype[np.generic], bits: int) -> int:
    """A float's bits of F32 bits."""
    if kind == BRAIN:
        if bits & 0x7FFFFFFF > 0x7F800000:
            return bits >> 16 | (0 if bits >> 16 & 0x7F else 0x40)
        return bits + 0x7FFF + (bits >> 16 & 1) >> 16
    if kind == HALF:
        return _single_to_half(bits)
    if kind == SINGLE:
        return bits
    return int(np.uint32(bits).view(np.float32).astype(np.float64).view(np.uint64))


def _half_to_single(half: int) -> int:
    sign, rest, mantissa = (half & 0x8000) << 16, half & 0x7FFF, half & 0x3FF
    if rest >= 0x7C00:
        return sign | 0x7F800000 | mantissa << 13 | (0x400000 if mantissa else 0)
    if rest >= 0x400:
        return sign | (rest << 13) + 0x38000000
    # Below the smallest normal number: a whole number of 2**-24.
    return sign | int((np.float32(mantissa) * np.float32(2.0**-24)).view(np.uint32))


def _single_to_half(single: int) -> int:
    sign, rest = single >> 16 & 0x8000, single & 0x7FFFFFFF
    if rest > 0x7F800000:
        return sign | 0x7E00 | rest >> 13 & 0x3FF
    if rest >= 0x477FF000:
        return sign | 0x7C00
    if rest >= 0x38800000:
        return sign | (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13
    # Subnormal results are whole numbers of 2**-24; rint rounds to even.
    return sign | int(np.rint(np.uint32(rest).view(np.float32).astype(np.float64) * 2.0**24))


class _Lanes:
    """Builds one instruction at a time for a number of lanes."""

    def __init__(self, builder, lanes, halves):
        self._builder, self._lanes, self._halves = builder, lanes, halves
        self.word, self.single, self.double = (
            self.of(kind) for kind in (ir.IntType(32), ir.FloatType(), ir.DoubleType())
        )

    def of(self, element):
        return element if self._lanes == 1 else ir.VectorType(element, self._lanes)

    def number(self, value):
        kind = ir.IntType(32)
        return kind(value) if self._lanes == 1 else ir.Constant(self.word, [value] * self._lanes)

    def below(self, left, value):
        return self._builder.icmp_unsigned("<", left, self.number(value))

    def above(self, left, value):
        return self._builder.icmp_unsigned(">", left, self.number(value))

    def widened(self, kind, value):
        b, n = self._builder, self.number
        if kind == 64:
            return b.bitcast(b.fptrunc(b.bitcast(value, self.double), self.single), self.word)
        if kind == 32:
            return value
        wide = b.zext(value, self.word)
        if kind == "brain":
            return b.shl(wide, n(16))
        if self._halves:
            return b.bitcast(b.fpext(b.bitcast(value, self.of(ir.HalfType())), self.single), self.word)
        rest = b.shl(b.and_(wide, n(0x7FFF)), n(13))
        normal = b.add(rest, n(0x38000000))
        # An implicit one is added below the smallest normal number, and taken away again by a subtraction of floats.
        shifted = b.bitcast(b.add(normal, n(0x800000)), self.single)
        tiny = b.bitcast(b.fsub(shifted, b.bitcast(n(0x38800000), self.single)), self.word)
        huge = b.add(rest, n(0x70000000))
        huge = b.select(self.above(rest, 0x0F800000), b.or_(huge, n(0x400000)), huge)
        out = b.select(self.below(rest, 0x00800000), tiny, b.select(self.below(rest, 0x0F800000), normal, huge))
        return b.or_(out, b.shl(b.and_(wide, n(0x8000)), n(16)))

    def narrowed(self, kind, bits):
        b, n = self._builder, self.number
        if kind == 64:
            wide = b.fpext(b.bitcast(bits, self.single), self.double)
            return b.bitcast(wide, self.of(ir.IntType(64)))
        if kind == 32:
            return bits
        rest = b.and_(bits, n(0x7FFFFFFF))
        is_nan = self.above(rest, 0x7F800000)
        if kind == "brain":
            odd = b.and_(b.lshr(bits, n(16)), n(1))
            rounded = b.lshr(b.add(b.add(bits, n(0x7FFF)), odd), n(16))
            kept = b.lshr(bits, n(16))
            kept = b.select(self.above(b.and_(kept, n(0x7F)), 0), kept, b.or_(kept, n(0x40)))
            out = b.select(is_nan, kept, rounded)
            return b.trunc(out, self.of(ir.IntType(16)))
        if self._halves:
            made = b.fptrunc(b.bitcast(bits, self.single), self.of(ir.HalfType()))
            return b.bitcast(made, self.of(ir.IntType(16)))
        odd = b.and_(b.lshr(rest, n(13)), n(1))
        normal = b.lshr(b.add(b.add(rest, n(0xC8000FFF)), odd), n(13))
        # Adding 0.5 shifts a subnormal result's bits to the end of the mantissa, rounded by the addition.
        half = n(0x3F000000)
        sum_ = b.fadd(b.bitcast(rest, self.single), b.bitcast(half, self.single))
        tiny = b.sub(b.bitcast(sum_, self.word), half)
        nan = b.or_(n(0x7E00), b.and_(b.lshr(rest, n(13)), n(0x3FF)))
        huge = b.select(is_nan, nan, n(0x7C00))
        out = b.select(self.below(rest, 0x38800000), tiny, b.select(self.below(rest, 0x477FF000), normal, huge))
        out = b.or_(out, b.and_(b.lshr(bits, n(16)), n(0x8000)))
        return b.trunc(out, self.of(ir.IntType(16)))


def _kind(unit):
    if unit.dtype.bitwidth == 16:
        return "half" if unit.dtype.signed else "brain"
    return unit.dtype.bitwidth


def _mover(lanes, *, streams=False):
    @intrinsic
    def moves(typing_context, to, target, of, source):
        def build(context, builder, signature, arguments):
            # The processor that is compiled for may convert F16 itself.
            make = _Lanes(builder, lanes, "+f16c" in context.codegen().magic_tuple()[2])
            given, made = (make.of(ir.IntType(unit.dtype.bitwidth)) for unit in (of, to))
            value = builder.load(builder.inttoptr(arguments[3], given.as_pointer()), align=1)
            if of.dtype != to.dtype:
                value = make.narrowed(_kind(to), make.widened(_kind(of), value))
            place = builder.inttoptr(arguments[1], made.as_pointer())
            stored = builder.store(value, place, align=32 if streams else 1)
            if streams:
                one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                stored.set_metadata("nontemporal", one)
            return context.get_dummy_value()

        return types.void(to, types.int64, of, types.int64), build

    return moves


_move, _move_block, _stream_block = _mover(1), _mover(TOGETHER), _mover(TOGETHER, streams=True)


@overload(move)
def _compiled_move(to, target, of, source):
    return lambda to, target, of, source: _move(to, target, of, source)


@overload(move_block)
def _compiled_move_block(to, target, of, source):
    return lambda to, target, of, source: _move_block(to, target, of, source)


@overload(stream_block)
def _compiled_stream_block(to, target, of, source):
    return lambda to, target, of, source: _stream_block(to, target, of, source)
