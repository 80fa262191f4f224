"""The faithful fake: all workers in one process, with a network that can be made to misbehave.

A write or a read is a number of pieces, one a descriptor. Under the default policy every piece lands at once. A policy
with a seed delays pieces by some polls, lands them in any order, loses some, or fails whole writes; the bytes of a
piece are read when it lands, as a network card reads them, so a source that is reused too early is caught. Signals are
delayed too, and never overtake each other on one channel.

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

import ctypes
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import TransportError
from transfer_exec.transport.base import Endpoint, Flag, Memory, Ticket
from transfer_exec.transport.checked import CheckedTransport, Limits
from transfer_exec.transport.queues import Bases
from transfer_exec.transport.reading import Batch, ReadDigested, Sums
from transfer_exec.transport.stretches import Stretches

_ALIGNMENT = 64

LENT = "lent"
"""What a record of a read has for a region."""


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
        Numbers of writes and reads, counted over the network from 0, whose pieces are refused.
    lost_writes, lost_signals
        Numbers of writes or signals that vanish: nobody hears of them again. A read is a call of the reader's own, and
        ends.
    failing_registrations
        Numbers of registrations, counted over the network from 0, that the wire refuses with code -1.
    limits
        What the wire can take.
    """

    seed: int = 0
    max_delay: int = 0
    reorder: bool = False
    failing_writes: frozenset[int] = frozenset()
    lost_writes: frozenset[int] = frozenset()
    lost_signals: frozenset[int] = frozenset()
    failing_registrations: frozenset[int] = frozenset()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """One write or read, as posted: every piece's offset in its registration or lent stretch, and bytes.

    A read's region is ``LENT``, its source the worker that lends.
    """

    source: str
    target: str
    region: str
    pieces: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Payload bytes."""
        return sum(size for _, size in self.pieces)


@dataclass(slots=True)
class _Piece:
    source: Memory
    target: Memory
    offset: int
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
        self._registrations = 0
        self.registered: list[tuple[str, int]] = []
        """Worker and bytes of everything that is registered now."""

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

    @property
    def limits(self) -> Limits:
        """What the wire can take."""
        return self._policy.limits

    def member(self, worker: str) -> LoopbackTransport | None:
        """A worker's newest transport."""
        return self._members.get(worker)

    def count_registration(self, worker: str, size_bytes: int) -> None:
        """Take a registration; TransportError if the policy refuses it."""
        with self._lock:
            number = self._registrations
            self._registrations += 1
            if number in self._policy.failing_registrations:
                raise TransportError("loopback refused it with code -1")
            self.registered.append((worker, size_bytes))

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

    def post(self, record: WriteRecord, ends: list[tuple[Memory, Memory]]) -> int:
        """Take a write, as pairs of source and target of its pieces; its number."""
        with self._lock:
            ticket = len(self._records)
            self._records.append(record)
            self._left[ticket] = len(ends)
            self._failures[ticket] = []
            if ticket in self._policy.lost_writes and record.region != LENT:
                self._left[ticket] = max(len(ends), 1)
                return ticket
            for (source, target), (offset, _) in zip(ends, record.pieces, strict=True):
                piece = _Piece(source, target, offset, ticket, self._clock + self._delay())
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
        self._left[piece.ticket] -= 1
        if piece.ticket in self._policy.failing_writes:
            record, stop = self._records[piece.ticket], piece.offset + len(piece.target)
            self._failures[piece.ticket].append(
                f"write {piece.ticket} from {record.source} to {record.target} {record.region}"
                f"[{piece.offset}:{stop}] failed"
            )
            return
        piece.target[:] = piece.source


