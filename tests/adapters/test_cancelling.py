"""Interrupts at any moment, and programs that end without closing: nobody waits for long, nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.rank_process import Job
from tests.adapters.test_end_to_end import ROLLOUTS, TRAINERS, Fleet, segments
from tests.adapters.toy import write_checkpoint

pytestmark = pytest.mark.processes

EVERYBODY = (*TRAINERS, *ROLLOUTS)
DEADLINE_S = 15.0
HEARD_WITHIN_S = 2 * DEADLINE_S
TRIALS = 20
STRUCK = 5
"""Interrupts that must have found a call to strike in."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.end()


def join(fleet: Fleet, folder: Path, *, staging: bool = False) -> Job:
    fleet.start()
    checkpoint = write_checkpoint(folder / "checkpoint")
    made = Job(folder / "meeting", checkpoint, deadline_s=DEADLINE_S, staging=staging)
    fleet.ask(EVERYBODY, "join", made)
    return made


@pytest.fixture
def job(fleet: Fleet, tmp_path: Path) -> Job:
    return join(fleet, tmp_path)


def interrupt(fleet: Fleet, name: str, after_s: float) -> None:
    time.sleep(after_s)
    os.kill(fleet.processes[name].pid or 0, signal.SIGINT)


def updated(fleet: Fleet, version: int) -> None:
    """An update that nothing disturbs reaches everybody."""
    fleet.ask(TRAINERS, "send", version, None)
    fleet.ask(TRAINERS, "result", None)
    assert fleet.ask(ROLLOUTS, "holds", version) == dict.fromkeys(ROLLOUTS, True)
    looks = fleet.ask(ROLLOUTS, "look")
    assert all(one["ready"] and one["version"] == version for one in looks.values()), looks  # type: ignore[index]


@pytest.mark.parametrize("staging", [False, True], ids=["in place", "staged"])
def test_interrupts_at_random_moments_of_updates(fleet: Fleet, tmp_path: Path, staging: bool) -> None:
    job = join(fleet, tmp_path, staging=staging)
    fleet.ask(TRAINERS, "connect", ["a", "b"], 64)
    fleet.ask(ROLLOUTS, "slow", 0.01)
    updated(fleet, 1)
    began = time.monotonic()
    fleet.ask(TRAINERS, "send", 2, None)
    fleet.ask(TRAINERS, "result", None)
    lasts_s = time.monotonic() - began
    before, shared = fleet.ask(EVERYBODY, "resources"), segments()
    struck, said_before = 0, 0
    for trial in range(3 * TRIALS):
        if trial >= TRIALS and struck >= STRUCK:
            break
        made = random.Random(trial)
        victim = made.choice(EVERYBODY)
        version = 10 * (trial + 1)
        for name in TRAINERS:
            fleet.tell(name, "send", version, None)
            fleet.tell(name, "result", None)
        interrupt(fleet, victim, made.uniform(0, lasts_s))
        answers = [fleet.answer(name, HEARD_WITHIN_S) for name in (*TRAINERS, *TRAINERS)]
        wrong = [one for one in answers if one[0] == "error"]
        # One that was interrupted before it called is missed by the others; its result is that of an older version.
        for _, kind, text in wrong:
            known = ("KeyboardInterrupt", f"{victim} did not call", "version")
            assert any(words in f"{kind} {text}" for words in known), (victim, kind, text)
        looks = fleet.ask(ROLLOUTS, "look")
        said = sum(len(one["errors"]) for one in looks.values())  # type: ignore[index, misc]
        struck += bool(wrong) or said > said_before
        said_before = said
        # Whoever was written in part says so, and the next update mends it; no connect is needed.
        updated(fleet, version + 1)
    assert struck >= STRUCK, f"only {struck} interrupts struck in a call"
    after = fleet.ask(EVERYBODY, "resources")
    for name, (threads, files, listens) in before.items():  # type: ignore[misc]
        now = after[name]
        assert now == (threads, files, listens), f"{name}: {now} after {struck} interrupts, {threads, files} before"
    assert segments() == shared
    check_nothing_is_left(fleet, job)


def test_interrupts_at_random_moments_of_connects(fleet: Fleet, job: Job) -> None:
    began = time.monotonic()
    fleet.ask(TRAINERS, "connect", ["a", "b"], 1 << 20)
    lasts_s = time.monotonic() - began
    for trial in range(8):
        made = random.Random(trial)
        victim = made.choice(EVERYBODY)
        for name in TRAINERS:
            fleet.tell(name, "connect", ["a", "b"], 1 << 20)
        interrupt(fleet, victim, made.uniform(0, lasts_s))
        for name in TRAINERS:
            said = fleet.answer(name, HEARD_WITHIN_S)
            assert said[0] == "fine" or "KeyboardInterrupt" in f"{said[1]} {said[2]}", said
        fleet.ask(TRAINERS, "connect", ["a", "b"], 1 << 20)
        updated(fleet, trial + 1)
    check_nothing_is_left(fleet, job)


