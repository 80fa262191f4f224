"""Element ids as small exact floats: codebooks, coprime moduli, and the way back.

One probe pass feeds element ``id`` the number ``code[(multiplier * id) mod modulus]``. A codebook is a list of
distinct positive numbers that are exact in every dtype of the checkpoint, so a residue can be read off the bits of
whatever element it was copied to. Several passes with coprime moduli name one id:

>>> passes = plan_passes(FLOAT_CODES, 10**9)
>>> [(p.modulus, p.multiplier) for p in passes]
[(1919, 1), (1917, 1916), (1915, 728)]
>>> int(join([np.array([123456789 % p.modulus]) for p in passes], passes)[0])
123456789

The orders differ (ascending, descending, scrambled), so that a max, min or clamp over several elements picks
another one in each pass. All of them are linear in the id, so second differences vanish alike in every pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra._scan_kernels import decode, look_up
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import ProbeError, SpaceError, UnsupportedDtypeError
from layout_algebra.space import CheckpointSpace

MIN_PASSES = 3
MAX_PRODUCT = 1 << 61
"""Bound on the product of the moduli, so that sums of two residues of it stay inside int64."""
_SCRAMBLE = 0.38
_NO_CODE = 0xFFFF
_MOST_PATTERNS = 0xFFFF


@dataclass(frozen=True, slots=True)
class Pass:
    """One probe pass: element ``id`` is fed code number ``(multiplier * id) mod modulus``.

    Attributes
    ----------
    modulus
        Odd, coprime to those of the other passes; the first ``modulus`` codes of the codebook are used.
    multiplier
        A unit: 1 ascending, ``modulus - 1`` descending, another one scrambled.
    """

    modulus: int
    multiplier: int

    @property
    def inverse(self) -> int:
        """``multiplier * inverse == 1 (mod modulus)``: turns code numbers back into ids mod modulus."""
        return pow(self.multiplier, -1, self.modulus)

    def order(self) -> IdArray:
        """Code number of every id mod modulus; int64, shape ``(modulus,)``."""
        return np.arange(self.modulus, dtype=np.int64) * self.multiplier % self.modulus


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """How to read a code number off the bits of one element.

    ``pattern = (bits >> shift) - base``; it stands for a code if the low ``shift`` bits are zero and the pattern is in
    range. Where consecutive codes are consecutive patterns, the pattern is the code's number; else a table says it.

    Attributes
    ----------
    storage
        Unsigned numpy type of the element's width.
    shift, base
        See above.
    numbers
        Code number by pattern, uint16, 65535 for none; or None where the pattern is the number.
    """

    storage: np.dtype[np.generic]
    shift: int
    base: int
    numbers: npt.NDArray[np.uint16] | None = None

    @property
    def plain(self) -> bool:
        """Whether 16-bit elements are code numbers themselves, plus a base."""
        return self.shift == 0 and self.storage.itemsize == 2 and self.numbers is None

    def read(self, bits: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.uint16]:
        """Code numbers of some elements of ``storage``; 65535 where there is no code."""
        out = np.empty(len(bits), dtype=np.uint16)
        decode(bits, self.base << self.shift, self.shift, out)
        if self.numbers is not None:
            look_up(out, self.numbers)
        return out


@dataclass(frozen=True, slots=True)
class Codebook:
    """Distinct positive numbers, ascending; a code's number is its place among them.

    Attributes
    ----------
    name
        For messages.
    values
        The numbers.
    """

    name: str
    values: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of codes."""
        return len(self.values)

    def is_exact_in(self, dtype: str) -> bool:
        """Whether a dtype holds every code exactly."""
        return bool(exact_bits(np.array(self.values), dtype)[1].all())

    def within(self, dtypes: Iterable[str]) -> Codebook:
        """The codes that are exact in every one of some dtypes."""
        values = np.array(self.values)
        exact = np.ones(len(values), dtype=np.bool_)
        for dtype in dtypes:
            exact &= exact_bits(values, dtype)[1]
        return self if exact.all() else Codebook(self.name, tuple(values[exact].tolist()))

    def decoding(self, dtype: str) -> Decoding | None:
        """How codes look in a parameter of some dtype; None if that dtype cannot hold them."""
        return decoding_of(self.bits(dtype)) if self.is_exact_in(dtype) else None

    def bits(self, dtype: str, count: int | None = None) -> npt.NDArray[np.unsignedinteger]:
        """The first ``count`` codes (all of them by default) as bits of some dtype.

        Returns
        -------
        ndarray
            Unsigned integers of the dtype's width, ascending; shape ``(count,)``.

        Raises
        ------
        UnsupportedDtypeError
            If the dtype cannot hold them exactly.
        """
        bits, exact = exact_bits(np.array(self.values), dtype)
        if not exact.all():
            raise UnsupportedDtypeError(f"{self.name} codes are not exact in {dtype}")
        return bits[:count]

    def table(self, dtype: str, of_pass: Pass) -> npt.NDArray[np.unsignedinteger]:
        """What a pass feeds, as bits: entry ``i`` is the code of every id that is ``i`` mod modulus."""
        return self.bits(dtype, of_pass.modulus)[of_pass.order()]


