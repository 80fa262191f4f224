"""Digests of tensors on a GPU, where they are: the sums of `layout_algebra.fingerprint` in one launch.

Strips are cut where a block of weights ends, once for all updates; a contiguous one is read in words of 32 bits between
the first and the last whole word. What is left of it, and strips with a stride, are read element by element.

    digest = DeviceDigest(plan, {"w": tensor_on_a_gpu})
    digest.sums()                                        # after every update
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from layout_algebra._digest_kernels import block_factors, element_weights
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.fingerprint import FingerprintPart, FingerprintPlan
from transfer_exec.errors import ProgramError
from transfer_exec.kernels._triton_digest import digest_tiles

__all__ = ["LANES", "WARPS", "DeviceDigest", "device_parts", "tiles_of_strips"]

LANES = 1024
WARPS = 4

_BLOCK = 4096
_WORDS = 0
_ELEMENTS = {1: 1, 2: 2, 4: 3, 8: 4}
_MOST_PROGRAMS = 1 << 30


def device_parts(
    plan: FingerprintPlan, tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[FingerprintPart, ...], tuple[FingerprintPart, ...]]:
    """Parts that can be digested where they are, contiguous and in the checkpoint's dtype, and the others."""
    here: list[FingerprintPart] = []
    others: list[FingerprintPart] = []
    for part in plan.parts:
        tensor = tensors.get(part.parameter)
        same = plan.source_map.dtype(part.parameter) == part.wire
        (here if tensor is not None and tensor.is_contiguous() and same else others).append(part)
    return tuple(here), tuple(others)


class DeviceDigest:
    """Digests of tensors on one device.

    Parameters
    ----------
    plan
        Of parameters in the checkpoint's own dtypes.
    tensors
        Every parameter of the plan: contiguous, on one device, and where they are for as long as this is used.
        ``"cpu"`` works under Triton's interpreter only.

    Raises
    ------
    ProgramError
        If a tensor is missing, is scattered, or is on another device than the others.
    """

    def __init__(self, plan: FingerprintPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        tables = []
        for part in plan.parts:
            tensor = tensors.get(part.parameter)
            if tensor is None or not tensor.is_contiguous() or plan.source_map.dtype(part.parameter) != part.wire:
                raise ProgramError(
                    f"{part.parameter}: expected a contiguous tensor in {part.wire} to digest on a device"
                )
            tables.append(tiles_of_strips(part.rows, tensor.data_ptr(), dtype_of(part.wire).item_bytes))
        devices = {tensors[part.parameter].device for part in plan.parts}
        if len(devices) > 1:
            raise ProgramError(f"tensors on {', '.join(sorted(map(str, devices)))}; expected one device")
        self._device = devices.pop() if devices else torch.device("cpu")
        self._sets = plan.sets
        self._keeps = [tensors[part.parameter] for part in plan.parts]
        tiles = np.concatenate([np.empty((0, 7), dtype=np.int64), *tables])
        self._tiles = torch.from_numpy(tiles).to(self._device)
        weights = np.concatenate([element_weights(4), *(element_weights(each) for each in _ELEMENTS)])
        self._weights = torch.from_numpy(weights.view(np.int64)).to(self._device)

    def sums(self) -> npt.NDArray[np.uint64]:
        """Digest every set of the plan, after what the current stream was given: uint64, shape ``(sets,)``."""
        out = torch.zeros(self._sets, dtype=torch.int64, device=self._device)
        for first in range(0, len(self._tiles), _MOST_PROGRAMS):
            grid = (min(len(self._tiles) - first, _MOST_PROGRAMS),)
            digest_tiles[grid](
                self._tiles, first, self._weights, out, LANES=LANES, num_warps=WARPS, enable_fp_fusion=False
            )
        return out.cpu().numpy().view(np.uint64)


def tiles_of_strips(rows: IdArray, address: int, item_bytes: int) -> IdArray:
    """What programs add up: strips cut at the ends of blocks of weights, and contiguous ones at those of words.

    Parameters
    ----------
    rows
        As in `FingerprintPart`.
    address
        Of the parameter's first element.
    item_bytes
        Of an element.

    Returns
    -------
    ndarray
        int64, shape ``(n, 7)``: address, step in bytes, count, place of the first weight, factor of the block (signed),
        kind, label.
    """
    pieces = _cut_at_blocks(rows)
    first, length, index, stride, label = pieces.T
    factors = block_factors(first // _BLOCK).view(np.int64)
    each = max(4 // item_bytes, 1)
    begin = address + index * item_bytes
    head = np.minimum(-first % each, length)
    words = (length - head) // each
    # Words at addresses that are no multiples of one cannot be loaded.
    words[(stride != 1) | (item_bytes > 4) | ((begin + head * item_bytes) % 4 != 0)] = 0
    head[words == 0] = length[words == 0]
    tail = length - head - words * each
    place = first % _BLOCK

    def tiles(skip: IdArray, count: IdArray, kind: int) -> IdArray:
        step = stride * item_bytes if kind != _WORDS else np.full_like(stride, 4)
        weight = (place + skip) if kind != _WORDS else (place + skip) // each
        columns = [begin + skip * stride * item_bytes, step, count, weight, factors, np.full_like(step, kind), label]
        return np.stack(columns, axis=1)[count > 0]

    kind = _ELEMENTS[item_bytes]
    zero = np.zeros_like(head)
    return np.concatenate([tiles(zero, head, kind), tiles(head, words, _WORDS), tiles(head + words * each, tail, kind)])


def _cut_at_blocks(rows: IdArray) -> IdArray:
    """Strips cut where a block of ids ends."""
    first, length = rows[:, 0], rows[:, 1]
    count = (first + length - 1) // _BLOCK - first // _BLOCK + 1
    owner = np.repeat(np.arange(len(rows)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    start = np.maximum((first[owner] // _BLOCK + nth) * _BLOCK, first[owner])
    stop = np.minimum((first[owner] // _BLOCK + nth + 1) * _BLOCK, first[owner] + length[owner])
    out = rows[owner]
    out[:, 0], out[:, 1] = start, stop - start
    out[:, 2] += (start - first[owner]) * out[:, 3]
    return out
