"""`transload soak`: run the checkout's fault trials in a process of their own, show how far they are, and count.

The trials live with the one-machine cluster, in `tests/cluster` of a source checkout; they say what they found as JSON,
one line a trial (`adapters.cli.soak_report`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.progress import Progress

from adapters.cli.soak_report import (
    FAULTS,
    MODES,
    OUTCOMES,
    Place,
    SoakReport,
    TrialRecord,
    UpdatesReport,
    counts_table,
    summarize,
    updates_table,
)

__all__ = ["SoakError", "run_trials", "run_updates"]

_END_S = 30.0


class SoakError(RuntimeError):
    """There is no checkout, no such mode or fault, or the trials' process ended early."""


def run_trials(
    trials: int, *, seed: int, mode: str | None, fault: str | None, as_json: bool, folder: Path | None = None
) -> SoakReport:
    """Run fault trials; what has gone wrong is printed as it happens, the counts at the end or at an interrupt.

    Parameters
    ----------
    trials
        How many.
    seed
        Of the first; each trial has one of its own, and the next one's is greater by one or more.
    mode, fault
        Only seeds that mean this mode, or this fault.
    as_json
        Print one JSON object at the end, and nothing else to standard output.
    folder
        The checkout; by default the one that this package is imported from.

    Raises
    ------
    SoakError
        As above.
    """
    for name, given, known in (("mode", mode, MODES), ("fault", fault, FAULTS)):
        if given is not None and given not in known:
            raise SoakError(f"soak: --{name} {given}: there are {', '.join(known)}")
    arguments = ["--trials", str(trials), "--seed", str(seed)]
    arguments += [] if mode is None else ["--mode", mode]
    arguments += [] if fault is None else ["--fault", fault]
    console = Console(stderr=as_json)
    records: list[TrialRecord] = []
    with _lines(arguments, folder) as lines, Progress(console=console) as progress:
        place = msgspec.json.decode(next(lines), type=Place)
        console.print(f"{trials} trials {place.where}, seeds from {seed} on")
        task = progress.add_task("trials", total=trials)
        interrupted: KeyboardInterrupt | None = None
        try:
            for line in lines:
                record = msgspec.json.decode(line, type=TrialRecord)
                records.append(record)
                if not record.ok:
                    console.print(_bad(record), markup=False)
                progress.advance(task)
        except KeyboardInterrupt as error:
            # An hour of trials is not lost for it.
            interrupted = error
    report = summarize(records, where=place.where, seed=seed, limit_s=place.limit_s)
    _print(report, as_json=as_json)
    if not as_json:
        console.print(counts_table(report))
    if interrupted is not None:
        raise interrupted
    return report


def run_updates(updates: int, *, mode: str | None, as_json: bool, folder: Path | None = None) -> UpdatesReport:
    """Run updates one after the other without a fault, and compare what workers hold on to at the start and the end.

    Parameters are as of `run_trials`; the mode is plain by default.

    Raises
    ------
    SoakError
        As there.
    """
    if mode is not None and mode not in MODES:
        raise SoakError(f"soak: --mode {mode}: there are {', '.join(MODES)}")
    console = Console(stderr=as_json)
    arguments = ["--updates", str(updates), "--mode", mode or MODES[0]]
    with _lines(arguments, folder) as lines, console.status(f"{updates} updates"):
        report = msgspec.json.decode(next(lines), type=UpdatesReport)
    _print(report, as_json=as_json)
    if not as_json:
        console.print(updates_table(report))
    return report


@contextmanager
def _lines(arguments: list[str], folder: Path | None) -> Iterator[Iterator[bytes]]:
    """What the trials' process prints, line by line; it has ended well at the end of the block."""
    root = Path(__file__).resolve().parents[2] if folder is None else folder
    if not (root / "tests" / "cluster" / "soak.py").is_file():
        raise SoakError(
            f"soak: expected the trials in {root / 'tests' / 'cluster'}, which are not there; they belong to the "
            "source checkout and are not installed: clone the repository and install it with "
            "`pip install -e '.[torch,test]'`"
        )
    command = [sys.executable, "-m", "tests.cluster.soak", *arguments]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield _until_end(process, process.stdout)
        finally:
            if process.poll() is None:
                # It removes its namespaces and processes.
                process.terminate()
                process.wait(_END_S)


def _until_end(process: subprocess.Popen[bytes], output: IO[bytes]) -> Iterator[bytes]:
    yield from output
    if process.wait():
        raise SoakError(f"soak: the trials' process ended with exit status {process.returncode}")


def _bad(record: TrialRecord) -> str:
    what = {outcome: getattr(record, outcome) for outcome in OUTCOMES}
    lines = [f"    {outcome}: {one}" for outcome, found in what.items() for one in found]
    head = f"seed {record.seed}: {record.fault} {record.victim} at {record.at:g} spans, back after {record.back}"
    job = f"{record.mode}, {record.transport}{', replicas' if record.replicas else ''}"
    return "\n".join([f"{head} ({job})", *lines])


def _print(report: SoakReport | UpdatesReport, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode(), flush=True)
