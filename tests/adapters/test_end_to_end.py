"""Real processes on this machine: two row-cut trainers, an engine of two column-cut ranks, and one of one rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.adapters.crew import compile_kernels
from tests.adapters.rank_process import Job, main
from tests.adapters.toy import write_checkpoint

pytestmark = pytest.mark.processes

RANKS = {"trainer/0": 2, "trainer/1": 2, "a/0": 2, "a/1": 2, "b/0": 1}
TRAINERS = ("trainer/0", "trainer/1")
ROLLOUTS = ("a/0", "a/1", "b/0")
START_S = 180.0
ANSWER_S = 60.0


class Fleet:
    """The processes, by name; one that ended is started again when it is next needed."""

    def __init__(self) -> None:
        compile_kernels()  # once, for all processes: they read the result from disk
        # A server that has imported everything and run nothing; its children begin where an import would end.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.adapters.rank_process"])
        self.processes: dict[str, ForkServerProcess] = {}
        self._pipes: dict[str, Connection] = {}
        self.start()

    def start(self) -> None:
        new = [name for name in RANKS if name not in self.processes or not self.processes[name].is_alive()]
        for name in new:
            group, _, rank = name.rpartition("/")
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=main, args=(theirs, group, int(rank), RANKS[name]), daemon=True)
            process.start()
            theirs.close()
            self.processes[name], self._pipes[name] = process, mine
        for name in new:
            assert self.answer(name, START_S)[0] == "fine"

    def tell(self, name: str, what: str, *arguments: object) -> None:
        self._pipes[name].send((what, arguments))

    def answer(self, name: str, within_s: float = ANSWER_S) -> tuple[object, ...]:
        assert self._pipes[name].poll(within_s), f"{name} did not answer within {within_s} s"
        got: tuple[object, ...] = self._pipes[name].recv()
        return got

    def ask(self, names: tuple[str, ...], what: str, *arguments: object) -> dict[str, object]:
        """Tell some ranks the same and wait for them; fails the test if one has an error."""
        for name in names:
            self.tell(name, what, *arguments)
        answers = {name: self.answer(name) for name in names}
        for name, answer in answers.items():
            assert answer[0] == "fine", (name, answer)
        return {name: answer[1] for name, answer in answers.items()}

    def errors(self, names: tuple[str, ...], what: str, *arguments: object) -> dict[str, tuple[str, str]]:
        """Like `ask`, for what every one of them must refuse."""
        for name in names:
            self.tell(name, what, *arguments)
        answers = {name: self.answer(name) for name in names}
        for name, answer in answers.items():
            assert answer[0] == "error", (name, answer)
        return {name: (str(answer[1]), str(answer[2])) for name, answer in answers.items()}

    def end(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(1)
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGCONT)
                process.kill()
                process.join(10)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.end()


@pytest.fixture
def job(fleet: Fleet, tmp_path: Path) -> Job:
    """Everybody has joined a job of its own."""
    fleet.start()
    made = Job(tmp_path / "meeting", write_checkpoint(tmp_path / "checkpoint"), deadline_s=15.0)
    fleet.ask((*TRAINERS, *ROLLOUTS), "join", made)
    return made


def segments() -> set[str]:
    """Shared memory of this machine."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def wait_until(fleet: Fleet, names: tuple[str, ...], **wanted: object) -> dict[str, Mapping[str, object]]:
    stop_at = time.monotonic() + 20
    while True:
        seen: dict[str, Mapping[str, object]] = fleet.ask(names, "look")  # type: ignore[assignment]
        if all(one[key] == value for one in seen.values() for key, value in wanted.items()):
            return seen
        assert time.monotonic() < stop_at, (wanted, seen)
        time.sleep(0.02)


def test_versions_cross_bit_for_bit(fleet: Fleet, job: Job) -> None:
    before = segments()
    reports = fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    assert reports["trainer/0"] == reports["trainer/1"]
    report = json.loads(str(reports["trainer/0"]))
    assert report["rounds"] > 1
    planned = {one["worker"]: sum(stage[2] for stage in one["stages"]) for one in report["workers"]}
    for version in (1, 2, 5):
        fleet.ask(TRAINERS, "send", version, {"step": version})
        # Training goes on at once; it must not change what lands.
        fleet.ask(TRAINERS, "spoil")
        received = fleet.ask(TRAINERS, "result", None)["trainer/1"]
        assert received == planned
        wait_until(fleet, ROLLOUTS, version=version, state="idle", ready=True)
        assert fleet.ask(ROLLOUTS, "holds", version) == dict.fromkeys(ROLLOUTS, True)
    seen = wait_until(fleet, ROLLOUTS, updates=[(v, {"step": v}) for v in (1, 2, 5)])
    for one in seen.values():
        assert one["hooks"] == ["before", "after"] * 3
        assert one["errors"] == []
    assert fleet.ask(TRAINERS, "version") == dict.fromkeys(TRAINERS, 5)
    threads = fleet.ask((*TRAINERS, *ROLLOUTS), "leave")
    assert set(threads.values()) == {1}, threads
    assert segments() <= before


