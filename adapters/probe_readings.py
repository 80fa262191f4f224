"""How the codes of a checkpoint show in a parameter: by value, and by bits where a loader reinterprets them.

A parameter of the checkpoint's dtype shows codes as they are, one of another dtype as its own bits of the same numbers.
A loader may also take over the bits (``.view`` as another dtype of the same width). Whatever shows as the same bits is
one *reading*; a parameter is read in all of them, and verification decides.

>>> from layout_algebra.residues import FLOAT_CODES
>>> [(sorted(one.by_value), sorted(one.by_bits)) for one in readings_of(FLOAT_CODES, "F32", ["BF16", "F32"])]
[(['BF16', 'F32'], ['F32'])]
>>> [(sorted(one.by_value), sorted(one.by_bits)) for one in readings_of(FLOAT_CODES, "I32", ["BF16", "F32"])]
[([], ['F32'])]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adapters.probe_live import LiveTensor
from adapters.torch_bits import Bits, as_bits, bits_view, tensor_of_bits, torch_dtype
from layout_algebra.diff2 import Diff2
from layout_algebra.dtypes import dtype_of
from layout_algebra.residues import Codebook, Decoding, coded_dtypes, decoding_of, holds_codes
from layout_algebra.space import CheckpointSpace

_MANY_ELEMENTS = 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One way to read codes off a parameter.

    Attributes
    ----------
    decoding
        How its bits become code numbers.
    code_bits
        The bits of every code.
    by_value
        Checkpoint dtypes whose numbers, converted to the parameter's dtype, show as these bits.
    by_bits
        Checkpoint dtypes whose own bits these are.
    """

    decoding: Decoding
    code_bits: Bits
    by_value: set[str] = field(default_factory=set)
    by_bits: set[str] = field(default_factory=set)


def readings_of(codebook: Codebook, dtype: str, sources: Sequence[str]) -> tuple[Reading, ...]:
    """All readings of a parameter of some dtype under a checkpoint of some dtypes, by value first; perhaps none."""
    found: dict[bytes, Reading] = {}

    def reading(shown_as: str) -> Reading:
        bits = as_bits(codebook.bits(shown_as))
        return found.setdefault(bits.tobytes(), Reading(decoding_of(bits), bits))

    values = {source for source in sources if _converts(source, dtype)}
    if values and codebook.is_exact_in(dtype):
        reading(dtype).by_value.update(values)
    for source in sources:
        if _reinterprets(source, dtype):
            reading(source).by_bits.add(source)
    return tuple(found.values())


class OpenReadings:
    """The ways in which every live tensor is read, and which of them are still in question."""

    def __init__(self, codebook: Codebook, space: CheckpointSpace, live: Sequence[LiveTensor]) -> None:
        sources = coded_dtypes(space)
        by_dtype = {dtype: readings_of(codebook, dtype, sources) for dtype in {one.dtype for one in live}}
        self._left = {name: list(by_dtype[one.dtype]) for one in live for name in one.names}

    def of(self, name: str) -> list[Reading]:
        """The readings of one live tensor, by one of its names: a loader may untie what had several."""
        return self._left[name]

    def drop_hopeless(self, diffs: Mapping[tuple[str, Reading], Sequence[Diff2]]) -> None:
        """After one pass: a large tensor that is full of codes in one reading needs no other."""
        for name, readings in self._left.items():
            if len(readings) < 2 or (name, readings[0]) not in diffs:
                continue
            for reading in readings:
                chunks = diffs[name, reading][0].chunks
                full = not any(len(chunk.runs) or len(chunk.bits) for chunk in chunks)
                if full and sum(chunk.stop - chunk.start for chunk in chunks) >= _MANY_ELEMENTS:
                    readings[:] = [reading]
                    break


def shown(bits: Bits, source: str, dtype: str, reading: Reading) -> Bits | None:
    """What numbers of a checkpoint dtype become in a parameter under a reading; None if nothing it tells of.

    Values are converted as torch does: exact when wider, else to nearest even, integers modulo their width.
    """
    if source == dtype or source in reading.by_bits:
        return bits
    if source not in reading.by_value:
        return None
    return bits_view(tensor_of_bits(bits, source, bits.shape).to(torch_dtype(dtype))).copy()


def _converts(source: str, target: str) -> bool:
    """Whether a number of one dtype has one meaning in another: all but what is cut to an integer or to a byte."""
    if not (holds_codes(source) and holds_codes(target)):
        return False
    one, other = dtype_of(source), dtype_of(target)
    if other.kind == "float":
        return True
    return one.kind != "float" and (other.bits > 8 or one.bits == 8)


def _reinterprets(source: str, target: str) -> bool:
    """Whether a loader may take over bits: one width, and not a float read as a float of another format."""
    one, other = dtype_of(source), dtype_of(target)
    if not holds_codes(source) or one.bits != other.bits or other.kind == "bool":
        return False
    return source == target or (one.kind, other.kind) != ("float", "float")
