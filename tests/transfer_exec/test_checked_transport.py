"""What stands above every wire: pieces, seams, failing registrations, the queue, tickets, incarnations, regions."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.buffers import open_buffers
from transfer_exec.compiler import compile_program
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.program import Program
from transfer_exec.transport.base import Endpoint, Flag, RegionInfo, Ticket, Transport
from transfer_exec.transport.checked import Limits
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.process_memory import why_not, why_not_process, write_process
from transfer_exec.transport.shared_memory import SharedMemoryTransport


def rows(*descriptors: tuple[int, int, int]) -> np.ndarray:
    return np.array(descriptors, dtype=np.uint64).reshape(-1, 3)


def joined(
    make: Callable[[str], Transport], source_bytes: int, target_bytes: int
) -> tuple[Transport, Transport, np.ndarray, np.ndarray]:
    """Two workers with a region each; a is connected to b."""
    a, b = make("a"), make("b")
    source, target = a.allocate(source_bytes), b.allocate(target_bytes)
    a.register("PACK", source)
    b.register("RECEIVE", target)
    a.open_flags(1)
    b.open_flags(1)
    a.connect(Endpoint.from_bytes(b.endpoint("plan").to_bytes()))
    return a, b, source, target


def settle(transport: Transport, ticket: Ticket) -> None:
    while not transport.finished(ticket):
        pass


# T01: no registration larger than the wire takes, and no write across a seam


def test_t01_regions_are_registered_and_written_in_pieces() -> None:
    network = LoopbackNetwork(LoopbackPolicy(limits=Limits(piece_bytes=1000)))
    a, _, source, target = joined(network.transport, 2500, 2500)
    assert sorted(network.registered) == sorted([(w, size) for w in "ab" for size in (1000, 1000, 500)])
    source[:] = np.arange(2500) % 251
    for start in (0, 995, 1000, 2490):
        before = len(network.records)
        settle(a, a.write(0, "b", "RECEIVE", rows((start, start, 10))))  # type: ignore[arg-type]
        (record,) = network.records[before:]
        assert [size for _, size in record.pieces] == ([5, 5] if start == 995 else [10])
        assert np.array_equal(target[start : start + 10], source[start : start + 10])
    settle(a, a.write(0, "b", "RECEIVE", rows((997, 100, 10))))  # type: ignore[arg-type]
    assert [size for _, size in network.records[-1].pieces] == [3, 7], "the source has seams too"


@pytest.mark.parametrize("seed", range(40))
def test_t01_any_descriptors_over_any_seams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = Limits(piece_bytes=int(rng.integers(1, 40)), in_flight=int(rng.integers(1, 9)))
    network = LoopbackNetwork(LoopbackPolicy(seed=seed, max_delay=int(rng.integers(0, 4)), reorder=True, limits=limits))
    a, _, source, target = joined(network.transport, 200, 300)
    source[:] = rng.integers(0, 256, 200)
    cuts = np.sort(rng.choice(301, 12, replace=False))
    picked = []
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        size = int(min(rng.integers(0, stop - start + 1), 200))
        picked.append((int(rng.integers(0, 201 - size)), start, size))
    expected = target.copy()
    for start, to, size in picked:
        expected[to : to + size] = source[start : start + size]
    settle(a, a.write(0, "b", "RECEIVE", rows(*picked)))  # type: ignore[arg-type]
    assert np.array_equal(target, expected)
    assert all(size <= limits.piece_bytes for record in network.records for _, size in record.pieces)


def test_t01_more_than_the_wire_registers_in_all() -> None:
    network = LoopbackNetwork(LoopbackPolicy(limits=Limits(piece_bytes=100, total_bytes=250)))
    a = network.transport("a")
    a.register("PACK/0", a.allocate(200))
    with pytest.raises(
        TransportError, match=r"a: region PACK/1 of 60 bytes .*260 bytes in all regions, .* at most 250"
    ):
        a.register("PACK/1", a.allocate(60))
    a.register("PACK/1", a.allocate(50))
    assert len(network.registered) == 3


# T03: a registration that fails


def program() -> Program:
    """One rollout that receives 64 bytes in two rounds."""
    space = CheckpointSpace([TensorSpec("w", (16,), "F32")])
    whole = SourceMap.from_ids(space, {"w": np.arange(1, 17)})
    route = Route(whole.held(), 4, "t", (Hop(Stage.RECEIVE, "t", "e"), Hop(Stage.EXTERNAL, "e", "f")))
    plan = Plan(space.digest(), ("t",), ("e", "f"), (0, 1, 2), (route,), 2, 64, 1.0, "t", 1.0, 1.0)
    return compile_program(plan, "e", whole)


@pytest.mark.parametrize("number", [0, 1])
def test_t03_a_buffer_that_is_not_registered_undoes_the_others(number: int) -> None:
    network = LoopbackNetwork(LoopbackPolicy(failing_registrations=frozenset([number])))
    with pytest.raises(TransportError, match=rf"e: region RECEIVE/{number} of 32 bytes cannot .* with code -1"):
        open_buffers(program(), network.transport("e"), 2)
    assert network.registered == []


def test_t03_the_third_piece_undoes_the_first_two() -> None:
    policy = LoopbackPolicy(failing_registrations=frozenset([3]), limits=Limits(piece_bytes=10))
    network = LoopbackNetwork(policy)
    a = network.transport("a")
    kept = a.register("PACK/0", a.allocate(10))
    with pytest.raises(TransportError, match=r"a: region PACK/1 of 30 bytes cannot be registered: .* code -1"):
        a.register("PACK/1", a.allocate(30))
    assert network.registered == [("a", 10)]
    assert a.register("PACK/1", a.allocate(30)) != kept
    a.close()
    assert network.registered == []


def test_t03_without_asserts() -> None:
    """The same under ``python -O``."""
    code = (
        "from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy\n"
        "network = LoopbackNetwork(LoopbackPolicy(failing_registrations=frozenset([0])))\n"
        "a = network.transport('a')\n"
        "a.register('PACK', a.allocate(8))\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "TransportError: a: region PACK of 8 bytes cannot be registered" in done.stderr


# T05: the same addresses, other memory


def test_t05_memory_mapped_anew_must_be_registered_anew() -> None:
    network = LoopbackNetwork()
    a, b, source, target = joined(network.transport, 8, 8)
    source[:] = 5
    b.memory_mapped_anew()  # type: ignore[attr-defined]
    stale = a.write(0, "b", "RECEIVE", rows((0, 0, 8)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="b: was registered before its memory was mapped anew"):
        a.finished(stale)
    again = network.transport("b")
    again.register("RECEIVE", target)
    again.open_flags(1)
    a.connect(again.endpoint("plan"))
    settle(a, a.write(0, "b", "RECEIVE", rows((0, 0, 8))))  # type: ignore[arg-type]
    assert target.tolist() == [5] * 8


# The queue, merged neighbours, tickets


def test_at_most_so_many_descriptors_are_with_the_wire() -> None:
    network = LoopbackNetwork(LoopbackPolicy(seed=2, max_delay=5, limits=Limits(in_flight=4)))
    a, _, source, target = joined(network.transport, 64, 64)
    source[:] = np.arange(64)
    tickets = [a.write(0, "b", "RECEIVE", rows(*((k, 63 - k, 1) for k in range(n, 64, 2)))) for n in (0, 1)]  # type: ignore[arg-type]
    most = 0
    while sum(a.finished(ticket) for ticket in tickets) < 2:
        most = max(most, len(network._pieces))
    assert most == 4
    assert target.tolist() == list(range(63, -1, -1))
    assert a.finished(tickets[0]), "a ticket stays finished"


def test_a_write_waits_for_room_even_if_nobody_asks_for_the_one_before() -> None:
    network = LoopbackNetwork(LoopbackPolicy(seed=1, max_delay=3, limits=Limits(in_flight=2)))
    a, _, source, target = joined(network.transport, 8, 8)
    source[:] = 7
    a.write(0, "b", "RECEIVE", rows((0, 0, 1), (0, 2, 1), (0, 4, 1)))  # type: ignore[arg-type]
    settle(a, a.write(0, "b", "RECEIVE", rows((0, 6, 1))))  # type: ignore[arg-type]
    assert target[6] == 7


def test_neighbours_are_one_descriptor() -> None:
    network = LoopbackNetwork()
    a, _, source, target = joined(network.transport, 64, 64)
    source[:] = np.arange(64)
    a.write(0, "b", "RECEIVE", rows(*((k, k, 1) for k in range(32)), (40, 40, 0), (50, 33, 2), (52, 35, 2)))  # type: ignore[arg-type]
    assert network.records[0].pieces == ((0, 32), (33, 4))
    assert target[:32].tolist() == list(range(32))
    assert target[33:37].tolist() == [50, 51, 52, 53]


def test_after_a_failure_no_more_of_a_write_is_posted_and_all_failures_are_listed() -> None:
    policy = LoopbackPolicy(seed=3, max_delay=4, failing_writes=frozenset([0, 1, 2]), limits=Limits(in_flight=2))
    network = LoopbackNetwork(policy)
    a, _, source, target = joined(network.transport, 8, 8)
    source[:] = 7
    bad = a.write(0, "b", "RECEIVE", rows(*((k, k, 1) for k in range(0, 8, 2))))  # type: ignore[arg-type]
    with pytest.raises(TransportError) as failure:
        settle(a, bad)
    assert network.idle
    assert len(network.records) == 1, "its second half never left"
    assert str(failure.value).count("failed") == 2
    assert not target.any()
    with pytest.raises(TransportError, match="write 0 from a"):
        a.finished(bad)


# T18: peers that are not who they were


@pytest.mark.parametrize("kind", ["loopback", "shared_memory"])
def test_t18_a_peer_that_closed_or_restarted_is_not_written(kind: str) -> None:
    make = LoopbackNetwork().transport if kind == "loopback" else SharedMemoryTransport
    a, b, _, target = joined(make, 8, 8)
    a.signal("b", 0, 1, 1)
    b.close()
    again = make("b")
    again.open_flags(1)
    for act in (
        lambda: a.write(0, "b", "RECEIVE", rows((0, 0, 8))),  # type: ignore[arg-type]
        lambda: a.signal("b", 0, 2, 2),
    ):
        with pytest.raises(PeerGoneError, match=r"b: .*exchange endpoints again"):
            act()
    assert not target.any()
    a.connect(again.endpoint("plan"))
    a.signal("b", 0, 3, 3)
    assert again.flag(0) == Flag(3, 3)


@pytest.mark.processes
def test_t18_a_killed_process_is_noticed_before_the_next_write() -> None:
    code = (
        "import os, sys; from transfer_exec.transport.shared_memory import SharedMemoryTransport\n"
        "b = SharedMemoryTransport('b'); b.register('RECEIVE', b.allocate(64)); b.open_flags(1)\n"
        "os.write(1, b.endpoint('plan').to_bytes()); os.close(1); sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        a = SharedMemoryTransport("a")
        a.register("PACK", a.allocate(64))
        a.open_flags(0)
        a.connect(Endpoint.from_bytes(child.stdout.read()))
        settle(a, a.write(0, "b", "RECEIVE", rows((0, 0, 64))))  # type: ignore[arg-type]
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
        with pytest.raises(PeerGoneError, match="b: its process has ended"):
            a.signal("b", 0, 1, 1)
    finally:
        child.kill()
        child.communicate()


def test_an_endpoint_whose_pieces_do_not_fit_is_refused() -> None:
    for region in (
        RegionInfo("A", 10, "x", 4, ("y",)),
        RegionInfo("A", 10, "x", 0),
        RegionInfo("A", 10, "x", -3, ("y",)),
        RegionInfo("A", 10, "x", 10, ("y",)),
    ):
        with pytest.raises(TransportError, match="region A of 10 bytes in pieces of"):
            Endpoint.from_bytes(Endpoint("w", "t", 1, "p", 0, "", (region,)).to_bytes())


# Memory that no transport allocated


def test_shared_memory_writes_any_memory_where_the_kernel_allows_it() -> None:
    a, b = SharedMemoryTransport("a"), SharedMemoryTransport("b")
    source, target = a.allocate(4096), np.zeros(40000, dtype=np.uint8)
    source[:] = np.random.default_rng(1).integers(0, 256, 4096)
    handle = a.register("PACK", source)
    a.open_flags(0)
    if b.foreign_refused:
        with pytest.raises(TransportError, match=r"region w of 40000 bytes cannot be registered: .*process_vm_writev"):
            b.register("w", target)
        return
    b.register("w", target)
    b.open_flags(0)
    a.connect(Endpoint.from_bytes(b.endpoint("plan").to_bytes()))
    picked = [(k % 4095, 9 * k + 3, 1 + k % 5) for k in range(3000)]
    settle(a, a.write(handle, "b", "w", rows(*picked)))
    expected = np.zeros_like(target)
    for start, to, size in picked:
        if start + size <= 4096:
            expected[to : to + size] = source[start : start + size]
    assert np.array_equal(target, expected)


@pytest.mark.skipif(bool(why_not()), reason="this kernel does not allow process_vm_writev")
def test_memory_that_is_not_there_is_named() -> None:
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, 2 * page)
    window = (ctypes.c_uint8 * (2 * page)).from_buffer(mapped)
    address = ctypes.addressof(window)
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address + page, page, mmap.PROT_READ) == 0
    source = np.ones(2 * page, dtype=np.uint8)
    with pytest.raises(TransportError, match=rf"{page} of {2 * page} bytes could be written"):
        write_process(os.getpid(), np.array([[source.ctypes.data, address, 2 * page]], dtype=np.int64))
    with pytest.raises(TransportError, match="1 ranges cannot be written: Bad address"):
        write_process(os.getpid(), np.array([[source.ctypes.data, address + page, page]], dtype=np.int64))
    assert "Bad address" in why_not_process(os.getpid(), 16)
    assert "No such process" in why_not_process(4194303, address)


def test_no_permission_for_process_vm_writev_is_named_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = SharedMemoryTransport("a"), SharedMemoryTransport("b")
    b.foreign_refused = "process 1: Operation not permitted"
    with pytest.raises(TransportError, match=r"b: region w of 8 bytes .*did not allocate it.*Operation not permitted"):
        b.register("w", np.zeros(8, dtype=np.uint8))
    b.foreign_refused = ""
    b.register("w", np.zeros(8, dtype=np.uint8))
    b.open_flags(0)
    refused = "process 1: Operation not permitted; both must run as one user"
    monkeypatch.setattr("transfer_exec.transport.shared_memory.why_not_process", lambda *_: refused)
    with pytest.raises(TransportError, match=r"b: its memory cannot be written with process_vm_writev: process 1"):
        a.connect(b.endpoint("plan"))


def test_a_host_without_memory_to_share_is_named_and_keeps_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    a = SharedMemoryTransport("a")
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"a: cannot get 4096 bytes of shared memory: .*No space left"):
        a.allocate(4096)
    assert len(os.listdir("/proc/self/fd")) == before
