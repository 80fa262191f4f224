"""A source map as bytes: compact, versioned, checked, and harmless when they come from a stranger.

Layout: 8 bytes of magic and version, 16 bytes of BLAKE2b over the rest, then a zlib stream of one msgpack
array. Integer arrays travel as zigzag deltas from row to row, which regular maps turn into runs of zeros.
"""

from __future__ import annotations

import hashlib
import zlib

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LayoutError, MapBytesError
from layout_algebra.space import CheckpointSpace, TensorSpec

_MAGIC = b"TLMAP\x00\x00\x01"
_DIGEST_BYTES = 16
MAX_BYTES = 1 << 31
"""Largest unpacked size that ``decode_map`` accepts."""

MapRow = tuple[str, tuple[int, ...], str, IdArray, IdArray, tuple[str, ...]]
"""Name, shape, dtype, copy rows ``(n, 2 + 3 * axes)``, opaque runs ``(m, 4)``, depends_on."""


class _Tensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class _Parameter(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    columns: int
    copies: bytes
    opaque: bytes
    depends_on: tuple[str, ...]


class _Map(msgspec.Struct, array_like=True, frozen=True):
    tensors: tuple[_Tensor, ...]
    parameters: tuple[_Parameter, ...]


def encode_map(space: CheckpointSpace, rows: list[MapRow]) -> bytes:
    """Serialize a checkpoint space and the parameters of one map."""
    tensors = tuple(_Tensor(spec.name, spec.shape, spec.dtype) for spec in space.specs)
    parameters = tuple(
        _Parameter(name, shape, dtype, copies.shape[1], _pack(copies), _pack(opaque), depends_on)
        for name, shape, dtype, copies, opaque, depends_on in rows
    )
    body = zlib.compress(msgspec.msgpack.encode(_Map(tensors, parameters)), 6)
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def decode_map(data: bytes) -> tuple[CheckpointSpace, list[MapRow]]:
    """Read ``encode_map``'s output.

    Raises
    ------
    MapBytesError
        For anything that ``encode_map`` of this version did not write.
    """
    head = len(_MAGIC) + _DIGEST_BYTES
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) < head:
        raise MapBytesError("not a source map: shorter than its header")
    data = bytes(data)
    if data[: len(_MAGIC)] != _MAGIC:
        raise MapBytesError(f"not a source map of this version: begins with {data[: len(_MAGIC)]!r}")
    body = data[head:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : head]:
        raise MapBytesError("source map is truncated or altered: its digest differs")
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(body, MAX_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise MapBytesError(f"source map is incomplete or unpacks to more than {MAX_BYTES} bytes")
        decoded = msgspec.msgpack.decode(plain, type=_Map)
        space = CheckpointSpace(TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in decoded.tensors)
        rows: list[MapRow] = [
            (
                entry.name,
                entry.shape,
                entry.dtype,
                _unpack(entry.copies, entry.columns),
                _unpack(entry.opaque, 4),
                entry.depends_on,
            )
            for entry in decoded.parameters
        ]
    except (zlib.error, msgspec.MsgspecError, LayoutError, ValueError) as error:
        raise MapBytesError(f"source map does not decode: {error}") from error
    if len({row[0] for row in rows}) != len(rows):
        raise MapBytesError("source map names a parameter twice")
    if any(extent < 0 for row in rows for extent in row[1]):
        raise MapBytesError("source map has a negative extent")
    return space, rows


def _pack(rows: IdArray) -> bytes:
    deltas = np.diff(rows, axis=0, prepend=np.zeros((1, rows.shape[1]), dtype=np.int64))
    return np.ascontiguousarray(((deltas << 1) ^ (deltas >> 63)).T).astype("<i8").tobytes()


def _unpack(data: bytes, columns: int) -> IdArray:
    if columns < 1 or len(data) % (8 * columns):
        raise MapBytesError(f"a table of {len(data)} bytes does not have {columns} columns")
    packed = np.frombuffer(data, dtype="<u8").reshape(columns, -1).T
    deltas = (packed >> np.uint64(1)).astype(np.int64) ^ -(packed & np.uint64(1)).astype(np.int64)
    return np.cumsum(deltas, axis=0, dtype=np.int64)
