"""One worker under probe: its loader, its live tensors, and the manners that every load keeps.

A load feeds all names, is followed by one vote of all ranks, and is repeated with private copies for a loader that
writes into its input or keeps it. Whatever happens, all tensors get their own bits back.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from types import GeneratorType
from typing import TypeAlias, TypeVar

import torch

from adapters.probe_feed import Feeder
from adapters.probe_live import Keeper, Parameters, check_same, find_live
from adapters.probe_moves import MoveWatch
from adapters.probe_writes import WriteWatch
from layout_algebra.errors import LayoutError, LoaderRaisedError, ProbeError
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.space import CheckpointSpace

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, loads done and loads in all."""

Result = TypeVar("Result")

_log = logging.getLogger("adapters.probing")


Watch: TypeAlias = WriteWatch | MoveWatch
"""What notes how a loader goes about one load."""


class Status(IntEnum):
    """How a step went on one rank; the worst over all ranks decides what every rank does next."""

    FINE = 0
    NEEDS_COPIES = 1
    RAISED = 2
    FAILED = 3


class ProbedWorker:
    """A loader and its live tensors.

    Parameters
    ----------
    load_weights, parameters, space, agree, progress
        As given to ``probe``.
    executor
        Runs copies and checks.
    feeder
        What loads are fed from.
    total_loads
        For progress.

    Raises
    ------
    LayoutError
        If live tensors cannot be probed, here or on another rank; nothing was loaded.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        parameters: Parameters,
        space: CheckpointSpace,
        agree: Callable[[int], int] | None,
        progress: Progress | None,
        executor: ThreadPool,
        feeder: Feeder,
        total_loads: int,
    ) -> None:
        self._load_weights = load_weights
        self._parameters = parameters
        self._agree = agree
        self._progress = progress
        self._total = total_loads
        self._done = 0
        self.space = space
        self.executor = executor
        self.feeder = feeder
        self.live = self.together(lambda: find_live(parameters), "looking at the live tensors")
        self.keeper = Keeper(self.live, executor)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep all bits inside the block and give them back at its end, however it ends."""
        self.tell("keeping parameters")
        try:
            self.together(self.keeper.keep_and_clear, "keeping the live tensors")
            yield
        finally:
            try:
                self.tell("giving parameters back")
            finally:
                self._give_back()

    def tell(self, what: str) -> None:
        """Report a step."""
        if self._progress is not None:
            self._progress(what, self._done, self._total)

    def note(self, what: str) -> None:
        """Report something the user should know."""
        _log.warning(what)
        self.tell(what)

    def expect(self, more_loads: int) -> None:
        """Announce loads beyond those planned."""
        self._total += more_loads

    def vote(self, mine: int) -> int:
        """The largest number over all ranks."""
        return mine if self._agree is None else self._agree(mine)

    def together(self, work: Callable[[], Result], what: str) -> Result:
        """Do something that may fail on some rank; where it fails on one, it fails on all.

        Raises
        ------
        LayoutError
            This rank's own, or a ProbeError that points to another rank.
        """
        try:
            result = work()
        except LayoutError:
            self.vote(int(Status.FAILED))
            raise
        if self.vote(int(Status.FINE)) != int(Status.FINE):
            raise ProbeError(f"{what} failed on another rank; its error says why. Nothing is changed here")
        return result

    def load(
        self,
        prepare: Callable[[Feeder], None],
        what: str,
        read: Callable[[], Result],
        watch: Watch | None = None,
    ) -> Result:
        """Run the loader on what ``prepare`` gets ready, watched if asked, then ``read`` what it left.

        Raises
        ------
        LoaderRaisedError
            If the loader raised, here or on another rank.
        ProbeError
            Whatever ``read`` raised, here or on another rank.
        """
        while True:
            self.tell(what)
            status, error, result = self._attempt(prepare, read, watch)
            worst = Status(self.vote(int(status)))
            if worst is Status.FINE and result is not None:
                self._done += 1
                return result[0]
            if worst is Status.NEEDS_COPIES:
                self.feeder.make_private()
                self.note(f"{what}: load_weights writes into its input or keeps it; repeating with private copies")
                continue
            if worst is Status.RAISED:
                raise LoaderRaisedError(f"load_weights raised during {what}: {_describe(error)}") from error
            if isinstance(error, ProbeError):
                raise error
            raise ProbeError(f"{what}: could not read the live tensors: {_describe(error)}") from error

    def _attempt(
        self, prepare: Callable[[Feeder], None], read: Callable[[], Result], watch: Watch | None
    ) -> tuple[Status, Exception | None, tuple[Result] | None]:
        try:
            self.keeper.give_back_steering(self.live)
            prepare(self.feeder)
        except Exception as error:  # noqa: BLE001 every rank must hear of it
            return Status.FAILED, error, None
        raised: Exception | None = None
        try:
            self._call(watch)
        except Exception as error:  # noqa: BLE001 a loader may raise anything
            raised = error
        try:
            now = find_live(self._parameters)
            if any(self.feeder.holds(one.tensor) for one in now) or self.feeder.damaged():
                return Status.NEEDS_COPIES, raised, None
            if raised is not None:
                return Status.RAISED, raised, None
            check_same(self.live, now, sharing=self._done > 0)
            self.live = now
            return Status.FINE, None, (read(),)
        except Exception as error:  # noqa: BLE001 every rank must hear of it
            return (Status.FAILED, error, None) if raised is None else (Status.RAISED, raised, None)

    def _call(self, watch: Watch | None) -> None:
        if watch is not None:
            watch.clear()
        with nullcontext() if watch is None else watch:
            run_loader(self._load_weights, self.feeder.feed())
        for device in {one.tensor.device for one in self.live if one.tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def _give_back(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                try:
                    now = find_live(self._parameters)
                except Exception:  # noqa: BLE001 the user's callable may be what fails
                    now = self.live
                self.keeper.give_back(now, self.feeder.holds)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def run_loader(load_weights: LoadWeights, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Call a loader to its end, without autograd; one that is a generator function is drained.

    Raises
    ------
    TypeError
        If it is a coroutine function, besides whatever it raises itself.
    """
    with torch.no_grad():
        result = load_weights(pairs)
        if isinstance(result, GeneratorType):
            deque(result, maxlen=0)
        elif inspect.iscoroutine(result):
            result.close()
            raise TypeError("load_weights is a coroutine function; expected one that loads before it returns")
        elif inspect.isasyncgen(result):
            raise TypeError("load_weights is an async generator; expected one that loads before it returns")


def _describe(error: Exception | None) -> str:
    return "on another rank" if error is None else f"{type(error).__name__}: {error}"
