"""Every wait ends by itself, and its error says for whom, in what, and of which version somebody waited."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from adapters.duty_messages import Probe
from adapters.failures import Failure
from adapters.messages import Ask, ProposeStop, SendIntent
from adapters.probing import probe
from adapters.promise import Propose
from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import SharedFolder
from adapters.sender import SenderAdapter
from adapters.session import Session
from layout_algebra.source_map import SourceMap
from tests.adapters.crew import Crew
from tests.adapters.simulation import DEADLINE_S, Simulation, simulated
from tests.adapters.toy import SPACE, rollout, trainer
from transfer_exec.errors import DeadlineError

SIZES = {"trainer": 2, "engine/a": 2}
LONGEST_S = 6 * DEADLINE_S


@cache
def maps() -> dict[str, SourceMap]:
    held = {f"trainer/{rank}": trainer(rank, 2) for rank in range(2)}
    held |= {f"engine/a/{rank}": rollout(rank, 2) for rank in range(2)}
    return {name: probe(one.load_weights, one.tensors, SPACE) for name, one in held.items()}


@pytest.fixture(params=[(), ("trainer", "engine/a")], ids=["in place", "staged"])
def job(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    with simulated(maps(), SIZES, request.param) as made:
        for group in SIZES:
            made.start(group)
        made.drain()
        yield made


def connect(sender: SenderAdapter) -> object:
    return sender.connect(["a"])


def send(sender: SenderAdapter) -> object:
    return sender.send_weights(7).result()


def errors(job: Simulation, call: Callable[[SenderAdapter], object], *workers: str) -> list[str]:
    """What some trainers' calls, by default all, have raised: deadlines, and nothing else."""
    called = workers or tuple(job.senders())
    for worker in called:
        job.callers[worker].order(partial(call, job.senders()[worker]))
    job.run(lambda: not any(job.callers[worker].busy for worker in called), within_s=LONGEST_S)
    results = [job.callers[worker].results[-1] for worker in called]
    assert all(isinstance(result, DeadlineError) for result in results), results
    return list(map(str, results))


def hang(worker: str, duty: str) -> Callable[[Simulation], None]:
    return lambda job: job.faults.__setitem__((worker, duty), "hang")


def hold(worker: str) -> Callable[[Simulation], None]:
    return lambda job: job.held.add(worker)


