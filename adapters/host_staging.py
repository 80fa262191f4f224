"""Copies of a worker's tensors in host memory, between which and the tensors all bytes of a staged update pass.

An executor is bound to the copies instead of the tensors: the plan, the programs and the data path are the same. What
is left is one copy on each side, as fast as memory is:

::

    staging trainer    tensors --copy--> host copies --executor--> ...              the caller trains on after the copy
    staging rollout    ... --executor--> host copies --copy--> tensors              the caller generates until the copy

Copies live in one arena that is allocated, and faulted in, once; where a tensor is on a GPU it is pinned, and else a
trainer's is shared memory, which rollouts of its host map. Out of an arena only those elements are copied that an
update brings: padding and what the loader computes keep their bits.

>>> import numpy as np
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (3,), "F32")])
>>> live = {"w": torch.tensor([7.0, 7.0, 7.0, 7.0])}
>>> copies = HostCopies("engine/a/0", live, SourceMap.from_ids(space, {"w": np.array([1, 2, 0, 3])}), outwards=True)
>>> copies.tensors["w"][:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
>>> copies.copy(live)
>>> live["w"].tolist()
[1.0, 2.0, 7.0, 4.0]
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from adapters.torch_bits import bit_dtype
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.source_map import SourceMap
from transfer_exec.binding import bind, locate
from transfer_exec.conversions import COPY_WIDTHS
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column, GatherTable, fold_rows
from transfer_exec.kernels.base import Job
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.program import ProgramTensor
from transfer_exec.tiles import Tile, TileTable
from transfer_exec.transport.shared_files import make_shared

__all__ = ["HostCopies", "shared_copies"]

_LINE = 64
_CAN_SHARE = hasattr(os, "memfd_create")


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One tensor's place in the arena.

    Attributes
    ----------
    name
        Of the parameter; of its first name where several have one memory.
    shape, dtype
        As the source map has them.
    axes
        Its axes from the outermost in memory to the innermost; the copy is contiguous in this order.
    offset
        Where the copy begins, in bytes.
    rows
        What is copied of it, as rows of a gather table over the axes in that order.
    whole
        Whether that is every element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...]
    offset: int
    rows: IdArray
    whole: bool

    @property
    def laid_out(self) -> tuple[int, ...]:
        """The shape with the axes in the order of memory."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).item_bytes

    @property
    def bytes(self) -> int:
        """Size of the copy."""
        return math.prod(self.shape) * self.item_bytes