def test_a_trainer_that_is_interrupted_while_it_waits_for_the_others(fleet: Fleet, job: Job) -> None:
    """Its call is taken back: the others are told when they call, and need not wait for it."""
    fleet.tell("trainer/1", "connect", ["a", "b"], 1 << 20)
    interrupt(fleet, "trainer/1", 0.5)
    assert fleet.answer("trainer/1", HEARD_WITHIN_S)[1] == "KeyboardInterrupt"
    began = time.monotonic()
    fleet.tell("trainer/0", "connect", ["a", "b"], 1 << 20)
    said = fleet.answer("trainer/0", HEARD_WITHIN_S)
    assert said[0] == "error"
    assert "trainer/1: KeyboardInterrupt" in str(said[2])
    assert time.monotonic() - began < DEADLINE_S / 2
    fleet.ask(TRAINERS, "connect", ["a", "b"], 1 << 20)
    updated(fleet, 1)
    check_nothing_is_left(fleet, job)


def test_a_rank_that_is_interrupted_at_its_poll_while_the_others_have_not_come(fleet: Fleet, job: Job) -> None:
    """It had promised to stop; another rank hangs. What it promised is taken back, and the update fails at once."""
    fleet.ask(TRAINERS, "connect", ["a", "b"], 1 << 20)
    os.kill(fleet.processes["a/1"].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    for name in TRAINERS:
        fleet.tell(name, "send", 1, None)
    time.sleep(1.0)
    interrupt(fleet, "a/0", 0.0)
    time.sleep(0.5)
    os.kill(fleet.processes["a/1"].pid or 0, signal.SIGCONT)
    said = [fleet.answer(name, HEARD_WITHIN_S) for name in TRAINERS]
    if all(one[0] == "fine" for one in said):
        said = list(fleet.errors(TRAINERS, "result", None).values())
    assert all("KeyboardInterrupt" in str(one) and "engine/a/0" in str(one) for one in said), said
    assert time.monotonic() - began < DEADLINE_S
    updated(fleet, 2)
    check_nothing_is_left(fleet, job)


@pytest.mark.parametrize("leaver", EVERYBODY)
def test_a_process_that_ends_without_closing_leaves_nothing(fleet: Fleet, job: Job, leaver: str) -> None:
    fleet.ask(TRAINERS, "connect", ["a", "b"], 1 << 20)
    updated(fleet, 1)
    records = set(os.listdir(job.folder))
    shared = segments()
    fleet.tell(leaver, "exit")
    fleet.processes[leaver].join(HEARD_WITHIN_S)
    assert not fleet.processes[leaver].is_alive()
    # Its record goes with it; the others' stay.
    mine = {"trainer/0": "sender", "a/0": "engine-a", "b/0": "engine-b"}.get(leaver, "nobody")
    assert set(os.listdir(job.folder)) == {name for name in records if not name.startswith(mine)}
    assert segments() <= shared
    left = tuple(name for name in EVERYBODY if name != leaver)
    fleet.ask(left, "leave")
    assert os.listdir(job.folder) == []


def check_nothing_is_left(fleet: Fleet, job: Job) -> None:
    """After close there are no threads, ports or records, nor more files than processes without an adapter have."""
    fleet.ask(EVERYBODY, "leave")
    assert os.listdir(job.folder) == []
    for name, (threads, _, listens) in fleet.ask(EVERYBODY, "resources").items():  # type: ignore[misc]
        assert (threads, listens) == (1, ()), name


ENDS = """
import sys
from pathlib import Path
from adapters.sender import SenderAdapter
from tests.adapters.toy import SPACE, trainer
held = trainer(0, 1)
made = SenderAdapter(held.load_weights, held.parameters, SPACE, rank=0, world_size=1, rendezvous=Path(sys.argv[1]))
print("ready", flush=True)
if sys.argv[2] == "interrupt":
    made.connect(["a"])
"""


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_a_program_that_ends_without_closing(tmp_path: Path, how: str) -> None:
    meeting = tmp_path / "meeting"
    command = [sys.executable, "-c", ENDS, str(meeting), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        if how == "interrupt":
            time.sleep(1.0)
            program.send_signal(signal.SIGINT)
        assert program.wait(HEARD_WITHIN_S) == (0 if how == "end" else -signal.SIGINT)
        said = program.stderr.read() if program.stderr is not None else ""
    assert ("KeyboardInterrupt" in said) == (how == "interrupt"), said
    assert os.listdir(meeting) == []
