"""One update, as the conductor carries it out: from a version that all trainers have called to a report.

::

    trainers digest | engines stop at one poll and prepare | transfer | compare digests | install | publish

Every engine is judged by itself. Until the transfer nothing is written: one that refuses, hangs or is lost is left out,
and the others get a plan without it. From then on those that have all bytes, and the right ones, get the version; the
others are torn if written. A failure of the trainers ends the update for everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from adapters.duty_messages import (
    Assess,
    Assessed,
    Install,
    Prepare,
    Prepared,
    Publish,
    Ready,
    Result,
    Stage,
    Transfer,
    Transferred,
)
from adapters.events import log_event
from adapters.failures import DisagreementError, Failure, VersionError
from adapters.fleet import Fleet
from adapters.paths import Answers, Path
from adapters.steps import SILENT, STOP, TRAINERS, Say, Steps
from adapters.update_report import gather_report, report_bytes
from adapters.verification import Digests, check_digests, check_holders
from transfer_exec.errors import DeadlineError, UnmappableError, UnreadableError

__all__ = ["update"]

_ASSESS_WITHIN_S = 5.0

_HANGS = DeadlineError.__name__
"""The failure of an engine that is there and does not answer: it would hold up every update."""


def update(fleet: Fleet, steps: Steps, version: int, metadata: bytes, *, trace: bool) -> None:
    """Carry out an update that all trainers have called, traced or not; on return everybody has been told.

    Raises
    ------
    TransferError, LayoutError
        Whatever keeps it from beginning; nothing was written.
    """
    groups, left_out = fleet.reach()
    for group in groups:
        known = fleet.engines[group].version
        if known is not None and version <= known:
            raise VersionError(f"version {version} is not newer than {known}, which {group} has; they must grow")
    intent = fleet.intent
    assert intent is not None
    log_event("sending", TRAINERS, version, engines=len(groups))
    if intent.staging:
        # First of all: the callers wait for it, and for nothing else.
        steps.run({TRAINERS: (Stage(version),)})
    refused: dict[str, Failure] = {}
    prepare: Say = (Prepare(version, metadata),)
    holding: dict[str, Result | None] = {}
    if fleet.bound:
        # Before the engines stop: trainers' digests take a while, and nobody else need wait for them.
        holding = _hold(fleet, steps, prepare)
    stopping = [group for group in groups if not fleet.engines[group].staging]
    moved_memory = False
    for say in (
        {group: STOP if group in stopping else prepare for group in groups},
        dict.fromkeys(stopping, prepare),
    ):
        groups, prepared = _go_on(fleet, steps, groups, say, refused)
        if not fleet.bound:
            groups = _bind(fleet, steps, groups, refused)
            holding = _hold(fleet, steps, prepare)
        moved_memory |= any(isinstance(result, Prepared) and result.moved for result in prepared.values())
    if moved_memory:
        before = fleet.connection
        groups = _bind(fleet, steps, groups, refused)
        if fleet.connection is not before:
            holding = _hold(fleet, steps, prepare)
    connection = fleet.connection  # without those that were left out
    assert connection is not None
    sent = {worker: result.digests for worker, result in holding.items() if isinstance(result, Prepared)}
    fleet.bound = False  # until it is over: after a failure executors must be made anew
    engines = _Engines(fleet, steps, version, Transfer(version, trace), sent)
    parents = {group: fleet.engines[group].version for group in groups}
    landed, failures = _let_go_on(engines, groups, together=intent.activation == "fleet")
    fleet.bound = not failures
    if failures or refused:
        fine = [group for group in groups if group in landed]
        failure = _joined(version, refused | failures, fine, left_out)
        silent = _give_up(steps, failure, [group for group in groups if group in failures])
        if fine:
            fleet.forget([*(group for group, why in refused.items() if why.kind == _HANGS), *silent])
        return
    report = gather_report(
        connection,
        holding,
        *(fleet.by_worker({group: one[step] for group, one in landed.items() if one[step]}) for step in range(3)),
        verify=intent.verify,
        parents=parents,
        left_out=left_out,
    )
    steps.end(TRAINERS, None, report_bytes(report))


class _Landed(NamedTuple):
    """What a group answered to its transfer, and an engine to the rest of its update."""

    moved: Answers
    installed: Answers = ()
    published: Answers = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Engines:
    """The paths of an update, from the transfer on.

    Attributes
    ----------
    fleet, steps
        Of the job.
    version, transfer
        What is being transferred.
    sent
        Digests by trainer.
    """

    fleet: Fleet
    steps: Steps
    version: int
    transfer: Transfer
    sent: Digests

    def land(self, group: str) -> Path[Say, _Landed]:
        """The transfer; an engine has what was sent, or has failed."""
        moved = yield (self.transfer,)
        if group != TRAINERS:
            landed = self.fleet.by_worker({group: moved})
            assert self.fleet.connection is not None
            digests = {w: result.digests for w, result in landed.items() if isinstance(result, Transferred)}
            log_event("landed", group, self.version)
            check_digests(self.fleet.connection.correspondence, self.sent, digests)
            if self.fleet.intent is not None and self.fleet.intent.verify != "off":
                log_event("verified", group, self.version, how=self.fleet.intent.verify)
        return _Landed(moved)

    def activate(self, group: str, landed: _Landed) -> Path[Say, _Landed]:
        """An engine that has the bytes gets the version; one that stages stops only now."""
        if group == TRAINERS:
            return landed
        if self.fleet.engines[group].staging:
            yield STOP
            yield (Ready(self.version),)
        installed = yield (Install(self.version),)
        published = yield (Publish(self.version),)
        self.fleet.engines[group] = replace(self.fleet.engines[group], version=self.version)
        log_event("activated", group, self.version)
        self.steps.end(group, None)
        return landed._replace(installed=installed, published=published)

    def land_and_activate(self, group: str) -> Path[Say, _Landed]:
        """Both, without a look at other engines."""
        landed = yield from self.land(group)
        return (yield from self.activate(group, landed))


def _let_go_on(
    engines: _Engines, groups: Sequence[str], *, together: bool
) -> tuple[dict[str, _Landed], dict[str, Failure]]:
    """Let trainers and engines transfer, and those that have the right bytes activate them.

    Parameters
    ----------
    engines
        Their paths.
    groups
        Engines that take part.
    together
        No engine activates before all that are not lost have landed, and none if one of these has failed.
    """
    everybody = [TRAINERS, *groups]
    if not together:
        return engines.steps.follow(
            {group: engines.land_and_activate(group) for group in everybody}, decisive=everybody
        )
    landed, failures = engines.steps.follow({group: engines.land(group) for group in everybody}, decisive=everybody)
    present = engines.fleet.present_engines()
    failed = [group for group in groups if group in failures and group in present]
    behind = [group for group in failed if failures[group].kind not in SILENT]
    if behind:
        text = f"landed, and was not activated: {', '.join(behind)} did not get version {engines.version}"
        kind = DisagreementError.__name__
        failures |= {group: Failure(kind, "", f"{group} {text}") for group in groups if group in landed}
        return {}, failures
    done, failed_later = engines.steps.follow({group: engines.activate(group, one) for group, one in landed.items()})
    return done, failures | failed_later


def _hold(fleet: Fleet, steps: Steps, prepare: Say) -> dict[str, Result | None]:
    """Let the trainers digest what they will send; replicas that differ are not sent."""
    holding = fleet.by_worker(steps.run({TRAINERS: prepare}))
    sent = {worker: result.digests for worker, result in holding.items() if isinstance(result, Prepared)}
    assert fleet.connection is not None
    check_holders(fleet.connection.correspondence, sent)
    return holding


def _go_on(
    fleet: Fleet, steps: Steps, groups: Sequence[str], say: Mapping[str, Say], refused: dict[str, Failure]
) -> tuple[list[str], dict[str, Result | None]]:
    """Say something to some engines before anything is written, and go on with those that can.

    An engine that refuses, hangs or is lost is told and left out; there is a plan without it then, which nobody is
    bound to yet.

    Returns
    -------
    list of str, dict
        The engines that are left, and what the ranks answered of those that were spoken to.

    Raises
    ------
    TransferError
        The first engine's failure, if none is left.
    """
    results, failures = steps.run_each({group: what for group, what in say.items() if group in groups})
    left = steps.leave_out(groups, failures, refused)
    fleet.route(left)
    return left, fleet.by_worker(results)


def _bind(fleet: Fleet, steps: Steps, groups: Sequence[str], refused: dict[str, Failure]) -> list[str]:
    """Bind everybody to the plan; engines that cannot be bound are told and left out, with a plan for the others."""
    left = list(groups)
    while True:
        try:
            failures = fleet.bind(fleet.bindings)
        except (UnreadableError, UnmappableError):
            fleet.compile_again()  # without
            continue
        if not failures:
            return left
        left = steps.leave_out(left, failures, refused)
        fleet.route(left)


def _give_up(steps: Steps, failure: Failure, groups: Sequence[str]) -> list[str]:
    """End an update that failed in some engines; one of whose ranks any was written is torn as a whole.

    Returns
    -------
    list of str
        Engines that are there and silent. One that says that it waited for another in vain is not, nor one that a rank
        has left.
    """
    assessed, unheard = steps.run_each(dict.fromkeys(groups, (Assess(),)), within_s=_ASSESS_WITHIN_S)
    for group in groups:
        wrote = any(isinstance(result, Assessed) and result.wrote for result in assessed.get(group, ()))
        torn = wrote or group in unheard
        log_event("torn" if torn else "not_updated", group, level=logging.WARNING, why=str(failure))
        steps.end(group, failure, torn=torn)
    steps.end_all(failure)
    return [group for group, why in unheard.items() if why.kind == _HANGS]


def _joined(version: int, failures: Mapping[str, Failure], fine: Sequence[str], left_out: Mapping[str, str]) -> Failure:
    """One failure that tells of all, and of who has the version nevertheless."""
    first = next(iter(failures.values()))
    texts = dict.fromkeys(str(failure) for failure in failures.values())
    has = f"; {', '.join(fine)} has version {version}" if fine else ""
    without = "".join(f"; {group} was left out: {why}" for group, why in left_out.items())
    return Failure(first.kind, "", f"version {version}: {'; '.join(texts)}{has}{without}")
