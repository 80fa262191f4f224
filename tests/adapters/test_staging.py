"""The four modes: callers that train and generate on, what lands nevertheless, what is left when something fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from adapters.failures import (
    ClosedError,
    DisagreementError,
    HookError,
    LostWorkerError,
    StaleError,
    TornError,
    UsageError,
    VerificationError,
    VersionError,
)
from adapters.receiver import State
from tests.adapters.crew import Crew, wait_for
from tests.adapters.test_receiver import _fail_at_write, opaque_rollout
from tests.adapters.toy import Holding, Pairs, copy_of, rollout, same_bits, trainer
from transfer_exec.errors import TransportError

MODES = [(), ("trainer",), ("a", "b"), ("trainer", "a", "b"), ("b",), ("trainer", "a")]
modes = pytest.mark.parametrize("staging", MODES, ids=lambda names: "+".join(names) or "none")


def send_and_spoil(crew: Crew, version: int) -> list[object]:
    """Send a version, and overwrite the weights as soon as a trainer's call returns."""
    for holding in crew.holdings:
        holding.fill(version)

    def call(sender: object, rank: int) -> object:
        pending = sender.send_weights(version)  # type: ignore[attr-defined]
        for tensor in crew.holdings[rank].tensors.values():
            tensor.fill_(float("nan"))
        return pending.result(30)

    outcomes = crew.trainers(call)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def check_all_at(crew: Crew, version: int) -> None:
    for one in crew.rollouts.values():
        wait_for(lambda one=one: bool(one.updates) and one.updates[-1].version == version)  # type: ignore[misc]
        assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, version)
        assert same_bits(one.holding.tensors, one.holding.expected(version))
        assert one.errors == []


@modes
@pytest.mark.parametrize("activation", ["engine", "fleet"])
def test_overwriting_the_weights_at_once_never_changes_what_lands(
    tmp_path: Path, staging: tuple[str, ...], activation: str
) -> None:
    engines = {"a": [rollout(r, 2) for r in range(2)], "b": [rollout(0, 1)]}
    with Crew(
        tmp_path,
        [trainer(r, 2) for r in range(2)],
        engines,
        staging=staging,
        activation=activation,  # type: ignore[arg-type]
    ) as crew:
        crew.connect(buffer_bytes=64)
        for version in (1, 2, 3):
            report = send_and_spoil(crew, version)[0]
            check_all_at(crew, version)
        assert set(report.measures.stall_s) == set(report.workers)  # type: ignore[attr-defined]
        for worker, one in report.workers.items():  # type: ignore[attr-defined]
            stages = worker.rpartition("/")[0].removeprefix("engine/") in staging
            assert (one.host_bytes > 0) == stages, worker


@modes
def test_hooks_once_and_padding_keeps_its_bits(tmp_path: Path, staging: tuple[str, ...]) -> None:
    ran: list[str] = []
    holding = rollout(0, 1)
    hooks = {"before_update_hook": lambda: ran.append("before"), "after_update_hook": lambda: ran.append("after")}
    with Crew(tmp_path, [trainer(0, 1)], {"a": [holding]}, hooks=hooks, staging=staging) as crew:
        crew.connect()
        for version in (1, 2):
            # Rows 10 and 11 of the embedding are padding, which this engine uses for something of its own.
            holding.tensors["embed"][10:].fill_(version)
            send_and_spoil(crew, version)
            check_all_at(crew, version)
            assert set(holding.tensors["embed"][10:].flatten().tolist()) == {version}
            assert holding.tensors["table"].tolist() == [0, 1, 2]
        assert ran == ["before", "after"] * 2


@modes
def test_computed_parameters_wait_for_the_install(tmp_path: Path, staging: tuple[str, ...]) -> None:
    holding = opaque_rollout()
    holding.tensors.pop("norm")
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [holding]}, staging=staging) as crew:
        crew.connect()
        for version in (1, 2):
            loads = holding.loads
            send_and_spoil(crew, version)
            check_all_at(crew, version)
            assert holding.loads == loads + 1


@modes
def test_full_verification_in_every_mode(tmp_path: Path, staging: tuple[str, ...]) -> None:
    with Crew(
        tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}, verify="full", staging=staging
    ) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        check_all_at(crew, 1)