def freeze(worker: str) -> Callable[[Simulation], None]:
    return lambda job: job.network.frozen.add(worker)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (freeze("engine/a/1"), r"agreeing on a poll, connect: no answer from engine/a/1 within 20 s"),
        (hold("engine/a/1"), r"agreeing on a poll, connect: no answer from engine/a/1 within 20 s; engine/a/0 waits"),
        (freeze("engine/a/0"), r"agreeing on a poll, connect: no word from engine/a/0 within 20 s"),
        (hang("trainer/1", "Probe"), r"probe, connect: no answer from trainer/1 within 20 s"),
        (hang("engine/a/0", "Probe"), r"probe, connect: no answer from engine/a/0 within 20 s"),
        (hang("engine/a/0", "GiveMap"), r"givemap, connect: no answer from engine/a/0 within 20 s"),
        (hang("engine/a/1", "Bind"), r"bind, connect: no answer from engine/a/1 within 20 s"),
        (hang("trainer/0", "Attach"), r"attach, connect: no answer from trainer/0 within 20 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_waits_of_a_connect(job: Simulation, fault: Callable[[Simulation], None], words: str) -> None:
    fault(job)
    for said in errors(job, connect):
        assert re.search(words, said), said


def test_a_connect_waits_for_engines_and_for_trainers(job: Simulation) -> None:
    for said in errors(job, lambda sender: sender.connect(["a", "z"])):
        assert "connect: engine/z did not come within 20 s" in said
    (said,) = errors(job, connect, "trainer/0")
    assert "trainer/1 did not call connect within 20 s" in said
    (said,) = errors(job, connect, "trainer/1")
    assert "trainer/0 did not call connect" in said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (hold("engine/a/0"), r"no answer from engine/a/0 within 20 s"),
        (freeze("engine/a/0"), r"no word from engine/a/0 within 20 s"),
        (hang("trainer/1", "Prepare"), r"prepare, version 7: no answer from trainer/1 within 20 s"),
        (hang("engine/a/1", "Prepare"), r"prepare, version 7: no answer from engine/a/1 within 20 s"),
        (hang("engine/a/1", "Transfer"), r"engine/a/1: version 7, round 0: nobody wrote"),
        (hang("engine/a/0", "Install"), r"install, version 7: no answer from engine/a/0 within 20 s"),
        (hang("engine/a/1", "Publish"), r"publish, version 7: no answer from engine/a/1 within 20 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_waits_of_an_update(job: Simulation, fault: Callable[[Simulation], None], words: str) -> None:
    for worker, sender in job.senders().items():
        job.callers[worker].order(lambda sender=sender: connect(sender))  # type: ignore[misc]
    job.run(lambda: not any(job.callers[worker].busy for worker in job.senders()), within_s=LONGEST_S)
    fault(job)
    for said in errors(job, send):
        assert "version 7" in said
        assert re.search(words, said), said


def test_an_update_waits_for_trainers(job: Simulation) -> None:
    for worker, sender in job.senders().items():
        job.callers[worker].order(lambda sender=sender: connect(sender))  # type: ignore[misc]
    job.run(lambda: not any(job.callers[worker].busy for worker in job.senders()), within_s=LONGEST_S)
    (said,) = errors(job, send, "trainer/0")
    assert "trainer/1 did not call send_weights(7) within 20 s" in said


def test_a_trainer_whose_conductor_is_frozen_does_not_wait_for_ever(job: Simulation) -> None:
    job.network.frozen.add("trainer/0")
    (said,) = errors(job, send, "trainer/1")
    assert re.search(r"trainer/1: heard nothing more within 35 s, last of send_weights\(7\)", said), said


def test_a_result_that_is_not_there_yet_says_what_is_waited_for(job: Simulation) -> None:
    for worker, sender in job.senders().items():
        job.callers[worker].order(lambda sender=sender: connect(sender))  # type: ignore[misc]
    job.run(lambda: not any(job.callers[worker].busy for worker in job.senders()), within_s=LONGEST_S)
    job.faults["engine/a/1", "Publish"] = "hang"
    for said, worker in zip(errors(job, lambda s: s.send_weights(7).result(timeout_s=3.0)), job.senders(), strict=True):
        assert f"{worker}: version 7 is not confirmed by every engine within 3 s, last of publish, version 7" in said


# Waits of one rank alone


def test_a_rank_at_its_poll() -> None:
    session = Session("engine/a/1", lambda message: None, deadline_s=10.0)
    session.deliver(ProposeStop(5, Propose(1, 1), 0.1, "version 7"))
    with pytest.raises(DeadlineError, match=r"engine/a/1: stopped at poll 1 .* agreeing on a poll, version 7"):
        session.enter_poll(None)


def test_an_agreement() -> None:
    session = Session("engine/a/1", lambda message: None, deadline_s=0.1)
    session.deliver(Ask(5, 1, 0.1, Probe(), "connect"))
    with pytest.raises(DeadlineError, match=r"engine/a/1: probe, connect: the other ranks did not agree .* 0\.1 s"):
        session.agree(3)


def test_a_call_that_nobody_answers() -> None:
    session = Session("trainer/1", lambda message: None, deadline_s=-14.9)  # the margin for silence makes it 0.1 s
    after = session.call(SendIntent(7), b"", None)
    with pytest.raises(DeadlineError, match=r"trainer/1: heard nothing more within 0\.1 s, last of send_weights\(7\)"):
        session.serve(lambda duty: None, after=after)  # type: ignore[arg-type, return-value]


def test_a_parent_that_is_not_there(tmp_path: Path) -> None:
    held, needed = trainer(1, 2), rollout(1, 2)
    sender = SenderAdapter(
        held.load_weights, held.parameters, SPACE, rank=1, world_size=2, rendezvous=tmp_path, deadline_s=0.3
    )
    receiver = ReceiverAdapter(
        needed.load_weights, needed.parameters, SPACE, engine="a", rank=1, world_size=2, rendezvous=tmp_path
    )
    try:
        with pytest.raises(
            DeadlineError, match=r"trainer/1: send_weights\(7\): did not find the rank 0 .* within 0\.3 s"
        ):
            sender.send_weights(7)
        with pytest.raises(DeadlineError, match=r"trainer/1: connect: did not find the rank 0 .* within 0\.3 s"):
            sender.connect(["a"])
        assert receiver.poll_requests() is None  # a rollout goes on meanwhile
    finally:
        sender.close()
        receiver.close()


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"nobody published engine/a in .* within 0\.1 s"):
        SharedFolder(tmp_path).lookup("engine/a", 0.1)


def test_an_event_that_does_not_happen(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}, deadline_s=2.0) as crew:
        crew.connect()
        with pytest.raises(
            DeadlineError, match=r"trainer/0: send_weights\(7\): ready_event did not happen within 1\.6 s"
        ):
            crew.senders[0].send_weights(7, ready_event=threading.Event())


def test_errors_that_travel_keep_what_they_say() -> None:
    failure = Failure("DeadlineError", "engine/a/0", "transfer, version 7: no answer from engine/a/1 within 20 s")
    assert str(failure) == "engine/a/0: transfer, version 7: no answer from engine/a/1 within 20 s"
