"""Mooncake over TCP: the tests that every transport passes, and peers that die, freeze, or are no engine at all."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transfer_exec.mooncake_peer import serve
from tests.transfer_exec.test_transport import (
    Maker,
    pair,
    rows,
    test_a_closed_transport_is_refused,
    test_a_forked_child_is_refused,
    test_a_restarted_peer_is_not_the_old_one,
    test_descriptors_that_leave_a_region_are_refused_before_any_byte,
    test_empty_memory_is_fine,
    test_flags_carry_numbers_and_tags,
    test_registering_twice_or_overlapping_is_refused,
    test_what_is_unknown_is_refused,
    test_writes_land_where_the_descriptors_say,
)
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.transport.base import Descriptors, Endpoint, Flag, RegionHandle, RegionInfo, Ticket
from transfer_exec.transport.mooncake import MooncakeTransport
from transfer_exec.transport.mooncake_engine import MooncakeEngine, PostState, describe

pytest.importorskip(
    "mooncake.engine",
    reason="mooncake is not installed: pip install '.[mooncake]' and Debian's libibverbs1 libnuma1 libcurl4",
    exc_type=ImportError,
)

SHARED_TESTS = (
    test_a_closed_transport_is_refused,
    test_a_forked_child_is_refused,
    test_a_restarted_peer_is_not_the_old_one,
    test_descriptors_that_leave_a_region_are_refused_before_any_byte,
    test_empty_memory_is_fine,
    test_flags_carry_numbers_and_tags,
    test_registering_twice_or_overlapping_is_refused,
    test_what_is_unknown_is_refused,
    test_writes_land_where_the_descriptors_say,
)
"""Imported, so pytest runs them here too, with this file's `make`."""

SIZE = 1 << 20
HOST = "127.0.0.1"


class Settled(MooncakeTransport):
    """Finishes what it is asked to within the call, as a transport may: for tests that look at once."""

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        ticket = super().write(source, peer, region, descriptors)
        settle(self, ticket)
        return ticket

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        super().signal(peer, channel, sequence, tag)
        for post in list(self._reached[peer].signals.values()):
            wait_for(lambda post=post: self._engine.poll(post) is not PostState.PENDING)


@pytest.fixture
def make() -> Maker:
    """Makes transports for the shared tests."""
    return lambda worker: Settled(worker, HOST, deadline_s=5.0)


def settle(transport: MooncakeTransport, ticket: Ticket, within_s: float = 20.0) -> None:
    wait_for(lambda: transport.finished(ticket), within_s)


def wait_for(condition: Any, within_s: float = 20.0) -> None:
    stop_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < stop_at, "it did not become true"
        time.sleep(1e-4)


def sender(deadline_s: float = 2.0) -> tuple[MooncakeTransport, np.ndarray, RegionHandle]:
    """A transport with a source of random bytes."""
    transport = MooncakeTransport("a", HOST, deadline_s=deadline_s)
    source = transport.allocate(SIZE)
    source[:] = np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8)
    handle = transport.register("PACK", source)
    transport.open_flags(0)
    return transport, source, handle


class Peer:
    """A peer in a process of its own."""

    def __init__(self, worker: str, size_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, worker, size_bytes), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(120), "the peer did not start"
        self.endpoint = Endpoint.from_bytes(self.pipe.recv())

    def ask(self, what: str, channel: int = 0) -> Any:
        self.pipe.send((what, channel))
        assert self.pipe.poll(30)
        return self.pipe.recv()

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(30)
        if number == signal.SIGSTOP:
            # Its threads stop one after the other, and one that has not yet still answers.
            threads = Path(f"/proc/{self.process.pid}/task")
            wait_for(lambda: all(_is_stopped(thread) for thread in threads.iterdir()))


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def peers(*workers: str, size_bytes: int = SIZE) -> Iterator[list[Peer]]:
    made = [Peer(worker, size_bytes) for worker in workers]
    try:
        yield made
    finally:
        for one in made:
            with suppress(ProcessLookupError):
                one.kill(signal.SIGCONT)
            one.pipe.close()
        for one in made:
            one.process.join(30)
            assert one.process.exitcode is not None


# Completion


def test_a_write_is_done_when_its_last_descriptor_is() -> None:
    """The engine's own status of a batch is that of its first descriptor."""
    a, source, handle = sender()
    b = MooncakeTransport("b", HOST)
    target = b.allocate(SIZE)
    b.register("RECEIVE", target)
    b.open_flags(0)
    a.connect(b.endpoint("plan"))
    piece = 1 << 12
    starts = np.arange(0, SIZE, piece)
    for _ in range(5):
        target[:] = 0
        ticket = a.write(handle, "b", "RECEIVE", rows(*((int(at), SIZE - piece - int(at), piece) for at in starts)))
        while not a.finished(ticket):
            pass
        assert np.array_equal(target.reshape(-1, piece)[::-1], source.reshape(-1, piece))
    assert a.finished(ticket), "and may be asked again"
    for stranger in (0, ticket + 1):
        with pytest.raises(TransportError, match="was never posted"):
            a.finished(Ticket(stranger))


