"""What operators see: one line per event, with key=value pairs, and progress that says who is done with what."""

from __future__ import annotations

import json
import logging
import re
import shlex
from pathlib import Path

import pytest

from adapters.events import log_event
from adapters.failures import HookError, RemoteError
from tests.adapters.crew import Crew, wait_for
from tests.adapters.toy import rollout, trainer
from transfer_exec.errors import TransferError


def fields(record: logging.LogRecord) -> dict[str, object]:
    """The structure that a line carries, which is what its text says."""
    structure: dict[str, object] = record.transload  # type: ignore[attr-defined]
    event, _, text = record.getMessage().partition(" ")
    pairs = dict(pair.split("=", 1) for pair in shlex.split(text))
    assert event == structure["event"]
    assert pairs.keys() == structure.keys() - {"event"}
    for key, said in pairs.items():
        value = structure[key]
        shown = "-" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
        assert said == shown.replace("\\", ""), (key, said, value)
    return structure


def events(caplog: pytest.LogCaptureFixture, *names: str) -> list[dict[str, object]]:
    found = [fields(record) for record in caplog.records if record.name == "transload"]
    return [one for one in found if not names or one["event"] in names]


def test_a_line_can_be_split_and_parsed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "transload"):
        log_event("torn", "engine/a/0", 7, level=logging.WARNING, why='lost: "gone" = 1', seconds=0.12345678, none=None)
        log_event("step", "trainer", level=logging.DEBUG)
    said, step = caplog.records
    assert said.getMessage() == ('torn worker=engine/a/0 version=7 why="lost: \\"gone\\" = 1" seconds=0.123457 none=-')
    assert (said.levelno, step.getMessage()) == (logging.WARNING, "step worker=trainer version=-")
    assert json.loads(re.findall(r'why=("(?:[^"\\]|\\.)*")', said.getMessage())[0]) == 'lost: "gone" = 1'


def test_the_life_of_a_job_is_in_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "transload"),
        Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew,
    ):
        crew.connect()
        crew.send(1)
    names = [one["event"] for one in events(caplog)]
    order = ["connecting", "plan", "connected", "sending", "landed", "verified", "activated"]
    assert [name for name in dict.fromkeys(names) if name in order] == order
    assert {one["worker"] for one in events(caplog, "joined")} == {"trainer", "engine/a"}
    assert {one["worker"] for one in events(caplog, "sent")} == {"trainer/0", "trainer/1"}
    activated = events(caplog, "activated")
    assert {one["worker"] for one in activated} == {"engine/a", "engine/a/0", "engine/a/1"}
    assert {one["version"] for one in (*activated, *events(caplog, "sending", "landed", "verified"))} == {1}
    (plan,) = events(caplog, "plan")
    assert (plan["trainers"], plan["engines"], plan["rollouts"]) == (2, 1, 2)


def test_more_rounds_are_no_more_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts = []
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        for version, budget in ((1, 1 << 20), (2, 16)):
            report = crew.connect(buffer_bytes=budget)[0]
            assert (report.rounds > 10) == (version == 2)  # type: ignore[attr-defined]
            caplog.clear()
            with caplog.at_level(logging.INFO, "transload"):
                crew.send(version)
            counts.append([one["event"] for one in events(caplog)])
    assert sorted(counts[0]) == sorted(counts[1])  # type: ignore[type-var]


def test_what_goes_wrong_is_a_warning_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def raises() -> None:
        raise ValueError("cannot drain")

    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.start_engine("b", [rollout(0, 1)], before_update_hook=raises)
        crew.connect()
        with caplog.at_level(logging.WARNING, "transload"):
            with pytest.raises(HookError):
                crew.senders[0].send_weights(1).result()
            crew.rollouts["a/0"].leave()
            wait_for(lambda: bool(events(caplog, "lost")))
            with pytest.raises(TransferError):
                crew.senders[0].send_weights(2).result()
    refused = events(caplog, "left_out")
    assert refused[0]["worker"] == "engine/b"
    assert "cannot drain" in str(refused[0]["why"])
    assert "prepare, version 1" in str(refused[0]["phase"])
    assert (refused[1]["worker"], refused[1]["version"], refused[1]["why"]) == ("engine/a", 1, "gone since connect")
    assert events(caplog, "lost")[0]["worker"] == "engine/a"


def test_progress_says_phases_rounds_and_engines(tmp_path: Path) -> None:
    engines = {"a": [rollout(0, 1)], "b": [rollout(0, 1)]}
    told: dict[int, list[tuple[str, int, int]]] = {0: [], 1: []}

    def listen(rank: int) -> object:
        return lambda what, done, total: told[rank].append((what, done, total))

    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], engines) as crew:
        for outcome in crew.trainers(
            lambda sender, rank: sender.connect(["a", "b"], buffer_bytes=64, progress=listen(rank))  # type: ignore[arg-type]
        ):
            assert outcome.error is None
        for rank, lines in told.items():
            said = [what for what, _, _ in lines]
            assert any("wait for engine/a, engine/b" in what for what in said), said
            for phase in ("probe, connect", "plan, connect", "bind, connect", "agreeing on a poll, connect"):
                assert any(phase in what for what in said), (phase, said)
            assert all(0 <= done <= total for _, done, total in lines)
            # Rank 0 hears of every engine.
            assert any(what.endswith(": engine/b") for what in said) == (rank == 0)
            lines.clear()
        results = crew.trainers(
            lambda sender, rank: sender.send_weights(1, progress=listen(rank)).result()  # type: ignore[arg-type]
        )
        assert [outcome.error for outcome in results] == [None, None]
    for lines in told.values():
        rounds = [(done, total) for what, done, total in lines if what == "rounds, version 1"]
        assert rounds == sorted(rounds)
        assert rounds[-1][0] == rounds[-1][1] > 1
        assert any("transfer, version 1" in what for what, _, _ in lines)
        assert any("publish, version 1" in what for what, _, _ in lines)


def test_a_progress_that_raises_ends_the_call_for_all(tmp_path: Path) -> None:
    def raises(what: str, done: int, total: int) -> None:
        raise ArithmeticError("the bar broke")

    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        first, second = crew.trainers(lambda sender, rank: sender.connect(["a"], progress=raises if rank else None))
        assert isinstance(second.error, ArithmeticError)
        assert isinstance(first.error, RemoteError)
        assert "trainer/1: ArithmeticError: the bar broke" in str(first.error)
        crew.connect()
        crew.send(1)
