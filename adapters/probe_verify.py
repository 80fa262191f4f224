"""Verification: what the codes claim of a parameter is believed only after two loads of unstructured numbers.

Codes alone cannot tell a copy from ``abs``, a clamp, a max of two or a cast down and up again. Two more loads feed
numbers from one random table of prime period with all mantissa bits: A with exponents -14..0, B with 1..14 and the
opposite sign at every id. A copy must then hold its source value, converted to the parameter's dtype.

>>> a, b = verification_pair(("F32",), Range.SIGNED)
>>> bool(((a.tables["F32"] ^ b.tables["F32"]) >> 31 == 1).all()), a.period
(True, 131071)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from adapters._probe_kernels import check_rows, check_steady, mark_rows, random_floats, steady_runs
from adapters.probe_feed import Pattern
from adapters.probe_readings import Reading, shown
from adapters.torch_bits import Bits, storage_type
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.residues import holds_codes
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.slice_copy import CopyTable
from layout_algebra.space import CheckpointSpace

Words = npt.NDArray[np.uint64]

VERIFY_PERIOD = 131_071
_WIDE_FLOATS = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}
"""Exponent and mantissa bits."""
_BYTES = {"F8_E4M3": (0x7E, 0x08, 0x77), "F8_E5M2": (0x7B, 0x20, 0x5B), "I8": (0x7F, 1, 120), "U8": (0x7F, 1, 120)}
"""The largest finite pattern without the top bit; first and last of the narrow range."""
_SEED = 0x7EA_5EED
_PART_ELEMENTS = 1 << 24
_FEW_RUNS = 1 << 16
_EVEN_CODES = 32


class Range(Enum):
    """Which numbers verification feeds; the later ones are for loaders that refuse the earlier."""

    SIGNED = "signed"
    POSITIVE = "sign not verified"
    NARROW = "range not verified"


def verification_pair(dtypes: Iterable[str], values: Range, period: int = VERIFY_PERIOD) -> tuple[Pattern, Pattern]:
    """The two patterns of random numbers for some checkpoint dtypes; the sign of B is opposite to that of A.

    Wide floats have all their mantissa bits, exponents -14..0 in A and 1..14 in B. Wide integers are below half their
    width in A and above it in B. Bytes are all finite numbers; if positive, the lower half in A and the upper in B.
    Tensors that hold no codes have another content in B.
    """
    a: dict[str, Bits] = {}
    b: dict[str, Bits] = {}
    for dtype in sorted(set(dtypes)):
        if holds_codes(dtype):
            random = np.random.Generator(np.random.SFC64([_SEED, *dtype.encode()]))
            if dtype in _WIDE_FLOATS:
                a[dtype], b[dtype] = _floats(dtype, values, period, random)
                continue
            words = random.integers(0, 1 << 64, (5, period), dtype=np.uint64)
            for out, letter in ((a, 0), (b, 1)):
                sign = words[0] >> np.uint64(63) ^ np.uint64(letter)
                out[dtype] = _numbers(dtype, values, letter, words[1 + letter], words[3 + letter], sign)
    return Pattern(a), Pattern(b, second=True)


def _floats(dtype: str, values: Range, period: int, random: np.random.Generator) -> tuple[Bits, Bits]:
    """Random bits of wide floats for both patterns."""
    exponent_bits, mantissa_bits = _WIDE_FLOATS[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    kind = storage_type(dtype_of(dtype).item_bytes)
    pair = np.empty(period, dtype=kind), np.empty(period, dtype=kind)
    seeds = random.integers(0, 1 << 64, 3, dtype=np.uint64)
    ranges = [(-7, 7), (-7, 7)] if values is Range.NARROW else [(-14, 0), (1, 14)]
    for letter, (first, last) in enumerate(ranges):
        sign = (1 + letter) * (values is Range.SIGNED)
        random_floats(pair[letter], seeds[0], seeds[1 + letter], mantissa_bits, bias + first, last - first + 1, sign)
    return pair


def _numbers(dtype: str, values: Range, letter: int, some: Words, others: Words, sign: Words) -> Bits:
    """Random bits of bytes and integers for pattern A (letter 0) or B (1)."""
    kind = dtype_of(dtype)
    width = kind.bits
    signed = values is Range.SIGNED
    if dtype in _BYTES:
        top, first, last = _BYTES[dtype]
        if values is not Range.NARROW:
            first, last = (0, top) if signed else (1, 0xFF if dtype == "U8" else top)
        if not signed:
            middle = (first + last) // 2
            first, last = (first, middle) if letter == 0 else (middle + 1, last)
        bits = np.uint64(first) + some % np.uint64(last - first + 1)
        bits |= sign << np.uint64(7) if signed else np.uint64(0)
    else:
        half, full = width // 2, width - (kind.kind == "int")
        if values is Range.NARROW:
            bits = np.uint64(128) + some % np.uint64((1 << 15) - 128)
        elif letter == 0:  # of every magnitude alike, so that a bound shows
            bits = np.uint64(1) + some % ((np.uint64(1) << (np.uint64(1) + others % np.uint64(half))) - np.uint64(1))
        else:
            bits = np.uint64(1 << half) + some % np.uint64((1 << full) - (1 << half))
        if signed and kind.kind == "int":
            bits = np.where(sign == 1, ~bits + np.uint64(1), bits)
    return bits.astype(storage_type(width // 8))


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a pattern makes of every id in a parameter of one dtype.

    Attributes
    ----------
    starts, which
        Ids from ``starts[k]`` on are predicted by ``tables[which[k]]``, or by nothing if that is negative.
    tables
        Shape ``(dtypes, period)``.
    """

    starts: IdArray
    which: IdArray
    tables: Bits


