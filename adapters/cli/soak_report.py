"""What fault trials say, one record a trial, counted by mode and fault; and what many updates in a row say.

A trial is fine when all four of its lists are empty:

``hangs``             calls that did not end within their limit
``wrong_bytes``       ranks that said that they were ready and held a wrong bit
``survivors_failed``  engines that the fault did not hit, could be served, and were not by the next update
``not_recovered``     ranks that had no right version after the victim was back and all trainers had connected again
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

__all__ = [
    "FAULTS",
    "MODES",
    "OUTCOMES",
    "Count",
    "Holding",
    "Place",
    "SoakReport",
    "TrialRecord",
    "UpdatesReport",
    "counts_table",
    "summarize",
    "updates_table",
]

MODES = ("plain", "ss", "rs", "ss+rs")
"""No staging, that of senders, of receivers, of both."""

MEMORY_SLACK_BYTES = 8 << 20
"""What a process may hold more after many updates; a hundredth of it an update would be found within a few hundred."""

FAULTS = ("kill", "freeze", "cut")

OUTCOMES = ("hangs", "wrong_bytes", "survivors_failed", "not_recovered")


class Place(msgspec.Struct, frozen=True):
    """Where trials run, in words, and the limit of every call."""

    where: str
    limit_s: float


class TrialRecord(msgspec.Struct, frozen=True):
    """One trial.

    Attributes
    ----------
    seed
        Makes the same trial again: ``transload soak --trials 1 --seed``.
    mode, transport, replicas
        Of the job; whether every trainer held everything.
    fault, victim, at, back
        What was done to whom, when (in update spans from the call of ``send_weights`` on), and when it was undone.
    hangs, wrong_bytes, survivors_failed, not_recovered
        What went wrong, in words.
    longest_call_s
        Of any call of a worker that was not frozen.
    refused_connects
        What trainers that called ``connect`` too early were told, before it succeeded.
    seconds
        The whole trial.
    """

    seed: int
    mode: str
    transport: str
    replicas: bool
    fault: str
    victim: str
    at: float
    back: str
    hangs: list[str]
    wrong_bytes: list[str]
    survivors_failed: list[str]
    not_recovered: list[str]
    longest_call_s: float
    refused_connects: list[str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not any(getattr(self, outcome) for outcome in OUTCOMES)


class Count(msgspec.Struct, frozen=True):
    """Trials of one mode and fault, and how many of them had each bad outcome."""

    mode: str
    fault: str
    trials: int
    hangs: int
    wrong_bytes: int
    survivors_failed: int
    not_recovered: int
    longest_call_s: float


class SoakReport(msgspec.Struct, frozen=True):
    """What ``transload soak --json`` prints.

    Attributes
    ----------
    where
        Network namespaces, or one host and why.
    seed
        The first trial's.
    limit_s
        Of every call.
    trials, hangs, wrong_bytes, survivors_failed, not_recovered
        How many, and how many with each bad outcome.
    counts
        The same by mode and fault.
    failed
        Trials that were not fine.
    """

    where: str
    seed: int
    limit_s: float
    trials: int
    hangs: int
    wrong_bytes: int
    survivors_failed: int
    not_recovered: int
    counts: list[Count]
    failed: list[TrialRecord]

    @property
    def ok(self) -> bool:
        """Whether every trial was fine."""
        return not self.failed


class Holding(msgspec.Struct, frozen=True):
    """What a worker's process held on to, once it was warm and at the end."""

    worker: str
    memory_bytes: tuple[int, int]
    files: tuple[int, int]
    sockets: tuple[int, int]
    threads: tuple[int, int]

    @property
    def grew(self) -> bool:
        """Whether it holds more at the end, beyond what allocators keep at will."""
        more = (after - before for before, after in (self.files, self.sockets, self.threads))
        return max(more) > 0 or self.memory_bytes[1] - self.memory_bytes[0] > MEMORY_SLACK_BYTES


class UpdatesReport(msgspec.Struct, frozen=True):
    """What ``transload soak --updates N --json`` prints.

    Attributes
    ----------
    mode, transport
        Of the job.
    updates
        How many there were, after some to get warm.
    seconds
        For all of them.
    wrong_bytes
        Ranks that said that they were ready and held a wrong bit.
    workers
        What each held on to.
    grown
        Workers that hold on to more at the end.
    """

    mode: str
    transport: str
    updates: int
    seconds: float
    wrong_bytes: list[str]
    workers: list[Holding]
    grown: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong and nothing grew."""
        return not self.wrong_bytes and not self.grown


def summarize(records: Sequence[TrialRecord], *, where: str, seed: int, limit_s: float) -> SoakReport:
    """Count trials."""
    counts = []
    for mode in MODES:
        for fault in FAULTS:
            mine = [record for record in records if (record.mode, record.fault) == (mode, fault)]
            if mine:
                longest = max(record.longest_call_s for record in mine)
                counts.append(Count(mode, fault, len(mine), *_bad(mine), longest))
    failed = [record for record in records if not record.ok]
    return SoakReport(where, seed, limit_s, len(records), *_bad(records), counts, failed)


def counts_table(report: SoakReport) -> Table:
    """One row for each mode and fault."""
    table = Table(
        title=f"{report.trials} fault trials from seed {report.seed} on, {report.where}",
        caption=f"A call hangs when it takes more than {report.limit_s:g} s.",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    for header in ("mode", "fault"):
        table.add_column(header)
    for header in ("trials", *(outcome.replace("_", " ") for outcome in OUTCOMES), "longest call, s"):
        table.add_column(header, justify="right")
    for count in report.counts:
        bad = (count.hangs, count.wrong_bytes, count.survivors_failed, count.not_recovered)
        table.add_row(count.mode, count.fault, str(count.trials), *map(_shown, bad), f"{count.longest_call_s:.1f}")
    return table


def updates_table(report: UpdatesReport) -> Table:
    """One row a worker: what it held on to before and after."""
    table = Table(
        title=f"{report.updates} updates in {report.seconds:.0f} s, {report.mode}, {report.transport}",
        caption="; ".join(report.wrong_bytes) or "No wrong bit at any step.",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("worker")
    for header in ("memory, MB", "files", "sockets", "threads"):
        table.add_column(header, justify="right")
    table.add_column("grew")
    for one in report.workers:
        before, after = (size / 1e6 for size in one.memory_bytes)
        counts = (f"{first} -> {last}" for first, last in (one.files, one.sockets, one.threads))
        table.add_row(one.worker, f"{before:.1f} -> {after:.1f}", *counts, "[red]yes[/]" if one.grew else "no")
    return table


def _bad(records: Sequence[TrialRecord]) -> tuple[int, int, int, int]:
    hangs, wrong, survivors, recovered = (
        sum(bool(getattr(record, outcome)) for record in records) for outcome in OUTCOMES
    )
    return hangs, wrong, survivors, recovered


def _shown(number: int) -> str:
    return f"[red]{number}[/]" if number else "0"
