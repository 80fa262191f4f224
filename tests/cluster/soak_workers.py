"""Workers that faults happen to: trainers that spoil their weights at once, ranks that check every bit at every step.

An engine's rank polls, and then takes a step: whenever it says that it is ready, all its bits must be those of the
version that it says it has, and before its first update its own. As in a real engine, no rank is more than a step ahead
of another (`Steps`): where one is gone, the others wait for it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from adapters.receiver import ReceiverAdapter, State
from adapters.rendezvous import SharedFolder
from adapters.sender import SenderAdapter
from tests.adapters.crew import compile_kernels
from tests.cluster.model import Rollout, Trainer, shapes, space_of

_STEP_S = 0.002
_BUFFER_BYTES = 48_000
_MOST_WRONG = 5

TENSORS = shapes(layers=2, hidden=192, wide=384, words=800)


@dataclass(frozen=True)
class Setting:
    """What all workers of one job agree on.

    Attributes
    ----------
    folder
        Where they meet.
    sender_staging, receiver_staging
        The mode.
    transport
        Name.
    replicas
        Whether every trainer holds everything, or each its rows.
    deadline_s
        Of the adapters.
    """

    folder: Path
    sender_staging: bool
    receiver_staging: bool
    transport: str
    replicas: bool
    deadline_s: float


class Called(NamedTuple):
    """How a trainer's call ended: seconds that each of its parts took, and the error that ended it."""

    seconds: tuple[float, ...]
    error: str


class Seen(NamedTuple):
    """What a rank has seen so far.

    Attributes
    ----------
    version, ready, torn
        Of its adapter.
    connected
        Whether a connect has included it.
    steps
        It has taken.
    wrong
        Steps at which it was ready and had wrong bits, in words, the first ones.
    errors
        Of polls, in words.
    longest_poll_s, in_poll_s
        Of any poll since this was last reset, and of the one that it is in.
    """

    version: int | None
    ready: bool
    torn: bool
    connected: bool
    steps: int
    wrong: list[str]
    errors: list[str]
    longest_poll_s: float
    in_poll_s: float


class Resources(NamedTuple):
    """What a process holds on to."""

    memory_bytes: int
    files: int
    sockets: int
    threads: int


class Steps:
    """The ranks of an engine step together: none begins a step before all have begun the one before.

    Parameters
    ----------
    file
        Shared by the ranks; made where there is none.
    rank, world_size
        A rank that was started again begins where the others are.
    """

    def __init__(self, file: Path, rank: int, world_size: int) -> None:
        with file.open("ab") as made:
            made.truncate(8 * world_size)
        self._begun = np.memmap(file, dtype=np.int64, mode="r+", shape=(world_size,))
        self._rank = rank
        self._begun[rank] = self._begun.max()

    def begin(self) -> int:
        """Begin the next step, if all ranks are there; its number, or 0."""
        following = int(self._begun[self._rank]) + 1
        if int(self._begun.min()) < following - 1:
            return 0
        self._begun[self._rank] = following
        return following


