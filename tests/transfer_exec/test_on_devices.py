"""Programs whose parameters are on devices: right bytes in any order in which devices may end their work."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from layout_algebra.source_map import SourceMap
from tests.transfer_exec.crossing import Crossing, random_crossing, storage_of
from tests.transfer_exec.fake_device import POISON, FakeDevice, FakeDriver, FakeEvent
from transfer_exec.compiler import compile_program
from transfer_exec.errors import ProgramError
from transfer_exec.executor import Executor
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.kernels.placed import Placed, PlacedKernels
from transfer_exec.plan import Plan
from transfer_exec.report import WorkerReport
from transfer_exec.transport.base import Transport
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.shared_memory import SharedMemoryTransport

KINDS = ["device_memory", "shared_memory"]


@dataclass
class Job:
    """A crossing whose parameters are on devices, two workers to a device, each with its executor."""

    crossing: Crossing
    driver: FakeDriver
    devices: dict[str, FakeDevice]
    memory: dict[str, dict[str, np.ndarray]]
    executors: dict[str, Executor]

    def run(self, version: int, seed: int) -> dict[str, WorkerReport]:
        """One update, workers stepped in random order by one thread."""
        steps = {worker: executor.start(version) for worker, executor in self.executors.items()}
        reports: dict[str, WorkerReport] = {}
        order = random.Random(seed)
        for _ in range(200_000):
            if not steps:
                return reports
            worker = order.choice(list(steps))
            try:
                next(steps[worker])
            except StopIteration as ended:
                reports[worker] = ended.value
                del steps[worker]
        raise AssertionError(f"{', '.join(steps)} did not end")

    def fill(self) -> None:
        """The truth into holders' memory, 0x77 into everybody else's."""
        for worker, tensors in self.memory.items():
            for name, view in tensors.items():
                _bytes(view)[...] = 0x77
                if worker in self.crossing.held:
                    self.crossing.fill_holder(worker, name, view)

    def check(self) -> None:
        """Every needer has every element."""
        for worker in self.crossing.needed:
            for name, view in self.memory[worker].items():
                before = np.empty_like(view)
                _bytes(before)[...] = 0x77
                self.crossing.check_needer(worker, name, view, before)

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close()


def on_devices(
    crossing: Crossing, plan: Plan, driver: FakeDriver, kind: str, *, depth: int = 2, on_host: int = 0
) -> Job:
    """Bind everybody; every ``on_host``-th parameter stays in memory of the host."""
    devices = {worker: FakeDevice(driver, number // 2) for number, worker in enumerate(plan.workers)}
    memory: dict[str, dict[str, np.ndarray]] = {}
    executors = {}
    for worker in plan.workers:
        device, source_map = devices[worker], crossing.maps[worker]
        spans = []
        memory[worker] = {}
        for number, name in enumerate(source_map.parameters):
            view, span = _tensor(device, source_map, name, on_host=bool(on_host) and number % on_host == 0)
            memory[worker][name] = view
            spans += [span] if span else []
        placed = [Placed(np.array(spans, dtype=np.int64).reshape(-1, 2), device.kernels)]
        transport: Transport
        if kind == "device_memory":
            transport, kernels = DeviceMemoryTransport(worker, [device]), PlacedKernels(None, placed)
        else:
            transport, kernels = SharedMemoryTransport(worker, device=device), PlacedKernels(CpuKernels(), placed)
        executors[worker] = Executor(
            compile_program(plan, worker, source_map),
            memory[worker],
            transport,
            kernels=kernels,
            devices=[device],
            depth=depth,
        )
    endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
    for executor in executors.values():
        executor.connect(endpoints)
    return Job(crossing, driver, devices, memory, executors)


def _tensor(
    device: FakeDevice, source_map: SourceMap, name: str, *, on_host: bool
) -> tuple[np.ndarray, tuple[int, int] | None]:
    """A parameter's memory, and its span if it is on the device."""
    shape, storage = source_map.shape(name), storage_of(source_map.dtype(name))
    size = int(np.prod(shape)) * storage.itemsize
    if on_host or not size:
        return np.zeros(shape, storage), None
    raw = device.allocate(size)
    return raw.view(storage).reshape(shape), (raw.ctypes.data, raw.ctypes.data + size)


def _bytes(view: np.ndarray) -> np.ndarray:
    return np.atleast_1d(view).view(np.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_random_crossings_between_devices(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.integers(8, 200)))
    on_host = int(rng.integers(0, 3)) if kind == "shared_memory" else 0
    job = on_devices(crossing, plan, FakeDriver(seed), kind, depth=int(rng.integers(1, 4)), on_host=on_host)
    for version in range(2):
        job.fill()
        reports = job.run(version, seed)
        job.check()
    assert {report.transport for report in reports.values()} == {kind}
    assert {report.kernels for report in reports.values()} <= {"fake", "cpu+fake"}
    job.close()
    assert job.driver.pinned == []


