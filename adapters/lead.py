"""The lead of a group relays the conductor's duties to the ranks and gathers what they answer.

It runs on the control thread of the group's rank 0, for the trainers as for every engine, and never waits: whatever
arrives changes its state and may make it say something. One transaction is open at a time.

::

    conductor   Stop ............... Relay(step 1, Probe) ............................ End
    lead           Propose Commit       Ask to every rank, AgreeValue/Agreed between     End to every rank
    up                       Gathered(step 0)            Gathered(step 1: all results, or the first failure)

A failure goes up at once, without waiting for the other ranks; so does a rank that is lost, and a deadline that passes,
whose message names the ranks that did not answer. Only a probe that failed is first given up by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from adapters.duty_messages import Assess, Duty, Install, Probe, Publish, Result, Transfer
from adapters.failures import Failure, LostWorkerError, UsageError
from adapters.messages import (
    LEFT,
    Agreed,
    AgreeValue,
    Answer,
    AnswerStop,
    Ask,
    Begin,
    Call,
    Cancel,
    Committed,
    End,
    FromLead,
    FromRank,
    Gathered,
    Member,
    Note,
    ProposeStop,
    Relay,
    Roster,
    Stop,
    ToLead,
    ToRank,
    phase_of,
)
from adapters.promise import Commit, PollLead, Propose
from transfer_exec.errors import DeadlineError

__all__ = ["GroupLead"]

_PATIENCE_MARGIN_S = 5.0
_LAST_WORDS_S = 8.0


class GroupLead:
    """One group's lead.

    Parameters
    ----------
    group
        ``"trainer"`` or ``"engine/<name>"``.
    ranks
        Worker names in rank order.
    to_rank, to_conductor
        Where messages go; rank 0 is a rank like the others.
    clock
        Seconds that only grow.
    own_counter
        Poll counter of rank 0, known without asking.
    """

    def __init__(
        self,
        group: str,
        ranks: Sequence[str],
        *,
        to_rank: Callable[[str, ToRank], None],
        to_conductor: Callable[[FromLead], None],
        clock: Callable[[], float],
        own_counter: Callable[[], int] = lambda: 0,
    ) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._to_rank = to_rank
        self._to_conductor = to_conductor
        self._clock = clock
        self._own_counter = own_counter
        self._members: dict[str, Member] = {}
        self._polls = PollLead(self._ranks)
        self._txn = self._newest = 0
        self._step: int | None = None
        self._duty: Duty | None = None
        self._of = ""
        self._deadline = 0.0
        self._deadline_s = 0.0
        self._early_failure: Failure | None = None
        self._held: Failure | None = None
        self._results: dict[str, Result | None] = {}
        self._agreements = 0
        self._values: dict[str, int] = {}
        self._acting = self._ranks
        self._calls: Mapping[str, int] = {}

    @property
    def ranks(self) -> tuple[str, ...]:
        """Worker names in rank order."""
        return self._ranks

    @property
    def newest(self) -> int:
        """The newest transaction that it has heard of."""
        return self._newest

    def roster(self) -> Roster:
        """Who has joined."""
        present = tuple(self._members[rank] for rank in self._ranks if rank in self._members)
        return Roster(self._group, len(self._ranks), present)

    # Membership

    def joined(self, member: Member) -> None:
        """A rank is there, or has other news of itself."""
        self._members[member.worker] = member
        self._to_conductor(self.roster())

    def lost(self, worker: str, reason: str) -> None:
        """A rank is gone."""
        if self._members.pop(worker, None) is None:
            return
        self._to_conductor(self.roster())
        if self._txn and worker in self._acting:
            self._fail(Failure(LostWorkerError.__name__, worker, f"lost during {self._phase()}: {reason}"))

    # From the conductor

    def from_conductor(self, message: ToLead) -> None:
        """Begin, go on with, or end a transaction."""
        match message:
            case Begin(txn, calls):
                self._newest, self._calls = max(self._newest, txn), calls
            case Stop(txn, deadline_s, of):
                self._open(txn, 0, None, deadline_s, of)
                if self._can_begin():
                    self._propose(self._polls.begin({self._ranks[0]: self._own_counter()}))
            case Relay(txn, step, deadline_s, duties, of):
                each = dict(zip(self._ranks, duties if len(duties) > 1 else duties * len(self._ranks), strict=False))
                acting = {rank: duty for rank, duty in each.items() if duty is not None}
                self._open(txn, step, next(iter(acting.values()), None), deadline_s, of)
                self._acting = tuple(acting)
                if len(duties) not in (1, len(self._ranks)):
                    text = f"{len(duties)} duties for the {len(self._ranks)} ranks of {self._group}"
                    self._fail(Failure(UsageError.__name__, self._ranks[0], text))
                elif self._can_begin():
                    for rank, duty in acting.items():
                        call = self._calls.get(rank, 0)
                        self._to_rank(rank, Ask(txn, step, self._patience_s, duty, of, call))
            case Cancel() | Note():
                for rank in self._ranks:
                    self._to_rank(rank, message)
            case End():
                self._end(message)

    def conductor_lost(self, failure: Failure) -> None:
        """Nobody will end the open transaction but this lead."""
        if self._txn:
            # Nobody can say any more whether all ranks were written, or none.
            self._end(End(self._txn, failure, torn=isinstance(self._duty, (Transfer, Install, Assess, Publish))))

    # From the ranks

    def from_rank(self, worker: str, message: FromRank) -> None:
        """A rank answered, or a trainer called."""
        match message:
            case Call():
                self._to_conductor(message)
            case AnswerStop(txn, promise, failure) if txn == self._txn and self._step == 0:
                if failure is not None:
                    self._fail(failure)
                elif promise is not None:
                    reply = self._polls.hear(worker, promise)
                    if isinstance(reply, Propose):
                        self._propose(reply)
                    elif isinstance(reply, Commit):
                        self._commit(reply)
            case Answer(txn, step, _, Failure() as failure) if txn == self._txn and step == LEFT:
                # It answers nothing that comes later either.
                self._early_failure = self._early_failure or failure
                self._fail(failure)
            case Answer(txn, step, result, failure) if (
                txn == self._txn and step == self._step and step > 0 and worker in self._acting
            ):
                self._results[worker] = result
                if failure is not None:
                    self._note_failure(failure)
                self._gather()
            case AgreeValue(txn, number, value) if txn == self._txn:
                self._agree(worker, number, value)
            case _:
                pass  # of a step that is over

    def tick(self) -> None:
        """Fail the open step if its time is over."""
        if self._step is None or self._clock() < self._deadline:
            return
        if self._held is not None:
            self._fail(self._held)
            return
        late = self._polls.waiting_for if self._step == 0 else [r for r in self._acting if r not in self._results]
        text = f"{self._phase()}: no answer from {', '.join(late)} within {self._deadline_s:g} s"
        if self._step == 0 and self._polls.stopped:
            text += f"; {', '.join(f'{rank} waits at poll {poll}' for rank, poll in self._polls.stopped.items())}"
        if self._step in (0, 1):
            text += "; every rank must call the adapter at the same steps, and its last call must return"
        self._fail(Failure(DeadlineError.__name__, late[0] if late else self._ranks[0], text))

    # One step

    @property
    def _patience_s(self) -> float:
        """How long ranks wait for what comes next: the lead gives up before them."""
        return self._deadline_s + _PATIENCE_MARGIN_S

    def _open(self, txn: int, step: int, duty: Duty | None, deadline_s: float, of: str) -> None:
        if txn != self._txn:
            self._agreements, self._values = 0, {}
            self._early_failure = None
        self._txn, self._step, self._duty, self._of = txn, step, duty, of
        self._newest = max(self._newest, txn)
        self._deadline_s, self._deadline = deadline_s, self._clock() + deadline_s
        self._acting = self._ranks
        self._results = {}
        self._held = None

    def _can_begin(self) -> bool:
        """Whether every rank is there and still takes part; otherwise the step has failed."""
        missing = [rank for rank in self._acting if rank not in self._members]
        if missing:
            text = f"{', '.join(missing)} of {self._group} not there at {self._phase()}"
            self._fail(Failure(LostWorkerError.__name__, missing[0], text))
        elif self._early_failure is not None:
            self._fail(self._early_failure)
        return self._step is not None

    def _propose(self, proposal: Propose) -> None:
        for rank in self._ranks:
            self._to_rank(rank, ProposeStop(self._txn, proposal, self._patience_s, self._of))

    def _commit(self, commit: Commit) -> None:
        for rank in self._ranks:
            self._to_rank(rank, Committed(self._txn, commit.ballot, self._patience_s))
        self._results = dict.fromkeys(self._ranks)
        self._gather()

    def _gather(self) -> None:
        if self._step is None or len(self._results) < len(self._acting):
            return
        if self._held is not None:
            self._fail(self._held)
        else:
            step, self._step = self._step, None
            results = tuple(self._results.get(rank) for rank in self._ranks)
            self._to_conductor(Gathered(self._group, self._txn, step, results, None))

    def _note_failure(self, failure: Failure) -> None:
        """Send a failure up: at once, but for a probe when every rank has its own bits again, or shortly after."""
        if not isinstance(self._duty, Probe):
            self._fail(failure)
            return
        if self._held is None:
            self._deadline = min(self._deadline, self._clock() + _LAST_WORDS_S)
            for rank in self._ranks:
                self._to_rank(rank, Cancel(self._txn, failure))
        if self._held is None or self._held.echo:
            self._held = failure

    def _fail(self, failure: Failure) -> None:
        if self._step is None:
            self._early_failure = self._early_failure or failure
            return
        step, self._step = self._step, None
        self._to_conductor(Gathered(self._group, self._txn, step, (), failure))

    def _end(self, message: End) -> None:
        if message.txn == self._txn:
            self._polls.give_up()
            self._txn, self._step = 0, None
        self._newest = max(self._newest, message.txn)
        for rank in self._ranks:
            self._to_rank(rank, msgspec.structs.replace(message, call=self._calls.get(rank, 0)))

    def _agree(self, worker: str, number: int, value: int) -> None:
        # Every rank waits for one agreement before it asks for the next, so only one can be open.
        if number != self._agreements + 1:
            return
        self._values[worker] = value
        if len(self._values) == len(self._acting):
            largest = max(self._values.values())
            self._agreements, self._values = number, {}
            for rank in self._ranks:
                self._to_rank(rank, Agreed(self._txn, number, largest))

    def _phase(self) -> str:
        return phase_of(None if self._step == 0 else self._duty, self._of)
