"""Dumb numpy: what the algebra's fast code must agree with, element by element. Imports nothing fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def ids_of_rows(rows: Ids, size: int) -> Ids:
    """The ids that a copy table's rows write into a parameter of some size; no element may be written twice."""
    out = np.zeros(size, dtype=np.int64)
    for row in rows.tolist():
        axes = [row[k : k + 3] for k in range(2, len(row), 3)]
        for index in itertools.product(*(range(extent) for extent, _, _ in axes)):
            target = row[0] + sum(i * axis[1] for i, axis in zip(index, axes, strict=True))
            assert out[target] == 0, f"element {target} is written twice"
            out[target] = row[1] + sum(i * axis[2] for i, axis in zip(index, axes, strict=True))
    return out


def second_differences(matrix: Ids) -> Ids:
    """Along the rows and then along the columns, with zeros before the first of either."""
    rows, columns = matrix.shape
    padded = np.pad(matrix, ((2, 0), (2, 0)))
    out = np.zeros(matrix.shape, dtype=np.int64)
    for (down, a), (right, b) in itertools.product(((0, 1), (1, -2), (2, 1)), repeat=2):
        out += a * b * padded[2 - down : 2 - down + rows, 2 - right : 2 - right + columns]
    return out


def runs_of_equal(values: Sequence[int], wanted: Sequence[bool]) -> list[list[int]]:
    """Maximal runs (start, stop, value) of equal values among the wanted ones."""
    out: list[list[int]] = []
    for index, (value, is_wanted) in enumerate(zip(values, wanted, strict=True)):
        if not is_wanted:
            continue
        if out and out[-1][1] == index and out[-1][2] == value:
            out[-1][1] = index + 1
        else:
            out.append([index, index + 1, value])
    return out


def code_values() -> list[float]:
    """All numbers with seven mantissa bits and exponents -7..7, ascending."""
    return [2.0**exponent * (1 + mantissa / 128) for exponent in range(-7, 8) for mantissa in range(128)]


def bits_of_value(value: float, dtype: str) -> int:
    """The bits of a number that a dtype holds exactly."""
    if dtype == "BF16":
        return int(np.float32(value).view(np.uint32)) >> 16
    holder = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype](value)
    assert float(holder) == value
    return int(holder.view({"F16": np.uint16, "F32": np.uint32, "F64": np.uint64}[dtype]))