@modes
def test_what_may_keep_old_values_keeps_those_of_now(tmp_path: Path, staging: tuple[str, ...]) -> None:
    held = trainer(0, 1, without=("norm",))
    with Crew(tmp_path, [held], {"a": [rollout(0, 1)]}, staging=staging) as crew:
        crew.connect(allow_partial=["norm"])
        one = crew.rollouts["a/0"]
        one.holding.tensors["norm"].fill_(8)
        send_and_spoil(crew, 1)
        wait_for(lambda: bool(one.updates))
        assert set(one.holding.tensors["norm"].tolist()) == {8}
        assert torch.equal(one.holding.tensors["stack"], one.holding.expected(1)["stack"])


def test_an_engine_that_stages_polls_on_while_bytes_land(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=("a",)) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        one = crew.rollouts["a/0"]
        executor = one.adapter._duties._executor
        assert executor is not None
        run, landing, go_on = executor.run, threading.Event(), threading.Event()

        def slow(*arguments: object, **options: object) -> object:
            report = run(*arguments, **options)  # type: ignore[arg-type]
            landing.set()
            go_on.wait(20)
            return report

        executor.run = slow  # type: ignore[method-assign, assignment]
        crew.holdings[0].fill(2)
        pending = crew.senders[0].send_weights(2)
        assert landing.wait(20)
        polls = one.adapter._session.counter
        wait_for(lambda: one.adapter._session.counter > polls + 20)
        # All of version 2 is there, and version 1 is still whole.
        assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 1)
        assert same_bits(one.holding.tensors, one.holding.expected(1))
        assert not pending.done()
        go_on.set()
        pending.result(20)
        check_all_at(crew, 2)


def test_a_poll_that_finds_nothing_is_cheap_while_an_engine_stages(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=("a",)) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        one = crew.rollouts["a/0"]
        one.hold.set()
        time.sleep(0.05)
        assert all(one.adapter.poll_requests() is None for _ in range(100))
        assert one.adapter._session._beside is not None
        assert not one.adapter._session._beside


def test_trainers_that_stage_go_on_before_any_engine_has_stopped(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, staging=("trainer",)) as crew:
        crew.connect()
        crew.rollouts["a/0"].hold.set()
        time.sleep(0.05)
        for holding in crew.holdings:
            holding.fill(1)
        outcomes = crew.trainers(lambda sender, rank: sender.send_weights(1))
        assert [outcome.error for outcome in outcomes] == [None, None]
        for holding in crew.holdings:
            holding.fill(9)
        pending = outcomes[0].value
        assert pending is not None
        assert not pending.done()
        assert crew.senders[0].version is None
        crew.rollouts["a/0"].hold.clear()
        assert pending.result(20).version == 1
        check_all_at(crew, 1)
        assert crew.senders[0].version == 1


def test_the_next_send_waits_for_the_last(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=("trainer", "a")) as crew:
        crew.connect()
        pending = []
        for version in range(1, 8):
            crew.holdings[0].fill(version)
            pending.append(crew.senders[0].send_weights(version))
            assert all(one.done() for one in pending[:-1])
        pending[-1].result(20)
        check_all_at(crew, 7)
        assert [update.version for update in crew.rollouts["a/0"].updates] == list(range(1, 8))


def test_misuse_is_told_by_send_weights_itself(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, staging=("trainer", "a")) as crew:
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(1)):
            assert isinstance(outcome.error, StaleError)
        crew.connect()
        send_and_spoil(crew, 5)
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(5)):
            assert isinstance(outcome.error, VersionError)
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(6 + rank)):
            assert isinstance(outcome.error, DisagreementError)
        crew.holdings[1].tensors["norm"] = crew.holdings[1].tensors["norm"].clone()
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(7)):
            assert isinstance(outcome.error, StaleError)
        crew.connect()
        send_and_spoil(crew, 8)
        check_all_at(crew, 8)


@pytest.mark.parametrize("staging", [("a",), ("trainer", "a")], ids=["engine", "both"])
def test_a_failure_while_bytes_land_leaves_the_old_version_ready(tmp_path: Path, staging: tuple[str, ...]) -> None:
    engines = {"a": [rollout(r, 2) for r in range(2)]}
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], engines, staging=staging) as crew:
        crew.connect(buffer_bytes=32)
        send_and_spoil(crew, 1)
        _fail_at_write(crew, 0, 6)
        with pytest.raises(TransportError, match="the cable was pulled"):
            send_and_spoil(crew, 2)
        for one in crew.rollouts.values():
            wait_for(lambda one=one: "cable" in one.adapter.last_failure)  # type: ignore[misc]
            assert one.errors == []
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 1)
            assert same_bits(one.holding.tensors, one.holding.expected(1))
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)


