"""Memory of devices between workers: nothing is believed to have happened before an event says so."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.transfer_exec.fake_device import POISON, FakeDevice, FakeDriver, FakeEvent
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.transport import lease as lease_module
from transfer_exec.transport.base import Endpoint, Flag, RegionHandle, Ticket
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.lease import Lease, hold
from transfer_exec.transport.shared_memory import SharedMemoryTransport

HANDLE = RegionHandle(0)


def rows(*descriptors: tuple[int, int, int]) -> np.ndarray:
    return np.array(descriptors, dtype=np.uint64).reshape(-1, 3)


def pair(
    driver: FakeDriver, size: int = 64
) -> tuple[DeviceMemoryTransport, DeviceMemoryTransport, np.ndarray, np.ndarray]:
    """Two workers with a region each, on devices of one machine; a is connected to b."""
    a, b = (DeviceMemoryTransport(worker, [FakeDevice(driver)]) for worker in "ab")
    source, target = a.allocate(size), b.allocate(size)
    a.register("PACK", source)
    b.register("RECEIVE", target)
    a.open_flags(1)
    b.open_flags(1)
    a.connect(Endpoint.from_bytes(b.endpoint("plan").to_bytes()))
    return a, b, source, target


def within(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether something becomes true in time."""
    stop_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < stop_at:
        time.sleep(0.001)
    return condition()


def settle(transport: DeviceMemoryTransport, ticket: Ticket) -> None:
    while not transport.finished(ticket):
        pass


@pytest.mark.parametrize("seed", range(20))
def test_a_write_has_landed_when_it_is_finished_and_a_flag_does_not_overtake_it(seed: int) -> None:
    a, b, source, target = pair(FakeDriver(seed))
    for number in range(1, 6):
        source[:] = number
        tickets = [a.write(HANDLE, "b", "RECEIVE", rows((at, 48 - at, 16))) for at in (0, 16, 32, 48)]
        while any(not a.finished(ticket) for ticket in tickets):
            assert b.flag(0) == Flag(number - 1, 0)
        a.signal("b", 0, number, 0)
        assert target.tolist() == [number] * 64


def test_a_source_that_is_reused_before_its_copy_has_ended_is_caught() -> None:
    wrong = 0
    for seed in range(10):
        a, _, source, target = pair(FakeDriver(seed))
        source[:] = 1
        ticket = a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64)))
        source[:] = 2
        settle(a, ticket)
        wrong += 2 in target
    assert wrong


def test_what_the_caller_s_stream_was_given_comes_first() -> None:
    """A copy waits for a producer only if it follows it; on a device nothing else orders the two."""
    stale = 0
    for seed in range(20):
        driver = FakeDriver(seed)
        device = FakeDevice(driver)
        source, target = device.allocate(8), device.allocate(8)
        row = np.array([[source.ctypes.data, target.ctypes.data, 8]])
        driver.give(device.caller, lambda source=source: source.fill(7))  # type: ignore[misc]
        device.copy(row).wait()
        stale += target[0] == 0
        device.follow()
        device.copy(row).wait()
        assert target.tolist() == [7] * 8
    assert stale


def test_t06_every_region_is_shared_and_written_by_the_device_that_it_is_on() -> None:
    """A driver uses the device that was used last; two devices' memory is registered in turn."""
    driver = FakeDriver(3)
    devices = [FakeDevice(driver, 0), FakeDevice(driver, 1)]
    a, b = (DeviceMemoryTransport(worker, devices) for worker in "ab")
    handles, sources, targets = [], [], []
    for number in range(6):
        sources.append(devices[number % 2].allocate(16))
        targets.append(devices[number // 2 % 2].allocate(16))
        sources[-1][:] = number + 1
    for number in range(6):
        handles.append(a.register(f"PACK/{number}", sources[number]))
        b.register(f"RECEIVE/{number}", targets[number])
    a.open_flags(0)
    b.open_flags(0)
    a.connect(b.endpoint("plan"))
    for number, handle in enumerate(handles):
        settle(a, a.write(handle, "b", f"RECEIVE/{number}", rows((0, 0, 16))))
    assert [target.tolist() for target in targets] == [[number + 1] * 16 for number in range(6)]
    assert [len(device.copied_rows) for device in devices] == [3, 3]


@pytest.mark.parametrize("seed", range(10))
def test_memory_that_peers_still_have_is_not_freed_under_their_copies(seed: int) -> None:
    driver = FakeDriver(seed)
    a, b, source, target = pair(driver)
    source[:] = 7
    under_way = a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64)))
    b.close()
    with pytest.raises(PeerGoneError, match="b: has closed; exchange endpoints again"):
        a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64)))
    settle(a, under_way)
    assert target.tolist() == [7] * 64, "what was under way still had somewhere to go"
    assert not driver.allocations[1].freed
    a.close()
    assert within(lambda: driver.allocations[1].freed), "freed when the last one has let go"
    assert target.tolist() == source.tolist() == [POISON] * 64


def test_connecting_again_lets_go_of_what_the_older_life_shared_when_copies_to_it_have_ended() -> None:
    driver = FakeDriver(1)
    a, b, source, target = pair(driver)
    source[:] = 3
    under_way = a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64)))
    b.close()
    again = DeviceMemoryTransport("b", [FakeDevice(driver)])
    second = again.allocate(64)
    again.register("RECEIVE", second)
    again.open_flags(1)
    a.connect(again.endpoint("plan"))
    assert a.finished(under_way)
    assert within(lambda: driver.allocations[1].freed)
    assert target.tolist() == [POISON] * 64
    settle(a, a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64))))
    assert second.tolist() == [3] * 64


