"""Groups on paths of their own: none waits for another, and those that cannot do without one fail with it."""

from __future__ import annotations

import time

from adapters.duty_messages import Done, Duty, Install, Prepare, Publish, Transfer
from adapters.failures import Failure, VerificationError
from adapters.messages import Gathered
from adapters.paths import Path, Paths

Say = tuple[Duty, ...]
DONE = (Done(0.0),)
LOST = Failure("LostWorkerError", "engine/a/0", "gone")


def update(group: str, *, refuse: bool = False) -> Path[Say, str]:
    yield (Transfer(1),)
    if refuse:
        raise VerificationError("bits differ")
    yield (Install(1),)
    yield (Publish(1),)
    return f"{group} is done"


def begin(*groups: str, decisive: tuple[str, ...] | None = None, within_s: float = 100.0) -> Paths[Say, str]:
    paths = {group: update(group, refuse=group.startswith("bad")) for group in groups}
    made: Paths[Say, str] = Paths(paths, groups if decisive is None else decisive, within_s=within_s)
    assert set(made.to_say) == set(groups)
    made.wait_for(dict.fromkeys(groups, 1))
    return made


def answer(made: Paths[Say, str], group: str, failure: Failure | None = None) -> dict[str, Failure]:
    return made.hear(Gathered(group, 7, made.waiting[group], () if failure else DONE, failure))


def test_a_quick_group_comes_to_its_end_while_another_is_at_its_first_step() -> None:
    made = begin("a", "b")
    for step, duty in ((2, Install(1)), (3, Publish(1))):
        assert answer(made, "a") == {}
        assert made.to_say == {"a": (duty,)}
        made.wait_for({"a": step})
    answer(made, "a")
    assert made.done == {"a": "a is done"}
    assert made.waiting == {"b": 1}
    assert made.going


def test_a_failed_transfer_takes_along_those_that_still_transfer() -> None:
    made = begin("a", "b", "c")
    answer(made, "c")
    made.wait_for({"c": 2})
    soon = time.monotonic() + 50
    assert answer(made, "a", LOST) == {"b": LOST}
    assert made.late_at["b"] < soon < made.late_at["c"]
    # Who was cancelled fails in its turn, and cancels nobody.
    assert answer(made, "b", LOST) == {}
    answer(made, "c")
    made.wait_for({"c": 3})
    answer(made, "c")
    assert (made.done, set(made.failures), made.going) == ({"c": "c is done"}, {"a", "b"}, False)


def test_a_failed_install_is_nobody_elses() -> None:
    made = begin("a", "b")
    for group in ("a", "b"):
        answer(made, group)
    made.wait_for({"a": 2, "b": 3})
    assert answer(made, "a", LOST) == {}
    assert made.failures == {"a": LOST}
    assert "b" in made.waiting


def test_a_group_that_does_not_decide_fails_alone() -> None:
    made = begin("a", "b", decisive=("b",))
    assert answer(made, "a", LOST) == {}
    assert answer(made, "b", LOST) == {}
    assert not made.going


def test_a_path_that_raises_fails_its_group() -> None:
    made = begin("bad", "b")
    assert answer(made, "bad") == {}
    assert made.failures["bad"].kind == "VerificationError"
    assert made.going


def test_what_one_rank_of_a_group_does_decides_for_it() -> None:
    def path() -> Path[tuple[Duty | None, ...], str]:
        yield (None, Transfer(1))
        return "done"

    made: Paths[tuple[Duty | None, ...], str] = Paths({"a": path(), "b": path()}, ("a", "b"), within_s=1.0)
    made.wait_for({"a": 1, "b": 1})
    assert made.hear(Gathered("a", 7, 1, (), LOST)) == {"b": LOST}


def test_steps_before_the_transfer_cancel_nobody() -> None:
    def path() -> Path[Say, str]:
        yield (Prepare(1, b""),)
        return "done"

    made: Paths[Say, str] = Paths({"a": path(), "b": path()}, ("a", "b"), within_s=1.0)
    made.wait_for({"a": 1, "b": 1})
    assert made.hear(Gathered("a", 7, 1, (), LOST)) == {}
