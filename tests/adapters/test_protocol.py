"""The whole protocol over a network that delays, reorders and breaks, and workers that fail, hang and die.

Everything but sockets and bytes is the real thing (`tests.adapters.simulation`). Whatever happens in whatever order:

- the ranks of an engine act at one poll, those that stage from the install on;
- an engine that says it is ready holds one version, whole, on all its ranks;
- no version goes back, and the sender never counts on one that some engine it reaches does not have;
- every call ends, and once nothing fails any more, a connect and an update bring everybody to the newest version.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters.probing import probe
from adapters.receiver import ReceiverAdapter, State
from adapters.sender import SenderAdapter
from layout_algebra.source_map import SourceMap
from tests.adapters.simulation import DEADLINE_S, Simulation, simulated
from tests.adapters.toy import SPACE, rollout, trainer

SIZES = {"trainer": 2, "engine/a": 3, "engine/b": 1}
ENGINES = ("engine/a", "engine/b")
WORKERS = tuple(f"{group}/{rank}" for group, size in SIZES.items() for rank in range(size))
ROLLOUTS = tuple(worker for worker in WORKERS if worker.startswith("engine/"))
LONGEST_CALL_S = 8 * DEADLINE_S


@cache
def maps() -> dict[str, SourceMap]:
    workers = {f"trainer/{rank}": trainer(rank, 2) for rank in range(2)}
    workers |= {f"engine/a/{rank}": rollout(rank, 3) for rank in range(3)}
    workers["engine/b/0"] = rollout(0, 1)
    return {name: probe(held.load_weights, held.tensors, SPACE) for name, held in workers.items()}


class Protocol(RuleBasedStateMachine):
    """A job to which everything happens."""

    def __init__(self) -> None:
        super().__init__()
        self._context: AbstractContextManager[Simulation] | None = None
        self.job: Simulation
        self.newest = 0
        self.seen: dict[int, int] = {}

    def teardown(self) -> None:
        if self._context is None:
            return
        try:
            self.recovers()
        finally:
            self._context.__exit__(None, None, None)

    @initialize(staging=st.sets(st.sampled_from(sorted(SIZES))), activation=st.sampled_from(["engine", "fleet"]))
    def begin(self, staging: set[str], activation: str) -> None:
        self._context = simulated(maps(), SIZES, staging, activation)
        self.job = self._context.__enter__()
        for group in SIZES:
            self.job.start(group)
        self.job.call_all(lambda sender: sender.connect(["a", "b"]))
        self.job.run(lambda: not self.job.calling(), within_s=LONGEST_CALL_S)
        for sender in self.job.senders():
            assert not isinstance(self.job.callers[sender].results[-1], Exception)

    # What trainers do

    @precondition(lambda self: not self.job.calling() and self.job.whole("trainer"))
    @rule()
    def send(self) -> None:
        self.newest += 1
        version = self.newest
        self.job.call_all(lambda sender: self.sent(sender, version))

    @precondition(lambda self: not self.job.calling() and self.job.whole("trainer"))
    @rule()
    def send_an_older_version(self) -> None:
        version = self.newest
        self.job.call_all(lambda sender: self.sent(sender, version))

    @precondition(lambda self: not self.job.calling() and self.job.whole("trainer"))
    @rule(engines=st.sampled_from([("a",), ("b",), ("a", "b")]))
    def connect(self, engines: tuple[str, ...]) -> None:
        self.job.call_all(lambda sender: sender.connect(engines))

    def sent(self, sender: SenderAdapter, version: int) -> None:
        sender.send_weights(version).result()
        # A version counts only when every engine that is still there, and connected, has it on every rank.
        for engine in ENGINES:
            for worker, receiver in self.job.receivers(engine).items():
                if self.job.whole(engine) and receiver.connected and worker in self.job.callers:
                    assert receiver.version is None or receiver.version >= version or self.left_out(engine), worker

    def left_out(self, engine: str) -> bool:
        root = self.job.adapters.get("trainer/0")
        return not isinstance(root, SenderAdapter) or engine not in root._station.conductor._fleet._routed  # type: ignore[union-attr]

    # What happens by itself

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 120))
    def go_on(self, seed: int, count: int) -> None:
        """Anything that can happen without time passing, in any order; rollouts poll as they like."""
        made = random.Random(seed)
        for _ in range(count):
            self.job.happen(made)
            self.check()

    @precondition(lambda self: self.job.calling())
    @rule()
    def let_the_call_end(self) -> None:
        self.job.run(lambda: not self.job.calling(), within_s=LONGEST_CALL_S)

    @rule(worker=st.sampled_from(ROLLOUTS))
    def poll(self, worker: str) -> None:
        if worker in self.job.callers and not self.job.callers[worker].busy:
            self.job.poll(worker)

    @rule(seconds=st.sampled_from([0.2, 2.0, DEADLINE_S / 2, DEADLINE_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.job.pass_time(seconds)

    # What goes wrong

    @precondition(lambda self: self.job.network.connections)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        self.job.network.cut(data.draw(st.sampled_from(self.job.network.connections)))

    @rule(
        worker=st.sampled_from(WORKERS),
        duty=st.sampled_from(["Bind", "Stage", "Prepare", "Transfer", "Transfer", "Ready", "Install", "Publish"]),
        kind=st.sampled_from(["raise", "lose", "hang"]),
    )
    def break_a_duty(self, worker: str, duty: str, kind: str) -> None:
        lost_in_install = duty == "Install" and kind == "lose"
        self.job.faults[worker, duty] = kind if duty == "Transfer" or lost_in_install else "raise"

    @rule(worker=st.sampled_from(WORKERS))
    def interrupt(self, worker: str) -> None:
        if worker in self.job.callers:
            self.job.interrupt(worker)

    @precondition(lambda self: self.newest > 0)
    @rule(worker=st.sampled_from(WORKERS))
    def crash(self, worker: str) -> None:
        if worker in self.job.adapters:
            self.job.crash(worker)

    @rule(group=st.sampled_from(sorted(SIZES)))
    def start_again(self, group: str) -> None:
        """A group is started again as a whole; what was left of it ends first."""
        if not self.job.whole(group):
            for rank in range(SIZES[group]):
                if f"{group}/{rank}" in self.job.adapters:
                    self.job.crash(f"{group}/{rank}")
            self.job.start(group)

    # What must hold

    @invariant()
    def check(self) -> None:
        for adapter in self.job.adapters.values():
            version = adapter.version
            if version is not None:
                assert version >= self.seen.get(id(adapter), 0), "a version went back"
                self.seen[id(adapter)] = version
        for engine in ENGINES:
            ranks = self.job.receivers(engine)
            for worker, receiver in ranks.items():
                self.check_rank(worker, receiver)
            # Ranks that are inside a poll do not generate.
            outside = [w for w in ranks if not self.job.callers[w].busy and ranks[w].ready]
            if self.job.whole(engine) and len(outside) == SIZES[engine]:
                held = {tuple(self.job.duties[worker].weights) for worker in outside}
                assert len(held) == 1, f"{engine} says it is ready and holds {held}"

    def check_rank(self, worker: str, receiver: ReceiverAdapter) -> None:
        weights = self.job.duties[worker].weights
        if self.job.callers[worker].busy:
            return
        if receiver.ready:
            assert weights == [receiver.version] * len(weights), f"{worker} is ready at {receiver.version}: {weights}"
        if len(set(weights)) > 1:
            assert receiver.state is State.TORN, f"{worker} holds {weights} and says {receiver.state}"

    def recovers(self) -> None:
        job = self.job
        job.run(lambda: not self.job.calling(), within_s=LONGEST_CALL_S)
        self.check()
        job.faults.clear()
        for group in SIZES:
            self.start_again(group)
        job.run(lambda: False if job.network.waiting() else not self.job.calling(), within_s=LONGEST_CALL_S)
        # Ranks that polled while others were in a call: a step of a real engine needs them all.
        job.run(lambda: not any(job.is_ahead(worker) for worker in ROLLOUTS), within_s=30 * LONGEST_CALL_S)
        for attempt in (self.connect_both, self.send_newest):
            attempt()
            job.run(lambda: not self.job.calling(), within_s=LONGEST_CALL_S)
            for worker in job.senders():
                result = job.callers[worker].results[-1]
                assert not isinstance(result, Exception), repr(result)
        job.run(lambda: not job.choices(), within_s=LONGEST_CALL_S)
        for engine in ENGINES:
            for worker, receiver in job.receivers(engine).items():
                assert (receiver.ready, receiver.version) == (True, self.newest), worker
        self.check()

    def connect_both(self) -> None:
        self.job.call_all(lambda sender: sender.connect(["a", "b"]))

    def send_newest(self) -> None:
        self.newest += 1
        version = self.newest
        self.job.call_all(lambda sender: sender.send_weights(version).result())


Protocol.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,  # the same jobs in every run; to search for others, take this away
    suppress_health_check=list(HealthCheck),
)
TestProtocol = Protocol.TestCase


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), late=st.integers(0, 30))
def test_two_polls_of_the_slowest_rank_from_request_to_common_action(seed: int, late: int) -> None:
    """An engine whose step needs all ranks, at any speed each; messages are quicker than a step."""
    made = random.Random(seed)
    with simulated(maps(), SIZES) as job:
        for group in SIZES:
            job.start(group)
        ranks = job.receivers("engine/a")

        def poll_one() -> None:
            # Nobody begins a step before all ranks have begun the one before.
            slowest = min(ranks[rank]._session.counter for rank in ranks)
            free = [r for r in ranks if not job.callers[r].busy and ranks[r]._session.counter == slowest]
            if free:
                job.poll(made.choice(free))
            job.drain()

        job.drain()
        for _ in range(late):
            poll_one()
        job.call_all(lambda sender: sender.connect(["a"]))
        job.drain()
        before = min(ranks[rank]._session.counter for rank in ranks)
        for _ in range(50):
            if not job.calling():
                break
            poll_one()
        assert not isinstance(job.callers["trainer/0"].results[-1], Exception)
        acted = {at for (group, _, _), at in job.acted.items() if group == "engine/a"}
        assert len(acted) == 1
        assert acted.pop() - before <= 2


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 150),
    victim=st.sampled_from(WORKERS),
    staging=st.sets(st.sampled_from(sorted(SIZES))),
)
def test_a_worker_that_was_interrupted_takes_part_in_the_next_update(
    seed: int, count: int, victim: str, staging: set[str]
) -> None:
    """Whatever of the update that it left has reached it when it calls again; nobody waits for a deadline."""
    made = random.Random(seed)
    with simulated(maps(), SIZES, staging) as job:
        for group in SIZES:
            job.start(group)

        def go_on(most: int, until: Callable[[], bool] = lambda: not job.calling()) -> None:
            for _ in range(most):
                if until():
                    return
                job.happen(made)

        job.call_all(lambda sender: sender.connect(["a", "b"]))
        job.run(lambda: not job.calling(), within_s=LONGEST_CALL_S)
        began = job.scheduler.now
        job.call_all(lambda sender: sender.send_weights(1).result())
        go_on(count)
        job.interrupt(victim)
        go_on(5_000)
        job.call_all(lambda sender: sender.send_weights(2).result())
        go_on(5_000)
        results = {worker: job.callers[worker].results for worker in job.senders()}
        assert all(len(each) == 3 and not isinstance(each[-1], BaseException) for each in results.values()), results
        go_on(5_000, lambda: not any(job.callers[worker].busy for worker in ROLLOUTS))
        assert all(job.adapters[worker].version == 2 for worker in ROLLOUTS)
        assert job.scheduler.now == began
