"""Compare named tensors bit for bit and name each difference; never "close".

>>> compare_bits({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, -2.0])})
('w: 1 of 2 elements differ, first at (1,): expected bits 0xc0000000, got 0x40000000',)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["compare_bits", "count_changed"]

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def compare_bits(live: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """One line for every tensor that is missing, unexpected, of another shape or dtype, or differs in any bit.

    Equal bits are equal here (a NaN equals itself), equal values with other bits (0.0 and -0.0) are not.
    """
    differences = [f"{name}: expected no such tensor" for name in live if name not in expected]
    for name, wanted in expected.items():
        if name not in live:
            differences.append(f"{name}: missing")
            continue
        line = _difference(live[name], wanted)
        if line is not None:
            differences.append(f"{name}: {line}")
    return tuple(differences)


def count_changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> int:
    """How many elements of equally named, shaped and typed tensors have other bits."""
    return sum(int((_bits(tensor) != _bits(before[name])).sum()) for name, tensor in after.items())


def _difference(live: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if live.shape != wanted.shape or live.dtype != wanted.dtype:
        return f"expected {wanted.dtype} {tuple(wanted.shape)}, got {live.dtype} {tuple(live.shape)}"
    got_bits, wanted_bits = _bits(live), _bits(wanted)
    unequal = got_bits != wanted_bits
    count = int(unequal.sum())
    if count == 0:
        return None
    first = tuple(int(index) for index in unequal.nonzero()[0])
    return (
        f"{count} of {live.numel()} elements differ, first at {first}: "
        f"expected bits {int(wanted_bits[first]):#x}, got {int(got_bits[first]):#x}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(_UNSIGNED[tensor.element_size()])
