"""Everything that no wire does by itself, above all of them: `CheckedTransport`, the base of every transport.

A wire (shared memory, a network card, the fake) exposes memory, copies between absolute addresses, and raises flags. It
believes whatever it is told. This class is the only one that talks to it, and it

- keeps the table of registered regions and checks every descriptor against it, and against the peer's endpoint;
- registers in pieces no larger than the wire can, withdraws all of a region if one piece fails, and lets no write
  cross a seam between pieces on either side;
- merges neighbouring descriptors, and keeps at most ``Limits.in_flight`` of them with the wire for each peer;
- hands out tickets that mean nothing to the wire, so a stale one cannot reach it;
- after a failed write posts no more of it, waits until what was posted has ended, and lists every failure;
- refuses peers of another incarnation, whenever it is about to write to or read from one, and when a read has ended;
- refuses to run in a forked child, and after `close`;
- pins what it allocates, where a device's kernels are to reach it.

Nothing here waits, so deadlines are the caller's: `transfer_exec.executor` polls against one. A wire that must wait, to
reach a peer, has a deadline of its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.device import Device
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.transport.base import (
    Descriptors,
    Endpoint,
    Flag,
    Memory,
    Patience,
    RegionHandle,
    RegionInfo,
    RegionTable,
    Ticket,
    check_descriptors,
    check_peer,
    check_process,
    new_incarnation,
)
from transfer_exec.transport.queues import Bases, Peer, Transfer
from transfer_exec.transport.ranges import cut_at_seams, merge_neighbours
from transfer_exec.transport.reading import NO_STRIPS, Batch, Reading, Strips, Sums
from transfer_exec.transport.stretches import Lent, Stretches

_Posted = TypeVar("_Posted")

_MOST = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a wire can take.

    Attributes
    ----------
    piece_bytes
        Largest single registration.
    total_bytes
        All registrations together.
    in_flight
        Descriptors with the wire at once, for each peer.
    patience
        Of whoever waits for it; by default for messages that take microseconds.
    """

    piece_bytes: int = 1 << 62
    total_bytes: int = 1 << 62
    in_flight: int = 1024
    patience: Patience = field(default_factory=Patience)


