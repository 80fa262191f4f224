"""The loops that feed a probe, against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest

from adapters._probe_kernels import fill_periodic, first_difference
from adapters.torch_bits import storage_type

LONG = 1 << 22
"""Bytes from which on memory is filled past the cache."""


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("period", [1, 37, 255, 1919, 131_071])
@pytest.mark.parametrize("size_bytes", [0, 8, 64, 1000, LONG - 8, LONG + 1016])
def test_periodic_memory(item_bytes: int, period: int, size_bytes: int) -> None:
    """Every element is the table's, from any phase and at any address, and nothing is written beside it."""
    if period * item_bytes < 100 and size_bytes >= LONG:
        size_bytes //= 64
    kind = storage_type(item_bytes)
    table = np.random.default_rng(period).integers(0, 255, period).astype(kind)
    size = size_bytes // item_bytes
    for phase, before in ((0, 0), (5 * period + period // 2, 3)):
        around = np.full(before + size + 8, 255, dtype=kind)
        filled = around[before : before + size]
        fill_periodic(filled, table, phase)
        assert np.array_equal(filled, table[(phase + np.arange(size)) % period])
        assert np.all(around[:before] == 255)
        assert np.all(around[before + size :] == 255)
        assert first_difference(filled, table, phase) == -1
        if size:
            filled[size // 2] ^= 1
            assert first_difference(filled, table, phase) == size // 2
