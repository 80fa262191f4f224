"""One group without sockets: sessions, their lead, and a conductor made of a list."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapters.duty_messages import Done, Duty, Prepare, Probe, Publish, Result, Stay, Transfer
from adapters.failures import Failure, LostWorkerError, StaleError, VersionError
from adapters.lead import GroupLead
from adapters.messages import (
    LEFT,
    Answer,
    Ask,
    Call,
    Cancel,
    Committed,
    End,
    FromLead,
    FromRank,
    Gathered,
    Member,
    ProposeStop,
    Relay,
    Roster,
    SendIntent,
    Stop,
    ToRank,
)
from adapters.promise import Propose
from adapters.session import Session
from layout_algebra.errors import LoaderRaisedError
from tests.adapters.crew import wait_for
from transfer_exec.errors import DeadlineError

DONE = Done(0.0)


class Group:
    """An engine of some ranks, wired directly; what the lead says to the conductor is a list."""

    def __init__(self, size: int, *, deadline_s: float = 10.0) -> None:
        self.now = 0.0
        self.heard: list[FromLead] = []
        self._lock = threading.RLock()
        self.names = tuple(f"engine/a/{rank}" for rank in range(size))
        self.silent: set[str] = set()
        self.sessions = {name: Session(name, self._sender(name), deadline_s=deadline_s) for name in self.names}
        self.lead = GroupLead(
            "engine/a",
            self.names,
            to_rank=self._deliver,
            to_conductor=self.heard.append,
            clock=lambda: self.now,
            own_counter=lambda: self.sessions[self.names[0]].counter,
        )
        for rank, name in enumerate(self.names):
            self.lead.joined(Member(name, rank, size, "1", "host", "auto", None))
        self.heard.clear()

    def _sender(self, name: str) -> object:
        def send(message: FromRank) -> None:
            with self._lock:
                if name not in self.silent:
                    self.lead.from_rank(name, message)

        return send

    def _deliver(self, name: str, message: ToRank) -> None:
        if name not in self.silent:
            self.sessions[name].deliver(message)

    def say(self, message: Stop | Relay | Cancel | End) -> None:
        with self._lock:
            self.lead.from_conductor(message)

    def stop(self, txn: int) -> None:
        """Every rank has stopped at the agreed poll and serves."""
        count = len(self.gathered())
        self.say(Stop(txn, 10.0))
        self.wait(count + 1)
        self.say(Relay(txn, 1, 10.0, (Stay(),)))
        self.wait(count + 2)

    def pass_time(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.lead.tick()

    def gathered(self) -> list[Gathered]:
        return [message for message in self.heard if isinstance(message, Gathered)]

    def wait(self, count: int = 1) -> Gathered:
        wait_for(lambda: len(self.gathered()) >= count)
        return self.gathered()[count - 1]


class Polling:
    """Ranks that poll until they are told to leave, and what their polls came to."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.done: list[tuple[str, type[Duty]]] = []
        self.outcomes: dict[str, End | int | Exception] = {}
        self.fail: dict[str, Exception] = {}
        self._leave = threading.Event()
        self._pool = ThreadPoolExecutor(len(group.names))
        self._loops = [self._pool.submit(self._loop, name) for name in group.names]

    def _loop(self, name: str) -> None:
        session = self.group.sessions[name]
        while not self._leave.is_set():
            try:
                txn = session.enter_poll(None)
                if txn is not None:
                    self.outcomes[name] = session.serve(
                        lambda duty: self._perform(name, duty), after=txn - 1, until=Publish
                    )
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.outcomes[name] = error
            time.sleep(0.0005)

    def _perform(self, name: str, duty: Duty) -> Result:
        self.done.append((name, type(duty)))
        if name in self.fail and not isinstance(duty, Stay):
            raise self.fail[name]
        return DONE

    def leave(self) -> None:
        self._leave.set()
        for session in self.group.sessions.values():
            session.stop(Failure("ClosedError", "", "closed"))
        self._pool.shutdown()


