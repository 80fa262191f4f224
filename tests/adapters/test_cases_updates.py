"""What has gone wrong between trainers and engines elsewhere, by its name in the collection of cases (T, G)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from adapters.failures import HookError, StaleError, TornError, VersionError
from adapters.messages import ProposeStop
from adapters.probing import probe
from adapters.promise import Propose
from adapters.receiver import ReceiverAdapter, State
from layout_algebra.source_map import SourceMap
from tests.adapters.crew import Crew, wait_for
from tests.adapters.simulation import DEADLINE_S, simulated
from tests.adapters.toy import SPACE, Holding, copy_of, rollout, same_bits, trainer
from transfer_exec.errors import TransportError
from transfer_exec.executor import Executor
from transfer_exec.plan import Stage
from transfer_exec.report import WorkerReport
from transfer_exec.transport.reading import Sums


def before_writes(crew: Crew, worker: str, act: Callable[[int], object]) -> None:
    """Do something, with its number, whenever a rollout is about to write into its parameters."""
    kernels = crew.rollouts[worker].adapter._duties._kernels
    before_run, numbers = kernels.before_run, iter(range(10**6))

    def acting() -> None:
        act(next(numbers))
        before_run()

    kernels.before_run = acting  # type: ignore[method-assign]


def fails(*numbers: int) -> Callable[[int], None]:
    """Fails at writes of these numbers."""

    def act(number: int) -> None:
        if number in numbers:
            raise TransportError("the cable was pulled")

    return act


@contextmanager
def generating(adapter: ReceiverAdapter, holding: Holding, watch: list[str]) -> Iterator[None]:
    """An engine whose thread generates between polls, and looks at every weight whenever it does."""
    leave = threading.Event()

    def loop() -> None:
        while not leave.is_set():
            try:
                adapter.poll_requests()
            except TornError:
                watch.append("torn")
            if adapter.ready and not same_bits(holding.tensors, holding.expected(adapter.version or 0)):
                watch.append(f"mixed weights at version {adapter.version}")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_t12_packing_waits_for_the_producer(tmp_path: Path) -> None:
    """The weights come 50 ms after the call, by another thread; the event says when."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        gathered = threading.Event()

        def gather() -> None:
            time.sleep(0.05)
            crew.holdings[0].fill(5)
            gathered.set()

        crew.holdings[0].fill(4)
        producer = threading.Thread(target=gather)
        producer.start()
        crew.senders[0].send_weights(5, ready_event=gathered).result()
        producer.join()
        one = crew.rollouts["a/0"]
        assert same_bits(one.holding.tensors, one.holding.expected(5))


def test_t14_a_trainer_that_offloads_and_reloads(tmp_path: Path) -> None:
    """The same values at other addresses: nothing is sent from where they were, and after a connect all is right."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(1)
        held = crew.holdings[0]
        offloaded = copy_of(held.tensors)
        for name, tensor in offloaded.items():
            held.tensors[name] = tensor.clone()
        with pytest.raises(StaleError, match="call connect"):
            crew.senders[0].send_weights(2)
        assert crew.rollouts["a/0"].adapter.version == 1
        crew.connect()
        crew.send(2)


def test_g01_nobody_is_told_before_all_bytes_of_all_ranks_have_landed(tmp_path: Path) -> None:
    seen: list[bool] = []
    needed = [rollout(r, 2) for r in range(2)]

    def derive() -> None:
        seen.append(all(same_bits(one.tensors, one.expected(1)) for one in needed))

    with Crew(tmp_path, [trainer(0, 1)], {"a": needed}, hooks={"after_update_hook": derive}) as crew:
        crew.connect(buffer_bytes=32)
        before_writes(crew, "a/1", lambda number: time.sleep(0.05))
        crew.send(1)
    assert seen == [True, True]


def test_g02_all_trainers_wait_at_one_gate_before_any_wait_of_a_transfer_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes longer to get ready than a single wait of a transfer may take."""
    ready: list[float] = []
    began: list[float] = []
    run = Executor.run

    def watched(self: Executor, version: int, *, trace: bool = False, sums: Sums | None = None) -> WorkerReport:
        began.append(time.monotonic())
        return run(self, version, trace=trace, sums=sums)

    def drain() -> None:
        time.sleep(2.0)
        ready.append(time.monotonic())

    with Crew(
        tmp_path, [trainer(r, 3) for r in range(3)], {"a": [rollout(0, 1)]}, hooks={"before_update_hook": drain}
    ) as crew:
        crew.connect()
        for executor in [sender._duties._executor for sender in crew.senders]:
            assert executor is not None
            executor._deadline_s = 0.5
        monkeypatch.setattr(Executor, "run", watched)
        crew.send(1)
    assert len(began) == 4
    assert min(began) >= ready[0]


