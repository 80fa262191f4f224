"""Stretches of memory that are counted through as one: what a worker lends to readers, and what a reader fills.

A read names bytes of the peer's stretches and bytes of its own, each by one offset, as a write names bytes of regions.
A range lies in one stretch, on both sides; that is checked here, for all rows at once.

>>> import numpy as np
>>> some = Stretches(np.array([5000, 9000]), np.array([100, 50]))
>>> some.locate(np.array([10, 100]), np.array([90, 50]), "lent by a").tolist()
[5010, 9000]
>>> some.locate(np.array([90]), np.array([20]), "lent by a")
Traceback (most recent call last):
...
transfer_exec.errors.TransportError: row 0 of 1 covers bytes 90:110 lent by a, which leaves stretch 0 at 0:100
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import TransportError
from transfer_exec.transport.shared_files import FilePlace

MAPPED = 1 << 62
"""Added to addresses of a peer's memory that this process has mapped, and which so are its own; no address has it."""


class Lent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer must know of lent memory.

    Attributes
    ----------
    where
        Whose address space it is in, as the transport spells it.
    addresses, sizes
        Of every stretch.
    files
        Where in a file each lies, if peers are to map it; None if they are to read it.
    """

    where: str
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    files: tuple[FilePlace | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Contiguous pieces of one process' memory.

    Attributes
    ----------
    addresses, sizes
        Of every stretch, in bytes; int64.
    files
        By position, where stretches lie in a file.
    """

    addresses: IdArray
    sizes: IdArray
    files: Mapping[int, FilePlace] = field(default_factory=dict)

    @staticmethod
    def of(lent: Lent) -> Stretches:
        """Of a peer's endpoint; TransportError if they cannot be."""
        addresses, sizes = lent.addresses, lent.sizes
        files = {number: place for number, place in enumerate(lent.files) if place is not None}
        good = len(addresses) == len(sizes) == len(lent.files) and all(size >= 0 for size in sizes)
        # Sums of sizes and of addresses and sizes must stay inside int64.
        begins = [*addresses, *(place.offset for place in files.values())]
        if not good or any(not 0 <= at < MAPPED for at in begins) or sum(sizes) >= 1 << 62:
            raise TransportError(f"{len(addresses)} addresses and {len(sizes)} sizes are no lent memory")
        return Stretches(np.array(addresses, dtype=np.int64), np.array(sizes, dtype=np.int64), files)

    def lent(self, where: str) -> Lent:
        """What a peer must know of them; ``where`` as in `Lent`."""
        addresses, sizes = self.addresses.tolist(), self.sizes.tolist()
        return Lent(where, tuple(addresses), tuple(sizes), tuple(self.files.get(n) for n in range(len(sizes))))

    def only(self, numbers: Sequence[int]) -> Stretches:
        """Some of them, in that order."""
        kept = list(numbers)
        files = {at: self.files[number] for at, number in enumerate(kept) if number in self.files}
        return Stretches(self.addresses[kept], self.sizes[kept], files)

    @property
    def starts(self) -> IdArray:
        """Where each stretch begins when they are counted through, and where the last ends."""
        out = np.zeros(len(self.sizes) + 1, dtype=np.int64)
        np.cumsum(self.sizes, out=out[1:])
        return out

    def locate(self, offsets: IdArray, lengths: IdArray, what: str) -> IdArray:
        """Addresses of some ranges.

        Raises
        ------
        TransportError
            If a range is in no stretch, or leaves the one that it begins in.
        """
        starts = self.starts
        stretch = np.clip(np.searchsorted(starts, offsets, side="right") - 1, 0, max(len(self.sizes) - 1, 0))
        total = int(starts[-1])
        bad = (offsets < 0) | (lengths < 0) | (offsets > total) | (lengths > total)
        if not bad.any():
            bad = offsets + lengths > starts[1:][stretch] if len(self.sizes) else lengths > 0
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            begin, stop, into = int(offsets[first]), int(offsets[first] + lengths[first]), int(stretch[first])
            place = f"stretch {into} at {starts[into]}:{starts[into + 1]}" if len(self.sizes) else "none"
            raise TransportError(
                f"row {first} of {len(offsets)} covers bytes {begin}:{stop} {what}, which leaves {place}"
            )
        found: IdArray = self.addresses[stretch] + offsets - starts[stretch] if len(self.sizes) else offsets
        return found
