"""The promise protocol over a network that delays and reorders, with engines whose steps need all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.promise import Commit, PollCounter, PollLead, Promise, Propose, Standing

LEAD = "lead"
MOST_EVENTS = 20_000


@dataclass
class Rank:
    """One rank of a simulated engine: polls, then takes part in a step; a lockstep engine's step needs all ranks."""

    name: str
    counter: PollCounter = field(default_factory=PollCounter)
    steps_begun: int = 0
    waiting: bool = False
    every: int = 1
    served_at: int | None = None


class Engine:
    """Ranks, a lead, and messages on their way, any of which may be delivered next unless ``ordered``."""

    def __init__(self, seed: int, ranks: int, *, lockstep: bool, ordered: bool, head_start: int = 0) -> None:
        self.random = random.Random(seed)
        self.ranks = {f"r{number}": Rank(f"r{number}") for number in range(ranks)}
        self.lead = PollLead(tuple(self.ranks))
        self.lockstep, self.ordered = lockstep, ordered
        self.mail: list[tuple[str, str, object]] = []
        self.commit: Commit | None = None
        self.proposals = 0
        for _ in range(head_start):
            for rank in self.ranks.values():
                rank.counter.enter()
                rank.steps_begun += 1

    def ask(self) -> None:
        own = next(iter(self.ranks.values())).counter.counter
        self._to_all(self.lead.begin({"r0": own}))

    def _to_all(self, message: Propose | Commit) -> None:
        self.proposals += isinstance(message, Propose)
        self.mail += [(LEAD, rank, message) for rank in self.ranks]

    def release(self) -> None:
        ballot = self.lead.give_up()
        self.mail += [(LEAD, rank, ballot) for rank in self.ranks]

    def deliver(self) -> None:
        """One message arrives."""
        choices = list(range(len(self.mail)))
        if self.ordered:
            pairs: set[tuple[str, str]] = set()
            choices = [n for n in choices if self.mail[n][:2] not in pairs and not pairs.add(self.mail[n][:2])]
        source, target, message = self.mail.pop(self.random.choice(choices))
        if target == LEAD:
            assert isinstance(message, Promise)
            answer = self.lead.hear(source, message)
            if isinstance(answer, Commit):
                assert self.commit is None, "committed twice"
                self.commit = answer
            if answer is not None:
                self._to_all(answer)
            return
        rank = self.ranks[target]
        match message:
            case Propose():
                promise = rank.counter.answer(message)
                if promise is not None:
                    self.mail.append((target, LEAD, promise))
            case Commit(ballot, _):
                rank.counter.commit(ballot)
            case int() as ballot:
                rank.counter.release(ballot)

    def may_step(self, rank: Rank) -> bool:
        """In lockstep a rank begins step n only when all ranks have begun step n - 1: steps need everybody."""
        return not self.lockstep or all(other.steps_begun >= rank.steps_begun for other in self.ranks.values())

    def go_on(self, rank: Rank) -> None:
        """The rank's own thread does the next thing it can."""
        if rank.served_at is not None:
            if rank.counter.standing() is Standing.GO_ON:
                rank.served_at = None
                rank.steps_begun += 1
            return
        if rank.waiting:
            standing = rank.counter.standing()
        elif (rank.steps_begun + 1) % rank.every:
            rank.steps_begun += self.may_step(rank)
            return
        elif self.may_step(rank):
            stopped = rank.counter.enter(rank.steps_begun + 1)
            if stopped is not None:
                self.mail.append((rank.name, LEAD, stopped))
            standing = rank.counter.standing()
        else:
            return
        rank.waiting = standing is Standing.WAIT
        if standing is Standing.GO_ON:
            rank.steps_begun += 1
        elif standing is Standing.SERVE:
            rank.served_at = rank.counter.counter

    def run(self, until: object) -> None:
        for _ in range(MOST_EVENTS):
            if until():  # type: ignore[operator]
                return
            if self.mail and self.random.random() < 0.5:
                self.deliver()
            else:
                self.go_on(self.random.choice(list(self.ranks.values())))
        raise AssertionError(
            f"stuck: {[(r.name, r.counter.counter, r.waiting, r.served_at) for r in self.ranks.values()]}"
        )

    def all_served(self) -> bool:
        return all(rank.served_at is not None for rank in self.ranks.values())


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 6),
    lockstep=st.booleans(),
    ordered=st.booleans(),
    head_start=st.integers(0, 5),
    every=st.integers(1, 9),
)
@example(seed=0, ranks=2, lockstep=True, ordered=True, head_start=0, every=1)
def test_all_ranks_serve_at_one_poll_and_nobody_is_stuck(
    seed: int, ranks: int, lockstep: bool, ordered: bool, head_start: int, every: int
) -> None:
    engine = Engine(seed, ranks, lockstep=lockstep, ordered=ordered, head_start=head_start)
    for rank in engine.ranks.values():
        rank.every = every
    engine.ask()
    engine.run(engine.all_served)
    assert engine.commit is not None
    assert {rank.served_at for rank in engine.ranks.values()} == {engine.commit.stop_at}


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), every=st.lists(st.integers(1, 12), min_size=2, max_size=3))
@example(seed=0, every=[5, 10])
@example(seed=1, every=[2, 3, 7])
def test_ranks_that_poll_at_different_steps_serve_at_one_that_all_of_them_poll_at(seed: int, every: list[int]) -> None:
    """Nobody needs another in its steps, or a rank that waits would hold up one that has to come there."""
    engine = Engine(seed, len(every), lockstep=False, ordered=True)
    for rank, steps in zip(engine.ranks.values(), every, strict=True):
        rank.every = steps
    engine.ask()
    engine.run(engine.all_served)
    served_at = {rank.served_at for rank in engine.ranks.values()}
    assert served_at == {engine.commit.stop_at}  # type: ignore[union-attr]
    assert all(served_at.copy().pop() % steps == 0 for steps in every)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), lockstep=st.booleans(), after=st.integers(0, 60))
