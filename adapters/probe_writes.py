"""Elements that a loader loads twice: what overlaps leaves no trace in the end, so writes are watched.

During one load every torch operation that copies something is noted. Where a later copy lands on one that nothing
read in between, the earlier load is lost, and its elements are told. A loader that fills whole tensors before,
permutes in place what it loaded, or loads one tensor under two names loses nothing. Writes outside of torch, through
index tensors or on other threads are not seen.

>>> held = torch.zeros(4)
>>> with WriteWatch() as watch:
...     held[0:3].copy_(torch.tensor([1.0, 2.0, 3.0]))
...     held[2:4].copy_(torch.tensor([4.0, 5.0]))
tensor([1., 2., 3.])
tensor([4., 5.])
>>> watch.lost(held).tolist()
[2]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from adapters.torch_bits import bit_dtype, bits_view
from layout_algebra.dtypes import IdArray
from transfer_exec.memory_box import MemoryBox

_FEW = 16
_WIDEST_BYTES = 8
_MOST_BYTES = 1 << 30
_MOST_WRITES = 1 << 16


class WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, follows what this thread's torch operations copy onto what they copied before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pending: dict[int, _Boxes] = {}
        self._lost: dict[int, list[tuple[MemoryBox, MemoryBox]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's own switch: by default the first operation under a mode imports its compiler, for two seconds.
        return False

    def clear(self) -> None:
        """Forget everything, before another load."""
        self._pending.clear()
        self._lost.clear()

    def lost(self, tensor: torch.Tensor) -> IdArray:
        """Flat indices of a tensor's elements that were copied over before anything read them; ascending.

        Pairs of copies that share more than a gigabyte, and copies after a tensor's first 65,536, are left out.
        """
        found = []
        for one, other in self._lost.get(tensor.untyped_storage().data_ptr(), ()):
            start, stop = max(one.start, other.start), min(one.stop, other.stop)
            if stop - start <= _MOST_BYTES:
                found.append(np.flatnonzero(one.bytes(start, stop) & other.bytes(start, stop)) + start)
        if not found:
            return np.empty(0, dtype=np.int64)
        places = np.unique(np.concatenate(found))
        starts = np.full(tuple(tensor.shape), tensor.data_ptr(), dtype=np.int64)
        for axis, step in enumerate(tensor.stride()):
            along = np.arange(tensor.shape[axis], dtype=np.int64) * step * tensor.element_size()
            starts += along.reshape(-1, *[1] * (tensor.ndim - axis - 1))
        return np.flatnonzero(np.isin(starts.reshape(-1), places))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        try:
            self._observe(func, args, kwargs)
        except RuntimeError:
            self.clear()  # a tensor without memory of its own; nothing is known of this load
        return func(*args, **kwargs)

    def _observe(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if _makes_a_view(func):
            return
        written, read = _tensors_of(func, args, kwargs)
        for tensor in read:
            self._forget(tensor)
        loads = func.overloadpacket in _COPIES and len(read) == len(written)
        for position, tensor in enumerate(written):
            if loads and tensor.numel() and _says_something(read[position]):
                self._note(tensor, read[position])
            else:
                self._forget(tensor)

    def _note(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        box = _box_of(tensor)
        pending = self._pending.setdefault(storage, _Boxes())
        if len(pending) == _MOST_WRITES:
            return
        over = [other for other in pending.near(box) if not box.apart(other)]
        if over and not _holds(tensor, source):
            self._lost.setdefault(storage, []).extend((other, box) for other in over)
        pending.add(box)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Something read these elements, or did more to them than to replace them."""
        pending = self._pending.get(tensor.untyped_storage().data_ptr())
        if pending is not None and tensor.numel():
            pending.drop_near(_box_of(tensor))


class _Boxes:
    """Boxes by where they start; those near another are found without a look at all of them."""

    def __init__(self) -> None:
        self._sorted: list[MemoryBox] = []
        self._longest = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def near(self, box: MemoryBox) -> list[MemoryBox]:
        """Those that reach into the bytes from the first to the last of a box."""
        return [one for one in self._sorted[self._reaching(box)] if box.start < one.stop]

    def add(self, box: MemoryBox) -> None:
        """Keep one more."""
        insort(self._sorted, box)
        self._longest = max(self._longest, box.stop - box.start)

    def drop_near(self, box: MemoryBox) -> None:
        """Keep those that are not `near`."""
        reaching = self._reaching(box)
        self._sorted[reaching] = [one for one in self._sorted[reaching] if one.stop <= box.start]

    def _reaching(self, box: MemoryBox) -> slice:
        first = bisect_left(self._sorted, box.start - self._longest, key=_start)
        return slice(first, bisect_left(self._sorted, box.stop, key=_start))


def _box_of(tensor: torch.Tensor) -> MemoryBox:
    item = tensor.element_size()
    return MemoryBox.of(tensor.data_ptr(), tensor.shape, [step * item for step in tensor.stride()], item)


def _start(box: MemoryBox) -> int:
    return box.start


_COPIES = frozenset({torch.ops.aten.copy_, torch.ops.aten._foreach_copy_})


@cache
def _makes_a_view(func: torch._ops.OpOverload) -> bool:
    """Whether an operation only makes a view: most that a loader runs do, and they must cost next to nothing."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _tensors_of(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operation writes, and those that it reads."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        side = written if argument.alias_info is not None and argument.alias_info.is_write else read
        side += [one for one in _flat(given) if one.layout == torch.strided and not is_traceable_wrapper_subclass(one)]
    return written, read


def _flat(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _flat(one)


def _holds(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a tensor has the bits already that are about to be copied into it."""
    if tensor.element_size() > _WIDEST_BYTES:
        return False
    kind = bit_dtype(tensor.element_size())
    given = source.to(device=tensor.device, dtype=tensor.dtype).expand(tensor.shape)
    return torch.equal(tensor.view(kind), given.view(kind))


def _says_something(source: torch.Tensor) -> bool:
    """Whether a copied tensor may hold loaded numbers: one that is the same number everywhere is a fill."""
    if source.device.type != "cpu" or source.numel() < 2 or source.ndim == 0:
        return True
    first = bits_view(source[(0,) * (source.ndim - 1)][:_FEW]).reshape(-1)
    last = bits_view(source[(-1,) * (source.ndim - 1)][-_FEW:]).reshape(-1)
    return bool((first != first[0]).any() or (last != first[0]).any())
