"""An update against the worker's own loader, bit by bit: what ``verify="full"`` does on every rollout.

Once all bytes have landed, the checkpoint's tensors are rebuilt from them by the worker's source map, its own
``load_weights`` is called on all names once more, and whatever it writes is compared with what had landed. Maps that
are wrong and loaders that changed since connect show, and so does a parameter that did not get what another one got.

What this cannot see: bits that were wrong already when they arrived (digests can, and "full" takes them too), elements
that look alike because their bits do, and elements that the map calls empty. Computed elements are compared where it is
known what they depend on; a loader that computes differently each time does not pass.

Memory stays bounded, since loaders take one tensor after the other. A parameter is copied before the first tensor that
feeds it is given, and the copy is let go after the last one. Up to `KEPT_BYTES` copies are made before the loader is
called and kept to the end. Of other parameters sums tell of writes before and after, which fail the update: what had
landed is lost then. For such loaders all copies are kept from the next update on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from adapters.failures import HookError, VerificationError
from adapters.probe_feed import Feed, Feeder, Pattern
from adapters.probe_live import LiveTensor, Parameters, find_live, write_bits
from adapters.probe_worker import run_loader
from adapters.probing import LoadWeights
from adapters.rebuilding import Rebuilding, plan_rebuilding
from adapters.torch_bits import Bits, as_bits, bits_view, tensor_of_bits
from layout_algebra._digest_kernels import digest_strips
from layout_algebra.dtypes import IdArray
from layout_algebra.residues import choose_codebook, coded_dtypes, plan_passes
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.source_map import OPAQUE, SourceMap
from layout_algebra.space import CheckpointSpace

__all__ = ["KEPT_BYTES", "OwnLoad"]

KEPT_BYTES = 1 << 30
"""Copies of parameters beyond this are let go as soon as nothing feeds them any more."""

Staged = Mapping[str, npt.NDArray[np.generic]]
"""Checkpoint tensors that arrived whole, by name: those that computed parameters depend on."""


class OwnLoad:
    """Compares a worker's parameters with what its own loader makes of them.

    Parameters
    ----------
    load_weights, parameters
        As for ``probe``.
    source_map
        What ``probe`` found.
    kept_bytes
        See `KEPT_BYTES`.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        parameters: Parameters,
        source_map: SourceMap,
        *,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._load_weights = load_weights
        self._parameters = parameters
        self._kept_bytes = kept_bytes
        self._rebuilding = plan_rebuilding(source_map)
        self._feeder = _codes(source_map.space)

    def check(self, staged: Staged) -> None:
        """Load what has landed once more, and compare; all that is still kept is put back in any case.

        Parameters
        ----------
        staged
            Checkpoint tensors that are there whole.

        Raises
        ------
        VerificationError
            Naming the first parameter and element that differ, and the bits on both sides.
        HookError
            If the loader raises.
        """
        comparison = _Comparison(find_live(self._parameters), self._rebuilding, self._feeder, staged, self._kept_bytes)
        try:
            run_loader(self._load_weights, Feed(comparison.tensors))
        except Exception as error:
            raise HookError(
                f"load_weights raised when the update was to be compared with its work: {error!r}; it took the same "
                "names when it was probed"
            ) from error
        finally:
            comparison.end(find_live(self._parameters))
        if comparison.outside:
            self._kept_bytes = sys.maxsize
        comparison.raise_faults()


