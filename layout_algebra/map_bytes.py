"""A source map as bytes: compact, versioned, checked, and harmless when they come from a stranger.

Names travel as templates and numbers (``name_bytes``), shapes and dtypes as a list of the distinct ones, slice copies
by number of axes, all in the order of the templates, so that the layers of a model differ by constant steps. That
makes a rank of a trillion-parameter model, with the 70,000 tensors of its checkpoint, about ten thousand bytes.

Reading checks everything before it is used: magic, version and digest, sizes against limits, every number against the
bounds of its tensor, and that no two claims meet in one element.

>>> from layout_algebra.slice_copy import SliceCopy, Strided
>>> space = CheckpointSpace([TensorSpec(f"layers.{k}.w", (4, 4), "BF16") for k in range(100)])
>>> rows = [
...     MapRow(f"p.{k}", (4, 4), "BF16", CopyTable.of([SliceCopy(Strided(1 + 16 * k, (16,), (1,)),
...            Strided(0, (16,), (1,)))]), RunTable.empty(), ())
...     for k in range(100)
... ]
>>> data = encode_map(space, rows)
>>> len(data) < 400, [row.name for row in decode_map(data)[1]] == [f"p.{k}" for k in range(100)]
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from layout_algebra.disjoint import UndecidedError, nested, pieces_meet
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import LayoutError, MapBytesError, MapError
from layout_algebra.name_bytes import PackedNames, decode_names, encode_names
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import (
    Budget,
    Packed,
    pack_column,
    pack_table,
    seal,
    unpack_column,
    unpack_table,
    unseal,
)
from layout_algebra.slice_copy import CopyTable
from layout_algebra.space import MAX_ELEMENTS, CheckpointSpace, TensorSpec

MAGIC = b"TLMAP\x00\x00\x02"
MAX_BYTES = 1 << 28
"""Largest unpacked size that ``decode_map`` accepts."""
MAX_VALUES = 1 << 26
"""Most integers, over all tables, that ``decode_map`` accepts."""
MAX_AXES = 32
MAX_STRETCHES = 1 << 24
"""Most stretches of consecutive opaque elements that ``decode_map`` accepts."""


@dataclass(frozen=True, slots=True, eq=False)
class MapRow:
    """One parameter of a map, as it travels; ``depends_on`` are names of checkpoint tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    copies: CopyTable
    opaque: RunTable
    depends_on: tuple[str, ...]


class _Spec(msgspec.Struct, array_like=True, frozen=True):
    shape: tuple[int, ...]
    dtype: str


class PackedSpace(msgspec.Struct, array_like=True, frozen=True):
    """A checkpoint space: names, the distinct shapes and dtypes, and which of those each tensor has."""

    names: PackedNames
    specs: tuple[_Spec, ...]
    spec_of: Packed


class _Map(msgspec.Struct, array_like=True, frozen=True):
    space: PackedSpace
    names: PackedNames
    specs: tuple[_Spec, ...]
    heads: Packed
    copies: tuple[Packed, ...]
    opaque: Packed
    depends_on: Packed


def pack_space(space: CheckpointSpace) -> PackedSpace:
    """A checkpoint space for use in a message."""
    names, order = encode_names(space.names)
    specs, spec_of = _distinct([_Spec(spec.shape, spec.dtype) for spec in space.specs])
    return PackedSpace(names, specs, pack_column(spec_of[order]))


def unpack_space(packed: PackedSpace, budget: Budget, error: type[LayoutError]) -> CheckpointSpace:
    """The space again; raises ``error``, or LayoutError for tensors that no checkpoint can have."""
    names = decode_names(packed.names, budget, error)
    spec_of = _indices(unpack_column(packed.spec_of, budget, error), len(packed.specs), error)
    if len(spec_of) != len(names):
        raise error(f"{len(names)} tensors have {len(spec_of)} shapes")
    kinds = [(spec.shape, spec.dtype) for spec in packed.specs]
    return CheckpointSpace(TensorSpec(name, *kinds[k]) for name, k in zip(names, spec_of.tolist(), strict=True))