def many_rounds(seed: int) -> tuple[Crossing, Plan]:
    """A crossing of at least three rounds in which something goes from worker to worker."""
    for attempt in range(100):
        crossing = random_crossing(np.random.default_rng(1000 * seed + attempt))
        plan = crossing.plan(workers_per_node=2, buffer_bytes=16)
        if plan.rounds >= 3 and any(True for _ in plan.moves()):
            return crossing, plan
    raise AssertionError("no crossing of three rounds")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_t11_a_slot_is_not_used_again_before_a_device_has_read_it(kind: str, depth: int, seed: int) -> None:
    crossing, plan = many_rounds(seed)
    job = on_devices(crossing, plan, FakeDriver(seed), kind, depth=depth)
    job.fill()
    job.run(1, seed)
    job.check()
    job.close()


def test_t11_the_fake_sees_a_slot_that_is_used_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """If copies were believed to have ended when they have begun, bytes would be wrong."""
    monkeypatch.setattr(FakeEvent, "done", lambda self: self.driver.some() or True)  # type: ignore[func-returns-value]
    wrong = 0
    for seed in range(10):
        crossing, plan = many_rounds(seed)
        job = on_devices(crossing, plan, FakeDriver(seed), "device_memory")
        job.fill()
        job.run(1, seed)
        try:
            job.check()
        except AssertionError:
            wrong += 1
        job.close()
    assert wrong >= 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_t12_packing_waits_for_what_the_trainer_s_stream_was_given(kind: str, seed: int) -> None:
    """The weights are still being computed when the update begins, and a forward still reads the old ones."""
    crossing, plan = many_rounds(seed)
    job = on_devices(crossing, plan, FakeDriver(seed), kind)
    job.fill()
    truth = {w: {n: v.copy() for n, v in job.memory[w].items()} for w in crossing.held}
    read: list[tuple[np.ndarray, np.ndarray]] = []
    for worker, tensors in job.memory.items():
        for name, view in tensors.items():
            stream = job.devices[worker].caller
            if worker in crossing.held:
                _bytes(view)[...] = 0x11

                def compute(view: np.ndarray = view, value: np.ndarray = truth[worker][name]) -> None:
                    view[...] = value

                job.driver.give(stream, compute)
            else:
                old = view.copy()
                job.driver.give(stream, lambda view=view, old=old: read.append((view.copy(), old)))  # type: ignore[misc]
    job.run(1, seed)
    job.check()
    assert len(read) == sum(len(job.memory[worker]) for worker in crossing.needed)
    for seen, old in read:
        assert np.array_equal(_bytes(seen), _bytes(old)), "installed under a forward"
    job.close()


def test_t12_the_fake_sees_packing_that_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "follow", lambda self: None)
    wrong = 0
    for seed in range(5):
        try:
            test_t12_packing_waits_for_what_the_trainer_s_stream_was_given("device_memory", seed)
        except AssertionError:
            wrong += 1
    assert wrong >= 3


def test_buffers_are_freed_when_nobody_has_them_any_more() -> None:
    crossing, plan = many_rounds(1)
    driver = FakeDriver(1)
    job = on_devices(crossing, plan, driver, "device_memory")
    assert not any(allocation.freed for allocation in driver.allocations)
    for executor in job.executors.values():
        executor.close()
    expected = sum(executor.buffers.total_bytes > 0 for executor in job.executors.values())
    stop_at = time.monotonic() + 20
    while sum(each.freed for each in driver.allocations) < expected and time.monotonic() < stop_at:
        time.sleep(0.001)
    freed = [each for each in driver.allocations if each.freed]
    assert len(freed) == expected
    assert all((each.maps[0] == POISON).all() for each in freed)


def test_tensors_of_the_host_cannot_meet_buffers_on_a_device() -> None:
    crossing, plan = many_rounds(1)
    with pytest.raises(ProgramError, match="rows are of tensors in memory of the host, which cannot"):
        on_devices(crossing, plan, FakeDriver(1), "device_memory", on_host=1)


def test_an_executor_names_the_devices_that_it_moves() -> None:
    torch = pytest.importorskip("torch")
    crossing, plan = many_rounds(2)
    worker = next(w for w in plan.workers if compile_program(plan, w, crossing.maps[w]).tensors)
    program = compile_program(plan, worker, crossing.maps[worker])
    there: Mapping[str, object] = {t.name: torch.zeros(t.shape, device="meta") for t in program.tensors}
    device = FakeDevice(FakeDriver())
    with pytest.raises(ProgramError, match="is on meta; this executor moves CPU, fake:0 memory"):
        Executor(program, there, SharedMemoryTransport(worker), devices=[device])
