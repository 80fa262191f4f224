"""A CUDA device through torch: a stream for kernels, one for copies, memory that other processes map by CUDA IPC.

Nothing here synchronizes a device or a stream of the caller's: our streams wait for the caller's (`follow`), and events
are asked. Every call that registers, allocates or maps makes its own device the current one first, since the runtime
uses whichever was used last.

Kernels reach the host's memory where it is pinned, and other devices' where the machine lets them; copies are the same
kernel (`transfer_exec.kernels.triton`), since a write has many ranges and a launch takes them all.
"""

from __future__ import annotations

import base64
import ctypes
import os

import msgspec
import numpy as np
import torch

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import TransportError
from transfer_exec.kernels.base import RowColumn
from transfer_exec.kernels.triton import TritonKernels
from transfer_exec.transport.base import Memory

_PORTABLE_AND_MAPPED = 3
"""Of ``cudaHostRegister``: for every device of the process, and for their kernels at the same address."""


class _Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What torch gives of memory that is to be mapped elsewhere; its own order."""

    device: int
    handle: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


class CudaEvent:
    """The end of what a stream was given."""

    def __init__(self, stream: torch.cuda.Stream, keeps: object) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._keeps: object = keeps

    def done(self) -> bool:
        """See `Event.done`."""
        try:
            if not self._event.query():  # type: ignore[no-untyped-call]
                return False
        except RuntimeError as error:
            raise TransportError(f"a copy on a device failed: {error}") from error
        self._keeps = None
        return True

    def wait(self) -> None:
        """See `Event.wait`."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise TransportError(f"a copy on a device failed: {error}") from error
        self._keeps = None


class CudaDevice:
    """One CUDA device; see `transfer_exec.device.Device`.

    Parameters
    ----------
    device
        ``"cuda:1"``, or torch's own.

    Raises
    ------
    TransportError
        If torch has no such device.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda" or self._device.index is None or not torch.cuda.is_available():
            raise TransportError(f"{device} is no CUDA device of this process; expected one such as 'cuda:0'")
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._tables = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._kernels = TritonKernels(self._device, self._stream)
        self._copying = TritonKernels(self._device, self._copies)
        self._allocated: dict[int, tuple[torch.Tensor, str]] = {}
        self._mapped: dict[int, torch.UntypedStorage] = {}

    @property
    def name(self) -> str:
        """As torch spells it."""
        return str(self._device)

    @property
    def kernels(self) -> TritonKernels:
        """Kernels on this device's own stream."""
        return self._kernels

    def follow(self) -> None:
        """See `Device.follow`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._copies.wait_stream(current)

    def allocate(self, size_bytes: int) -> Memory:
        """See `Device.allocate`."""
        try:
            with torch.cuda.device(self._device):
                tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise TransportError(f"cannot get {size_bytes} bytes of memory on {self.name}: {error}") from error
        self._allocated[tensor.data_ptr()] = tensor, ""
        return _array_at(tensor.data_ptr(), size_bytes)

    def owns(self, memory: Memory) -> bool:
        """See `Device.owns`."""
        return self._base_of(memory) is not None

    def free(self, memory: Memory) -> None:
        """See `Device.free`."""
        base = self._base_of(memory)
        if base is not None:
            del self._allocated[base]

    def pin(self, memory: Memory) -> None:
        """See `Device.pin`."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE_AND_MAPPED)
        if int(code):
            raise TransportError(
                f"{memory.nbytes} bytes of memory cannot be pinned for {self.name} (CUDA error {int(code)}); raise the "
                "limit of locked memory (ulimit -l), or give the adapters a smaller buffer_bytes"
            )

    def unpin(self, memory: Memory) -> None:
        """See `Device.unpin`."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.ctypes.data)

    def copy(self, rows: IdArray) -> CudaEvent:
        """See `Device.copy`."""
        # The table goes there by itself, so that it does not wait for copies that are under way.
        with torch.cuda.stream(self._tables):
            job = self._copying.prepare(byte_rows(rows), packing=True)
        job.launch()
        return CudaEvent(self._copies, job)

    def share(self, memory: Memory) -> str:
        """See `Device.share`."""
        base = self._base_of(memory)
        if base is None:
            raise TransportError(f"{memory.nbytes} bytes at {memory.ctypes.data:#x} were not allocated on {self.name}")
        tensor, text = self._allocated[base]
        if not text:
            with torch.cuda.device(self._device):
                handle = _Handle(*tensor.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
            text = base64.b64encode(msgspec.msgpack.encode(handle)).decode()
            self._allocated[base] = tensor, text
        return f"{os.getpid()}/{base:#x}/{memory.ctypes.data - base}/{text}"

    def open(self, shared: str) -> int:
        """See `Device.open`."""
        try:
            pid, base, start_text, text = shared.split("/", 3)
            handle = msgspec.msgpack.decode(base64.b64decode(text), type=_Handle)
            start, own_address = int(start_text), int(base, 16)
            mine = int(pid) == os.getpid()
        except ValueError as error:
            raise TransportError(f"{shared[:40]!r} is no memory of a device") from error
        if not 0 <= start < handle.size_bytes:
            raise TransportError(f"byte {start} is outside of the {handle.size_bytes} bytes that are shared")
        if mine:  # CUDA maps memory of other processes only; this is where it is
            self._meet(handle.device)
            return own_address + start
        own = msgspec.structs.replace(handle, device=self._device.index)
        try:
            with torch.cuda.device(self._device):
                storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(own))
        except RuntimeError as error:
            raise TransportError(f"memory that is shared cannot be mapped on {self.name}: {error}") from error
        address = storage.data_ptr() + start
        self._mapped[address] = storage
        return address

    def let_go(self, address: int) -> None:
        """See `Device.let_go`."""
        self._mapped.pop(address, None)

    def _meet(self, other: int) -> None:
        """Let this device's kernels reach another one's memory in this process."""
        if other == self._device.index:
            return
        if not torch.cuda.can_device_access_peer(self._device, other):
            raise TransportError(f"{self.name} cannot reach memory of cuda:{other}; use shared_memory")
        # torch lets two devices meet when it copies between them, and not before.
        torch.zeros(1, device=self._device).copy_(torch.zeros(1, device=f"cuda:{other}"))

    def _base_of(self, memory: Memory) -> int | None:
        for base, (tensor, _) in list(self._allocated.items()):  # a lease may end in its own thread
            if base <= memory.ctypes.data <= base + tensor.nbytes - memory.nbytes:
                return base
        return None


def byte_rows(rows: IdArray) -> IdArray:
    """Rows of ``(source, target, bytes)`` as `RowColumn` has them."""
    out = np.zeros((len(rows), len(RowColumn)), dtype=np.int64)
    out[:, [RowColumn.SOURCE, RowColumn.TARGET, RowColumn.LENGTH]] = rows
    out[:, [RowColumn.SOURCE_STRIDE, RowColumn.TARGET_STRIDE, RowColumn.COUNT]] = 1
    return out


def _array_at(address: int, size_bytes: int) -> Memory:
    """An array over memory of a device; whoever reads it on the host crashes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
