"""`transload soak`: records are counted by mode and fault, what went wrong is shown, and the exit status says so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from adapters.cli import soak
from adapters.cli.main import app
from adapters.cli.soak_report import MODES, OUTCOMES, Holding, Place, SoakReport, TrialRecord, UpdatesReport, summarize

PLACE = Place("in a test", 40.0)
GOOD = TrialRecord(
    seed=3,
    mode=MODES[-1],
    transport="mooncake",
    replicas=True,
    fault="kill",
    victim="engine/a/0",
    at=0.5,
    back="update 1",
    hangs=[],
    wrong_bytes=[],
    survivors_failed=[],
    not_recovered=[],
    longest_call_s=2.5,
    refused_connects=[],
    seconds=6.0,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose trials print what is in a file, and write down how they were asked."""
    folder = tmp_path / "tests" / "cluster"
    folder.mkdir(parents=True)
    (folder / "soak.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path('asked').write_text(' '.join(sys.argv[1:]))\n"
        "print(pathlib.Path('lines').read_text(), end='')\n"
        "sys.exit(int(pathlib.Path('status').read_text()))\n"
    )
    (tmp_path / "status").write_text("0")
    return tmp_path


def say(checkout: Path, *lines: msgspec.Struct) -> None:
    (checkout / "lines").write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))


def test_trials_are_counted_by_mode_and_fault() -> None:
    bad = msgspec.structs.replace(GOOD, seed=4, fault="cut", wrong_bytes=["engine/a/0, step 3"], longest_call_s=9.0)
    report = summarize([GOOD, bad, msgspec.structs.replace(bad, seed=5)], where="here", seed=3, limit_s=40.0)
    assert (report.trials, report.hangs, report.wrong_bytes) == (3, 0, 2)
    assert [(one.mode, one.fault, one.trials, one.wrong_bytes) for one in report.counts] == [
        (MODES[-1], "kill", 1, 0),
        (MODES[-1], "cut", 2, 2),
    ]
    assert [record.seed for record in report.failed] == [4, 5]
    assert not report.ok
    assert summarize([GOOD], where="here", seed=3, limit_s=40.0).ok


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_fails_a_trial(outcome: str) -> None:
    assert GOOD.ok
    assert not msgspec.structs.replace(GOOD, **{outcome: ["why"]}).ok


def test_the_trials_process_is_asked_and_believed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = msgspec.structs.replace(GOOD, seed=7, hangs=["trainer/0, send_weights: 99 s"])
    say(checkout, PLACE, GOOD, bad)
    report = soak.run_trials(2, seed=3, mode=MODES[-1], fault="kill", as_json=True, folder=checkout)
    assert (checkout / "asked").read_text() == f"--trials 2 --seed 3 --mode {MODES[-1]} --fault kill"
    shown = capsys.readouterr()
    assert msgspec.json.decode(shown.out, type=type(report)) == report
    assert "trainer/0, send_weights: 99 s" in shown.err
    assert (report.trials, report.hangs, report.limit_s, report.where) == (2, 1, 40.0, "in a test")
    soak.run_trials(2, seed=3, mode=None, fault=None, as_json=False, folder=checkout)
    assert (checkout / "asked").read_text() == "--trials 2 --seed 3"
    assert "2 fault trials from seed 3 on, in a test" in capsys.readouterr().out


def test_an_interrupt_loses_no_trial(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(checkout, PLACE, GOOD)
    (checkout / "tests" / "cluster" / "soak.py").write_text(
        "import os, pathlib, signal, time\n"
        "print(pathlib.Path('lines').read_text(), end='', flush=True)\n"
        "time.sleep(1)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        soak.run_trials(300, seed=3, mode=None, fault=None, as_json=True, folder=checkout)
    assert msgspec.json.decode(capsys.readouterr().out, type=SoakReport).trials == 1


def test_growth_is_judged(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm = Holding("trainer/0", (1 << 30, (1 << 30) + 1), (9, 9), (4, 3), (5, 5))
    leaks = [
        msgspec.structs.replace(calm, files=(9, 10)),
        msgspec.structs.replace(calm, sockets=(4, 5)),
        msgspec.structs.replace(calm, threads=(5, 6)),
        msgspec.structs.replace(calm, memory_bytes=(0, 9 << 20)),
    ]
    assert [one.grew for one in (calm, *leaks)] == [False, True, True, True, True]
    say(checkout, UpdatesReport("plain", "shared_memory", 5, 1.0, [], [calm, leaks[0]], ["trainer/0"]))
    assert not soak.run_updates(5, mode=None, as_json=False, folder=checkout).ok
    assert (checkout / "asked").read_text() == f"--updates 5 --mode {MODES[0]}"
    assert "9 -> 10" in capsys.readouterr().out


def test_errors_are_named(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(soak.SoakError, match=f"--mode fast: there are {MODES[0]}"):
        soak.run_trials(1, seed=0, mode="fast", fault=None, as_json=True, folder=checkout)
    with pytest.raises(soak.SoakError, match="source checkout"):
        soak.run_updates(1, mode=None, as_json=True, folder=tmp_path / "nowhere")
    say(checkout, PLACE, GOOD)
    (checkout / "status").write_text("3")
    with pytest.raises(soak.SoakError, match="exit status 3"):
        soak.run_trials(2, seed=0, mode=None, fault=None, as_json=True, folder=checkout)


def test_the_command_exits_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [GOOD]
    monkeypatch.setattr(soak, "run_trials", lambda *_, **__: summarize(found, where="here", seed=0, limit_s=40.0))
    assert CliRunner().invoke(app, ["soak", "--trials", "1", "--json"]).exit_code == 0
    found.append(msgspec.structs.replace(GOOD, not_recovered=["engine/b/0"]))
    assert CliRunner().invoke(app, ["soak", "--trials", "2", "--json"]).exit_code == 1
    monkeypatch.undo()
    done = CliRunner().invoke(app, ["soak", "--fault", "burn"])
    assert (done.exit_code, "there are kill, freeze, cut" in done.output) == (2, True)
