"""The loop under `adapters.rebuilding`: evenly spaced elements from one array of bits to another."""

from __future__ import annotations

from adapters.torch_bits import Bits
from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray

__all__ = ["copy_strips"]


@kernel
def copy_strips(source: Bits, target: Bits, rows: IdArray) -> None:
    """Copy strips of one flat array into another of the same width.

    Parameters
    ----------
    source, target
        One-dimensional.
    rows
        int64, shape ``(n, 4)``: first index in the target, length, first index in the source, step in the source.
    """
    for number in range(rows.shape[0]):
        to, length, start, step = rows[number]
        for position in range(length):
            target[to + position] = source[start + position * step]
