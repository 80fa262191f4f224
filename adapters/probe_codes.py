"""The code passes of a probe: every live tensor after each of them, and what they leave once they are joined.

A pass feeds every element the code of its id modulo a number of that pass. What it leaves of a tensor is a short list
of second differences; the lists of all passes together name the ids. A tensor that can hold no codes is only looked at
for whether it stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from adapters.probe_claims import Codes, claims_of_codes, claims_of_values
from adapters.probe_feed import Feeder, Pattern
from adapters.probe_live import LiveTensor
from adapters.probe_moves import MoveWatch
from adapters.probe_readings import OpenReadings, Reading
from adapters.probe_verify import Claims
from adapters.probe_worker import ProbedWorker
from adapters.torch_bits import as_bits
from layout_algebra.diff2 import Diff2, encode
from layout_algebra.residues import Codebook, Pass, coded_dtypes
from layout_algebra.signal_safe import ThreadPool

MOST_THREADS = 8
_TENSOR_BYTES = 1 << 19

AllClaims: TypeAlias = dict[str, list[Claims]]
"""By first name; one a reading."""


class CodePasses:
    """What the code passes have left so far.

    Parameters
    ----------
    worker
        Between the keeping of its tensors and their return.
    codebook, passes
        What is fed, and in which order.
    memory_limit_bytes
        Bound on the lists that passes leave.

    Attributes
    ----------
    steady
        Claims of the tensors that can hold no codes.
    """

    def __init__(
        self, worker: ProbedWorker, codebook: Codebook, passes: Sequence[Pass], memory_limit_bytes: int
    ) -> None:
        self._worker = worker
        self._codebook = codebook
        self._limit_bytes = memory_limit_bytes
        self._dtypes = coded_dtypes(worker.space)
        self._readings = OpenReadings(codebook, worker.space, worker.live)
        self._diffs: dict[tuple[str, Reading], list[Diff2]] = {}
        self.passes = tuple(passes)
        self.steady: AllClaims = {}

    def load(self, number: int, watch: MoveWatch | None = None) -> None:
        """Make one of the passes, watched if asked."""
        one_pass = self.passes[number]

        def read() -> tuple[dict[tuple[str, Reading], Diff2], AllClaims]:
            left = self._limit_bytes - sum(diff.nbytes for listed in self._diffs.values() for diff in listed)
            coded = [(one, reading) for one in self._worker.live for reading in self.readings(one)]
            return _encode_all(self._worker.executor, coded, one_pass, left), self._check_steady()

        pattern = Pattern({dtype: as_bits(self._codebook.table(dtype, one_pass)) for dtype in self._dtypes})
        what = f"code pass {number + 1} of {len(self.passes)}"
        found, steady = self._worker.load(feeding(pattern), what, read, watch)
        for key, diff in found.items():
            self._diffs.setdefault(key, []).append(diff)
        self.steady.update(steady)
        self._readings.drop_hopeless(self._diffs)

    def readings(self, one: LiveTensor) -> list[Reading]:
        """How a live tensor is read; nothing for one that can hold no codes."""
        return self._readings.of(one.name)

    def diffs(self, one: LiveTensor, reading: Reading) -> list[Diff2]:
        """What every pass made so far has left of a tensor in one reading."""
        return self._diffs[one.name, reading]

    def claims(self) -> AllClaims:
        """What all passes together claim of every tensor, for each one a reading; to be asked once."""
        self._worker.tell("joining passes")
        codes = Codes(self.passes, self._worker.space.total_elements)
        claims = dict(self.steady)
        for one in self._worker.live:
            bits, kept = one.bits(), self._worker.keeper.kept(one.name)
            for reading in self.readings(one):
                diffs = self._diffs.pop((one.name, reading))
                claims.setdefault(one.name, []).append(claims_of_codes(one, bits, kept, diffs, codes, reading))
        return claims

    def _check_steady(self) -> AllClaims:
        """Claims of the tensors that cannot hold codes: made after the first load, checked after the others."""
        made = {}
        for one in self._worker.live:
            if not self.readings(one):
                kept = self._worker.keeper.kept(one.name)
                if one.name in self.steady:
                    self.steady[one.name][0].check_steady(one.bits(), kept)
                else:
                    made[one.name] = [claims_of_values(one, one.bits(), kept)]
        return made


def feeding(pattern: Pattern) -> Callable[[Feeder], None]:
    """What gets a load on one pattern ready."""
    return lambda feeder: feeder.prepare(pattern)


def threads() -> int:
    """How many threads a probe runs on."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _encode_all(
    executor: ThreadPool, coded: Sequence[tuple[LiveTensor, Reading]], one_pass: Pass, limit_bytes: int
) -> dict[tuple[str, Reading], Diff2]:
    """Second differences of every tensor that can hold codes, in every way to read them."""

    def encode_one(pair: tuple[LiveTensor, Reading], executor: ThreadPool | None) -> Diff2:
        one, reading = pair
        return encode(
            one.bits(),
            one.shape,
            reading.decoding,
            one_pass,
            executor=executor,
            name=one.name,
            dense_limit_bytes=max(limit_bytes, 0),
        )

    # Side by side by size, so that no thread waits for another at every tensor; what is too large for that, by chunks,
    # and small ones together: threads that are between two kernels most of the time wait for the interpreter's lock.
    share = sum(one.tensor.nbytes for one, _ in coded) // (4 * threads())
    large = [pair for pair in coded if pair[0].tensor.nbytes > share]
    shared = sorted((pair for pair in coded if pair[0].tensor.nbytes <= share), key=lambda pair: -pair[0].tensor.nbytes)
    diffs = [encode_one(pair, executor) for pair in large]
    for some in executor.map(lambda bundle: [encode_one(pair, None) for pair in bundle], _bundles(shared, share // 16)):
        diffs += some
    return {(one.name, reading): diff for (one, reading), diff in zip([*large, *shared], diffs, strict=True)}


def _bundles(
    pairs: Sequence[tuple[LiveTensor, Reading]], least_bytes: int
) -> Iterator[list[tuple[LiveTensor, Reading]]]:
    """Cut a list into stretches of so many bytes; what reading a tensor costs beside its bytes counts as some."""
    bundle: list[tuple[LiveTensor, Reading]] = []
    size = 0
    for pair in pairs:
        bundle.append(pair)
        size += pair[0].tensor.nbytes + _TENSOR_BYTES
        if size >= least_bytes:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle
