"""Descriptor lists: which bytes of a message's source go where in its target, round by round.

A descriptor is ``(source offset, destination offset, bytes)``. A part is contiguous in every buffer it passes, so a
message has one descriptor a part at most, and parts that are neighbours in both buffers share one. Forwarding needs
no repacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from transfer_exec.regions import Buffer, Layout, Letter

DescriptorRows = npt.NDArray[np.uint64]
"""Shape ``(n, 3)``: source offset, destination offset, bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorTable:
    """Descriptors from one buffer of a worker to one buffer of a peer, for every round.

    Attributes
    ----------
    buffer
        The source.
    rows
        uint64, shape ``(n, 3)``, by round and destination.
    bounds
        Rows ``bounds[k]:bounds[k + 1]`` belong to round k; int64, shape ``(rounds + 1,)``.
    """

    buffer: Buffer
    rows: DescriptorRows
    bounds: IdArray

    def of_round(self, number: int) -> DescriptorRows:
        """The descriptors of one round."""
        return self.rows[self.bounds[number] : self.bounds[number + 1]]

    def bytes_of_round(self, number: int) -> int:
        """Payload bytes of one round."""
        return int(self.of_round(number)[:, 2].sum())


def buffers_of(letter: Letter, layouts: Sequence[Layout]) -> list[Buffer]:
    """The buffers that a letter is read from."""
    ends = np.cumsum([len(layout.routes) for layout in layouts])
    return [Buffer(value) for value in np.unique(np.searchsorted(ends, letter.parts, side="right")).tolist()]


def descriptor_tables(letter: Letter, layouts: Sequence[Layout]) -> tuple[DescriptorTable, ...]:
    """The tables of one message, one for every buffer that it is read from.

    Parameters
    ----------
    letter
        The message.
    layouts
        Of its source's four buffers.
    """
    ends = np.cumsum([len(layout.routes) for layout in layouts])
    buffer = np.searchsorted(ends, letter.parts, side="right")
    item_bytes = np.concatenate([layout.item_bytes for layout in layouts])[letter.parts]
    block = np.concatenate([[0], np.cumsum(item_bytes[1:] != item_bytes[:-1])]).astype(np.int64)
    sizes = np.empty((len(letter.parts), letter.begins.shape[1]), dtype=np.int64)
    offsets = np.empty_like(sizes)
    for value in np.unique(buffer).tolist():
        here = buffer == value
        rows = letter.parts[here] - (ends[value] - len(layouts[value].routes))
        sizes[here], offsets[here] = layouts[value].sizes[rows], layouts[value].offsets[rows]
    before = np.cumsum(sizes, axis=0) - sizes
    heads = np.searchsorted(block, np.arange(len(letter.begins)))
    places = letter.begins[block] + before - before[heads][block]
    return tuple(
        _table(Buffer(value), *(table[buffer == value].T for table in (offsets, places, sizes)))
        for value in np.unique(buffer).tolist()
    )


def _table(buffer: Buffer, offsets: IdArray, places: IdArray, sizes: IdArray) -> DescriptorTable:
    """Descriptors of shape ``(rounds, parts)``, neighbours joined and empty ones left out."""
    rounds, parts = sizes.shape
    flat = np.stack([offsets, places, sizes], axis=2).reshape(-1, 3)
    number = np.repeat(np.arange(rounds), parts)
    kept = flat[:, 2] > 0
    flat, number = flat[kept], number[kept]
    joins = np.zeros(len(flat), dtype=bool)
    joins[1:] = (
        (flat[1:, 0] == flat[:-1, 0] + flat[:-1, 2])
        & (flat[1:, 1] == flat[:-1, 1] + flat[:-1, 2])
        & (number[1:] == number[:-1])
    )
    heads = np.flatnonzero(~joins)
    merged = flat[heads].copy()
    if len(heads):
        merged[:, 2] = np.add.reduceat(flat[:, 2], heads)
    bounds = np.searchsorted(number[heads], np.arange(rounds + 1))
    return DescriptorTable(buffer, merged.astype(np.uint64), bounds.astype(np.int64))
