"""Descriptor lists: which bytes of a message's source go where in its target, round by round.

A descriptor is ``(source offset, destination offset, bytes)``. A part is contiguous in every buffer it passes, so a
message has one descriptor a part at most, and parts that are neighbours in both buffers share one. Forwarding needs
no repacking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from transfer_exec.regions import Buffer, Layout, Message, Region, Regions

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


def descriptor_tables(regions: Regions, message: Message) -> tuple[DescriptorTable, ...]:
    """The tables of one message: one for every buffer of its source that it is read from."""
    target = regions.layout(Region(message.target, Buffer.of_stage(message.stage)))
    out = []
    for buffer, routes in regions.origins(message):
        source = regions.layout(Region(message.source, buffer))
        out.append(_table(buffer, source, target, routes))
    return tuple(out)


def _table(buffer: Buffer, source: Layout, target: Layout, routes: IdArray) -> DescriptorTable:
    rows_there = np.sort(target.rows_of(routes))
    rows_here = source.rows_of(target.routes[rows_there])
    sizes = target.sizes[rows_there].T
    rounds = len(sizes)
    flat = np.stack([source.offsets[rows_here].T, target.offsets[rows_there].T, sizes], axis=2).reshape(-1, 3)
    number = np.repeat(np.arange(rounds), len(routes))
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
