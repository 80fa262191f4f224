"""Second differences of one parameter's code numbers: what a probe pass leaves behind.

Seen as a matrix, an affine copy is a rectangle on which ids are affine, and its second differences along rows and
columns vanish everywhere but near its border, at most 16 places. Taken modulo a pass's modulus the same holds, since
code numbers are linear in the id. So a parameter of any size leaves a short list.

>>> from layout_algebra.residues import FLOAT_CODES, Pass
>>> one = Pass(1919, 1)
>>> ids = np.arange(1, 101).reshape(10, 10)
>>> memory = FLOAT_CODES.table("BF16", one)[ids % 1919]
>>> found = encode(memory, (10, 10), FLOAT_CODES.decoding("BF16"), one)
>>> [(int(p), int(v)) for p, v in zip(*found.entries())]
[(0, 1), (10, 9), (11, 1909)]

Elements that hold no code count as 0 there and are listed apart, with their bits, in ``outside``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from layout_algebra._scan_kernels import LINE_MORE, equal_runs, scan
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import ProbeError
from layout_algebra.residues import Decoding, Pass
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.views import view_of

DENSE_LIMIT_BYTES = 1 << 28
"""How much irregular content of one parameter and pass ``encode`` keeps by default."""

CHUNK_ELEMENTS = 1 << 22
_CHUNKS_AT_ONCE = 16
_LISTED_BYTES = 6
_SPAN_BYTES = 16
_RUN_BYTES = 24
_NOTHING = np.empty(0, dtype=np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One stretch of flat elements ``start .. stop - 1`` of a parameter under one pass.

    All passes cut parameters of one shape into the same chunks.

    Attributes
    ----------
    start, stop
        Flat indices.
    places, values
        Second differences that are not 0: uint32 offsets from ``start``, ascending, and values, uint16 in what
        ``encode`` makes. ``places`` is empty and ``values`` has an entry for every element where a list would have been
        longer.
    runs
        ``outside()``, where it is short.
    bits
        The chunk's own bits, unsigned, where ``runs`` would have been longer; else empty.
    decoding, modulus
        How ``bits`` are read.
    """

    start: int
    stop: int
    places: npt.NDArray[np.uint32]
    values: npt.NDArray[np.unsignedinteger]
    runs: IdArray
    bits: npt.NDArray[np.unsignedinteger]
    decoding: Decoding
    modulus: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.places.nbytes + self.values.nbytes + self.runs.nbytes + self.bits.nbytes

    @property
    def dense_bytes(self) -> int:
        """Bytes held in plain arrays rather than lists."""
        return self.bits.nbytes + (self.values.nbytes if self.is_dense else 0)

    @property
    def is_dense(self) -> bool:
        """Whether ``values`` has an entry for every element."""
        return len(self.places) != len(self.values)

    def residues(self, first: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Second differences of the elements ``first .. stop - 1``, those that are 0 too."""
        if self.is_dense:
            return self.values[first - self.start : stop - self.start]
        out = np.zeros(stop - first, dtype=self.values.dtype)
        low, high = np.searchsorted(self.places, [first - self.start, stop - self.start])
        out[self.places[low:high].astype(np.int64) + (self.start - first)] = self.values[low:high]
        return out

    def entries(self) -> tuple[IdArray, npt.NDArray[np.unsignedinteger]]:
        """Flat positions in the parameter, ascending, and second differences of ``id mod modulus`` there, none 0."""
        if not self.is_dense:
            return self.places.astype(np.int64) + self.start, self.values
        places = np.flatnonzero(self.values)
        return places + self.start, self.values[places]

    def outside(self) -> IdArray:
        """Elements that hold no code of this pass, as maximal runs of equal bits within the chunk.

        Returns
        -------
        ndarray
            int64, shape ``(n, 3)``: first flat index, index past the last, the element's bits (as a signed number
            for 64-bit elements); ascending. Up to 24 bytes an element where the chunk is irregular.
        """
        if not len(self.bits):
            return self.runs
        ends = np.diff(self.is_outside().astype(np.int8), prepend=0, append=0)
        spans = np.stack([np.flatnonzero(ends == 1), np.flatnonzero(ends == -1)], axis=1).reshape(-1)
        runs, count = equal_runs(self.bits, spans, len(self.bits))
        table = runs[: 3 * count].reshape(-1, 3)
        table[:, :2] += self.start
        return table

    def is_outside(self) -> npt.NDArray[np.bool_]:
        """For every element of the chunk whether it holds no code; shape ``(stop - start,)``."""
        if len(self.bits):
            return self.decoding.read(self.bits) >= self.modulus
        size = self.stop - self.start + 1
        starts = np.bincount(self.runs[:, 0] - self.start, minlength=size)
        stops = np.bincount(self.runs[:, 1] - self.start, minlength=size)
        return np.cumsum(starts - stops)[:-1] > 0


@dataclass(frozen=True, slots=True, eq=False)
class Diff2:
    """Second differences of one parameter under one pass, and the elements that hold no code.

    Attributes
    ----------
    shape
        The parameter's.
    of_pass
        The pass whose codes were read.
    chunks
        In order; together they cover the parameter.
    """

    shape: tuple[int, ...]
    of_pass: Pass
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def dense_bytes(self) -> int:
        """Bytes held in plain arrays rather than lists: what counts against ``dense_limit_bytes``."""
        return sum(chunk.dense_bytes for chunk in self.chunks)

    def entries(self) -> tuple[IdArray, npt.NDArray[np.unsignedinteger]]:
        """Flat positions, ascending, and second differences of ``id mod modulus`` there, in ``1 .. modulus - 1``."""
        parts = [chunk.entries() for chunk in self.chunks if len(chunk.values)]
        places = np.concatenate([np.empty(0, dtype=np.int64), *(part[0] for part in parts)])
        return places, np.concatenate([_NOTHING, *(part[1] for part in parts)])

    def outside(self) -> IdArray:
        """``Chunk.outside`` of all chunks, those that meet joined; int64, shape ``(n, 3)``."""
        found = [chunk.outside() for chunk in self.chunks if len(chunk.runs) or len(chunk.bits)]
        if not found:
            return np.empty((0, 3), dtype=np.int64)
        runs = np.concatenate(found)
        goes_on = np.zeros(len(runs), dtype=np.bool_)
        goes_on[1:] = (runs[1:, 0] == runs[:-1, 1]) & (runs[1:, 2] == runs[:-1, 2])
        heads = np.flatnonzero(~goes_on)
        joined = runs[heads]
        joined[:, 1] = runs[np.append(heads[1:], len(runs)) - 1, 1]
        return joined


def encode(
    memory: npt.NDArray[np.generic],
    shape: Sequence[int],
    decoding: Decoding,
    of_pass: Pass,
    *,
    executor: ThreadPool | None = None,
    name: str = "parameter",
    dense_limit_bytes: int = DENSE_LIMIT_BYTES,
) -> Diff2:
    """Read one parameter after one pass.

    Parameters
    ----------
    memory
        Its elements' bits in row-major order: a C-contiguous array, of any shape, of ``decoding.storage`` or of
        another type of that width (a torch bfloat16 tensor viewed as int16 will do). Read only, never kept.
    shape
        The parameter's shape.
    decoding
        ``codebook.decoding(dtype of the parameter)``.
    of_pass
        The pass that was fed.
    executor
        Where chunks run side by side; the kernels release the GIL. By default this thread does all. It must not be
        an executor whose workers call this function and wait.
    name
        The parameter's name, for the message of a refusal.
    dense_limit_bytes
        A chunk whose lists would outgrow a plain array is kept as one, 2 bytes an element (or the element's own
        bytes where the bits without a code are irregular). This bounds their sum.

    Raises
    ------
    ProbeError
        If plain arrays would need more than ``dense_limit_bytes``: the content is too irregular to keep; or if the
        memory does not fit the shape and dtype.
    """
    rows, width = view_of(shape)
    bits = _bits_of(memory, rows * width, decoding, name)

    line = _line(of_pass, decoding.base if decoding.plain else 0)

    def read(stretch: tuple[int, int]) -> Chunk:
        return _read_chunk(bits, stretch[0], stretch[1], width, decoding, of_pass, line)

    chunks: list[Chunk] = []
    kept_bytes = 0
    stretches = list(_stretches(rows, width))
    # A few chunks at a time, so that a refusal comes before much is kept.
    for first in range(0, len(stretches), _CHUNKS_AT_ONCE):
        some = stretches[first : first + _CHUNKS_AT_ONCE]
        chunks += map(read, some) if executor is None or len(some) < 2 else executor.map(read, some)
        kept_bytes += sum(chunk.dense_bytes for chunk in chunks[first:])
        if kept_bytes > dense_limit_bytes:
            raise ProbeError(
                f"{name}: up to element {chunks[-1].stop:,} of {rows * width:,} it is too irregular to keep in "
                f"{dense_limit_bytes:,} bytes; raise memory_limit_bytes, or leave the parameter out"
            )
    return Diff2(tuple(shape), of_pass, tuple(chunks))


@lru_cache(maxsize=16)
def _line(of_pass: Pass, base: int) -> npt.NDArray[np.uint16]:
    """What `scan` compares consecutive ids with."""
    return (np.resize(of_pass.order(), of_pass.modulus + LINE_MORE) + base).astype(np.uint16)


def _bits_of(
    memory: npt.NDArray[np.generic], elements: int, decoding: Decoding, name: str
) -> npt.NDArray[np.unsignedinteger]:
    if memory.size != elements or memory.itemsize != decoding.storage.itemsize or not memory.flags.c_contiguous:
        raise ProbeError(
            f"{name}: memory is {memory.size} elements of {memory.dtype}, contiguous: {memory.flags.c_contiguous}; "
            f"expected {elements} contiguous elements of the width of {decoding.storage}"
        )
    flat: npt.NDArray[np.unsignedinteger] = memory.reshape(-1).view(decoding.storage)
    return flat


def _stretches(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut a parameter into chunks. Where rows are long, chunks do not straddle the first three rows' ends."""
    size = rows * width
    cuts = {0, size}
    if width > CHUNK_ELEMENTS // 4:
        cuts |= {min(width, size), min(2 * width, size)}
    for start, stop in pairwise(sorted(cuts)):
        for first in range(start, stop, CHUNK_ELEMENTS):
            yield first, min(first + CHUNK_ELEMENTS, stop)


