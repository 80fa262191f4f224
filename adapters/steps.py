"""Steps of a transaction, as the conductor takes them: say something to some groups, and wait for what they answer.

Leads answer into one queue, from any thread. `Steps` sorts what comes: answers to the step that is open, news of who
has joined, and calls of trainers, which wait until the conductor looks at them.

>>> steps.open("version 7")                                                        # doctest: +SKIP
>>> steps.run({"engine/a": STOP})                                                  # doctest: +SKIP
>>> steps.run({"trainer": (Probe(),), "engine/a": (Probe(),)})["trainer"]          # doctest: +SKIP
(Probed(...), Probed(...))
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias, TypeVar

from adapters.duty_messages import Duty, Stay
from adapters.events import log_event
from adapters.failures import ClosedError, Failure, LostWorkerError, raise_failure
from adapters.messages import Begin, Call, Cancel, End, FromLead, Gathered, Note, Relay, Roster, Stop, ToLead, phase_of
from adapters.paths import Answers, Path, Paths
from transfer_exec.errors import DeadlineError

__all__ = ["SILENT", "STOP", "TRAINERS", "GroupLost", "Results", "Say", "Steps", "is_complete", "missing_ranks"]

TRAINERS = "trainer"
"""The trainers' group."""

_LEAD_MARGIN_S = 10.0

_NOTE_MARGIN_S = 15.0
"""Beyond the deadline, for those who wait while others do something."""

_NEWS_S = 1.5
"""Until news of a process that has died is here: longer than two pings."""

_BACK_WITHIN_S = 3.0
"""A worker that has lost nothing but its connection has another by then: longer than an attempt to find its parent."""

SILENT = (DeadlineError.__name__, LostWorkerError.__name__)
"""Failures of engines that are gone, or there and do not answer."""

_FROZEN_LEAD_S = 2.0
"""Beyond the deadline, which leads keep themselves; the engines that wait are patient for somewhat longer."""


class _Stopping(Enum):
    STOP = "stop"


STOP: Final = _Stopping.STOP
"""Said to an engine: bring your ranks to one poll."""

Say: TypeAlias = tuple[Duty | None, ...] | Literal[_Stopping.STOP]
"""One duty for all ranks of a group, one each in rank order (None: takes no part), or `STOP`."""