class CheckedTransport(ABC, Generic[_Posted]):
    """One worker's end of a transport; see `transfer_exec.transport.base.Transport` for what each method does.

    Parameters
    ----------
    worker
        Its name in the plan.
    name
        Of the implementation.
    limits
        Of the wire.
    device
        Whose kernels reach what `allocate` gives, if that is memory of the host.
    """

    def __init__(self, worker: str, name: str, limits: Limits, device: Device | None = None) -> None:
        self.worker = worker
        self.name = name
        self.incarnation = new_incarnation()
        self.place = ""
        self._limits = limits
        self._device = device
        self._pinned: list[Memory] = []
        self._regions = RegionTable()
        self._places: dict[str, tuple[str, ...]] = {}
        self._peers: dict[str, Peer[_Posted]] = {}
        self._writes: dict[int, Transfer[_Posted]] = {}
        self._posted = 0
        self._channels = 0
        self._lent: tuple[Stretches, Lent] | None = None
        self._flags_at: str | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def patience(self) -> Patience:
        """See `Transport.patience`."""
        return self._limits.patience

    # The wire

    @abstractmethod
    def _allocate(self, size_bytes: int) -> Memory:
        """Zeroed memory, faulted in."""

    @abstractmethod
    def _expose(self, memory: Memory) -> str:
        """Register a piece; its address in an endpoint. TransportError with the wire's own code or words."""

    @abstractmethod
    def _withdraw(self, memory: Memory) -> None:
        """Undo `_expose`."""

    @abstractmethod
    def _make_flags(self, channels: int) -> str:
        """Make the flags; their address in an endpoint."""

    @abstractmethod
    def _reach(self, peer: Endpoint) -> Bases:
        """Find a peer's memory, of this very incarnation, within a deadline."""

    @abstractmethod
    def _why_gone(self, peer: Endpoint) -> str:
        """Why a peer that was reached must not be written any more; empty if it may."""

    @abstractmethod
    def _post(self, peer: Endpoint, region: str, rows: IdArray) -> _Posted | None:
        """Copy rows of absolute ``(source, target, bytes)``; None if that is done on return."""

    def _lend(self, memory: Stretches) -> str:
        """Whose address space lent memory is in, as endpoints spell it."""
        raise TransportError(f"{self.name} cannot lend memory")

    def _reach_lent(self, peer: Endpoint, lent: Stretches) -> Stretches:
        """What a peer that was reached lends, with own addresses, and ``MAPPED``, of what this process has mapped."""
        return lent

    def _get_ready(self, batches: Sequence[Batch]) -> None:
        """Do what takes time when a first batch is fetched."""

    def _fetch(self, peer: Endpoint, batches: Sequence[Batch], sums: Sums | None) -> _Posted:
        """Copy what a `Reading` has, and add to sums when it has ended."""
        raise TransportError(f"{self.name} cannot read memory")

    def _stop(self, posted: _Posted) -> None:
        """Begin no more batches of what was fetched."""

    @abstractmethod
    def _ended(self, posted: _Posted) -> bool:
        """Whether what was posted has ended; TransportError if it failed. Never blocks."""

    @abstractmethod
    def _raise(self, peer: Endpoint, channel: int, flag: Flag) -> None:
        """Raise a peer's flag."""

    @abstractmethod
    def _read(self, channel: int) -> Flag:
        """Read an own flag."""

    @abstractmethod
    def _close(self) -> None:
        """Let go of everything."""

    # What users call

    def allocate(self, size_bytes: int) -> Memory:
        """See `Transport.allocate`."""
        self._check()
        if not size_bytes:
            return np.empty(0, dtype=np.uint8)
        memory = self._allocate(size_bytes)
        if self._device is not None and not self._device.owns(memory):
            self._device.pin(memory)
            self._pinned.append(memory)
        return memory

    def register(self, name: str, memory: Memory) -> RegionHandle:
        """See `Transport.register`."""
        self._check()
        handle = self._regions.add(self.worker, name, memory)
        pieces = self._pieces(memory)
        addresses: list[str] = []
        try:
            if self._regions.total_bytes > self._limits.total_bytes:
                raise TransportError(
                    f"{self._regions.total_bytes} bytes in all regions, and {self.name} registers at most "
                    f"{self._limits.total_bytes}"
                )
            for piece in pieces:
                addresses.append(self._expose(piece))
        except TransportError as error:
            for piece in pieces[: len(addresses)]:
                self._withdraw(piece)
            self._regions.drop_last()
            raise TransportError(
                f"{self.worker}: region {name} of {memory.nbytes} bytes cannot be registered: {error}"
            ) from error
        self._places[name] = tuple(addresses)
        return handle

    def lend(self, memory: Stretches) -> None:
        """See `Transport.lend`."""
        self._check()
        if self._lent is not None:
            raise TransportError(f"{self.worker}: memory is lent already")
        lent = memory.lent(self._lend(memory))
        self._lent = Stretches.of(lent), lent

    def open_flags(self, channels: int) -> None:
        """See `Transport.open_flags`."""
        self._check()
        if self._flags_at is not None:
            raise TransportError(f"{self.worker}: flags are open already")
        self._flags_at, self._channels = self._make_flags(channels), channels

    def endpoint(self, program: str) -> Endpoint:
        """See `Transport.endpoint`."""
        self._check()
        if self._flags_at is None:
            raise TransportError(f"{self.worker}: flags are not open")
        regions = tuple(
            RegionInfo(name, memory.nbytes, *_spelled(self._places[name], self._limits.piece_bytes))
            for name, memory in self._regions.items()
        )
        lent = None if self._lent is None else self._lent[1]
        return Endpoint(
            self.worker, self.name, self.incarnation, program, self._channels, self._flags_at, regions, lent
        )

    def connect(self, peer: Endpoint) -> None:
        """See `Transport.connect`."""
        self._check()
        check_peer(self.worker, self.name, peer)
        lent = None if peer.lent is None else Stretches.of(peer.lent)
        bases = self._reach(peer)
        self._peers[peer.worker] = Peer(peer, bases, None if lent is None else self._reach_lent(peer, lent))

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        """See `Transport.write`."""
        known = self._known(peer)
        name, memory = self._regions.of(self.worker, source)
        info = known.endpoint.region(region)
        check_descriptors(
            descriptors,
            source_bytes=memory.nbytes,
            target_bytes=info.size_bytes,
            source=f"{self.worker} {name}",
            target=f"{peer} {region}",
        )
        rows = merge_neighbours(descriptors).astype(np.int64)
        rows = cut_at_seams(rows, column=0, piece_bytes=self._limits.piece_bytes)
        rows = cut_at_seams(rows, column=1, piece_bytes=info.piece_bytes)
        rows[:, 0] += memory.ctypes.data
        pieces, offsets = rows[:, 1] // info.piece_bytes, rows[:, 1] % info.piece_bytes
        rows[:, 1] = np.array([*known.bases[region], 0], dtype=np.int64)[pieces] + offsets
        return self._take(Transfer(known, region, rows))

    def prepare_read(
        self, peer: str, memory: Stretches, batches: Sequence[Descriptors], strips: Strips = NO_STRIPS
    ) -> Reading:
        """See `Transport.prepare_read`."""
        known = self._known(peer)
        if known.lent is None:
            raise TransportError(f"{peer}: lends no memory")
        rows = np.concatenate([np.empty((0, 3), dtype=np.uint64), *batches])
        theirs, mine, lengths = np.minimum(rows, np.uint64(_MOST)).astype(np.int64).T  # beyond is in no stretch either
        source = known.lent.locate(theirs, lengths, f"lent by {peer}")
        target = memory.locate(mine, lengths, f"of {self.worker}")
        located = np.stack([target, source, mine, lengths], axis=1).astype(np.uint64)
        edges = np.cumsum([len(batch) for batch in batches])[:-1]
        parts = np.split(located, edges) if batches else ()
        found = tuple(Batch.of(merge_neighbours(part).astype(np.int64), strips) for part in parts)
        self._get_ready(found)
        return Reading(peer, found, known.lent)

    def read(self, reading: Reading, sums: Sums | None = None) -> Ticket:
        """See `Transport.read`."""
        known = self._known(reading.peer)
        if known.lent is not reading.lent:
            raise TransportError(f"{reading.peer}: was connected again since what is read of it was prepared")
        return self._take(Transfer(known, "", reading=self._fetch(known.endpoint, reading.batches, sums)))

    def stop(self, ticket: Ticket) -> None:
        """See `Transport.stop`."""
        transfer = self._writes.get(ticket)
        if transfer is not None and transfer.reading is not None:
            self._stop(transfer.reading)

    def finished(self, ticket: Ticket) -> bool:
        """See `Transport.finished`."""
        self._check()
        if not 0 < ticket <= self._posted:
            raise TransportError(f"{self.worker}: write {ticket} was never posted")
        write = self._writes.get(ticket)
        if write is None:
            return True
        for each in [each for each in self._writes.values() if each.peer is write.peer]:
            self._collect(each)
        self._post_more(write.peer)
        if write.under_way or (write.position < len(write.rows) and not write.failures):
            return False
        if write.failures:
            raise TransportError("; ".join(write.failures))
        if write.reading is not None:
            self._known(write.peer.endpoint.worker)
        del self._writes[ticket]
        return True

    def why_gone(self, peer: Endpoint) -> str:
        """Why a connected peer must not be written any more; empty if it may."""
        return self._why_gone(peer)

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        """See `Transport.signal`."""
        known = self._known(peer)
        if not 0 <= channel < known.endpoint.channels:
            raise TransportError(f"{peer}: has no flag {channel}; it has {known.endpoint.channels}")
        self._raise(known.endpoint, channel, Flag(sequence, tag))

    def flag(self, channel: int) -> Flag:
        """See `Transport.flag`."""
        self._check()
        if not 0 <= channel < self._channels:
            raise TransportError(f"{self.worker}: has no flag {channel}; it has {self._channels}")
        return self._read(channel)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        while self._device is not None and self._pinned and os.getpid() == self._regions.pid:
            self._device.unpin(self._pinned.pop())
        for _, memory in self._regions.items():
            for piece in self._pieces(memory):
                self._withdraw(piece)
        self._close()

    # Inside

    def _pieces(self, memory: Memory) -> list[Memory]:
        size = self._limits.piece_bytes
        return [memory[start : start + size] for start in range(0, memory.nbytes, size)]

    def _take(self, write: Transfer[_Posted]) -> Ticket:
        self._posted += 1
        self._writes[self._posted] = write
        if write.reading is not None:
            write.under_way.append((write.reading, 0))
            return Ticket(self._posted)
        write.peer.queue.append(write)
        self._post_more(write.peer)
        return Ticket(self._posted)

    def _post_more(self, peer: Peer[_Posted]) -> None:
        """Post what there is room for, oldest write first."""
        while peer.queue:
            write = peer.queue[0]
            while write.position < len(write.rows) and not write.failures:
                room = self._limits.in_flight - peer.in_flight
                if room <= 0:
                    return
                batch = write.rows[write.position : write.position + room]
                write.position += len(batch)
                try:
                    posted = self._post(peer.endpoint, write.region, batch)
                except TransportError as error:
                    write.failures.append(str(error))
                    break
                if posted is not None:
                    write.under_way.append((posted, len(batch)))
                    peer.in_flight += len(batch)
            peer.queue.popleft()

    def _collect(self, write: Transfer[_Posted]) -> None:
        left = []
        for posted, count in write.under_way:
            try:
                ended = self._ended(posted)
            except TransportError as error:
                write.failures.append(str(error))
                ended = True
            if ended:
                write.peer.in_flight -= count
            else:
                left.append((posted, count))
        write.under_way = left

    def _check(self) -> None:
        check_process(self._regions.pid, self.worker)
        if self._closed:
            raise TransportError(f"{self.worker}: transport is closed")

    def _known(self, peer: str) -> Peer[_Posted]:
        """A connected peer that may still be written."""
        self._check()
        known = self._peers.get(peer)
        if known is None:
            names = ", ".join(self._peers) or "nobody"
            raise TransportError(f"{self.worker}: is not connected to {peer}; it is to {names}")
        gone = self._why_gone(known.endpoint)
        if gone:
            raise PeerGoneError(f"{peer}: {gone}; exchange endpoints again")
        return known


def _spelled(addresses: tuple[str, ...], piece_bytes: int) -> tuple[str, int, tuple[str, ...]]:
    """Address of the first piece, size of the pieces and addresses of the others, as `RegionInfo` has them."""
    return (addresses[0] if addresses else ""), piece_bytes, addresses[1:]
