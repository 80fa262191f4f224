"""Digests of content that do not depend on layout.

The fingerprint of a checkpoint tensor is the sum over its elements of ``bits * weight(id)`` modulo 2**64, over the
bits in the checkpoint's own dtype. A sum does not care who adds which part: any sharding of the same weights gives
the same number, shards' numbers add up to the tensor's, and so trainers and rollouts compare what they hold without
moving a byte of it. The weights are such that every change of a single element changes the sum.

>>> import numpy as np
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (4,), "F32")])
>>> values = np.arange(4, dtype=np.float32)
>>> whole = fingerprint(SourceMap.from_ids(space, {"w": np.array([1, 2, 3, 4])}), {"w": values})
>>> left = fingerprint(SourceMap.from_ids(space, {"a": np.array([2, 1])}), {"a": values[[1, 0]]})
>>> right = fingerprint(SourceMap.from_ids(space, {"b": np.array([3, 4])}), {"b": values[2:]})
>>> (left["w"] + right["w"]) % 2**64 == whole["w"]
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from layout_algebra._digest_kernels import digest_strips
from layout_algebra.dtypes import IdArray, conversion_is_defined, dtype_of, storage_of
from layout_algebra.errors import MapError, UnsupportedDtypeError
from layout_algebra.runs import RunTable, overlaps, with_gaps
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace

Memory = Mapping[str, npt.NDArray[np.generic]]
"""Parameters by name; BF16 and 8-bit floats as unsigned integers of their width."""

_SHARE_BYTES = 4 << 20
"""Less is not worth a thread."""


def fingerprint(source_map: SourceMap, memory: Memory) -> dict[str, int]:
    """Digest every checkpoint tensor that the map holds elements of.

    Parameters
    ----------
    source_map
        What the parameters hold.
    memory
        An array per parameter that copies anything, of the map's shape and the dtype's width. A parameter of
        another dtype than the checkpoint's is converted to it first, to nearest even where that is narrower.

    Returns
    -------
    dict
        Tensor name -> digest in ``0 .. 2**64 - 1`` over the ids held here, each counted once.

    Raises
    ------
    MapError
        If an array is missing or of another shape or width than the map says.
    """
    space = source_map.space
    held = source_map.held().intervals
    first = np.searchsorted(space.starts, held[:, 0], side="right") - 1
    last = np.searchsorted(space.starts, held[:, 1] - 1, side="right") - 1
    touched = np.zeros(len(space) + 1, dtype=np.int64)
    np.add.at(touched, first, 1)
    np.add.at(touched, last + 1, -1)
    positions = np.flatnonzero(np.cumsum(touched)[:-1] > 0)
    positions = positions[space.starts[positions + 1] > space.starts[positions]]
    spans = np.stack([space.starts[positions], space.starts[positions + 1]], axis=1)
    sums = _plan(source_map, spans, np.arange(len(spans), dtype=np.int64), len(spans)).sums(memory)
    return {space.specs[position].name: int(value) for position, value in zip(positions, sums, strict=True)}


def fingerprint_cells(source_map: SourceMap, memory: Memory, cells: Sequence[RunTable]) -> npt.NDArray[np.uint64]:
    """Digest disjoint sets of ids, such as the demand classes of a correspondence.

    Parameters
    ----------
    source_map, memory
        As for ``fingerprint``.
    cells
        Disjoint sets; ids that the map does not hold count as zero bits.

    Returns
    -------
    ndarray
        uint64, shape ``(len(cells),)``.
    """
    return plan_fingerprints(source_map, cells).sums(memory)


@dataclass(frozen=True, slots=True, eq=False)
class FingerprintPlan:
    """Where the elements of some sets of ids are in a worker's parameters; digests them again and again.

    Attributes
    ----------
    source_map
        The worker's.
    sets
        Number of sets.
    parts
        For every parameter and checkpoint dtype what the kernel reads.
    """

    source_map: SourceMap
    sets: int
    parts: tuple[FingerprintPart, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that are read, each once."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))

    def shares(self, count: int) -> tuple[FingerprintPlan, ...]:
        """Plans of about equally many bytes, at most ``count`` of them, whose sums add up to this one's."""
        sizes = [int(part.rows[:, 1].sum()) * dtype_of(part.wire).item_bytes for part in self.parts]
        least = max(-(-sum(sizes) // max(count, 1)), _SHARE_BYTES)
        shares: list[list[FingerprintPart]] = [[]]
        taken = 0
        for part, size in zip(self.parts, sizes, strict=True):
            whole = self.source_map.dtype(part.parameter) != part.wire  # converted as a whole
            for piece in [part] if whole else _pieces(part, max(-(-8 * size // least), 1)):
                if taken >= least:
                    shares.append([])
                    taken = 0
                shares[-1].append(piece)
                taken += int(piece.rows[:, 1].sum()) * dtype_of(piece.wire).item_bytes
        return tuple(replace(self, parts=tuple(share)) for share in shares)

    def split(self, places: Mapping[str, IdArray]) -> tuple[tuple[FingerprintPart, ...], FingerprintPlan]:
        """Cut out what lies in some places: its parts, and a plan of all the rest; every element is in one of them.

        Parameters
        ----------
        places
            By parameter: int64, shape ``(n, 2)``: first flat index and the one after the last; ascending, disjoint.

        Strips whose elements do not follow each other in memory stay with the rest, and so do parameters of another
        dtype than the checkpoint's.
        """
        inside: list[FingerprintPart] = []
        rest: list[FingerprintPart] = []
        for part in self.parts:
            rows = places.get(part.parameter, np.empty((0, 2), dtype=np.int64))
            if not len(rows) or self.source_map.dtype(part.parameter) != part.wire:
                rest.append(part)
                continue
            found, others = _split(part.rows, rows)
            inside += [replace(part, rows=found)] if len(found) else []
            rest += [replace(part, rows=others)] if len(others) else []
        return tuple(inside), replace(self, parts=tuple(rest))

    def sums(self, memory: Memory) -> npt.NDArray[np.uint64]:
        """Digest every set: uint64, shape ``(sets,)``. Reads every element once.

        Raises
        ------
        MapError
            If an array is missing or of another shape or width than the map says.
        """
        out = np.zeros(self.sets, dtype=np.uint64)
        for part in self.parts:
            array = _checked(self.source_map, part.parameter, memory)
            bits = wire_bits(array, self.source_map.dtype(part.parameter), part.wire)
            digest_strips(bits.reshape(-1), part.rows, out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class FingerprintPart:
    """Strips of one parameter whose checkpoint tensors have one dtype.

    Attributes
    ----------
    parameter, wire
        Its name, and the checkpoint tensors' dtype.
    rows
        int64, shape ``(n, 5)``: first id, length, flat index of the first id, index step, number of the set.
    """

    parameter: str
    wire: str
    rows: IdArray


def _pieces(part: FingerprintPart, count: int) -> list[FingerprintPart]:
    """A part in pieces of about equally many elements; a strip is cut where one ends."""
    rows = part.rows
    stops = np.cumsum(rows[:, 1])
    edges = np.unique(np.concatenate([[0], stops, int(stops[-1]) * np.arange(1, count) // count]))
    first, last = edges[:-1], edges[1:]
    owner = np.searchsorted(stops, first, side="right")
    into = first - (stops - rows[:, 1])[owner]
    cut = rows[owner]
    cut[:, 0] += into
    cut[:, 1] = last - first
    cut[:, 2] += into * cut[:, 3]
    bounds = np.searchsorted(first, int(stops[-1]) * np.arange(count + 1) // count)
    return [replace(part, rows=cut[a:b]) for a, b in pairwise(bounds.tolist()) if b > a]


def _split(rows: IdArray, places: IdArray) -> tuple[IdArray, IdArray]:
    """Strips, cut where places begin and end: those in a place, and the others; both in order of memory."""
    line, which = with_gaps(places)
    even = (rows[:, 3] == 1) | (rows[:, 1] == 1)
    strips = rows[even]
    spans = np.stack([strips[:, 2], strips[:, 2] + strips[:, 1]], axis=1)
    of, where = overlaps(spans, line)
    begin, stop = np.maximum(spans[of, 0], line[where, 0]), np.minimum(spans[of, 1], line[where, 1])
    cut = strips[of]
    cut[:, 0] += begin - cut[:, 2]
    cut[:, 1], cut[:, 2] = stop - begin, begin
    is_inside = which[where] >= 0
    others = np.concatenate([cut[~is_inside], rows[~even]])
    return cut[is_inside], others[np.argsort(others[:, 2], kind="stable")]


def plan_fingerprints(source_map: SourceMap, cells: Sequence[RunTable]) -> FingerprintPlan:
    """Find once what ``fingerprint_cells`` reads, so that digesting again costs no more than reading memory.

    Parameters
    ----------
    source_map, cells
        As for ``fingerprint_cells``.
    """
    spans = np.concatenate([np.empty((0, 2), dtype=np.int64), *(cell.intervals for cell in cells)])
    labels = np.repeat(np.arange(len(cells), dtype=np.int64), [len(cell.intervals) for cell in cells])
    order = np.argsort(spans[:, 0], kind="stable")
    return _plan(source_map, spans[order], labels[order], len(cells))


def _plan(source_map: SourceMap, spans: IdArray, labels: IdArray, count: int) -> FingerprintPlan:
    """What sorted disjoint id spans are in memory."""
    cut_spans, cut_labels, wires = _cut_by_dtype(source_map.space, spans, labels)
    strips = source_map.strips.disjoint().within(cut_spans)[0].rows
    span_of = np.searchsorted(cut_spans[:, 0], strips[:, 0], side="right") - 1
    names, wire_of = np.unique(wires[span_of], return_inverse=True)
    # In order of memory within a parameter, so that it is read from its beginning to its end.
    order = np.lexsort((strips[:, 3], wire_of, strips[:, 2]))
    strips, span_of, wire_of = strips[order], span_of[order], wire_of[order]
    table = np.column_stack([strips[:, [0, 1, 3, 4]], cut_labels[span_of]])
    begins = np.flatnonzero(np.diff(strips[:, 2], prepend=-1) | np.diff(wire_of, prepend=-1))
    stops = np.append(begins, len(strips))[1:]
    parts = [
        FingerprintPart(source_map.parameters[strips[begin, 2]], str(names[wire_of[begin]]), table[begin:stop].copy())
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)
    ]
    return FingerprintPlan(source_map, count, tuple(parts))


def _cut_by_dtype(
    space: CheckpointSpace, spans: IdArray, labels: IdArray
) -> tuple[IdArray, IdArray, npt.NDArray[np.str_]]:
    """Cut spans where the checkpoint's dtype changes; spans, labels and the dtype of each."""
    if not len(spans):
        return spans, labels, np.empty(0, dtype=np.str_)
    names = np.array([spec.dtype for spec in space.specs])
    changes = space.starts[np.flatnonzero(names[1:] != names[:-1]) + 1]
    edges = np.concatenate([[1], changes, [space.total_elements + 1]])
    parts, part_labels = [], []
    for start, stop in pairwise(np.unique(edges).tolist()):
        low, high = np.maximum(spans[:, 0], start), np.minimum(spans[:, 1], stop)
        kept = high > low
        parts.append(np.stack([low[kept], high[kept]], axis=1))
        part_labels.append(labels[kept])
    cut = np.concatenate(parts)
    position = np.searchsorted(space.starts, cut[:, 0], side="right") - 1
    return cut, np.concatenate(part_labels), names[position]


def _checked(source_map: SourceMap, parameter: str, memory: Memory) -> npt.NDArray[np.generic]:
    array = memory.get(parameter)
    if array is None:
        raise MapError(f"{parameter}: no memory given; the map copies checkpoint elements into it")
    if not isinstance(array, np.ndarray) or not array.dtype.isnative:
        what = f"{array.dtype}, in foreign byte order" if isinstance(array, np.ndarray) else type(array).__name__
        raise MapError(f"{parameter}: memory is {what}; expected a numpy array in native byte order")
    width, shape = dtype_of(source_map.dtype(parameter)).item_bytes, source_map.shape(parameter)
    if array.shape != shape or array.dtype.itemsize != width:
        raise MapError(
            f"{parameter}: memory is {array.dtype} of shape {array.shape}; the map says "
            f"{source_map.dtype(parameter)} ({width} bytes) of shape {shape}"
        )
    return array


def wire_bits(array: npt.NDArray[np.generic], held: str, wire: str) -> npt.NDArray[np.unsignedinteger]:
    """An array's elements converted from dtype ``held`` to ``wire``, as bits in an unsigned array of its shape.

    Raises
    ------
    UnsupportedDtypeError
        If no conversion between the two is defined.
    """
    if not conversion_is_defined(held, wire):
        raise UnsupportedDtypeError(f"no conversion from {held} to {wire} is defined")
    plain = np.ascontiguousarray(array)
    if held != wire:
        values = plain.view(storage_of(held))
        if held == "BF16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if wire in ("BF16", "F16"):
                plain = _narrowed(_quiet(values.astype(np.float32), held), wire)
            else:
                plain = values.astype(storage_of(wire))
    return plain.view(f"u{dtype_of(wire).item_bytes}").reshape(array.shape)


def _quiet(values: npt.NDArray[np.float32], held: str) -> npt.NDArray[np.float32]:
    """Numbers with NaNs that came from another format of floats as processors widen and narrow them: quiet."""
    if held in ("F16", "F64"):
        values.view(np.uint32)[np.isnan(values)] |= np.uint32(0x400000)
    return values


def _narrowed(values: npt.NDArray[np.float32], wire: str) -> npt.NDArray[np.uint16]:
    """BF16 or F16 bits, rounded to nearest even; a NaN keeps its sign and its first bits, so that widening is undone.

    It turns quiet if those are all zero, and in F16 always.
    """
    bits = values.view(np.uint32)
    if wire == "BF16":
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        kept = bits >> np.uint32(16)
        kept = np.where(kept & np.uint32(0x7F), kept, kept | np.uint32(0x40))
    else:
        rounded = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        kept = bits >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7E00) | bits >> np.uint32(13) & np.uint32(0x3FF)
    return np.where(np.isnan(values), kept, rounded).astype(np.uint16)
