"""Real worker processes: replies come back, failures are named, and nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from adapters.cli.crew import Crew, CrewError
from tests.cli.toy_worker import Die, Fail, Said, Say, Setup, Sleep, ToyCommand, ToyReply, decode, failure

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("trainer/0", "trainer/1", "engine/0/0")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew[ToyCommand, ToyReply]]:
    monkeypatch.chdir(ROOT)
    with Crew[ToyCommand, ToyReply](
        "tests.cli.toy_worker",
        {name: Setup(name) for name in NAMES},
        decode=decode,
        failure=failure,
        log_folder=tmp_path,
        environment={"PYTHONPATH": str(ROOT)},
    ) as crew:
        yield crew
        ids = tuple(crew.process_ids.values())
    assert not any(_runs(process_id) for process_id in ids)


def _runs(process_id: int) -> bool:
    return psutil.pid_exists(process_id) and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE


def _wait_until_gone(ids: list[int]) -> None:
    stop_at = time.monotonic() + 20
    while any(_runs(process_id) for process_id in ids):
        assert time.monotonic() < stop_at, f"still running: {ids}"
        time.sleep(0.05)


def test_every_reply_is_the_workers_own(crew: Crew[ToyCommand, ToyReply]) -> None:
    heard: list[str] = []
    replies = crew.ask(
        {name: Say("hello") for name in NAMES}, deadline_s=60, on_reply=lambda name, reply: heard.append(name)
    )
    assert replies == {name: Said(f"{name} says hello") for name in NAMES}
    assert sorted(heard) == sorted(NAMES)


def test_a_failure_names_the_worker(crew: Crew[ToyCommand, ToyReply]) -> None:
    with pytest.raises(CrewError, match=r"^trainer/1: the cupboard is bare$"):
        crew.ask({"trainer/0": Sleep(60), "trainer/1": Fail()}, deadline_s=60)


def test_a_dead_worker_is_named_with_its_last_words(crew: Crew[ToyCommand, ToyReply]) -> None:
    with pytest.raises(CrewError, match=r"^engine/0/0: the process ended too early \(exit status 7\).*\na last word"):
        crew.ask({"trainer/0": Sleep(60), "engine/0/0": Die()}, deadline_s=60)


def test_a_killed_worker_that_was_not_asked_is_noticed(crew: Crew[ToyCommand, ToyReply]) -> None:
    crew.ask({name: Say("ready") for name in NAMES}, deadline_s=60)
    os.kill(crew.process_ids["trainer/1"], signal.SIGKILL)
    with pytest.raises(CrewError, match=r"^trainer/1: the process ended too early \(killed by signal 9\)"):
        crew.ask({"trainer/0": Sleep(60)}, deadline_s=60)


def test_a_death_is_the_root_cause_of_its_neighbours_failure(crew: Crew[ToyCommand, ToyReply]) -> None:
    crew.ask({name: Say("ready") for name in NAMES}, deadline_s=60)
    with pytest.raises(CrewError) as caught:
        crew.ask({"trainer/0": Fail(), "trainer/1": Die()}, deadline_s=60)
    assert str(caught.value).startswith("trainer/1: the process ended too early")


def test_a_deadline_names_who_is_late(crew: Crew[ToyCommand, ToyReply]) -> None:
    crew.ask({name: Say("ready") for name in NAMES}, deadline_s=60)
    with pytest.raises(CrewError, match=r"^trainer/0, engine/0/0: no answer to Sleep within 0.5 s"):
        crew.ask({"trainer/0": Sleep(60), "trainer/1": Say("now"), "engine/0/0": Sleep(60)}, deadline_s=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.crew_parent", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with parent:
        assert parent.stdout is not None
        ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(ids) == 2
        parent.send_signal(number)
        assert parent.wait(timeout=30) != 0
    _wait_until_gone(ids)
