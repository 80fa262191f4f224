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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from adapters.probe_checking import Choice, check_copies, verify
from adapters.probe_codes import AllClaims, CodePasses, threads
from adapters.probe_depends import find_dependencies
from adapters.probe_feed import Feeder, Pattern
from adapters.probe_live import Parameters, live_tensors
from adapters.probe_moves import MoveWatch
from adapters.probe_naming import NamingPlan, is_worth_naming, plan_naming, verify_by_name
from adapters.probe_settle import settle, tensors_refuted
from adapters.probe_verify import VERIFY_PERIOD, Range
from adapters.probe_worker import LoadWeights, ProbedWorker, Progress
from adapters.trace_compare import probe_against_trace
from adapters.tracing import trace
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LoaderWroteNothingError, ProbeError
from layout_algebra.residues import choose_codebook, plan_passes
from layout_algebra.runs import RunTable
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, natural_key

__all__ = ["DEFAULT_MEMORY_LIMIT_BYTES", "Extractor", "LoadWeights", "Progress", "live_tensors", "probe"]

Extractor: TypeAlias = Literal["probe", "trace", "both"]

DEFAULT_MEMORY_LIMIT_BYTES = 4 << 30

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
    parameters; one or two loads less for a large checkpoint of which the worker holds long pieces only, which it moves
    without looking at them (``probe_naming``).
    Loads are repeated with private copies for a loader that writes into its input or keeps it, and with tamer numbers
    for one that refuses those of verification.
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
    with ThreadPool(threads(), "probe") as executor:
        naming = plan_naming(space, passes, memory_limit_bytes // 4)
        feeder = Feeder(space, [*(one.modulus for one in passes), VERIFY_PERIOD, naming.period], executor)
        if feeder.bank_bytes > memory_limit_bytes:
            raise ProbeError(
                f"feeding this checkpoint takes a buffer of {feeder.bank_bytes:,} bytes, about its largest tensor; "
                f"memory_limit_bytes is {memory_limit_bytes:,}"
            )
        worker = ProbedWorker(load_weights, parameters, space, agree, progress, executor, feeder, len(passes) + 2)
        with worker.kept():
            codes = CodePasses(worker, codebook, passes, memory_limit_bytes - feeder.bank_bytes)
            claims, values, lost = _discover(worker, codes, naming)
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


def _discover(
    worker: ProbedWorker, codes: CodePasses, naming: NamingPlan
) -> tuple[AllClaims, Range, dict[str, IdArray]]:
    """Verified claims, the numbers that the loader stood in verification, and elements that were loaded twice."""
    watch = MoveWatch(worker.feeder.may_hold) if is_worth_naming(worker.space) else None
    for number in range(naming.passes):
        codes.load(number, None if number else watch)
    named = None if watch is None else verify_by_name(worker, codes, naming, watch)
    if named is not None:
        claims, lost = named
        return claims, Range.SIGNED, lost
    for number in range(naming.passes, len(codes.passes)):
        codes.load(number)
    claims = codes.claims()
    return claims, *verify(worker, claims)


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
            check_copies(worker, claims, chosen, (low, high), choice)

        standing = _standing(claims, doubtful)
        depends = find_dependencies(worker, found, values, check)
        if not worker.vote(int(_standing(claims, doubtful) < standing)):
            for name in found:
                if found[name].opaque:
                    named = {*depends.get(name, ()), *tensors_refuted(claims[name], worker.space)}
                    depends[name] = tuple(sorted(named, key=natural_key))
            return found, depends


def _standing(claims: AllClaims, names: Sequence[str]) -> int:
    """How many pieces of some tensors stand as copies."""
    return sum(int(one.standing.sum()) for name in names for one in claims[name])


def _settle(worker: ProbedWorker, claims: AllClaims, lost: Mapping[str, IdArray]) -> dict[str, ParameterMap]:
    found = {one.name: settle(claims[one.name], worker.space) for one in worker.live}
    for one in worker.live:
        kept = worker.keeper.kept(one.name)
        if once := max((mine.left_by_one_load(kept) for mine in claims[one.name]), default=0):
            raise ProbeError(
                f"{one.name}: {once:,} elements hold what one load of the probe left there, and later loads did not "
                "change it; expected load_weights to do the same every time. Reset what it remembers of earlier calls, "
                "such as names that it has loaded"
            )
    _check_wrote(found)
    names = {one.name: " and ".join(one.names) for one in worker.live}
    for name, elements in lost.items():
        if len(elements):
            found[name] = replace(found[name], written_twice=RunTable.from_ids(elements))
            worker.note(
                f"{names[name]}: {len(elements):,} elements are loaded twice, such as element {elements[0]:,}; the map "
                "tells what the last load wrote. If that is not meant, shards overlap or two tensors share the memory"
            )
    return found


def _check_wrote(found: dict[str, ParameterMap]) -> None:
    """Refuse a loader under which nothing came from the checkpoint, unless there is nothing to fill."""
    elements = sum(entry.elements for entry in found.values())
    if elements and not any(len(entry.copies) or entry.opaque for entry in found.values()):
        raise LoaderWroteNothingError(
            f"load_weights returned, but none of the {elements:,} elements of {len(found)} live tensors came from the "
            "checkpoint; expected some. Check that the names it knows are the checkpoint's, and that `parameters` "
            "lists the tensors it writes (a callable, if it replaces them)"
        )