@pytest.fixture
def trio() -> Iterator[Polling]:
    made = Polling(Group(3))
    yield made
    made.leave()


def test_duties_reach_every_rank_at_one_poll_and_answers_come_in_rank_order(trio: Polling) -> None:
    group = trio.group
    group.say(Stop(5, 10.0))
    assert group.wait() == Gathered("engine/a", 5, 0, (None,) * 3, None)
    group.say(Relay(5, 1, 10.0, (Prepare(1, b""),)))
    assert group.wait(2) == Gathered("engine/a", 5, 1, (DONE,) * 3, None)
    assert len({session.counter for session in group.sessions.values()}) == 1
    group.say(Relay(5, 2, 10.0, (Transfer(1), Stay(), Transfer(1))))
    group.wait(3)
    assert {(name, kind) for name, kind in trio.done if kind is Stay} == {("engine/a/1", Stay)}
    group.say(Relay(5, 3, 10.0, (Publish(1),)))
    group.wait(4)
    group.say(End(5, None))
    wait_for(lambda: trio.outcomes == dict.fromkeys(group.names, 5))
    counters = {name: session.counter for name, session in group.sessions.items()}
    wait_for(lambda: all(group.sessions[name].counter > counters[name] for name in group.names))


def test_a_failure_goes_up_at_once_and_the_end_frees_everybody(trio: Polling) -> None:
    group = trio.group
    trio.fail["engine/a/1"] = VersionError("not newer")
    group.stop(5)  # a rank that has not come to its poll when a transaction ends goes on without a word
    group.say(Relay(5, 2, 10.0, (Prepare(1, b""),)))
    failure = group.wait(3).failure
    assert failure == Failure("VersionError", "engine/a/1", "not newer")
    group.say(End(5, failure))
    wait_for(lambda: trio.outcomes == dict.fromkeys(group.names, End(5, failure)))


def test_a_rank_that_wakes_after_the_end_hears_how_it_ended() -> None:
    session = Session("engine/a/0", lambda _: None, deadline_s=10.0)
    failure = Failure("VersionError", "engine/a/1", "not newer")
    session.deliver(ProposeStop(5, Propose(1, 1), 10.0))
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(session.enter_poll, None)
        wait_for(lambda: session.counter == 1)
        with session._changed:  # the thread that waits cannot wake between the commit and the end
            session.deliver(Committed(5, 1, 10.0))
            session.deliver(End(5, failure))
        assert polling.result(10) == 5
    assert session.serve(lambda duty: DONE, after=4) == End(5, failure)
    assert session.enter_poll(None) is None


def test_a_probe_that_failed_is_told_when_all_ranks_have_given_up(trio: Polling) -> None:
    group = trio.group
    restored: list[str] = []

    def probe(name: str, duty: Duty) -> Result:
        if not isinstance(duty, Probe):
            return DONE
        if name == "engine/a/2":
            raise LoaderRaisedError("load_weights raised: KeyError('x')")
        try:
            group.sessions[name].agree(0)  # the rank that failed will never ask
        finally:
            time.sleep(0.05)
            restored.append(name)
        return DONE

    trio._perform = probe  # type: ignore[method-assign]
    group.stop(5)
    group.say(Relay(5, 2, 10.0, (Probe(),)))
    assert group.wait(3).failure == Failure("LoaderRaisedError", "engine/a/2", "load_weights raised: KeyError('x')")
    assert sorted(restored) == ["engine/a/0", "engine/a/1"]
    group.say(End(5, None))


def test_an_error_that_says_why_is_preferred_to_one_that_points_to_it(trio: Polling) -> None:
    group = trio.group
    for name in group.names[:2]:
        trio.fail[name] = LoaderRaisedError("load_weights raised: on another rank")
    trio.fail["engine/a/2"] = LoaderRaisedError("load_weights raised: KeyError('x')")
    group.stop(5)
    group.say(Relay(5, 2, 10.0, (Probe(),)))
    failure = group.wait(3).failure
    assert failure is not None
    assert (failure.worker, failure.echo) == ("engine/a/2", False)
    group.say(End(5, failure))


