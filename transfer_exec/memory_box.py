"""Where a strided view's elements are in memory, and whether two views share a byte.

>>> left, right = (MemoryBox.of(address, (4, 3), (12, 2), 2) for address in (1000, 1006))
>>> left.stop > right.start, left.apart(right)
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class MemoryBox(NamedTuple):
    """Byte addresses ``start + sum(index * step)``, each of ``item`` bytes.

    Attributes
    ----------
    start, stop
        The first byte, and the one after the last.
    item
        Bytes of an element.
    axes
        Extent and step in bytes, above zero, of every axis along which there are several; widest step first.
    """

    start: int
    stop: int
    item: int
    axes: tuple[tuple[int, int], ...]

    @staticmethod
    def of(address: int, shape: Sequence[int], strides: Sequence[int], item: int) -> MemoryBox:
        """The box of a view that is not empty; strides in bytes."""
        along = [(extent, step) for extent, step in zip(shape, strides, strict=True) if extent > 1 and step]
        start = address + sum((extent - 1) * min(step, 0) for extent, step in along)
        axes = sorted(((extent, abs(step)) for extent, step in along), key=lambda axis: -axis[1])
        return MemoryBox(start, start + sum((n - 1) * step for n, step in axes) + item, item, tuple(axes))

    def bytes(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """For every byte of ``start .. stop - 1`` whether it belongs to an element."""
        whole = np.zeros(self.stop - self.start, dtype=np.bool_)
        shape, steps = [n for n, _ in self.axes], [step for _, step in self.axes]
        np.lib.stride_tricks.as_strided(whole, (*shape, self.item), (*steps, 1))[...] = True
        return whole[start - self.start : stop - self.start]

    def apart(self, other: MemoryBox) -> bool:
        """Whether two boxes share no byte, as far as this is told by the places of both along common axes."""
        if self.stop <= other.start or other.stop <= self.start:
            return True
        steps = sorted({step for _, step in (*self.axes, *other.axes)}, reverse=True)
        mine, theirs = self.start - min(self.start, other.start), other.start - min(self.start, other.start)
        extents = {step: n for n, step in self.axes}, {step: n for n, step in other.axes}
        for number, step in enumerate(steps):
            at, there = mine // step, theirs // step
            mine, theirs = mine % step, theirs % step
            inner = max(_reach(box, steps[number + 1 :], rest) for box, rest in ((self, mine), (other, theirs)))
            if inner > step:
                return False  # what lies inside crosses into the next place of this axis
            if at + extents[0].get(step, 1) <= there or there + extents[1].get(step, 1) <= at:
                return True
        return mine + self.item <= theirs or theirs + other.item <= mine


def _reach(box: MemoryBox, steps: Sequence[int], start: int) -> int:
    """Where a box ends along its axes of these steps, from a byte on."""
    return start + sum((n - 1) * step for n, step in box.axes if step in steps) + box.item