def test_a_traced_update_adds_up(fleet: Fleet, job: Job, tmp_path: Path) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    path = tmp_path / "trace.json"
    fleet.ask(TRAINERS, "send", 1, None, str(path))
    fleet.ask(TRAINERS, "result", None)
    written = json.loads(path.read_text())
    workers = {e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert workers == {"trainer/0", "trainer/1", "engine/a/0", "engine/a/1", "engine/b/0"}
    assert {"control", "verify", "pack", "wait", "assemble"} <= {e.get("cat") for e in written["traceEvents"]}
    parts = written["otherData"]["critical_path_s"]
    assert sum(parts.values()) == pytest.approx(written["otherData"]["ewtt_s"], rel=0.02)
    path.unlink()
    fleet.ask(TRAINERS, "send", 2, None)
    fleet.ask(TRAINERS, "result", None)
    assert not path.exists()
    fleet.ask((*TRAINERS, *ROLLOUTS), "leave")


def test_an_engine_that_was_killed_between_updates_is_left_out(fleet: Fleet, job: Job) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    fleet.ask(TRAINERS, "send", 1, None)
    fleet.ask(TRAINERS, "result", None)
    fleet.processes["a/1"].kill()
    fleet.processes["a/1"].join()
    time.sleep(1.5)  # noticed at the next ping
    started = time.monotonic()
    fleet.ask(TRAINERS, "send", 2, None)
    fleet.ask(TRAINERS, "result", None)
    assert time.monotonic() - started < job.deadline_s
    assert fleet.ask(("b/0",), "holds", 2) == {"b/0": True}
    assert fleet.ask(("a/0",), "look")["a/0"]["version"] == 1  # type: ignore[index]
    fleet.ask((*TRAINERS, "a/0", "b/0"), "leave")


def test_a_rollout_killed_before_anything_moved(fleet: Fleet, job: Job) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    fleet.ask(TRAINERS, "send", 1, None)
    fleet.ask(TRAINERS, "result", None)
    victim = fleet.processes["a/1"]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    for name in TRAINERS:
        fleet.tell(name, "send", 2, None)
    time.sleep(0.5)
    started = time.monotonic()
    victim.kill()
    victim.join()
    for name in TRAINERS:
        assert fleet.answer(name)[0] == "fine"
    for kind, text in fleet.errors(TRAINERS, "result", None).values():
        assert kind == "LostWorkerError"
        assert "version 2: engine/a/1: lost during agreeing on a poll" in text
        assert "engine/b has version 2" in text
    assert time.monotonic() - started < job.deadline_s / 2
    assert fleet.ask(("b/0",), "holds", 2) == {"b/0": True}
    seen = wait_until(fleet, ("a/0",), state="idle", version=1)
    assert seen["a/0"]["errors"] == []
    fleet.ask(TRAINERS, "send", 3, None)
    fleet.ask(TRAINERS, "result", None)
    assert fleet.ask(("b/0",), "holds", 3) == {"b/0": True}
    fleet.ask((*TRAINERS, "a/0", "b/0"), "leave")


def test_a_rollout_killed_in_the_middle_of_an_update(fleet: Fleet, job: Job) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 32)
    fleet.ask(TRAINERS, "send", 1, None)
    fleet.ask(TRAINERS, "result", None)
    fleet.ask(("a/1",), "die_at", 5)
    started = time.monotonic()
    for name in TRAINERS:
        fleet.tell(name, "send", 2, None)
    for name in TRAINERS:
        answer = fleet.answer(name)
        if answer[0] == "fine":  # its own part was done before
            fleet.tell(name, "result", None)
            answer = fleet.answer(name)
        assert answer[0] == "error"
        assert "version 2" in str(answer[2])
        assert "engine/a" in str(answer[2])
    assert time.monotonic() - started < job.deadline_s
    seen = wait_until(fleet, ("a/0", "b/0"), state="torn", ready=False, version=1)
    for one in seen.values():
        assert [kind for kind, _ in one["errors"]] == ["TornError"]  # type: ignore[attr-defined]
    time.sleep(1.0)
    fleet.ask(TRAINERS, "send", 2, None)
    fleet.ask(TRAINERS, "result", None)
    wait_until(fleet, ("b/0",), state="idle", ready=True, version=2)
    assert fleet.ask(("b/0",), "holds", 2) == {"b/0": True}
    assert fleet.ask(("a/0",), "look")["a/0"]["state"] == "torn"  # type: ignore[index]
    fleet.ask((*TRAINERS, "a/0", "b/0"), "leave")