def test_a_lease_ends_when_the_last_holder_has_let_go_and_nobody_begins_to_hold_it_then() -> None:
    assert doctest.testmod(lease_module).failed == 0
    lease = Lease("b")
    first, second = hold("b", lease.address), hold("b", lease.address)
    ended: list[int] = []
    lease.when_free(lambda: ended.append(1))
    os.close(first)
    time.sleep(0.05)
    assert not ended
    os.close(second)
    assert within(lambda: ended == [1])
    for address in (lease.address, "nonsense", "1/2", f"{os.getpid()}/0/1"):
        with pytest.raises(TransportError, match="b: "):
            hold("b", address)
    unused = Lease("b")
    unused.when_free(lambda: ended.append(2))
    assert ended == [1, 2], "nobody to wait for"


def test_what_is_being_taken_back_cannot_be_held() -> None:
    lease = Lease("b")
    held: list[str] = []

    def try_to_hold() -> None:
        with pytest.raises(TransportError, match="b: its memory is being taken back") as refused:
            hold("b", lease.address)
        held.append(str(refused.value))

    lease.when_free(try_to_hold)
    assert held


@pytest.mark.processes
def test_a_holder_that_is_killed_is_not_waited_for() -> None:
    lease = Lease("b")
    code = (
        "import sys; from transfer_exec.transport.lease import hold\n"
        "hold('b', sys.argv[1]); print('held', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, lease.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        ended: list[int] = []
        lease.when_free(lambda: ended.append(1))
        time.sleep(0.05)
        assert not ended
        os.kill(child.pid, signal.SIGKILL)
        assert within(lambda: ended == [1])
    finally:
        child.kill()
        child.communicate()


def test_what_cannot_be_mapped_is_named_and_what_was_is_let_go() -> None:
    driver = FakeDriver(1)
    a, b, _, _ = pair(driver)
    good = b.endpoint("plan")
    (region,) = good.regions
    for address in ("nonsense", "99/0", ""):
        two = (region, type(region)("OTHER", 64, address))
        lie = Endpoint("b", "device_memory", good.incarnation, "plan", 1, good.flags_address, two)
        with pytest.raises(TransportError, match=r"b: .* is no memory of a device; exchange endpoints again"):
            a.connect(lie)
        assert len(driver.allocations[1].maps) == 1
    lie = Endpoint("b", "device_memory", good.incarnation + 1, "plan", 1, good.flags_address, good.regions)
    with pytest.raises(TransportError, match="endpoint is of incarnation"):
        a.connect(lie)
    b.close()
    with pytest.raises(TransportError, match="b: "):
        a.connect(good)


def test_memory_of_the_host_and_workers_without_a_device_are_refused() -> None:
    a, _, _, _ = pair(FakeDriver())
    with pytest.raises(TransportError, match="region w of 8 bytes cannot be registered: it was not allocated"):
        a.register("w", np.zeros(8, dtype=np.uint8))
    with pytest.raises(TransportError, match="a: device_memory needs a device, and no tensor is on one"):
        DeviceMemoryTransport("a", [])


def test_a_copy_that_fails_is_told_by_its_ticket_and_holds_nobody_up() -> None:
    driver = FakeDriver(2)
    a, b, source, _ = pair(driver)
    source[:] = 1
    driver.allocations[1].freed = True  # the device lost it
    bad = a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64)))
    with pytest.raises(TransportError, match=r"64 bytes at 0x[0-9a-f]* were freed"):
        settle(a, bad)
    driver.allocations[1].freed = False
    settle(a, a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64))))
    a.close()
    b.close()


def test_an_event_that_is_not_asked_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake catches a transport that takes a copy that was begun for one that has ended."""
    monkeypatch.setattr(FakeEvent, "done", lambda self: True)
    a, _, source, target = pair(FakeDriver(1))
    source[:] = 9
    assert a.finished(a.write(HANDLE, "b", "RECEIVE", rows((0, 0, 64))))
    assert not target.any()


# Buffers of the host that a device's kernels reach


def kernel_row(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.array([[source.ctypes.data, 1, 0, target.ctypes.data, 1, 0, source.nbytes, 1, 0]], dtype=np.int64)


def test_what_a_transport_of_host_memory_allocates_is_pinned_as_long_as_it_is_open() -> None:
    driver = FakeDriver(1)
    device = FakeDevice(driver)
    a = SharedMemoryTransport("a", device=device)
    tensor, buffer = device.allocate(32), a.allocate(32)
    tensor[:] = 5
    device.kernels.prepare(kernel_row(tensor, buffer), packing=True).run()
    assert buffer.tolist() == [5] * 32
    a.close()
    assert driver.pinned == []
    plain = SharedMemoryTransport("b").allocate(32)
    with pytest.raises(TransportError, match=r"32 bytes at 0x[0-9a-f]* are no device's"):
        device.kernels.prepare(kernel_row(tensor, plain), packing=True).run()


def test_memory_that_cannot_be_pinned_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("32 bytes of memory cannot be pinned")

    monkeypatch.setattr(FakeDevice, "pin", refuse)
    a = SharedMemoryTransport("a", device=FakeDevice(FakeDriver()))
    with pytest.raises(TransportError, match="cannot be pinned"):
        a.allocate(32)
    a.close()