Results: TypeAlias = dict[str, Answers]
"""Group -> results in rank order."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The lead of an engine is gone, and with it the engine."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Closed:
    pass


class Steps:
    """The conductor's ears and voice.

    Parameters
    ----------
    send
        Takes a message to a group's lead; any thread may call it.
    deadline_s
        Of every step.
    turned_away
        How many callers without the job's key have been.
    progress
        Told of every answer: the phase and whose it is, how many groups have answered, and of how many.

    Attributes
    ----------
    rosters
        Who has joined, by group.
    calls
        Trainers that have called and wait, and what.
    gone
        Trainers that had joined and were lost.
    idle
        Trainers that take no part in what all are told.
    """

    def __init__(
        self,
        send: Callable[[str, ToLead], None],
        *,
        deadline_s: float,
        turned_away: Callable[[], int] = lambda: 0,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self._send = send
        self._progress = progress
        self.turned_away = turned_away
        self._deadline_s = deadline_s
        self._inbox: queue.SimpleQueue[FromLead | GroupLost | _Closed] = queue.SimpleQueue()
        # Later conductors must count from higher up than earlier ones: ranks outlive them.
        self._txn = time.time_ns() // 1000
        self._step = 0
        self._last_ended = 0
        self._begun: dict[str, int] = {}
        self._engaged: dict[str, None] = {}
        self._noted: set[tuple[str, str]] = set()
        self._remind_at: dict[str, float] = {}
        self._of, self._phase = "", ""
        self._phases: dict[str, str] = {}
        self._asked: Counter[str] = Counter()
        self.rosters: dict[str, Roster] = {}
        self.calls: dict[str, Call] = {}
        # Engines that had all ranks and lack some, or are gone; CLOCK_MONOTONIC.
        self._lost_at: dict[str, float] = {}
        self.gone: set[str] = set()
        self.idle: set[str] = set()

    @property
    def deadline_s(self) -> float:
        """Of every step."""
        return self._deadline_s

    @property
    def phase(self) -> str:
        """The step that was begun last, in words."""
        return self._phase

    def hear(self, item: FromLead | GroupLost) -> None:
        """Take something from a lead; any thread may call it."""
        self._inbox.put(item)

    def close(self) -> None:
        """Make whoever waits raise ClosedError; any thread may call it."""
        self._inbox.put(_Closed())

    # The conductor's thread

    def listen(self, timeout_s: float) -> None:
        """Take in what comes within so many seconds: one item or none."""
        self._sort(self._take(timeout_s))

    def open(self, of: str) -> None:
        """Begin a transaction, a ``"connect"`` or a ``"version 7"``."""
        self._of = self._phase = of
        self._txn += 1
        self._step = 0
        self._engaged = {TRAINERS: None}
        self._noted, self._remind_at = set(), {}
        self._asked.clear()
        self._begun = {worker: call.number for worker, call in self.calls.items()}
        self._send(TRAINERS, Begin(self._txn, self._begun))

    def note(self, what: str, done: int = 0, total: int = 1) -> None:
        """Tell all who wait in this transaction what they wait for; they are patient for another deadline."""
        note = Note(self._txn, f"{what}, {self._of}", done, total, self._deadline_s + _NOTE_MARGIN_S)
        for group in self._engaged:
            self._send(group, note)

    def run(self, say: Mapping[str, Say]) -> Results:
        """Say something to some groups and wait until all have answered.

        Raises
        ------
        TransferError, LayoutError
            The first failure of any group, or that a group's lead is gone or silent.
        """
        results: Results = {}
        waiting = self._say(say)
        late_at = dict.fromkeys(waiting, time.monotonic() + self._deadline_s + _LEAD_MARGIN_S)
        while waiting:
            answer = self._answer(waiting, late_at)
            del waiting[answer.group]
            if answer.failure is not None:
                raise_failure(answer.failure)
            results[answer.group] = answer.results
        return results

    def run_each(
        self, say: Mapping[str, Say], *, decisive: Collection[str] = (), within_s: float | None = None
    ) -> tuple[Results, dict[str, Failure]]:
        """Like `run`, but every group's failure is kept; that of a decisive group makes the others stop."""
        return self.follow({group: _once(what) for group, what in say.items()}, decisive=decisive, within_s=within_s)

    def follow(
        self, paths: Mapping[str, Path[Say, T]], *, decisive: Collection[str] = (), within_s: float | None = None
    ) -> tuple[dict[str, T], dict[str, Failure]]:
        """Let every group go a path of its own, none waiting for another (`adapters.paths`).

        Parameters
        ----------
        paths
            By group.
        decisive
            Groups that others cannot do without: if one of them fails to bind, probe or transfer, those that are at it
            too stop.
        within_s
            Of every step of a group; by default what its lead may take, and somewhat more.

        Returns
        -------
        dict, dict
            What the paths returned, and the failures of the other groups.
        """
        made = Paths(paths, decisive, within_s=within_s or self._deadline_s + _FROZEN_LEAD_S)
        told = None
        while made.going:
            made.wait_for(self._say(made.to_say, told=told))
            answer = self._answer(made.waiting, made.late_at)
            for group, failure in made.hear(answer).items():
                self._send(group, Cancel(self._txn, failure))
            told = [TRAINERS, *made.failures]  # those that have failed wait for the others
        return made.done, made.failures

    def run_without(
        self, say: Mapping[str, Say], lost: dict[str, Failure], *, decisive: Collection[str] = ()
    ) -> Results:
        """Like `run`, but engines that fail, hang or are lost are told, noted in ``lost``, and left out.

        Raises
        ------
        TransferError, LayoutError
            The trainers' failure; or the first engine's, if none is left.
        """
        results, failures = self.run_each(say, decisive=decisive)
        left = self.leave_out([group for group in say if group != TRAINERS], failures, lost)
        return {group: answers for group, answers in results.items() if group == TRAINERS or group in left}

    def leave_out(self, groups: Sequence[str], failures: Mapping[str, Failure], lost: dict[str, Failure]) -> list[str]:
        """The engines that are left without those that failed or are gone, which are told and noted in ``lost``.

        Raises
        ------
        TransferError, LayoutError
            The trainers' failure; or the first engine's own, if none is left.
        """
        if TRAINERS in failures:
            raise_failure(failures[TRAINERS])
        failures = {**self.absent(groups), **failures}
        left = [group for group in groups if group not in failures]
        if failures and not left:
            # One that only points to another's failure says less.
            raise_failure(min(failures.values(), key=lambda failure: failure.echo))
        for group, failure in failures.items():
            log_event("left_out", group, level=logging.WARNING, phase=self._phase, why=str(failure))
            self.end(group, failure)
        lost |= failures
        return left

    def absent(self, groups: Iterable[str]) -> dict[str, Failure]:
        """Which of some engines are gone, or lack a rank, as far as has been heard."""
        text = f"{self._phase}: lost, or one of its ranks"
        return {
            group: Failure(LostWorkerError.__name__, group, text)
            for group in groups
            if group != TRAINERS and not is_complete(self.rosters.get(group))
        }

    def wait_back(self, groups: Iterable[str]) -> None:
        """Give those of some engines that were lost a moment ago, maybe with their connection only, time to come back.

        Whether a process has died or a connection broke cannot be told apart, so an update that begins right after a
        death waits as well, three seconds at most.
        """
        away = set(groups)
        while away := away & self._lost_at.keys():
            left_s = max(self._lost_at[group] for group in away) + _BACK_WITHIN_S - time.monotonic()
            if left_s <= 0:
                return
            self.note("joining again")
            self.listen(left_s)

    def blame(self, failures: Mapping[str, Failure]) -> dict[str, Failure]:
        """Which engines to leave out: those that are gone, if that is why others failed; else those that failed.

        Whoever attaches to a worker that has died may notice before the worker's lead does.

        Raises
        ------
        TransferError, LayoutError
            The trainers' failure, if no engine is gone.
        """
        gone = {group: why for group, why in failures.items() if group != TRAINERS and why.kind in SILENT}
        stop_at = time.monotonic() + _NEWS_S
        while not gone and time.monotonic() < stop_at:
            self.listen(stop_at - time.monotonic())
            gone = self.absent(self._engaged)
        if not gone and TRAINERS in failures:
            raise_failure(failures[TRAINERS])
        return gone or dict(failures)

    def end(self, group: str, failure: Failure | None, outcome: bytes = b"", *, torn: bool = False) -> None:
        """End the transaction for one group."""
        self._engaged.pop(group, None)
        self._send(group, End(self._txn, failure, outcome, torn))
        if group == TRAINERS:
            self._last_ended = self._txn
            self.calls = {worker: call for worker, call in self.calls.items() if not self._is_answered(call)}

    def end_all(self, failure: Failure) -> None:
        """End it for every group that has not been told yet, the trainers last: they may call again at once."""
        for group in [*(each for each in self._engaged if each != TRAINERS), TRAINERS]:
            self.end(group, failure)

    # Inside

    def _say(self, say: Mapping[str, Say], *, told: Collection[str] | None = None) -> dict[str, int]:
        """Say something to some groups, and to others, by default all that wait, what is done.

        Returns
        -------
        dict
            By group, the step that it begins.
        """
        if not say:
            return {}
        self._step += 1
        waiting = {}
        for group, what in say.items():
            self._engaged[group] = None
            if what is STOP:
                waiting[group] = 0
                self._send(group, Stop(self._txn, self._deadline_s, self._of))
            else:
                waiting[group] = self._step
                if group == TRAINERS and self.idle and len(what) == 1:
                    size = self.rosters[TRAINERS].world_size
                    what = tuple(None if f"{group}/{rank}" in self.idle else what[0] for rank in range(size))
                self._send(group, Relay(self._txn, self._step, self._deadline_s, what, self._of))
        self._phase = _phase_of(say, self._of)
        for group, what in say.items():
            only_stays = what is not STOP and all(isinstance(duty, Stay) for duty in what)
            self._phases[group] = self._phase if only_stays else _phase_of({group: what}, self._of)
        self._asked.update(self._phases[group] for group in say)
        log_event("step", TRAINERS, level=logging.DEBUG, phase=self._phase, groups=len(say))
        # Once for every phase, whichever engine is in it, and again before patience ends: engines that go at their own
        # pace must not cost every trainer a message each.
        now = time.monotonic()
        note = Note(self._txn, self._phase, 0, len(say), self._deadline_s + _NOTE_MARGIN_S)
        for group in self._engaged:
            is_due = (group, self._phase) not in self._noted or now >= self._remind_at.get(group, now)
            if group not in say and is_due and (told is None or group in told):
                self._noted.add((group, self._phase))
                self._send(group, note)
            if group in say or is_due:
                self._remind_at[group] = now + self._deadline_s / 2
        return waiting

    def _answer(self, waiting: Mapping[str, int], late_at: Mapping[str, float]) -> Gathered:
        """What one of some groups answers to its step, or that one is gone, or that the first of them is late."""
        while True:
            # Not as news of its own: by now the engine may have joined anew, and that must not be taken for older.
            for group in waiting:
                if group != TRAINERS and group not in self.rosters:
                    return self._lost(group, waiting, "it left")
            item = self._take(min(late_at[group] for group in waiting) - time.monotonic())
            self._sort(item)
            match item:
                case None:
                    group = min(waiting, key=late_at.__getitem__)
                    text = f"{self._phases[group]}: no word from {group}/0 within {self._deadline_s:g} s"
                    return Gathered(group, self._txn, waiting[group], (), Failure(DeadlineError.__name__, "", text))
                case GroupLost(group, reason) if group in waiting:
                    return self._lost(group, waiting, reason)
                case Gathered(group=group, txn=txn, step=step) if txn == self._txn and waiting.get(group) == step:
                    phase = self._phases[group]
                    left = sum(self._phases[other] == phase for other in waiting) - 1
                    self._progress(f"{phase}: {group}", self._asked[phase] - left, self._asked[phase])
                    return item
                case _:
                    pass

    def _lost(self, group: str, waiting: Mapping[str, int], reason: str) -> Gathered:
        failure = Failure(LostWorkerError.__name__, f"{group}/0", f"lost during {self._phases[group]}: {reason}")
        return Gathered(group, self._txn, waiting[group], (), failure)

    def _take(self, timeout_s: float) -> FromLead | GroupLost | None:
        try:
            item = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(item, _Closed):
            raise ClosedError("the sender's rank 0 was closed")
        return item

    def _sort(self, item: FromLead | GroupLost | None) -> None:
        match item:
            case Roster(group=group):
                was_complete = is_complete(self.rosters.get(group))
                if is_complete(item):
                    self._lost_at.pop(group, None)
                if is_complete(item) and not was_complete:
                    log_event("joined", group, max((m.version for m in item.members if m.version), default=None))
                elif was_complete and not is_complete(item):
                    self._lost_at[group] = time.monotonic()
                if group == TRAINERS:
                    self._note_trainers(item)
                self.rosters[group] = item
            case GroupLost(group, reason):
                if is_complete(self.rosters.get(group)):
                    self._lost_at[group] = time.monotonic()
                if self.rosters.pop(group, None) is not None:
                    log_event("lost", group, level=logging.WARNING, why=reason)
            case Call(worker=worker) if not self._is_answered(item):
                self.calls[worker] = item
            case _:
                pass

    def _is_answered(self, call: Call) -> bool:
        """Whether the end of the last transaction, which may be on its way yet, answers a call.

        It does not if the rank knew that transaction, or was in it by an earlier call that it has taken back.
        """
        return call.after < self._last_ended and self._begun.get(call.worker, call.number) == call.number

    def _note_trainers(self, roster: Roster) -> None:
        before = self.rosters.get(TRAINERS)
        there = {member.worker for member in roster.members}
        left = {member.worker for member in (before.members if before else ())} - there
        for worker in left:
            self.calls.pop(worker, None)  # it has failed there
        self.gone = (self.gone | left) - there


def _phase_of(say: Mapping[str, Say], of: str) -> str:
    duties = [duty for what in say.values() for duty in (() if what is STOP else what) if duty is not None]
    return phase_of(next((duty for duty in duties if not isinstance(duty, Stay)), duties[0] if duties else None), of)


def is_complete(roster: Roster | None) -> bool:
    """Whether every rank of a group has joined."""
    return roster is not None and len(roster.members) == roster.world_size


def missing_ranks(group: str, roster: Roster | None) -> str:
    """Which ranks of a group have not joined, by name; the group's own if none has."""
    if roster is None or not roster.members:
        return group
    there = {member.rank for member in roster.members}
    return ", ".join(f"{group}/{rank}" for rank in range(roster.world_size) if rank not in there)


def _once(what: Say) -> Path[Say, Answers]:
    """The path of one step."""
    return (yield what)