def test_a_request_that_is_given_up_lets_everybody_go_on(seed: int, ranks: int, lockstep: bool, after: int) -> None:
    engine = Engine(seed, ranks, lockstep=lockstep, ordered=True)
    engine.ask()
    events = iter(range(after))
    engine.run(lambda: next(events, None) is None)
    engine.release()
    steps = {name: rank.steps_begun for name, rank in engine.ranks.items()}
    engine.run(lambda: all(rank.steps_begun > steps[name] + 3 for name, rank in engine.ranks.items()))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4), lockstep=st.booleans())
def test_request_after_request(seed: int, ranks: int, lockstep: bool) -> None:
    engine = Engine(seed, ranks, lockstep=lockstep, ordered=True)
    for _ in range(3):
        engine.commit = None
        engine.ask()
        engine.run(engine.all_served)
        assert {rank.served_at for rank in engine.ranks.values()} == {engine.commit.stop_at}  # type: ignore[union-attr]
        engine.release()
        engine.run(lambda: not engine.mail and all(rank.served_at is None for rank in engine.ranks.values()))


def test_in_lockstep_two_polls_of_the_slowest_rank_are_enough() -> None:
    for seed in range(200):
        engine = Engine(seed, 4, lockstep=True, ordered=True, head_start=3)
        slowest = min(rank.counter.counter for rank in engine.ranks.values())
        engine.ask()
        # Messages are fast next to steps: all of them arrive between two steps of anyone.
        while engine.mail:
            engine.deliver()
        engine.run(engine.all_served)
        assert engine.commit is not None
        assert engine.commit.stop_at - slowest <= 2


def test_a_rank_that_passed_the_poll_declines_and_a_larger_one_is_found() -> None:
    lead = PollLead(("a", "b"))
    slow, fast = PollCounter(), PollCounter()
    for _ in range(5):
        fast.enter()
    first = lead.begin({"a": 0})
    assert first.stop_at == 1
    assert fast.answer(first) == Promise(first.ballot, False, 5)
    assert slow.answer(first) is None
    assert slow.enter() == Promise(first.ballot, True, 1)
    assert lead.hear("a", Promise(first.ballot, True, 1)) is None
    assert (lead.waiting_for, lead.stopped) == (("b",), {"a": 1})
    second = lead.hear("b", Promise(first.ballot, False, 5))
    assert isinstance(second, Propose)
    assert second.stop_at > 5
    assert slow.answer(second) is None
    assert slow.standing() is Standing.GO_ON


def test_an_older_ballot_changes_nothing() -> None:
    rank = PollCounter()
    newer, older = Propose(5, 3), Propose(4, 1)
    assert rank.answer(newer) is None
    assert rank.answer(older) is None
    rank.release(4)
    assert not rank.commit(4)
    assert [rank.enter() for _ in range(3)] == [None, None, Promise(5, True, 3)]
    assert rank.standing() is Standing.WAIT
    assert rank.commit(5)
    assert rank.standing() is Standing.SERVE


def test_steps_must_grow() -> None:
    rank = PollCounter()
    assert rank.enter(7) is None
    assert rank.enter() is None
    assert rank.counter == 8
    with pytest.raises(ValueError, match="poll number 8 after 8"):
        rank.enter(8)


def test_steps_that_jump_over_the_poll_stop_at_the_next() -> None:
    rank = PollCounter()
    assert rank.answer(Propose(1, 10)) is None
    assert rank.enter(9) is None
    assert rank.enter(12) == Promise(1, True, 12)
    assert rank.standing() is Standing.WAIT
    assert rank.commit(1)
    assert rank.standing() is Standing.SERVE
