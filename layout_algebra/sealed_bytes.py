"""Envelopes and integer tables: what every value of this package travels in.

An envelope is 8 bytes of magic and version, 16 bytes of BLAKE2b over the rest, then one zlib stream. A table of
integers is kept by column, as zigzag differences from row to row in as few bytes as the largest of them needs; columns
that do not change cost one byte. Both are read under a limit, whatever the bytes say.

>>> from layout_algebra.errors import MapBytesError
>>> table = np.arange(12).reshape(4, 3)
>>> packed = pack_table(table)
>>> len(packed.data), unpack_table(packed, Budget(100), MapBytesError).tolist() == table.tolist()
(15, True)
>>> unseal(seal(b"EXAMPLE1", b"plain"), b"EXAMPLE1", what="an example", limit=100, error=MapBytesError)
b'plain'
"""

from __future__ import annotations

import hashlib
import zlib

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LayoutError

MAGIC_BYTES = 8
_DIGEST_BYTES = 16
_WIDTHS = (0, 1, 2, 4, 8)


class Packed(msgspec.Struct, array_like=True, frozen=True):
    """An integer table of ``rows`` x ``columns`` as bytes."""

    rows: int
    columns: int
    data: bytes

    @property
    def values(self) -> int:
        """Integers in it: what it takes from a ``Budget``."""
        return self.rows * self.columns


class Budget:
    """How many integers may still be unpacked: one budget for all tables of one value."""

    __slots__ = ("left",)

    def __init__(self, values: int) -> None:
        self.left = values

    def spend(self, values: int, error: type[LayoutError]) -> None:
        """Take from the budget; raises ``error`` when it is overdrawn or the amount is negative."""
        if not 0 <= values <= self.left:
            raise error(f"{values:,} more numbers than the {self.left:,} that may still be unpacked")
        self.left -= values


def seal(magic: bytes, plain: bytes) -> bytes:
    """Compress and put behind magic and digest."""
    body = zlib.compress(plain)
    return magic + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unseal(data: bytes, magic: bytes, *, what: str, limit: int, error: type[LayoutError]) -> bytes:
    """Check an envelope and give what it holds.

    Parameters
    ----------
    what
        What the bytes should be, for messages.
    limit
        Most bytes to unpack.
    error
        What to raise.
    """
    head = MAGIC_BYTES + _DIGEST_BYTES
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) < head:
        raise error(f"not {what}: shorter than its header of {head} bytes")
    data = bytes(data)
    if data[:MAGIC_BYTES] != magic:
        raise error(f"not {what} of this version: begins with {data[:MAGIC_BYTES]!r}, expected {magic!r}")
    body = data[head:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[MAGIC_BYTES:head]:
        raise error(f"{what} is truncated or altered: its digest differs")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(body, limit)
    except zlib.error as cause:
        raise error(f"{what} does not unpack: {cause}") from cause
    if not inflate.eof or inflate.unused_data:
        raise error(f"{what} is incomplete or unpacks to more than {limit:,} bytes")
    return plain


def pack_table(rows: IdArray) -> Packed:
    """A table of int64, shape ``(n, k)``, as bytes."""
    count, columns = rows.shape
    deltas = np.diff(rows, axis=0, prepend=np.zeros((1, columns), dtype=np.int64))
    zigzag = ((deltas << 1) ^ (deltas >> 63)).astype(np.uint64)
    parts = []
    for column in zigzag.T:
        largest = int(column.max()) if count else 0
        width = next(width for width in _WIDTHS if largest < 1 << (8 * width))
        parts.append(bytes([width]) + (column.astype(f"<u{width}").tobytes() if width else b""))
    return Packed(count, columns, b"".join(parts))


def unpack_table(packed: Packed, budget: Budget, error: type[LayoutError]) -> IdArray:
    """The table again, int64, shape ``(rows, columns)``; raises ``error`` if bytes and counts do not agree."""
    count, columns, data = packed.rows, packed.columns, packed.data
    if count < 0 or columns < 0 or columns > len(data):
        raise error(f"a table of {len(data)} bytes does not have {count} rows and {columns} columns")
    budget.spend(count * columns, error)
    deltas = np.zeros((columns, count), dtype=np.uint64)
    at = 0
    for column in range(columns):
        width = data[at] if at < len(data) else -1
        stop = at + 1 + max(width, 0) * count
        if width not in _WIDTHS or stop > len(data):
            raise error(f"column {column} of a table of {count} rows is cut off or has width {width}")
        if width:
            deltas[column] = np.frombuffer(data, dtype=f"<u{width}", count=count, offset=at + 1)
        at = stop
    if at != len(data):
        raise error(f"a table has {len(data) - at} bytes after its last column")
    signed = (deltas >> np.uint64(1)).astype(np.int64) ^ -(deltas & np.uint64(1)).astype(np.int64)
    return np.ascontiguousarray(np.cumsum(signed, axis=1, dtype=np.int64).T)


def pack_column(values: IdArray) -> Packed:
    """A column of int64, shape ``(n,)``, as bytes."""
    return pack_table(np.asarray(values, dtype=np.int64).reshape(-1, 1))


def unpack_column(packed: Packed, budget: Budget, error: type[LayoutError]) -> IdArray:
    """The column again; raises ``error`` if it is none."""
    if packed.columns != 1:
        raise error(f"expected one column, got {packed.columns}")
    return unpack_table(packed, budget, error)[:, 0]
