"""All transports of one host: regions, descriptors, flags, and everything that must be refused."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import numpy as np
import pytest

from tests.transfer_exec.fake_device import FakeDevice, FakeDriver
from transfer_exec.errors import TransportError
from transfer_exec.transport.base import Endpoint, Flag, RegionInfo, Ticket, Transport, check_descriptors
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.shared_memory import SharedMemoryTransport

Maker = Callable[[str], Transport]


@pytest.fixture(params=["loopback", "shared_memory", "device_memory"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Makes transports of one kind that can reach each other."""
    if request.param == "loopback":
        return LoopbackNetwork().transport
    driver = FakeDriver(prompt=True)
    if request.param == "device_memory":
        return lambda worker: DeviceMemoryTransport(worker, [FakeDevice(driver)])
    return SharedMemoryTransport


def rows(*descriptors: tuple[int, int, int]) -> np.ndarray:
    return np.array(descriptors, dtype=np.uint64).reshape(-1, 3)


def pair(make: Maker) -> tuple[Transport, Transport, np.ndarray, np.ndarray]:
    """Two workers, each with one region of 64 bytes; a is connected to b."""
    a, b = make("a"), make("b")
    source, target = a.allocate(64), b.allocate(64)
    a.register("PACK", source)
    b.register("RECEIVE", target)
    a.open_flags(1)
    b.open_flags(2)
    a.connect(Endpoint.from_bytes(b.endpoint("plan").to_bytes()))
    return a, b, source, target


def test_writes_land_where_the_descriptors_say(make: Maker) -> None:
    a, _, source, target = pair(make)
    assert not target.any(), "allocated memory is zeroed"
    source[:] = np.arange(64)
    target[:] = 0xEE
    ticket = a.write(0, "b", "RECEIVE", rows((0, 60, 4), (8, 0, 0), (32, 8, 16)))  # type: ignore[arg-type]
    assert a.finished(ticket)
    expected = np.full(64, 0xEE)
    expected[60:] = range(4)
    expected[8:24] = range(32, 48)
    assert np.array_equal(target, expected)


def test_large_writes_touch_no_byte_beside_them(make: Maker) -> None:
    """More than a cache holds, which is stored another way; every end is off a cache line."""
    a, b, *_ = pair(make)
    source, target = a.allocate(9 << 20), b.allocate(9 << 20)
    handle = a.register("LARGE", source)
    b.register("LARGE", target)
    a.connect(b.endpoint("plan"))
    source[:] = np.random.default_rng(0).integers(0, 256, source.nbytes, dtype=np.uint8)
    target[:] = 0xEE
    pieces = [(3, 1, 5_000_001), (5_000_010, 5_000_100, 4_000_003), (0, 9_300_000, 1), (70, 9_300_003, 63)]
    assert a.finished(a.write(handle, "b", "LARGE", rows(*pieces)))
    expected = np.full(target.nbytes, 0xEE, dtype=np.uint8)
    for begin, to, size in pieces:
        expected[to : to + size] = source[begin : begin + size]
    assert np.array_equal(target, expected)


def test_flags_carry_numbers_and_tags(make: Maker) -> None:
    a, b, _, _ = pair(make)
    assert [b.flag(0), b.flag(1)] == [Flag(0, 0), Flag(0, 0)]
    a.signal("b", 1, 5, (1 << 63) - 1)
    assert [b.flag(0), b.flag(1)] == [Flag(0, 0), Flag(5, (1 << 63) - 1)]
    a.signal("b", 1, (1 << 63) - 1, 0)
    assert b.flag(1) == Flag((1 << 63) - 1, 0)


@pytest.mark.parametrize(
    ("descriptor", "match"),
    [
        ((60, 0, 5), r"descriptor 1 of 2 covers bytes 60:65 of a PACK, which has 64"),
        ((0, 61, 4), r"descriptor 1 of 2 covers bytes 61:65 of b RECEIVE, which has 64"),
        (((1 << 64) - 2, 0, 4), "a PACK, which has 64"),
        ((0, 0, (1 << 64) - 1), "a PACK, which has 64"),
        ((65, 0, 0), "a PACK, which has 64"),
    ],
)
def test_descriptors_that_leave_a_region_are_refused_before_any_byte(
    make: Maker, descriptor: tuple[int, int, int], match: str
) -> None:
    a, _, source, target = pair(make)
    source[:] = 1
    with pytest.raises(TransportError, match=match):
        a.write(0, "b", "RECEIVE", rows((0, 0, 8), descriptor))  # type: ignore[arg-type]
    assert not target.any()