def test_bits_that_change_on_the_way_are_found_before_they_are_installed(tmp_path: Path) -> None:
    engines = {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}
    with Crew(tmp_path, [trainer(0, 1)], engines, staging=("a",)) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        spoil_what_lands(crew, "a/0")
        with pytest.raises(VerificationError, match=r"engine/a/0: the bits of .*; engine/b has version 2"):
            send_and_spoil(crew, 2)
        one = crew.rollouts["a/0"]
        wait_for(lambda: "the bits of" in one.adapter.last_failure)
        assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 1)
        assert same_bits(one.holding.tensors, one.holding.expected(1))
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)


def spoil_what_lands(crew: Crew, name: str) -> None:
    """Change a bit of the next update between its last byte and its digests."""
    duties = crew.rollouts[name].adapter._duties
    executor = duties._executor
    assert executor is not None
    run = executor.run

    def spoil(*arguments: object, **options: object) -> object:
        report = run(*arguments, **options)  # type: ignore[arg-type]
        tensors = crew.rollouts[name].holding.tensors if duties._copies is None else duties._copies.tensors
        tensors["stack"][1, 2, 3] += 1
        return report

    executor.run = spoil  # type: ignore[method-assign, assignment]


def test_an_install_that_fails_in_the_middle_tears(tmp_path: Path) -> None:
    broken = threading.Event()

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        plain._load(live, pairs)
        if broken.is_set():
            raise RuntimeError("no memory for scales")

    plain = opaque_rollout()
    plain.tensors.pop("norm")
    with Crew(tmp_path, [trainer(0, 1)], {"a": [Holding(plain.tensors, load)]}, staging=("a",)) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        one = crew.rollouts["a/0"]
        broken.set()
        with pytest.raises(HookError, match="no memory for scales"):
            send_and_spoil(crew, 2)
        wait_for(lambda: bool(one.errors))
        assert isinstance(one.errors.pop(), TornError)
        assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.TORN, False, 1)
        broken.clear()
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)


def test_an_engine_that_cannot_stop_or_drain_keeps_its_version(tmp_path: Path) -> None:
    refuse = threading.Event()

    def drain() -> None:
        if refuse.is_set():
            raise RuntimeError("requests in flight")

    with Crew(tmp_path, [trainer(0, 1)], {"b": [rollout(0, 1)]}, staging=("a",)) as crew:
        crew.start_engine("a", [rollout(r, 2) for r in range(2)], before_update_hook=drain)
        crew.connect()
        send_and_spoil(crew, 1)
        refuse.set()
        with pytest.raises(HookError, match=r"requests in flight.*engine/b has version 2"):
            send_and_spoil(crew, 2)
        refuse.clear()
        one = crew.rollouts["a/1"]
        wait_for(lambda: "in flight" in one.adapter.last_failure)
        assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 1)
        one.holding.tensors["norm"] = one.holding.tensors["norm"].clone()
        with pytest.raises(StaleError, match=r"norm on engine/a/1.*engine/b has version 3"):
            send_and_spoil(crew, 3)
        assert crew.rollouts["a/0"].adapter.ready
        crew.connect()
        send_and_spoil(crew, 4)
        check_all_at(crew, 4)


def test_sleep_refuses_and_memory_that_came_back_elsewhere_is_installed_into(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}, staging=("a",)) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        one = crew.rollouts["a/1"]
        one.hold.set()
        time.sleep(0.02)
        one.adapter.before_sleep()
        with pytest.raises(StaleError, match=r"engine/a/1 is asleep.*after_wake"):
            send_and_spoil(crew, 2)
        one.holding.tensors.update({n: torch.full_like(t, 3) for n, t in one.holding.tensors.items()})
        one.adapter.after_wake()
        one.hold.clear()
        send_and_spoil(crew, 3)
        for name in ("embed", "stack", "b", "norm"):
            assert torch.equal(one.holding.tensors[name][:8], one.holding.expected(3)[name][:8])
        assert one.adapter.ready


def test_ranks_of_an_engine_must_agree_on_staging(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {}) as crew:
        for rank, staging in ((0, ()), (1, ("a",))):
            crew._staging = staging
            crew.start_rank("a", rank, rollout(rank, 2), 2)
        with pytest.raises(UsageError, match=r"engine/a: ranks 1 have staging=True"):
            crew.connect()


