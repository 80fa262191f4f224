# Triton types these functions, not mypy:
# mypy: ignore-errors
"""The GPU kernel of digests: every program adds up the words or elements of one tile, inside one block of ids.

A sum modulo 2**64 does not care who adds first, so that programs add to it as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(7)
TABLE = tl.constexpr(4096)
"""Weights of a kind."""

WORDS, BYTES, HALVES, SINGLES, DOUBLES = (tl.constexpr(kind) for kind in range(5))
"""Kinds of tiles: 32-bit words of whatever elements; elements of 1, 2, 4 and 8 bytes."""


@triton.jit
def digest_tiles(tiles, first, weights, out, LANES: tl.constexpr):
    """Add tile ``first + program``: address, step in bytes, count, place of its first weight, factor, kind, label."""
    tile = tiles + (first + tl.program_id(0).to(tl.int64)) * FIELDS
    address, step, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    kind = tl.load(tile + 5)
    table = weights + kind * TABLE + tl.load(tile + 3)
    if kind == BYTES:
        total = _dot(address, step, count, table, tl.uint8, LANES)
    elif kind == HALVES:
        total = _dot(address, step, count, table, tl.uint16, LANES)
    elif kind == DOUBLES:
        total = _dot(address, step, count, table, tl.int64, LANES)
    elif kind == SINGLES:
        total = _dot(address, step, count, table, tl.uint32, LANES)
    else:
        total = _dot(address, 4, count, table, tl.uint32, LANES)
    tl.atomic_add(out + tl.load(tile + 6), total * tl.load(tile + 4))


@triton.jit
def _dot(address, step, count, table, ELEMENT: tl.constexpr, LANES: tl.constexpr):
    pointer: tl.constexpr = tl.pointer_type(ELEMENT)
    lane = tl.arange(0, LANES).to(tl.int64)
    total = tl.zeros((LANES,), dtype=tl.int64)
    for begin in range(0, count, LANES):
        place = begin + lane
        inside = place < count
        bits = tl.load((address + place * step).to(pointer), mask=inside, other=0).to(tl.int64)
        total += bits * tl.load(table + place, mask=inside, other=0)
    return tl.sum(total, 0)
