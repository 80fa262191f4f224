"""Where an update's time went: a Chrome trace of every worker and round, and the critical path by kind.

A worker's spans say what it did in which round: ``pack``, writing in each stage (``wire``, ``external``, ``internal``),
``assemble``, and ``wait`` for a message or for a peer's buffers. ``verify`` is digesting, ``control`` everything else
that its caller could not compute in.

The critical path is found backwards from the worker that resumed last: what it did just before, and where it waited,
what the peer it waited for did. So it is one line through all workers, without gaps, and its parts add up to the EWTT.

::

    report = run_in_process(plan, maps, memory, trace=True)
    critical_path(report)              # {"control": 0.001, "pack": 0.04, "wire": 0.1, "assemble": 0.03}
    write_trace(report, "trace.json")  # open it in chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transfer_exec.errors import ReportError
from transfer_exec.report import Span, TransferReport, WorkerReport

KINDS = ("control", "wait", "pack", "wire", "external", "internal", "assemble", "verify")
"""Kinds of spans, in the order of tables."""


def critical_path(report: TransferReport) -> dict[str, float]:
    """Seconds of each kind on the line from the first worker that stopped to the last that resumed.

    Where nobody computes, as in `run_in_process`, from the first that started to the last that finished. The values add
    up to that time.

    Raises
    ------
    ReportError
        If the update was not traced.
    """
    spans = {worker: _all_spans(report, worker) for worker in report.workers}
    first = min(_window(report, worker)[0] for worker in report.workers)
    worker = max(report.workers, key=lambda each: _window(report, each)[1])
    now = _window(report, worker)[1]
    seconds = dict.fromkeys(KINDS, 0.0)
    waited: set[Span] = set()
    step: Span | None = None
    while now > first:
        step = step or _latest(spans[worker], now, waited)
        reached = max(first, min(step.stop, now)) if step is not None else first
        seconds["control"] += now - reached
        now = reached
        if step is None or now <= first:
            break
        if step.kind == "wait":
            waited.add(step)
            cause = _cause(step, worker, spans.get(step.peer, ()), now)
            if cause is not None and cause.stop > step.start:
                worker, step = step.peer, cause
                continue
        begun = max(first, step.start)
        seconds[step.kind] += now - begun
        now, step = begun, None
    return {kind: took for kind, took in seconds.items() if took}


def path_text(report: TransferReport) -> str:
    """The critical path as a line of text, longest first."""
    path = critical_path(report)
    total = sum(path.values())
    parts = sorted(path.items(), key=lambda each: -each[1])
    return f"critical path of {total:.4f} s: " + ", ".join(f"{kind} {took:.4f} s" for kind, took in parts)


def write_trace(report: TransferReport, path: str | Path) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev: a process per worker, a track per slot.

    Raises
    ------
    ReportError
        If the update was not traced.
    """
    start = min(_window(report, worker)[0] for worker in report.workers)
    events: list[dict[str, object]] = []
    for number, worker in enumerate(report.workers):
        depth = report.workers[worker].depth
        names = {0: "update", **{1 + slot: f"slot {slot}" for slot in range(depth)}}
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": worker}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": number, "tid": track, "args": {"name": name}}
            for track, name in names.items()
        ]
        for span in (*_control(report, worker), *_all_spans(report, worker)):
            about = {"round": span.round, "peer": span.peer, "of": span.of}
            events.append(
                {
                    "ph": "X",
                    "name": span.kind if span.round < 0 else f"{span.kind} {span.round}",
                    "cat": span.kind,
                    "pid": number,
                    "tid": 0 if span.round < 0 else 1 + span.round % depth,
                    "ts": (span.start - start) * 1e6,
                    "dur": (span.stop - span.start) * 1e6,
                    "args": {key: value for key, value in about.items() if value not in ("", -1)},
                }
            )
    path_s = critical_path(report)
    other = {"version": report.version, "transport": report.transport, "critical_path_s": path_s}
    if report.measures is not None:
        other["ewtt_s"] = report.measures.ewtt_s
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}))


def _window(report: TransferReport, worker: str) -> tuple[float, float]:
    """From when to when a worker could not compute."""
    stalls = report.stalls.get(worker, ())
    mine = report.workers[worker]
    if not stalls:
        return mine.started_at, mine.finished_at
    return min(stall.start for stall in stalls), max(stall.stop for stall in stalls)


def _all_spans(report: TransferReport, worker: str) -> tuple[Span, ...]:
    mine = report.workers[worker]
    if mine.spans is None:
        raise ReportError(f"{worker}: version {report.version} was not traced; pass trace to the update")
    if worker not in report.verify_from:
        return mine.spans
    start = report.verify_from[worker]
    return (*mine.spans, Span("verify", -1, "", "", start, start + report.verify_s[worker]))


def _control(report: TransferReport, worker: str) -> list[Span]:
    """What is left of a worker's stall before and after its program and its digests."""
    start, stop = _window(report, worker)
    busy = _busy(report.workers[worker], report, worker)
    out = []
    for begin, end in (*busy, (stop, stop)):
        if begin > start:
            out.append(Span("control", -1, "", "", start, min(begin, stop)))
        start = max(start, end)
    return out


def _busy(mine: WorkerReport, report: TransferReport, worker: str) -> list[tuple[float, float]]:
    times = [(mine.started_at, mine.finished_at)]
    if worker in report.verify_from:
        start = report.verify_from[worker]
        times.append((start, start + report.verify_s[worker]))
    return sorted(times)


def _latest(spans: Sequence[Span], now: float, waited: set[Span]) -> Span | None:
    """What a worker did just before: of the spans that had begun, the one that reaches nearest to now."""
    begun = [span for span in spans if span.start < now and span not in waited]
    return max(begun, key=lambda span: (min(span.stop, now), span.kind != "wait", span.start), default=None)


def _cause(wait: Span, worker: str, theirs: Sequence[Span], now: float) -> Span | None:
    """What a peer did that ended a wait: its write, or the last it did before it released its buffers."""
    begun = [span for span in theirs if span.start < now]
    if wait.of != "release":
        begun = [s for s in begun if (s.kind, s.round, s.peer) == (wait.of, wait.round, worker)]
    else:
        begun = [span for span in begun if span.kind != "wait" and 0 <= span.round < wait.round]
    return max(begun, key=lambda span: (min(span.stop, now), span.start), default=None)
