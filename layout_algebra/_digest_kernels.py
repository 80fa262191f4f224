"""The loop under ``fingerprint``: dot products of element bits with a periodic table of weights.

``weight(id) = A(id >> 12) * B[id & 4095]``: within a block of 4,096 ids the sum is one dot product with a slice of B,
which the compiler vectorizes, and the 64-bit mix A is computed once a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra.dtypes import IdArray

_SHIFT = 12
_BLOCK = 1 << _SHIFT


def _block_weights() -> npt.NDArray[np.uint32]:
    state = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


_WEIGHTS = _block_weights()


@kernel
def _digest_strips(
    bits: npt.NDArray[np.unsignedinteger], rows: IdArray, weights: npt.NDArray[np.uint32], out: npt.NDArray[np.uint64]
) -> None:
    for number in range(rows.shape[0]):
        first, length, index, stride, label = rows[number]
        total = np.uint64(0)
        done = 0
        while done < length:
            block = (first + done) >> _SHIFT
            low = (first + done) & (_BLOCK - 1)
            count = min(length - done, _BLOCK - low)
            start = index + done * stride
            dot = np.uint64(0)
            if stride == 1:
                chunk = bits[start : start + count]
                weight = weights[low : low + count]
                for position in range(count):
                    dot += np.uint64(chunk[position]) * np.uint64(weight[position])
            else:
                for position in range(count):
                    dot += np.uint64(bits[start + position * stride]) * np.uint64(weights[low + position])
            mix = np.uint64(block + 1) * np.uint64(0x9E3779B97F4A7C15)
            mix = (mix ^ (mix >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mix = (mix ^ (mix >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            total += ((mix ^ (mix >> np.uint64(31))) | np.uint64(1)) * dot
            done += count
        out[label] += total


def digest_strips(bits: npt.NDArray[np.unsignedinteger], rows: IdArray, out: npt.NDArray[np.uint64]) -> None:
    """Add to ``out[label]`` the weighted sum of every strip's elements.

    Parameters
    ----------
    bits
        A parameter's elements as unsigned integers, one-dimensional, contiguous.
    rows
        int64, shape ``(n, 5)``: first id, length, flat index of the first id, index step, label.
    out
        uint64, one sum per label.
    """
    _digest_strips(bits, rows, _WEIGHTS, out)
