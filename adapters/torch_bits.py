"""Torch tensors as raw bits: dtype names in safetensors spelling, and numpy arrays by address.

>>> weight = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
>>> dtype_name(weight.dtype), [hex(bits) for bits in bits_view(weight)[0].tolist()]
('BF16', ['0x3f80', '0xc000'])

``Tensor.numpy()`` would forbid the tensor's storage to be resized ever after, which sharded trainers do between
steps; an array made from the address leaves the worker's tensor as it was.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from layout_algebra.errors import ProbeError, UnsupportedDtypeError

Bits: TypeAlias = npt.NDArray[np.unsignedinteger[npt.NBitBase]]
"""Raw element bits: unsigned integers as wide as the element."""

_NAMES = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.uint16: "U16",
        torch.int16: "I16",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.uint32: "U32",
        torch.int32: "I32",
        torch.float32: "F32",
        torch.uint64: "U64",
        torch.int64: "I64",
        torch.float64: "F64",
        torch.complex64: "C64",
    }
)
_DTYPES = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})
_SIGNED = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def dtype_name(dtype: torch.dtype, *, of: str = "a tensor") -> str:
    """Safetensors spelling of a torch dtype.

    Raises
    ------
    UnsupportedDtypeError
        If safetensors has no such dtype; the message names the tensor ``of``.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise UnsupportedDtypeError(f"{of}: dtype {dtype} cannot be carried; expected one of {', '.join(_DTYPES)}")
    return found


def torch_dtype(name: str) -> torch.dtype:
    """Torch dtype of a safetensors name.

    Raises
    ------
    UnsupportedDtypeError
        If torch has no such dtype with whole bytes.
    """
    found = _DTYPES.get(name)
    if found is None:
        raise UnsupportedDtypeError(f"dtype {name} has no torch tensor here; expected one of {', '.join(_DTYPES)}")
    return found


def bit_dtype(item_bytes: int) -> torch.dtype:
    """The integer torch dtype in which elements of a width are copied bit for bit."""
    return _SIGNED[item_bytes]


def storage_type(item_bytes: int) -> np.dtype[np.unsignedinteger[npt.NBitBase]]:
    """The unsigned numpy type of a width."""
    return np.dtype(f"<u{item_bytes}")


def as_bits(array: npt.NDArray[np.generic]) -> Bits:
    """An array of numbers as unsigned integers of that width, without a copy."""
    return array.view(storage_type(array.itemsize))


class _Address:
    """What numpy needs to see memory as an array; it holds the tensor so that the memory stays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
            "typestr": f"<u{item}",
            "version": 3,
        }


def bits_view(tensor: torch.Tensor) -> Bits:
    """The bits of a tensor in host memory, without a copy: same shape and strides, writable.

    Raises
    ------
    ProbeError
        If the tensor is not in host memory or has no plain strided storage.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ProbeError(f"a {tensor.layout} tensor on {tensor.device} has no plain host memory to look at")
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), dtype=storage_type(tensor.element_size()))
    return np.asarray(_Address(tensor))


def tensor_of_bits(bits: Bits, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over a contiguous array of bits, without a copy; its storage is exactly that array."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    item = bits.dtype.itemsize
    whole = torch.from_numpy(bits.view(np.dtype(f"<i{item}") if item > 1 else np.dtype("u1")))
    return whole.view(torch_dtype(dtype)).view(shape)
