"""What a probe load is fed: every checkpoint tensor is a slice of one periodic buffer.

A pass gives element ``id`` the value ``table[id % period]``, and a tensor's ids are consecutive, so any stretch of
the periodic buffer that begins at the right phase is a tensor. Stretches begin at multiples of 64 bytes and at
places of their own, so that to the loader they look like tensors that own their memory.

>>> from layout_algebra.space import TensorSpec
>>> from layout_algebra.signal_safe import ThreadPool
>>> from adapters.torch_bits import bits_view
>>> space = CheckpointSpace([TensorSpec("a", (3,), "F32"), TensorSpec("b", (2,), "F32")])
>>> feeder = Feeder(space, [5], ThreadPool(1, "doctest"))
>>> feeder.prepare(Pattern({"F32": np.arange(5, dtype=np.uint32) << 23}))
>>> [(name, (bits_view(tensor) >> 23).tolist()) for name, tensor in feeder.feed()]
[('a', [1, 2, 3]), ('b', [4, 0])]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from adapters._probe_kernels import fill_periodic, first_difference
from adapters.torch_bits import Bits, storage_type, tensor_of_bits, torch_dtype
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.residues import holds_codes
from layout_algebra.runs import merge_intervals
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.space import CheckpointSpace, TensorSpec

_ALIGN_BYTES = 64
PERIOD_BYTES = _ALIGN_BYTES
"""A buffer takes as many bytes for every number of a period, since tensors are aligned."""
_PIECE_BYTES = 1 << 23
_SPREAD_BYTES = 1 << 26
_UNCODED = MappingProxyType(
    {
        "BOOL": (b"\x01", b"\x00"),
        "F8_E8M0": (b"\x7f", b"\x80"),
        "F4": (b"\x22", b"\x44"),
        "F6_E2M3": (b"\x08\x82\x20", b"\x10\x04\x41"),
        "F6_E3M2": (b"\x0c\xc3\x30", b"\x10\x04\x41"),
        "C64": (np.array([1, 1], "<f4").tobytes(), np.array([2, 3], "<f4").tobytes()),
    }
)
"""What tensors that can hold no codes are filled with: ones, and in its place something else, twos if there are any."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Values by element id.

    Attributes
    ----------
    tables
        For every checkpoint dtype that holds codes the bits of one period, ``table[id % period]``; all of one length.
    second
        Whether tensors of other dtypes (bools, exponents, parts of a byte) get their second content, not all ones.
    """

    tables: Mapping[str, Bits]
    second: bool = False

    @property
    def period(self) -> int:
        """Length of the tables."""
        return len(next(iter(self.tables.values()))) if self.tables else 1


class Feed:
    """The checkpoint's tensors in order, as ``(name, tensor)``; may be iterated again, and ``next`` works too."""

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._tensors = tensors
        self._begun: Iterator[tuple[str, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        begun, self._begun = self._begun, None
        return self._tensors() if begun is None else begun

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._begun is None:
            self._begun = self._tensors()
        return next(self._begun)


class Feeder:
    """What all loads of a probe are fed from: one buffer, or two where tensors of one load follow two patterns.

    Parameters
    ----------
    space
        The checkpoint.
    periods
        The period of every pattern that will be fed; they decide how large a buffer is: about the largest tensor of
        every dtype.
    executor
        Runs the fills and checks.
    """

    def __init__(self, space: CheckpointSpace, periods: Sequence[int], executor: ThreadPool) -> None:
        self._space = space
        self._executor = executor
        self._private = False
        self._members = _by_dtype(space)
        self._places = {p: _place(space, self._members, p) for p in {Pattern({}).period, *periods}}
        self._lengths: dict[str, int] = {}
        for dtype, chosen in self._members.items():
            sizes = np.diff(space.starts)[chosen]
            self._lengths[dtype] = max(int((self._places[period][chosen] + sizes).max()) for period in periods)
        self._banks: list[_Bank] = []
        self._choice = [0] * len(space)
        self._made: list[torch.Tensor | None] = []

    @property
    def private(self) -> bool:
        """Whether every tensor is a copy of its own."""
        return self._private

    def make_private(self) -> None:
        """From now on hand out copies: for loaders that write into what they get, or keep it."""
        self._private = True

    @property
    def bank_bytes(self) -> int:
        """Bytes of one buffer."""
        return sum(length * dtype_of(dtype).item_bytes for dtype, length in self._lengths.items())

    def prepare(
        self, pattern: Pattern, other: Pattern | None = None, choice: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Get ready for one load.

        Parameters
        ----------
        pattern
            What tensors are fed.
        other, choice
            Another pattern, for the tensors (by position in the space) where ``choice`` is true.
        """
        patterns = [pattern] if other is None else [pattern, other]
        self._choice = [0] * len(self._space) if choice is None else choice.astype(np.int64).tolist()
        while len(self._banks) < len(patterns):
            self._banks.append(_Bank(self._space, self._members, self._lengths, self._executor))
        chosen = list(zip(self._banks, patterns, strict=False))
        fills = [bank.use(given, self._places[given.period], fill=not self._private) for bank, given in chosen]
        # Tensors are made by one thread, in or before the loader: here the others have something to do meanwhile.
        made = [] if self._private else [self._banks[k].view(at) for at, k in enumerate(self._choice)]
        self._made = made[::-1]
        for finish in fills:
            finish()

    def feed(self) -> Feed:
        """What ``load_weights`` gets."""
        return Feed(self.tensors)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every checkpoint tensor of the prepared load, in the order of the space."""
        made, self._made = self._made, []  # a loader may have changed shapes of those that it got
        for position, (name, choice) in enumerate(zip(self._space.names, self._choice, strict=True)):
            yield name, self._tensor(position, choice, made.pop() if made else None)

    def _tensor(self, position: int, choice: int, made: torch.Tensor | None) -> torch.Tensor:
        if made is None and not self._private:
            made = self._banks[choice].view(position)
        return self._banks[choice].copy(position) if made is None else made

    def damaged(self) -> bool:
        """Whether somebody wrote into the buffers since ``prepare``."""
        return not self._private and any(bank.damaged() for bank in self._banks)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be one that was handed out, or a view of it."""
        return self._private or self.holds(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a buffer."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        return any(bank.holds(tensor.data_ptr()) for bank in self._banks)


class _Bank:
    """One buffer a dtype, filled with one pattern."""

    def __init__(
        self, space: CheckpointSpace, members: Mapping[str, IdArray], lengths: Mapping[str, int], executor: ThreadPool
    ) -> None:
        self._space = space
        self._members = members
        self._executor = executor
        self._buffers = {dtype: _aligned(length, dtype_of(dtype).item_bytes) for dtype, length in lengths.items()}
        self._spans = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in self._buffers.values()]
        nothing = _aligned(0, 1)
        types = {dtype: torch_dtype(dtype) for dtype in lengths}
        self._tensors = [
            (self._buffers.get(spec.dtype, nothing), types.get(spec.dtype), spec.elements, spec.shape)
            for spec in space.specs
        ]
        self._pattern = Pattern({})
        self._offsets: list[int] = [0] * len(space)
        self._parts: list[tuple[Bits, Bits, int]] = []
        self._filled = False

    def use(self, pattern: Pattern, offsets: IdArray, *, fill: bool) -> Callable[[], None]:
        """Begin to hold a pattern; the result is to be called to finish.

        A buffer that holds it already, undamaged, is left as it is.
        """
        if pattern is not self._pattern:
            self._pattern, self._offsets, self._filled = pattern, offsets.tolist(), False
            self._parts = self._cut()
        fill = fill and not self._filled
        jobs = [self._executor.submit(fill_periodic, *part) for part in self._parts] if fill else []

        def finish() -> None:
            for job in jobs:
                job.result()
            self._filled = self._filled or fill

        return finish

    def damaged(self) -> bool:
        jobs = [self._executor.submit(first_difference, *part) for part in self._parts] if self._filled else []
        self._filled = self._filled and max([job.result() for job in jobs], default=-1) < 0
        return bool(jobs) and not self._filled

    def holds(self, address: int) -> bool:
        return any(first <= address < last for first, last in self._spans)

    def view(self, position: int) -> torch.Tensor | None:
        """A checkpoint tensor in the buffer; None for one that is not fed from there."""
        buffer, dtype, elements, shape = self._tensors[position]
        if dtype is None or not elements:
            return None
        start = self._offsets[position] * buffer.itemsize
        # Not a view of another tensor, and a good deal faster to make than one.
        return torch.frombuffer(buffer, dtype=dtype, count=elements, offset=start).resize_(shape)

    def copy(self, position: int) -> torch.Tensor:
        """A checkpoint tensor in memory of its own."""
        spec = self._space.specs[position]
        if not holds_codes(spec.dtype):
            return _uncoded(spec, second=self._pattern.second)
        bits = np.empty(spec.elements, dtype=storage_type(spec.element_type.item_bytes))
        if spec.elements:
            fill_periodic(bits, self._pattern.tables[spec.dtype], int(self._space.starts[position]))
        return tensor_of_bits(bits, spec.dtype, spec.shape)

    def _cut(self) -> list[tuple[Bits, Bits, int]]:
        """The used stretches of the buffers in pieces for the executor: memory, table, and phase."""
        starts = np.array(self._offsets, dtype=np.int64)
        stops = starts + np.diff(self._space.starts)
        out = []
        for dtype, buffer in self._buffers.items():
            spans = np.stack([starts, stops], axis=1)[self._members[dtype]]
            step = _PIECE_BYTES // buffer.itemsize
            for start, stop in merge_intervals(spans).tolist():
                for first in range(start, stop, step):
                    out.append((buffer[first : min(first + step, stop)], self._pattern.tables[dtype], first))
        return out


def _by_dtype(space: CheckpointSpace) -> dict[str, IdArray]:
    """Positions of the tensors that are fed from a buffer, by dtype."""
    found: dict[str, list[int]] = {}
    for position in np.flatnonzero(np.diff(space.starts)).tolist():
        found.setdefault(space.specs[position].dtype, []).append(position)
    return {dtype: np.array(members) for dtype, members in found.items() if holds_codes(dtype)}


def _uncoded(spec: TensorSpec, *, second: bool) -> torch.Tensor:
    """A tensor of a dtype without codes, in memory of its own; flat bytes where torch has no such dtype."""
    if not spec.elements and spec.element_type.storage is not None:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
    unit = np.frombuffer(_UNCODED[spec.dtype][second], dtype=np.uint8)
    raw = torch.from_numpy(np.resize(unit, -(-spec.elements * spec.element_type.bits // 8)))
    if spec.element_type.storage is not None:
        return raw.view(torch_dtype(spec.dtype)).view(spec.shape)
    if spec.dtype == "F4" and spec.shape and spec.shape[-1] % 2 == 0:
        return raw.view(torch.float4_e2m1fn_x2).view(*spec.shape[:-1], spec.shape[-1] // 2)
    return raw


def _place(space: CheckpointSpace, members: Mapping[str, IdArray], period: int) -> IdArray:
    """Where every tensor begins in its dtype's buffer: congruent to its first id, 64-byte aligned, all different."""
    starts = space.starts[:-1]
    out = np.zeros(len(space), dtype=np.int64)
    for dtype, chosen in members.items():
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
