"""Ids -> affine rectangles (interim)."""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.slice_copy import CopyTable


def rectangles_of_ids(ids: IdArray) -> CopyTable:
    flat = ids.reshape(-1)
    n = len(flat)
    rows = []
    i = 0
    while i < n:
        if flat[i] <= 0:
            i += 1
            continue
        j = i + 1
        if j < n and flat[j] > 0:
            step = flat[j] - flat[i]
            while j < n and flat[j] > 0 and flat[j] - flat[j - 1] == step:
                j += 1
            if j - i == 2 and j < n and flat[j] > 0 and step != 1:
                j = i + 1
        step = int(flat[i + 1] - flat[i]) if j - i > 1 else 0
        rows.append([i, flat[i], j - i, 1, step])
        i = j
    return CopyTable(np.array(rows, dtype=np.int64).reshape(-1, 5))