def test_a_frozen_rollout_is_an_error_within_the_deadline(fleet: Fleet, job: Job) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    victim = fleet.processes["b/0"]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        fleet.ask(TRAINERS, "send", 1, None)
        errors = fleet.errors(TRAINERS, "result", None)
        assert time.monotonic() - started < job.deadline_s + 12
        for kind, text in errors.values():
            assert kind in ("DeadlineError", "LostWorkerError")
            assert "version 1" in text
            assert "engine/b" in text
            assert "engine/a has version 1" in text
        # The next update does not wait for it.
        started = time.monotonic()
        fleet.ask(TRAINERS, "send", 2, None)
        fleet.ask(TRAINERS, "result", None)
        assert time.monotonic() - started < job.deadline_s / 2
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert fleet.ask(("a/0", "a/1"), "holds", 2) == {"a/0": True, "a/1": True}
    # It is back, and takes part again once a connect has named it.
    assert fleet.ask(("b/0",), "untouched") == {"b/0": True}
    fleet.ask(TRAINERS, "connect", ["b"], 64)
    wait_until(fleet, ("b/0",), ready=False)
    fleet.ask(TRAINERS, "send", 3, None)
    fleet.ask(TRAINERS, "result", None)
    wait_until(fleet, ROLLOUTS, ready=True, version=3)
    fleet.ask((*TRAINERS, *ROLLOUTS), "leave")


def test_a_killed_trainer_releases_everybody(fleet: Fleet, job: Job) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    fleet.tell("trainer/0", "send", 1, None)
    time.sleep(0.2)
    started = time.monotonic()
    fleet.processes["trainer/1"].kill()
    answer = fleet.answer("trainer/0")
    assert answer[0] == "error"
    assert "trainer/1 is gone" in str(answer[2])
    assert time.monotonic() - started < job.deadline_s / 2
    assert fleet.ask(ROLLOUTS, "untouched") == dict.fromkeys(ROLLOUTS, True)
    wait_until(fleet, ROLLOUTS, state="idle", errors=[])
    fleet.ask(("trainer/0", *ROLLOUTS), "leave")


def test_a_killed_replica_is_done_without_if_the_others_hold_everything(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    job = Job(tmp_path / "meeting", write_checkpoint(tmp_path / "checkpoint"), deadline_s=15.0, replicas=True)
    fleet.ask((*TRAINERS, *ROLLOUTS), "join", job)
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    fleet.ask(TRAINERS, "send", 1, None)
    fleet.ask(TRAINERS, "result", None)
    fleet.tell("trainer/0", "send", 2, None)
    time.sleep(0.2)
    started = time.monotonic()
    fleet.processes["trainer/1"].kill()
    fleet.processes["trainer/1"].join()
    assert fleet.answer("trainer/0")[0] == "fine"
    received = fleet.ask(("trainer/0",), "result", None)["trainer/0"]
    assert "trainer/1" not in received  # type: ignore[operator]
    assert time.monotonic() - started < job.deadline_s
    for version in (3, 4):
        fleet.ask(("trainer/0",), "send", version, None)
        fleet.ask(("trainer/0",), "result", None)
        wait_until(fleet, ROLLOUTS, version=version, state="idle", ready=True)
        assert fleet.ask(ROLLOUTS, "holds", version) == dict.fromkeys(ROLLOUTS, True)
    # Started again, it takes part once all trainers have called connect.
    fleet.start()
    fleet.ask(("trainer/1",), "join", job)
    fleet.tell("trainer/1", "connect", ["a", "b"], 64)
    time.sleep(1.0)  # until then it is gone for trainer/0
    fleet.ask(("trainer/0",), "connect", ["a", "b"], 64)
    assert fleet.answer("trainer/1")[0] == "fine"
    fleet.ask(TRAINERS, "send", 5, None)
    received = fleet.ask(TRAINERS, "result", None)["trainer/0"]
    assert "trainer/1" in received  # type: ignore[operator]
    assert fleet.ask(ROLLOUTS, "holds", 5) == dict.fromkeys(ROLLOUTS, True)
    fleet.ask((*TRAINERS, *ROLLOUTS), "leave")
