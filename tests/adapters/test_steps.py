"""Steps: what the conductor hears of engines, in the order in which it happened."""

from __future__ import annotations

import pytest

from adapters.duty_messages import Stay
from adapters.failures import LostWorkerError
from adapters.messages import Member, Roster
from adapters.steps import GroupLost, Steps, is_complete

ENGINE = "engine/a"


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
