"""What a transport is: memory that peers may write, and flags that peers may raise.

A worker registers *regions* and publishes an `Endpoint` that describes them. A peer that knows the endpoint writes
byte ranges into the regions by *descriptor lists*, int arrays of ``(source offset, destination offset, bytes)``, and
then raises a *flag*: a channel number of the receiver, a sequence number that only grows, and a tag that names the
message's layout. Nothing here waits: writes give a ticket that can be asked, flags are read. The one loop that waits
is `transfer_exec.executor`, so every wait has a deadline and a name.

::

    mine   = transport.allocate(4096); handle = transport.register("RECEIVE", mine); endpoint = transport.endpoint()
    theirs : peer.connect(endpoint); ticket = peer.write(handle, worker, "RECEIVE", descriptors)
             while not peer.finished(ticket): ...          # raises TransportError, all failures listed
             peer.signal(worker, channel=0, sequence=1, tag=7)
    mine   : transport.flag(0) == Flag(1, 7)

Inside a host a worker may also *lend* memory that is not its transport's, such as parameters, and a peer reads it into
memory of its own: ``ticket = peer.read(peer.prepare_read(worker, memory, [descriptors]))``. Reading needs nothing of
the worker that lends, and never writes anybody else's memory.

What every transport must do beside moving bytes is in one place, `transfer_exec.transport.checked`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple, NewType, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_exec.errors import TransportError
from transfer_exec.transport.reading import NO_STRIPS, Reading, Strips, Sums
from transfer_exec.transport.stretches import Lent, Stretches

Memory = npt.NDArray[np.uint8]
"""A region: a one-dimensional, contiguous, writable array of bytes."""

Descriptors = npt.NDArray[np.uint64]
"""Shape ``(n, 3)``: source offset, destination offset, bytes."""

RegionHandle = NewType("RegionHandle", int)
"""A registered region of this worker; meaningless to every other transport object."""

Ticket = NewType("Ticket", int)
"""A posted write or read."""


class Flag(NamedTuple):
    """The newest signal on one channel: its sequence number (0 before the first) and its tag."""

    sequence: int
    tag: int


class Patience(NamedTuple):
    """How often whoever waits should look: after sleeps of an eighth of the time waited so far, between the two.

    So an event is seen late by an eighth of what it took at most, and looking takes the processor from nobody.
    """

    shortest_s: float = 20e-6
    longest_s: float = 2e-3

    def sleep_s(self, waited_s: float) -> float:
        """How long to sleep after having waited so long."""
        return min(max(waited_s / 8, self.shortest_s), self.longest_s)


class RegionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer must know of one region.

    Attributes
    ----------
    name, size_bytes
        As registered.
    address
        Where the transport finds its first piece; its own spelling.
    piece_bytes, more
        Size of the pieces that it was registered in, and where the others are. Most regions have one piece.
    """

    name: str
    size_bytes: int
    address: str
    piece_bytes: int = 1 << 62
    more: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all pieces; none of an empty region."""
        return (self.address, *self.more) if self.size_bytes else ()


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a peer needs to write to a worker; travels over the control plane.

    Attributes
    ----------
    worker
        Its name in the plan.
    transport
        Name of the implementation, ``"shared_memory"``.
    incarnation
        Random number of this transport object; a restarted worker has another.
    program
        Digest of the plan that the regions are laid out for.
    channels
        Number of flags.
    flags_address
        Where the transport finds the flags.
    regions
        The registered regions by name.
    lent
        Memory that peers may read.
    """

    worker: str
    transport: str
    incarnation: int
    program: str
    channels: int
    flags_address: str
    regions: tuple[RegionInfo, ...]
    lent: Lent | None = None

    def to_bytes(self) -> bytes:
        """Serialize with msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Endpoint:
        """Read ``to_bytes``' output; TransportError for anything else."""
        try:
            endpoint = msgspec.msgpack.decode(data, type=Endpoint)
        except msgspec.MsgspecError as error:
            raise TransportError(f"these {len(data)} bytes are no endpoint: {error}") from error
        if endpoint.channels < 0 or any(region.size_bytes < 0 for region in endpoint.regions):
            raise TransportError(f"{endpoint.worker}: endpoint has a negative size")
        for region in endpoint.regions:
            pieces = -(-region.size_bytes // region.piece_bytes) if region.piece_bytes > 0 else -1
            if len(region.addresses) != pieces:
                raise TransportError(
                    f"{endpoint.worker}: region {region.name} of {region.size_bytes} bytes in pieces of "
                    f"{region.piece_bytes} has {len(region.addresses)} addresses"
                )
        if len({region.name for region in endpoint.regions}) != len(endpoint.regions):
            raise TransportError(f"{endpoint.worker}: endpoint names a region twice")
        if endpoint.lent is not None:
            Stretches.of(endpoint.lent)
        return endpoint

    def region(self, name: str) -> RegionInfo:
        """The region of that name; TransportError if there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise TransportError(f"{self.worker}: has no region {name}; it has {[each.name for each in self.regions]}")


class Transport(Protocol):
    """One worker's end of a transport. Not thread-safe, except `flag` and `signal` beside one writing thread."""

    @property
    def name(self) -> str:
        """Name of the implementation; reports say it."""
        ...

    @property
    def worker(self) -> str:
        """The worker this end belongs to."""
        ...

    @property
    def place(self) -> str:
        """Where peers on other machines reach it, in words: address, interface, cards; empty inside one machine."""
        ...

    @property
    def patience(self) -> Patience:
        """For whoever waits; looking too often takes the processor from those that move bytes."""
        ...

    def allocate(self, size_bytes: int) -> Memory:
        """Zeroed memory that this transport can register, faulted in."""
        ...

    def register(self, name: str, memory: Memory) -> RegionHandle:
        """Let peers write to a region.

        Raises
        ------
        TransportError
            If the name is taken, the memory overlaps a registered region, or this transport cannot expose it.
        """
        ...

    def lend(self, memory: Stretches) -> None:
        """Let peers read memory, once, before `endpoint`; it stays the caller's, who keeps it alive and still.

        Raises
        ------
        TransportError
            If this transport cannot.
        """
        ...

    def open_flags(self, channels: int) -> None:
        """Make the flags, once, before `endpoint`. All begin at sequence 0."""
        ...

    def endpoint(self, program: str) -> Endpoint:
        """What peers need; ``program`` is the digest of the plan the regions are laid out for."""
        ...

    def connect(self, peer: Endpoint) -> None:
        """Make a peer writable, replacing an older incarnation of the same worker.

        Raises
        ------
        TransportError
            If the peer speaks another transport, is gone, or is no longer the incarnation that its endpoint names.
        UnreadableError, UnmappableError
            If it lends memory that this process is not allowed to read, or memory in a file that it cannot map.
        """
        ...

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        """Post copies from an own region into a peer's.

        The source must not change until the ticket is finished. A transport may finish the copy inside this call.

        Raises
        ------
        TransportError
            If a descriptor leaves either region or the peer is unknown; nothing was copied.
        """
        ...

    def prepare_read(
        self, peer: str, memory: Stretches, batches: Sequence[Descriptors], strips: Strips = NO_STRIPS
    ) -> Reading:
        """Check and locate what will be read, any number of times, from what a peer lends into own memory.

        Parameters
        ----------
        peer, memory
            Source and target of the descriptors.
        batches
            Descriptors; between two batches a read can be stopped.
        strips
            What is to be digested of own memory as it lands.

        Raises
        ------
        TransportError
            If a descriptor leaves a stretch on either side, or the peer is unknown or lends nothing.
        """
        ...

    def read(self, reading: Reading, sums: Sums | None = None) -> Ticket:
        """Post copies from what a peer lends into own memory; neither may go away until the ticket is finished.

        With ``sums`` the digests of all strips are added to them when it is (`layout_algebra.fingerprint`).

        Raises
        ------
        TransportError
            If the peer is unknown or was connected again since; nothing was copied.
        """
        ...

    def stop(self, ticket: Ticket) -> None:
        """Begin no more batches of a read; those that have begun end, and then so has the ticket."""
        ...

    def finished(self, ticket: Ticket) -> bool:
        """Whether a posted write has completed on the peer, or a read here; never blocks.

        Raises
        ------
        TransportError
            If any part of it failed, once all of it has ended; the message lists every failure.
        PeerGoneError
            If the peer of a read is gone by now: what was read may not have been its memory.
        """
        ...

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        """Raise a peer's flag, after every write to that peer that has finished.

        Raises
        ------
        TransportError
            If the peer is unknown or has no such channel.
        """
        ...

    def flag(self, channel: int) -> Flag:
        """Read an own flag; everything written before it was raised is visible afterwards."""
        ...

    def close(self) -> None:
        """Let go of all memory and peers. Peers that still write hold their own mapping; nothing breaks."""
        ...


def new_incarnation() -> int:
    """A random positive 63-bit number."""
    return secrets.randbits(62) + 1


def check_descriptors(
    descriptors: Descriptors, *, source_bytes: int, target_bytes: int, source: str, target: str
) -> None:
    """Refuse a descriptor list that leaves a region.

    Raises
    ------
    TransportError
        Naming the first descriptor, the region and its size.
    """
    if descriptors.ndim != 2 or descriptors.shape[1] != 3 or descriptors.dtype != np.uint64:
        raise TransportError(
            f"descriptors are {descriptors.dtype} of shape {descriptors.shape}; expected uint64 of shape (n, 3)"
        )
    for column, size, region in ((0, source_bytes, source), (1, target_bytes, target)):
        offsets, lengths = descriptors[:, column], descriptors[:, 2]
        bad = (lengths > size) | (offsets > np.uint64(size) - np.minimum(lengths, np.uint64(size)))
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            start, length = int(offsets[first]), int(lengths[first])
            raise TransportError(
                f"descriptor {first} of {len(descriptors)} covers bytes {start}:{start + length} of {region}, "
                f"which has {size}"
            )


def check_process(owner_pid: int, worker: str) -> None:
    """Refuse to go on in a forked child: its memory and threads are copies."""
    if os.getpid() != owner_pid:
        raise TransportError(
            f"{worker}: made in process {owner_pid}, used in its forked child {os.getpid()}; "
            "start workers with spawn, and make the transport in the process that uses it"
        )


def check_peer(mine: str, transport: str, peer: Endpoint) -> None:
    """Refuse an endpoint of another transport, or of this worker itself."""
    if peer.transport != transport:
        raise TransportError(f"{mine} speaks {transport}, {peer.worker} speaks {peer.transport}; use one on both sides")
    if peer.worker == mine:
        raise TransportError(f"{mine}: cannot connect to itself")


class RegionTable:
    """A transport's own table of registered regions."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The process that may use the regions."""
        self._regions: list[tuple[str, Memory]] = []

    def add(self, worker: str, name: str, memory: Memory) -> RegionHandle:
        """Register; TransportError if the name is taken, or the memory is unfit or overlaps a registered region."""
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
            raise TransportError(
                f"{worker}: region {name} is {memory.dtype} of shape {memory.shape}; expected writable contiguous bytes"
            )
        for other, taken in self._regions:
            if other == name:
                raise TransportError(f"{worker}: region {name} is registered already")
            if np.may_share_memory(taken, memory):
                raise TransportError(f"{worker}: region {name} overlaps region {other}")
        self._regions.append((name, memory))
        return RegionHandle(len(self._regions) - 1)

    def items(self) -> tuple[tuple[str, Memory], ...]:
        """Names and memory, in the order registered."""
        return tuple(self._regions)

    def of(self, worker: str, handle: RegionHandle) -> tuple[str, Memory]:
        """Name and memory of a handle; TransportError for a stale one."""
        if not 0 <= handle < len(self._regions):
            raise TransportError(f"{worker}: region handle {handle} is not registered")
        return self._regions[handle]

    def holding(self, worker: str, address: int, size_bytes: int) -> tuple[Memory, int]:
        """The region that some bytes lie in, and from where on; TransportError if none has them all."""
        for _, memory in self._regions:
            offset = address - memory.ctypes.data
            if 0 <= offset <= memory.nbytes - size_bytes:
                return memory, offset
        raise TransportError(f"{worker}: {size_bytes} bytes at {address:#x} are in no registered region")

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(memory.nbytes for _, memory in self._regions)

    def drop_last(self) -> None:
        """Forget the region that was added last."""
        self._regions.pop()

    def clear(self) -> None:
        """Forget all regions."""
        self._regions.clear()
