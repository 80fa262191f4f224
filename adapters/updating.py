"""One update, as the conductor carries it out: from a version that all trainers have called to a report.

::

    trainers digest | engines stop at one poll and prepare | transfer | compare digests | install | publish

Every engine is judged by itself. Until the transfer nothing is written: one that refuses, hangs or is lost is left out,
and the others get a plan without it. From then on those that have all bytes, and the right ones, get the version; the
others are torn if written. A failure of the trainers ends the update for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.duty_messages import Assess, Assessed, Install, Prepare, Prepared, Publish, Result, Transfer, Transferred
from adapters.failures import Failure, VerificationError, VersionError, failure_of
from adapters.fleet import Fleet
from adapters.planning import Connection, group_of
from adapters.steps import SILENT, STOP, TRAINERS, Say, Steps
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
    intent = fleet.intent
    assert intent is not None
    refused: dict[str, Failure] = {}
    prepare: Say = (Prepare(version, metadata),)
    holding: dict[str, Result | None] = {}
    if fleet.bound:
        # Before the engines stop: trainers' digests take a while, and nobody else need wait for them.
        holding = _hold(fleet, steps, prepare)
    for say in (STOP, prepare):
        groups, prepared = _go_on(fleet, steps, groups, say, refused)
        if not fleet.bound:
            groups = _bind(fleet, steps, groups, refused)
            holding = _hold(fleet, steps, prepare)
    if any(isinstance(result, Prepared) and result.moved for result in prepared.values()):
        before = fleet.connection
        groups = _bind(fleet, steps, groups, refused)
        if fleet.connection is not before:
            holding = _hold(fleet, steps, prepare)
    connection = fleet.connection  # without those that were left out
    assert connection is not None
    sent = {worker: result.digests for worker, result in holding.items() if isinstance(result, Prepared)}
    fleet.bound = False  # until it is over: after a failure executors must be made anew
    everybody = [TRAINERS, *groups]
    results, failures = steps.run_each(dict.fromkeys(everybody, (Transfer(version, trace),)), decisive=everybody)
    moved = fleet.by_worker(results)
    failures |= _compare(connection, sent, moved, [group for group in groups if group in results])
    left = [group for group in groups if group not in failures]
    installed, failed = steps.run_each(dict.fromkeys(left, (Install(version),)))
    failures |= failed
    left = [group for group in left if group not in failures]
    results, failed = steps.run_each(dict.fromkeys(left, (Publish(version),)))
    failures |= failed
    for group in results:
        fleet.engines[group] = replace(fleet.engines[group], version=version)
        steps.end(group, None)
    fleet.bound = not failures
    if failures or refused:
        failure = _joined(version, refused | failures, list(results))
        if results:
            fleet.forget(group for group, why in (refused | failures).items() if why.kind in SILENT)
        _give_up(steps, failure, [group for group in groups if group in failures])
        return
    report = gather_report(
        connection, holding, moved, fleet.by_worker(installed), fleet.by_worker(results), verify=intent.verify
    )
    steps.end(TRAINERS, None, report_bytes(report))


def _hold(fleet: Fleet, steps: Steps, prepare: Say) -> dict[str, Result | None]:
    """Let the trainers digest what they will send; replicas that differ are not sent."""
    holding = fleet.by_worker(steps.run({TRAINERS: prepare}))
    sent = {worker: result.digests for worker, result in holding.items() if isinstance(result, Prepared)}
    assert fleet.connection is not None
    check_holders(fleet.connection.correspondence, sent)
    return holding


def _go_on(
    fleet: Fleet, steps: Steps, groups: Sequence[str], say: Say, refused: dict[str, Failure]
) -> tuple[list[str], dict[str, Result | None]]:
    """Say something to the engines before anything is written, and go on with those that can.

    An engine that refuses, hangs or is lost is told and left out; there is a plan without it then, which nobody is
    bound to yet.

    Returns
    -------
    list of str, dict
        The engines that are left, and what their ranks answered.

    Raises
    ------
    TransferError
        The first engine's failure, if none is left.
    """
    results = steps.run_without(dict.fromkeys(groups, say), refused)
    left = [group for group in groups if group in results]
    fleet.route(left)
    return left, fleet.by_worker(results)


def _bind(fleet: Fleet, steps: Steps, groups: Sequence[str], refused: dict[str, Failure]) -> list[str]:
    """Bind everybody to the plan; engines that cannot be bound are told and left out, with a plan for the others."""
    left = list(groups)
    while failures := fleet.bind(fleet.bindings):
        left = steps.leave_out(left, failures, refused)
        fleet.route(left)
    return left


def _give_up(steps: Steps, failure: Failure, groups: Sequence[str]) -> None:
    """End an update that failed in some engines; one of whose ranks any was written is torn as a whole."""
    assessed, silent = steps.run_each(dict.fromkeys(groups, (Assess(),)), within_s=_ASSESS_WITHIN_S)
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