def test_a_dead_engine_leaves_the_others_in_every_mode(tmp_path: Path) -> None:
    engines = {"a": [rollout(0, 1)], "b": [rollout(r, 2) for r in range(2)]}
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], engines, staging=("trainer", "a", "b")) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        crew.rollouts.pop("a/0").leave()
        time.sleep(0.1)
        send_and_spoil(crew, 2)
        check_all_at(crew, 2)
        for name in ("b/0", "b/1"):
            crew.rollouts.pop(name).leave()
        time.sleep(0.1)
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(3)):
            assert isinstance(outcome.error, LostWorkerError)


@pytest.mark.parametrize("staging", [(), ("a", "b")], ids=["in place", "staged"])
def test_fleet_wide_nobody_goes_on_while_one_is_behind(tmp_path: Path, staging: tuple[str, ...]) -> None:
    engines = {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}
    with Crew(tmp_path, [trainer(0, 1)], engines, staging=staging, activation="fleet") as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        spoil_what_lands(crew, "a/0")
        with pytest.raises(VerificationError, match=r"engine/b landed, and was not activated: engine/a did not get"):
            send_and_spoil(crew, 2)
        other = crew.rollouts["b/0"]
        wait_for(lambda: "not activated" in other.adapter.last_failure)
        # In place there is no way back; beside the parameters there is.
        assert other.adapter.version == 1
        assert other.adapter.state is (State.IDLE if staging else State.TORN)
        if not staging:
            for one in crew.rollouts.values():
                wait_for(lambda one=one: bool(one.errors))  # type: ignore[misc]
                assert isinstance(one.errors.pop(), TornError)
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)


def test_engine_by_engine_a_slow_one_holds_nobody_up(tmp_path: Path) -> None:
    go_on = threading.Event()
    with Crew(tmp_path, [trainer(0, 1)], {"b": [rollout(0, 1)]}, staging=("a", "b")) as crew:
        crew.start_engine("a", [rollout(0, 1)], after_update_hook=lambda: go_on.wait(20))
        crew.connect()
        crew.holdings[0].fill(1)
        pending = crew.senders[0].send_weights(1)
        wait_for(lambda: crew.rollouts["b/0"].adapter.version == 1)
        assert not crew.rollouts["a/0"].adapter.ready
        go_on.set()
        pending.result(20)
        check_all_at(crew, 1)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_closing_in_the_middle_leaves_no_thread(tmp_path: Path, side: str) -> None:
    before = {thread.name for thread in threading.enumerate() if thread.name.startswith("transload")}
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=("trainer", "a"), deadline_s=4) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        one = crew.rollouts["a/0"]
        one.hold.set()
        time.sleep(0.02)
        crew.holdings[0].fill(2)
        pending = crew.senders[0].send_weights(2)
        wait_for(lambda: one.adapter._session._polls.has_promised)
        if side == "trainer":
            crew.senders[0].close()
            one.hold.clear()
        else:
            crew.rollouts.pop("a/0").leave()
        with pytest.raises((ClosedError, LostWorkerError)):
            pending.result(20)
        assert same_bits(one.holding.tensors, one.holding.expected(1))
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("transload")} <= before


def test_copies_are_reused_by_the_next_connect(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=("trainer", "a")) as crew:
        crew.connect()
        send_and_spoil(crew, 1)
        duties = crew.senders[0]._duties
        assert duties._copies is not None
        arena = duties._copies.arena.data_ptr()
        # Somebody else joins; and a connect that fails in between changes nothing.
        outcome = crew.trainers(lambda sender, rank: sender.connect(["a"], buffer_bytes=1))[0]
        assert outcome.error is not None
        send_and_spoil(crew, 2)
        crew.start_engine("b", [rollout(0, 1)])
        crew.connect()
        assert duties._copies.arena.data_ptr() == arena
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)


def test_copies_of_a_trainer_stay_while_others_are_bound_anew(tmp_path: Path) -> None:
    """After a failure everybody is bound again, beside a caller that has overwritten its weights by then."""
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, staging=("trainer",)) as crew:
        crew.connect(buffer_bytes=32)
        send_and_spoil(crew, 1)
        _fail_at_write(crew, 0, 0)
        with pytest.raises(TransportError):
            send_and_spoil(crew, 2)
        # Whether the engine was written before the write that failed is a matter of who was quicker.
        wait_for(lambda: "cable" in crew.rollouts["a/0"].adapter.last_failure)
        time.sleep(0.2)
        crew.rollouts["a/0"].errors.clear()
        before = copy_of(crew.rollouts["a/0"].holding.tensors)
        send_and_spoil(crew, 3)
        check_all_at(crew, 3)
        assert not same_bits(before, crew.rollouts["a/0"].holding.tensors)