def test_no_more_than_a_thousand_descriptors_are_with_the_engine() -> None:
    a, source, handle = sender()
    b = MooncakeTransport("b", HOST)
    target = b.allocate(SIZE)
    b.register("RECEIVE", target)
    b.open_flags(0)
    a.connect(b.endpoint("plan"))
    tickets = [
        a.write(handle, "b", "RECEIVE", rows(*((at + 8 * k, at + 11_992 - 8 * k, 8) for k in range(1500))))
        for at in (0, 12_000, 24_000)
    ]
    most = 0
    while tickets:
        tickets = [ticket for ticket in tickets if not a.finished(ticket)]
        most = max(most, a._peers["b"].in_flight)
    assert 900 < most <= 1000
    expected = source[:36_000].reshape(3, -1, 8)[:, ::-1].reshape(-1)
    assert np.array_equal(target[:36_000], expected)
    assert not target[36_000:].any()


# Flags


def test_a_late_signal_does_not_cover_a_newer_one() -> None:
    a, b, _, _ = pair(lambda worker: Settled(worker, HOST))
    for sequence in (9, 8, 7):
        a.signal("b", 1, sequence, sequence)
    assert b.flag(1) == Flag(9, 9)
    for sequence in range(10, 30):
        a.signal("b", 1, sequence, 2 * sequence)
        assert b.flag(1) == Flag(sequence, 2 * sequence)
    assert b.flag(0) == Flag(0, 0)


def test_half_a_signal_is_none_and_so_is_one_for_an_older_life() -> None:
    a, b, _, _ = pair(lambda worker: Settled(worker, HOST))
    assert isinstance(a, MooncakeTransport)
    assert isinstance(b, MooncakeTransport)
    a.signal("b", 0, 4, 44)
    assert b.flag(0) == Flag(4, 44)
    header = ctypes.c_uint8 * (64 + 24)
    slot = np.frombuffer(header.from_address(b._flags_address), dtype=np.uint64)[8:]
    good = slot.copy()
    for word in range(3):
        slot[:] = good
        slot[word] += np.uint64(8)
        assert b.flag(0) == Flag(4, 44), "what was seen stays"
    known = a._peers["b"]
    known.endpoint = msgspec.structs.replace(known.endpoint, incarnation=known.endpoint.incarnation + 1)
    a.signal("b", 0, 5, 55)
    assert b.flag(0) == Flag(4, 44)


# Addresses


def test_what_is_not_there_or_not_so_is_refused_at_connect() -> None:
    a, _, _ = sender()
    b = MooncakeTransport("b", HOST)
    b.register("RECEIVE", b.allocate(64))
    b.open_flags(1)
    good = b.endpoint("plan")
    replace = msgspec.structs.replace
    region = good.regions[0]
    for address in (
        "nonsense",
        "tcp://h/0x10",
        "tcp://h:0/0x10",
        good.flags_address + "z",
        "rdma" + good.flags_address[3:],
    ):
        with pytest.raises(TransportError, match="b: "):
            a.connect(replace(good, flags_address=address))
    for lie in (
        replace(good, regions=(RegionInfo("RECEIVE", 65, region.address),)),
        replace(good, regions=(RegionInfo("RECEIVE", 64, hex(int(region.address, 16) + 64)),)),
        replace(good, channels=2),
    ):
        with pytest.raises(TransportError, match="exchange endpoints again"):
            a.connect(lie)
    with pytest.raises(TransportError, match="endpoint is of incarnation"):
        a.connect(replace(good, incarnation=good.incarnation + 1))
    a.connect(good)


def test_rdma_is_refused_where_tcp_would_run_in_its_place() -> None:
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        assert MooncakeTransport("a", HOST, protocol="rdma").name == "mooncake-rdma"
        return
    with pytest.raises(TransportError, match="a: mooncake was asked for rdma and runs tcp"):
        MooncakeTransport("a", HOST, protocol="rdma")
    with pytest.raises(TransportError, match="no protocol 'carrier pigeon'; expected tcp or rdma"):
        MooncakeTransport("a", HOST, protocol="carrier pigeon")


def test_a_missing_engine_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportError, match=r"mooncake-transfer-engine-non-cuda .*libibverbs1"):
        MooncakeTransport("a", HOST)


def test_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    MooncakeTransport("a", HOST).close()
    assert dict(os.environ) == before