def test_descriptor_lists_have_one_form() -> None:
    for bad in (np.zeros((2, 3), dtype=np.int64), np.zeros(3, dtype=np.uint64), np.zeros((1, 2), dtype=np.uint64)):
        with pytest.raises(TransportError, match="expected uint64 of shape"):
            check_descriptors(bad, source_bytes=9, target_bytes=9, source="s", target="t")


def test_what_is_unknown_is_refused(make: Maker) -> None:
    a, b, _, _ = pair(make)
    with pytest.raises(TransportError, match="b: is not connected to a; it is to nobody"):
        b.signal("a", 0, 1, 1)
    with pytest.raises(TransportError, match="a: is not connected to c; it is to b"):
        a.write(0, "c", "RECEIVE", rows((0, 0, 1)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="b: has no region EXTERNAL"):
        a.write(0, "b", "EXTERNAL", rows((0, 0, 1)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="handle 7 is not registered"):
        a.write(7, "b", "RECEIVE", rows((0, 0, 1)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="b: has no flag 2; it has 2"):
        a.signal("b", 2, 1, 1)
    with pytest.raises(TransportError, match="a: cannot connect to itself"):
        a.connect(a.endpoint("plan"))


def test_registering_twice_or_overlapping_is_refused(make: Maker) -> None:
    a = make("a")
    memory = a.allocate(32)
    a.register("PACK", memory)
    with pytest.raises(TransportError, match="region PACK is registered already"):
        a.register("PACK", a.allocate(32))
    with pytest.raises(TransportError, match="region RECEIVE overlaps region PACK"):
        a.register("RECEIVE", memory)
    with pytest.raises(TransportError):
        a.register("RECEIVE", memory[::2])
    with pytest.raises(TransportError):
        a.register("RECEIVE", memory.view(np.uint16))


def test_empty_memory_is_fine(make: Maker) -> None:
    assert make("a").allocate(0).nbytes == 0


def test_a_restarted_peer_is_not_the_old_one(make: Maker) -> None:
    a, b, _, _ = pair(make)
    old = b.endpoint("plan")
    b.close()
    again = make("b")
    again.open_flags(2)
    with pytest.raises(TransportError, match=r"b: "):
        a.connect(old)
    a.connect(again.endpoint("plan"))
    a.signal("b", 0, 3, 1)
    assert again.flag(0) == Flag(3, 1)


def test_an_endpoint_of_another_transport_is_refused() -> None:
    a, b = SharedMemoryTransport("a"), LoopbackNetwork().transport("b")
    a.open_flags(0)
    b.open_flags(0)
    with pytest.raises(TransportError, match="a speaks shared_memory, b speaks loopback"):
        a.connect(b.endpoint("plan"))


def test_a_closed_transport_is_refused(make: Maker) -> None:
    a, b, _, _ = pair(make)
    a.close()
    a.close()
    with pytest.raises(TransportError):
        a.signal("b", 0, 1, 1)
    assert b.flag(0) == Flag(0, 0)


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xc0", b"\x93\x01\x02\x03"],
)
def test_endpoint_bytes_from_a_stranger(damage: bytes) -> None:
    with pytest.raises(TransportError):
        Endpoint.from_bytes(damage)
    for regions in ((RegionInfo("A", -1, ""),), (RegionInfo("A", 1, ""), RegionInfo("A", 2, ""))):
        with pytest.raises(TransportError):
            Endpoint.from_bytes(Endpoint("w", "t", 1, "p", 0, "", regions).to_bytes())


# shared memory


def test_shared_memory_refuses_false_addresses() -> None:
    a, b, _, _ = pair(SharedMemoryTransport)
    with pytest.raises(TransportError, match="flags are open already"):
        a.open_flags(3)
    good = b.endpoint("plan")
    pid, fd, inode, _ = good.flags_address.split("/")
    for address in (
        "nonsense",
        f"{pid}/{fd}/{inode}/x",
        f"{pid}/{fd}/{inode}/8",
        f"{pid}/{fd}/{inode}/-8",
        f"{pid}/{fd}/{int(inode) + 1}/0",
        f"{pid}/99999/{inode}/0",
        f"4194303/{fd}/{inode}/0",
    ):
        lie = Endpoint("b", "shared_memory", good.incarnation, "plan", good.channels, address, good.regions)
        with pytest.raises(TransportError, match="b: "):
            a.connect(lie)
    lie = Endpoint("b", "shared_memory", good.incarnation + 1, "plan", 2, good.flags_address, good.regions)
    with pytest.raises(TransportError, match="its memory of"):
        a.connect(lie)
    larger = tuple(RegionInfo(region.name, region.size_bytes + 1, region.address) for region in good.regions)
    with pytest.raises(TransportError, match="exchange endpoints again"):
        a.connect(Endpoint("b", "shared_memory", good.incarnation, "plan", 2, good.flags_address, larger))


def test_shared_memory_leaves_no_descriptor_behind() -> None:
    def memory_files() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("transload" in os.readlink(link) for link in links if os.path.lexists(link))

    before = memory_files()
    ends = pair(SharedMemoryTransport)
    assert memory_files() > before
    ends[0].close()
    ends[1].close()
    del ends
    assert memory_files() == before


def test_shared_memory_cannot_be_shrunk_under_a_peer() -> None:
    _, b, _, _ = pair(SharedMemoryTransport)
    pid, fd, _, _ = b.endpoint("plan").regions[0].address.split("/")
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/{pid}/fd/{fd}", 0)


def _in_child(transport: Transport, pipe: object) -> None:
    try:
        transport.signal("b", 0, 1, 1)
    except TransportError as error:
        pipe.send(str(error))  # type: ignore[attr-defined]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(make: Maker) -> None:
    a, b, _, _ = pair(make)
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(a, theirs))
    child.start()
    assert mine.poll(30), "the child said nothing"
    assert "used in its forked child" in mine.recv()
    child.join(30)
    assert b.flag(0) == Flag(0, 0)


# loopback


def test_loopback_reads_a_source_when_a_piece_lands() -> None:
    """Whoever reuses a buffer before its writes have finished is caught."""
    network = LoopbackNetwork(LoopbackPolicy(seed=1, max_delay=5))
    a, _, source, target = pair(network.transport)
    source[:] = 1
    ticket = a.write(0, "b", "RECEIVE", rows(*((k, 63 - k, 1) for k in range(64))))  # type: ignore[arg-type]
    assert not network.idle
    source[:] = 2
    while not a.finished(ticket):
        pass
    assert network.idle
    assert 2 in target


def test_loopback_reorders_pieces_but_never_flags_of_one_channel() -> None:
    network = LoopbackNetwork(LoopbackPolicy(seed=3, max_delay=9, reorder=True))
    a, b, source, target = pair(network.transport)
    source[:] = np.arange(64)
    ticket = a.write(0, "b", "RECEIVE", rows(*((k, 63 - k, 1) for k in range(64))))  # type: ignore[arg-type]
    for sequence in range(1, 6):
        a.signal("b", 0, sequence, sequence)
    landed, flags = [], []
    while not network.idle:
        network.advance()
        landed.append(int((target > 0).sum()))
        flags.append(b._flags[0].sequence)
    assert landed == sorted(landed)
    assert len(set(landed)) > 3, "pieces land at several times"
    assert flags == sorted(flags)
    assert b.flag(0) == Flag(5, 5)
    assert a.finished(ticket)


def test_loopback_fails_whole_writes_after_they_have_ended() -> None:
    network = LoopbackNetwork(LoopbackPolicy(seed=1, max_delay=3, failing_writes=frozenset([1])))
    a, _, source, target = pair(network.transport)
    source[:] = 7
    good, bad = (a.write(0, "b", "RECEIVE", rows((0, at, 4), (8, at + 4, 4))) for at in (0, 32))  # type: ignore[arg-type]
    while not a.finished(good):
        pass
    while not network.idle:
        network.advance()
    with pytest.raises(TransportError) as failure:
        a.finished(bad)
    assert sorted(str(failure.value).split("; ")) == [
        f"write 1 from a to b RECEIVE[{at}:{at + 4}] failed" for at in (32, 36)
    ]
    assert target.tolist() == [7] * 8 + [0] * 56
    assert [record.bytes for record in network.records] == [8, 8]


def test_loopback_loses_writes_and_signals() -> None:
    network = LoopbackNetwork(LoopbackPolicy(lost_writes=frozenset([0]), lost_signals=frozenset([1])))
    a, b, source, target = pair(network.transport)
    source[:] = 7
    lost = a.write(0, "b", "RECEIVE", rows((0, 0, 4)))  # type: ignore[arg-type]
    a.signal("b", 0, 1, 1)
    a.signal("b", 0, 2, 2)
    assert not any(a.finished(lost) for _ in range(20))
    assert not target.any()
    assert b.flag(0) == Flag(1, 1)
    with pytest.raises(TransportError, match="never posted"):
        a.finished(Ticket(9))