def encode_map(space: CheckpointSpace, rows: Sequence[MapRow]) -> bytes:
    """Serialize a checkpoint space and the parameters of one map.

    Raises
    ------
    MapError
        If the map is larger than ``decode_map`` reads.
    """
    names, order = encode_names([row.name for row in rows])
    placed = [rows[position] for position in order.tolist()]
    specs, spec_of = _distinct([_Spec(row.shape, row.dtype) for row in placed])
    counts = [(len(row.copies), row.copies.axes, len(row.opaque), len(row.depends_on)) for row in placed]
    heads = np.concatenate([spec_of[:, None], np.array(counts, dtype=np.int64).reshape(-1, 4)], axis=1)
    most = max((row.copies.axes for row in placed), default=0)
    copies = [_joined([row.copies.rows for row in placed if row.copies.axes == axes], 2 + 3 * axes)
              for axes in range(1, most + 1)]  # fmt: skip
    depends = [space.position(tensor) for row in placed for tensor in row.depends_on]
    packed = _Map(
        pack_space(space),
        names,
        specs,
        pack_table(heads),
        tuple(pack_table(table) for table in copies),
        pack_table(_joined([row.opaque.runs for row in placed], 4)),
        pack_column(np.array(depends, dtype=np.int64)),
    )
    plain = msgspec.msgpack.encode(packed)
    tables = (packed.heads, *packed.copies, packed.opaque, packed.depends_on, *packed.names.numbers)
    tables += (packed.space.spec_of, *packed.space.names.numbers)
    values = sum(table.values for table in tables)
    if len(plain) > MAX_BYTES or values > MAX_VALUES or most > MAX_AXES:
        raise MapError(
            f"map of {len(rows)} parameters with {sum(map(len, copies)):,} slice copies takes {len(plain):,} bytes; at "
            f"most {MAX_BYTES:,} bytes and {MAX_VALUES:,} numbers can be read back: split it by parameter"
        )
    return seal(MAGIC, plain)


def decode_map(data: bytes) -> tuple[CheckpointSpace, list[MapRow]]:
    """Read ``encode_map``'s output; parameters come in no particular order.

    Raises
    ------
    MapBytesError
        For anything that ``encode_map`` of this version did not write, or that contradicts itself.
    """
    plain = unseal(data, MAGIC, what="a source map", limit=MAX_BYTES, error=MapBytesError)
    try:
        return _rebuild(msgspec.msgpack.decode(plain, type=_Map))
    except MapBytesError:
        raise
    except (msgspec.MsgspecError, LayoutError, ValueError, OverflowError) as error:
        raise MapBytesError(f"source map does not decode: {error}") from error


def _rebuild(packed: _Map) -> tuple[CheckpointSpace, list[MapRow]]:
    budget = Budget(MAX_VALUES)
    space = unpack_space(packed.space, budget, MapBytesError)
    names = decode_names(packed.names, budget, MapBytesError)
    if len(set(names)) != len(names):
        raise MapBytesError("source map names a parameter twice")
    heads = unpack_table(packed.heads, budget, MapBytesError)
    if heads.shape != (len(names), 5) or (heads.size and int(heads.min()) < 0) or len(packed.copies) > MAX_AXES:
        raise MapBytesError(f"source map describes {len(heads)} parameters and names {len(names)}")
    spec_of = _indices(heads[:, 0], len(packed.specs), MapBytesError)
    kinds = [(spec.shape, spec.dtype, _size(spec)) for spec in packed.specs]
    sizes = np.array([size for _, _, size in kinds], dtype=np.int64)[spec_of]
    tables, doubtful = _copy_tables(packed.copies, heads, names, sizes, space.total_elements, budget)
    runs = _parts(unpack_table(packed.opaque, budget, MapBytesError), heads[:, 3], 4, "opaque runs")
    tensors = space.names
    depends = _parts(unpack_column(packed.depends_on, budget, MapBytesError)[:, None], heads[:, 4], 1, "dependencies")
    rows = []
    stretches = 0
    for position, name in enumerate(names):
        shape, dtype, size = kinds[int(spec_of[position])]
        stretches += _check_opaque(name, runs[position], size)
        if stretches > MAX_STRETCHES:
            raise MapBytesError(f"more than {MAX_STRETCHES} stretches of opaque elements")
        opaque = RunTable.from_runs(runs[position]) if len(runs[position]) else RunTable.empty()
        if not np.array_equal(opaque.runs, runs[position]):
            raise MapBytesError(f"{name}: its opaque runs are not in normal form")
        needs = _indices(depends[position][:, 0], len(tensors), MapBytesError).tolist()
        if needs != sorted(set(needs)):
            raise MapBytesError(f"{name}: the tensors it depends on are not in order")
        rows.append(MapRow(name, shape, dtype, tables[position], opaque, tuple(tensors[k] for k in needs)))
        if position in doubtful or (len(opaque) and len(tables[position])):
            _check_meetings(rows[-1], size)
    return space, rows


def _copy_tables(
    packed: Sequence[Packed], heads: IdArray, names: Sequence[str], sizes: IdArray, total_elements: int, budget: Budget
) -> tuple[list[CopyTable], set[int]]:
    """Every parameter's slice copies, from the tables by number of axes, and which need a closer look for overlaps."""
    out = [CopyTable.empty()] * len(heads)
    doubtful: set[int] = set()
    if len(heads) and (int(heads[:, 2].min()) < 1 or int(heads[:, 2].max()) > len(packed)):
        raise MapBytesError(f"a parameter's copies have other than 1..{len(packed)} axes")
    for axes, table in enumerate(packed, start=1):
        owners = np.flatnonzero(heads[:, 2] == axes)
        rows = unpack_table(table, budget, MapBytesError)
        parts = _parts(rows, heads[owners, 1], 2 + 3 * axes, "slice copies")
        of_row = np.repeat(owners, heads[owners, 1])
        doubtful.update(_check_rows(CopyTable(rows), of_row, names, sizes, total_elements))
        for owner, part in zip(owners.tolist(), parts, strict=True):
            out[owner] = CopyTable(part)
    return out, doubtful