# Peers that are no good; every wait is ours


def test_a_port_that_listens_and_says_nothing() -> None:
    a, source, handle = sender(deadline_s=0.5)
    b = MooncakeTransport("b", HOST)
    target = b.allocate(SIZE)
    b.register("RECEIVE", target)
    b.open_flags(0)
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        address = f"tcp://{HOST}:{port}/0x1000"
        start = time.monotonic()
        with pytest.raises(TransportError, match=rf"c: mooncake at {HOST}:{port}: no answer within 0.5 s"):
            a.connect(Endpoint("c", "mooncake", 1, "plan", 0, address, ()))
        assert time.monotonic() - start < 5
        a.connect(b.endpoint("plan"))
        settle(a, a.write(handle, "b", "RECEIVE", rows((0, 0, SIZE))))
        assert np.array_equal(target, source)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "announced an answer of"),
        (b"\x09" + b"\0" * 7 + b'\x01{"a":1}\n', "answered what no engine answers"),
        (b"", "cannot be reached: it closed the connection"),
    ],
)
def test_a_port_where_something_else_listens(answer: bytes, match: str) -> None:
    with socket.create_server((HOST, 0)) as server:

        def speak() -> None:
            opened, _ = server.accept()
            opened.recv(64)
            opened.sendall(answer)
            opened.close()

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(TransportError, match=match):
            describe("c", HOST, server.getsockname()[1], deadline_s=5.0)
        thread.join()


@pytest.mark.processes
def test_a_peer_that_is_killed() -> None:
    with peers("b", "c") as (b, c):
        a, source, handle = sender()
        for each in (b, c):
            a.connect(each.endpoint)
        settle(a, a.write(handle, "b", "RECEIVE", rows((0, 0, SIZE))))
        a.signal("b", 1, 3, 33)
        wait_for(lambda: b.ask("flag", 1) == Flag(3, 33))
        assert np.array_equal(b.ask("read"), source)
        b.kill(signal.SIGKILL)
        ticket = a.write(handle, "b", "RECEIVE", rows((0, 0, 1024), (1024, 1024, 1024)))
        with pytest.raises(TransportError, match=r"a: . of . descriptors to b RECEIVE failed; its process died"):
            settle(a, ticket)
        with pytest.raises(TransportError, match="its process died"):
            a.finished(ticket)
        for again in (lambda: a.write(handle, "b", "RECEIVE", rows((0, 0, 8))), lambda: a.signal("b", 0, 1, 1)):
            with pytest.raises(PeerGoneError, match="b: a write to it failed; exchange endpoints again"):
                again()
        with pytest.raises(TransportError, match=r"b: mooncake at .* cannot be reached"):
            a.connect(b.endpoint)
        settle(a, a.write(handle, "c", "RECEIVE", rows((0, 0, SIZE))))
        assert np.array_equal(c.ask("read"), source)
        a.close()


@pytest.mark.processes
def test_a_peer_that_is_frozen() -> None:
    with peers("b", "c", size_bytes=SIZE) as (b, c):
        a, source, handle = sender(deadline_s=0.5)
        for each in (b, c):
            a.connect(each.endpoint)
        b.kill(signal.SIGSTOP)
        stuck = a.write(handle, "b", "RECEIVE", rows((0, 0, SIZE)))
        settle(a, a.write(handle, "c", "RECEIVE", rows((0, 0, SIZE))))
        assert np.array_equal(c.ask("read"), source)
        assert not a.finished(stuck)
        with pytest.raises(TransportError, match=r"b: mooncake at .* no answer within 0.5 s"):
            a.connect(b.endpoint)
        for sequence in range(4):
            a.signal("b", 0, sequence, 0)
        with pytest.raises(TransportError, match=r"b did not take a signal within 0.5 s"):
            a.signal("b", 0, 4, 0)
        start = time.monotonic()
        a.close()
        assert time.monotonic() - start < 10


@pytest.mark.processes
def test_an_engine_that_hangs_is_given_up() -> None:
    """The peer froze after it was asked what it is, and before the engine opened it."""
    with peers("b") as (b,):
        engine = MooncakeEngine("a", HOST, protocol="tcp", devices="", deadline_s=0.5)
        memory = np.zeros(64, dtype=np.uint8)
        engine.register(memory)
        b.kill(signal.SIGSTOP)
        session, _, flags = b.endpoint.flags_address.removeprefix("tcp://").rpartition("/")
        with pytest.raises(TransportError, match=r"a: mooncake hangs since .* did not answer within 0.5 s"):
            engine.read(session, int(flags, 16), memory[:8])
        with pytest.raises(TransportError, match="holds up writes to every other peer"):
            engine.post_write(session, memory.ctypes.data, int(flags, 16), 8)
        engine.close()
