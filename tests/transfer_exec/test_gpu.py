"""What only a GPU can show: ``make gpu`` runs it, correctness first, and prints how fast memory is moved.

Ratios are to a copy of the same bytes by the driver in the same run, and are never asserted. What needs no GPU to be
wrong runs on the CPU too, so that this file is known to work before it meets one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.placing import place
from adapters.torch_bits import tensor_of_bits, torch_dtype
from adapters.transports import make_transport
from tests.adapters.crew import Crew
from tests.adapters.toy import Holding, rollout, same_bits, trainer
from tests.transfer_exec.crossing import random_crossing
from tests.transfer_exec.test_kernels import random_rows
from transfer_exec.compiler import compile_program
from transfer_exec.cuda_device import CudaDevice
from transfer_exec.executor import Executor
from transfer_exec.kernels.base import Job
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.kernels.reference import ReferenceKernels
from transfer_exec.kernels.triton import TritonKernels
from transfer_exec.transport.base import Endpoint, RegionHandle
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.shared_memory import SharedMemoryTransport

NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = [pytest.mark.gpu, NEEDS]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = pytest.mark.parametrize(
    ("where", "transport"),
    [
        ("cpu", "shared_memory"),
        pytest.param("cuda:0", "shared_memory", marks=GPU),
        pytest.param("cuda:0", "device_memory", marks=GPU),
    ],
)
TOTAL = 1 << 28


# Correct


@pytest.mark.gpu
@NEEDS
@pytest.mark.parametrize("seed", range(40))
def test_any_rows_agree_with_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 120, 1 << 17, dtype=np.uint8)
    expected = np.full(1 << 20, 0xA5, dtype=np.uint8)
    rows = random_rows(rng, source, expected, 12)
    ReferenceKernels().prepare(rows, packing=True).run()
    here, there = torch.from_numpy(source).cuda(), torch.full((1 << 20,), 0xA5, dtype=torch.uint8, device="cuda")
    rows[:, 0] += here.data_ptr() - source.ctypes.data
    rows[:, 3] += there.data_ptr() - expected.ctypes.data
    device = CudaDevice("cuda:0")
    device.follow()
    device.kernels.prepare(rows, packing=True).run()
    assert np.array_equal(there.cpu().numpy(), expected)


@pytest.mark.gpu
@NEEDS
def test_packing_comes_after_what_the_current_stream_was_given() -> None:
    device = CudaDevice("cuda:0")
    source, target = (torch.zeros(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    job = device.kernels.prepare(one_row(source.data_ptr(), target.data_ptr(), 1 << 20), packing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        source.fill_(7)
        device.follow()
    job.run()
    assert bool((target == 7).all())


@pytest.mark.gpu
@NEEDS
def test_pinned_buffers_are_packed_and_assembled_in_place() -> None:
    device = CudaDevice("cuda:0")
    transport = SharedMemoryTransport("a", device=device)
    buffer = transport.allocate(1 << 20)
    source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    device.follow()
    device.kernels.prepare(one_row(source.data_ptr(), buffer.ctypes.data, 1 << 20), packing=True).run()
    assert np.array_equal(buffer, source.cpu().numpy())
    device.kernels.prepare(one_row(buffer.ctypes.data, target.data_ptr(), 1 << 20), packing=False).run()
    assert torch.equal(source, target)
    transport.close()


def _peer(pipe: Connection, where: str) -> None:
    """Another process: a region on a device, and what has come when the flag is up."""
    b = DeviceMemoryTransport("b", [CudaDevice(where)])
    whole = b.allocate(3 << 20)
    target = whole[1 << 20 : 2 << 20]
    b.register("RECEIVE", target)
    b.open_flags(1)
    pipe.send(b.endpoint("plan").to_bytes())
    while b.flag(0).sequence < 2:
        pass
    out = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    device = CudaDevice(where)
    device.copy(np.array([[target.ctypes.data, out.data_ptr(), 1 << 20]])).wait()
    pipe.send_bytes(out.numpy().tobytes())
    pipe.recv()
    b.close()


@pytest.mark.parametrize("where", [pytest.param("cuda:0", marks=GPU), pytest.param("cuda:1", marks=[*GPU, TWO])])
def test_another_process_gets_what_was_written_on_its_device(where: str) -> None:
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_peer, args=(theirs, where))
    child.start()
    assert mine.poll(120), "the other process said nothing"
    device = CudaDevice("cuda:0")
    a = DeviceMemoryTransport("a", [device])
    source = a.allocate(1 << 20)
    handle = a.register("PACK", source)
    a.open_flags(0)
    a.connect(Endpoint.from_bytes(mine.recv()))
    values = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8).pin_memory()
    for sequence in (1, 2):
        device.copy(np.array([[values.data_ptr(), source.ctypes.data, 1 << 20]])).wait()
        rows = np.array([[at, at, 1 << 16] for at in range(0, 1 << 20, 1 << 16)], dtype=np.uint64)
        ticket = a.write(RegionHandle(handle), "b", "RECEIVE", rows)
        while not a.finished(ticket):
            pass
        a.signal("b", 0, sequence, 0)
    assert mine.poll(60)
    assert mine.recv_bytes() == values.numpy().tobytes()
    mine.send("done")
    a.close()
    child.join(60)
    assert child.exitcode == 0


@PLACES
@pytest.mark.parametrize("seed", range(6))
def test_random_crossings(where: str, transport: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=2, buffer_bytes=int(rng.integers(8, 200)))
    memory: dict[str, dict[str, torch.Tensor]] = {}
    executors = {}
    for worker in plan.workers:
        source_map = crossing.maps[worker]
        memory[worker] = {n: _tensor(source_map.shape(n), source_map.dtype(n), where) for n in source_map.parameters}
        if worker in crossing.held:
            for name, tensor in memory[worker].items():
                filled = _bits(tensor)
                crossing.fill_holder(worker, name, filled)
                _set_bits(tensor, filled)
        found = place(worker, memory[worker], (), transport, host=CpuKernels())
        end = make_transport(transport, worker, address=str, deadline_s=30.0, devices=found.devices)
        program = compile_program(plan, worker, source_map)
        executors[worker] = Executor(program, memory[worker], end, kernels=found.kernels, devices=found.devices)
    endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
    for executor in executors.values():
        executor.connect(endpoints)
    with ThreadPoolExecutor(len(executors)) as threads:
        for version in range(3):
            for running in [threads.submit(executor.run, version) for executor in executors.values()]:
                running.result()
    for worker in crossing.needed:
        for name, tensor in memory[worker].items():
            before = _bits(_tensor(tuple(tensor.shape), crossing.maps[worker].dtype(name), "cpu"))
            crossing.check_needer(worker, name, _bits(tensor), before)
    for executor in executors.values():
        executor.close()


@PLACES
def test_adapters(where: str, transport: str, tmp_path: Path) -> None:
    engines = {"a": [_moved(rollout(0, 2), where), _moved(rollout(1, 2), where)], "b": [_moved(rollout(0, 1), where)]}
    trainers = [_moved(trainer(rank, 2), where) for rank in range(2)]
    with Crew(tmp_path, trainers, engines, transport=transport) as crew:
        crew.connect(buffer_bytes=200)
        for version in (1, 2, 3):
            crew.send(version)
            for one in crew.rollouts.values():
                assert same_bits(one.holding.tensors, one.holding.expected(version))


# Fast


@pytest.mark.gpu
@NEEDS
def test_how_fast_pieces_in_random_order_are_moved() -> None:
    source = torch.randint(0, 255, (TOTAL,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    floor = seconds(partial(target.copy_, source))
    for size in (65536, 4096, 256, 64):
        order = torch.randperm(TOTAL // size)
        rows = np.zeros((TOTAL // size, 9), dtype=np.int64)
        rows[:, 0] = source.data_ptr() + order.numpy() * size
        rows[:, 3] = target.data_ptr() + np.arange(TOTAL // size) * size
        rows[:, [1, 4, 6, 7]] = 1, 1, size, 1
        job = TritonKernels("cuda:0").prepare(rows, packing=True)
        job.run()
        assert torch.equal(target.view(-1, size), source.view(-1, size)[order.cuda()])
        print(f"\n{size} bytes a piece: {floor / seconds(job.launch):.2f} of a copy on the device", end="")


@pytest.mark.gpu
@NEEDS
def test_how_fast_transposes_are() -> None:
    side = 8192
    for dtype in (torch.bfloat16, torch.float32):
        source, width = torch.randn(side, side, device="cuda").to(dtype), dtype.itemsize
        target = torch.zeros_like(source)
        floor = seconds(partial(target.copy_, source))
        row = [source.data_ptr(), width, side * width, target.data_ptr(), side * width, width, side, side, 0]
        row[8] = width.bit_length() - 1
        job = TritonKernels("cuda:0").prepare(np.array([row], dtype=np.int64), packing=True)
        job.run()
        assert torch.equal(target, source.T)
        print(f"\ntransposes of {width} bytes: {floor / seconds(job.launch):.2f} of a copy on the device", end="")


@pytest.mark.gpu
@NEEDS
def test_how_fast_pinned_buffers_are_packed_and_assembled() -> None:
    device = CudaDevice("cuda:0")
    transport = SharedMemoryTransport("a", device=device)
    buffer = transport.allocate(TOTAL)
    tensor = torch.randint(0, 255, (TOTAL,), dtype=torch.uint8, device="cuda")
    pinned = torch.zeros(TOTAL, dtype=torch.uint8).pin_memory()
    ways: list[tuple[str, int, int, Callable[[], object]]] = [
        ("packed", tensor.data_ptr(), buffer.ctypes.data, partial(pinned.copy_, tensor, non_blocking=True)),
        ("assembled", buffer.ctypes.data, tensor.data_ptr(), partial(tensor.copy_, pinned, non_blocking=True)),
    ]
    for what, source, target, copy in ways:
        job: Job = device.kernels.prepare(one_row(source, target, TOTAL), packing=what == "packed")
        floor = seconds(copy)
        print(f"\npinned buffers {what}: {floor / wall_seconds(job):.2f} of a copy by the driver", end="")
    transport.close()


def one_row(source: int, target: int, size: int) -> np.ndarray:
    return np.array([[source, 1, 0, target, 1, 0, size, 1, 0]], dtype=np.int64)


def seconds(work: Callable[[], object], times: int = 10) -> float:
    """Of one of many, on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times / 1000


def wall_seconds(job: Job, times: int = 10) -> float:
    """Of a job on a stream of its own, which returns when it has ended."""
    job.run()
    begin = time.perf_counter()
    for _ in range(times):
        job.run()
    return (time.perf_counter() - begin) / times


def _tensor(shape: tuple[int, ...], dtype: str, where: str) -> torch.Tensor:
    zeros = np.zeros(int(np.prod(shape)), dtype=f"<u{torch_dtype(dtype).itemsize}")
    return tensor_of_bits(zeros, dtype, shape).clone().to(where)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor's bits as unsigned integers, in its shape."""
    here = tensor.detach().cpu().contiguous().reshape(-1)
    return here.view(torch.uint8).numpy().view(f"u{tensor.element_size()}").reshape(tuple(tensor.shape)).copy()


def _set_bits(tensor: torch.Tensor, bits: np.ndarray) -> None:
    raw = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view(np.uint8)).to(tensor.device)
    tensor.view(-1).view(torch.uint8).copy_(raw)


def _moved(holding: Holding, where: str) -> Holding:
    """A worker whose tensors are on a device, but for its table, which no loader fills."""
    holding.tensors = {name: tensor.to(where) for name, tensor in holding.tensors.items()}
    return holding