def test_the_next_transaction_is_served_like_the_first(trio: Polling) -> None:
    group = trio.group
    for number, txn in enumerate((5, 6, 9)):
        group.say(Stop(txn, 10.0))
        group.wait(2 * number + 1)
        group.say(Relay(txn, 1, 10.0, (Probe(),)))
        assert group.wait(2 * number + 2).failure is None
        group.say(End(txn, None))
        wait_for(lambda txn=txn: trio.outcomes == dict.fromkeys(group.names, End(txn, None)))  # type: ignore[misc]


def test_a_rank_that_is_lost_is_told_at_once(trio: Polling) -> None:
    group = trio.group
    group.say(Stop(5, 10.0))
    group.wait()
    group.silent.add("engine/a/2")
    group.say(Relay(5, 1, 10.0, (Prepare(3, b""),)))
    with group._lock:
        group.lead.lost("engine/a/2", "its connection closed")
    failure = group.wait(2).failure
    assert failure is not None
    assert (failure.kind, failure.worker) == (LostWorkerError.__name__, "engine/a/2")
    assert "prepare, version 3" in failure.text
    roster = next(message for message in group.heard if isinstance(message, Roster))
    assert [member.worker for member in roster.members] == ["engine/a/0", "engine/a/1"]
    group.say(Relay(5, 2, 10.0, (Prepare(3, b""),)))
    failure = group.wait(3).failure
    assert failure is not None
    assert "engine/a/2 of engine/a not there" in failure.text


def test_a_deadline_names_the_ranks_that_are_late(trio: Polling) -> None:
    group = trio.group
    group.say(Stop(5, 10.0))
    group.wait()
    group.silent |= {"engine/a/1", "engine/a/2"}
    group.say(Relay(5, 1, 7.0, (Transfer(4),)))
    wait_for(lambda: ("engine/a/0", Transfer) in trio.done)
    time.sleep(0.05)
    group.pass_time(6.9)
    assert len(group.gathered()) == 1
    group.pass_time(0.2)
    failure = group.wait(2).failure
    assert failure is not None
    assert failure.kind == DeadlineError.__name__
    assert "transfer, version 4: no answer from engine/a/1, engine/a/2 within 7 s" in failure.text


def test_a_rank_that_sleeps_refuses_to_stop(trio: Polling) -> None:
    group = trio.group
    group.sessions["engine/a/1"].refuse(StaleError("asleep"))
    group.say(Stop(5, 10.0))
    assert group.wait().failure == Failure("StaleError", "engine/a/1", "asleep")
    group.say(End(5, None))
    group.sessions["engine/a/1"].refuse(None)
    group.say(Stop(6, 10.0))
    assert group.wait(2).failure is None
    group.say(End(6, None))


def test_agreement_is_the_largest_value_of_all_ranks() -> None:
    group = Group(3)
    group.say(Relay(5, 1, 10.0, (Probe(),)))
    with ThreadPoolExecutor(3) as pool:
        for values in ((3, 7, 5), (0, 0, 0), (-2, -1, -3)):
            agreed = pool.map(
                lambda pair: group.sessions[pair[0]].agree(pair[1]), zip(group.names, values, strict=True)
            )
            assert list(agreed) == [max(values)] * 3


