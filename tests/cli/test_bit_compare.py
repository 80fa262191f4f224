"""Bits, not values: every kind of difference is named, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from adapters.cli.bit_compare import compare_bits, count_changed

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_counted_and_located(dtype: torch.dtype) -> None:
    wanted = torch.ones(3, 4).to(dtype)
    live = wanted.clone()
    live[2, 1] = 0
    live[2, 3] = 0
    (line,) = compare_bits({"w": live}, {"w": wanted})
    assert line.startswith("w: 2 of 12 elements differ, first at (2, 1): expected bits 0x")
    assert line.endswith("got 0x0")
    assert count_changed({"w": live}, {"w": wanted}) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_of_any_layout_are_equal(dtype: torch.dtype) -> None:
    wanted = torch.arange(12).reshape(3, 4).to(dtype)
    strided = torch.empty(4, 3, dtype=dtype).t()
    strided.copy_(wanted)
    assert compare_bits({"w": strided, "none": wanted[:0]}, {"w": wanted, "none": wanted[:0]}) == ()
    assert count_changed({"w": strided}, {"w": wanted}) == 0


def test_zero_and_minus_zero_differ_and_a_nan_equals_itself() -> None:
    nan = torch.tensor([float("nan")])
    assert compare_bits({"w": nan}, {"w": nan.clone()}) == ()
    assert compare_bits({"w": torch.tensor(-0.0)}, {"w": torch.tensor(0.0)}) == (
        "w: 1 of 1 elements differ, first at (): expected bits 0x0, got 0x80000000",
    )


def test_missing_unexpected_and_reshaped_tensors_are_named() -> None:
    live = {"extra": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(1)}
    wanted = {"missing": torch.ones(1), "shape": torch.ones(1, 2), "dtype": torch.ones(1).half()}
    assert compare_bits(live, wanted) == (
        "extra: expected no such tensor",
        "missing: missing",
        "shape: expected torch.float32 (1, 2), got torch.float32 (2,)",
        "dtype: expected torch.float16 (1,), got torch.float32 (1,)",
    )