def predict(
    space: CheckpointSpace,
    patterns: Sequence[Pattern],
    dtype: str,
    reading: Reading,
    choice: npt.NDArray[np.bool_] | None = None,
) -> Prediction:
    """What a pattern's numbers become in a parameter of some dtype, under one reading.

    Where tensors follow two patterns, ``choice`` says by position in the space which of them follow the second.
    """
    tables: list[Bits] = []
    place: dict[tuple[str, bool], int] = {}
    for number, pattern in enumerate(patterns):
        for source in sorted(pattern.tables):
            table = shown(pattern.tables[source], source, dtype, reading)
            if table is not None:
                place[source, bool(number)] = len(tables)
                tables.append(table)
    numbers, of_tensor = space.dtype_numbers
    of_dtype = np.array([[place.get((dtype, second), -1) for second in (False, True)] for dtype in numbers])
    filled = np.diff(space.starts) > 0
    index = of_dtype[of_tensor, 0 if choice is None else choice.astype(np.int64)][filled].astype(np.int64)
    starts = space.starts[:-1][filled]
    changes = np.concatenate([[True], index[1:] != index[:-1]])
    return Prediction(starts[changes], index[changes], np.stack(tables))


@dataclass(slots=True, eq=False)
class Claims:
    """What is believed of one parameter, and which of it has been refuted.

    Attributes
    ----------
    copies
        Affine pieces of ids in canonical form.
    as_constant
        One entry a copy: the number of the code that it may hold as a constant instead, or -1.
    constants
        Pieces that held one code in every pass; the source start is the code's number.
    runs, values
        Runs of other steady elements, as ``steady_runs`` gives them.
    opaque
        One bit an element, or None where nothing is opaque.
    code_bits
        Bits of every code in the parameter's dtype; shape ``(1, codes)``.
    reading
        How codes were read off, or None for a parameter that can hold none.
    """

    shape: tuple[int, ...]
    dtype: str
    elements: int
    copies: CopyTable
    as_constant: IdArray
    constants: CopyTable
    runs: IdArray
    values: npt.NDArray[np.uint64]
    opaque: npt.NDArray[np.uint8] | None
    code_bits: Bits
    reading: Reading | None
    _parts: tuple[IdArray, IdArray] = field(init=False)
    _bad_copies: npt.NDArray[np.uint8] = field(init=False)
    _not_constant: npt.NDArray[np.uint8] = field(init=False)
    _bad_constants: npt.NDArray[np.uint8] = field(init=False)
    _bad_runs: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = _split(self.copies.rows)
        self._bad_copies = np.zeros(len(self.copies), dtype=np.uint8)
        self._not_constant = (self.as_constant < 0).astype(np.uint8)
        self._bad_constants = np.zeros(len(self.constants), dtype=np.uint8)
        self._bad_runs = np.zeros(len(self.runs), dtype=np.uint8)

    def check_copies(self, live: Bits, prediction: Prediction, executor: ThreadPool) -> Callable[[], None]:
        """Begin to refute copies that do not hold what their ids predict; the result is to be called to finish."""
        rows, origin = self._parts
        flags = self._bad_copies[origin]
        weights = np.cumsum(np.prod(rows[:, 2::3], axis=1, dtype=np.int64)) // _PART_ELEMENTS
        edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(rows)]
        known = prediction.starts, prediction.which, prediction.tables
        parts = [slice(first, last) for first, last in pairwise(edges) if last > first]
        jobs = [executor.submit(check_rows, live, rows[part], flags[part], *known) for part in parts]

        def finish() -> None:
            for job in jobs:
                job.result()
            np.maximum.at(self._bad_copies, origin, flags)

        return finish

    def check_steady(self, live: Bits, kept: Bits) -> None:
        """Refute constants that changed."""
        if len(self.runs):
            check_steady(live, kept, self.runs, self.values, self._bad_runs)
        everywhere = np.zeros(1, dtype=np.int64)
        if len(self.constants):
            check_rows(live, self.constants.rows.copy(), self._bad_constants, everywhere, everywhere, self.code_bits)
        doubtful = np.flatnonzero(self._not_constant == 0)
        if len(doubtful):
            rows = self.copies.rows[doubtful].copy()
            rows[:, 1] = self.as_constant[doubtful]
            flags = self._not_constant[doubtful]
            check_rows(live, rows, flags, everywhere, everywhere, self.code_bits)
            self._not_constant[doubtful] = flags

    @property
    def standing(self) -> npt.NDArray[np.bool_]:
        """Which copies have agreed so far."""
        out: npt.NDArray[np.bool_] = self._bad_copies == 0
        return out

    def left_by_one_load(self, kept: Bits) -> int:
        """How many constants are evenly spaced codes side by side, and not what was there before: what a load left.

        Parameters
        ----------
        kept
            Flat bits before the probe.
        """
        starts, codes = self.constants.target_starts, self.constants.source_starts
        order = np.argsort(starts)
        starts, codes = starts[order], codes[order]
        steps = np.diff(codes)
        even = (steps[1:] == steps[:-1]) & (steps[1:] != 0) & (starts[2:] - starts[:-2] == 2)
        stands = (self.code_bits[0][codes] != kept[starts]) & (self._bad_constants[order] == 0)
        even &= stands[1:-1]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], even, [False]])))
        runs = edges[1::2] - edges[::2] + 2
        return int(runs[runs >= _EVEN_CODES].sum())

    def opaque_elements(self) -> npt.NDArray[np.uint8] | None:
        """One bit an element that is neither copied nor constant, or None where there is none."""
        lost = (self._bad_copies & self._not_constant).astype(bool)
        if not (lost.any() or self._bad_constants.any() or self._bad_runs.any()):
            return self.opaque
        mask = np.zeros((self.elements + 7) // 8, dtype=np.uint8) if self.opaque is None else self.opaque.copy()
        mark_rows(mask, self.copies.rows[lost])
        self._mark_constants(mask)
        return mask

    def _mark_constants(self, mask: npt.NDArray[np.uint8]) -> None:
        """Mark refuted constants, and with each all others of its value: a clamp holds its bound here and there."""
        code_values = self.code_bits[0].astype(np.uint64)[self.constants.source_starts]
        plain = self.runs[:, 2] == 0
        refuted = np.concatenate([code_values[self._bad_constants == 1], self.values[plain & (self._bad_runs == 1)]])
        mark_rows(mask, self.constants.rows[np.isin(code_values, refuted)])
        doubtful = np.flatnonzero((self._bad_copies == 1) & (self._not_constant == 0))
        bits = self.code_bits[0].astype(np.uint64)[self.as_constant[doubtful]]
        mark_rows(mask, self.copies.rows[doubtful[np.isin(bits, refuted)]])
        lost = (plain & np.isin(self.values, refuted)) | (~plain & bool((~plain & (self._bad_runs == 1)).any()))
        rows = np.zeros((int(lost.sum()), 5), dtype=np.int64)
        rows[:, 0] = self.runs[lost, 0]
        rows[:, 2] = self.runs[lost, 1] - self.runs[lost, 0]
        rows[:, 3] = 1
        mark_rows(mask, rows)


def steady_claims(
    live: Bits,
    kept: Bits,
    shape: tuple[int, ...],
    dtype: str,
    *,
    copies: CopyTable | None = None,
    as_constant: IdArray | None = None,
    constants: CopyTable | None = None,
    varying: IdArray | None = None,
    code_bits: Bits | None = None,
    past_end: npt.NDArray[np.uint64] | None = None,
    reading: Reading | None = None,
) -> Claims:
    """Claims of one parameter: the given copies and constants, and everything else as steady as it is now.

    Parameters
    ----------
    live, kept
        Flat bits now and before the probe.
    shape, dtype
        Of the parameter.
    copies, as_constant, constants, code_bits, reading
        See ``Claims``; by default none.
    varying
        Half-open intervals of elements known to be opaque; shape ``(n, 2)``.
    past_end
        Sorted bits that are no constant where no piece claims them: codes of numbers past the last id.
    """
    copies = CopyTable.empty() if copies is None else copies
    constants = CopyTable.empty() if constants is None else constants
    as_constant = np.full(len(copies), -1, dtype=np.int64) if as_constant is None else as_constant
    code_bits = np.zeros((1, 1), dtype=live.dtype) if code_bits is None else code_bits
    runs, values, mask = np.empty((0, 3), dtype=np.int64), np.empty(0, dtype=np.uint64), None
    if int(copies.elements.sum()) < len(live):
        claimed = np.zeros((len(live) + 7) // 8, dtype=np.uint8)
        mark_rows(claimed, copies.rows.copy())
        mark_rows(claimed, constants.rows.copy())
        opaque = np.empty((0, 2), dtype=np.int64) if varying is None else varying
        mark_rows(claimed, interval_rows(opaque))
        runs, values, spilled = steady_runs(live, kept, claimed, min(len(live), max(_FEW_RUNS, len(live) // 32)))
        if past_end is not None:
            beyond = (runs[:, 2] == 0) & np.isin(values, past_end)
            spilled = np.concatenate([spilled, runs[beyond, :2]])
            runs, values = runs[~beyond], values[~beyond]
        opaque = np.concatenate([opaque, spilled])
        if len(opaque):
            mask = np.zeros((len(live) + 7) // 8, dtype=np.uint8)
            mark_rows(mask, interval_rows(opaque))
    steady = runs, values, mask
    return Claims(shape, dtype, len(live), copies, as_constant, constants, *steady, np.atleast_2d(code_bits), reading)


def interval_rows(intervals: IdArray) -> IdArray:
    """Half-open intervals as rows that write them."""
    rows = np.zeros((len(intervals), 5), dtype=np.int64)
    rows[:, 0] = intervals[:, 0]
    rows[:, 2] = intervals[:, 1] - intervals[:, 0]
    rows[:, 3] = 1
    return rows


def _split(rows: IdArray) -> tuple[IdArray, IdArray]:
    """Cut large slice copies along their outermost axis; the parts, and the row each comes from."""
    elements = np.prod(rows[:, 2::3], axis=1, dtype=np.int64)
    if not len(rows) or int(elements.max()) <= _PART_ELEMENTS:
        return rows.copy(), np.arange(len(rows))
    extents = rows[:, 2::3]
    axis = np.argmax(extents > 1, axis=1)
    index = np.arange(len(rows))
    extent = extents[index, axis]
    part = np.maximum(1, extent * _PART_ELEMENTS // np.maximum(elements, 1))
    count = np.where(elements > _PART_ELEMENTS, -(-extent // part), 1)
    part = np.where(count > 1, part, extent)
    origin = np.repeat(index, count)
    nth = np.arange(len(origin)) - np.repeat(np.cumsum(count) - count, count)
    out = rows[origin].copy()
    first = nth * part[origin]
    at = axis[origin]
    here = np.arange(len(origin))
    out[:, 0] += first * out[here, 3 + 3 * at]
    out[:, 1] += first * out[here, 4 + 3 * at]
    out[here, 2 + 3 * at] = np.minimum(part[origin], extent[origin] - first)
    return out, origin
