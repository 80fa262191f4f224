"""The CUDA device where there is none: kernels under Triton's interpreter, and a runtime that notes who is current.

A script of its own, since Triton decides when it is imported whether it interprets. Everything that torch would do on a
GPU is done in memory of the host; what is checked is what we ask of it. Prints ``ok``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from transfer_exec import cuda_device
from transfer_exec.cuda_device import CudaDevice
from transfer_exec.errors import TransportError
from transfer_exec.kernels import triton as triton_kernels

REGISTERED_ALREADY = 712


class Runtime:
    """What torch.cuda stands for: which device is current, and who was when something was asked."""

    def __init__(self) -> None:
        self.current = -1
        self.asked: list[tuple[object, ...]] = []
        self.pinned: dict[int, int] = {}
        self.happened = True

    def note(self, *what: object) -> None:
        self.asked.append((self.current, *what))

    @contextmanager
    def device(self, device: Where) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, self.current if stream is None else stream.device.index
        yield
        self.current = before

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: Where) -> Stream:
        return Stream(self, device)

    def Stream(self, device: Where) -> Stream:
        return Stream(self, device)

    def Event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.happened, synchronize=lambda: None)

    def cudart(self) -> Runtime:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.note("pin", size, flags)
        if address in self.pinned:
            return REGISTERED_ALREADY
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.note("unpin", self.pinned.pop(address))
        return 0

    def can_device_access_peer(self, device: Where, other: int) -> bool:
        return False


class Stream:
    def __init__(self, runtime: Runtime, device: Where) -> None:
        self.device, self.runtime = device, runtime

    def wait_stream(self, other: Stream) -> None:
        self.runtime.asked.append(("wait", self.device.index, other.device.index))

    def synchronize(self) -> None:
        self.runtime.note("synchronize")


class Where(SimpleNamespace):
    def __str__(self) -> str:
        return f"cuda:{self.index}"


def install(runtime: Runtime) -> None:
    """Put the runtime where our files find torch."""
    opened: list[tuple[object, ...]] = []

    def zeros(*shape: int, dtype: torch.dtype, device: Where) -> torch.Tensor:
        runtime.note("allocate", device.index)
        return torch.zeros(*shape, dtype=dtype)

    def map_shared(*handle: object) -> torch.UntypedStorage:
        runtime.note("open", handle[0])
        opened.append(handle)
        return torch.zeros(64, dtype=torch.uint8).untyped_storage()

    def share(storage: torch.UntypedStorage) -> tuple[object, ...]:
        runtime.note("share")
        return 0, b"handle", storage.nbytes(), 0, b"counter", 0, b"event", True

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[assignment]
    cuda_device.torch = SimpleNamespace(  # type: ignore[attr-defined]
        device=lambda spelled: Where(type="cuda", index=int(str(spelled).removeprefix("cuda:"))),
        cuda=runtime,
        zeros=zeros,
        uint8=torch.uint8,
        UntypedStorage=SimpleNamespace(_new_shared_cuda=map_shared),
    )
    triton_kernels.torch = SimpleNamespace(  # type: ignore[attr-defined]
        device=lambda spelled: torch.device("cpu"), cuda=runtime, from_numpy=torch.from_numpy
    )


def refused(act: Callable[[], object], words: str) -> None:
    """Calling it raises a TransportError with these words."""
    said = ""
    try:
        act()
    except TransportError as error:
        said = str(error)
    assert words in said, f"{words!r} not in {said!r}"


def main() -> None:
    runtime = Runtime()
    install(runtime)
    devices = [CudaDevice("cuda:0"), CudaDevice("cuda:1")]
    assert [device.name for device in devices] == ["cuda:0", "cuda:1"]

    # Whatever was used last, each device allocates, shares, maps and pins as itself.
    memory = [device.allocate(64) for device in (devices[0], devices[1], devices[0])]
    texts = [devices[n % 2].share(memory[n][8:]) for n in range(3)]
    for text, device in zip(texts, devices, strict=False):
        other = text.replace(f"{os.getpid()}/", "1/", 1)
        device.let_go(device.open(other))
    host = np.zeros(32, dtype=np.uint8)
    devices[1].pin(host)
    refused(lambda: devices[0].pin(host), "32 bytes of memory cannot be pinned for cuda:0 (CUDA error 712)")
    devices[1].unpin(host)
    asked = [each for each in runtime.asked if each[1] != "synchronize"]
    assert asked == [
        (0, "allocate", 0),
        (1, "allocate", 1),
        (0, "allocate", 0),
        (0, "share"),
        (1, "share"),
        (0, "share"),
        (0, "open", 0),
        (1, "open", 1),
        (1, "pin", 32, 3),
        (0, "pin", 32, 3),
        (1, "unpin", 32),
    ], asked
    assert runtime.current == -1

    # Memory of this process is where it is; of another device only if that can be reached.
    assert devices[0].open(texts[0]) == memory[0].ctypes.data + 8
    refused(lambda: devices[1].open(texts[0]), "cuda:1 cannot reach memory of cuda:0; use shared_memory")
    for nonsense in ("", "1/2/3", f"{os.getpid()}/0x1/0/AAAA", "x/y/z/w"):
        refused(lambda nonsense=nonsense: devices[0].open(nonsense), "is no memory of a device")
    head, base, _, rest = texts[0].split("/", 3)
    refused(lambda: devices[0].open(f"{head}/{base}/64/{rest}"), "byte 64 is outside of the 64 bytes")
    assert devices[0].owns(memory[2][3:])
    assert not any(devices[0].owns(each) for each in (memory[1], host))
    refused(lambda: devices[0].share(host), "were not allocated on cuda:0")

    # Our streams wait for the caller's; kernels and copies are those that the interpreter runs.
    runtime.asked.clear()
    devices[1].follow()
    assert runtime.asked == [("wait", 1, 1)] * 2
    memory[0][:] = np.arange(64)
    source, target = memory[0].ctypes.data, memory[2].ctypes.data
    rows = np.array([[source, target + 32, 7], [source + 9, host.ctypes.data, 32]])
    copied = devices[0].copy(rows)
    runtime.happened = False
    assert not copied.done()
    runtime.happened = True
    assert copied.done()
    copied.wait()
    assert memory[2][32:39].tolist() == list(range(7))
    assert host.tolist() == list(range(9, 41))
    row = np.array([[source, 1, 0, target, 1, 0, 16, 1, 0]])
    devices[0].kernels.prepare(row, packing=True).run()
    assert memory[2][:16].tolist() == list(range(16))

    devices[0].free(memory[0])
    assert not devices[0].owns(memory[0])
    print("ok")


if __name__ == "__main__":
    main()
