"""Traces: a span for everything, and a critical path whose parts add up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_pipeline import Told, executors_of, memory_for, one_to

from transfer_exec.errors import ReportError
from transfer_exec.executor import Executor
from transfer_exec.in_process import run_in_process
from transfer_exec.report import PhaseTimes, Span, Stall, TransferReport, WorkerReport, combine_reports
from transfer_exec.trace import KINDS, critical_path, path_text, write_trace
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.shared_memory import SharedMemoryTransport


def worker(name: str, started_at: float, finished_at: float, *spans: Span) -> WorkerReport:
    none = (0, 0, 0)
    times = started_at, finished_at, None, None
    return WorkerReport(name, 1, "loopback", "cpu", 2, 2, 0, none, none, *times, PhaseTimes(), spans)


def by_hand() -> TransferReport:
    """t packs twice and writes twice to e, which assembles twice; the second assembling is what everybody waits for."""
    t = worker(
        "t",
        10.0,
        16.0,
        Span("pack", 0, "", "", 10.5, 11.5),
        Span("wait", 0, "e", "release", 11.5, 11.75),
        Span("wire", 0, "e", "", 11.75, 13.0),
        Span("pack", 1, "", "", 11.5, 12.5),
        Span("wait", 1, "e", "release", 13.0, 13.0),
        Span("wire", 1, "e", "", 13.0, 15.0),
    )
    e = worker(
        "e",
        10.0,
        17.5,
        Span("wait", 0, "t", "wire", 10.25, 13.25),
        Span("assemble", 0, "", "", 13.25, 14.0),
        Span("wait", 1, "t", "wire", 13.25, 15.25),
        Span("assemble", 1, "", "", 15.25, 17.0),
    )
    report = TransferReport(1, "loopback", 2, {"t": t, "e": e}, None, 0.0, "")
    return replace(
        report,
        stalls={"t": (Stall(9.0, 16.5),), "e": (Stall(9.5, 19.0),)},
        verify_s={"e": 0.75, "t": 0.5},
        verify_from={"e": 17.5, "t": 9.25},
    )


def test_the_critical_path_goes_through_what_others_waited_for() -> None:
    """19.0 <- verify <- 17.5 <- assemble 1 <- 15.25 <- wire 1 <- 13.0 <- wire 0 <- 11.75 <- pack 0 and 1 ..."""
    path = critical_path(by_hand())
    assert path == {"control": 2.5, "pack": 1.25, "wire": 3.25, "assemble": 1.75, "verify": 1.25}
    assert sum(path.values()) == 10.0
    assert list(path) == [kind for kind in KINDS if kind in path]
    assert path_text(by_hand()).startswith("critical path of 10.0000 s: wire 3.2500 s")


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_add_up(seed: int) -> None:
    plan, maps = one_to(3, elements=96, buffer_bytes=64)
    policy = LoopbackPolicy(seed=seed, max_delay=4, reorder=True)
    memory = memory_for(maps)
    report = run_in_process(plan, maps, memory, network=LoopbackNetwork(policy), depth=1 + seed % 3, trace=True)
    took = max(w.finished_at for w in report.workers.values()) - min(w.started_at for w in report.workers.values())
    path = critical_path(report)
    assert sum(path.values()) == pytest.approx(took, rel=1e-6)
    assert min(path.values()) > 0
    for name, mine in report.workers.items():
        assert mine.spans is not None
        rounds = {(span.kind, span.round) for span in mine.spans}
        kind = "pack" if name in plan.holders else "assemble"
        assert {(kind, number) for number in range(plan.rounds)} <= rounds


def traced(executors: Mapping[str, Executor]) -> dict[str, WorkerReport]:
    with ThreadPoolExecutor(len(executors)) as pool:
        done = pool.map(lambda each: each.run(1, trace=True), executors.values())
        return dict(zip(executors, done, strict=True))


@pytest.mark.parametrize(("slow", "kind"), [("trainer/0", "pack"), ("engine/0/1", "assemble")])
def test_what_is_slow_is_on_the_path(slow: str, kind: str) -> None:
    plan, maps = one_to(2, elements=96, buffer_bytes=64)
    executors = executors_of(plan, maps, memory_for(maps), SharedMemoryTransport)
    mine = executors[slow]
    jobs = [Told(job, lambda: time.sleep(0.05), int) for job in getattr(mine, f"_{kind}")]
    setattr(mine, f"_{kind}", jobs)
    path = critical_path(combine_reports(plan, traced(executors)))
    assert path[kind] >= 0.05 * plan.rounds
    assert path[kind] > 0.5 * sum(path.values())


def test_a_trace_has_every_worker_and_round(tmp_path: Path) -> None:
    plan, maps = one_to(2, elements=96, buffer_bytes=64)
    report = run_in_process(plan, maps, memory_for(maps), trace=True)
    write_trace(report, tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(plan.workers)
    assert {event["cat"] for event in spans} <= set(KINDS)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    for number, name in names.items():
        rounds = {event["args"]["round"] for event in spans if event["pid"] == number and "round" in event["args"]}
        assert rounds == set(range(plan.rounds)), name
    assert written["otherData"]["critical_path_s"] == critical_path(report)


def test_control_and_verify_fill_a_stall(tmp_path: Path) -> None:
    write_trace(by_hand(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    mine = [e for e in events if e.get("cat") in ("control", "verify") and e["pid"] == 1]
    assert [(e["cat"], e["ts"] / 1e6, e["dur"] / 1e6) for e in mine] == [
        ("control", 0.5, 0.5),
        ("control", 9.25, 0.75),
        ("verify", 8.5, 0.75),
    ]


def test_an_untraced_update_has_no_path(tmp_path: Path) -> None:
    plan, maps = one_to(1, elements=8, buffer_bytes=64)
    memory = memory_for(maps)
    report = run_in_process(plan, maps, memory)
    assert np.array_equal(memory["engine/0/0"]["w"], memory["trainer/0"]["w"])
    for act in (lambda: critical_path(report), lambda: write_trace(report, tmp_path / "no.json")):
        with pytest.raises(ReportError, match="version 0 was not traced; pass trace to the update"):
            act()
    assert not (tmp_path / "no.json").exists()
