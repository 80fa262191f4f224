"""Engines that fail, hang or die while they are connected or bound, and trainers that do not call, in a simulated job.

Whatever one engine does, the others are connected and updated, and the report names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from adapters.connect_report import ConnectReport
from adapters.failures import HookError, LostWorkerError, StaleError
from adapters.probing import probe
from adapters.sender import SenderAdapter
from layout_algebra.source_map import SourceMap
from tests.adapters.simulation import DEADLINE_S, HANGS_S, REPORT, Simulation, simulated
from tests.adapters.toy import SPACE, rollout, trainer
from transfer_exec.errors import DeadlineError, TransferError

SIZES = {"trainer": 2, "engine/a": 2, "engine/b": 2}
LONGEST_S = 5 * DEADLINE_S


@cache
def maps(*, replicas: bool) -> dict[str, SourceMap]:
    held = {f"trainer/{rank}": trainer(0, 1) if replicas else trainer(rank, 2) for rank in range(2)}
    held |= {f"engine/{engine}/{rank}": rollout(rank, 2) for engine in "ab" for rank in range(2)}
    return {name: probe(one.load_weights, one.tensors, SPACE) for name, one in held.items()}


@pytest.fixture
def job() -> Iterator[Simulation]:
    with simulated(maps(replicas=False), SIZES) as made:
        for group in SIZES:
            made.start(group)
        made.drain()
        yield made


@pytest.fixture
def replicas() -> Iterator[Simulation]:
    """Both trainers hold everything."""
    with simulated(maps(replicas=True), SIZES) as made:
        for group in SIZES:
            made.start(group)
        made.drain()
        yield made


def call(job: Simulation, act: Callable[[SenderAdapter], object], workers: tuple[str, ...] = ()) -> list[object]:
    """What came of a call on some trainers, all of them by default."""
    senders = {worker: sender for worker, sender in job.senders().items() if not workers or worker in workers}
    for worker, sender in senders.items():
        job.callers[worker].order(lambda sender=sender: act(sender))  # type: ignore[misc]
    job.run(lambda: not any(job.callers[w].busy for w in senders if w in job.callers), within_s=LONGEST_S)
    return [job.callers[worker].results[-1] for worker in senders if worker in job.callers]


def connect(job: Simulation, *engines: str, workers: tuple[str, ...] = ()) -> ConnectReport:
    results = call(job, lambda sender: sender.connect(engines), workers)
    assert all(isinstance(result, ConnectReport) for result in results), results
    assert len(set(map(str, results))) == 1
    report = results[0]
    assert isinstance(report, ConnectReport)
    return report


def send(job: Simulation, version: int, workers: tuple[str, ...] = ()) -> list[object]:
    return call(job, lambda sender: sender.send_weights(version).result(), workers)


def versions(job: Simulation, engine: str) -> set[int | None]:
    return {receiver.version for receiver in job.receivers(f"engine/{engine}").values()}


def break_off(job: Simulation, worker: str) -> Callable[[], None]:
    """Break a rollout's connection to its parent, and let it find the parent again only when this is called."""
    (line,) = [line for line in job.network.connections if line.child.worker == worker]
    name = line.child.parent or ""
    parent = job.network.names.pop(name)
    job.network.cut(line)

    def come_back() -> None:
        job.network.names[name] = parent
        job.drain()

    return come_back


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["raise", "hang", "die"])
@pytest.mark.parametrize("duty", ["Probe", "Bind", "Attach"])
def test_an_engine_that_fails_in_a_connect_is_left_out_and_named(
    job: Simulation, duty: str, kind: str, rank: int
) -> None:
    job.faults[f"engine/b/{rank}", duty] = kind
    report = connect(job, "a", "b")
    assert (report.engines, set(report.lost)) == (("a",), {"b"})
    assert "left out: engine b" in str(report)
    assert {"raise": f"{duty} raised", "hang": "no answer", "die": "lost"}[kind] in report.lost["b"]
    assert f"engine/b/{rank}" in report.lost["b"] or kind == "die"
    assert send(job, 1) == [REPORT, REPORT]
    assert versions(job, "a") == {1}
    assert versions(job, "b") == {None}
    assert not any(receiver.connected for receiver in job.receivers("engine/b").values())
    # What was left out comes back as what joins late does.
    if kind != "raise":
        for worker in job.receivers("engine/b"):
            job.crash(worker)
        job.start("engine/b")
    assert connect(job, "b").lost == {}
    assert send(job, 2) == [REPORT, REPORT]
    assert versions(job, "a") == versions(job, "b") == {2}


