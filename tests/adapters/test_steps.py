"""Steps: what the conductor hears of engines, in the order in which it happened."""

from __future__ import annotations

import threading
import time

import pytest

from adapters.duty_messages import Stay
from adapters.failures import LostWorkerError
from adapters.messages import Begin, Call, End, Member, Roster, SendIntent, ToLead
from adapters.steps import TRAINERS, GroupLost, Steps, is_complete

ENGINE = "engine/a"
RANKS = ("trainer/0", "trainer/1")


def trainers(*workers: str) -> Roster:
    members = tuple(Member(each, RANKS.index(each), 2, "1", "host", "auto", None) for each in workers)
    return Roster(TRAINERS, 2, members)


def called(worker: str, after: int, number: int = 1) -> Call:
    return Call(worker, number, after, SendIntent(1), b"", None)


def hear(steps: Steps, *items: Roster | Call) -> None:
    for item in items:
        steps.hear(item)
        steps.listen(0.0)


def roster(incarnation: str) -> Roster:
    return Roster(ENGINE, 1, (Member(f"{ENGINE}/0", 0, 1, incarnation, "host", "auto", None),))


def test_an_engine_that_has_joined_again_stays_joined_when_its_loss_is_found_out() -> None:
    """It is lost, joins again, and the news of that still waits when it is spoken to."""
    steps = Steps(lambda group, message: None, deadline_s=5.0)
    steps.hear(roster("1"))
    steps.hear(GroupLost(ENGINE, "its connection closed"))
    steps.listen(0.0)
    steps.listen(0.0)
    assert not is_complete(steps.rosters.get(ENGINE))
    steps.hear(roster("1"))
    steps.open("connect")
    with pytest.raises(LostWorkerError, match=r"engine/a/0: lost during .*: it left"):
        steps.run({ENGINE: (Stay(),)})
    steps.listen(0.0)
    assert is_complete(steps.rosters.get(ENGINE))


def test_an_engine_that_lost_its_connection_a_moment_ago_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is back, or it is not: then the others go on, and do not wait for it again."""
    steps = Steps(lambda group, message: None, deadline_s=5.0)
    hear(steps, roster("1"))
    steps.hear(GroupLost(ENGINE, "its connection closed"))
    steps.listen(0.0)
    later = threading.Timer(0.2, steps.hear, (roster("1"),))
    later.start()
    steps.wait_back([ENGINE])
    later.join()
    assert is_complete(steps.rosters.get(ENGINE))
    monkeypatch.setattr("adapters.steps._BACK_WITHIN_S", 1.0)
    steps.hear(GroupLost(ENGINE, "its connection closed"))
    steps.listen(0.0)
    for least_s, most_s in ((0.7, 10.0), (0.0, 0.7)):
        begun = time.monotonic()
        steps.wait_back([ENGINE, "engine/b"])
        assert least_s <= time.monotonic() - begun < most_s
    assert not is_complete(steps.rosters.get(ENGINE))


def test_a_call_of_a_trainer_that_joined_while_a_transaction_was_open_waits_for_the_next() -> None:
    """It takes no part in that transaction, so the end of it neither answers the call nor drops it."""
    said: list[ToLead] = []
    steps = Steps(lambda group, message: said.append(message), deadline_s=5.0)
    hear(steps, trainers(*RANKS), called(RANKS[0], 0), called(RANKS[1], 0))
    steps.open("connect")
    hear(steps, trainers(RANKS[0]), trainers(*RANKS))
    steps.end(TRAINERS, None)
    (end,) = (message for message in said if isinstance(message, End))
    assert not steps.calls
    hear(steps, called(RANKS[1], end.txn - 1))
    assert not steps.calls, "the end that is on its way answers it"
    hear(steps, called(RANKS[0], end.txn))
    steps.open("version 1")
    hear(steps, trainers(RANKS[0]), trainers(*RANKS), called(RANKS[1], end.txn + 1))
    steps.end(TRAINERS, None)
    assert list(steps.calls) == [RANKS[1]]


def test_a_call_after_one_that_was_taken_back_waits_for_the_next_transaction_whenever_it_comes() -> None:
    said: list[ToLead] = []
    steps = Steps(lambda group, message: said.append(message), deadline_s=5.0)
    hear(steps, trainers(*RANKS), called(RANKS[0], 0), called(RANKS[1], 0))
    for comes_late in (False, True):
        steps.open("version 1")
        begin = said[-1]
        assert isinstance(begin, Begin)
        number = begin.calls[RANKS[1]]
        again = called(RANKS[1], 0, number + 1)
        hear(steps, called(RANKS[1], 0, number), *(() if comes_late else (again,)))
        steps.end(TRAINERS, None)
        hear(steps, called(RANKS[1], 0, number), *((again,) if comes_late else ()))
        assert steps.calls == {RANKS[1]: again}
        hear(steps, called(RANKS[0], begin.txn, number + 1))


def test_the_call_of_a_trainer_that_is_lost_has_failed_there_and_begins_nothing() -> None:
    steps = Steps(lambda group, message: None, deadline_s=5.0)
    hear(steps, trainers(*RANKS), called(RANKS[0], 0), called(RANKS[1], 0), trainers(RANKS[0]), trainers(*RANKS))
    assert list(steps.calls) == [RANKS[0]]
    hear(steps, called(RANKS[1], 0))
    assert list(steps.calls) == [*RANKS]
