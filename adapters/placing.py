"""Where a worker's tensors are, and what moves them: the host's kernels, and those of the devices they are on.

Buffers are either memory of the host that all of them reach (``shared_memory``, ``mooncake``: pinned where there is a
device), or on the one device that has everything (``device_memory``).

>>> from transfer_exec.kernels.cpu import CpuKernels
>>> place("engine/a/0", {"w": torch.zeros(3)}, (), "shared_memory", host=CpuKernels()).kernels.name
'cpu'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adapters.failures import UsageError
from layout_algebra.dtypes import IdArray
from transfer_exec.device import Device
from transfer_exec.kernels.base import Kernels
from transfer_exec.kernels.placed import Placed, PlacedKernels

__all__ = ["DEVICE_MEMORY", "Placement", "place"]

DEVICE_MEMORY = "device_memory"
"""The transport whose buffers are on a device."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The devices of a worker's tensors, and the kernels for all its rows."""

    devices: tuple[Device, ...]
    kernels: Kernels


def open_cuda(device: torch.device) -> Device:
    """A CUDA device.

    Raises
    ------
    UsageError
        If Triton, which its kernels are written in, is not installed.
    """
    try:
        # Here, since whoever has no device need not have Triton, nor wait for it to be imported.
        from transfer_exec.cuda_device import CudaDevice
    except ImportError as error:
        raise UsageError(f"tensors on {device} are moved by Triton's kernels: {error}; install triton") from error
    return CudaDevice(device)


def place(
    worker: str,
    tensors: Mapping[str, torch.Tensor],
    staged: Sequence[str],
    transport: str,
    *,
    host: Kernels,
    open_device: Callable[[torch.device], Device] = open_cuda,
) -> Placement:
    """Find the devices of some tensors.

    Parameters
    ----------
    worker
        For messages.
    tensors
        That take part, by name; those on devices of other kinds than CUDA are left to be refused by whoever binds them.
    staged
        Checkpoint tensors that are assembled in memory of the host.
    transport
        That is used.
    host
        Kernels for what is in memory of the host.
    open_device
        Makes a device.

    Raises
    ------
    UsageError
        If ``device_memory`` is used and not everything is on one device.
    """
    there: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if tensor.device.type == "cuda":
            there.setdefault(tensor.device, []).append(tensor)
    on_device = transport == DEVICE_MEMORY
    if on_device:
        _check_on_one_device(worker, tensors, staged)
    if not there:
        return Placement((), host)
    devices = {where: open_device(where) for where in sorted(there, key=str)}
    placed = [Placed(spans_of(there[where]), device.kernels) for where, device in devices.items()]
    return Placement(tuple(devices.values()), PlacedKernels(None if on_device else host, placed))


def spans_of(tensors: Iterable[torch.Tensor]) -> IdArray:
    """Addresses of some tensors' storage, half-open and disjoint: int64, shape ``(n, 2)``."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return np.array([[at, at + size] for at, size in sorted(storages.items()) if size], dtype=np.int64).reshape(-1, 2)


def _check_on_one_device(worker: str, tensors: Mapping[str, torch.Tensor], staged: Sequence[str]) -> None:
    use = "pass transport='shared_memory', whose buffers all of them reach"
    if staged:
        raise UsageError(f"{worker}: {staged[0]} is staged in memory of the host, and device_memory has none; {use}")
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise UsageError(f"{worker}: {name} is on {tensor.device}, device_memory moves one CUDA device's; {use}")
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise UsageError(f"{worker}: {first[0]} is on {first[1]}, {name} on {tensor.device}; {use}")
