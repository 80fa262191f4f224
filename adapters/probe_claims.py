"""From what the code passes left of one parameter to what is claimed of each of its elements.

Codes give affine pieces of ids and constants that are codes; elements that held no code are constants if they held
the same bits in every pass, and opaque if not. All of it is only claimed: verification decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adapters.probe_live import LiveTensor
from adapters.probe_readings import Reading
from adapters.probe_verify import Claims, steady_claims
from adapters.torch_bits import Bits
from layout_algebra.diff2 import Chunk, Diff2
from layout_algebra.dtypes import IdArray
from layout_algebra.recover import constant_ids, recover
from layout_algebra.residues import Pass
from layout_algebra.slice_copy import CopyTable


class Codes:
    """The codes of one probe, and which ids an element seems to hold when it holds one code in every pass."""

    def __init__(self, passes: Sequence[Pass], total_elements: int) -> None:
        self.passes = tuple(passes)
        self.total_elements = total_elements
        numbers = constant_ids(passes)
        self._code_of = np.argsort(numbers)
        self._ids = numbers[self._code_of]

    def as_constant(self, copies: CopyTable) -> IdArray:
        """For every copy that may as well be a constant the number of its code, else -1."""
        at = np.minimum(np.searchsorted(self._ids, copies.source_starts), len(self._ids) - 1)
        steady = np.all(copies.source_strides == 0, axis=1) & (self._ids[at] == copies.source_starts)
        out: IdArray = np.where(steady, self._code_of[at], -1)
        return out


def claims_of_values(one: LiveTensor, live: Bits, kept: Bits) -> Claims:
    """Claims of a tensor that cannot hold codes, after the first load: whatever it is now, it stays."""
    return steady_claims(live, kept, one.shape, one.dtype)


def claims_of_codes(
    one: LiveTensor,
    live: Bits,
    kept: Bits,
    diffs: Sequence[Diff2],
    codes: Codes,
    reading: Reading,
) -> Claims:
    """Claims of a tensor that can hold codes, as read in one way, after the last code pass."""
    recovery = recover(diffs, codes.passes, one.shape, codes.total_elements)
    copies = recovery.copies
    return steady_claims(
        live,
        kept,
        one.shape,
        one.dtype,
        copies=copies,
        as_constant=codes.as_constant(copies),
        constants=recovery.constants,
        varying=varying_elements(diffs, reading.code_bits[codes.passes[-1].modulus :].astype(np.int64)),
        code_bits=reading.code_bits,
        past_end=reading.code_bits[1 : codes.passes[-1].modulus].astype(np.uint64),
        reading=reading,
    )


def varying_elements(diffs: Sequence[Diff2], beyond: IdArray) -> IdArray:
    """Elements that held no code in some pass and not the same bits in all: half-open intervals, shape ``(n, 2)``.

    Parameters
    ----------
    diffs
        One a pass, the smallest modulus last.
    beyond
        Bits, as signed numbers, of the codes that the last pass does not use and others may: a constant of these bits
        is outside in the last pass and inside in others, and is not told from other content here.
    """
    found = [_varying_in(chunks, beyond) for chunks in zip(*(diff.chunks for diff in diffs), strict=True)]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


def _varying_in(chunks: Sequence[Chunk], beyond: IdArray) -> IdArray:
    if not any(len(chunk.runs) or len(chunk.bits) for chunk in chunks):
        return np.empty((0, 2), dtype=np.int64)
    runs = [chunk.outside() for chunk in chunks]
    if all(np.array_equal(runs[0], other) for other in runs[1:]):
        return np.empty((0, 2), dtype=np.int64)
    start, size = chunks[0].start, chunks[0].stop - chunks[0].start
    varies = np.zeros(size, dtype=bool)
    last_bits, last_outside = _spread(runs[-1], start, size)
    may_be_inside = last_outside & np.isin(last_bits, beyond)
    for listed in runs[:-1]:
        bits, outside = _spread(listed, start, size)
        varies |= np.where(outside, ~last_outside | (bits != last_bits), last_outside & ~may_be_inside)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], varies, [False]]))) + start
    return edges.reshape(-1, 2)


def _spread(runs: IdArray, start: int, size: int) -> tuple[IdArray, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Runs as one entry an element: bits, and whether there is a run."""
    lengths = runs[:, 1] - runs[:, 0]
    index = np.repeat(runs[:, 0] - start - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    bits = np.zeros(size, dtype=np.int64)
    outside = np.zeros(size, dtype=bool)
    bits[index] = np.repeat(runs[:, 2], lengths)
    outside[index] = True
    return bits, outside
