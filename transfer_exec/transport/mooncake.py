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

A peer to which a write or a signal failed is gone: nothing more goes to it until it is connected again. Sources of
failed writes stay alive until the engine is stopped.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.device import Device
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.host_reading import RDMA, read_addresses, read_devices, read_gids
from transfer_exec.kernels.cpu import read_word
from transfer_exec.transport.addresses import choose_address, usable_addresses
from transfer_exec.transport.base import Endpoint, Flag, Memory, Patience
from transfer_exec.transport.checked import CheckedTransport, Limits
from transfer_exec.transport.devices import choose_devices
from transfer_exec.transport.mooncake_engine import MooncakeEngine, Post, PostState, describe
from transfer_exec.transport.queues import Bases

_HEADER_BYTES = 64
_SLOTS = 4
_SLOT_BYTES = 32
_MOST = 1000  # the engine refuses what is beyond 1024 for one peer, sends it all the same, and flags need room too
_LIMITS = {
    # A message over TCP takes milliseconds, and the threads that move it need the processor that looking would take.
    "tcp": Limits(in_flight=_MOST, patience=Patience(shortest_s=500e-6)),
    "rdma": Limits(in_flight=_MOST),
}
_TRIES = 3
_POLL_S = 100e-6
_WORD = (1 << 64) - 1

NAMES = {"mooncake": "tcp", "mooncake-rdma": "rdma"}
"""Transport names and the protocol that each of them is."""


class MooncakeTransport(CheckedTransport["_Posted"]):
    """One worker's end of the mooncake transport; its name is ``"mooncake"`` over TCP, ``"mooncake-rdma"`` over RDMA.

    Parameters
    ----------
    worker
        Its name in the plan.
    host
        Address at which peers reach this machine: a number or a name.
    protocol
        ``"tcp"`` or ``"rdma"``; what does not run as asked is refused.
    devices
        Which RDMA devices, as `transfer_exec.transport.devices` spells it; by default all.
    deadline_s
        Of connecting to one peer, and of every other call that may wait.
    device
        Whose kernels reach what is allocated. The engine is given memory of the host only, over RDMA too.

    Raises
    ------
    TransportError
        If Mooncake is not installed, or does not run the protocol here.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        *,
        protocol: str = "tcp",
        devices: str = "",
        deadline_s: float = 10.0,
        device: Device | None = None,
    ) -> None:
        names = {value: name for name, value in NAMES.items()}
        if protocol not in names:
            raise TransportError(f"{worker}: mooncake has no protocol {protocol!r}; expected {' or '.join(names)}")
        super().__init__(worker, names[protocol], _LIMITS[protocol], device)
        self._protocol, self._deadline_s = protocol, deadline_s
        cards = _choose_cards(host, devices) if protocol == "rdma" else _Cards((), None)
        self.place = _describe_place(host, cards)
        self._engine = MooncakeEngine(
            worker,
            host,
            protocol=protocol,
            devices=",".join(cards.names) if devices else "",
            gid=cards.gid,
            deadline_s=deadline_s,
        )
        self._scratch = self._registered(8)
        self._flags_address = 0
        self._newest: list[Flag] = []
        self._reached: dict[str, _Reached] = {}
        self._lock = threading.Lock()

    def _allocate(self, size_bytes: int) -> Memory:
        try:
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        except OSError as error:
            raise TransportError(f"{self.worker}: cannot get {size_bytes} bytes of memory: {error}") from error
        return np.frombuffer(mapped, dtype=np.uint8)

    def _expose(self, memory: Memory) -> str:
        self._engine.register(memory)
        return f"{memory.ctypes.data:#x}"

    def _withdraw(self, memory: Memory) -> None:
        if os.getpid() == self._regions.pid:
            self._engine.unregister(memory)

    def _make_flags(self, channels: int) -> str:
        flags = self._registered(_flags_bytes(channels))
        flags[:8].view(np.uint64)[0] = self.incarnation
        self._flags_address = flags.ctypes.data
        self._newest = [Flag(0, 0)] * channels
        return f"{self._protocol}://{self._engine.session}/{self._flags_address:#x}"

    def _reach(self, peer: Endpoint) -> Bases:
        """Ask the peer's engine what it has, and read its incarnation."""
        session, flags = _parse(peer, self._protocol)
        bases = {region.name: tuple(_pointer(peer, address) for address in region.addresses) for region in peer.regions}
        host, _, port = session.rpartition(":")
        about = describe(peer.worker, host, int(port), deadline_s=self._deadline_s)
        if about.protocol != self._protocol:
            raise TransportError(f"{peer.worker}: its mooncake runs {about.protocol}, not {self._protocol}")
        places = [("flags", flags, _flags_bytes(peer.channels))]
        for region in peer.regions:
            for number, base in enumerate(bases[region.name]):
                left = region.size_bytes - number * region.piece_bytes
                places.append((region.name, base, min(left, region.piece_bytes)))
        for name, base, size_bytes in places:
            if (base, size_bytes) not in about.buffers:
                raise TransportError(
                    f"{peer.worker}: has no region {name} of {size_bytes} bytes at {base:#x} any more; it was "
                    "restarted, or the endpoint is old; exchange endpoints again"
                )
        # The first try after a restart on the same port may meet what the engine remembers of the older process.
        if not any(self._engine.read(session, flags, self._scratch) for _ in range(_TRIES)):
            raise TransportError(f"{peer.worker}: mooncake at {session} answers, but its memory cannot be read")
        incarnation = int(self._scratch.view(np.uint64)[0])
        if incarnation != peer.incarnation:
            raise TransportError(
                f"{peer.worker}: endpoint is of incarnation {peer.incarnation}, its memory of {incarnation}; "
                "exchange endpoints again"
            )
        outbox = self._registered(_flags_bytes(peer.channels))
        self._reached[peer.worker] = _Reached(session, flags, outbox)
        return bases

    def _why_gone(self, peer: Endpoint) -> str:
        reached = self._reached[peer.worker]
        with self._lock:
            for at, signal in list(reached.signals.items()):
                state = self._engine.poll(signal)
                if state is PostState.FAILED:
                    reached.gone = reached.gone or "a signal to it failed"
                if state is not PostState.PENDING:
                    del reached.signals[at]
        return reached.gone

    def _post(self, peer: Endpoint, region: str, rows: IdArray) -> _Posted | None:
        reached = self._reached[peer.worker]
        posts = deque(
            self._engine.post_write(reached.session, source, target, length)
            for source, target, length in rows.tolist()
            if length
        )
        return _Posted(reached, f"{peer.worker} {region}", posts, len(posts)) if posts else None

    def _ended(self, posted: _Posted) -> bool:
        posts = posted.posts
        while posts and (state := self._engine.poll(posts[0])) is not PostState.PENDING:
            posts.popleft()
            posted.failures += state is PostState.FAILED
        if posts:
            return False
        if posted.failures:
            posted.reached.gone = posted.reached.gone or "a write to it failed"
            raise TransportError(
                f"{self.worker}: {posted.failures} of {posted.count} descriptors to {posted.place} failed; its process "
                "died, was cut off, or took its memory back"
            )
        return True

    def _raise(self, peer: Endpoint, channel: int, flag: Flag) -> None:
        reached = self._reached[peer.worker]
        at = _slot_offset(channel, flag.sequence % _SLOTS)
        self._await_slot(peer, reached, at)
        seal = _seal(flag.sequence, flag.tag, peer.incarnation)
        reached.outbox[at : at + 24].view(np.uint64)[:] = (flag.sequence, flag.tag, seal)
        source, target = reached.outbox.ctypes.data + at, reached.flags_address + at
        with self._lock:
            reached.signals[at] = self._engine.post_write(reached.session, source, target, _SLOT_BYTES)

    def _read(self, channel: int) -> Flag:
        newest = self._newest[channel]
        for slot in range(_SLOTS):
            address = self._flags_address + _slot_offset(channel, slot)
            sequence = read_word(address)
            if sequence > newest.sequence:
                tag = read_word(address + 8)
                if read_word(address + 16) == _seal(sequence, tag, self.incarnation):
                    newest = Flag(sequence, tag)
        self._newest[channel] = newest
        return newest

    def _close(self) -> None:
        """Stop the engine: from then on nobody writes here, and no source is read. Takes up to a second."""
        if os.getpid() == self._regions.pid:
            self._engine.close()

    def _await_slot(self, peer: Endpoint, reached: _Reached, at: int) -> None:
        """Wait for the earlier signal that used a slot; it is four signals old, so it has nearly always ended."""
        stop_at = time.monotonic() + self._deadline_s
        while at in reached.signals:
            gone = self._why_gone(peer)
            if gone:
                raise PeerGoneError(f"{peer.worker}: {gone}; exchange endpoints again")
            if time.monotonic() > stop_at:
                raise TransportError(
                    f"{self.worker}: {peer.worker} did not take a signal within {self._deadline_s:g} s"
                )
            time.sleep(_POLL_S)

    def _registered(self, size_bytes: int) -> Memory:
        memory = self._allocate(size_bytes)
        self._engine.register(memory)
        return memory


