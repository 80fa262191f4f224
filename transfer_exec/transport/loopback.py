"""The faithful fake: all workers in one process, with a network that can be made to misbehave.

A write is a number of pieces, one a descriptor. Under the default policy every piece lands at once. A policy with a
seed delays pieces by some polls, lands them in any order, loses some, or fails whole writes; the bytes of a piece are
read when it lands, as a network card reads them, so a source that is reused too early is caught. Signals are delayed
too, and never overtake each other on one channel.

>>> import numpy as np
>>> network = LoopbackNetwork()
>>> a, b = network.transport("a"), network.transport("b")
>>> source, target = a.allocate(4), b.allocate(4)
>>> handle = a.register("PACK", source); _ = b.register("RECEIVE", target)
>>> a.open_flags(0); b.open_flags(1)
>>> a.connect(b.endpoint("plan"))
>>> source[:] = 7
>>> ticket = a.write(handle, "b", "RECEIVE", np.array([[0, 2, 2]], dtype=np.uint64))
>>> a.finished(ticket), target.tolist()
(True, [0, 0, 7, 7])
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import numpy as np

from transfer_exec.errors import TransportError
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


@dataclass(frozen=True, slots=True)
class LoopbackPolicy:
    """How a loopback network misbehaves.

    Attributes
    ----------
    seed
        Of every random choice.
    max_delay
        A piece or signal lands after 0 to this many polls.
    reorder
        Land what is due in random order.
    failing_writes
        Numbers of writes, counted over the network from 0, whose pieces are refused.
    lost_writes, lost_signals
        Numbers of writes or signals that vanish: nobody hears of them again.
    """

    seed: int = 0
    max_delay: int = 0
    reorder: bool = False
    failing_writes: frozenset[int] = frozenset()
    lost_writes: frozenset[int] = frozenset()
    lost_signals: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One write, as posted."""

    source: str
    target: str
    region: str
    descriptors: Descriptors

    @property
    def bytes(self) -> int:
        """Payload bytes."""
        return int(self.descriptors[:, 2].sum())


@dataclass(slots=True)
class _Piece:
    source: Memory
    target: Memory
    row: tuple[int, int, int]
    ticket: int
    due: int


@dataclass(slots=True)
class _Signal:
    target: LoopbackTransport
    channel: int
    flag: Flag
    due: int


class LoopbackNetwork:
    """All loopback transports of one process; safe to use from several threads.

    Parameters
    ----------
    policy
        By default everything lands at once and in order.
    """

    def __init__(self, policy: LoopbackPolicy | None = None) -> None:
        self._policy = policy or LoopbackPolicy()
        self._random = random.Random(self._policy.seed)
        self._lock = threading.RLock()
        self._members: dict[str, LoopbackTransport] = {}
        self._pieces: list[_Piece] = []
        self._signals: list[_Signal] = []
        self._left: dict[int, int] = {}
        self._failures: dict[int, list[str]] = {}
        self._clock = 0
        self._signal_count = 0
        self._records: list[WriteRecord] = []

    def transport(self, worker: str) -> LoopbackTransport:
        """A worker's end; a second one of the same worker is a restart, which the older endpoint does not reach."""
        made = LoopbackTransport(self, worker)
        with self._lock:
            self._members[worker] = made
        return made

    @property
    def records(self) -> tuple[WriteRecord, ...]:
        """Every write so far, in the order posted."""
        return tuple(self._records)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._pieces and not self._signals

    def member(self, endpoint: Endpoint) -> LoopbackTransport:
        """The transport an endpoint speaks of; TransportError if it is gone or was restarted."""
        found = self._members.get(endpoint.worker)
        if found is None or found.closed:
            raise TransportError(f"{endpoint.worker}: is not on this loopback network any more")
        if found.incarnation != endpoint.incarnation:
            raise TransportError(
                f"{endpoint.worker}: endpoint is of incarnation {endpoint.incarnation}, it runs as "
                f"{found.incarnation}; exchange endpoints again"
            )
        return found

    def advance(self) -> None:
        """Let one poll's time pass and land what is due."""
        with self._lock:
            self._clock += 1
            due = [piece for piece in self._pieces if piece.due <= self._clock]
            self._pieces = [piece for piece in self._pieces if piece.due > self._clock]
            if self._policy.reorder:
                self._random.shuffle(due)
            for piece in due:
                self._land(piece)
            ripe = [signal for signal in self._signals if signal.due <= self._clock]
            self._signals = [signal for signal in self._signals if signal.due > self._clock]
            for signal in ripe:
                signal.target.raise_flag(signal.channel, signal.flag)

    def post(self, record: WriteRecord, source: Memory, target: Memory) -> int:
        """Take a write; its number."""
        with self._lock:
            ticket = len(self._records)
            self._records.append(record)
            rows = [tuple(row) for row in record.descriptors.tolist()]
            self._left[ticket] = len(rows)
            self._failures[ticket] = []
            if ticket in self._policy.lost_writes:
                self._left[ticket] = max(len(rows), 1)
                return ticket
            for row in rows:
                piece = _Piece(source, target, row, ticket, self._clock + self._delay())
                if self._policy.max_delay:
                    self._pieces.append(piece)
                else:
                    self._land(piece)
            return ticket

    def done(self, ticket: int) -> bool:
        """Whether a write has ended; raises what failed."""
        with self._lock:
            if ticket not in self._left:
                raise TransportError(f"write {ticket} was never posted on this network")
            if self._left[ticket]:
                return False
            if self._failures[ticket]:
                raise TransportError("; ".join(self._failures[ticket]))
            return True

    def send_signal(self, target: LoopbackTransport, channel: int, flag: Flag) -> None:
        """Take a signal."""
        with self._lock:
            number = self._signal_count
            self._signal_count += 1
            if number in self._policy.lost_signals:
                return
            if not self._policy.max_delay:
                target.raise_flag(channel, flag)
                return
            earlier = [each.due for each in self._signals if each.target is target and each.channel == channel]
            self._signals.append(_Signal(target, channel, flag, max([self._clock + self._delay(), *earlier])))

    def _delay(self) -> int:
        return self._random.randint(0, self._policy.max_delay)

    def _land(self, piece: _Piece) -> None:
        start, to, size = piece.row
        self._left[piece.ticket] -= 1
        if piece.ticket in self._policy.failing_writes:
            record = self._records[piece.ticket]
            self._failures[piece.ticket].append(
                f"write {piece.ticket} from {record.source} to {record.target} {record.region}[{to}:{to + size}] failed"
            )
            return
        piece.target[to : to + size] = piece.source[start : start + size]