def test_an_engine_that_gives_no_map(job: Simulation) -> None:
    """Its ranks have the layouts of the other engine's, which are asked for them instead."""
    job.faults["engine/a/0", "GiveMap"] = "raise"
    report = connect(job, "a", "b")
    assert (report.engines, set(report.lost)) == (("b",), {"a"})
    assert send(job, 1) == [REPORT, REPORT]
    assert versions(job, "b") == {1}


def test_engines_that_all_fail_are_an_error(job: Simulation) -> None:
    job.faults |= {("engine/a/0", "Probe"): "raise", ("engine/b/1", "Bind"): "raise"}
    for result in call(job, lambda sender: sender.connect(["a", "b"])):
        assert isinstance(result, HookError)
    assert connect(job, "a", "b").engines == ("a", "b")


def test_an_engine_that_is_connected_already_does_not_make_up_for_the_ones_that_are_named(job: Simulation) -> None:
    connect(job, "a")
    job.faults["engine/b/0", "Probe"] = "raise"
    assert all(isinstance(result, HookError) for result in call(job, lambda sender: sender.connect(["b"])))
    assert send(job, 1) == [REPORT, REPORT]
    assert versions(job, "a") == {1}


def test_a_trainer_that_fails_ends_the_connect(job: Simulation) -> None:
    job.faults["trainer/1", "Bind"] = "raise"
    assert all(isinstance(result, HookError) for result in call(job, lambda sender: sender.connect(["a", "b"])))
    assert connect(job, "a", "b").engines == ("a", "b")


@pytest.mark.parametrize("kind", ["raise", "hang", "die"])
@pytest.mark.parametrize("duty", ["Bind", "Attach"])
def test_an_engine_that_fails_when_it_is_bound_again_in_an_update(job: Simulation, duty: str, kind: str) -> None:
    """After an update that failed, everybody is bound anew in the next one, which goes on without an engine."""
    connect(job, "a", "b")
    job.faults["engine/b/0", "Transfer"] = "lose"
    assert all(isinstance(result, TransferError) for result in send(job, 1))
    job.faults["engine/b/1", duty] = kind
    results = send(job, 2)
    assert all(isinstance(result, TransferError) and "engine/b" in str(result) for result in results)
    assert all("engine/a has version 2" in str(result) for result in results)
    assert versions(job, "a") == {2}
    job.run(lambda: not job.stuck(), within_s=LONGEST_S)
    assert send(job, 3) == [REPORT, REPORT]
    assert versions(job, "a") == {3}
    assert versions(job, "b") == ({3} if kind == "raise" else {None})


def test_a_trainer_that_does_not_call_is_planned_around_if_others_hold_everything(replicas: Simulation) -> None:
    job = replicas
    began = job.scheduler.now
    report = connect(job, "a", "b", workers=("trainer/0",))
    assert job.scheduler.now - began >= DEADLINE_S
    assert "trainer/1" not in {one.worker for one in report.workers}
    assert send(job, 1, workers=("trainer/0",)) == [REPORT]
    assert versions(job, "a") == versions(job, "b") == {1}
    # When it calls, it takes part again.
    assert "trainer/1" in {one.worker for one in connect(job, "a", "b").workers}
    assert send(job, 2) == [REPORT, REPORT]


def test_a_trainer_that_died_before_connect_is_planned_around(replicas: Simulation) -> None:
    replicas.crash("trainer/1")
    assert connect(replicas, "a", "b").engines == ("a", "b")
    assert send(replicas, 1) == [REPORT]


@pytest.mark.parametrize("kind", ["UnreadableError", "UnmappableError"])
def test_memory_that_cannot_be_reached_any_more_when_it_is_bound_again(job: Simulation, kind: str) -> None:
    connect(job, "a", "b")
    assert send(job, 1) == [REPORT] * 2
    job.crash("engine/b/1")
    job.faults["engine/a/0", "Attach"] = kind
    assert send(job, 2) == [REPORT] * 2
    assert not job.faults
    assert versions(job, "a") == {2}


