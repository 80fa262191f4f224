"""What a probe load is fed: every checkpoint tensor is a slice of one periodic buffer.

A pass gives element ``id`` the value ``table[id % period]``, and a tensor's ids are consecutive, so any stretch of
the periodic buffer that begins at the right phase is a tensor. Stretches begin at multiples of 64 bytes and at
places of their own, so that to the loader they look like tensors that own their memory.

>>> from layout_algebra.space import TensorSpec
>>> from concurrent.futures import ThreadPoolExecutor
>>> from adapters.torch_bits import bits_view
>>> space = CheckpointSpace([TensorSpec("a", (3,), "F32"), TensorSpec("b", (2,), "F32")])
>>> feeder = Feeder(space, [5], ThreadPoolExecutor(1))
>>> feeder.prepare(Pattern({"F32": np.arange(5, dtype=np.uint32) << 23}))
>>> [(name, (bits_view(tensor) >> 23).tolist()) for name, tensor in feeder.feed()]
[('a', [1, 2, 3]), ('b', [4, 0])]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch

from adapters._probe_kernels import fill_periodic, first_difference
from adapters.torch_bits import Bits, storage_type, tensor_of_bits
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.runs import merge_intervals
from layout_algebra.space import CheckpointSpace, TensorSpec

_ALIGN_BYTES = 64
_PIECE_BYTES = 1 << 23
_SPREAD_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Values by element id.

    Attributes
    ----------
    tables
        For every checkpoint dtype the bits of one period, ``table[id % period]``; all of one length.
    """

    tables: Mapping[str, Bits]

    @property
    def period(self) -> int:
        """Length of the tables."""
        return len(next(iter(self.tables.values()))) if self.tables else 1


class Feed:
    """The checkpoint's tensors in order, as ``(name, tensor)``; may be iterated again, and ``next`` works too."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self._begun: Iterator[tuple[str, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        begun, self._begun = self._begun, None
        return self._feeder.tensors() if begun is None else begun

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._begun is None:
            self._begun = self._feeder.tensors()
        return next(self._begun)


class Feeder:
    """The buffer that all passes share.

    Parameters
    ----------
    space
        The checkpoint.
    periods
        The period of every pattern that will be fed; they decide how large the buffer is: about the largest tensor
        of every dtype.
    executor
        Runs the fills and checks.
    """

    def __init__(self, space: CheckpointSpace, periods: Sequence[int], executor: Executor) -> None:
        self._space = space
        self._executor = executor
        self._private = False
        self._pattern = Pattern({})
        self._places = {period: _place(space, period) for period in {Pattern({}).period, *periods}}
        self._buffers: dict[str, Bits] = {}
        for dtype in {spec.dtype for spec in space.specs if spec.elements}:
            chosen = np.array([spec.dtype == dtype and spec.elements > 0 for spec in space.specs])
            sizes = np.diff(space.starts)[chosen]
            length = max(int((self._places[period][chosen] + sizes).max()) for period in periods)
            self._buffers[dtype] = _aligned(length, dtype_of(dtype).item_bytes)

    @property
    def private(self) -> bool:
        """Whether every tensor is a copy of its own."""
        return self._private

    def make_private(self) -> None:
        """From now on hand out copies: for loaders that write into what they get, or keep it."""
        self._private = True

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def prepare(self, pattern: Pattern) -> None:
        """Fill the buffer for one pass."""
        self._pattern = pattern
        if not self._private:
            jobs = [
                self._executor.submit(fill_periodic, part, pattern.tables[dtype], start)
                for dtype, start, part in self._parts()
            ]
            for job in jobs:
                job.result()

    def feed(self) -> Feed:
        """What ``load_weights`` gets."""
        return Feed(self)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every checkpoint tensor of the prepared pass, in the order of the space."""
        offsets = self._places[self._pattern.period]
        starts = self._space.starts
        for position, spec in enumerate(self._space.specs):
            yield spec.name, self._tensor(spec, int(offsets[position]), int(starts[position]))

    def damaged(self) -> str | None:
        """Name of a checkpoint tensor that somebody wrote into since ``prepare``, or None."""
        if self._private:
            return None
        parts = self._parts()
        jobs = [
            self._executor.submit(first_difference, part, self._pattern.tables[dtype], start)
            for dtype, start, part in parts
        ]
        for (dtype, start, _), job in zip(parts, jobs, strict=True):
            index = job.result()
            if index >= 0:
                return self._owner(dtype, start + index)
        return None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        place = tensor.data_ptr()
        return any(b.ctypes.data <= place < b.ctypes.data + b.nbytes for b in self._buffers.values())

    def _tensor(self, spec: TensorSpec, offset: int, first_id: int) -> torch.Tensor:
        if not spec.elements:
            bits = np.empty(0, dtype=storage_type(spec.element_type.item_bytes))
        elif self._private:
            bits = np.empty(spec.elements, dtype=self._buffers[spec.dtype].dtype)
            fill_periodic(bits, self._pattern.tables[spec.dtype], first_id)
        else:
            bits = self._buffers[spec.dtype][offset : offset + spec.elements]
        return tensor_of_bits(bits, spec.dtype, spec.shape)

    def _parts(self) -> list[tuple[str, int, Bits]]:
        """The used stretches of the buffers, cut into pieces for the executor: dtype, first index, memory."""
        offsets = self._places[self._pattern.period]
        sizes = np.diff(self._space.starts)
        out = []
        for dtype, buffer in self._buffers.items():
            chosen = np.array([spec.dtype == dtype for spec in self._space.specs])
            spans = np.stack([offsets, offsets + sizes], axis=1)[chosen]
            step = _PIECE_BYTES // buffer.itemsize
            for start, stop in merge_intervals(spans).tolist():
                out += [(dtype, first, buffer[first : min(first + step, stop)]) for first in range(start, stop, step)]
        return out

    def _owner(self, dtype: str, index: int) -> str:
        offsets = self._places[self._pattern.period]
        for spec, offset in zip(self._space.specs, offsets.tolist(), strict=True):
            if spec.dtype == dtype and offset <= index < offset + spec.elements:
                return spec.name
        return dtype


def _place(space: CheckpointSpace, period: int) -> IdArray:
    """Where every tensor begins in its dtype's buffer: congruent to its first id, 64-byte aligned, all different."""
    starts = space.starts[:-1]
    out = np.zeros(len(space), dtype=np.int64)
    for dtype in {spec.dtype for spec in space.specs if spec.elements}:
        chosen = np.flatnonzero([spec.dtype == dtype and spec.elements > 0 for spec in space.specs])
        step = _ALIGN_BYTES // dtype_of(dtype).item_bytes
        offsets = step * (starts[chosen] % period * pow(step, -1, period) % period)
        order = np.argsort(offsets, kind="stable")
        ranked = offsets[order]
        heads = np.concatenate([[True], ranked[1:] != ranked[:-1]])
        nth = np.arange(len(order)) - np.maximum.accumulate(np.where(heads, np.arange(len(order)), 0))
        most = max(1, _SPREAD_BYTES // (_ALIGN_BYTES * period))
        offsets[order] += nth % most * (step * period)
        out[chosen] = offsets
    return out


def _aligned(length: int, item_bytes: int) -> Bits:
    """Uninitialized memory that begins at a multiple of 64 bytes."""
    raw = np.empty(length * item_bytes + _ALIGN_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGN_BYTES
    return raw[skip : skip + length * item_bytes].view(storage_type(item_bytes))
