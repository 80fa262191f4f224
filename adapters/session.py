"""One rank's place in a transaction: duties come in, answers go out, and a poll costs nothing while nothing comes.

Messages are delivered by the control thread; everything that runs the user's code or moves bytes happens in the thread
that called the adapter, between two duties:

::

    control thread          Ask(Prepare)        Ask(Transfer)                    End
    caller, in serve()        perform -> Answer    perform -> Answer    ...      returns the End

A failure elsewhere that comes while a duty is being done is told to `on_cancel`, so that a transfer can stop at once.

A rank that stages serves beside its caller: a thread of its own does the duties that come before the ranks have stopped
(`serve_beside`), and the caller those that come after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from adapters.duty_messages import Duty, Result
from adapters.failures import Failure, LostWorkerError, failure_of, raise_failure
from adapters.messages import (
    LEFT,
    Agreed,
    AgreeValue,
    Answer,
    AnswerStop,
    Ask,
    Call,
    Cancel,
    Committed,
    End,
    FromRank,
    Intent,
    Note,
    ProposeStop,
    SendIntent,
    ToRank,
    phase_of,
)
from adapters.probe_worker import Progress
from adapters.promise import PollCounter, Standing
from layout_algebra.signal_safe import Condition
from transfer_exec.errors import DeadlineError

__all__ = ["Session"]

_KEPT_ENDS = 8
_KEPT_CALLS = 64
_KEPT_NOTES = 1024
_SILENCE_MARGIN_S = 15.0


class Session:
    """A rank's mailbox, its promises, and the loop that does duties.

    Parameters
    ----------
    worker
        Its name.
    send_up
        Takes a message to the group's lead; any thread may call it.
    deadline_s
        Longest wait for the first duty.
    beside
        Whether duties that come before this rank has stopped are for `serve_beside`.

    Attributes
    ----------
    stopped_at
        When this rank last entered a poll at which it had promised to stop; CLOCK_MONOTONIC.
    """

    def __init__(
        self, worker: str, send_up: Callable[[FromRank], None], *, deadline_s: float, beside: bool = False
    ) -> None:
        self._worker = worker
        self._send_up = send_up
        self._deadline_s = deadline_s
        self._changed = Condition()
        self._polls = PollCounter()
        self._txn = 0
        self._mail: deque[Ask] = deque()
        self._beside: deque[Ask] | None = deque() if beside else None
        self._stopped_for = 0
        self._ends: dict[int, End] = {}
        self._patience_s = deadline_s
        self._heard_at = 0.0
        self._notes: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self._phase = "the call"
        self._agreed: dict[int, int] = {}
        self._agreements = 0
        self._refusal: Failure | None = None
        self._broken: Failure | None = None
        self._on_cancel: Callable[[str], None] | None = None
        self._cancelled: Failure | None = None
        self._declined = 0
        self._left_early = 0
        self._serving = False
        self._progress: Progress | None = None
        self._calls = 0
        self._called: Call | None = None
        self._taken_back: dict[int, Failure] = {}
        self._unheard: Failure | None = None
        self.stopped_at = 0.0

    # The caller's thread

    @property
    def counter(self) -> int:
        """Polls entered so far."""
        return self._polls.counter

    @property
    def worker(self) -> str:
        """Its name."""
        return self._worker

    @property
    def phase(self) -> str:
        """What this rank heard of last, in words."""
        return self._phase

    @property
    def txn(self) -> int:
        """The newest transaction this rank has heard of."""
        return self._txn

    def refuse(self, refusal: Exception | None) -> None:
        """Answer every request to stop with this error, or no longer; a promise that is given is taken back."""
        with self._changed:
            self._refusal = None if refusal is None else failure_of(refusal, self._worker)
            if refusal is not None and self._polls.has_promised:
                self._leave(refusal)

    def check(self) -> None:
        """Raise what ended the control thread, or why the lead will not have this rank."""
        if self._broken is not None:
            raise_failure(self._broken)

    def enter_poll(self, step: int | None) -> int | None:
        """Enter the next poll; the transaction that this rank has stopped here to serve, or None.

        Raises
        ------
        DeadlineError
            If this rank had to stop here and nobody decided in time.
        """
        with self._changed:
            stopped = self._polls.enter(step)
            if stopped is None:
                return None
            self.stopped_at = time.monotonic()
            self._send_up(AnswerStop(self._txn, stopped, None))
            stop_at = self.stopped_at + self._patience_s
            while (standing := self._polls.standing()) is Standing.WAIT:
                if not self._changed.wait(stop_at - time.monotonic()) and time.monotonic() >= stop_at:
                    late = DeadlineError(
                        f"stopped at poll {self._polls.counter} and heard nothing more within "
                        f"{self._patience_s:g} s, last of {self._phase}; the engine may go on, nothing was written"
                    )
                    self._leave(late)
                    raise_failure(failure_of(late, self._worker))
            # It may have ended before this thread woke; `serve` then says how, as to the ranks that were quicker.
            return self._txn if standing is Standing.SERVE or self._txn in self._ends else None

    def call(self, intent: Intent, metadata: bytes, failure: Failure | None) -> int:
        """Tell the lead that this trainer called an adapter method.

        Returns
        -------
        int
            The newest transaction so far: what ``serve`` does comes after it.
        """
        with self._changed:
            after = self._txn
            self._patience_s = self._deadline_s + _SILENCE_MARGIN_S
            self._notes.clear()
            self._phase = f"send_weights({intent.version})" if isinstance(intent, SendIntent) else "connect"
            self._calls += 1
            self._called, self._unheard = Call(self._worker, self._calls, after, intent, metadata, failure), None
        self._send_up(self._called)
        return after

    def serve(
        self,
        perform: Callable[[Duty], Result],
        *,
        after: int,
        until: type[Duty] | None = None,
        progress: Progress | None = None,
    ) -> End | int:
        """Do every duty of one transaction.

        Parameters
        ----------
        perform
            Does a duty; what it raises becomes the answer, and `serve` goes on.
        after
            Ignore transactions up to this one.
        until
            Leave after a duty of this type was done well.
        progress
            Told, between duties, what is being done and what is waited for. What it raises ends the call.

        Returns
        -------
        End or int
            How the transaction ended; or its number, if it goes on after ``until``.

        Raises
        ------
        DeadlineError
            If neither duty nor end comes.
        """
        try:
            self._serving, self._progress = True, progress
            while True:
                ask = self._next(after)
                if isinstance(ask, End):
                    return ask
                if isinstance(ask, Note):
                    self.report(ask.what, ask.done, ask.total)
                    continue
                phase = phase_of(ask.duty, ask.of)
                self.report(phase, 0, 1)
                well = self._reply(perform, ask)
                self.report(phase, 1, 1)
                if well and until is not None and isinstance(ask.duty, until):
                    with self._changed:
                        self._polls.release(self._polls.ballot)
                        self._left_early = ask.txn
                    return ask.txn
        except BaseException as error:
            # Also of an interrupt: the other ranks must not wait for this one until their deadlines.
            self.abandon(error)
            raise
        finally:
            self._serving, self._called, self._progress = False, None, None

    def report(self, what: str, done: int, total: int) -> None:
        """Tell the caller how far something is; from the thread that serves."""
        if self._progress is not None:
            self._progress(what, done, total)

    def abandon(self, error: BaseException) -> None:
        """The caller is about to leave its call by an exception: whoever counts on this rank must hear of it at once.

        That is true in every state: a call that has not begun is taken back, a promise too, and a transaction that is
        open fails. Nothing is said if nothing is open.
        """
        with self._changed:
            called, self._called = self._called, None
            if called is not None and self._txn <= called.after:
                failure = self._take_back(called, failure_of(error, self._worker))
                self._send_up(msgspec.structs.replace(called, failure=failure))
            elif called is not None or self._serving or self._polls.has_promised:
                self._leave(error)

    def serve_beside(self, perform: Callable[[Duty], Result], ended: Callable[[End], object]) -> None:
        """Do every duty that comes while the caller goes on, until the session is over; for a thread of its own.

        Parameters
        ----------
        perform
            Does a duty; what it raises becomes the answer.
        ended
            Hears how each transaction ended that such duties were of.
        """
        served = 0
        while (item := self._next_beside(served)) is not None:
            if isinstance(item, End):
                served = 0
                ended(item)
            else:
                served = item.txn
                self._reply(perform, item)

    def wait_end(self, txn: int, timeout_s: float | None, progress: Progress | None = None) -> End | None:
        """The end of a transaction that `serve` left early; None if it has not come in time, or is long past."""
        stop_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                left = None if stop_at is None else stop_at - time.monotonic()
                over = txn in self._ends or self._txn != txn or (left is not None and left <= 0)
                if not over and not self._notes:
                    self._changed.wait(left)
                notes = list(self._notes)
                self._notes.clear()
            if progress is not None:
                for note in notes:
                    progress(note.what, note.done, note.total)
            if over:
                return self._ends.get(txn)

    def wait_settled(self) -> None:
        """Wait, up to the deadline, for the end of a transaction that `serve` left early: it still needs this rank."""
        if self._left_early and self._broken is None:
            self.wait_end(self._left_early, self._deadline_s)

    def agree(self, value: int) -> int:
        """The largest value of all ranks of the group, each of which must ask.

        Raises
        ------
        DeadlineError
            If some rank does not ask.
        """
        with self._changed:
            self._agreements += 1
            number, txn = self._agreements, self._txn
        self._send_up(AgreeValue(txn, number, value))
        stop_at = time.monotonic() + self._patience_s
        with self._changed:
            while number not in self._agreed:
                end = self._ends.get(txn)
                failure = self._cancelled if end is None else end.failure
                if end is not None or failure is not None:
                    gone = Failure(LostWorkerError.__name__, self._worker, "the probe was ended")
                    raise_failure(failure or gone)
                if not self._changed.wait(stop_at - time.monotonic()) and time.monotonic() >= stop_at:
                    raise DeadlineError(
                        f"{self._worker}: {self._phase}: the other ranks did not agree on a number of loads within "
                        f"{self._patience_s:g} s"
                    )
            return self._agreed[number]

    def on_cancel(self, act: Callable[[str], None] | None) -> None:
        """What to do, on the control thread, if the transaction fails while a duty is being done."""
        with self._changed:
            self._on_cancel = act
            end = self._ends.get(self._txn)
            failure = self._cancelled if end is None else end.failure
            if act is not None and failure is not None:
                act(str(failure))

    # The control thread

    def tell(self, what: str, done: int, total: int) -> None:
        """Hand something on to the caller's progress; any thread may call it."""
        with self._changed:
            self._notes.append(Note(self._txn, what, done, total, self._patience_s))
            self._changed.notify_all()

    def deliver(self, message: ToRank) -> None:
        """Take a message from the lead."""
        with self._changed:
            match message:
                case ProposeStop(txn, proposal, patience_s, of) if (
                    txn >= self._txn and txn not in self._ends and txn != self._declined
                ):
                    self._begin(txn)
                    self._patience_s = patience_s
                    self._phase = phase_of(None, of)
                    if self._refusal is not None:
                        self._send_up(AnswerStop(txn, None, self._refusal))
                    else:
                        declined = self._polls.answer(proposal)
                        if declined is not None:
                            self._send_up(AnswerStop(txn, declined, None))
                case Committed(txn, ballot, patience_s) if txn == self._txn:
                    self._patience_s = patience_s
                    self._stopped_for = txn
                    self._polls.commit(ballot)
                case Ask(txn=txn, call=call) if call in self._taken_back and txn != self._declined:
                    # That call has begun after all, before the lead heard that nobody waits in it.
                    self._decline(txn, self._taken_back[call])
                case Ask(txn=txn) if txn >= self._txn and txn not in self._ends and txn != self._declined:
                    self._begin(txn)
                    self._patience_s = message.patience_s
                    self._phase = phase_of(message.duty, message.of)
                    mail = self._mail if self._beside is None or self._stopped_for == txn else self._beside
                    mail.append(message)
                case Note(txn=txn) if txn >= self._txn and txn not in self._ends and txn != self._declined:
                    # It does not begin the transaction: a trainer that has not called takes no part in it.
                    self._patience_s, self._heard_at, self._phase = message.patience_s, time.monotonic(), message.what
                    self._notes.append(message)
                case Agreed(txn, number, value) if txn == self._txn:
                    self._agreed[number] = value
                case Cancel(txn, failure) if txn == self._txn:
                    self._cancelled = failure
                    if self._on_cancel is not None:
                        self._on_cancel(str(failure))
                case End(txn=txn, call=call) if 0 < call < self._calls and txn > self._txn:
                    pass  # of a call that was taken back; this rank waits for that of the call it has made since
                case End(txn=txn) if txn >= self._txn and txn not in self._ends:
                    self._begin(txn)
                    self._finish(message)
                case _:
                    return  # of a transaction that is over
            self._changed.notify_all()

    def joined(self, txn: int) -> None:
        """The lead has this rank, which takes no part in the lead's transactions up to this one."""
        with self._changed:
            self._begin(txn)

    def lead_lost(self, failure: Failure) -> None:
        """The lead is gone: what is open has failed, as has a call that has not begun; another lead counts from one."""
        with self._changed:
            if self._txn and self._txn not in self._ends:
                self._finish(End(self._txn, failure))
            if self._called is not None and self._txn <= self._called.after:
                # Should the lead still have that call, and begin it, it hears that nobody waits here.
                self._unheard = self._take_back(self._called, failure)
            self._polls.forget()
            self._changed.notify_all()

    def stop(self, failure: Failure) -> None:
        """Nothing will come any more: the adapter closes, or its control thread ended."""
        with self._changed:
            self._broken = failure
            if self._txn and self._txn not in self._ends:
                self._finish(End(self._txn, failure))
            self._polls.forget()
            self._changed.notify_all()

    # Inside, with the lock held

    def _begin(self, txn: int) -> None:
        if txn > self._txn:
            self._txn = txn
            self._clear()
            self._agreed = {}
            self._agreements = 0
            self._cancelled = None

    def _finish(self, end: End) -> None:
        self._ends[end.txn] = end
        while len(self._ends) > _KEPT_ENDS:
            del self._ends[min(self._ends)]
        self._clear()
        self._polls.release(self._polls.ballot)
        if self._on_cancel is not None and end.failure is not None:
            self._on_cancel(str(end.failure))

    def _take_back(self, call: Call, failure: Failure) -> Failure:
        """Nobody waits in a call any more."""
        self._taken_back[call.number] = failure
        while len(self._taken_back) > _KEPT_CALLS:
            del self._taken_back[min(self._taken_back)]
        return failure

    def _leave(self, error: BaseException) -> None:
        """This rank takes no further part in what is open; the others must not wait for it."""
        self._polls.release(self._polls.ballot)
        self._clear()
        if self._txn not in self._ends and self._txn != self._declined:
            self._decline(self._txn, failure_of(error, self._worker))

    def _decline(self, txn: int, failure: Failure) -> None:
        self._declined = txn
        self._send_up(Answer(txn, LEFT, None, failure))

    def _clear(self) -> None:
        self._mail.clear()
        if self._beside is not None:
            self._beside.clear()

    # Inside

    def _next(self, after: int) -> Ask | End | Note:
        with self._changed:
            began = time.monotonic()
            while True:
                if self._notes:
                    return self._notes.popleft()
                if self._mail and self._mail[0].txn > after:
                    return self._mail.popleft()
                newest = max(self._ends, default=0)
                if newest > after:
                    return self._ends[newest]
                if self._broken is not None or self._unheard is not None:
                    return End(self._txn, self._broken or self._unheard)
                stop_at = max(began, self._heard_at) + self._patience_s
                if not self._changed.wait(stop_at - time.monotonic()) and time.monotonic() >= stop_at:
                    raise DeadlineError(
                        f"{self._worker}: heard nothing more within {self._patience_s:g} s, last of {self._phase}"
                    )

    def _next_beside(self, served: int) -> Ask | End | None:
        """The next duty beside the caller, or the end of the transaction whose duties were served; None at the end."""
        with self._changed:
            assert self._beside is not None
            while not self._beside and served not in self._ends and self._broken is None:
                self._changed.wait()
            if served in self._ends:
                return self._ends[served]
            return self._beside.popleft() if self._beside else None

    def _reply(self, perform: Callable[[Duty], Result], ask: Ask) -> bool:
        """Do a duty and answer, unless it is over by then; whether it was done well and in time."""
        try:
            answer = Answer(ask.txn, ask.step, perform(ask.duty), None)
        except Exception as error:  # noqa: BLE001 - the other workers must hear of it, whatever it is
            answer = Answer(ask.txn, ask.step, None, failure_of(error, self._worker))
        with self._changed:
            if ask.txn in self._ends:
                return False
        self._send_up(answer)
        return answer.failure is None
