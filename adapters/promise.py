"""All ranks of an engine stop at the same poll: propose, stop, then commit.

An engine's ranks call `poll_requests` once a step, each at its own pace, and a request reaches them at different
moments. If each stopped where it first saw the request, one would wait inside an update while another waits for it
inside a step. So the lead (rank 0's background thread) proposes a poll number K. A rank whose own counter is below K
will stop at poll K, and says so when it is there; a rank that has already entered poll K declines and says how far it
is, and the lead proposes a larger number. The lead commits when everyone has stopped:

::

    lead -> ranks   Propose(ballot 1, stop at 8)
    rank 0, at 7    will stop          rank 1, at 8    declines: "I am at 8"
    lead -> ranks   Propose(ballot 2, stop at 9)      rank 0, which may wait at 8 by now, goes on to 9
    both, at 9      "I have stopped at 9"             lead -> ranks   commit ballot 2

Answers come from background threads, so a step in which ranks wait for each other never holds them up. Where not every
step is polled, ranks stop at their first poll from K on; should these differ, the lead proposes the largest, where one
waits already and to which the others go on. Ballots only grow, and what belongs to an older ballot is ignored: messages
may be late or out of order. Nothing here sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

__all__ = ["Ballot", "Commit", "PollCounter", "PollLead", "Promise", "Propose", "Standing"]

MAX_POLL = 1 << 61
"""Polls and ballots are numbered below this, so that what is added to them still travels."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

Ballot: TypeAlias = Number
"""Number of a proposal; grows with every one that a lead makes."""

_WIDEST_MARGIN = 1 << 20


class Standing(Enum):
    """What a rank must do at the poll it is in."""

    GO_ON = 0
    WAIT = 1
    SERVE = 2


class Propose(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To every rank: stop at this poll, or at the first one after it."""

    ballot: Ballot
    stop_at: Number


class Promise(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a rank: the last poll it has entered, and whether it stopped there or had passed the proposed one."""

    ballot: Ballot
    given: bool
    counter: Annotated[int, msgspec.Meta(ge=0, le=MAX_POLL)]


class Commit(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To every rank: all have stopped at this poll; serve."""

    ballot: Ballot
    stop_at: Number


class PollCounter:
    """One rank's part: how many polls it has entered, and what it has promised."""

    __slots__ = ("_ballot", "_committed", "_counter", "_stop_at")

    def __init__(self) -> None:
        self._counter = 0
        self._ballot: Ballot = 0
        self._stop_at: int | None = None
        self._committed = False

    @property
    def counter(self) -> int:
        """The last poll entered."""
        return self._counter

    @property
    def ballot(self) -> Ballot:
        """The newest ballot heard of."""
        return self._ballot

    @property
    def has_promised(self) -> bool:
        """Whether a promise is given and neither served nor released."""
        return self._stop_at is not None

    def enter(self, step: int | None = None) -> Promise | None:
        """Enter the next poll, or the one numbered ``step``; what to tell the lead if this rank has to stop there.

        Raises
        ------
        ValueError
            If ``step`` is not larger than the last poll's number, or above `MAX_POLL`.
        """
        following = self._counter + 1 if step is None else step
        if not self._counter < following <= MAX_POLL:
            raise ValueError(
                f"poll number {following} after {self._counter}: steps must grow from poll to poll, up to {MAX_POLL}"
            )
        self._counter = following
        return None if self.standing() is Standing.GO_ON else Promise(self._ballot, True, following)

    def standing(self) -> Standing:
        """What to do at the poll last entered."""
        if self._stop_at is None or self._counter < self._stop_at:
            return Standing.GO_ON
        return Standing.SERVE if self._committed else Standing.WAIT

    def answer(self, proposal: Propose) -> Promise | None:
        """Promise to stop, of which the lead hears when it is kept, or decline; older proposals change nothing."""
        if proposal.ballot <= self._ballot:
            return None
        waits_there = self.standing() is Standing.WAIT and self._counter == proposal.stop_at
        given = self._counter < proposal.stop_at or waits_there
        self._ballot = proposal.ballot
        self._committed = False
        self._stop_at = proposal.stop_at if given else None
        return Promise(proposal.ballot, given, self._counter) if waits_there or not given else None

    def commit(self, ballot: Ballot) -> bool:
        """Learn that everyone has stopped; False if this rank has withdrawn its own promise since."""
        if ballot != self._ballot or self._stop_at is None:
            return False
        self._committed = True
        return True

    def release(self, ballot: Ballot) -> None:
        """Forget a promise of this ballot or an older one, served or not."""
        if ballot >= self._ballot:
            self._ballot = ballot
            self._stop_at = None
            self._committed = False

    def forget(self) -> None:
        """Begin anew with another lead, whose ballots begin at one."""
        self._ballot = 0
        self._stop_at = None
        self._committed = False


class PollLead:
    """The lead's part: find a poll that nobody has entered yet, and at which everybody stops.

    Parameters
    ----------
    ranks
        Everyone who has to stop.
    """

    __slots__ = ("_ballot", "_counters", "_declined", "_margin", "_open", "_ranks", "_stopped")

    def __init__(self, ranks: Sequence[str]) -> None:
        self._ranks = tuple(ranks)
        self._counters: dict[str, int] = {}
        self._ballot: Ballot = 0
        self._margin = 1
        self._declined = False
        self._open = False
        self._stopped: dict[str, int] = {}

    @property
    def ballot(self) -> Ballot:
        """The newest ballot."""
        return self._ballot

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """Ranks that have not stopped for the newest proposal; empty when none is open."""
        return tuple(rank for rank in self._ranks if rank not in self._stopped) if self._open else ()

    @property
    def stopped(self) -> Mapping[str, int]:
        """At which poll ranks wait for the newest proposal."""
        return self._stopped

    def begin(self, counters: Mapping[str, int]) -> Propose:
        """Make the first proposal of a request, from what is known of the counters."""
        self._learn(counters)
        self._margin = 1
        self._declined = False
        return self._propose(max(self._counters.values(), default=0) + 1)

    def hear(self, rank: str, promise: Promise) -> Propose | Commit | None:
        """Take a rank's answer; a larger proposal, the commit, or nothing yet."""
        self._learn({rank: promise.counter})
        if promise.ballot != self._ballot or not self._open:
            return None
        if promise.given:
            self._stopped[rank] = promise.counter
            if self.waiting_for:
                return None
            polls = set(self._stopped.values())
            if len(polls) == 1:
                self._open = False
                return Commit(self._ballot, polls.pop())
            return self._propose(max(polls))
        # The first answer tells where the ranks are, so the next poll of the fastest will do: ranks whose steps
        # need each other then stop within two. A faster one may pass any fixed margin while messages travel;
        # doubling it catches up in a few rounds.
        if self._declined:
            self._margin = min(2 * self._margin, _WIDEST_MARGIN)
        self._declined = True
        return self._propose(max(self._counters.values()) + self._margin)

    def give_up(self) -> Ballot:
        """End the search; ranks must be told to release this ballot."""
        self._open, self._stopped = False, {}
        return self._ballot

    def _propose(self, stop_at: int) -> Propose:
        self._ballot += 1
        self._open, self._stopped = True, {}
        return Propose(self._ballot, stop_at)

    def _learn(self, counters: Mapping[str, int]) -> None:
        for rank, counter in counters.items():
            self._counters[rank] = max(counter, self._counters.get(rank, 0))
