"""Which conversions exist, by number: the vocabulary between gather tables and kernels.

Codes 0..3 copy the bits of elements of 1, 2, 4 and 8 bytes. Every other code turns one wide float into another:
widening is exact, narrowing rounds to nearest even, a NaN stays a NaN of the same sign. F64 goes to F16 and BF16
through F32, as torch does.
"""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from transfer_exec.errors import ProgramError

COPY_WIDTHS = (1, 2, 4, 8)
"""Bytes of one element under codes 0, 1, 2 and 3."""

_FLOATS = ("BF16", "F16", "F32", "F64")
PAIRS: tuple[tuple[str, str], ...] = tuple((a, b) for a in _FLOATS for b in _FLOATS if a != b)
"""Source and target of codes 4, 5, ...."""

CODES = len(COPY_WIDTHS) + len(PAIRS)
"""Number of codes."""


def code_of(source: str, target: str) -> int:
    """Number of the conversion from one dtype to another, both in safetensors spelling.

    Raises
    ------
    ProgramError
        If there is none.
    """
    if source == target:
        return COPY_WIDTHS.index(dtype_of(source).item_bytes)
    if (source, target) in PAIRS:
        return len(COPY_WIDTHS) + PAIRS.index((source, target))
    raise ProgramError(f"no conversion from {source} to {target} is defined")


def _widths(side: int) -> IdArray:
    floats = [dtype_of(pair[side]).item_bytes for pair in PAIRS]
    widths = np.array([*COPY_WIDTHS, *floats], dtype=np.int64)
    widths.setflags(write=False)
    return widths


SOURCE_BYTES: IdArray = _widths(0)
"""Bytes of a source element, by code."""

TARGET_BYTES: IdArray = _widths(1)
"""Bytes of a target element, by code."""