@dataclass(slots=True, eq=False)
class _Reached:
    """A connected peer: where its flags are, signals under way by slot, and why nothing more may go there."""

    session: str
    flags_address: int
    outbox: Memory
    signals: dict[int, Post] = field(default_factory=dict)
    gone: str = ""


@dataclass(slots=True, eq=False)
class _Posted:
    """Descriptors that the engine has, the oldest first."""

    reached: _Reached
    place: str
    posts: deque[Post]
    count: int
    failures: int = 0


class _Cards(NamedTuple):
    """RDMA devices, and the entry of their tables to be reached at; None leaves it to the engine."""

    names: tuple[str, ...]
    gid: int | None


def _choose_cards(host: str, wanted: str) -> _Cards:
    """The devices that are meant, and the entry that is best for all of them: the engine takes one number."""
    listed = read_devices(RDMA)
    names = choose_devices(listed, wanted) if wanted else listed
    own = {each.address for each in read_addresses()}
    best = [usable_addresses(read_gids(name, RDMA), machines=2, ways=[host], own=own) for name in names]
    entries = {each[0].entry if each else None for each in best}
    return _Cards(names, entries.pop() if len(entries) == 1 else None)


def _describe_place(host: str, cards: _Cards) -> str:
    interface = choose_address(read_addresses(), machines=1, wanted=host).interface
    by = [f"on {interface}"] if interface else []
    by += [f"by {', '.join(cards.names)}"] if cards.names else []
    by += [f"entry {cards.gid}"] if cards.gid is not None else []
    return " ".join([host, *by])


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
