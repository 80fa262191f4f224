"""One rank in a process of its own: does what it is told over a pipe, and a rollout polls in between.

Commands are ``(what, arguments)``; every one is answered with ``("fine", value)`` or ``("error", kind, text)``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import active_count
from types import FrameType

import psutil

from adapters.receiver import ReceiverAdapter
from adapters.sender import PendingUpdate, SenderAdapter
from tests.adapters.crew import compile_kernels
from tests.adapters.toy import Holding, copy_of, rollout, same_bits, trainer

_PAUSE_S = 0.001


@dataclass(frozen=True)
class Job:
    """What a rank needs to know to join."""

    folder: Path
    checkpoint: Path
    deadline_s: float
    step_s: float = 0.0
    replicas: bool = False
    staging: bool = False


class Interrupts:
    """SIGINT, which strikes inside calls of an adapter only, so that the pipe stays whole."""

    def __init__(self) -> None:
        self._open = False
        signal.signal(signal.SIGINT, self._strike)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._open = False
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False


def resources() -> tuple[int, int, tuple[str, ...]]:
    """Threads and files of this process, and the addresses at which it listens."""
    me = psutil.Process()
    listens = sorted(str(one.laddr) for one in me.net_connections("inet") if one.status == psutil.CONN_LISTEN)
    return active_count(), me.num_fds(), tuple(listens)


def main(pipe: Connection, group: str, rank: int, world_size: int) -> None:
    """Serve commands until the pipe closes."""
    compile_kernels()
    interrupts = Interrupts()
    worker = Trainer(rank, world_size) if group == "trainer" else Rollout(group, rank, world_size, interrupts.allowed)
    pipe.send(("fine", None))
    while True:
        if pipe.poll(_PAUSE_S):
            try:
                what, arguments = pipe.recv()
            except EOFError:
                return
            answer: Callable[..., object] = getattr(worker, what)
            said: tuple[object, ...]
            try:
                with interrupts.allowed():
                    said = "fine", answer(*arguments)
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the test looks at it
                said = "error", type(error).__name__, str(error)
            pipe.send(said)
        worker.between()


class Worker:
    """What both kinds do."""

    def resources(self) -> tuple[int, int, tuple[str, ...]]:
        return resources()

    def exit(self) -> None:
        """End the process as a program does that forgets to close."""
        raise SystemExit


class Trainer(Worker):
    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._holding: Holding
        self._sender: SenderAdapter
        self._pending: PendingUpdate

    def join(self, job: Job) -> None:
        self._holding = trainer(0, 1) if job.replicas else trainer(self._rank, self._world_size)
        self._sender = SenderAdapter(
            self._holding.load_weights,
            self._holding.parameters,
            job.checkpoint,
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=job.folder,
            staging=job.staging,
            deadline_s=job.deadline_s,
        )

    def connect(self, engines: list[str], buffer_bytes: int) -> str:
        return self._sender.connect(engines, buffer_bytes=buffer_bytes).to_json()

    def send(self, version: int, metadata: object, trace: str | None = None) -> float:
        self._holding.fill(version)
        start = time.monotonic()
        self._pending = self._sender.send_weights(version, metadata, trace=trace)  # type: ignore[arg-type]
        return time.monotonic() - start

    def spoil(self) -> None:
        """Train on at once: what was sent must not change."""
        for tensor in self._holding.tensors.values():
            tensor.fill_(-1)

    def result(self, timeout_s: float | None) -> dict[str, int]:
        report = self._pending.result(timeout_s)
        return {worker: report.bytes_received(worker) for worker in report.workers}

    def version(self) -> int | None:
        return self._sender.version

    def leave(self) -> int:
        self._sender.close()
        return active_count()

    def between(self) -> None:
        pass


class Rollout(Worker):
    def __init__(
        self, engine: str, rank: int, world_size: int, allowed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._engine, self._rank, self._world_size = engine, rank, world_size
        self._allowed = allowed
        self._receiver: ReceiverAdapter | None = None

    def join(self, job: Job) -> None:
        self._holding = rollout(self._rank, self._world_size)
        self._hooks: list[str] = []
        self._updates: list[tuple[int, object]] = []
        self._errors: list[tuple[str, str]] = []
        self._step_s = job.step_s
        self._stalled = False
        self._receiver = ReceiverAdapter(
            self._holding.load_weights,
            self._holding.parameters,
            job.checkpoint,
            engine=self._engine,
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=job.folder,
            staging=job.staging,
            deadline_s=job.deadline_s,
            before_update_hook=lambda: self._hooks.append("before"),
            after_update_hook=lambda: self._hooks.append("after"),
        )

    def look(self) -> dict[str, object]:
        assert self._receiver is not None
        return {
            "version": self._receiver.version,
            "state": self._receiver.state.value,
            "ready": self._receiver.ready,
            "hooks": self._hooks,
            "updates": self._updates,
            "errors": self._errors,
        }

    def holds(self, version: int) -> bool:
        return same_bits(self._holding.tensors, self._holding.expected(version))

    def untouched(self) -> bool:
        """Whether nothing was ever written."""
        return same_bits(self._holding.tensors, copy_of(rollout(self._rank, self._world_size).tensors))

    def slow(self, seconds: float) -> None:
        """Take so long for every write into parameters from now on."""
        assert self._receiver is not None
        kernels = self._receiver._duties._kernels
        before_run = kernels.before_run

        def run_late() -> None:
            time.sleep(seconds)
            before_run()

        kernels.before_run = run_late  # type: ignore[method-assign]

    def die_at(self, number: int) -> None:
        """End this process in the middle of an update: when parameters are about to be written for the n-th time."""
        assert self._receiver is not None
        kernels = self._receiver._duties._kernels
        before_run, count = kernels.before_run, iter(range(10**6))

        def run_or_die() -> None:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            before_run()

        kernels.before_run = run_or_die  # type: ignore[method-assign]

    def leave(self) -> int:
        assert self._receiver is not None
        receiver, self._receiver = self._receiver, None
        receiver.close()
        return active_count()

    def between(self) -> None:
        if self._receiver is None:
            return
        time.sleep(self._step_s)
        try:
            with self._allowed():
                update = self._receiver.poll_requests()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the test looks at it
            self._errors.append((type(error).__name__, str(error)))
            return
        if update is not None:
            self._updates.append((update.version, update.metadata))