@cache
def maps() -> dict[str, SourceMap]:
    held = {"trainer/0": trainer(0, 1)} | {f"engine/a/{rank}": rollout(rank, 2) for rank in range(2)}
    return {name: probe(one.load_weights, one.tensors, SPACE) for name, one in held.items()}


@pytest.mark.parametrize("late", [1, 2, 5])
def test_g03_a_request_that_reaches_ranks_at_different_steps(late: int) -> None:
    """All act at one step (the simulation checks it); a message of an epoch that is over wakes nobody."""
    with simulated(maps(), {"trainer": 1, "engine/a": 2}) as job:
        for group in job.sizes:
            job.start(group)
        job.drain()
        job.network.frozen.add("engine/a/1")  # the request is on its way to rank 1
        job.callers["trainer/0"].order(lambda: job.senders()["trainer/0"].connect(["a"]))
        job.drain()
        for _ in range(late):
            if not job.callers["engine/a/1"].busy:
                job.poll("engine/a/1")
            job.drain()
        job.network.frozen.clear()
        job.run(lambda: not job.callers["trainer/0"].busy, within_s=5 * DEADLINE_S)
        assert not isinstance(job.callers["trainer/0"].results[-1], Exception)
        (at,) = {poll for (group, _, _), poll in job.acted.items() if group == "engine/a"}
        assert at > late
        session = job.receivers("engine/a")["engine/a/1"]._session
        over = session.txn
        job.run(lambda: not job.stuck(), within_s=DEADLINE_S)
        session.deliver(ProposeStop(over - 1, Propose(999, session.counter + 1), 10.0))
        before = session.counter
        stop_at = job.scheduler.now + DEADLINE_S
        job.run(lambda: job.scheduler.now >= stop_at, within_s=2 * DEADLINE_S)
        assert session.counter > before + 10
        assert not job.callers["engine/a/1"].busy


def test_g04_weights_never_change_while_a_step_is_in_flight(tmp_path: Path) -> None:
    held, watch = rollout(0, 1), []  # type: ignore[var-annotated]
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {}) as crew:
        adapter = ReceiverAdapter(
            held.load_weights, held.parameters, SPACE, engine="a", rank=0, world_size=1, rendezvous=tmp_path
        )
        with generating(adapter, held, watch):
            crew.trainers(lambda sender, rank: sender.connect(["a"], buffer_bytes=32))
            for version in range(1, 6):
                for holding in crew.holdings:
                    holding.fill(version)
                for outcome in crew.trainers(lambda sender, rank, v=version: sender.send_weights(v).result()):  # type: ignore[misc]
                    assert outcome.error is None
            wait_for(lambda: adapter.version == 5)
        adapter.close()
    assert watch == []


