"""What goes straight from parameter to parameter, beside the rounds of an update.

::

    trainer    tensors are ready ............................................. everybody has read
    rollout    | wait | read, in chunks on threads | still lent? | say so |

A reader is done when its source has not taken its tensors back before the last byte was read; a source that gives an
update up takes them back before it returns, so nobody mistakes what comes after for this version. Both are flags with
numbers: ``first_number`` of the version for "ready", one more for "taken back", and for "read" the other way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import TransportError
from transfer_exec.ledger import WRITING, Ledger
from transfer_exec.program import Fetch, FetchColumn, Offer, Program
from transfer_exec.signals import READ, Wait, first_number, lent_tag
from transfer_exec.transport.base import Descriptors, Ticket, Transport
from transfer_exec.transport.ranges import cut_long, group_edges
from transfer_exec.transport.reading import Reading, Sums
from transfer_exec.transport.stretches import Stretches

_CHUNK_BYTES = 8 << 20
"""Read at once: about a millisecond or two, after which a read that was given up ends."""
_CHUNK_ROWS = 1 << 14
_DRAIN_POLL_S = 50e-6


def chunks_of(worker: str, peer: str, rows: IdArray, lent: Stretches, memory: Stretches) -> tuple[Descriptors, ...]:
    """Cut the rows of a fetch into what is read at once.

    Parameters
    ----------
    worker, peer
        Who reads from whom.
    rows
        Columns as in `FetchColumn`.
    lent, memory
        Of the peer, and the worker's own.

    Raises
    ------
    TransportError
        If a row leaves the peer's lent tensor.
    """
    number, offset, size = rows[:, FetchColumn.LENT], rows[:, FetchColumn.LENT_OFFSET], rows[:, FetchColumn.BYTES]
    bad = number >= len(lent.sizes)
    if not bad.any():
        bad = offset + size > lent.sizes[number] if len(rows) else bad
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise TransportError(
            f"{worker}: reads {int(size[first])} bytes from byte {int(offset[first])} on of lent tensor "
            f"{int(number[first])} of {peer}, which lends {len(lent.sizes)} tensors and not so much of that one; "
            "compile both of one plan"
        )
    source = lent.starts[number] + offset
    target = memory.starts[rows[:, FetchColumn.TENSOR]] + rows[:, FetchColumn.OFFSET]
    cut, _ = cut_long(np.stack([source, target, size], axis=1), _CHUNK_BYTES)
    edges = group_edges(cut[:, 2], _CHUNK_BYTES, _CHUNK_ROWS)
    return tuple(cut[begin:stop].astype(np.uint64) for begin, stop in pairwise(edges.tolist()) if stop > begin)


@dataclass(slots=True, eq=False)
class Fetching:
    """The direct moves of one update.

    Attributes
    ----------
    program, transport, readings, version
        Connected and bound; what is read, by peer.
    ledger
        Where progress is noted.
    before_read
        Called before memory is written.
    sums
        To which the digests of what landed are added; None if nobody wants them.
    """

    program: Program
    transport: Transport
    readings: Mapping[str, Reading]
    version: int
    ledger: Ledger
    before_read: Callable[[], None]
    sums: Sums | None = None
    _tickets: set[Ticket] = field(default_factory=set)
    _lent_to: dict[str, Offer] = field(default_factory=dict)

    @property
    def _base(self) -> int:
        return first_number(self.version, self.program.rounds)

    def jobs(self) -> Iterator[Generator[Wait, None, None]]:
        """One for every peer; they go side by side."""
        for offer in self.program.offers:
            yield self._offer(offer)
        for fetch in self.program.fetches:
            yield self._fetch(fetch)

    def end(self) -> None:
        """Wait until no read writes any more, and take back what is still lent; also after a failure."""
        for ticket in self._tickets:
            self.transport.stop(ticket)
        while self._tickets:
            for ticket in list(self._tickets):
                with suppress(TransportError):
                    if not self.transport.finished(ticket):
                        continue
                self._tickets.discard(ticket)
            if self._tickets:
                time.sleep(_DRAIN_POLL_S)
        for offer in self._lent_to.values():
            with suppress(TransportError):
                self.transport.signal(offer.peer, offer.flag, self._base + 1, self._tag(offer))
        self._lent_to.clear()

    def _offer(self, offer: Offer) -> Generator[Wait, None, None]:
        begun = time.monotonic()
        self.transport.signal(offer.peer, offer.flag, self._base, self._tag(offer))
        self._lent_to[offer.peer] = offer
        self.ledger.touch(begun)
        reading = Wait(self.version, -1, offer.stage.name, f"for {offer.peer} to read its tensors")
        while not self._reached(offer, offer.done, self._base + 1):
            yield reading
        del self._lent_to[offer.peer]
        self.ledger.touch(time.monotonic())
        self.ledger.sent[offer.stage.value] += offer.bytes
        self.ledger.release_wait_s += self.ledger.took("wait", -1, begun, offer.peer, WRITING[offer.stage.value])

    def _fetch(self, fetch: Fetch) -> Generator[Wait, None, None]:
        begun = time.monotonic()
        stage, ledger = fetch.stage.value, self.ledger
        lent = Wait(self.version, -1, fetch.stage.name, f"for {fetch.peer} to lend its tensors")
        while not self._reached(fetch, fetch.flag, self._base):
            yield lent
        ledger.await_s[stage] += ledger.took("wait", -1, begun, fetch.peer, "lent")
        ledger.moves += 1
        begun = time.monotonic()
        ledger.touch(begun)
        self.before_read()
        yield from self._read(fetch)
        self._reached(fetch, fetch.flag, self._base)  # else what was read last may be of another version
        ledger.touch(time.monotonic())
        ledger.write_s[stage] += ledger.took(WRITING[stage], -1, begun, fetch.peer)
        self.transport.signal(fetch.peer, fetch.done, self._base + 1, self._tag(fetch))

    def _read(self, fetch: Fetch) -> Generator[Wait, None, None]:
        reading = Wait(self.version, -1, READ, f"for a read from {fetch.peer} to complete")
        ticket = self.transport.read(self.readings[fetch.peer], self.sums)
        self._tickets.add(ticket)
        yield reading
        while not self.transport.finished(ticket):
            yield reading
        self._tickets.discard(ticket)
        self.ledger.moves += 1

    def _reached(self, step: Offer | Fetch, flag: int, expected: int) -> bool:
        """Whether a peer's flag is where it is expected; TransportError if it is past that, or of another plan."""
        sequence, tag = self.transport.flag(flag)
        if sequence < expected:
            return False
        if sequence > expected or tag != self._tag(step):
            raise TransportError(
                f"{self.program.worker}: {step.peer} has gone past the direct moves of version {self.version}, or was "
                f"compiled of another plan (flag {sequence}, {tag:#x}; expected {expected}, {self._tag(step):#x}); the "
                "update was given up there"
            )
        return True

    def _tag(self, step: Offer | Fetch) -> int:
        ends = (self.program.worker, step.peer) if isinstance(step, Offer) else (step.peer, self.program.worker)
        return lent_tag(self.program.plan_digest, step.stage, *ends)