class HostCopies:
    """The copies of what one worker's map copies from the checkpoint.

    Parameters
    ----------
    worker
        Its name, for errors.
    live
        Its tensors by name.
    source_map
        What they hold.
    outwards
        Copy from the arena into the tensors (a rollout), and not into the arena (a trainer).
    threads
        How many threads copy.
    arena
        Of copies that are no longer used; taken over if it is as large as is needed.

    Attributes
    ----------
    source_map
        As given.
    tensors
        The copies by parameter, of its shape and dtype, dense in the order of its memory where all of it is copied.
        Names with one memory have one copy.

    Raises
    ------
    ProgramError
        If a tensor is not what the map says, or is to be written and overlaps itself, or there is no memory to share.
    """

    def __init__(
        self,
        worker: str,
        live: Mapping[str, torch.Tensor],
        source_map: SourceMap,
        *,
        outwards: bool,
        threads: int = 1,
        arena: torch.Tensor | None = None,
    ) -> None:
        self.source_map = source_map
        self._worker, self._outwards = worker, outwards
        self._kernels = CpuKernels(threads=threads)
        names = [name for name in source_map.parameters if len(source_map[name].copies)]
        alike: dict[object, list[str]] = {}
        for name in names:
            tensor = live[name]
            where = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            alike.setdefault(where, []).append(name)
        self._places, offset = [], 0
        for first, *_ in alike.values():
            self._places.append(_place(source_map, first, live[first], offset, outwards=outwards))
            offset += -(-self._places[-1].bytes // _LINE) * _LINE
        pinned = any(live[place.name].device.type == "cuda" for place in self._places)
        if arena is None or arena.numel() != offset or arena.is_pinned() != pinned:
            share = bool(offset) and not outwards and not pinned and _CAN_SHARE
            arena = _shared(worker, offset) if share else _private(offset, pinned=pinned)
        self.arena = arena
        self._job = self._prepare(live)
        self.tensors: dict[str, torch.Tensor] = {}
        for place, shared in zip(self._places, alike.values(), strict=True):
            inside = self._inside(place, live[place.name].dtype)
            self.tensors.update(dict.fromkeys(shared, inside.permute(np.argsort(place.axes).tolist())))

    @property
    def bytes(self) -> int:
        """Host memory that the copies take."""
        return self.arena.numel()

    def attach(self, live: Mapping[str, torch.Tensor]) -> None:
        """Take these tensors from now on: the same ones at other addresses.

        Raises
        ------
        ProgramError
            As for a new object.
        """
        self._job = self._prepare(live)

    def copy(self, live: Mapping[str, torch.Tensor]) -> None:
        """Copy every element that an update moves, and return when all are copied.

        Parameters
        ----------
        live
            Tensors that are where they were when they were attached.
        """
        self._job.run()
        devices = set()
        for place in self._places:
            tensor = live[place.name]
            if tensor.device.type != "cpu":
                self._copy_device(place, tensor)
                devices.add(tensor.device)
        for device in devices:
            torch.accelerator.synchronize(device)

    def _prepare(self, live: Mapping[str, torch.Tensor]) -> Job:
        """All copies in host memory as one job."""
        places = [place for place in self._places if live[place.name].device.type == "cpu"]
        located = [
            locate(
                self._worker,
                ProgramTensor(place.name, place.laid_out, place.dtype),
                _in_order(live[place.name], place),
                writes=self._outwards,
            )
            for place in places
        ]
        rows = np.concatenate([np.empty((0, len(Column)), dtype=np.int64), *(place.rows for place in places)])
        rows[:, Column.TENSOR] = np.repeat(np.arange(len(places)), [len(place.rows) for place in places])
        table = GatherTable(rows, np.array([0, len(rows)], dtype=np.int64))
        begin = np.array([[self.arena.data_ptr()]], dtype=np.int64)
        bound = bind(table, located, begin, packing=not self._outwards)[0]
        return self._kernels.prepare(bound, packing=not self._outwards)

    def _inside(self, place: _Place, dtype: torch.dtype) -> torch.Tensor:
        return self.arena[place.offset : place.offset + place.bytes].view(dtype).reshape(place.laid_out)

    def _copy_device(self, place: _Place, tensor: torch.Tensor) -> None:
        """The same for one tensor of a device, through torch."""
        bits = bit_dtype(place.item_bytes)
        inside = self._inside(place, bits)
        live = _in_order(tensor, place).view(bits)
        if not self._outwards:
            inside.copy_(live, non_blocking=True)
        elif place.whole:
            live.copy_(inside, non_blocking=True)
        else:
            covered = torch.from_numpy(_mask(place)).to(live.device)
            live.copy_(torch.where(covered, inside.to(live.device), live))


def shared_copies(live: Mapping[str, torch.Tensor], source_map: SourceMap) -> tuple[str, ...]:
    """Parameters whose copies a trainer would have in shared memory."""
    names = [name for name in source_map.parameters if len(source_map[name].copies)]
    pinned = any(live[name].device.type == "cuda" for name in names)
    return tuple(sorted(names)) if _CAN_SHARE and not pinned else ()


def _shared(worker: str, size_bytes: int) -> torch.Tensor:
    try:
        fd, memory = make_shared(f"transload copies {worker}", size_bytes)
    except OSError as error:
        raise ProgramError(f"{worker}: cannot get {size_bytes} bytes of memory for copies: {error}") from error
    os.close(fd)  # the mapping has one of its own
    return torch.from_numpy(memory)


def _private(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    # Filled, since memory that was never touched is slow when it is first written.
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).fill_(0)


def _place(source_map: SourceMap, name: str, tensor: torch.Tensor, offset: int, *, outwards: bool) -> _Place:
    """Where one tensor's copy is, and which of its elements are copied."""
    entry = source_map[name]
    width = dtype_of(entry.dtype).item_bytes
    whole = not outwards or int(entry.copies.extents.prod(axis=1).sum()) == entry.elements
    axes: Sequence[int] = range(len(entry.shape))
    if whole and tensor.dim() == len(entry.shape):
        # In the order of memory the copy is one long run; which elements there are does not depend on the order.
        strides = tensor.stride()
        axes = sorted(axes, key=lambda axis: (-strides[axis], axis))
        rows = _rows_of(0, entry.elements, 1, 1, 0)
    else:
        tiles = TileTable.of([entry.copies]).rows
        shape = (tiles[:, Tile.LENGTH], tiles[:, Tile.INDEX_STRIDE], tiles[:, Tile.COUNT], tiles[:, Tile.INDEX_STEP])
        rows = _rows_of(tiles[:, Tile.INDEX], *shape)
    rows[:, Column.CODE] = COPY_WIDTHS.index(width)
    for index, place in (
        (Column.INDEX, Column.OFFSET),
        (Column.INDEX_STRIDE, Column.OFFSET_STRIDE),
        (Column.INDEX_STEP, Column.OFFSET_STEP),
    ):
        rows[:, place] = rows[:, index] * width
    rows[:, Column.OFFSET] += offset
    folded = fold_rows(np.zeros(len(rows), dtype=np.int64), rows)[1]
    return _Place(name, entry.shape, entry.dtype, tuple(axes), offset, folded, whole)


def _rows_of(
    index: IdArray | int, length: IdArray | int, stride: IdArray | int, count: IdArray | int, step: IdArray | int
) -> IdArray:
    rows = np.zeros((np.size(index), len(Column)), dtype=np.int64)
    rows[:, Column.INDEX], rows[:, Column.LENGTH], rows[:, Column.INDEX_STRIDE] = index, length, stride
    rows[:, Column.COUNT], rows[:, Column.INDEX_STEP] = count, step
    return rows


def _in_order(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
    return tensor.permute(place.axes) if tensor.dim() == len(place.axes) else tensor


def _mask(place: _Place) -> npt.NDArray[np.bool_]:
    """Which elements are copied, in the place's order of axes."""
    out = np.zeros(math.prod(place.shape), dtype=np.bool_)
    for row in place.rows:
        lines = row[Column.INDEX] + np.arange(row[Column.COUNT])[:, None] * row[Column.INDEX_STEP]
        out[lines + np.arange(row[Column.LENGTH])[None, :] * row[Column.INDEX_STRIDE]] = True
    return out.reshape(place.laid_out)
