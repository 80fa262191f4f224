"""A progress display of named phases, and how long each took.

On a terminal every phase is a line with a spinner, a bar of answers and a clock; elsewhere one plain line is printed
when a phase is done.

    with Phases(console) as phases:
        with phases.phase("connect", answers=8) as advance:
            ...
            advance()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Phases"]


class Phases:
    """A context manager around a run; `seconds` has the phases in the order in which they first began."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seconds: dict[str, float] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]:heavy_check_mark:[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Phases:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> wall seconds; phases of one name add up."""
        return dict(self._seconds)

    @contextmanager
    def phase(self, name: str, *, answers: int) -> Iterator[Callable[[], None]]:
        """Time a phase and show it while it runs; call what it gives once for every answer."""
        task = self._progress.add_task(name, total=answers)
        start = time.perf_counter()
        yield lambda: self._progress.advance(task)
        seconds = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._progress.update(task, completed=answers)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {seconds:.2f} s", highlight=False)
