"""Where a worker's tensors are, and which kernels and buffers follow from that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from adapters.failures import UsageError
from adapters.placing import Placement, place, spans_of
from tests.transfer_exec.fake_device import FakeDevice, FakeDriver
from transfer_exec.errors import ProgramError
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.transport.base import Memory


def on(where: str, memory: Memory) -> torch.Tensor:
    """What stands for a tensor on a device, of memory that a fake one gave."""
    storage = SimpleNamespace(data_ptr=lambda: memory.ctypes.data, nbytes=lambda: memory.nbytes)
    return cast(torch.Tensor, SimpleNamespace(device=torch.device(where), untyped_storage=lambda: storage))


def row(source: Memory, target: Memory) -> list[int]:
    return [source.ctypes.data, 1, 0, target.ctypes.data, 1, 0, source.nbytes, 1, 0]


def placed(driver: FakeDriver, transport: str, staged: tuple[str, ...] = (), **tensors: torch.Tensor) -> Placement:
    return place(
        "engine/a/0",
        tensors,
        staged,
        transport,
        host=CpuKernels(),
        open_device=lambda device: FakeDevice(driver, device.index),
    )


def test_nothing_on_a_device_is_the_host_s_alone() -> None:
    host = CpuKernels()
    found = place("w", {"a": torch.zeros(3)}, ("b",), "mooncake", host=host)
    assert found.devices == ()
    assert found.kernels is host


def test_every_row_is_moved_where_its_tensor_is() -> None:
    driver = FakeDriver(1)
    first, second, here = driver.allocate(8), driver.allocate(8), np.zeros(8, dtype=np.uint8)
    for value, memory in enumerate((first, second, here)):
        memory[:] = value + 1
    there = {"a": on("cuda:1", second), "b": torch.from_numpy(here), "c": on("cuda:0", first)}
    found = placed(driver, "shared_memory", ("staged",), **there)
    assert [device.name for device in found.devices] == ["fake:0", "fake:1"]
    assert found.kernels.name == "cpu+fake"
    buffer = np.zeros(24, dtype=np.uint8)
    found.devices[0].pin(buffer)
    rows = np.array([row(memory, buffer[8 * k :]) for k, memory in enumerate((here, first, second))], dtype=np.int64)
    found.kernels.prepare(rows, packing=True).run()
    assert buffer.tolist() == [3] * 8 + [1] * 8 + [2] * 8
    assert len(driver.last) == 2, "one stream of each device was used"


def test_buffers_on_a_device_need_everything_there() -> None:
    driver = FakeDriver(1)
    memory, here = driver.allocate(8), torch.zeros(8, dtype=torch.uint8)
    found = placed(driver, "device_memory", a=on("cuda:0", memory))
    assert [device.name for device in found.devices] == ["fake:0"]
    rows = np.array([row(here.numpy(), memory)], dtype=np.int64)
    with pytest.raises(ProgramError, match="1 of 1 rows are of tensors in memory of the host"):
        found.kernels.prepare(rows, packing=True)
    use = "pass transport='shared_memory'"
    with pytest.raises(UsageError, match=rf"x.y is staged in memory of the host, and device_memory has none; {use}"):
        placed(driver, "device_memory", ("x.y",), a=on("cuda:0", memory))
    with pytest.raises(UsageError, match=rf"engine/a/0: b is on cpu, device_memory moves one CUDA device's; {use}"):
        placed(driver, "device_memory", a=on("cuda:0", memory), b=here)
    with pytest.raises(UsageError, match=rf"engine/a/0: a is on cuda:0, b on cuda:1; {use}"):
        placed(driver, "device_memory", a=on("cuda:0", memory), b=on("cuda:1", memory))


def test_aliases_are_one_span() -> None:
    whole = torch.zeros(10)
    at = whole.untyped_storage().data_ptr()
    assert spans_of([whole, whole[2:], whole.view(2, 5).T, torch.zeros(0)]).tolist() == [[at, at + 40]]
    assert spans_of([]).shape == (0, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    from adapters.placing import open_cuda
    from transfer_exec.errors import TransportError

    with pytest.raises(TransportError, match="cuda:0 is no CUDA device of this process"):
        open_cuda(torch.device("cuda:0"))