_FLOATS = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}
"""Exponent and stored mantissa bits of the dtypes of floating-point numbers."""


def holds_codes(dtype: str) -> bool:
    """Whether checkpoint tensors of a dtype can be fed codes: floats of 8 bits and more with a mantissa, integers."""
    return dtype in _FLOATS or dtype_of(dtype).kind in ("int", "uint")


def coded_dtypes(space: CheckpointSpace) -> list[str]:
    """The dtypes of a checkpoint that can be fed codes and have elements, sorted."""
    return sorted(dtype for dtype in {spec.dtype for spec in space.specs if 0 not in spec.shape} if holds_codes(dtype))


def exact_bits(
    values: npt.NDArray[np.float64], dtype: str
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.bool_]]:
    """Positive numbers as bits of a dtype, and which of them it holds exactly; the bits of the others mean nothing.

    >>> bits, exact = exact_bits(np.array([1.0, 17.0, 448.0, 2.0**-9]), "F8_E4M3")
    >>> [hex(one) for one in bits.tolist()], exact.tolist()
    (['0x38', '0x58', '0x7e', '0x1'], [True, False, True, True])
    """
    kind = dtype_of(dtype)
    if dtype in _FLOATS:
        exponent_bits, mantissa_bits = _FLOATS[dtype]
        bias = (1 << (exponent_bits - 1)) - 1
        exponent = np.maximum(np.frexp(values)[1].astype(np.int64) - 1, 1 - bias)
        scaled = np.ldexp(values, mantissa_bits - exponent)
        mantissa = scaled.astype(np.int64)
        normal = mantissa >= 1 << mantissa_bits
        field = np.where(normal, exponent + bias, 0)
        bits = (field << mantissa_bits) | mantissa & ((1 << mantissa_bits) - 1)
        # E4M3 spends one pattern of its highest exponent on NaN, the others the whole exponent.
        top = 0x7E if dtype == "F8_E4M3" else (((1 << exponent_bits) - 1) << mantissa_bits) - 1
        exact = (mantissa == scaled) & (bits <= top)
    elif kind.kind in ("int", "uint"):
        top = (1 << (kind.bits - (kind.kind == "int"))) - 1
        bits = np.minimum(values, 2.0**62).astype(np.int64)
        exact = (bits == values) & (bits <= top)
    else:
        return np.zeros(len(values), dtype=np.uint8), np.zeros(len(values), dtype=np.bool_)
    return bits.astype(f"u{kind.item_bytes}"), exact


def decoding_of(bits: npt.NDArray[np.unsignedinteger]) -> Decoding:
    """How to read off a code's number where code number i shows as ``bits[i]``, all different.

    Raises
    ------
    ProbeError
        If the bits span more patterns than a table has room for.
    """
    every = int(np.bitwise_or.reduce(bits, initial=0))
    shift = (every & -every).bit_length() - 1 if every else 0
    patterns = bits.astype(np.uint64) >> np.uint64(shift)
    base = int(patterns.min()) if len(patterns) else 0
    if np.array_equal(patterns, np.arange(base, base + len(patterns), dtype=np.uint64)):
        return Decoding(bits.dtype, shift, base)
    size = int(patterns.max()) - base + 1
    if size > _MOST_PATTERNS:
        raise ProbeError(f"codes span {size:,} patterns; a table has room for {_MOST_PATTERNS:,}")
    numbers = np.full(size, _NO_CODE, dtype=np.uint16)
    numbers[(patterns - np.uint64(base)).astype(np.int64)] = np.arange(len(patterns))
    return Decoding(bits.dtype, shift, base, numbers)


def _brain_floats(low_exponent: int, high_exponent: int) -> tuple[float, ...]:
    """All numbers with seven mantissa bits in a range of exponents."""
    mantissas = 1 + np.arange(128) / 128
    return tuple(np.concatenate([np.ldexp(mantissas, e) for e in range(low_exponent, high_exponent + 1)]).tolist())


def _small_floats(exponent_bits: int, mantissa_bits: int, count: int) -> tuple[float, ...]:
    """The ``count`` smallest positive numbers of a format."""
    patterns = np.arange(1, count + 1)
    field, mantissa = patterns >> mantissa_bits, patterns & ((1 << mantissa_bits) - 1)
    whole = np.where(field > 0, mantissa + (1 << mantissa_bits), mantissa)
    bias = (1 << (exponent_bits - 1)) - 1
    return tuple(np.ldexp(whole.astype(np.float64), np.maximum(field, 1) - bias - mantissa_bits).tolist())


