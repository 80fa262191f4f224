"""Between hosts: Mooncake's transfer engine, over TCP or RDMA.

Regions are memory of this process, registered with the engine; a peer writes to them by address. A write is done when
the peer's memory has it (TCP is acknowledged, RDMA completes on the card), so a flag that is posted after that cannot
overtake the bytes it speaks of.

A flag is a small write too. Writes overtake each other, so every channel has a ring of four slots, and a signal goes
to the slot of its sequence number: a late one never covers a newer one. A slot holds the number, the tag and a seal
over both and the receiver's incarnation. The reader takes the newest slot whose seal is right; half a slot, or one
that an older life of this worker was meant to get, is no signal::

    flags region   | incarnation, 56 bytes free | channel 0: slot 0, 1, 2, 3 | channel 1: ... |
    slot           | sequence | tag | seal | free |          4 x 8 bytes

At most 1000 descriptors a peer are with the engine at any time, the rest waits here. After a failed write to a peer
nothing more goes to it until it is connected again. Sources of failed writes stay alive until the engine is gone.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from transfer_exec.errors import TransportError
from transfer_exec.kernels.cpu import read_word
from transfer_exec.transport.base import (
    Descriptors,
    Endpoint,
    Flag,
    Memory,
    RegionHandle,
    RegionInfo,
    RegionTable,
    Ticket,
    check_descriptors,
    check_peer,
    check_process,
    new_incarnation,
)
from transfer_exec.transport.mooncake_engine import MooncakeEngine, Post, PostState, describe

_HEADER_BYTES = 64
_SLOTS = 4
_SLOT_BYTES = 32
_MOST_IN_FLIGHT = 1000
_TRIES = 3
_POLL_S = 100e-6
_WORD = (1 << 64) - 1

NAMES = {"mooncake": "tcp", "mooncake-rdma": "rdma"}
"""Transport names and the protocol that each of them is."""


class MooncakeTransport:
    """One worker's end of the mooncake transport.

    Parameters
    ----------
    worker
        Its name in the plan.
    host
        Address at which peers reach this machine: a number or a name.
    protocol
        ``"tcp"`` or ``"rdma"``; what does not run as asked is refused.
    devices
        RDMA devices by name, separated by commas; by default all.
    deadline_s
        Of connecting to one peer, and of every other call that may wait.

    Raises
    ------
    TransportError
        If Mooncake is not installed, or does not run the protocol here.
    """

    def __init__(
        self, worker: str, host: str, *, protocol: str = "tcp", devices: str = "", deadline_s: float = 10.0
    ) -> None:
        names = {value: name for name, value in NAMES.items()}
        if protocol not in names:
            raise TransportError(f"{worker}: mooncake has no protocol {protocol!r}; expected {' or '.join(names)}")
        self._worker, self._protocol, self._name = worker, protocol, names[protocol]
        self._deadline_s = deadline_s
        self._incarnation = new_incarnation()
        self._regions = RegionTable()
        self._engine: MooncakeEngine | None = MooncakeEngine(
            worker, host, protocol=protocol, devices=devices, deadline_s=deadline_s
        )
        self._scratch = self._registered(8)
        self._flags: Memory | None = None
        self._flags_address = 0
        self._channels = 0
        self._newest: list[Flag] = []
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[int, _Write] = {}
        self._failed: dict[int, str] = {}
        self._posted = 0
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """Name of the implementation: ``"mooncake"`` over TCP, ``"mooncake-rdma"`` over RDMA."""
        return self._name

    @property
    def worker(self) -> str:
        """The worker this end belongs to."""
        return self._worker

    def allocate(self, size_bytes: int) -> Memory:
        """Zeroed memory in whole pages, faulted in; see `Transport.allocate`."""
        self._check()
        if size_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        except OSError as error:
            raise TransportError(f"{self._worker}: cannot get {size_bytes} bytes of memory: {error}") from error
        return np.frombuffer(mapped, dtype=np.uint8)

    def register(self, name: str, memory: Memory) -> RegionHandle:
        """Let peers write to any memory of this process; see `Transport.register`."""
        engine = self._check()
        handle = self._regions.add(self._worker, name, memory)
        if memory.nbytes:
            engine.register(memory)
        return handle

    def open_flags(self, channels: int) -> None:
        """Make the flags; see `Transport.open_flags`."""
        self._check()
        if self._flags is not None:
            raise TransportError(f"{self._worker}: flags are open already")
        self._flags = self._registered(_flags_bytes(channels))
        self._flags[:8].view(np.uint64)[0] = self._incarnation
        self._flags_address = self._flags.ctypes.data
        self._channels = channels
        self._newest = [Flag(0, 0)] * channels

    def endpoint(self, program: str) -> Endpoint:
        """What peers need; see `Transport.endpoint`."""
        engine = self._check()
        if self._flags is None:
            raise TransportError(f"{self._worker}: flags are not open")
        regions = tuple(
            RegionInfo(name, memory.nbytes, f"{memory.ctypes.data:#x}") for name, memory in self._regions.items()
        )
        address = f"{self._protocol}://{engine.session}/{self._flags_address:#x}"
        return Endpoint(self._worker, self.name, self._incarnation, program, self._channels, address, regions)

    def connect(self, peer: Endpoint) -> None:
        """Ask the peer's engine what it has, and read its incarnation; see `Transport.connect`."""
        engine = self._check()
        check_peer(self._worker, self.name, peer)
        session, flags = _parse(peer, self._protocol)
        wanted = {region.name: (_pointer(peer, region.address), region.size_bytes) for region in peer.regions}
        host, _, port = session.rpartition(":")
        about = describe(peer.worker, host, int(port), deadline_s=self._deadline_s)
        if about.protocol != self._protocol:
            raise TransportError(f"{peer.worker}: its mooncake runs {about.protocol}, not {self._protocol}")
        for name, place in [*wanted.items(), ("flags", (flags, _flags_bytes(peer.channels)))]:
            if place[1] and place not in about.buffers:
                raise TransportError(
                    f"{peer.worker}: has no region {name} of {place[1]} bytes at {place[0]:#x} any more; it was "
                    "restarted, or the endpoint is old; exchange endpoints again"
                )
        # The first try after a restart on the same port may meet what the engine remembers of the older process.
        if not any(engine.read(session, flags, self._scratch) for _ in range(_TRIES)):
            raise TransportError(f"{peer.worker}: mooncake at {session} answers, but its memory cannot be read")
        incarnation = int(self._scratch.view(np.uint64)[0])
        if incarnation != peer.incarnation:
            raise TransportError(
                f"{peer.worker}: endpoint is of incarnation {peer.incarnation}, its memory of {incarnation}; "
                "exchange endpoints again"
            )
        outbox = self._registered(_flags_bytes(peer.channels))
        with self._lock:
            addresses = {name: pointer for name, (pointer, _) in wanted.items()}
            self._peers[peer.worker] = _Peer(peer, session, flags, addresses, outbox)

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        """Hand a descriptor list to the engine; see `Transport.write`."""
        engine = self._check()
        with self._lock:
            known = self._peer(peer)
            name, memory = self._regions.of(self._worker, source)
            size_bytes = known.endpoint.region(region).size_bytes
            place = f"{peer} {region}"
            check_descriptors(
                descriptors,
                source_bytes=memory.nbytes,
                target_bytes=size_bytes,
                source=f"{self._worker} {name}",
                target=place,
            )
            begins = np.array([memory.ctypes.data, known.addresses[region], 0], dtype=np.uint64)
            rows = (descriptors[descriptors[:, 2] > 0] + begins).tolist()
            self._posted += 1
            self._writes[self._posted] = _Write(known, place, deque((a, b, c) for a, b, c in rows))
            self._advance(engine, self._posted)
            return Ticket(self._posted)

    def finished(self, ticket: Ticket) -> bool:
        """Whether a write has ended; posts what was waiting for room. See `Transport.finished`."""
        engine = self._check()
        with self._lock:
            if not 0 < ticket <= self._posted:
                raise TransportError(f"{self._worker}: write {ticket} was never posted")
            if ticket in self._writes:
                self._advance(engine, ticket)
            if ticket in self._failed:
                raise TransportError(self._failed[ticket])
            return ticket not in self._writes

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        """Raise a peer's flag; see `Transport.signal`."""
        engine = self._check()
        with self._lock:
            known = self._peer(peer)
            if not 0 <= channel < known.endpoint.channels:
                raise TransportError(f"{peer}: has no flag {channel}; it has {known.endpoint.channels}")
            at = _slot_offset(channel, sequence % _SLOTS)
            self._await_slot(engine, known, at)
            known.outbox[at : at + 24].view(np.uint64)[:] = (
                sequence,
                tag,
                _seal(sequence, tag, known.endpoint.incarnation),
            )
            source = known.outbox.ctypes.data + at
            known.signals[at] = engine.post_write(known.session, source, known.flags_address + at, _SLOT_BYTES)

    def flag(self, channel: int) -> Flag:
        """Read an own flag; see `Transport.flag`."""
        self._check()
        if not 0 <= channel < self._channels:
            raise TransportError(f"{self._worker}: has no flag {channel}; it has {self._channels}")
        newest = self._newest[channel]
        for slot in range(_SLOTS):
            address = self._flags_address + _slot_offset(channel, slot)
            sequence = read_word(address)
            if sequence > newest.sequence:
                tag = read_word(address + 8)
                if read_word(address + 16) == _seal(sequence, tag, self._incarnation):
                    newest = Flag(sequence, tag)
        self._newest[channel] = newest
        return newest

    def close(self) -> None:
        """Stop the engine: from then on nobody writes here, and no source is read. Takes about a second."""
        with self._lock:
            if self._engine is None or os.getpid() != self._regions.pid:
                return
            engine, self._engine = self._engine, None
            engine.close()
            self._peers.clear()
            self._writes.clear()
            self._regions.clear()

    def _advance(self, engine: MooncakeEngine, ticket: int) -> None:
        """Collect what has ended of a write, post what there is room for, and say how it went when all has ended."""
        write = self._writes[ticket]
        peer = write.peer
        while write.posts and (state := engine.poll(write.posts[0])) is not PostState.PENDING:
            write.posts.popleft()
            peer.in_flight -= 1
            if state is PostState.FAILED:
                write.failures += 1
        if write.failures or peer.failure:
            write.skipped += len(write.todo)
            write.todo.clear()
        while write.todo and peer.in_flight < _MOST_IN_FLIGHT:
            source, target, length = write.todo.popleft()
            write.posts.append(engine.post_write(peer.session, source, target, length))
            peer.in_flight += 1
        if write.posts or write.todo:
            return
        del self._writes[ticket]
        if write.failures or write.skipped:
            peer.failure = peer.failure or f"{write.failures} descriptors to {write.place} failed"
            self._failed[ticket] = (
                f"{self._worker}: write to {write.place}: {write.failures} descriptors failed and {write.skipped} "
                f"were not sent; {peer.endpoint.worker} died, was cut off, or took its memory back"
            )

    def _await_slot(self, engine: MooncakeEngine, peer: _Peer, at: int) -> None:
        """Wait for the earlier signal that used a slot; it is four signals old, so it has nearly always ended."""
        earlier = peer.signals.pop(at, None)
        stop_at = time.monotonic() + self._deadline_s
        while earlier is not None and (state := engine.poll(earlier)) is not PostState.DONE:
            if state is PostState.FAILED:
                peer.failure = peer.failure or f"a signal to {peer.endpoint.worker} failed"
                self._peer(peer.endpoint.worker)
            if time.monotonic() > stop_at:
                peer.signals[at] = earlier
                raise TransportError(
                    f"{self._worker}: {peer.endpoint.worker} did not take a signal within {self._deadline_s:g} s"
                )
            time.sleep(_POLL_S)

    def _registered(self, size_bytes: int) -> Memory:
        memory = self.allocate(size_bytes)
        self._check().register(memory)
        return memory

    def _check(self) -> MooncakeEngine:
        check_process(self._regions.pid, self._worker)
        if self._engine is None:
            raise TransportError(f"{self._worker}: transport is closed")
        return self._engine

    def _peer(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            names = ", ".join(self._peers) or "nobody"
            raise TransportError(f"{self._worker}: is not connected to {peer}; it is to {names}")
        if known.failure:
            raise TransportError(f"{self._worker}: {known.failure}; connect to {peer} again")
        return known


@dataclass(slots=True, eq=False)
class _Peer:
    """A connected peer: where its memory is, what is under way to it, and why nothing more may go there."""

    endpoint: Endpoint
    session: str
    flags_address: int
    addresses: dict[str, int]
    outbox: Memory
    signals: dict[int, Post] = field(default_factory=dict)
    in_flight: int = 0
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Write:
    """One ticket: descriptors with the engine, oldest first, and those that wait for room."""

    peer: _Peer
    place: str
    todo: deque[tuple[int, int, int]]
    posts: deque[Post] = field(default_factory=deque)
    failures: int = 0
    skipped: int = 0


def _flags_bytes(channels: int) -> int:
    return _HEADER_BYTES + _SLOTS * _SLOT_BYTES * channels


def _slot_offset(channel: int, slot: int) -> int:
    return _HEADER_BYTES + _SLOT_BYTES * (_SLOTS * channel + slot)


def _seal(sequence: int, tag: int, incarnation: int) -> int:
    """64 bits that a torn or foreign slot does not have."""
    mixed = (sequence * 0x9E3779B97F4A7C15 ^ tag) * 0xC2B2AE3D27D4EB4F & _WORD
    return (mixed ^ mixed >> 29 ^ incarnation) * 0x165667B19E3779F9 & _WORD


def _parse(peer: Endpoint, protocol: str) -> tuple[str, int]:
    """Session and flags of an endpoint's address, ``"tcp://10.0.0.3:15123/0x7f00"``."""
    scheme, _, rest = peer.flags_address.partition("://")
    session, _, flags = rest.rpartition("/")
    host, _, port = session.rpartition(":")
    if scheme != protocol or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise TransportError(f"{peer.worker}: {peer.flags_address!r} is no address of mooncake over {protocol}")
    return session, _pointer(peer, flags)


def _pointer(peer: Endpoint, text: str) -> int:
    try:
        pointer = int(text, 16)
    except ValueError as error:
        raise TransportError(f"{peer.worker}: {text!r} is no address of memory") from error
    if not 0 < pointer < 1 << 63:
        raise TransportError(f"{peer.worker}: {text!r} is no address of memory")
    return pointer