def _check_rows(
    copies: CopyTable, of_row: IdArray, names: Sequence[str], sizes: IdArray, total_elements: int
) -> set[int]:
    """Every copy inside its parameter and the checkpoint; parameters whose copies are not plainly apart."""
    if not len(copies):
        return set()
    extents, targets = copies.extents, np.abs(copies.target_strides)
    if int(extents.min()) < 1 or int(copies.rows.max()) > MAX_ELEMENTS or int(copies.rows.min()) < -MAX_ELEMENTS:
        raise MapBytesError(f"a slice copy has an extent below 1 or a number past {MAX_ELEMENTS}")
    # Floats cannot wrap; past this check neither can the exact sums in int64.
    wide = extents.astype(np.float64) - 1
    reach = np.maximum((wide * targets).sum(axis=1), (wide * np.abs(copies.source_strides)).sum(axis=1))
    if float(np.prod(wide + 1, axis=1).max()) > MAX_ELEMENTS or float(reach.max()) > MAX_ELEMENTS:
        raise MapBytesError(f"a slice copy reaches past {MAX_ELEMENTS} elements")
    low, high = copies.bounds(of="source")
    if int(low.min()) < 1 or int(high.max()) > total_elements:
        raise MapBytesError(f"a slice copy reads ids {low.min()}..{high.max()} of 1..{total_elements}")
    low, high = copies.bounds(of="target")
    outside = np.flatnonzero((low < 0) | (high >= sizes[of_row]))
    if len(outside):
        row = int(outside[0])
        owner = int(of_row[row])
        raise MapBytesError(f"{names[owner]}: a slice copy writes {low[row]}..{high[row]}, outside 0:{sizes[owner]}")
    plain = nested(extents, targets)
    # Sorted copies that begin after the one before them ended are apart; any other order is looked at closely.
    plain[1:] &= (of_row[1:] != of_row[:-1]) | (low[1:] > high[:-1])
    return set(of_row[~plain].tolist())


def _check_meetings(row: MapRow, size: int) -> None:
    """No element of a parameter claimed twice."""
    try:
        meets = pieces_meet(row.copies, row.opaque, size)
    except UndecidedError as error:
        raise MapBytesError(
            f"{row.name}: its {len(row.copies)} slice copies are too irregular to tell whether two write one element"
        ) from error
    if meets:
        raise MapBytesError(f"{row.name}: two of its claims meet in one element")


def _check_opaque(name: str, runs: IdArray, size: int) -> int:
    """Bounds of opaque runs; how many stretches they are."""
    if not len(runs):
        return 0
    start, length, stride, count = runs.T
    if int(runs.min()) < 0 or int(runs.max()) > MAX_ELEMENTS or int(runs[:, [1, 2, 3]].min()) < 1:
        raise MapBytesError(f"{name}: an opaque run has a number outside 1..{MAX_ELEMENTS}")
    ends = start.astype(np.float64) + (count - 1).astype(np.float64) * stride + length
    if float(ends.max()) > size:
        raise MapBytesError(f"{name}: opaque elements reach {ends.max():.0f}, outside 0:{size}")
    return int(count.astype(np.float64).sum())


def _size(spec: _Spec) -> int:
    if any(extent < 0 for extent in spec.shape) or len(spec.shape) > 64:
        raise MapBytesError(f"shape {spec.shape} has a negative extent or more than 64 axes")
    dtype_of(spec.dtype)
    size = math.prod(spec.shape)
    if size > MAX_ELEMENTS:
        raise MapBytesError(f"shape {spec.shape} has more than {MAX_ELEMENTS} elements")
    return size


def _indices(values: IdArray, count: int, error: type[LayoutError]) -> IdArray:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= count):
        raise error(f"an index is outside 0:{count}")
    return values


def _parts(rows: IdArray, counts: IdArray, columns: int, what: str) -> list[IdArray]:
    """Consecutive parts of a table."""
    # Counts are checked one by one first, so that their sum cannot wrap.
    if rows.shape[1] != columns or (len(counts) and int(counts.max()) > len(rows)) or int(counts.sum()) != len(rows):
        raise MapBytesError(f"a table of {len(rows)} {what} with {rows.shape[1]} columns belongs to no parameters")
    stops = np.cumsum(counts).tolist()
    return [rows[stop - count : stop] for stop, count in zip(stops, counts.tolist(), strict=True)]


def _joined(tables: Sequence[IdArray], columns: int) -> IdArray:
    return np.concatenate(tables) if tables else np.empty((0, columns), dtype=np.int64)


def _distinct(specs: Sequence[_Spec]) -> tuple[tuple[_Spec, ...], IdArray]:
    numbers: dict[_Spec, int] = {}
    which = [numbers.setdefault(spec, len(numbers)) for spec in specs]
    return tuple(numbers), np.array(which, dtype=np.int64)
