"""Reports: measures from events, with fixed boundaries; what is missing is an error."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from layout_algebra.runs import RunTable
from transfer_exec.errors import ReportError
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.report import (
    PhaseTimes,
    Stall,
    WorkerEvents,
    WorkerReport,
    combine_reports,
    measure,
)

PLAN = Plan(
    "x",
    ("t",),
    ("a", "b"),
    (0, 1, 1),
    (Route(RunTable.from_ids(range(10)), 4, "t", (Hop(Stage.RECEIVE, "t", "a"), Hop(Stage.INTERNAL, "a", "b"))),),
    2,
    100,
    0.5,
    "egress of t",
    0.5,
    0.5,
)


def report_of(
    worker: str, sent: tuple[int, int, int], received: tuple[int, int, int], first: float, last: float
) -> WorkerReport:
    times = first - 1, last + 1, first, last
    return WorkerReport(worker, 3, "loopback", "cpu", 2, 1, 0, sent, received, *times, PhaseTimes())


REPORTS = {
    "t": report_of("t", (40, 0, 0), (0, 0, 0), 10.0, 11.0),
    "a": report_of("a", (0, 0, 40), (40, 0, 0), 10.5, 11.5),
    "b": report_of("b", (0, 0, 0), (0, 0, 40), 10.7, 12.0),
}
EVENTS = {
    "t": WorkerEvents((Stall(9.0, 12.0),), called_at=9.0),
    "a": WorkerEvents((Stall(9.5, 10.0), Stall(12.0, 13.0)), ready_at=12.5),
    "b": WorkerEvents((Stall(9.5, 12.5),), ready_at=14.0),
}


def test_measures_have_their_boundaries() -> None:
    measures = measure(PLAN, EVENTS)
    assert measures.ewtt_s == 4.0, "9.0 to 13.0"
    assert measures.stall_s == {"t": 3.0, "a": 1.5, "b": 3.0}
    assert measures.agst_s == 2.5
    assert measures.rollout_pause_s == 3.0
    assert measures.publication_s == 5.0, "9.0 to 14.0"


def test_a_report_of_all_workers() -> None:
    report = combine_reports(PLAN, REPORTS, events=EVENTS, opaque={"b": ("q",), "a": ()})
    assert (report.version, report.transport, report.rounds) == (3, "loopback", 2)
    assert report.transfer_s == 2.0, "10.0 to 12.0"
    assert report.ratio_to_bound == 4.0
    assert report.bound_link == "egress of t"
    assert report.bytes_sent("a") == report.bytes_sent("a", Stage.INTERNAL) == 40
    assert report.bytes_received("a", Stage.RECEIVE) == 40
    assert report.opaque == {"b": ("q",)}
    text = str(report)
    for part in (
        "version 3 over loopback in 2 rounds",
        "4.00 times the bound",
        "EWTT 4.0000",
        "a: sent 40 internal",
        "q",
    ):
        assert part in text
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["measures"]["stall_s"]["a"] == 1.5
    assert plain["workers"]["t"]["bytes_sent"] == [40, 0, 0]
    assert plain["ratio_to_bound"] == 4.0


def test_without_events_there_are_no_measures() -> None:
    report = combine_reports(PLAN, REPORTS)
    assert report.measures is None
    assert report.to_json()["measures"] is None
    assert "EWTT" not in str(report)


def test_nothing_moved_is_no_zero() -> None:
    idle = replace(PLAN, routes=(), lower_bound_s=0.0)
    nothing = {"bytes_sent": (0, 0, 0), "bytes_received": (0, 0, 0), "first_byte_at": None, "last_byte_at": None}
    reports = {worker: replace(report, **nothing) for worker, report in REPORTS.items()}
    report = combine_reports(idle, reports)
    assert report.transfer_s is None
    assert report.ratio_to_bound is None
    assert "nothing moved" in str(report)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"t": None}, "2 reports for 3 workers; missing t"),
        ({"c": REPORTS["t"]}, "4 reports for 3 workers; missing none"),
        ({"a": replace(REPORTS["a"], version=4)}, "different versions: .*'a': '4'"),
        ({"a": replace(REPORTS["a"], transport="nixl")}, "different transports: .*'a': 'nixl'"),
        (
            {"b": replace(REPORTS["b"], bytes_received=(0, 0, 36))},
            "b: received 36 bytes in stage INTERNAL; the plan has 40",
        ),
        ({"t": replace(REPORTS["t"], bytes_sent=(44, 0, 0))}, "t: sent 44 bytes in stage RECEIVE; the plan has 40"),
    ],
)
def test_reports_that_do_not_add_up(change: dict[str, WorkerReport | None], match: str) -> None:
    reports = {worker: report for worker, report in {**REPORTS, **change}.items() if report is not None}
    with pytest.raises(ReportError, match=match):
        combine_reports(PLAN, reports)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": None}, "a: no events"),
        ({"a": replace(EVENTS["a"], stalls=())}, "a: no stall was recorded"),
        ({"a": replace(EVENTS["a"], stalls=(Stall(3.0, 2.0),))}, "a: resumed at 2.0, before it stopped at 3.0"),
        ({"a": replace(EVENTS["a"], ready_at=None)}, "a: event ready_at is missing"),
        ({"t": replace(EVENTS["t"], called_at=None)}, "t: event called_at is missing"),
        ({"t": replace(EVENTS["t"], called_at=99.0)}, "ready at 14.0, before send_weights at 99.0"),
    ],
)
def test_a_missing_event_is_an_error(change: dict[str, WorkerEvents | None], match: str) -> None:
    events = {worker: event for worker, event in {**EVENTS, **change}.items() if event is not None}
    with pytest.raises(ReportError, match=match):
        measure(PLAN, events)


def test_a_side_without_workers_has_nothing_to_measure() -> None:
    plan = Plan("x", ("t",), (), (0,), (), 1, 8, 0.0, "none", 0.0, 0.0)
    with pytest.raises(ReportError, match="1 trainers and 0 rollouts"):
        measure(plan, EVENTS)


def test_worker_reports_travel_as_msgpack() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(REPORTS["a"]), type=WorkerReport)
    assert again == REPORTS["a"]