@pytest.mark.parametrize("lost", ["engine/b/0", "engine/b/1"])
def test_an_engine_whose_connection_broke_is_taken_in_again_by_itself(job: Simulation, lost: str) -> None:
    connect(job, "a", "b")
    assert send(job, 1) == [REPORT] * 2
    come_back = break_off(job, lost)
    assert send(job, 2) == [REPORT] * 2
    assert (versions(job, "a"), versions(job, "b")) == ({2}, {1})
    come_back()
    assert send(job, 3) == [REPORT] * 2
    assert (versions(job, "a"), versions(job, "b")) == ({3}, {3})


@pytest.mark.parametrize("lost", ["engine/b/0", "engine/b/1"])
@pytest.mark.parametrize("duty", ["Prepare", "Transfer", "Publish"])
def test_an_engine_whose_connection_breaks_in_an_update_is_taken_in_again_by_itself(
    job: Simulation, duty: str, lost: str
) -> None:
    connect(job, "a", "b")
    job.faults["engine/b/1", duty] = "hang"
    for worker, sender in job.senders().items():
        job.callers[worker].order(lambda sender=sender: sender.send_weights(1).result())  # type: ignore[misc]
    job.run(lambda: not job.faults, within_s=LONGEST_S)
    come_back = break_off(job, lost)
    job.run(lambda: not any(job.callers[worker].busy for worker in job.senders()), within_s=LONGEST_S)
    assert all(isinstance(job.callers[worker].results[-1], LostWorkerError) for worker in job.senders())
    come_back()
    awake_at = job.scheduler.now + HANGS_S
    job.run(lambda: job.scheduler.now > awake_at, within_s=2 * HANGS_S)
    assert send(job, 2) == [REPORT] * 2
    assert (versions(job, "a"), versions(job, "b")) == ({2}, {2})


@pytest.mark.parametrize("staging", [(), ("engine/a", "engine/b")], ids=["plain", "staging"])
def test_an_engine_that_waited_in_vain_for_another_is_reached_by_the_next_update(staging: tuple[str, ...]) -> None:
    """It answers, and says that its deadline passed; only one that does not answer is left out until a connect."""
    with simulated(maps(replicas=False), SIZES, staging) as job:
        for group in SIZES:
            job.start(group)
        job.drain()
        connect(job, "a", "b")
        job.faults["engine/a/0", "Transfer"] = "hang"
        errors = send(job, 1)
        assert all("nobody wrote" in str(error) and "engine/b has version 1" in str(error) for error in errors)
        assert (versions(job, "a"), versions(job, "b")) == ({None}, {1})
        assert send(job, 2) == [REPORT, REPORT]
        assert versions(job, "a") == versions(job, "b") == {2}


@pytest.mark.parametrize("staging", [(), ("trainer",)], ids=["plain", "staging"])
def test_a_trainer_that_died_after_connect_is_planned_around(staging: tuple[str, ...]) -> None:
    with simulated(maps(replicas=True), SIZES, staging) as job:
        for group in SIZES:
            job.start(group)
        job.drain()
        connect(job, "a", "b")
        assert send(job, 1) == [REPORT, REPORT]
        job.crash("trainer/1")
        for version in (2, 3):
            assert send(job, version, workers=("trainer/0",)) == [REPORT]
            assert versions(job, "a") == versions(job, "b") == {version}


def test_a_trainer_that_alone_holds_something_is_needed(job: Simulation) -> None:
    (silent,) = call(job, lambda sender: sender.connect(["a"]), ("trainer/0",))
    assert isinstance(silent, DeadlineError)
    assert "trainer/1 did not call connect within 20 s" in str(silent)
    assert "no trainer holds" in str(silent)
    job.crash("trainer/1")
    (gone,) = call(job, lambda sender: sender.connect(["a"]))
    assert isinstance(gone, LostWorkerError)
    assert "trainer/1 is gone" in str(gone)


def test_a_trainer_that_calls_late_is_told_that_it_has_no_part(replicas: Simulation) -> None:
    job = replicas
    job.faults["engine/a/0", "Probe"] = "hang"
    sender = job.senders()["trainer/0"]
    job.callers["trainer/0"].order(lambda: sender.connect(["a", "b"]))
    stop_at = job.scheduler.now + DEADLINE_S + 5
    job.run(lambda: job.scheduler.now >= stop_at, within_s=LONGEST_S)
    (late,) = call(job, lambda sender: sender.connect(["a", "b"]), ("trainer/1",))
    assert isinstance(late, StaleError)
    assert "connected without this rank" in str(late)