@dataclass(slots=True, eq=False)
class LoopbackTransport:
    """One worker's end of a loopback network; made by `LoopbackNetwork.transport`."""

    network: LoopbackNetwork
    worker: str
    name: str = "loopback"
    incarnation: int = field(default_factory=new_incarnation)
    closed: bool = False
    _regions: RegionTable = field(default_factory=RegionTable)
    _peers: dict[str, tuple[Endpoint, LoopbackTransport]] = field(default_factory=dict)
    _flags: list[Flag] = field(default_factory=list)

    def allocate(self, size_bytes: int) -> Memory:
        """Zeroed memory; see `Transport.allocate`."""
        return np.zeros(size_bytes, dtype=np.uint8)

    def register(self, name: str, memory: Memory) -> RegionHandle:
        """Let peers write to a region; see `Transport.register`."""
        return self._regions.add(self.worker, name, memory)

    def open_flags(self, channels: int) -> None:
        """Make the flags; see `Transport.open_flags`."""
        self._flags = [Flag(0, 0)] * channels

    def endpoint(self, program: str) -> Endpoint:
        """What peers need; see `Transport.endpoint`."""
        regions = tuple(RegionInfo(name, memory.nbytes, "") for name, memory in self._regions.items())
        return Endpoint(self.worker, self.name, self.incarnation, program, len(self._flags), "", regions)

    def connect(self, peer: Endpoint) -> None:
        """Make a peer writable; see `Transport.connect`."""
        check_process(self._regions.pid, self.worker)
        check_peer(self.worker, self.name, peer)
        self._peers[peer.worker] = (peer, self.network.member(peer))

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        """Post copies; see `Transport.write`."""
        check_process(self._regions.pid, self.worker)
        endpoint, member = self._peer(peer)
        name, memory = self._regions.of(self.worker, source)
        check_descriptors(
            descriptors,
            source_bytes=memory.nbytes,
            target_bytes=endpoint.region(region).size_bytes,
            source=f"{self.worker} {name}",
            target=f"{peer} {region}",
        )
        target = member.receive(region, descriptors)
        return Ticket(self.network.post(WriteRecord(self.worker, peer, region, descriptors.copy()), memory, target))

    def receive(self, region: str, descriptors: Descriptors) -> Memory:
        """The target's own check of a write to one of its regions."""
        memory = self._regions.named(self.worker, region)
        size = memory.nbytes
        place = f"{self.worker} {region}"
        check_descriptors(descriptors[:, [1, 1, 2]], source_bytes=size, target_bytes=size, source=place, target=place)
        return memory

    def finished(self, ticket: Ticket) -> bool:
        """Whether a write has ended; see `Transport.finished`. Lets a poll's time pass."""
        self.network.advance()
        return self.network.done(ticket)

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        """Raise a peer's flag; see `Transport.signal`."""
        check_process(self._regions.pid, self.worker)
        endpoint, member = self._peer(peer)
        if not 0 <= channel < endpoint.channels:
            raise TransportError(f"{peer}: has no flag {channel}; it has {endpoint.channels}")
        self.network.send_signal(member, channel, Flag(sequence, tag))

    def raise_flag(self, channel: int, flag: Flag) -> None:
        """A signal lands here."""
        if flag.sequence > self._flags[channel].sequence:
            self._flags[channel] = flag

    def flag(self, channel: int) -> Flag:
        """Read an own flag; see `Transport.flag`. Lets a poll's time pass."""
        check_process(self._regions.pid, self.worker)
        self.network.advance()
        return self._flags[channel]

    def close(self) -> None:
        """Leave the network."""
        self.closed = True
        self._peers.clear()
        self._regions.clear()

    def _peer(self, peer: str) -> tuple[Endpoint, LoopbackTransport]:
        found = self._peers.get(peer)
        if found is None:
            known = ", ".join(self._peers) or "nobody"
            raise TransportError(f"{self.worker}: is not connected to {peer}; it is to {known}")
        if found[1].closed or self.network.member(found[0]) is not found[1]:
            raise TransportError(f"{peer}: has closed")
        return found
