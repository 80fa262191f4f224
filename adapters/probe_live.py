"""The worker's live tensors: found by name, kept bit for bit, and given back.

Names that share one view are one ``LiveTensor``. Before the first probe load ``Keeper`` copies every tensor's bits
and fills the floating-point ones with a background that is no code, so that an element nobody writes shows. Other
tensors keep their values, which may steer the loader (an expert map), and get them back before every load.

>>> layer = torch.nn.Linear(2, 2)
>>> [live.names for live in find_live(live_tensors(layer))]
[('bias',), ('weight',)]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from adapters._probe_kernels import keep_and_clear, stream_bits
from adapters.tensor_memory import extent_bytes, held_bytes, needed_bytes, read_only, regrow
from adapters.torch_bits import Bits, bit_dtype, bits_view, dtype_name, storage_type
from layout_algebra.errors import ParameterReplacedError, ProbeError
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.space import natural_key

Parameters: TypeAlias = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]

BACKGROUND = MappingProxyType(
    {
        "F8_E4M3": 0xA5,
        "F8_E5M2": 0xA5,
        "F16": 0x8155,
        "BF16": 0xA5A5,
        "F32": 0xA5A5A5A5,
        "F64": 0xA5A5A5A5A5A5A5A5,
    }
)
"""Bits of the background by dtype: small negative numbers, finite, no codes. Dtypes not listed keep their values."""

_log = logging.getLogger("adapters.probing")
_PIECE_ELEMENTS = 1 << 22
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """One view of the worker's memory.

    Attributes
    ----------
    names
        Every name it goes by, in natural order.
    owners
        The objects the worker holds under these names.
    tensor
        The same memory as a plain detached tensor (a sharded tensor's local part).
    dtype
        Safetensors spelling.
    """

    names: tuple[str, ...]
    owners: tuple[torch.Tensor, ...]
    tensor: torch.Tensor
    dtype: str

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(self.tensor.shape)

    @property
    def in_place(self) -> bool:
        """Whether ``bits`` is a view of live memory, not a copy."""
        return self.tensor.device.type == "cpu" and self.tensor.is_contiguous()

    def bits(self) -> Bits:
        """Its elements' bits now, flat and contiguous; a view of live memory where that is possible."""
        if self.tensor.device.type != "cpu":
            return bits_view(self.tensor.contiguous().cpu()).reshape(-1)
        return np.ascontiguousarray(bits_view(self.tensor)).reshape(-1)


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module by full name, aliases included, persistent or not.

    Pass ``lambda: live_tensors(module)`` to ``probe`` where a loader replaces parameters.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def find_live(parameters: Parameters) -> tuple[LiveTensor, ...]:
    """The distinct views among some parameters, by first name in natural order.

    Raises
    ------
    ProbeError
        If a name is no string, or a value is no tensor, or has no plain memory (meta, sparse, quantized, freed).
    UnsupportedDtypeError
        If a dtype has no safetensors name.
    """
    mapping = _listed(parameters)
    groups: dict[object, list[str]] = {}
    aliases = {}
    for name in sorted(mapping, key=natural_key):
        alias = _plain(name, mapping[name])
        aliases[name] = alias
        place = (alias.device, alias.data_ptr(), alias.dtype, tuple(alias.shape), alias.stride())
        groups.setdefault(place if alias.numel() else name, []).append(name)
    return tuple(
        LiveTensor(
            tuple(names),
            tuple(mapping[name] for name in names),
            aliases[names[0]],
            dtype_name(aliases[names[0]].dtype, of=names[0]),
        )
        for names in groups.values()
    )


def check_same(before: Iterable[LiveTensor], after: Iterable[LiveTensor], *, sharing: bool) -> None:
    """Refuse live tensors whose names, shapes or dtypes (and, if asked, sharing) changed from one load to the next.

    Raises
    ------
    ParameterReplacedError
        Naming the tensor, expected and got.
    """
    left = {name: live for live in before for name in live.names}
    right = {name: live for live in after for name in live.names}
    for name in [*left, *right]:
        if name not in left or name not in right:
            raise ParameterReplacedError(
                f"{name}: {'appeared' if name in right else 'is gone'} after load_weights; expected the same "
                f"{len(left)} tensors after every call. Give `parameters` as a callable that lists the final ones"
            )
    for name, live in left.items():
        now = right[name]
        if (live.shape, live.dtype) != (now.shape, now.dtype):
            raise ParameterReplacedError(
                f"{name}: {live.dtype} {live.shape} became {now.dtype} {now.shape} during load_weights; expected one "
                "size from call to call. Gather or materialize it before, or probe load and post-processing together"
            )
        if sharing and live.names != now.names:
            raise ParameterReplacedError(
                f"{name}: shared memory with {live.names}, after load_weights with {now.names}; expected no change"
            )


class Keeper:
    """Every live tensor's own bits, and the way to give them back.

    Parameters
    ----------
    live
        What to keep; copied on construction, after which floating-point tensors hold the background.
    executor
        Runs the copies.
    """

    def __init__(self, live: tuple[LiveTensor, ...], executor: ThreadPool) -> None:
        self._live = live
        self._executor = executor
        self._kept = _room_for(live)
        self._steering, self._overlapping = _steering(live)
        self._pieces = [
            piece for one in live for piece in _pieces(one, self._kept[one.name], clear=one.name not in self._steering)
        ]
        self._holds_all = False

    def kept(self, name: str) -> Bits:
        """The bits a tensor had before the probe; flat."""
        return self._kept[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(self._kept[one.name].nbytes for one in self._live)

    def keep_and_clear(self) -> None:
        """Copy every tensor, then write the background into the floating-point ones.

        Interrupted half-way, it undoes what it did.
        """
        number = read_only(one.tensor for one in self._live)
        if number is not None:
            raise ProbeError(
                f"{self._live[number].name}: lies in memory that this process may only read, such as a mapped file; "
                "copy it before the probe, or leave it out of `parameters` if nothing writes it"
            )
        try:
            # A tensor that overlaps another must not be cleared before both are copied.
            shared = [piece for piece in self._pieces if piece.of.name in self._overlapping]
            alone = [piece for piece in self._pieces if piece.of.name not in self._overlapping]
            for piece in shared:
                piece.keep()
            for piece in shared:
                piece.clear_background()
            for _ in self._executor.map(_Piece.keep_and_clear, alone):
                pass
            self._holds_all = True
        except BaseException:
            # Also of an interrupt: parameters are half overwritten here, and nobody else can give them back.
            self._executor.shutdown()
            for piece in self._pieces:
                if piece.kept_already:
                    piece.give_back()
            raise

    def give_back_steering(self, now: tuple[LiveTensor, ...]) -> None:
        """Write the kept bits of every tensor without a background into where it lives now."""
        for one in now:
            if one.name in self._steering:
                write_bits(one, self._kept[one.name])

    def give_back(self, now: tuple[LiveTensor, ...], lent: Callable[[torch.Tensor], bool]) -> None:
        """Write all kept bits, into the first tensors and, where others took their places, into those too.

        Nothing is written unless ``keep_and_clear`` came to its end.

        Parameters
        ----------
        now
            The live tensors at the end, as far as they could be found.
        lent
            Whether a tensor lies in memory that the probe lent to the loader; its owner gets its first memory back.
        """
        if not self._holds_all:
            return
        first = {name: one for one in self._live for name in one.names}
        for one in self._live:
            regrow(one.tensor)
        for _ in self._executor.map(_Piece.give_back, self._pieces):
            pass
        # Only now: what a loader exchanged, tied or turned lies where others' bits have just been put.
        ours = {one.tensor.untyped_storage().data_ptr() for one in self._live if one.tensor.device.type == "cpu"}
        for one in now:
            for name, owner in zip(one.names, one.owners, strict=True):
                known = first.get(name)
                if known is None or known.tensor.numel() == 0 or _view_of(one.tensor) == _view_of(known.tensor):
                    continue
                same = (one.shape, one.dtype) == (known.shape, known.dtype)
                if same and not lent(one.tensor) and one.tensor.untyped_storage().data_ptr() not in ours:
                    write_bits(one, self._kept[name])
                elif sum(owner is other for other in one.owners) == 1:
                    owner.data = known.tensor
                else:
                    _log.warning("%s is one object with others since load_weights; they hold one tensor's values", name)


@dataclass(slots=True, eq=False)
class _Piece:
    """A stretch of one tensor, small enough to share the work, and its kept bits.

    ``cut`` is a slice of the flat elements, or None for a whole tensor that is strided or on a device. Memory is looked
    up each time: a loader may have freed and renewed it.
    """

    of: LiveTensor
    cut: slice | None
    kept: Bits
    clear: bool
    kept_already: bool = False

    def live(self) -> Bits:
        if self.cut is None:
            return self.of.bits()
        return bits_view(self.of.tensor).reshape(-1)[self.cut]

    def keep(self) -> None:
        np.copyto(self.kept, self.live())
        self.kept_already = True

    def clear_background(self) -> None:
        if self.clear:
            _fill(self.of, self.cut)

    def keep_and_clear(self) -> None:
        if self.cut is None or not self.clear:
            self.keep()
            self.clear_background()
        else:
            live = self.live()
            self.kept_already = True
            keep_and_clear(live, self.kept, live.dtype.type(BACKGROUND[self.of.dtype]))

    def give_back(self) -> None:
        if self.cut is None:
            write_bits(self.of, self.kept)
        else:
            stream_bits(self.kept, self.live())


def _room_for(live: tuple[LiveTensor, ...]) -> dict[str, Bits]:
    """Room for every tensor's bits, by each of its names: one block, which the system can back with large pages."""
    sizes = [one.tensor.numel() * one.tensor.element_size() for one in live]
    starts = np.cumsum([0, *(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)])
    block = np.empty(int(starts[-1]), dtype=np.uint8)
    room: dict[str, Bits] = {}
    for one, start, size in zip(live, starts.tolist(), sizes, strict=False):
        bits = block[start : start + size].view(storage_type(one.tensor.element_size()))
        room.update((name, bits) for name in one.names)
    return room


def _listed(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    if isinstance(parameters, torch.nn.Module):
        raise ProbeError("parameters is a module; give `lambda: live_tensors(module)`")
    try:
        mapping = parameters() if callable(parameters) else parameters
    except Exception as error:
        raise ProbeError(
            f"`parameters` raised {type(error).__name__}: {error}; expected live tensors by name"
        ) from error
    if not isinstance(mapping, Mapping):
        raise ProbeError(f"parameters: got {type(mapping).__name__}; expected live tensors by name")
    for name in mapping:
        if not isinstance(name, str):
            raise ProbeError(f"{name!r}: a live tensor's name is {type(name).__name__}; expected a string")
    return mapping


def _plain(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ProbeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ProbeError(f"{name}: is not initialized, so it has no shape yet; run the module once before the probe")
    if "torch.distributed.tensor" in sys.modules:
        tensor = _local_part(tensor)
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
        raise ProbeError(
            f"{name}: a {tensor.layout} tensor on {tensor.device} has no plain memory; materialize it before the probe"
        )
    if tensor.numel():
        size = held_bytes(tensor)
        if size < needed_bytes(tensor):
            raise ProbeError(
                f"{name}: its memory has {size:,} of the {needed_bytes(tensor):,} bytes that {tensor.dtype} "
                f"{tuple(tensor.shape)} takes; give back what was freed before the probe or the end of load_weights"
            )
    return tensor.detach()


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # slow to import, and loaded wherever there are any

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _steering(live: tuple[LiveTensor, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of tensors that keep their values, and of tensors that overlap another one in memory.

    Floating-point tensors that overlap one of another dtype keep their values too: a background in the one would be
    a changed value in the other.
    """
    keeping = {name for one in live if one.dtype not in BACKGROUND for name in one.names}
    overlapping: set[str] = set()
    spans = []
    for one in live:
        if one.tensor.numel():
            start = one.tensor.data_ptr()
            spans.append((str(one.tensor.device), start, start + extent_bytes(one.tensor), one))
    spans.sort(key=lambda span: (span[0], span[1], span[2]))
    cluster: list[LiveTensor] = []
    device, reach_to = "", 0
    for place, start, stop, one in spans:
        if cluster and (place != device or start >= reach_to):
            _note_cluster(cluster, keeping, overlapping)
            cluster = []
        reach_to = max(reach_to, stop) if cluster else stop
        device = place
        cluster.append(one)
    _note_cluster(cluster, keeping, overlapping)
    return frozenset(keeping), frozenset(overlapping)


def _note_cluster(cluster: list[LiveTensor], keeping: set[str], overlapping: set[str]) -> None:
    if len(cluster) > 1:
        overlapping.update(one.name for one in cluster)
        if len({one.dtype for one in cluster}) > 1:
            keeping.update(name for one in cluster for name in one.names)


def _pieces(one: LiveTensor, kept: Bits, *, clear: bool) -> list[_Piece]:
    if not one.tensor.numel():
        return []
    if not one.in_place:
        return [_Piece(one, None, kept, clear)]
    cuts = [slice(start, start + _PIECE_ELEMENTS) for start in range(0, len(kept), _PIECE_ELEMENTS)]
    return [_Piece(one, cut, kept[cut], clear) for cut in cuts]


def _fill(one: LiveTensor, cut: slice | None) -> None:
    if one.tensor.device.type == "cpu":
        bits = bits_view(one.tensor) if cut is None else bits_view(one.tensor).reshape(-1)[cut]
        bits[...] = bits.dtype.type(BACKGROUND[one.dtype])
    else:
        item = one.tensor.element_size()
        value = storage_type(item).type(BACKGROUND[one.dtype]).astype(np.dtype(f"i{item}"))
        _without_broadcast(one.tensor).view(bit_dtype(item)).fill_(int(value))


def write_bits(one: LiveTensor, kept: Bits) -> None:
    """Write a tensor's bits, flat, into its memory."""
    if not one.tensor.numel():
        return
    if one.tensor.device.type == "cpu":
        np.copyto(bits_view(one.tensor), kept.reshape(one.shape))
        return
    item = one.tensor.element_size()
    source = torch.from_numpy(kept.view(np.dtype(f"i{item}") if item > 1 else np.dtype("u1"))).view(one.shape)
    target = _without_broadcast(one.tensor).view(bit_dtype(item))
    target.copy_(source[tuple(slice(0, extent) for extent in target.shape)])


def _without_broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Keep one element of every axis that repeats memory; such a tensor may be written."""
    for axis, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