FLOAT_CODES = Codebook("float", _brain_floats(-7, 7))
"""1,920 numbers from 2**-7 up to just under 2**8, exact in every float of 16 bits and more."""

INTEGER_CODES = Codebook("integer", _brain_floats(7, 14))
"""1,024 integers from 128 to 32,640, exact in integers of 16 bits and more too."""

_SCALES = (
    FLOAT_CODES,
    INTEGER_CODES,
    Codebook("float8 E4M3", _small_floats(4, 3, 126)),
    Codebook("float8 E5M2", _small_floats(5, 2, 123)),
    Codebook("byte", tuple(float(number) for number in range(1, 256))),
)


def choose_codebook(space: CheckpointSpace) -> Codebook:
    """The richest codebook whose numbers are exact in every dtype of a checkpoint that can hold any.

    One table serves the whole model. Floats of 16 bits and more have 1,920 codes, with integers of 16 bits and more
    1,024, with E4M3 126, with E5M2 123; bytes 255 or, signed, 127; mixtures what they have in common, such as the 39
    integers that I8 and E4M3 share. Tensors that hold no codes (bools, exponents, parts of a byte) have no say.

    >>> from layout_algebra.space import TensorSpec
    >>> space = CheckpointSpace([TensorSpec("w", (4, 4), "F8_E4M3"), TensorSpec("map", (4,), "I8")])
    >>> chosen = choose_codebook(space)
    >>> chosen.name, [int(value) for value in chosen.values[14:20]], chosen.count
    ('F8_E4M3 and I8', [15, 16, 18, 20, 22, 24], 39)
    """
    used = coded_dtypes(space)
    best = max((scale.within(used) for scale in _SCALES), key=lambda codebook: codebook.count)
    if best in _SCALES:
        return best
    return Codebook(" and ".join(used), best.values)


def plan_passes(codebook: Codebook, total_elements: int) -> tuple[Pass, ...]:
    """The fewest passes, at least three, whose residues name an id in ``0..N`` and any difference of two.

    Moduli are the largest odd, pairwise coprime ones the codebook has codes for; their product exceeds
    ``2 * total_elements``. The first pass ascends, the second descends, the others are scrambled.

    Raises
    ------
    SpaceError
        If the codebook is too small for that many elements.
    """
    moduli: list[int] = []
    candidate = codebook.count if codebook.count % 2 else codebook.count - 1
    while len(moduli) < MIN_PASSES or math.prod(moduli) <= 2 * total_elements:
        while candidate > 2 and any(math.gcd(candidate, modulus) > 1 for modulus in moduli):
            candidate -= 2
        if candidate <= 2 or math.prod(moduli) * candidate >= MAX_PRODUCT:
            raise SpaceError(
                f"{codebook.name} codes cannot number {total_elements:,} elements: there are {codebook.count} numbers "
                "that are exact in all of the checkpoint's dtypes. Leave the tensors of the narrowest dtype out of the "
                "checkpoint space, or describe the worker with SourceMap.from_ids"
            )
        moduli.append(candidate)
        candidate -= 2
    return tuple(Pass(modulus, _multiplier(modulus, index)) for index, modulus in enumerate(moduli))


def join(residues: Sequence[npt.NDArray[np.integer]], passes: Sequence[Pass]) -> IdArray:
    """The numbers in ``0 .. product - 1`` with given residues: mixed radix, one digit a pass.

    Parameters
    ----------
    residues
        One integer array a pass, all of one shape, values in ``0 .. modulus - 1`` (multipliers already undone).
    passes
        With pairwise coprime moduli.

    Returns
    -------
    ndarray
        int64, of that shape.
    """
    total = np.asarray(residues[0]).astype(np.int64)
    radix = passes[0].modulus
    for given, one in zip(residues[1:], passes[1:], strict=True):
        modulus = one.modulus
        digit = (given.astype(np.int64) - total % modulus) % modulus * pow(radix, -1, modulus) % modulus
        total = total + radix * digit
        radix *= modulus
    return total


def product_of(passes: Sequence[Pass]) -> int:
    """Product of the moduli: everything is known modulo it.

    Raises
    ------
    ProbeError
        If moduli share a factor, or the product does not fit.
    """
    moduli = [one.modulus for one in passes]
    if not moduli or math.lcm(*moduli) != math.prod(moduli) or math.prod(moduli) >= MAX_PRODUCT:
        raise ProbeError(f"moduli {moduli}: expected pairwise coprime ones with a product under 2**61")
    return math.prod(moduli)


def _multiplier(modulus: int, index: int) -> int:
    if index == 0:
        return 1
    if index == 1:
        return modulus - 1
    unit = round(_SCRAMBLE * modulus)
    while math.gcd(unit, modulus) > 1:
        unit += 1
    return unit
