"""The memory under a tensor: whether there is any, enough of it, and whether it may be written.

Writing where the system allows none ends the process, and so does reading past what was freed, so both are asked
before.

>>> w = torch.zeros(4, 4)[1:3]
>>> held_bytes(w), needed_bytes(w)
(64, 48)
>>> read_only([w])
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from transfer_exec.transport.shared_files import addresses, mappings

__all__ = ["extent_bytes", "held_bytes", "needed_bytes", "read_only", "regrow"]


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage; none of one that has no address, such as a fake or a wrapper."""
    try:
        return 0 if isinstance(tensor, FakeTensor) or not tensor.data_ptr() else tensor.untyped_storage().nbytes()
    except RuntimeError:
        return 0


def needed_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a storage that ends with a tensor's last element."""
    return int(tensor.storage_offset()) * tensor.element_size() + extent_bytes(tensor)


def regrow(tensor: torch.Tensor) -> None:
    """Give a storage that was shrunk its size again."""
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed_bytes(tensor):
        tensor.untyped_storage().resize_(needed_bytes(tensor))


def read_only(tensors: Iterable[torch.Tensor]) -> int | None:
    """Which of some tensors is the first that lies in memory of this process that it may not write; None if none does.

    Takes about a microsecond a mapping and a tensor; where the system does not tell (Linux does), none does.
    """
    spans = [addresses(fields) for fields in mappings() if fields[1][1] != "w"]
    starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
    for number, tensor in enumerate(tensors):
        if tensor.device.type == "cpu" and tensor.numel():
            first = tensor.data_ptr()
            if bisect_right(stops, first) < bisect_left(starts, first + extent_bytes(tensor)):
                return number
    return None


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(reach + 1) * tensor.element_size()
