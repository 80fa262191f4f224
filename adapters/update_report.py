"""One report of an update from what every worker reported, and its way over the wire.

Reports and events come from the workers as they saw them; nothing is filled in, so a missing event is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from adapters.duty_messages import Installed, Prepared, Published, Result, Transferred
from adapters.planning import Connection
from transfer_exec.report import Stall, TransferReport, WorkerEvents, WorkerReport, combine_reports

__all__ = ["gather_report", "read_report", "report_bytes"]


def gather_report(
    connection: Connection,
    prepared: Mapping[str, Result | None],
    moved: Mapping[str, Result | None],
    installed: Mapping[str, Result | None],
    published: Mapping[str, Result | None],
    *,
    verify: str,
    parents: Mapping[str, int | None],
    left_out: Mapping[str, str],
) -> TransferReport:
    """Combine the results of an update's steps.

    Parameters
    ----------
    connection
        The plan that was run.
    prepared, moved, installed, published
        Results of the trainers' Prepare, of everybody's Transfer, and of the rollouts' Install and Publish.
    verify
        How the bits were compared.
    parents
        What each engine had confirmed before.
    left_out
        Engines that are connected and were gone, and how.

    Raises
    ------
    ReportError
        If a worker's report or event is missing, or contradicts the plan.
    """
    digested = {worker: result for worker, result in prepared.items() if isinstance(result, Prepared)}
    verify_s = {worker: result.verify_s for worker, result in digested.items()}
    verify_from = {worker: result.verify_from for worker, result in digested.items()}
    reports: dict[str, WorkerReport] = {}
    events: dict[str, WorkerEvents] = {}
    for worker, result in moved.items():
        if isinstance(result, Transferred):
            reports[worker] = msgspec.msgpack.decode(result.report, type=WorkerReport)
            if result.stall is None:
                verify_s[worker] = result.verify_s
                verify_from[worker] = reports[worker].finished_at
            else:
                events[worker] = WorkerEvents((Stall(*result.stall),), called_at=result.stall[0])
    for worker, result in installed.items():
        if isinstance(result, Installed):
            verify_s[worker] += result.verify_s
    for worker, result in published.items():
        if isinstance(result, Published):
            events[worker] = WorkerEvents((Stall(*result.stall),), ready_at=result.stall[1])
    opaque = {worker: source_map.opaque for worker, source_map in connection.needers.items()}
    combined = combine_reports(connection.plan, reports, events=events, opaque=opaque)
    report = replace(combined, parents=parents, left_out=left_out)
    if verify == "off":
        return report
    return replace(report, verification=verify, verify_s=verify_s, verify_from=verify_from)


def report_bytes(report: TransferReport) -> bytes:
    """A report as msgpack."""
    return msgspec.msgpack.encode(report)


def read_report(data: bytes) -> TransferReport:
    """Read ``report_bytes``' output."""
    return msgspec.msgpack.decode(data, type=TransferReport)
