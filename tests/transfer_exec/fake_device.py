"""A fake device: memory of its own, work that ends only when somebody asks, in any order that nobody has excluded.

`FakeDriver` is a machine's devices. Work is given to streams and done later: whenever an event is asked, some works are
drawn at random from those that nothing holds back, and done then. So bytes that are read, sent or overwritten without
asking an event are the wrong ones. Allocations are files that every worker maps at another address; what is freed is
poisoned, and work that touches it, or memory that the device cannot reach, fails.

Like a real driver, it registers and shares for whichever device was used last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.conversions import SOURCE_BYTES, TARGET_BYTES
from transfer_exec.errors import TransportError
from transfer_exec.kernels.base import Job
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.transport.base import Memory

POISON = 0xDB


@dataclass(eq=False)
class Work:
    """Something that a stream was given."""

    act: Callable[[], object]
    after: list[Work]
    ended: bool = False
    error: str = ""


@dataclass(eq=False)
class Allocation:
    """Memory of a device; ``maps`` are all places where it is mapped, the owner's first."""

    device: int
    fd: int
    maps: list[Memory]
    freed: bool = False


class FakeDriver:
    """The devices of one machine.

    Parameters
    ----------
    seed
        Of the order in which works end.
    prompt
        Do everything as soon as any event is asked.
    """

    def __init__(self, seed: int = 0, *, prompt: bool = False) -> None:
        self._random = random.Random(seed)
        self._prompt = prompt
        self.current = 0
        self.waiting: list[Work] = []
        self.last: dict[object, Work] = {}
        self.allocations: list[Allocation] = []
        self.pinned: list[Memory] = []

    # Work

    def give(self, stream: object, act: Callable[[], object]) -> FakeEvent:
        """Put work on a stream."""
        work = Work(act, [self.last[stream]] if stream in self.last else [])
        self.last[stream] = work
        self.waiting.append(work)
        return FakeEvent(self, work)

    def hold_back(self, stream: object, other: object) -> None:
        """Let what a stream is given from now on wait for what another one has been given so far."""
        if other in self.last:
            self.give(stream, lambda: None)
            self.last[stream].after.append(self.last[other])

    def some(self) -> None:
        """A moment passes: a few works end."""
        for _ in range(len(self.waiting) if self._prompt else self._random.randint(0, 2)):
            self._one()

    def until(self, work: Work) -> None:
        """Time passes until a work has ended."""
        while not work.ended:
            self._one()

    def _one(self) -> None:
        ready = [work for work in self.waiting if all(each.ended for each in work.after)]
        if ready:
            work = self._random.choice(ready)
            self.waiting.remove(work)
            try:
                work.act()
            except TransportError as error:
                work.error = str(error)
            work.ended = True

    # Memory, in the context of the device that was used last

    def allocate(self, size_bytes: int) -> Memory:
        fd = os.memfd_create("fake device")
        os.ftruncate(fd, size_bytes)
        self.allocations.append(Allocation(self.current, fd, [_map(fd, size_bytes)]))
        return self.allocations[-1].maps[0]

    def share(self, memory: Memory) -> str:
        number, offset = self.find(memory.ctypes.data, memory.nbytes)
        if self.allocations[number].device != self.current:
            raise TransportError(f"invalid context: {self.current} has no such memory")
        return f"{number}/{offset}"

    def open(self, shared: str) -> int:
        try:
            number, offset = (int(part) for part in shared.split("/"))
            allocation = self.allocations[number]
        except (ValueError, IndexError) as error:
            raise TransportError(f"{shared!r} is no memory of a device") from error
        if allocation.freed:
            raise TransportError("the memory is gone")
        allocation.maps.append(_map(allocation.fd, allocation.maps[0].nbytes))
        return allocation.maps[-1].ctypes.data + offset

    def let_go(self, address: int) -> None:
        number, _ = self.find(address, 1)
        allocation = self.allocations[number]
        # The mapping itself stays, so that whoever uses it too late meets poison and no other memory.
        gone = [each for each in allocation.maps[1:] if _has(each, address, 1)]
        allocation.maps = [each for each in allocation.maps if each is not gone[0]]

    def free(self, memory: Memory) -> None:
        number, _ = self.find(memory.ctypes.data, memory.nbytes)
        allocation = self.allocations[number]
        assert len(allocation.maps) == 1, "freed while somebody has it mapped"
        allocation.maps[0][:] = POISON
        allocation.freed = True

    def find(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Number of an allocation and offset in it; TransportError if no device has these bytes."""
        for number, allocation in enumerate(self.allocations):
            for each in allocation.maps:
                if _has(each, address, size_bytes):
                    if allocation.freed:
                        raise TransportError(f"{size_bytes} bytes at {address:#x} were freed")
                    return number, address - each.ctypes.data
        raise TransportError(f"{size_bytes} bytes at {address:#x} are no device's")

    def check_reach(self, address: int, size_bytes: int) -> None:
        """Whether kernels may touch some bytes: a device's, or pinned ones."""
        if not any(_has(each, address, size_bytes) for each in self.pinned):
            self.find(address, size_bytes)


@dataclass(frozen=True)
class FakeEvent:
    """The end of a work."""

    driver: FakeDriver
    work: Work

    def done(self) -> bool:
        self.driver.some()
        return self._ended()

    def wait(self) -> None:
        self.driver.until(self.work)
        self._ended()

    query = done  # as torch calls it

    def _ended(self) -> bool:
        if self.work.error:
            raise TransportError(self.work.error)
        return self.work.ended


@dataclass(eq=False)
class FakeDevice:
    """One device as one worker uses it."""

    driver: FakeDriver
    index: int = 0
    copied_rows: list[IdArray] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"fake:{self.index}"

    @property
    def kernels(self) -> FakeKernels:
        return FakeKernels(self)

    @property
    def caller(self) -> object:
        """The stream that the worker's own program uses."""
        return self, "caller"

    def follow(self) -> None:
        for stream in ("kernels", "copies"):
            self.driver.hold_back((self, stream), self.caller)

    def allocate(self, size_bytes: int) -> Memory:
        self.driver.current = self.index
        return self.driver.allocate(size_bytes)

    def owns(self, memory: Memory) -> bool:
        try:
            number, _ = self.driver.find(memory.ctypes.data, memory.nbytes)
        except TransportError:
            return False
        allocation = self.driver.allocations[number]
        return allocation.device == self.index and _has(allocation.maps[0], memory.ctypes.data, memory.nbytes)

    def free(self, memory: Memory) -> None:
        self.driver.current = self.index
        self.driver.free(memory)

    def pin(self, memory: Memory) -> None:
        assert not any(np.may_share_memory(memory, each) for each in self.driver.pinned), "pinned twice"
        self.driver.pinned.append(memory)

    def unpin(self, memory: Memory) -> None:
        self.driver.pinned = [each for each in self.driver.pinned if each.ctypes.data != memory.ctypes.data]

    def copy(self, rows: IdArray) -> FakeEvent:
        self.copied_rows.append(rows)

        def act() -> None:
            for source, target, size in rows.tolist():
                self.driver.check_reach(source, size)
                self.driver.check_reach(target, size)
                ctypes.memmove(target, source, size)

        return self.driver.give((self, "copies"), act)

    def share(self, memory: Memory) -> str:
        self.driver.current = self.index
        return self.driver.share(memory)

    def open(self, shared: str) -> int:
        self.driver.current = self.index
        return self.driver.open(shared)

    def let_go(self, address: int) -> None:
        self.driver.let_go(address)


@dataclass(frozen=True)
class FakeKernels:
    """The CPU's kernels as work of a device's stream."""

    device: FakeDevice

    @property
    def name(self) -> str:
        return "fake"

    def prepare(self, rows: IdArray, *, packing: bool) -> FakeJob:
        return FakeJob(self.device, rows, CpuKernels().prepare(rows, packing=packing))


@dataclass(frozen=True)
class FakeJob:
    device: FakeDevice
    rows: IdArray
    job: Job

    def run(self) -> None:
        def act() -> None:
            for row in self.rows.tolist():
                source, source_stride, source_step, target, target_stride, target_step, length, count, code = row
                self._check(source, (length, source_stride), (count, source_step), int(SOURCE_BYTES[code]))
                self._check(target, (length, target_stride), (count, target_step), int(TARGET_BYTES[code]))
            self.job.run()

        self.device.driver.give((self.device, "kernels"), act).wait()

    def _check(self, address: int, inner: tuple[int, int], outer: tuple[int, int], width: int) -> None:
        reach = [(extent - 1) * stride for extent, stride in (inner, outer)]
        low, high = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
        self.device.driver.check_reach(address + low, high - low + width)


def _map(fd: int, size_bytes: int) -> Memory:
    return np.frombuffer(mmap.mmap(fd, size_bytes), dtype=np.uint8)


def _has(memory: Memory, address: int, size_bytes: int) -> bool:
    return 0 <= address - memory.ctypes.data <= memory.nbytes - size_bytes