class _Process:
    """What both kinds of workers have."""

    def resources(self) -> Resources:
        """What this process holds on to now."""
        gc.collect()
        process = psutil.Process()
        links = [_target(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return Resources(
            process.memory_full_info().uss,
            len(links),
            sum(link.startswith("socket:") for link in links),
            process.num_threads(),
        )


class SoakTrainer(_Process):
    """A trainer rank."""

    def __init__(self, node: int, address: str, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        compile_kernels()  # with deadlines of seconds, reading them from disk must not be part of a connect
        self._address, self._rank, self._world_size = address, rank, world_size
        self._sender: SenderAdapter | None = None

    def join(self, setting: Setting) -> None:
        """Leave the job before, if there was one, and take part in this one."""
        self.leave()
        part = (0, 1) if setting.replicas else (self._rank, self._world_size)
        self._model = Trainer(TENSORS, *part)
        self._sender = SenderAdapter(
            self._model.load_weights,
            self._model.live,
            space_of(TENSORS),
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=SharedFolder(setting.folder, host=self._address),
            staging=setting.sender_staging,
            transport=setting.transport,
            deadline_s=setting.deadline_s,
        )

    def connect(self, engines: list[str]) -> Called:
        """Connect."""
        began = time.monotonic()
        error = ""
        try:
            report = self._adapter().connect(engines, buffer_bytes=_BUFFER_BYTES)
            error = "; ".join(f"left out {name}: {why}" for name, why in report.lost.items())
        except Exception as raised:  # noqa: BLE001 - whoever asked looks at it
            error = _words(raised)
        return Called((time.monotonic() - began,), error)

    def update(self, version: int) -> Called:
        """Fill, send, spoil, wait for the result; seconds of sending and of waiting."""
        self._model.fill(version)
        began = time.monotonic()
        try:
            pending = self._adapter().send_weights(version)
        except Exception as raised:  # noqa: BLE001 - whoever asked looks at it
            return Called((time.monotonic() - began, 0.0), _words(raised))
        sent = time.monotonic()
        for tensor in self._model.live.values():
            tensor.fill_(-1)
        error = ""
        try:
            left_out = pending.result().left_out
            error = "; ".join(f"left out {engine}: {why}" for engine, why in left_out.items())
        except Exception as raised:  # noqa: BLE001 - whoever asked looks at it
            error = _words(raised)
        return Called((sent - began, time.monotonic() - sent), error)

    def leave(self) -> None:
        """Let go."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _adapter(self) -> SenderAdapter:
        assert self._sender is not None
        return self._sender


class SoakRollout(_Process):
    """A rank of an engine, whose steps run on a thread of their own."""

    def __init__(self, node: int, address: str, engine: str, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        compile_kernels()  # with deadlines of seconds, reading them from disk must not be part of a connect
        self._address, self._engine, self._rank, self._world_size = address, engine, rank, world_size
        self._receiver: ReceiverAdapter | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread()

    def join(self, setting: Setting) -> None:
        """Leave the job before, if there was one, and take part in this one."""
        self.leave()
        self._model = Rollout(TENSORS, self._rank, self._world_size)
        self._receiver = ReceiverAdapter(
            self._model.load_weights,
            self._model.live,
            space_of(TENSORS),
            engine=self._engine,
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=SharedFolder(setting.folder, host=self._address),
            staging=setting.receiver_staging,
            transport=setting.transport,
            deadline_s=setting.deadline_s,
        )
        steps = Steps(setting.folder / f"{self._engine}.steps", self._rank, self._world_size)
        self._steps, self._polled_since, self._longest_poll_s = 0, 0.0, 0.0
        self._wrong: list[str] = []
        self._errors: list[str] = []
        self._leaving.clear()
        self._thread = threading.Thread(target=self._run, args=(self._receiver, steps), daemon=True)
        self._thread.start()

    def look(self) -> Seen:
        """What has been seen; resets the longest poll and the errors."""
        assert self._receiver is not None
        since, receiver, errors = self._polled_since, self._receiver, self._errors
        longest, self._longest_poll_s, self._errors = self._longest_poll_s, 0.0, []
        return Seen(
            receiver.version,
            receiver.ready,
            receiver.state is State.TORN,
            receiver.connected,
            self._steps,
            self._wrong,
            errors,
            longest,
            time.monotonic() - since if since else 0.0,
        )

    def leave(self) -> None:
        """Let go."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._leaving.set()
            self._thread.join()
            receiver.close()

    def _run(self, receiver: ReceiverAdapter, steps: Steps) -> None:
        expected = Rollout(TENSORS, self._rank, self._world_size)
        filled: int | None = None
        while not self._leaving.is_set():
            step = steps.begin()
            if step:
                self._poll(receiver, step)
            if receiver.state is State.IDLE and (receiver.ready or receiver.version is None):
                if receiver.version is not None and receiver.version != filled:
                    filled = receiver.version
                    expected.fill(filled)
                different = self._model.differences(expected)
                if different and len(self._wrong) < _MOST_WRONG:
                    self._wrong.append(f"step {self._steps}: {', '.join(different)} are not of version {filled}")
            self._steps += 1
            time.sleep(_STEP_S)

    def _poll(self, receiver: ReceiverAdapter, step: int) -> None:
        self._polled_since = began = time.monotonic()
        try:
            receiver.poll_requests(step)
        except Exception as raised:  # noqa: BLE001 - whoever asked looks at it
            self._errors.append(_words(raised))
        self._longest_poll_s = max(self._longest_poll_s, time.monotonic() - began)
        self._polled_since = 0.0


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
