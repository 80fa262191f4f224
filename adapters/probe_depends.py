"""Which checkpoint tensors an opaque parameter is computed from.

Tensors are numbered in binary, and for every binary digit the loader runs on two kinds of values: tensors with a 1
there get one kind, those with a 0 the other. What moves, block by block of the opaque elements, spells the numbers of
the tensors it depends on, in a logarithmic number of loads.

A block that depends on one tensor spells exactly that; one that depends on several mixes their digits, which may name
more tensors than it reads. It shall name none too few: values of both signs show what depends on the sign, and positive
values of separate ranges, raised and lowered in turn, show what a maximum or minimum would hide. What moved in neither
has changed between the codes and the numbers of verification, so these two are tried last.

>>> spelled(np.array([[True, False]]), np.array([[False, True]]), 4).tolist()
[False, False, True, False]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from adapters._probe_kernels import digest_blocks
from adapters.probe_feed import Feeder, Pattern
from adapters.probe_verify import VERIFY_PERIOD, Range, verification_pair
from adapters.probe_worker import ProbedWorker
from adapters.torch_bits import as_bits
from layout_algebra.errors import ProbeError
from layout_algebra.residues import Pass, choose_codebook, coded_dtypes
from layout_algebra.source_map import ParameterMap
from layout_algebra.space import CheckpointSpace

Flags = npt.NDArray[np.bool_]
Digests = dict[str, npt.NDArray[np.uint64]]
Check = Callable[[Pattern, Pattern, Flags], None]

_MOST_BLOCKS = 1 << 16
_SEED = 0xDE9E4D


def find_dependencies(
    worker: ProbedWorker, found: dict[str, ParameterMap], values: Range, check: Check
) -> dict[str, tuple[str, ...]]:
    """For every parameter with opaque elements the checkpoint tensors that they depend on, and perhaps some more.

    Parameters
    ----------
    worker
        Between its verification and the end of its block of kept bits.
    found
        What is known of every live tensor, by first name.
    values
        Which numbers the loader stood in verification.
    check
        Told after every load, while its numbers are live, which patterns it was fed and which tensors got the second.

    Raises
    ------
    ProbeError
        If a parameter holds something else after two loads of the same checkpoint, for the most part.
    """
    opaque = {name: entry for name, entry in found.items() if entry.opaque}
    if not worker.vote(int(bool(opaque))):
        return {}
    names = [spec.name for spec in worker.space.specs if spec.elements]
    positions = np.array([worker.space.position(name) for name in names], dtype=np.int64)
    digits = max(1, (len(names) - 1).bit_length())
    dtypes = coded_dtypes(worker.space)
    search = _Search(worker, opaque, positions, digits, check)
    rounds = [(Range.SIGNED, False)] if values is Range.SIGNED else []
    rounds.append((Range.NARROW if values is Range.NARROW else Range.POSITIVE, True))
    worker.expect(sum(3 + digits * (2 if both_ways else 1) for _, both_ways in rounds))
    for kind, both_ways in rounds:
        search.run(*verification_pair(dtypes, kind), both_ways=both_ways)
    if worker.vote(int(bool(search.unmoved()))):
        worker.expect(3 + digits)
        search.run(_any_codes(worker.space), verification_pair(dtypes, values)[0], both_ways=False)
        for name in search.unmoved():
            worker.note(
                f"{name}: load_weights writes {opaque[name].opaque.elements:,} elements of it that change with no "
                "checkpoint tensor alone; no update reaches them. If they matter, refresh them in after_update_hook"
            )
    return {name: tuple(names[index] for index in np.flatnonzero(search.tensors(name, len(names)))) for name in opaque}


def spelled(zeros: Flags, ones: Flags, count: int) -> Flags:
    """Which of ``count`` numbers some block's digits spell.

    Parameters
    ----------
    zeros, ones
        For every block and binary digit, lowest first, whether it depends on a number with a 0 or a 1 there; shape
        ``(blocks, digits)``. A block without any digit spells nothing; a digit that shows neither may be both.
    count
        How many numbers there are.
    """
    out = np.zeros(count, dtype=np.bool_)
    seen = (zeros | ones).any(axis=1)
    blank = ~(zeros | ones)
    pairs = np.unique(np.concatenate([zeros | blank, ones | blank], axis=1)[seen], axis=0)
    width = zeros.shape[1]
    for pair in pairs:
        numbers = np.zeros(1, dtype=np.int64)
        for digit in range(width):
            zero, one = pair[digit], pair[width + digit]
            grown = numbers | 1 << digit
            numbers = np.concatenate([numbers, grown]) if zero and one else grown if one else numbers
        out[numbers[numbers < count]] = True
        if out.all():
            break
    return out


def _any_codes(space: CheckpointSpace) -> Pattern:
    """Numbers like those of the code passes, at random."""
    tables = {}
    dtypes = coded_dtypes(space)
    if dtypes:
        codebook = choose_codebook(space)
        chosen = np.random.Generator(np.random.SFC64(_SEED)).integers(0, codebook.count, VERIFY_PERIOD)
        tables = {dtype: as_bits(codebook.table(dtype, Pass(codebook.count, 1))[chosen]) for dtype in dtypes}
    return Pattern(tables)


class _Search:
    """Loads on mixtures of two patterns, and what each block of opaque elements made of them."""

    def __init__(
        self,
        worker: ProbedWorker,
        opaque: dict[str, ParameterMap],
        positions: npt.NDArray[np.int64],
        digits: int,
        check: Check,
    ) -> None:
        self._worker = worker
        self._check = check
        self._opaque = opaque
        self._positions = positions
        self._digits = digits
        shapes = {name: (self._blocks(name)[1], digits) for name in opaque}
        self._zeros = {name: np.zeros(shape, dtype=np.bool_) for name, shape in shapes.items()}
        self._ones = {name: np.zeros(shape, dtype=np.bool_) for name, shape in shapes.items()}

    def unmoved(self) -> list[str]:
        """Parameters of which something changed between loads, though nothing with the numbers fed so far."""
        return [name for name in self._opaque if not (self._zeros[name] | self._ones[name]).any()]

    def tensors(self, name: str, count: int) -> Flags:
        return spelled(self._zeros[name], self._ones[name], count)

    def run(self, low: Pattern, high: Pattern, *, both_ways: bool) -> None:
        """Try every digit; ``both_ways`` gives each of its values either pattern in turn."""
        nowhere = np.zeros(len(self._positions), dtype=np.bool_)
        lows = self._load(low, high, nowhere, "low numbers")
        highs = self._load(low, high, ~nowhere, "high numbers")
        steady = self._steady(highs, self._load(low, high, ~nowhere, "high numbers again"))
        numbers = np.arange(len(self._positions))
        for digit in range(self._digits):
            ones = (numbers >> digit & 1).astype(np.bool_)
            for raised in (ones, ~ones) if both_ways else (ones,):
                mixed = self._load(low, high, raised, f"digit {digit + 1} of {self._digits}")
                for name in self._opaque:
                    moved_raised = (mixed[name] != lows[name]) & steady[name]
                    moved_lowered = (mixed[name] != highs[name]) & steady[name]
                    by_one, by_zero = (moved_raised, moved_lowered) if raised is ones else (moved_lowered, moved_raised)
                    self._ones[name][:, digit] |= by_one
                    self._zeros[name][:, digit] |= by_zero

    def _load(self, low: Pattern, high: Pattern, raised: Flags, what: str) -> Digests:
        choice = np.zeros(len(self._worker.space), dtype=np.bool_)
        choice[self._positions] = raised

        def prepare(feeder: Feeder) -> None:
            feeder.prepare(low, high, choice)

        def read() -> Digests:
            self._check(low, high, choice)
            return self._read()

        return self._worker.load(prepare, f"dependencies, {what}", read)

    def _read(self) -> Digests:
        out = {}
        for one in self._worker.live:
            if one.name in self._opaque:
                size, count = self._blocks(one.name)
                out[one.name] = np.zeros(count, dtype=np.uint64)
                digest_blocks(one.bits(), self._opaque[one.name].opaque.intervals.copy(), size, out[one.name])
        return out

    def _blocks(self, name: str) -> tuple[int, int]:
        """Elements a block, and blocks."""
        elements = self._opaque[name].elements
        size = -(-elements // _MOST_BLOCKS)
        return size, -(-elements // size)

    def _steady(self, first: Digests, second: Digests) -> dict[str, Flags]:
        """Which blocks are the same after two loads of the same numbers."""
        steady = {name: first[name] == second[name] for name in first}
        for name, entry in self._opaque.items():
            changed = int((~steady[name]).sum()) * self._blocks(name)[0]
            written = int(entry.copies.elements.sum()) + entry.opaque.elements
            if 2 * changed > written:
                raise ProbeError(
                    f"{name}: two loads of the same checkpoint left different values in about "
                    f"{min(changed, written):,} of the {written:,} elements that load_weights writes; expected the "
                    "same every time. If this is scratch memory, leave it out of `parameters`"
                )
            if changed:
                self._worker.note(f"{name}: about {changed:,} elements differ from load to load; they stay opaque")
        return steady
