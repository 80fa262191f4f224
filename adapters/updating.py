"""One update, as the conductor carries it out: from a version that all trainers have called to a report.

::

    trainers digest | engines stop at one poll and prepare | transfer | compare digests | install | publish

Until the transfer nothing is written anywhere and any failure ends the update for everybody. From then on every engine
is judged by itself: those that have all bytes, and the right ones, get the version; the others are torn if written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.duty_messages import Assess, Assessed, Install, Prepare, Prepared, Publish, Result, Transfer, Transferred
from adapters.failures import Failure, VerificationError, VersionError, failure_of
from adapters.fleet import Fleet
from adapters.planning import Connection, group_of
from adapters.steps import STOP, TRAINERS, Say, Steps
from adapters.update_report import gather_report, report_bytes
from adapters.verification import Digests, check_digests, check_holders

__all__ = ["update"]

_ASSESS_WITHIN_S = 5.0


def update(fleet: Fleet, steps: Steps, version: int, metadata: bytes, *, trace: bool) -> None:
    """Carry out an update that all trainers have called, traced or not; on return everybody has been told.

    Raises
    ------
    TransferError, LayoutError
        Whatever keeps it from beginning; nothing was written.
    """
    groups = fleet.connected_engines()
    for group in groups:
        known = fleet.engines[group].version
        if known is not None and version <= known:
            raise VersionError(f"version {version} is not newer than {known}, which {group} has; they must grow")
    connection, intent = fleet.connection, fleet.intent
    assert connection is not None
    assert intent is not None
    prepare: Say = (Prepare(version, metadata),)
    if fleet.bound:
        # Before the engines stop: trainers' digests take a while, and nobody else need wait for them.
        holding = fleet.by_worker(steps.run({TRAINERS: prepare}))
        steps.run(dict.fromkeys(groups, STOP))
    else:
        steps.run(dict.fromkeys(groups, STOP))
        fleet.bind(fleet.bindings)
        holding = fleet.by_worker(steps.run({TRAINERS: prepare}))
    sent = {worker: result.digests for worker, result in holding.items() if isinstance(result, Prepared)}
    check_holders(connection.correspondence, sent)
    prepared = fleet.by_worker(steps.run(dict.fromkeys(groups, prepare)))
    if any(isinstance(result, Prepared) and result.moved for result in prepared.values()):
        fleet.bind(fleet.bindings)
    fleet.bound = False  # until it is over: after a failure executors must be made anew
    results, failures = steps.run_each(dict.fromkeys([TRAINERS, *groups], (Transfer(version, trace),)), cancel=True)
    moved = fleet.by_worker(results)
    failures |= _compare(connection, sent, moved, [group for group in groups if group in results])
    for duty in (Install(version), Publish(version)):
        left = [group for group in groups if group not in failures]
        results, refused = steps.run_each(dict.fromkeys(left, (duty,)), cancel=False)
        failures |= refused
    for group in results:
        fleet.engines[group] = replace(fleet.engines[group], version=version)
        steps.end(group, None)
    if failures:
        _give_up(steps, _joined(version, failures, list(results)), [group for group in groups if group in failures])
        return
    fleet.bound = True
    report = gather_report(connection, holding, moved, fleet.by_worker(results), verify=intent.verify)
    steps.end(TRAINERS, None, report_bytes(report))


def _give_up(steps: Steps, failure: Failure, groups: Sequence[str]) -> None:
    """End an update that failed in some engines; one of whose ranks any was written is torn as a whole."""
    assessed, silent = steps.run_each(dict.fromkeys(groups, (Assess(),)), cancel=False, within_s=_ASSESS_WITHIN_S)
    for group in groups:
        wrote = any(isinstance(result, Assessed) and result.wrote for result in assessed.get(group, ()))
        steps.end(group, failure, torn=wrote or group in silent)
    steps.end_all(failure)


def _compare(
    connection: Connection, sent: Digests, moved: Mapping[str, Result | None], groups: Sequence[str]
) -> dict[str, Failure]:
    """Engines whose digests differ from the trainers', and why they must not be used."""
    failures = {}
    for group in groups:
        landed = {
            worker: result.digests
            for worker, result in moved.items()
            if group_of(worker) == group and isinstance(result, Transferred)
        }
        try:
            check_digests(connection.correspondence, sent, landed)
        except VerificationError as error:
            failures[group] = failure_of(error, "")
    return failures


def _joined(version: int, failures: Mapping[str, Failure], fine: Sequence[str]) -> Failure:
    """One failure that tells of all, and of who has the version nevertheless."""
    first = next(iter(failures.values()))
    texts = dict.fromkeys(str(failure) for failure in failures.values())
    has = f"; {', '.join(fine)} has version {version}" if fine else ""
    return Failure(first.kind, "", f"version {version}: {'; '.join(texts)}{has}")
