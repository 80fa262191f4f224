"""Discovery: run a worker's own ``load_weights`` on index-coded checkpoints and read off what every element copies.

The loader is a black box. It is called a few times with tensors whose values encode element ids (code passes), then
twice with unstructured numbers (verification), and all parameters get their own bits back, also when it raises.

>>> import torch
>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec("q", (2, 3), "F32"), TensorSpec("k", (2, 3), "F32")])
>>> held = {"qk": torch.zeros(2, 6)}
>>> def load_weights(weights):
...     loaded = dict(weights)
...     held["qk"].copy_(torch.cat([loaded["q"], loaded["k"]], dim=1))
>>> [str(copy) for copy in probe(load_weights, held, space).slice_copies("qk")]
['0+(2:6,3:1) <- 7+(2:3,3:1)', '3+(2:6,3:1) <- 1+(2:3,3:1)']
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from adapters.probe_claims import Codes, claims_of_codes, claims_of_values
from adapters.probe_depends import find_dependencies
from adapters.probe_feed import Feeder, Pattern
from adapters.probe_live import LiveTensor, Parameters, live_tensors
from adapters.probe_readings import OpenReadings, Reading
from adapters.probe_settle import settle
from adapters.probe_verify import VERIFY_PERIOD, Claims, Prediction, Range, predict, verification_pair
from adapters.probe_worker import LoadWeights, ProbedWorker, Progress
from adapters.probe_writes import WriteWatch
from adapters.torch_bits import as_bits
from adapters.trace_compare import probe_against_trace
from adapters.tracing import trace
from layout_algebra.diff2 import Diff2, encode
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LoaderRaisedError, LoaderWroteNothingError, ProbeError
from layout_algebra.residues import Codebook, Pass, choose_codebook, holds_codes, plan_passes
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace

__all__ = ["DEFAULT_MEMORY_LIMIT_BYTES", "Extractor", "LoadWeights", "Progress", "live_tensors", "probe"]

Extractor: TypeAlias = Literal["probe", "trace", "both"]

DEFAULT_MEMORY_LIMIT_BYTES = 4 << 30
_MOST_THREADS = 8

AllClaims: TypeAlias = dict[str, list[Claims]]
"""By first name; one a reading."""
Choice: TypeAlias = npt.NDArray[np.bool_]

_log = logging.getLogger(__name__)


def probe(
    load_weights: LoadWeights,
    parameters: Parameters,
    space: CheckpointSpace,
    *,
    agree: Callable[[int], int] | None = None,
    progress: Progress | None = None,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    extractor: Extractor = "probe",
) -> SourceMap:
    """Find the source map of a worker by running its loader.

    Parameters
    ----------
    load_weights
        The engine's own loader, together with whatever the engine does after loading. It gets all tensors of the
        checkpoint, in natural name order, as ``(name, tensor)`` pairs in host memory. A generator that it returns
        is run to its end.
    parameters
        Live tensors by name, or a callable that lists them anew after every load, for loaders that replace them.
        ``live_tensors(module)`` lists a module's.
    space
        The checkpoint.
    agree
        The maximum of a number over all ranks of the model, for loaders that communicate: it is asked once after
        every load, on every rank equally often.
    progress
        Told about every step.
    memory_limit_bytes
        Bound on memory beside the copy of the parameters: the buffer that feeds (about the largest checkpoint
        tensor) and the lists that passes leave.
    extractor
        ``"trace"`` follows the loader's torch operations without values (see ``adapters.tracing``; ``agree`` and
        ``memory_limit_bytes`` have no meaning then). ``"both"`` does both, gives the probe's map, and reports what
        differs through the log and ``progress``.

    Returns
    -------
    SourceMap
        For every name the final tensor's elements: copy of one id, empty, or opaque. ``written_twice`` names parameters
        of which some element was loaded twice, where some checkpoint element is lost; the map tells the last load.

    Raises
    ------
    UnsupportedDtypeError
        If a live tensor's dtype cannot be carried; nothing was loaded.
    SpaceError
        If too few numbers are exact in all of the checkpoint's dtypes for its size; nothing was loaded.
    LoaderRaisedError
        If the loader raised; its exception is chained.
    LoaderWroteNothingError
        If no element came from the checkpoint.
    ParameterReplacedError
        If the live tensors' names or sizes change from call to call.
    TracingError
        If the loader was to be traced and does what tracing cannot follow.
    ProbeError
        Its parent, for what else stops discovery, and for two extractors that contradict each other. In every case all
        tensors have their own bits again.

    Notes
    -----
    Costs ``passes + 2`` loads, five for up to 3.5e9 elements, plus about as much again for copying and reading the
    parameters. Loads are repeated with private copies for a loader that writes into its input or keeps it, and with
    tamer numbers for one that refuses those of verification.
    """
    if extractor != "probe":
        return _with_trace(
            extractor,
            lambda: probe(
                load_weights, parameters, space, agree=agree, progress=progress, memory_limit_bytes=memory_limit_bytes
            ),
            lambda: trace(load_weights, parameters, space, progress=progress).source_map,
            progress,
        )
    codebook = choose_codebook(space)
    passes = plan_passes(codebook, space.total_elements)
    with ThreadPoolExecutor(_threads(), thread_name_prefix="probe") as executor:
        feeder = Feeder(space, [*(one.modulus for one in passes), VERIFY_PERIOD], executor)
        if feeder.bank_bytes > memory_limit_bytes:
            raise ProbeError(
                f"feeding this checkpoint takes a buffer of {feeder.bank_bytes:,} bytes, about its largest tensor; "
                f"memory_limit_bytes is {memory_limit_bytes:,}"
            )
        worker = ProbedWorker(load_weights, parameters, space, agree, progress, executor, feeder, len(passes) + 2)
        with worker.kept():
            claims = _read_codes(worker, codebook, passes, memory_limit_bytes - feeder.bank_bytes)
            values, lost = _verify(worker, claims)
            found, depends = _settle_all(worker, claims, values, lost)
    settled = {name: replace(entry, depends_on=depends.get(name, ())) for name, entry in found.items()}
    return SourceMap(space, {name: settled[one.name] for one in worker.live for name in one.names})


def _with_trace(
    extractor: str, probed: Callable[[], SourceMap], traced: Callable[[], SourceMap], progress: Progress | None
) -> SourceMap:
    if extractor == "trace":
        return traced()
    if extractor != "both":
        raise ProbeError(f'extractor {extractor!r}; expected "probe", "trace" or "both"')

    def note(text: str) -> None:
        _log.warning(text)
        if progress is not None:
            progress(text, 0, 1)

    return probe_against_trace(probed, traced, note)


def _settle_all(
    worker: ProbedWorker, claims: AllClaims, values: Range, lost: Mapping[str, IdArray]
) -> tuple[dict[str, ParameterMap], dict[str, tuple[str, ...]]]:
    """Every live tensor's map, and what the opaque ones depend on.

    The loads of that search verify the copies in parameters with opaque elements too, on mixtures that no selection
    stands. Where that refutes one, the search is made again for what has become opaque.
    """
    while True:
        found = worker.together(lambda: _settle(worker, claims, lost), "settling what verification left")
        doubtful = [one.name for one in worker.live if found[one.name].opaque and len(found[one.name].copies)]

        def check(low: Pattern, high: Pattern, choice: Choice, doubtful: Sequence[str] = doubtful) -> None:
            by_name = {one.name: one for one in worker.live}
            chosen = [by_name[name] for name in doubtful]
            _check_copies(worker, claims, chosen, (low, high), {}, choice)

        standing = _standing(claims, doubtful)
        depends = find_dependencies(worker, found, values, check)
        if not worker.vote(int(_standing(claims, doubtful) < standing)):
            return found, depends


def _standing(claims: AllClaims, names: Sequence[str]) -> int:
    """How many pieces of some tensors stand as copies."""
    return sum(int(one.standing.sum()) for name in names for one in claims[name])


def _settle(worker: ProbedWorker, claims: AllClaims, lost: Mapping[str, IdArray]) -> dict[str, ParameterMap]:
    found = {one.name: settle(claims[one.name], worker.space) for one in worker.live}
    _check_wrote(found)
    for name, elements in lost.items():
        if len(elements):
            found[name] = replace(found[name], written_twice=RunTable.from_ids(elements))
            worker.note(
                f"{name}: {len(elements):,} elements are loaded twice, such as element {elements[0]:,}; the map tells "
                "what the last load wrote. If that is not meant, shards overlap or two tensors share the memory"
            )
    return found


def _read_codes(worker: ProbedWorker, codebook: Codebook, passes: Sequence[Pass], memory_limit_bytes: int) -> AllClaims:
    """Run the code passes and join what they leave into claims, for each live tensor one a reading."""
    dtypes = sorted({spec.dtype for spec in worker.space.specs if spec.elements and holds_codes(spec.dtype)})
    readings = OpenReadings(codebook, worker.space, worker.live)
    diffs: dict[tuple[str, Reading], list[Diff2]] = {}
    claims: AllClaims = {}
    for number, one_pass in enumerate(passes):

        def read(one_pass: Pass = one_pass) -> tuple[dict[tuple[str, Reading], Diff2], AllClaims]:
            left = memory_limit_bytes - sum(diff.nbytes for listed in diffs.values() for diff in listed)
            coded = [(one, reading) for one in worker.live for reading in readings.of(one.name)]
            return _encode_all(worker, coded, one_pass, left), _check_values(worker, readings, claims)

        pattern = Pattern({dtype: as_bits(codebook.table(dtype, one_pass)) for dtype in dtypes})
        what = f"code pass {number + 1} of {len(passes)}"
        found, steady = worker.load(_feeding(pattern), what, read)
        for key, diff in found.items():
            diffs.setdefault(key, []).append(diff)
        claims.update(steady)
        readings.drop_hopeless(diffs)
    worker.tell("joining passes")
    codes = Codes(passes, worker.space.total_elements)
    for one in worker.live:
        bits, kept = one.bits(), worker.keeper.kept(one.name)
        for reading in readings.of(one.name):
            found_claims = claims_of_codes(one, bits, kept, diffs.pop((one.name, reading)), codes, reading)
            claims.setdefault(one.name, []).append(found_claims)
    return claims


def _feeding(pattern: Pattern) -> Callable[[Feeder], None]:
    return lambda feeder: feeder.prepare(pattern)


def _encode_all(
    worker: ProbedWorker, coded: Sequence[tuple[LiveTensor, Reading]], one_pass: Pass, limit_bytes: int
) -> dict[tuple[str, Reading], Diff2]:
    """Second differences of every tensor that can hold codes, in every way to read them."""

    def encode_one(pair: tuple[LiveTensor, Reading], executor: Executor | None) -> Diff2:
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

    # Side by side by size, so that no thread waits for another at every tensor; what is too large for that, by chunks.
    share = sum(one.tensor.nbytes for one, _ in coded) // (4 * _threads())
    large = [pair for pair in coded if pair[0].tensor.nbytes > share]
    shared = sorted((pair for pair in coded if pair[0].tensor.nbytes <= share), key=lambda pair: -pair[0].tensor.nbytes)
    diffs = [encode_one(pair, worker.executor) for pair in large]
    diffs += worker.executor.map(lambda pair: encode_one(pair, None), shared)
    return {(one.name, reading): diff for (one, reading), diff in zip([*large, *shared], diffs, strict=True)}


def _check_values(worker: ProbedWorker, readings: OpenReadings, claims: AllClaims) -> AllClaims:
    """Claims of the tensors that cannot hold codes: made after the first load, checked after the others."""
    made = {}
    for one in worker.live:
        if not readings.of(one.name):
            kept = worker.keeper.kept(one.name)
            if one.name in claims:
                claims[one.name][0].check_steady(one.bits(), kept)
            else:
                made[one.name] = [claims_of_values(one, one.bits(), kept)]
    return made


def _verify(worker: ProbedWorker, claims: AllClaims) -> tuple[Range, dict[str, IdArray]]:
    """Run both verification passes, with tamer numbers for a loader that refuses the first ones.

    Returns
    -------
    tuple
        The numbers that it stood, and the elements of every live tensor that it loaded twice. They are watched for only
        where some checkpoint element is held nowhere: else no load was lost.
    """
    dtypes = [spec.dtype for spec in worker.space.specs if spec.elements]
    watch = None if _holds_all(worker.space, claims) else WriteWatch()
    lost: dict[str, IdArray] = {}
    for values in Range:
        try:
            for letter, pattern in zip("AB", verification_pair(dtypes, values), strict=True):
                predictions: dict[Reading, Prediction] = {}
                watching = watch if letter == "A" else None

                def read(
                    pattern: Pattern = pattern,
                    predictions: dict[Reading, Prediction] = predictions,
                    watching: WriteWatch | None = watching,
                ) -> bool:
                    _compare(worker, claims, pattern, predictions)
                    if watching is not None:
                        lost.update((one.name, watching.lost(one.tensor)) for one in worker.live)
                    return True

                worker.load(_feeding(pattern), f"verification {letter}", read, watching)
        except LoaderRaisedError as error:
            if values is Range.NARROW:
                raise
            worker.note(f"{error}; trying again with tamer numbers")
        else:
            if values is not Range.SIGNED:
                worker.note(f"load_weights refused the wider numbers of verification: {values.value}")
            return values, lost
    raise AssertionError("unreachable: the last range returns or raises")


def _holds_all(space: CheckpointSpace, claims: AllClaims) -> bool:
    """Whether every checkpoint element seems to be held."""
    tables = [one.copies for several in claims.values() for one in several]
    if sum(int(table.elements.sum()) for table in tables) < space.total_elements:
        return False
    return RunTable.from_runs(CopyTable.concatenate(tables).source_runs()[0]).elements == space.total_elements


def _compare(worker: ProbedWorker, claims: AllClaims, pattern: Pattern, predictions: dict[Reading, Prediction]) -> None:
    _check_copies(worker, claims, worker.live, (pattern,), predictions)
    for one in worker.live:
        bits, kept = one.bits(), worker.keeper.kept(one.name)
        for mine in claims[one.name]:
            mine.check_steady(bits, kept)


def _check_copies(
    worker: ProbedWorker,
    claims: AllClaims,
    live: Sequence[LiveTensor],
    patterns: Sequence[Pattern],
    predictions: dict[Reading, Prediction],
    choice: Choice | None = None,
) -> None:
    """Refute copies that do not hold what they were fed; ``choice`` as ``predict`` takes it."""
    pending: list[Callable[[], None]] = []
    for one in live:
        bits = one.bits()
        for mine in claims[one.name]:
            if len(mine.copies) and mine.reading is not None:
                if mine.reading not in predictions:
                    predictions[mine.reading] = predict(worker.space, patterns, one.dtype, mine.reading, choice)
                pending.append(mine.check_copies(bits, predictions[mine.reading], worker.executor))
                if not one.in_place:
                    _finish(pending)
    _finish(pending)


def _finish(pending: list[Callable[[], None]]) -> None:
    while pending:
        pending.pop(0)()


def _check_wrote(found: dict[str, ParameterMap]) -> None:
    """Refuse a loader under which nothing came from the checkpoint, unless there is nothing to fill."""
    elements = sum(entry.elements for entry in found.values())
    if elements and not any(len(entry.copies) or entry.opaque for entry in found.values()):
        raise LoaderWroteNothingError(
            f"load_weights returned, but none of the {elements:,} elements of {len(found)} live tensors came from the "
            "checkpoint; expected some. Check that the names it knows are the checkpoint's, and that `parameters` "
            "lists the tensors it writes (a callable, if it replaces them)"
        )


def _describe(error: Exception | None) -> str:
    return "on another rank" if error is None else f"{type(error).__name__}: {error}"


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
