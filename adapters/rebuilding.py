"""Checkpoint tensors from one worker's parameters: a source map read backwards.

Elements that the worker holds come out bit for bit as they were sent, converted to the checkpoint's dtype; others are
left alone. Of an id that several elements copy one is read. The loops are not those that moved the bytes.

>>> import numpy as np
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("a", (3,), "U8"), TensorSpec("b", (2,), "U8")])
>>> rebuilding = plan_rebuilding(SourceMap.from_ids(space, {"p": np.array([2, 1, 5])}))
>>> a, b = np.zeros(3, np.uint8), np.zeros(2, np.uint8)
>>> for position, out in enumerate((a, b)):
...     rebuilding.fill(position, out, lambda name: np.array([20, 10, 50], np.uint8))
>>> a.tolist(), b.tolist()
([10, 20, 0], [0, 50])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adapters._rebuild_kernels import copy_strips
from adapters.torch_bits import Bits
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.fingerprint import wire_bits
from layout_algebra.source_map import SourceMap

__all__ = ["Rebuilding", "plan_rebuilding"]


@dataclass(frozen=True, slots=True, eq=False)
class Rebuilding:
    """Where a worker has every checkpoint element that it copies; found once.

    Attributes
    ----------
    source_map
        The worker's.
    rows
        int64, shape ``(n, 5)``, by id, each inside one tensor: first id, length, parameter's position, flat index of
        the first id, index step.
    bounds
        Rows of tensor ``i`` are ``bounds[i] : bounds[i + 1]``.
    windows
        For every parameter the positions of the first and last checkpoint tensor that feeds it, shape ``(p, 2)``; one
        that is fed by none has ``(-1, -1)``.
    """

    source_map: SourceMap
    rows: IdArray
    bounds: IdArray
    windows: IdArray

    def fill(self, position: int, out: Bits, bits_of: Callable[[str], Bits]) -> None:
        """Write the elements of one checkpoint tensor that the worker holds.

        Parameters
        ----------
        position
            Of the tensor in the space.
        out
            Its bits, flat.
        bits_of
            Gives a parameter's bits by name, flat.
        """
        spec = self.source_map.space.specs[position]
        rows = self.rows[self.bounds[position] : self.bounds[position + 1]]
        to = rows[:, 0] - self.source_map.space.starts[position]
        for owner in np.unique(rows[:, 2]).tolist():
            mine = rows[:, 2] == owner
            name = self.source_map.parameters[owner]
            held = self.source_map.dtype(name)
            strips = np.column_stack([to[mine], rows[mine, 1], rows[mine, 3:]])
            if held == spec.dtype:
                copy_strips(bits_of(name), out, strips)
                continue
            stops = np.cumsum(strips[:, 1])
            packed = np.empty(int(stops[-1]), dtype=f"u{dtype_of(held).item_bytes}")
            begins = stops - strips[:, 1]
            copy_strips(bits_of(name), packed, np.column_stack([begins, strips[:, 1:]]))
            ones = np.ones_like(begins)
            copy_strips(wire_bits(packed, held, spec.dtype), out, np.column_stack([strips[:, :2], begins, ones]))


def plan_rebuilding(source_map: SourceMap) -> Rebuilding:
    """Find where a worker has every checkpoint element that it copies."""
    starts = source_map.space.starts
    filled = starts[1:] > starts[:-1]
    tensors = np.stack([starts[:-1], starts[1:]], axis=1)[filled]
    rows = source_map.strips.disjoint().within(tensors)[0].rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    every = source_map.strips.within(tensors)[0].rows
    fed_by = np.searchsorted(starts, every[:, 0], side="right") - 1
    first = np.full(len(source_map.parameters), len(filled), dtype=np.int64)
    last = np.full(len(source_map.parameters), -1, dtype=np.int64)
    np.minimum.at(first, every[:, 2], fed_by)
    np.maximum.at(last, every[:, 2], fed_by)
    position_of = {spec.name: position for position, spec in enumerate(source_map.space.specs)}
    for number, name in enumerate(source_map.parameters):
        for tensor in source_map.depends_on(name):
            first[number] = min(first[number], position_of[tensor])
            last[number] = max(last[number], position_of[tensor])
    first[last < 0] = -1
    return Rebuilding(source_map, rows, np.searchsorted(rows[:, 0], starts), np.stack([first, last], axis=1))