def _read_chunk(
    bits: npt.NDArray[np.unsignedinteger],
    start: int,
    stop: int,
    width: int,
    decoding: Decoding,
    of_pass: Pass,
    line: npt.NDArray[np.uint16],
) -> Chunk:
    size = stop - start
    windows, base = _windows(bits, start, stop, width, decoding)
    bounds = start, stop, width, base, of_pass.modulus, of_pass.inverse
    most_entries, most_spans = size * 2 // _LISTED_BYTES + 64, size * bits.itemsize // _SPAN_BYTES + 1
    dense = _NOTHING
    entries, count, spans, span_count = scan(*windows, *bounds, line, most_entries, most_spans, dense)
    if count < 0:
        dense = np.zeros(size, dtype=np.uint16)
        entries, count, spans, span_count = scan(*windows, *bounds, line, 0, most_spans, dense)
    places = (entries[:count] >> 16).astype(np.uint32)
    values = dense if len(dense) else (entries[:count] & 0xFFFF).astype(np.uint16)
    kept = np.empty(0, dtype=bits.dtype)
    table = np.empty((0, 3), dtype=np.int64)
    if span_count:
        runs, run_count = np.empty(0, dtype=np.int64), -1
        if span_count > 0:
            runs, run_count = equal_runs(bits, spans[: 2 * span_count], size * bits.itemsize // _RUN_BYTES + 1)
        if run_count < 0:
            kept = bits[start:stop].copy()
        else:
            table = runs[: 3 * run_count].reshape(-1, 3).copy()
    return Chunk(start, stop, places, values, table, kept, decoding, of_pass.modulus)


def _windows(
    bits: npt.NDArray[np.unsignedinteger], start: int, stop: int, width: int, decoding: Decoding
) -> tuple[tuple[npt.NDArray[np.uint16], int, npt.NDArray[np.uint16], int, npt.NDArray[np.uint16], int], int]:
    """The numbers that a chunk, its rows above and their rows above are read from, each with its first flat index.

    Bfloat16 is read in place, less its base; other dtypes are decoded into buffers of about the chunk's size.
    """
    if decoding.plain:
        return (bits, 0, bits, 0, bits, 0), decoding.base

    def decoded(first: int, last: int) -> npt.NDArray[np.uint16]:
        return decoding.read(bits[first:last])

    if width <= CHUNK_ELEMENTS // 4:
        first = max(0, start - 2 * width - 2)
        numbers = decoded(first, stop)
        return (numbers, first, numbers, first, numbers, first), 0
    # Two elements more on the left: the chunk's first column differences reach back to them.
    parts: list[tuple[npt.NDArray[np.uint16], int]] = []
    for shift in (0, width, 2 * width):
        first, last = max(0, start - shift - 2), max(0, stop - shift)
        parts.append((decoded(min(first, last), last), min(first, last)))
    return (*parts[0], *parts[1], *parts[2]), 0
