"""Steps of a transaction, as the conductor takes them: say something to some groups, and wait for what they answer.

Leads answer into one queue, from any thread. `Steps` sorts what comes: answers to the step that is open, news of who
has joined, and calls of trainers, which wait until the conductor looks at them.

>>> steps.open()                                                                   # doctest: +SKIP
>>> steps.run({"engine/a": STOP})                                                  # doctest: +SKIP
>>> steps.run({"trainer": (Probe(),), "engine/a": (Probe(),)})["trainer"]          # doctest: +SKIP
(Probed(...), Probed(...))
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from adapters.duty_messages import Duty, Result
from adapters.failures import ClosedError, Failure, LostWorkerError, raise_failure
from adapters.messages import Call, Cancel, End, FromLead, Gathered, Relay, Roster, Stop, ToLead
from transfer_exec.errors import DeadlineError

__all__ = ["STOP", "TRAINERS", "GroupLost", "Results", "Say", "Steps"]

TRAINERS = "trainer"
"""The trainers' group."""

_LEAD_MARGIN_S = 10.0
_DRAIN_S = 10.0


class _Stopping(Enum):
    STOP = "stop"


STOP: Final = _Stopping.STOP
"""Said to an engine: bring your ranks to one poll."""

Say: TypeAlias = tuple[Duty | None, ...] | Literal[_Stopping.STOP]
"""One duty for all ranks of a group, one each in rank order (None: takes no part), or `STOP`."""

Results: TypeAlias = dict[str, tuple[Result | None, ...]]
"""Group -> results in rank order."""


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
    ) -> None:
        self._send = send
        self.turned_away = turned_away
        self._deadline_s = deadline_s
        self._inbox: queue.SimpleQueue[FromLead | GroupLost | _Closed] = queue.SimpleQueue()
        # Later conductors must count from higher up than earlier ones: ranks outlive them.
        self._txn = time.time_ns() // 1000
        self._step = 0
        self._last_ended = 0
        self._engaged: dict[str, None] = {}
        self.rosters: dict[str, Roster] = {}
        self.calls: dict[str, Call] = {}
        # Trainers that joined since the last end: what they call cannot be meant for a transaction before it.
        self._fresh: set[str] = set()
        self.gone: set[str] = set()
        self.idle: set[str] = set()

    @property
    def deadline_s(self) -> float:
        """Of every step."""
        return self._deadline_s

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

    def open(self) -> None:
        """Begin a transaction."""
        self._txn += 1
        self._step = 0
        self._engaged = {}

    def run(self, say: Mapping[str, Say]) -> Results:
        """Say something to some groups and wait until all have answered.

        Raises
        ------
        TransferError, LayoutError
            The first failure of any group, or that a group's lead is gone or silent.
        """
        results: Results = {}
        waiting = self._say(say)
        stop_at = time.monotonic() + self._deadline_s + _LEAD_MARGIN_S
        while waiting:
            answer = self._answer(waiting, stop_at)
            del waiting[answer.group]
            if answer.failure is not None:
                raise_failure(answer.failure)
            results[answer.group] = answer.results
        return results

    def run_each(
        self, say: Mapping[str, Say], *, cancel: bool, within_s: float | None = None
    ) -> tuple[Results, dict[str, Failure]]:
        """Like `run`, but every group's failure is kept; with ``cancel``, the first makes the others stop."""
        results: Results = {}
        failures: dict[str, Failure] = {}
        waiting = self._say(say)
        stop_at = time.monotonic() + (within_s or self._deadline_s + _LEAD_MARGIN_S)
        while waiting:
            try:
                answer = self._answer(waiting, stop_at)
            except DeadlineError as error:
                late = Failure(type(error).__name__, "", str(error))
                failures.update(dict.fromkeys(waiting, late))
                break
            del waiting[answer.group]
            if answer.failure is None:
                results[answer.group] = answer.results
                continue
            if cancel and not failures:
                for group in waiting:
                    self._send(group, Cancel(self._txn, answer.failure))
                stop_at = min(stop_at, time.monotonic() + _DRAIN_S)
            failures[answer.group] = answer.failure
        return results, failures

    def end(self, group: str, failure: Failure | None, outcome: bytes = b"", *, torn: bool = False) -> None:
        """End the transaction for one group."""
        self._engaged.pop(group, None)
        self._send(group, End(self._txn, failure, outcome, torn))
        if group == TRAINERS:
            self._last_ended = self._txn
            self.calls = {}
            self._fresh = set()

    def end_all(self, failure: Failure) -> None:
        """End it for every group that has not been told yet, the trainers last: they may call again at once."""
        for group in [*(each for each in self._engaged if each != TRAINERS), TRAINERS]:
            self.end(group, failure)

    # Inside

    def _say(self, say: Mapping[str, Say]) -> dict[str, int]:
        self._step += 1
        waiting = {}
        for group, what in say.items():
            self._engaged[group] = None
            if group != TRAINERS and group not in self.rosters:
                self._inbox.put(GroupLost(group, "it left"))
            if what is STOP:
                waiting[group] = 0
                self._send(group, Stop(self._txn, self._deadline_s))
            else:
                waiting[group] = self._step
                if group == TRAINERS and self.idle and len(what) == 1:
                    size = self.rosters[TRAINERS].world_size
                    what = tuple(None if f"{group}/{rank}" in self.idle else what[0] for rank in range(size))
                self._send(group, Relay(self._txn, self._step, self._deadline_s, what))
        return waiting

    def _answer(self, waiting: Mapping[str, int], stop_at: float) -> Gathered:
        while True:
            item = self._take(stop_at - time.monotonic())
            self._sort(item)
            match item:
                case None:
                    raise DeadlineError(f"no word from rank 0 of {', '.join(waiting)} within {self._deadline_s:g} s")
                case GroupLost(group, reason) if group in waiting:
                    failure = Failure(LostWorkerError.__name__, f"{group}/0", f"lost: {reason}")
                    return Gathered(group, self._txn, waiting[group], (), failure)
                case Gathered(group=group, txn=txn, step=step) if txn == self._txn and waiting.get(group) == step:
                    return item
                case _:
                    pass

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
                if group == TRAINERS:
                    self._note_trainers(item)
                self.rosters[group] = item
            case GroupLost(group, _):
                self.rosters.pop(group, None)
            case Call(worker=worker, after=after):
                if after >= self._last_ended or (after == 0 and worker in self._fresh):
                    self.calls[worker] = item
                else:
                    # Its rank takes the end of that transaction for the answer to this call; one that is new here
                    # has not seen it, and gets it again.
                    text = "called while another call was ending; call again"
                    self._send(TRAINERS, End(self._last_ended, Failure("StaleError", worker, text)))
            case _:
                pass

    def _note_trainers(self, roster: Roster) -> None:
        before = self.rosters.get(TRAINERS)
        there = {member.worker for member in roster.members}
        known = {(m.worker, m.incarnation) for m in (before.members if before else ())}
        self._fresh |= {m.worker for m in roster.members if (m.worker, m.incarnation) not in known}
        self.gone = (
            self.gone | {m.worker for m in (before.members if before else ()) if m.worker not in there}
        ) - there
