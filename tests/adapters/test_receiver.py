"""An engine's side: polls, hooks, states, sleep, opaque parameters, and what is left after an update that failed."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from adapters.failures import (
    ClosedError,
    HookError,
    LostWorkerError,
    StaleError,
    TornError,
    UsageError,
    VerificationError,
)
from adapters.receiver import ReceiverAdapter, State
from tests.adapters.crew import Crew, wait_for
from tests.adapters.toy import SPACE, Holding, Pairs, copy_of, rollout, same_bits, trainer
from transfer_exec.errors import DeadlineError, TransportError
from transfer_exec.report import TransferReport
from transfer_exec.transport.reading import Sums


def test_metadata_arrives_as_plain_values(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        said = [{"step": 7, "loss": 0.5, "tags": ["a", None, True], "raw": b"\0"}, {"ignored": 1}]
        crew.trainers(lambda sender, rank: sender.send_weights(7, said[rank]).result())
        for one in crew.rollouts.values():
            wait_for(lambda one=one: len(one.updates) == 1)
            assert one.updates[0].metadata == said[0]
        crew.send(8)
        assert crew.rollouts["a/1"].updates[-1].metadata is None


def test_the_update_says_what_this_rank_received(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        report = crew.connect()[0]
        crew.send(1)
        update = crew.rollouts["a/0"].updates[-1]
        assert sum(update.report.bytes_received) == report.worker("engine/a/0").bytes_received
        assert update.report.worker == "engine/a/0"


def test_ready_from_the_first_version_on(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        one = crew.rollouts["a/0"].adapter
        assert (one.version, one.state, one.ready, one.connected, one.source_map) == (
            None,
            State.IDLE,
            False,
            False,
            None,
        )
        crew.connect()
        assert (one.version, one.state, one.ready) == (None, State.IDLE, False)
        assert one.source_map is not None
        wait_for(lambda: one.connected)
        crew.send(1)
        assert (one.version, one.state, one.ready) == (1, State.IDLE, True)


def test_hooks_run_once_in_order_and_see_the_right_bits(tmp_path: Path) -> None:
    holding = rollout(0, 1)
    seen: list[tuple[str, bool, str]] = []
    with Crew(tmp_path, [trainer(0, 1)], {}) as crew:
        old = copy_of(holding.tensors)

        def look(name: str) -> None:
            state = crew.rollouts["a/0"].adapter.state
            same = same_bits(holding.tensors, old if name == "before" else holding.expected(1))
            seen.append((name, same, state.value))

        crew.start_engine(
            "a", [holding], before_update_hook=lambda: look("before"), after_update_hook=lambda: look("after")
        )
        crew.connect()
        crew.send(1)
        assert seen == [("before", True, "idle"), ("after", True, "receiving")]


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
@pytest.mark.parametrize("hook", ["before_update_hook", "after_update_hook"])
def test_a_hook_that_polls_is_told_so(hook: str, staging: tuple[str, ...], tmp_path: Path) -> None:
    def poll() -> None:
        with pytest.raises(UsageError, match=r"engine/a/0: poll_requests was called inside poll_requests"):
            crew.rollouts["a/0"].adapter.poll_requests()
        told.append(True)

    told: list[bool] = []
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, hooks={hook: poll}, staging=staging) as crew:
        crew.connect()
        crew.send(1)
        assert crew.rollouts["a/0"].errors == []
        assert told == [True]


def test_hooks_do_not_run_on_a_rank_that_gets_nothing(tmp_path: Path) -> None:
    ran: list[str] = []
    draft = Holding({"draft": torch.ones(3)}, lambda live, pairs: None)
    draft.tensors.clear()
    with Crew(
        tmp_path,
        [trainer(0, 1)],
        {"a": [rollout(0, 1)], "draft": [draft]},
        hooks={"after_update_hook": lambda: ran.append(threading.current_thread().name)},
    ) as crew:
        crew.connect()
        for version in (1, 2, 3):
            crew.send(version)
        assert len(ran) == 3
        assert crew.rollouts["draft/0"].adapter.version == 3


def test_a_before_hook_that_raises_refuses_the_update(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("cannot drain")

    with Crew(
        tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}, hooks={"before_update_hook": refuse}
    ) as crew:
        crew.connect()
        before = copy_of(crew.rollouts["a/0"].holding.tensors)
        for outcome in crew.trainers(lambda sender, rank: sender.send_weights(1).result()):
            assert isinstance(outcome.error, HookError)
            assert "engine/a/0: before_update_hook raised RuntimeError('cannot drain')" in str(outcome.error)
        one = crew.rollouts["a/0"]
        wait_for(lambda: "cannot drain" in one.adapter.last_failure)
        assert same_bits(one.holding.tensors, before)
        assert one.adapter.state is State.IDLE
        assert one.errors == []


def test_an_after_hook_that_raises_tears_its_engine_only(tmp_path: Path) -> None:
    broken = threading.Event()
    broken.set()

    def flush() -> None:
        if broken.is_set():
            raise RuntimeError("cannot flush")

    with Crew(tmp_path, [trainer(0, 1)], {"b": [rollout(0, 1)]}) as crew:
        crew.start_engine("a", [rollout(r, 2) for r in range(2)], after_update_hook=flush)
        crew.connect()
        with pytest.raises(HookError, match=r"cannot flush.*engine/b has version 1"):
            crew.send(1)
        for name in ("a/0", "a/1"):
            one = crew.rollouts[name]
            wait_for(lambda one=one: bool(one.errors))
            assert isinstance(one.errors[0], TornError)
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.TORN, False, None)
        assert (crew.rollouts["b/0"].adapter.state, crew.rollouts["b/0"].adapter.version) == (State.IDLE, 1)
        broken.clear()
        crew.send(2)
        for one in crew.rollouts.values():
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 2)
            assert same_bits(one.holding.tensors, one.holding.expected(2))


def _fail_at_write(crew: Crew, rank: int, number: int) -> None:
    """Make every write of a trainer fail from its n-th on, until it is bound to another transport."""
    transport = crew.senders[rank]._duties._transport
    assert transport is not None
    write, count = transport.write, iter(range(10**6))

    def failing(*arguments: object) -> object:
        if next(count) >= number:
            raise TransportError("the cable was pulled")
        return write(*arguments)  # type: ignore[arg-type]

    transport.write = failing  # type: ignore[method-assign, assignment]


def test_a_failure_in_the_middle_tears_and_the_next_update_mends(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect(buffer_bytes=32)
        crew.send(1)
        _fail_at_write(crew, 0, 6)
        for holding in crew.holdings:
            holding.fill(2)
        started = time.monotonic()
        outcomes = crew.trainers(lambda sender, rank: sender.send_weights(2).result())
        assert time.monotonic() - started < 30
        for outcome in outcomes:
            assert isinstance(outcome.error, TransportError), repr(outcome.error)
            assert "version 2" in str(outcome.error)
            assert "the cable was pulled" in str(outcome.error)
        for one in crew.rollouts.values():
            wait_for(lambda one=one: bool(one.errors))
            assert isinstance(one.errors[-1], TornError)
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.TORN, False, 1)
        crew.send(2)
        for one in crew.rollouts.values():
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 2)
            assert same_bits(one.holding.tensors, one.holding.expected(2))


def test_a_failure_before_the_first_byte_leaves_the_old_version(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        crew.send(1)
        _fail_at_write(crew, 0, 0)
        with pytest.raises(TransportError, match="the cable was pulled"):
            crew.send(2)
        for one in crew.rollouts.values():
            wait_for(lambda one=one: "cable" in one.adapter.last_failure)
            assert one.errors == []
            assert (one.adapter.state, one.adapter.ready, one.adapter.version) == (State.IDLE, True, 1)
            assert same_bits(one.holding.tensors, one.holding.expected(1))
        crew.send(2)
        assert crew.rollouts["a/1"].adapter.version == 2


def test_bits_that_change_on_the_way_are_found(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}) as crew:
        crew.connect()
        executor = crew.rollouts["a/0"].adapter._duties._executor
        assert executor is not None
        run = executor.run

        def spoil(version: int, *, trace: bool, sums: Sums | None) -> object:
            report = run(version, trace=trace, sums=sums)
            crew.rollouts["a/0"].holding.tensors["stack"][1, 2, 3] += 1
            return report

        executor.run = spoil  # type: ignore[method-assign, assignment]
        with pytest.raises(VerificationError, match=r"engine/a/0: the bits of .*; engine/b has version 1"):
            crew.send(1)
        wait_for(lambda: bool(crew.rollouts["a/0"].errors))
        assert crew.rollouts["a/0"].adapter.state is State.TORN
        assert crew.rollouts["b/0"].adapter.version == 1
        crew.send(2)
        assert crew.rollouts["a/0"].adapter.ready


def test_without_verification_spoiled_bits_pass(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, verify="off") as crew:
        crew.connect()
        crew.send(1)
        proof = crew.rollouts["a/0"].adapter._duties._proof
        assert proof is not None
        assert proof.numbers == ()
        assert same_bits(crew.rollouts["a/0"].holding.tensors, crew.rollouts["a/0"].holding.expected(1))


def test_an_update_while_asleep_is_refused_and_memory_is_bound_again_after_waking(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        crew.send(1)
        one = crew.rollouts["a/1"]
        one.hold.set()
        time.sleep(0.02)
        one.adapter.before_sleep()
        assert not one.adapter.ready
        with pytest.raises(StaleError, match=r"engine/a/1 is asleep.*after_wake"):
            crew.send(2)
        # Released memory comes back at another address and with other contents.
        one.holding.tensors.update({n: torch.full_like(t, 3) for n, t in one.holding.tensors.items()})
        one.adapter.after_wake()
        one.hold.clear()
        crew.send(2)
        assert one.adapter.ready
        assert same_bits(one.holding.tensors, one.holding.expected(2))


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_a_parameter_that_does_not_come_back_after_sleep_is_named(staging: tuple[str, ...], tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, staging=staging) as crew:
        crew.connect()
        crew.send(1)
        one = crew.rollouts["a/0"]
        one.hold.set()
        time.sleep(0.02)
        one.adapter.before_sleep()
        lost = one.holding.tensors.pop("stack")
        one.adapter.after_wake()
        one.hold.clear()
        with pytest.raises(StaleError, match=r"stack on engine/a/0: it is not among `parameters` any more"):
            crew.send(2)
        assert one.adapter.state is State.IDLE
        one.holding.tensors["stack"] = lost
        crew.send(3)
        assert same_bits(one.holding.tensors, one.holding.expected(3))


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_a_before_hook_that_replaces_storage_refuses_the_update(staging: tuple[str, ...], tmp_path: Path) -> None:
    """It ran after storage had been looked at: the bytes went to memory that the engine no longer used."""
    holding = rollout(0, 1)

    def replace() -> None:
        if len(calls) == 1:
            holding.tensors["stack"] = holding.tensors["stack"].clone()
        calls.append(None)

    calls: list[None] = []
    with Crew(
        tmp_path, [trainer(0, 1)], {"a": [holding]}, hooks={"before_update_hook": replace}, staging=staging
    ) as crew:
        crew.connect()
        crew.send(1)
        with pytest.raises(StaleError, match=r"stack on engine/a/0: parameter storage replaced since connect"):
            crew.send(2)
        assert crew.rollouts["a/0"].adapter.version == 1
        assert same_bits(holding.tensors, holding.expected(1))
        crew.connect()
        crew.send(3)
        assert same_bits(holding.tensors, holding.expected(3))


def test_sleep_takes_back_a_promise(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        one = crew.rollouts["a/1"]
        one.hold.set()
        time.sleep(0.02)
        outcome = []
        sending = threading.Thread(
            target=lambda: outcome.append(crew.trainers(lambda sender, rank: sender.send_weights(1).result())[0])
        )
        sending.start()
        wait_for(lambda: one.adapter._session._polls.has_promised)
        one.adapter.before_sleep()
        sending.join(20)
        assert isinstance(outcome[0].error, StaleError)
        assert crew.rollouts["a/0"].adapter.state is State.IDLE
        one.adapter.after_wake()
        one.hold.clear()
        crew.send(1)
        assert one.adapter.version == 1


def opaque_rollout() -> Holding:
    """A rollout whose norm is stored negated and doubled, by arithmetic in its loader."""
    plain = rollout(0, 1)

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "norm":
                live["twice"].copy_(-2 * tensor.float() * tensor.float())
            else:
                plain._load(live, [(name, tensor)])

    return Holding({**plain.tensors, "twice": torch.zeros(6)}, load)


def test_opaque_parameters_go_through_their_own_loader(tmp_path: Path) -> None:
    holding = opaque_rollout()
    holding.tensors.pop("norm")
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [holding]}) as crew:
        report = crew.connect()[0]
        assert report.worker("engine/a/0").opaque == ("twice",)
        for version in (1, 2):
            loads = holding.loads
            sent = crew.send(version)[0]
            assert holding.loads == loads + 1
            assert same_bits(holding.tensors, holding.expected(version))
            assert sent.opaque == {"engine/a/0": ("twice",)}


def test_connect_says_which_parameters_no_update_reaches(tmp_path: Path) -> None:
    holding = rollout(0, 1)
    plain, holding.tensors["warm"] = holding._load, torch.zeros(4)

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        plain(live, pairs)
        live["warm"].fill_(min(holding.loads, 4))

    holding._load = load
    with Crew(tmp_path, [trainer(0, 1)], {"a": [holding]}) as crew:
        report = crew.connect()[0]
        assert report.worker("engine/a/0").unreached == ("warm",)
        assert "written by engine/a/0's loader, but from no tensor: warm" in str(report)


def test_a_late_engine_joins_between_updates_and_is_not_ready_before(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(7)
        crew.start_engine("b", [rollout(r, 2) for r in range(2)])
        assert not crew.rollouts["b/0"].adapter.ready
        report = crew.trainers(lambda sender, rank: sender.connect(["b"]))[0].value
        assert report is not None
        assert report.engines == ("a", "b")
        assert not crew.rollouts["b/0"].adapter.ready
        crew.send(8)
        for one in crew.rollouts.values():
            assert (one.adapter.ready, one.adapter.version) == (True, 8)
            assert same_bits(one.holding.tensors, one.holding.expected(8))


def test_an_engine_that_left_is_left_out(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.rollouts.pop("b/0").leave()
        time.sleep(0.1)
        for report in crew.send(2):
            assert isinstance(report, TransferReport)
            assert (report.parents, report.left_out) == ({"engine/a": 1}, {"engine/b": "gone since connect"})
            assert "engine/b: left out: gone since connect" in str(report)
        assert crew.rollouts["a/0"].adapter.version == 2
        crew.rollouts.pop("a/0").leave()
        time.sleep(0.1)
        outcome = crew.trainers(lambda sender, rank: sender.send_weights(3))[0]
        assert isinstance(outcome.error, LostWorkerError)
        assert "engine/a: gone since connect; engine/b: gone since connect" in str(outcome.error)


def test_a_returned_engine_gets_a_full_copy(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.rollouts.pop("b/0").leave()
        crew.start_engine("b", [rollout(0, 1)])
        crew.rollouts["b/0"].adapter._station.wait_joined()
        report = crew.trainers(lambda sender, rank: sender.send_weights(2).result())[0].value
        assert report is not None
        assert report.left_out == {"engine/b": "started again since connect"}
        assert not crew.rollouts["b/0"].adapter.ready
        crew.connect()
        assert crew.send(3)[0].left_out == {}  # type: ignore[attr-defined]
        one = crew.rollouts["b/0"]
        assert one.adapter.version == 3
        assert same_bits(one.holding.tensors, one.holding.expected(3))


def test_a_trainer_that_leaves_ends_what_the_engines_wait_for(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.senders[0].close()
        time.sleep(0.2)
        for one in crew.rollouts.values():
            assert one.errors == []
            assert (one.adapter.state, one.adapter.version) == (State.IDLE, 1)
        with pytest.raises(ClosedError):
            crew.senders[0].send_weights(2)


def test_engines_serve_the_next_sender(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.senders[0].close()
        with Crew(tmp_path, [trainer(0, 1)], {}) as later:
            later.senders[0].connect(["a"])
            later.send(2)
            for one in crew.rollouts.values():
                assert one.adapter.version == 2
                assert same_bits(one.holding.tensors, one.holding.expected(2))


def test_two_workers_of_one_name(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect()
        held = rollout(1, 2)
        other = ReceiverAdapter(
            held.load_weights, held.parameters, SPACE, engine="a", rank=1, world_size=2, rendezvous=tmp_path
        )
        try:
            with pytest.raises(UsageError, match="two workers call themselves engine/a/1"):
                wait_for(lambda: other.poll_requests() is not None)
        finally:
            other.close()
        crew.send(1)


def test_ranks_that_disagree_about_the_size_of_their_group(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 2)]}):
        held = rollout(1, 2)
        other = ReceiverAdapter(
            held.load_weights, held.parameters, SPACE, engine="a", rank=1, world_size=3, rendezvous=tmp_path
        )
        try:
            # It says that it is one of two, the other that it is one of three.
            with pytest.raises(UsageError, match="engine/a/1 says world_size=3"):
                wait_for(lambda: other.poll_requests() is not None)
        finally:
            other.close()


def test_a_rank_that_does_not_poll_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}, deadline_s=6) as crew:
        crew.connect()
        crew.rollouts["a/1"].hold.set()
        with pytest.raises(
            DeadlineError, match=r"version 1: no answer from engine/a/1 within 6 s; engine/a/0 waits at poll"
        ):
            crew.send(1)
        one = crew.rollouts["a/0"].adapter
        polls = one._session.counter
        wait_for(lambda: one._session.counter > polls + 3)
        assert crew.rollouts["a/0"].errors == []
        crew.rollouts["a/1"].hold.clear()
        crew.send(1)
        assert crew.rollouts["a/1"].adapter.version == 1


def test_engines_that_number_their_own_steps(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {}) as crew:
        adapters = [
            ReceiverAdapter(
                held.load_weights, held.parameters, SPACE, engine="a", rank=rank, world_size=2, rendezvous=tmp_path
            )
            for rank, held in enumerate(rollout(r, 2) for r in range(2))
        ]
        stop = threading.Event()
        stopped_at: list[tuple[int, int]] = []
        errors: list[Exception] = []

        def run(rank: int) -> None:
            step = 0
            try:
                while not stop.is_set():
                    step += 1
                    # Rank 1 polls at every third step only.
                    if rank == 0 or step % 3 == 0:
                        update = adapters[rank].poll_requests(step)
                        if update is not None:
                            stopped_at.append((rank, step))
                    time.sleep(0.002)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        try:
            crew.senders[0].connect(["a"])
            crew.send(1)
            wait_for(lambda: len(stopped_at) == 2)
            assert len({step for _, step in stopped_at}) == 1
            assert stopped_at[0][1] % 3 == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            with pytest.raises(UsageError, match="steps must grow"):
                adapters[0].poll_requests(1)
            for adapter in adapters:
                adapter.close()
        assert errors == []


def test_ranks_whose_steps_need_each_other_stop_at_one_step(tmp_path: Path) -> None:
    """An engine in lockstep: whoever waits in an update while another waits in a step would block both for good."""
    ranks = 3
    step_barrier = threading.Barrier(ranks)
    last_step: list[int] = []
    installed: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
    errors: list[Exception] = []

    def run(rank: int, adapter: ReceiverAdapter) -> None:
        made = random.Random(rank)
        try:
            for step in itertools.count():
                update = adapter.poll_requests()
                if update is not None:
                    installed[rank].append((update.version, step))
                time.sleep(made.random() * 0.003)
                step_barrier.wait(20)
                time.sleep(made.random() * 0.003)
                if last_step and step >= last_step[0]:
                    return
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)
            step_barrier.abort()

    with Crew(tmp_path, [trainer(0, 1)], {}) as crew:
        adapters = [
            ReceiverAdapter(
                held.load_weights, held.parameters, SPACE, engine="a", rank=rank, world_size=ranks, rendezvous=tmp_path
            )
            for rank, held in enumerate(rollout(r, 3) for r in range(ranks))
        ]
        threads = [threading.Thread(target=run, args=(rank, adapter)) for rank, adapter in enumerate(adapters)]
        for thread in threads:
            thread.start()
        try:
            crew.senders[0].connect(["a"])
            for version in range(1, 16):
                crew.send(version)
        finally:
            # Ranks are at most a step apart, so all of them hear of it before they are there.
            last_step.append(adapters[0]._session.counter + 5)
            for thread in threads:
                thread.join(30)
            for adapter in adapters:
                adapter.close()
    assert errors == []
    assert installed[0] == installed[1] == installed[2]
    assert [version for version, _ in installed[0]] == list(range(1, 16))


def test_arguments_that_cannot_be_honoured(tmp_path: Path) -> None:
    held = rollout(0, 1)

    def make(**options: object) -> ReceiverAdapter:
        arguments = {"engine": "a", "rank": 0, "world_size": 1, "rendezvous": tmp_path, **options}
        return ReceiverAdapter(held.load_weights, held.parameters, SPACE, **arguments)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"transport 'nixl'"):
        make(transport="nixl")
    with pytest.raises(UsageError, match=r"rank -1 of world_size 1"):
        make(rank=-1)
    for name in ("", None, "\ud800"):
        with pytest.raises(UsageError, match=r"engine name .*: expected a short name"):
            make(engine=name)
    with pytest.raises(UsageError, match=r"rendezvous is a int"):
        make(rendezvous=5)


def test_closing_leaves_nothing_and_is_final(tmp_path: Path) -> None:
    import psutil

    process = psutil.Process()
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:  # loads what is loaded once
        crew.connect()
    threads, files = threading.active_count(), process.num_fds()
    for _ in range(3):
        with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
            crew.connect()
            crew.send(1)
            adapter = crew.rollouts["a/0"].adapter
        adapter.close()
        with pytest.raises(ClosedError):
            adapter.poll_requests()
    assert threading.active_count() == threads
    assert process.num_fds() <= files
    assert list(tmp_path.glob("*.json")) == []