class LoopbackTransport(CheckedTransport[int]):
    """One worker's end of a loopback network; made by `LoopbackNetwork.transport`."""

    def __init__(self, network: LoopbackNetwork, worker: str) -> None:
        super().__init__(worker, "loopback", network.limits)
        self.network = network
        self._flags: list[Flag] = []
        self._stale = False
        self._to_digest: dict[int, list[tuple[ReadDigested, Sums]]] = {}

    def memory_mapped_anew(self) -> None:
        """The worker's memory moved to other pages at the same addresses, so what was registered is void."""
        self._stale = True

    def raise_flag(self, channel: int, flag: Flag) -> None:
        """A signal lands here."""
        if flag.sequence > self._flags[channel].sequence:
            self._flags[channel] = flag

    def finished(self, ticket: Ticket) -> bool:
        """Whether a write has ended; see `Transport.finished`. Lets a poll's time pass."""
        self.network.advance()
        return super().finished(ticket)

    def window(self, address: int, size_bytes: int) -> tuple[Memory, int]:
        """This worker's own check of a piece that is read or written: the bytes, and their offset in the region."""
        if self._stale:
            raise TransportError(f"{self.worker}: was registered before its memory was mapped anew; register it again")
        memory, offset = self._regions.holding(self.worker, address, size_bytes)
        return memory[offset : offset + size_bytes], offset

    def _allocate(self, size_bytes: int) -> Memory:
        raw = np.zeros(size_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT  # as mapped memory begins, which the other transports have
        return raw[start : start + size_bytes]

    def _expose(self, memory: Memory) -> str:
        self.network.count_registration(self.worker, memory.nbytes)
        return f"{memory.ctypes.data:#x}"

    def _withdraw(self, memory: Memory) -> None:
        self.network.registered.remove((self.worker, memory.nbytes))

    def _make_flags(self, channels: int) -> str:
        self._flags = [Flag(0, 0)] * channels
        return ""

    def _reach(self, peer: Endpoint) -> Bases:
        gone = self._why_gone(peer)
        if gone:
            raise TransportError(f"{peer.worker}: {gone}; exchange endpoints again")
        try:
            return {region.name: tuple(int(at, 16) for at in region.addresses) for region in peer.regions}
        except ValueError as error:
            raise TransportError(f"{peer.worker}: an address in its endpoint is no loopback address") from error

    def _why_gone(self, peer: Endpoint) -> str:
        found = self.network.member(peer.worker)
        if found is None or found.closed:
            return "is not on this loopback network any more"
        if found.incarnation != peer.incarnation:
            return f"endpoint is of incarnation {peer.incarnation}, it runs as {found.incarnation}"
        return ""

    def _post(self, peer: Endpoint, region: str, rows: IdArray) -> int:
        member = self.network.member(peer.worker)
        assert member is not None
        pieces, ends = [], []
        for source, target, size in rows.tolist():
            there, offset = member.window(target, size)
            ends.append((self.window(source, size)[0], there))
            pieces.append((offset, size))
        return self.network.post(WriteRecord(self.worker, peer.worker, region, tuple(pieces)), ends)

    def lent_window(self, address: int, size_bytes: int) -> tuple[Memory, int]:
        """As `window`, of lent memory."""
        if self._stale:
            raise TransportError(f"{self.worker}: lent memory before it was mapped anew; lend it again")
        assert self._lent is not None
        lent = self._lent[0]
        place = (lent.addresses <= address) & (address + size_bytes <= lent.addresses + lent.sizes)
        if not place.any():
            raise TransportError(f"{self.worker}: {size_bytes} bytes at {address:#x} are not lent")
        return _bytes_at(address, size_bytes), address - int(lent.addresses[place][0])

    def _lend(self, memory: Stretches) -> str:
        return ""

    def _fetch(self, peer: Endpoint, batches: Sequence[Batch], sums: Sums | None) -> int:
        member = self.network.member(peer.worker)
        assert member is not None
        pieces, ends = [], []
        for target, source, size in (row for batch in batches for row in batch.unmapped()):  # nothing is mapped here
            there, offset = member.lent_window(source, size)
            ends.append((there, _bytes_at(target, size)))
            pieces.append((offset, size))
        posted = self.network.post(WriteRecord(peer.worker, self.worker, LENT, tuple(pieces)), ends)
        if sums is not None:
            self._to_digest[posted] = [(each, sums) for batch in batches for each in batch.read_digested]
        return posted

    def _ended(self, posted: int) -> bool:
        ended = self.network.done(posted)
        if ended:
            for each, sums in self._to_digest.pop(posted, []):
                each.digest(sums)
        return ended

    def _raise(self, peer: Endpoint, channel: int, flag: Flag) -> None:
        member = self.network.member(peer.worker)
        assert member is not None
        self.network.send_signal(member, channel, flag)

    def _read(self, channel: int) -> Flag:
        self.network.advance()
        return self._flags[channel]

    def _close(self) -> None:
        self._peers.clear()
        self._regions.clear()


def _bytes_at(address: int, size_bytes: int) -> Memory:
    """Memory of this process that somebody else keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