class _Comparison:
    """One call of the loader, watched.

    Attributes
    ----------
    outside
        Whether a parameter was written while there was no copy of it.
    """

    def __init__(
        self,
        live: tuple[LiveTensor, ...],
        rebuilding: Rebuilding,
        feeder: Feeder,
        staged: Staged,
        budget_bytes: int,
    ) -> None:
        self._live = live
        self._rebuilding = rebuilding
        self._map = rebuilding.source_map
        self._feeder = feeder
        self._staged = staged
        self._budget_bytes = budget_bytes
        self._number = {name: number for number, one in enumerate(live) for name in one.names}
        self._windows = [self._window(one) for one in live]
        self._strips = _strips_by_parameter(self._map)
        self._sums = [self._sum(one, one.bits()) for one in live]
        self._kept: dict[int, Bits] = {}
        self._kept_bytes = 0
        self._faults: dict[int, str] = {}
        self.outside = False
        for number in sorted(range(len(live)), key=lambda each: self._windows[each]):
            if self._kept_bytes + live[number].tensor.nbytes > budget_bytes:
                break
            self._keep(number)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every checkpoint tensor in the order of the space: codes, and over them what this worker has of it."""
        opening, closing = _by_edge(self._windows, 0), _by_edge(self._windows, 1)
        for position, (name, tensor) in enumerate(self._feeder.tensors()):
            for number in opening.get(position, ()):
                self._keep(number)
            if name in self._staged:
                arrived = np.ascontiguousarray(self._staged[name]).reshape(-1).view(np.uint8)
                if arrived.size:
                    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(arrived))
            elif self._rebuilding.bounds[position] < self._rebuilding.bounds[position + 1]:
                self._rebuilding.fill(position, bits_view(tensor).reshape(-1), self._bits_of)
            yield name, tensor
            del tensor
            for number in closing.get(position, ()):
                self._compare(number, self._live[number])
                if self._kept_bytes > self._budget_bytes:
                    self._kept_bytes -= self._kept.pop(number).nbytes

    def end(self, now: tuple[LiveTensor, ...]) -> None:
        """Compare all that is kept, and the sums of the rest, and give the worker its memory back."""
        there = {name: one for one in now for name in one.names}
        for number, one in enumerate(self._live):
            found = there.get(one.name)
            if found is None or (found.shape, found.dtype) != (one.shape, one.dtype):
                change = "is gone" if found is None else f"became {found.dtype} {found.shape}"
                self._note(number, f"{one.name}: {change} when its own loader was called")
            elif number in self._kept:
                self._compare(number, found)
            elif self._sum(found, found.bits()) != self._sums[number]:
                self.outside = True
                self._note(
                    number,
                    f"{one.name}: its own load_weights wrote other bits than had landed, after it "
                    "had been given the last tensor that feeds it; the next update will tell which",
                )
            if found is not None and found.tensor.data_ptr() != one.tensor.data_ptr():
                found.owners[found.names.index(one.name)].data = one.tensor
            if number in self._kept:
                write_bits(one, self._kept[number])

    def raise_faults(self) -> None:
        """Raise for the first parameter that differs."""
        if not self._faults:
            return
        first, *others = sorted(self._faults)
        more = f"; {len(others)} more parameters differ, {self._live[others[0]].name} among them" if others else ""
        raise VerificationError(
            f"{self._faults[first]}{more}. Either the loader does something else than when it was probed, or not "
            "everything landed where the map says; connect again, and do not use this version"
        )

    # Inside

    def _window(self, one: LiveTensor) -> tuple[int, int]:
        mine = [self._rebuilding.windows[self._map.parameters.index(n)].tolist() for n in one.names if n in self._map]
        fed = [window for window in mine if window[0] >= 0]
        return (min(first for first, _ in fed), max(last for _, last in fed)) if fed else (-1, -1)

    def _bits_of(self, name: str) -> Bits:
        return self._kept[self._number[name]]

    def _keep(self, number: int) -> None:
        if number in self._kept:
            return
        one = self._live[number]
        bits = np.array(one.bits(), copy=True)
        if self._sum(one, bits) != self._sums[number]:
            self.outside = True
            self._note(
                number,
                f"{one.name}: its own load_weights wrote to it before it was given any tensor that "
                "the map says it is fed from, so that what had landed is lost; the next update will have a copy",
            )
        self._kept[number] = bits
        self._kept_bytes += bits.nbytes

    def _compare(self, number: int, now: LiveTensor) -> None:
        landed, made = self._kept[number], now.bits()
        if np.array_equal(landed, made):
            return
        wrong = np.flatnonzero(landed != made)
        for name in self._live[number].names:
            covered = wrong[self._is_covered(name, wrong, landed, made)] if name in self._map else wrong[:0]
            if len(covered):
                at = int(covered[0])
                self._note(
                    number,
                    f"{name}: element {self._describe(name, at)} is {_hex(landed[at])} after the "
                    f"update, and its own load_weights makes it {_hex(made[at])}; {len(covered):,} elements differ",
                )
        write_bits(self._live[number], landed)

    def _is_covered(self, name: str, wrong: IdArray, landed: Bits, made: Bits) -> npt.NDArray[np.bool_]:
        """Which of some elements that differ must not.

        What is no number and was converted may: which bits are left of it is the processor's affair.
        """
        entry, space = self._map[name], self._map.space
        ids = self._map.ids(name).reshape(-1)[wrong]
        known = bool(entry.depends_on) and all(tensor in self._staged for tensor in entry.depends_on)
        number, of_tensor = space.dtype_numbers
        source = of_tensor[np.searchsorted(space.starts, np.maximum(ids, 1), side="right") - 1]
        nan = [tensor_of_bits(bits[wrong], entry.dtype, wrong.shape).isnan().numpy() for bits in (landed, made)]
        converted = (ids > 0) & (source != number.get(entry.dtype, -1))
        return np.asarray(((ids > 0) | ((ids == OPAQUE) & known)) & ~(converted & nan[0] & nan[1]))

    def _describe(self, name: str, at: int) -> str:
        entry = self._map[name]
        index = list(map(int, np.unravel_index(at, entry.shape))) if entry.shape else []
        of = int(self._map.ids(name).reshape(-1)[at])
        if of == OPAQUE:
            return f"{index}, computed from {', '.join(entry.depends_on)},"
        return f"{index}, a copy of {self._map.space.describe_ids(of, of + 1)},"

    def _note(self, number: int, fault: str) -> None:
        self._faults.setdefault(number, fault)

    def _sum(self, one: LiveTensor, bits: Bits) -> int:
        """A number that every change of a copied element changes."""
        out = np.zeros(1, dtype=np.uint64)
        for name in one.names:
            if name in self._strips:
                digest_strips(bits, self._strips[name], out)
        return int(out[0])


def _codes(space: CheckpointSpace) -> Feeder:
    """Tensors of their own memory, full of the numbers that a probe begins with."""
    dtypes = coded_dtypes(space)
    tables, periods = {}, [1]
    if dtypes:
        codebook = choose_codebook(space)
        first = plan_passes(codebook, space.total_elements)[0]
        tables, periods = {dtype: as_bits(codebook.table(dtype, first)) for dtype in dtypes}, [first.modulus]
    with ThreadPool(1, "own load") as executor:
        feeder = Feeder(space, periods, executor)
        feeder.make_private()
        feeder.prepare(Pattern(tables))
    return feeder


def _strips_by_parameter(source_map: SourceMap) -> dict[str, IdArray]:
    """What the sum of every parameter is over, copies of one id apart from each other."""
    rows = source_map.strips.rows
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    bounds = np.searchsorted(rows[:, 2], np.arange(len(source_map.parameters) + 1))
    out = {}
    for number, name in enumerate(source_map.parameters):
        mine = rows[bounds[number] : bounds[number + 1]]
        length = mine[:, 1]
        # By place and not by id: two places of one id that swap their bits must show.
        begins = np.cumsum(length) - length + 1
        out[name] = np.column_stack([begins, mine[:, [1, 3, 4]], np.zeros_like(length)])
    return out


def _by_edge(windows: list[tuple[int, int]], edge: int) -> dict[int, list[int]]:
    """Numbers of the tensors whose windows begin (0) or end (1) at every position."""
    out: dict[int, list[int]] = {}
    for number, window in enumerate(windows):
        if window[0] >= 0:
            out.setdefault(window[edge], []).append(number)
    return out


def _hex(bits: np.generic) -> str:
    return f"{int(bits):#0{2 + 2 * bits.itemsize}x}"