def test_a_failure_elsewhere_ends_an_agreement() -> None:
    group = Group(2)
    group.say(Relay(5, 1, 10.0, (Probe(),)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.sessions["engine/a/0"].agree, 1)
        time.sleep(0.05)
        group.say(End(5, Failure("StaleError", "trainer/0", "never mind")))
        with pytest.raises(StaleError, match="trainer/0: never mind"):
            waiting.result(5)


def test_cancel_reaches_what_is_being_done(trio: Polling) -> None:
    group = trio.group
    reasons: list[str] = []
    started = threading.Event()

    def slow(duty: Duty) -> Result:
        session = group.sessions["engine/a/0"]
        session.on_cancel(reasons.append)
        started.set()
        wait_for(lambda: bool(reasons))
        session.on_cancel(None)
        raise LostWorkerError("gave up")

    trio._perform = lambda name, duty: slow(duty) if name == "engine/a/0" else DONE  # type: ignore[method-assign]
    group.say(Stop(5, 10.0))
    group.wait()
    group.say(Relay(5, 1, 10.0, (Transfer(1),)))
    assert started.wait(5)
    group.say(Cancel(5, Failure("TransportError", "trainer/0", "cable")))
    failure = group.wait(2).failure
    assert failure is not None
    assert failure.text == "gave up"
    assert reasons == ["trainer/0: cable"]
    # What begins after the cancel hears of it too.
    group.sessions["engine/a/1"].on_cancel(reasons.append)
    assert reasons == ["trainer/0: cable"] * 2
    group.sessions["engine/a/1"].on_cancel(None)
    group.say(End(5, failure))


def test_a_rank_that_waits_too_long_at_its_poll_goes_on_and_says_so() -> None:
    group = Group(2)
    group.silent.add("engine/a/1")
    group.say(Stop(5, 10.0))
    session = group.sessions["engine/a/0"]
    session.deliver(ProposeStop(5, Propose(1, 1), 0.3))
    with pytest.raises(DeadlineError, match=r"engine/a/0: stopped at poll 1 .* nothing was written"):
        session.enter_poll(None)
    assert session.enter_poll(None) is None
    failure = group.wait().failure
    assert failure is not None
    assert failure.worker == "engine/a/0"


def test_a_lead_that_is_gone_ends_what_is_open(trio: Polling) -> None:
    group = trio.group
    group.stop(5)
    lost = Failure("LostWorkerError", "engine/a/0", "its connection closed")
    group.sessions["engine/a/1"].lead_lost(lost)
    wait_for(lambda: trio.outcomes.get("engine/a/1") == End(5, lost))


def test_a_lead_that_is_gone_ends_a_call_that_it_may_not_have_heard() -> None:
    session = Session("trainer/1", [].append, deadline_s=10.0)
    lost = Failure("LostWorkerError", "trainer/1", "sender: its connection closed")
    after = session.call(SendIntent(3), b"", None)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(session.serve, lambda duty: DONE, after=after)
        wait_for(lambda: session._serving)
        session.lead_lost(lost)
        assert ended.result(5.0) == End(after, lost)
        # Nothing of it is left for the next call, whose transaction begins as ever.
        after = session.call(SendIntent(3), b"", None)
        ended = pool.submit(session.serve, lambda duty: DONE, after=after)
        session.deliver(End(after + 1, None))
        assert ended.result(5.0) == End(after + 1, None)


def test_a_conductor_that_is_gone_ends_what_is_open_torn_if_bytes_were_moving(trio: Polling) -> None:
    group = trio.group
    lost = Failure("LostWorkerError", "engine/a/0", "sender: its connection closed")
    group.stop(5)
    with group._lock:
        group.lead.conductor_lost(lost)
    wait_for(lambda: trio.outcomes == dict.fromkeys(group.names, End(5, lost)))
    group.stop(6)
    group.say(Relay(6, 2, 10.0, (Transfer(1),)))
    group.wait(5)
    with group._lock:
        group.lead.conductor_lost(lost)
    wait_for(lambda: trio.outcomes == dict.fromkeys(group.names, End(6, lost, torn=True)))


def test_messages_of_a_transaction_that_is_over_change_nothing(trio: Polling) -> None:
    group = trio.group
    group.stop(5)
    group.say(End(5, None))
    wait_for(lambda: len(trio.outcomes) == 3)
    before = len(trio.done)
    group.say(Relay(5, 1, 10.0, (Prepare(1, b""),)))
    with group._lock:
        group.lead.from_rank("engine/a/0", Answer(4, 1, DONE, None))
    time.sleep(0.1)
    assert len(trio.done) == before


def test_an_end_before_the_poll_lets_ranks_pass_it() -> None:
    group = Group(2)
    group.say(Stop(5, 10.0))
    wait_for(lambda: all(session._polls.has_promised for session in group.sessions.values()))
    group.say(End(5, None))
    assert [group.sessions[name].enter_poll(None) for name in group.names] == [None, None]


def test_a_call_says_what_it_comes_after() -> None:
    group = Group(1)
    session = group.sessions["engine/a/0"]
    assert session.call(SendIntent(1), b"", None) == 0
    group.say(End(7, None))
    assert session.call(SendIntent(2), b"", None) == 7
    assert [message.after for message in group.heard if isinstance(message, Call)] == [0, 7]


def test_a_rank_that_joins_takes_no_part_in_what_the_lead_has_begun_or_ended() -> None:
    group = Group(1)
    group.say(Stop(5, 10.0))
    late = Session("engine/a/1", group.heard.append, deadline_s=0.1)
    late.joined(group.lead.newest)
    assert late.call(SendIntent(1), b"", None) == 5
    late.deliver(End(5, None))
    with pytest.raises(DeadlineError, match="heard nothing more"):
        late.serve(lambda duty: DONE, after=5)
    group.say(End(5, None))
    assert group.lead.newest == 5
    group.say(End(8, None))
    assert group.lead.newest == 8


def test_a_call_that_failed_with_its_connection_is_not_waited_for_when_it_begins_after_all() -> None:
    heard: list[FromRank] = []
    session = Session("trainer/1", heard.append, deadline_s=10.0)
    after = session.call(SendIntent(1), b"", None)
    lost = Failure(LostWorkerError.__name__, "trainer/1", "its connection closed")
    session.lead_lost(lost)
    session.joined(4)
    session.deliver(Ask(5, 1, 10.0, Stay(), "version 1", 1))
    assert heard[1:] == [Answer(5, LEFT, None, lost)]
    ended = session.serve(lambda duty: DONE, after=after)
    assert isinstance(ended, End)
    assert ended.failure == lost


def test_what_comes_for_a_call_that_was_taken_back_is_not_taken_for_the_next() -> None:
    """Neither a duty, which would send another version's weights, nor the end of it, which answers nobody here."""
    heard: list[FromRank] = []
    session = Session("trainer/1", heard.append, deadline_s=10.0)
    session.call(SendIntent(1), b"", None)
    session.abandon(KeyboardInterrupt())
    after = session.call(SendIntent(2), b"", None)
    for step in (1, 2):
        session.deliver(Ask(5, step, 10.0, Prepare(1, b""), call=1))
    session.deliver(End(5, Failure(StaleError.__name__, "", "left"), call=1))
    session.deliver(Ask(6, 1, 10.0, Prepare(2, b""), call=2))
    session.deliver(Ask(6, 2, 10.0, Transfer(2), call=2))
    done: list[Duty] = []

    def perform(duty: Duty) -> Result:
        done.append(duty)
        if isinstance(duty, Transfer):
            session.deliver(End(6, None, call=2))
        return DONE

    assert session.serve(perform, after=after) == End(6, None, call=2)
    gone = Failure("KeyboardInterrupt", "trainer/1", "KeyboardInterrupt")
    assert [said.number for said in heard[:3] if isinstance(said, Call)] == [1, 1, 2]
    assert heard[3:4] == [Answer(5, LEFT, None, gone)]
    assert done == [Prepare(2, b""), Transfer(2)]


def test_an_update_goes_on_beside_when_the_next_call_is_taken_back() -> None:
    heard: list[FromRank] = []
    session = Session("trainer/1", heard.append, deadline_s=10.0)
    after = session.call(SendIntent(1), b"", None)
    session.deliver(Ask(5, 1, 10.0, Prepare(1, b""), call=1))
    assert session.serve(lambda duty: DONE, after=after, until=Prepare) == 5
    session.call(SendIntent(2), b"", None)
    session.abandon(KeyboardInterrupt())
    session.deliver(Ask(5, 2, 10.0, Transfer(1), call=1))
    assert session.serve(lambda duty: DONE, after=4, until=Transfer) == 5
    assert [said.step for said in heard if isinstance(said, Answer)] == [1, 2]


class Beside:
    """A rank of one that stages: what a thread of its own did, and how what it took part in ended."""

    def __init__(self) -> None:
        self.heard: list[FromRank] = []
        self.session = Session("engine/a/0", self.heard.append, deadline_s=10.0, beside=True)
        self.done: list[tuple[str, type[Duty]]] = []
        self.ended: list[End] = []
        self.slow: threading.Event | None = None
        self.cancelled: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.session.serve_beside(lambda duty: self.perform("beside", duty), self.ended.append)

    def perform(self, where: str, duty: Duty) -> Result:
        self.done.append((where, type(duty)))
        if self.slow is not None:
            self.session.on_cancel(self.cancelled.append)
            assert self.slow.wait(10)
            self.session.on_cancel(None)
        return DONE

    def answers(self) -> list[Answer]:
        return [message for message in self.heard if isinstance(message, Answer)]

    def close(self) -> None:
        self.session.stop(Failure("ClosedError", "", "closed"))
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_a_rank_that_stages_serves_beside_its_caller_until_it_has_stopped() -> None:
    one = Beside()
    session = one.session
    for step, duty in ((1, Prepare(4, b"")), (2, Transfer(4))):
        session.deliver(Ask(5, step, 10.0, duty))
        wait_for(lambda step=step: len(one.answers()) == step)  # type: ignore[misc]
        assert session.enter_poll(None) is None
    session.deliver(ProposeStop(5, Propose(1, 3), 10.0))
    session.deliver(Committed(5, 1, 10.0))
    session.deliver(Ask(5, 3, 10.0, Publish(4)))
    assert session.enter_poll(None) == 5
    assert session.serve(lambda duty: one.perform("caller", duty), after=4, until=Publish) == 5
    assert one.done == [("beside", Prepare), ("beside", Transfer), ("caller", Publish)]
    session.deliver(End(5, None))
    wait_for(lambda: one.ended == [End(5, None)])
    # The next transaction begins beside the caller again.
    session.deliver(Ask(6, 1, 10.0, Prepare(5, b"")))
    wait_for(lambda: len(one.answers()) == 4)
    one.close()


def test_an_end_cancels_what_is_done_beside_and_its_answer_is_not_sent() -> None:
    one = Beside()
    one.slow = threading.Event()
    failure = Failure("LostWorkerError", "trainer/0", "gone")
    one.session.deliver(Ask(5, 1, 10.0, Transfer(4)))
    wait_for(lambda: one.session._on_cancel is not None)
    one.session.deliver(End(5, failure))
    assert one.cancelled == [str(failure)]
    assert one.session.enter_poll(None) is None
    one.slow.set()
    wait_for(lambda: one.ended == [End(5, failure)])
    assert one.answers() == []
    one.close()


def test_closing_ends_the_thread_beside() -> None:
    one = Beside()
    one.session.deliver(Ask(5, 1, 10.0, Prepare(4, b"")))
    wait_for(lambda: len(one.answers()) == 1)
    one.close()
    assert [end.txn for end in one.ended] == [5]


def test_a_poll_that_finds_nothing_is_cheap() -> None:
    session = Group(1).sessions["engine/a/0"]
    session.enter_poll(None)
    count = 20_000
    best = min(_seconds_of(session, count) for _ in range(5))
    assert best / count < 1e-3  # a bound against waiting, not a timing: a thousand times what it takes


def _seconds_of(session: Session, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        session.enter_poll(None)
    return time.perf_counter() - start