def test_g06_no_trainer_needs_another_trainer(tmp_path: Path) -> None:
    """Nothing is gathered among trainers: no byte goes from one to another, and each waits for receivers alone."""
    with Crew(tmp_path, [trainer(r, 3) for r in range(3)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect(buffer_bytes=64)
        conductor = crew.senders[0]._station.conductor
        assert conductor is not None
        connection = conductor._fleet.connection
        assert connection is not None
        moves = list(connection.plan.moves())
        assert {move.stage for move in moves} <= {Stage.EXTERNAL, Stage.INTERNAL, Stage.RECEIVE}
        assert moves
        assert not any(move.target.startswith("trainer/") for move in moves)
        for worker, binding in conductor._fleet.bindings.items():
            if worker.startswith("trainer/"):
                assert not any(peer.startswith("trainer/") for peer in binding.peers)
        crew.send(1)


def test_g08_caches_are_flushed_once_per_version_after_the_writes_and_before_the_engine_goes_on(tmp_path: Path) -> None:
    held = rollout(0, 1)
    cache: dict[str, int] = {}
    flushed: list[tuple[bool, int]] = []

    def flush() -> None:
        flushed.append((same_bits(held.tensors, held.expected(len(flushed) + 1)), len(cache)))
        cache.clear()

    with Crew(tmp_path, [trainer(0, 1)], {"a": [held]}, hooks={"after_update_hook": flush}) as crew:
        crew.connect(buffer_bytes=32)
        for version in (1, 2, 3):
            cache["a prompt"] = version - 1
            crew.send(version)
            assert cache == {}
    assert flushed == [(True, 1)] * 3


def test_g08_a_flush_that_is_not_supported_is_told(tmp_path: Path) -> None:
    def flush() -> None:
        raise NotImplementedError("this engine keeps its prefixes")

    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, hooks={"after_update_hook": flush}) as crew:
        crew.connect()
        with pytest.raises(HookError, match=r"engine/a/0: after_update_hook raised .*keeps its prefixes"):
            crew.send(1)
        assert not crew.rollouts["a/0"].adapter.ready


def test_g09_a_replacement_is_not_ready_before_it_has_the_current_version(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(7)
        crew.start_engine("b", [rollout(r, 2) for r in range(2)])
        newcomers = [crew.rollouts[f"b/{rank}"].adapter for rank in range(2)]
        crew.senders[0].connect(["b"])
        assert not any(one.ready for one in newcomers)
        crew.send(8)
        assert all(one.ready and one.version == 8 for one in newcomers)


def test_g14_the_sender_counts_on_a_version_only_when_every_receiver_has_confirmed_it(tmp_path: Path) -> None:
    """Version 18 cannot be applied on rank 1; 19 is then a full copy, so nothing of 18 is missed."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:
        crew.connect(buffer_bytes=32)
        crew.send(17)
        before_writes(crew, "a/1", fails(0))
        crew.holdings[0].fill(18)
        with pytest.raises(TransportError, match="the cable was pulled"):
            crew.senders[0].send_weights(18).result()
        conductor = crew.senders[0]._station.conductor
        assert conductor is not None
        assert (crew.senders[0].version, conductor._fleet.engines["engine/a"].version) == (17, 17)
        assert {one.adapter.version for one in crew.rollouts.values()} == {17}
        # What is older, or the same, is refused whoever has it, and changes nothing.
        bits = [copy_of(one.holding.tensors) for one in crew.rollouts.values()]
        for version in (16, 17):
            with pytest.raises(VersionError, match=f"version {version} is not newer than 17, which engine/a has"):
                crew.senders[0].send_weights(version)
        assert all(same_bits(one.holding.tensors, b) for one, b in zip(crew.rollouts.values(), bits, strict=True))
        (report,) = crew.send(19)
        assert report.parents == {"engine/a": 17}
        for one in crew.rollouts.values():
            assert (one.adapter.version, one.adapter.ready, one.updates[-1].parent) == (19, True, 17)
            assert same_bits(one.holding.tensors, one.holding.expected(19))
        assert conductor._fleet.engines["engine/a"].version == 19


def test_g14_of_two_engines_one_of_which_missed_a_version(tmp_path: Path) -> None:
    """Each engine's confirmed version is its own: the one that missed 18 gets all of 19, the other one too."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}) as crew:
        refuse = [True]

        def drain() -> None:
            if refuse:
                raise RuntimeError("busy")

        crew.connect()
        duties = crew.rollouts["b/0"].adapter._duties
        duties._worker = replace(duties._worker, before_update=drain)
        with pytest.raises(HookError, match=r"busy.*engine/a has version 18"):
            crew.send(18)
        conductor = crew.senders[0]._station.conductor
        assert conductor is not None
        held = {group: engine.version for group, engine in conductor._fleet.engines.items()}
        assert held == {"engine/a": 18, "engine/b": None}
        assert crew.senders[0].version is None
        refuse.clear()
        (report,) = crew.send(19)
        assert report.parents == {"engine/a": 18, "engine/b": None}
        held = {group: engine.version for group, engine in conductor._fleet.engines.items()}
        assert held == {"engine/a": 19, "engine/b": 19}


def test_g15_a_half_updated_model_does_not_go_on_serving(tmp_path: Path) -> None:
    """It fails in the second of at least three rounds, in place."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        report = crew.connect(buffer_bytes=64)[0]
        assert report.rounds >= 3  # type: ignore[attr-defined]
        crew.send(1)
        before_writes(crew, "a/0", fails(2))
        crew.holdings[0].fill(2)
        with pytest.raises(TransportError):
            crew.senders[0].send_weights(2).result()
        one = crew.rollouts["a/0"]
        wait_for(lambda: bool(one.errors))
        assert isinstance(one.errors[0], TornError)
        assert (one.adapter.state, one.adapter.ready) == (State.TORN, False)
        crew.send(3)
        assert (one.adapter.state, one.adapter.ready) == (State.IDLE, True)


def test_g17_weights_changed_in_place_and_by_replacement_are_what_arrives(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(1)
        crew.send(2)  # in place, at the same addresses
        held = crew.holdings[0]
        for name in list(held.tensors):
            held.tensors[name] = torch.zeros_like(held.tensors[name])
        held.fill(3)
        with pytest.raises(StaleError):
            crew.senders[0].send_weights(3)
        crew.connect()
        crew.send(3)
        # An engine that slept woke up with nothing: it says so, and is not ready before it has weights again.
        one = crew.rollouts["a/0"]
        one.hold.set()
        one.adapter.before_sleep()
        assert not one.adapter.ready
        for tensor in one.holding.tensors.values():
            tensor.zero_()
        one.adapter.after_wake()
        one.hold.clear()
        crew.send(4)
        assert same_bits(one.holding.tensors, one.holding.expected(4))
