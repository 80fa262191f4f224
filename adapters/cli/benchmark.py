"""One language for benchmarks: a row is a value against a floor that was taken in the same run.

A benchmark is a module `tests/benchmarks/<name>.py` of a source checkout with a function `rows() -> list[Row]`. It
measures its subject and the floor in turns, so that a busy machine slows both, and takes medians.

    value, floor = interleaved_medians(lambda: probe(...), lambda: load(...))
    Row.against_floor("probe 1GB", value=value, unit="s", floor=floor, bar=12.0)
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

__all__ = ["BenchResult", "Machine", "Row", "interleaved_medians", "this_machine"]


class Row(msgspec.Struct, frozen=True):
    """One measured case.

    Attributes
    ----------
    case
        What was measured, as a person reads it.
    value, floor
        In `unit`; the floor is the least that any solution must take, or what a plain one takes.
    ratio
        Value / floor.
    bar
        The largest ratio that is good enough, None when there is none yet.
    ok
        Ratio <= bar; True without a bar.
    """

    case: str
    value: float
    unit: str
    floor: float
    ratio: float
    bar: float | None
    ok: bool

    @staticmethod
    def against_floor(case: str, *, value: float, unit: str, floor: float, bar: float | None = None) -> Row:
        """A row whose ratio and verdict follow from value, floor and bar.

        Raises
        ------
        ValueError
            The floor is not positive.
        """
        if not floor > 0:
            raise ValueError(f"benchmark case {case!r}: expected a positive floor, got {floor} {unit}")
        ratio = value / floor
        return Row(case, value, unit, floor, ratio, bar, bar is None or ratio <= bar)


class Machine(msgspec.Struct, frozen=True):
    """Where rows were measured; timings mean nothing without it."""

    cpu: str
    cores: int
    load_1min: float
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]


class BenchResult(msgspec.Struct, frozen=True):
    """All rows of one benchmark, as `transload bench NAME --json` prints them."""

    name: str
    rows: tuple[Row, ...]
    machine: Machine

    @property
    def ok(self) -> bool:
        """No row missed its bar."""
        return all(row.ok for row in self.rows)


def interleaved_medians(
    subject: Callable[[], object], floor: Callable[[], object], *, repeats: int = 5
) -> tuple[float, float]:
    """Median seconds of `subject` and of `floor`, run in turns, after one warm-up of each.

    Raises
    ------
    ValueError
        Fewer than five repeats.
    """
    if repeats < 5:
        raise ValueError(f"interleaved_medians: expected at least 5 repeats, got {repeats}")
    subject()
    floor()
    times = [(_seconds(subject), _seconds(floor)) for _ in range(repeats)]
    return statistics.median(time[0] for time in times), statistics.median(time[1] for time in times)


def this_machine() -> Machine:
    """The machine this process runs on, with its load at this moment."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load_1min=os.getloadavg()[0],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: version for name in ("transload", "numpy", "numba", "torch") if (version := _version(name))},
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
