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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import ProbeError, SpaceError, UnsupportedDtypeError
from layout_algebra.space import CheckpointSpace

MIN_PASSES = 3
MAX_PRODUCT = 1 << 61
"""Bound on the product of the moduli, so that sums of two residues of it stay inside int64."""
_SCRAMBLE = 0.38


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


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to read a code number off the bits of one element.

    ``number = (bits >> shift) - base``; it is a code of a pass if the low ``shift`` bits are zero and
    ``0 <= number < modulus``.

    Attributes
    ----------
    storage
        Unsigned numpy type of the element's width.
    shift, base
        See above.
    """

    storage: np.dtype[np.generic]
    shift: int
    base: int


@dataclass(frozen=True, slots=True)
class Codebook:
    """Consecutive bfloat16 bit patterns: all numbers with seven mantissa bits in a range of exponents.

    Attributes
    ----------
    name
        For messages.
    low_exponent, high_exponent
        Inclusive range of the exponents.
    checkpoint_dtypes
        Safetensors names of the dtypes that hold every code exactly.
    """

    name: str
    low_exponent: int
    high_exponent: int
    checkpoint_dtypes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of codes."""
        return (self.high_exponent - self.low_exponent + 1) << 7

    def decoding(self, dtype: str) -> Decoding | None:
        """How codes look in a parameter of some dtype; None if that dtype cannot hold them."""
        layout = _FLOATS.get(dtype)
        if layout is None:
            return None
        bias, mantissa_bits = layout
        storage = np.dtype(f"uint{dtype_of(dtype).bits}")
        return Decoding(storage, mantissa_bits - 7, (bias + self.low_exponent) << 7)

    def bits(self, dtype: str, count: int | None = None) -> npt.NDArray[np.generic]:
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
        decoding = self.decoding(dtype)
        if decoding is None:
            raise UnsupportedDtypeError(f"{self.name} codes are not exact in {dtype}; expected one of {tuple(_FLOATS)}")
        count = self.count if count is None else count
        numbers = np.arange(decoding.base, decoding.base + count, dtype=np.uint64)
        return (numbers << np.uint64(decoding.shift)).astype(decoding.storage)

    def table(self, dtype: str, of_pass: Pass) -> npt.NDArray[np.generic]:
        """What a pass feeds, as bits: entry ``i`` is the code of every id that is ``i`` mod modulus."""
        return self.bits(dtype, of_pass.modulus)[of_pass.order()]


_FLOATS = {"F16": (15, 10), "BF16": (127, 7), "F32": (127, 23), "F64": (1023, 52)}
"""Exponent bias and stored mantissa bits of the dtypes that can hold codes."""

FLOAT_CODES = Codebook("float", -7, 7, ("BF16", "F16", "F32"))
"""1,920 numbers from 2**-7 up to just under 2**8, for checkpoints of 16 and 32-bit floats."""

CODEBOOKS = (FLOAT_CODES,)


def choose_codebook(space: CheckpointSpace) -> Codebook:
    """The richest codebook that is exact in every dtype of a checkpoint.

    Raises
    ------
    UnsupportedDtypeError
        If there is none; the message names the first tensor whose dtype is in the way.
    """
    used = {spec.dtype for spec in space.specs if spec.elements}
    for codebook in CODEBOOKS:
        if used <= set(codebook.checkpoint_dtypes):
            return codebook
    known = {dtype for codebook in CODEBOOKS for dtype in codebook.checkpoint_dtypes}
    for spec in space.specs:
        if spec.elements and spec.dtype not in known:
            raise UnsupportedDtypeError(
                f"{spec.name}: dtype {spec.dtype} cannot be probed; expected one of {', '.join(sorted(known))}. "
                "Leave the tensor out of the checkpoint space, or describe the worker with SourceMap.from_ids"
            )
    raise UnsupportedDtypeError(f"no one table of numbers is exact in all of {', '.join(sorted(used))}")


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
            raise SpaceError(f"{codebook.name} codes cannot number {total_elements:,} elements")
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
