"""Element types in safetensors spelling: width, kind, and the numpy type that carries the bits.

numpy lacks BF16 and the 8-bit floats, so memory of those is an unsigned integer array of the same
width: ``dtype_of("BF16").storage`` is ``uint16``. Sub-byte types have no whole byte to address and
are known by name only, so that a refusal can name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from layout_algebra.errors import UnsupportedDtypeError

IdArray: TypeAlias = npt.NDArray[np.int64]
"""Element ids, flat indices, offsets and counts: always 64 bits."""

Kind = Literal["float", "int", "uint", "bool", "other"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type.

    Attributes
    ----------
    name
        Safetensors spelling, ``"BF16"``.
    bits
        Width of one element.
    kind
        What its values are; ``"other"`` for exponent-only and sub-byte types.
    storage
        numpy type of the same width whose bits carry the element; ``None`` below one byte.
    """

    name: str
    bits: int
    kind: Kind
    storage: np.dtype[np.generic] | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element.

        Raises
        ------
        UnsupportedDtypeError
            For sub-byte types, whose elements no byte address names.
        """
        return storage_of(self.name).itemsize


def _table() -> dict[str, Dtype]:
    rows: list[tuple[str, int, Kind, str | None]] = [
        ("BOOL", 8, "bool", "bool"),
        ("U8", 8, "uint", "uint8"),
        ("I8", 8, "int", "int8"),
        ("F8_E4M3", 8, "float", "uint8"),
        ("F8_E5M2", 8, "float", "uint8"),
        ("F8_E8M0", 8, "other", "uint8"),
        ("U16", 16, "uint", "uint16"),
        ("I16", 16, "int", "int16"),
        ("F16", 16, "float", "float16"),
        ("BF16", 16, "float", "uint16"),
        ("U32", 32, "uint", "uint32"),
        ("I32", 32, "int", "int32"),
        ("F32", 32, "float", "float32"),
        ("U64", 64, "uint", "uint64"),
        ("I64", 64, "int", "int64"),
        ("F64", 64, "float", "float64"),
        ("C64", 64, "other", "complex64"),
        ("F4", 4, "other", None),
        ("F6_E2M3", 6, "other", None),
        ("F6_E3M2", 6, "other", None),
    ]
    return {n: Dtype(n, b, k, None if s is None else np.dtype(s)) for n, b, k, s in rows}


_DTYPES = _table()


def dtype_of(name: str) -> Dtype:
    """Look up a safetensors dtype name.

    Raises
    ------
    UnsupportedDtypeError
        If the name is not one of safetensors' spellings.
    """
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedDtypeError(f"dtype {name!r} is unknown; expected one of {', '.join(_DTYPES)}")
    return found


def storage_of(name: str) -> np.dtype[np.generic]:
    """numpy dtype that carries the bits of a safetensors dtype; UnsupportedDtypeError below one byte."""
    found = dtype_of(name)
    if found.storage is None:
        raise UnsupportedDtypeError(f"dtype {name} has {found.bits} bits; elements below one byte cannot move")
    return found.storage


def conversion_is_defined(source: str, target: str) -> bool:
    """Whether a value of ``source`` has one defined conversion to ``target``: equal types, or two wide floats.

    Wide floats are F16, BF16, F32 and F64. Widening is exact; narrowing rounds to nearest even.
    """
    wide = ("F16", "BF16", "F32", "F64")
    return source == target or (source in wide and target in wide)


def holds_every_value(holder: str, value: str) -> bool:
    """Whether every value of dtype ``value`` is exact in dtype ``holder``."""
    wider = {"F16": ("F32", "F64"), "BF16": ("F32", "F64"), "F32": ("F64",)}
    return holder == value or holder in wider.get(value, ())
