"""Memory that stands for other memory: addresses nobody has filled, and what every storage of a trace holds.

Tensors of a trace lie in an arena of reserved addresses without pages behind them. Views of them work as ever, since
torch only computes sizes and strides. Whoever reads or writes such a tensor behind the trace's back (another thread,
foreign code) makes the system put a page there, which shows afterwards.

>>> arena = Arena()
>>> tensor = arena.reserve(1 << 20)
>>> arena.touched() is None
True
>>> _ = tensor[5:6].fill_(1)
>>> arena.touched() == tensor.data_ptr()
True
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from adapters.probe_live import BACKGROUND, LiveTensor
from adapters.trace_content import Content
from adapters.trace_pieces import CONSTANT, INITIAL, Labels
from layout_algebra.errors import TracingError

_CHUNK_BYTES = 1 << 34
_SCAN_BYTES = 1 << 30
_WITHOUT_RESERVE = 0x4000 if sys.platform == "linux" else 0
_SWEEP = 4096


class Arena:
    """Addresses for tensors that are never filled; ``touched`` tells whether somebody did."""

    def __init__(self) -> None:
        self._page = mmap.PAGESIZE
        self._chunks: list[mmap.mmap] = []
        self._bases: list[int] = []
        self._used: list[int] = []

    def reserve(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of its own pages; its storage is exactly that long."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        whole = -(-nbytes // self._page) * self._page
        if not self._chunks or self._used[-1] + whole > len(self._chunks[-1]):
            self._grow(whole)
        start = self._used[-1]
        self._used[-1] += whole
        return torch.frombuffer(self._chunks[-1], dtype=torch.uint8, count=nbytes, offset=start)

    @property
    def can_tell(self) -> bool:
        """Whether this system says which pages exist."""
        probe = Arena()
        page = probe.reserve(probe._page)
        if probe.touched() is not None:
            return False
        page.fill_(1)
        return probe.touched() is not None

    def holds(self, address: int) -> bool:
        """Whether an address was reserved here."""
        return any(base <= address < base + used for base, used in zip(self._bases, self._used, strict=True))

    def touched(self) -> int | None:
        """The first address of a page that somebody read or wrote, or None."""
        try:
            mincore = ctypes.CDLL(None, use_errno=True).mincore
        except (AttributeError, OSError):
            return None
        for base, used in zip(self._bases, self._used, strict=True):
            for start in range(0, used, _SCAN_BYTES):
                size = min(_SCAN_BYTES, used - start)
                pages = np.zeros(-(-size // self._page), dtype=np.uint8)
                place = ctypes.c_void_p(base + start)
                if mincore(place, ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)) != 0:
                    return None
                found = np.flatnonzero(pages & 1)
                if len(found):
                    return base + start + int(found[0]) * self._page
        return None

    def _grow(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _WITHOUT_RESERVE
        try:
            chunk = mmap.mmap(-1, max(nbytes, _CHUNK_BYTES), flags=flags)
        except OSError:
            chunk = mmap.mmap(-1, nbytes, flags=flags)
        self._chunks.append(chunk)
        self._bases.append(ctypes.addressof(ctypes.c_char.from_buffer(chunk)))
        self._used.append(0)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One storage.

    Attributes
    ----------
    content, shift
        What it holds, and the byte of that content at which it begins.
    address
        The address it shows.
    lent
        Whether it lies in the arena.
    """

    content: Content
    shift: int
    address: int
    lent: bool
    storage: StorageWeakRef


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor as places of a content: everything in bytes."""

    content: Content
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def rows(self, axis: int, first: int, step: int, count: int) -> View:
        """Indices ``first, first + step, ...`` of one axis; a step may be 0 or negative."""
        stride = self.strides[axis]
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        strides = (*self.strides[:axis], step * stride, *self.strides[axis + 1 :])
        return View(self.content, self.start + first * stride, shape, strides, self.dtype)

    def places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The place of every element in row-major order; int64, flat."""
        where = np.array([self.start], dtype=np.int64)
        for extent, stride in zip(self.shape, self.strides, strict=True):
            where = (where[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
        return where


class Memories:
    """Every storage that a trace knows, by identity; live memory also by address."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.arena = Arena()
        self._places: dict[int, Place] = {}
        self._live: list[tuple[str, int, int, Content, int]] = []
        self._next_sweep = _SWEEP

    def new(self, content: Content, nbytes: int) -> torch.Tensor:
        """A uint8 tensor that stands for a content from its byte 0 on."""
        tensor = self.arena.reserve(nbytes)
        self._note(tensor, content, 0, tensor.data_ptr(), lent=True)
        return tensor

    def stand_in(self, live: Sequence[LiveTensor]) -> dict[str, torch.Tensor]:
        """A tensor for every live one with elements, by first name: same shape, strides and sharing, nothing in it."""
        out = {}
        for group in _sharing([one for one in live if one.tensor.numel()]):
            low = min(one.tensor.data_ptr() for one in group)
            high = max(one.tensor.data_ptr() + _reach(one.tensor) for one in group)
            origin = _origin(group, low)
            names = ", ".join(one.name for one in group[:3]) + (" and others" if len(group) > 3 else "")
            default = INITIAL if any(one.dtype in BACKGROUND for one in group) else CONSTANT
            content = Content(self.labels, f"parameter {names}", default)
            whole = self.new(content, high - origin)
            address = whole.data_ptr()
            torch._C._set_throw_on_mutable_data_ptr(whole)
            self._live.append((str(group[0].tensor.device), origin, high, content, address))
            for one in group:
                offset = (one.tensor.data_ptr() - origin) // one.tensor.element_size()
                out[one.name] = shaped(whole, one.tensor.dtype, one.tensor.shape, one.tensor.stride(), offset)
        return out

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor's storage stands, or None for one that the trace does not follow."""
        storage = tensor.untyped_storage()
        found = self._places.get(storage._cdata)
        if found is None:
            found = self._alias(tensor, storage)
        return found

    def view(self, tensor: torch.Tensor) -> View | None:
        """A tensor as places of a content, or None for one that the trace does not follow."""
        place = self.place(tensor)
        if place is None:
            return None
        item = tensor.element_size()
        start = place.shift + int(tensor.storage_offset()) * item
        strides = tuple(step * item for step in tensor.stride())
        return View(place.content, start, tuple(tensor.shape), strides, tensor.dtype)

    def adopt(self, tensor: torch.Tensor, name: str) -> View:
        """Follow a tensor that held no more than constants so far."""
        self._note(tensor, Content(self.labels, name), 0, tensor.untyped_storage().data_ptr())
        view = self.view(tensor)
        assert view is not None
        return view

    def address(self, tensor: torch.Tensor) -> int | None:
        """The address that a followed tensor shows: never one in live host memory."""
        place = self.place(tensor)
        return None if place is None else place.address + int(tensor.storage_offset()) * tensor.element_size()

    def lent(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the arena."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        return place is not None and place.lent

    def owner(self, address: int) -> str:
        """What lies at an address of the arena."""
        below = [one for one in self._places.values() if one.address <= address]
        return max(below, key=lambda one: one.address).content.name if below else "a tensor of the trace"

    def _note(self, tensor: torch.Tensor, content: Content, shift: int, address: int, *, lent: bool = False) -> Place:
        if len(self._places) > self._next_sweep:
            self._places = {key: one for key, one in self._places.items() if not _is_gone(one)}
            self._next_sweep = 2 * len(self._places) + _SWEEP
        storage = tensor.untyped_storage()
        place = Place(content, shift, address, lent, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._places[storage._cdata] = place
        return place

    def _alias(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Place | None:
        """A storage not seen before that lies in live memory or in the arena."""
        if tensor.device.type == "meta" or not storage.nbytes():
            return None
        start, device = storage.data_ptr(), str(tensor.device)
        if self.arena.holds(start):
            below = [one for one in self._places.values() if one.lent and one.address <= start]
            home = max(below, key=lambda one: one.address)
            return self._note(tensor, home.content, start - home.address, start, lent=True)
        stop = start + storage.nbytes()
        near = [live for live in self._live if live[0] == device and start < live[2] and stop > live[1]]
        if len(near) > 1:
            raise TracingError(
                f"one tensor reaches over the memory of {near[0][3].name} and of {near[1][3].name}, which are storages "
                "of their own; expected each to be written through its own. Probe this loader instead"
            )
        for _, low, _, content, address in near:
            return self._note(tensor, content, start - low, address + start - low)
        return None


def shaped(
    whole: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """A tensor of some shape over the storage of a uint8 tensor."""
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), offset, tuple(shape), tuple(strides))


def _origin(group: Sequence[LiveTensor], low: int) -> int:
    """An address at or below ``low`` from which every tensor of a group lies whole elements away."""
    for origin in (low - low % 64, low):
        if all((one.tensor.data_ptr() - origin) % one.tensor.element_size() == 0 for one in group):
            return origin
    raise TracingError(
        f"{group[0].name}: shares memory with {group[-1].name} at a distance that is no whole number of elements; "
        "expected aligned views. Probe this loader instead"
    )


def _is_gone(place: Place) -> bool:
    return bool(place.storage.expired())  # type: ignore[no-untyped-call]


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element."""
    if not tensor.numel():
        return 0
    steps = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _sharing(live: Sequence[LiveTensor]) -> list[list[LiveTensor]]:
    """Live tensors in groups that share a storage or overlap in memory."""
    spans = []
    for one in live:
        storage, start = one.tensor.untyped_storage(), one.tensor.data_ptr()
        begin = storage.data_ptr() if storage.nbytes() else start
        stop = max(begin + storage.nbytes(), start + _reach(one.tensor))
        spans.append((str(one.tensor.device), min(start, begin), stop, one))
    spans.sort(key=lambda span: (span[0], span[1], span[2]))
    groups: list[list[LiveTensor]] = []
    device, reach = "", -1
    for where, start, stop, one in spans:
        if groups and where == device and start < reach:
            groups[-1].append(one)
            reach = max(reach, stop)
        else:
            groups.append([one])
            device, reach = where, stop
    return groups
