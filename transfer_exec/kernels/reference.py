"""The reference backend: what the fast kernels must agree with, in plain torch, one row at a time.

A row becomes two strided views of live memory; ``copy_`` and ``.to`` do the rest. Slow and obvious.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from layout_algebra.dtypes import IdArray
from transfer_exec.conversions import COPY_WIDTHS, PAIRS

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class ReferenceKernels:
    """Rows copied by torch."""

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "reference"

    def prepare(self, rows: IdArray, *, packing: bool) -> ReferenceJob:
        """See `Kernels.prepare`; both ways are one here."""
        return ReferenceJob(rows)


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceJob:
    """Rows as they were given."""

    rows: IdArray

    def run(self) -> None:
        """Copy every row."""
        for row in self.rows.tolist():
            source, stride, step, target, target_stride, target_step, length, count, code = row
            if code < len(COPY_WIDTHS):
                from_dtype = to_dtype = _BITS[COPY_WIDTHS[code]]
            else:
                from_dtype, to_dtype = (_FLOATS[name] for name in PAIRS[code - len(COPY_WIDTHS)])
            values = _gather(source, (count, length), (step, stride), from_dtype)
            _scatter(values.to(to_dtype), target, (target_step, target_stride))


def _window(address: int, shape: tuple[int, int], strides: tuple[int, int], width: int) -> np.ndarray:
    """Elements as arrays of bytes: shape ``(count, length, width)``."""
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
    span = (ctypes.c_uint8 * (high - low + width)).from_address(address + low)
    flat = np.ctypeslib.as_array(span)
    return np.lib.stride_tricks.as_strided(flat[-low:], (*shape, width), (*strides, 1))


def _gather(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    taken = _window(address, shape, strides, dtype.itemsize).copy(order="C")
    return torch.from_numpy(taken).view(dtype).reshape(shape)


def _scatter(values: torch.Tensor, address: int, strides: tuple[int, int]) -> None:
    count, length = values.shape
    window = _window(address, (count, length), strides, values.dtype.itemsize)
    window[...] = values.contiguous().view(torch.uint8).reshape(count, length, -1).numpy()
