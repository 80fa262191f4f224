"""A crew of worker processes that one parent starts, asks, watches and always ends.

Each worker is `sys.executable -m MODULE SETUP` in a session of its own. Commands go to its standard input and replies
come from its standard output, one JSON object a line; what it writes to standard error goes to a file. `ask` waits for
all replies under one deadline and raises as soon as any worker of the crew fails or ends, naming it and showing the
end of its error output. A worker ends itself when its standard input closes, so none outlives its parent, however
the parent ends.

    with Crew(module, setups, log_folder=folder) as crew:
        replies = crew.ask({"trainer/0": Train(step=1)}, deadline_s=60)
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, NamedTuple, TypeVar

import msgspec

__all__ = ["Crew", "CrewError"]

CommandT = TypeVar("CommandT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

_ERROR_TAIL_CHARACTERS = 3000
_END_GRACE_S = 3.0
_ROOT_CAUSE_WAIT_S = 1.0


class CrewError(RuntimeError):
    """A worker failed, ended early or did not answer in time; the message says which, where and what it wrote."""


class _Line(NamedTuple):
    worker: str
    text: bytes | None  # None: the worker closed its output


class Crew(Generic[CommandT, ReplyT]):
    """Worker processes by name; a context manager that ends them all on every way out.

    Parameters
    ----------
    module
        The module run in each worker, with the worker's setup (JSON) as its one argument.
    setups
        Worker name -> setup.
    decode
        Reads one reply from JSON; raises `msgspec.DecodeError` for anything else.
    failure
        Says the error in a reply, or None when the reply is a good one.
    log_folder
        Where each worker's error output goes.
    environment
        Variables set for the workers on top of this process's own.
    """

    def __init__(
        self,
        module: str,
        setups: Mapping[str, msgspec.Struct],
        *,
        decode: Callable[[bytes], ReplyT],
        failure: Callable[[ReplyT], str | None],
        log_folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._decode = decode
        self._failure = failure
        self._log_folder = log_folder
        self._lines: queue.Queue[_Line] = queue.Queue()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        try:
            for worker, setup in setups.items():
                self._start(module, worker, setup, {**os.environ, **environment})
        except BaseException:
            # Also of an interrupt: the caller gets nothing to close, and processes outlive their parent.
            self.end()
            raise

    def __enter__(self) -> Crew[CommandT, ReplyT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def process_ids(self) -> dict[str, int]:
        """Worker name -> process id."""
        return {worker: process.pid for worker, process in self._workers.items()}

    def ask(
        self,
        commands: Mapping[str, CommandT],
        *,
        deadline_s: float,
        on_reply: Callable[[str, ReplyT], None] | None = None,
    ) -> dict[str, ReplyT]:
        """Give each named worker its command and wait for every reply.

        Raises
        ------
        CrewError
            A worker replied with a failure, any worker ended, or a reply is missing after `deadline_s`.
        """
        for worker, command in commands.items():
            self._write(worker, command)
        stop_at = time.monotonic() + deadline_s
        replies: dict[str, ReplyT] = {}
        while len(replies) < len(commands):
            try:
                line = self._lines.get(timeout=max(0.0, stop_at - time.monotonic()))
            except queue.Empty:
                raise CrewError(self._late(commands, replies, deadline_s)) from None
            try:
                reply = self._read(line)
            except CrewError as error:
                raise CrewError(self._root_cause(line, error)) from error
            replies[line.worker] = reply
            if on_reply is not None:
                on_reply(line.worker, reply)
        return {worker: replies[worker] for worker in commands}

    def wait_for_exit(self, *, deadline_s: float) -> None:
        """Close every worker's input and wait until all have left; after the deadline they are ended.

        For workers that were told to leave: any other worker takes the closed input for its parent's death.
        """
        stop_at = time.monotonic() + deadline_s
        for process in self._workers.values():
            _close(process.stdin)
        for process in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, stop_at - time.monotonic()))
        self.end()

    def end(self) -> None:
        """End every worker that is still there: ask, wait a moment, then kill. Harmless when they have left."""
        left = [process for process in self._workers.values() if process.poll() is None]
        for process in left:
            _signal_group(process.pid, signal.SIGTERM)
        stop_at = time.monotonic() + _END_GRACE_S
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, stop_at - time.monotonic()))
        for process in left:
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
        for process in self._workers.values():
            _close(process.stdin)
        for reader in self._readers:
            reader.join(timeout=_END_GRACE_S)

    def _start(self, module: str, worker: str, setup: msgspec.Struct, environment: Mapping[str, str]) -> None:
        with self._log(worker).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, msgspec.json.encode(setup).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        self._workers[worker] = process
        reader = threading.Thread(target=self._follow, args=(worker, process), name=f"read {worker}", daemon=True)
        reader.start()
        self._readers.append(reader)

    def _follow(self, worker: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for text in lines:
                self._lines.put(_Line(worker, text))
        self._lines.put(_Line(worker, None))

    def _write(self, worker: str, command: CommandT) -> None:
        stdin = self._workers[worker].stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(command) + b"\n")
            stdin.flush()
        except OSError:
            raise CrewError(self._ended(worker)) from None

    def _read(self, line: _Line) -> ReplyT:
        if line.text is None:
            raise CrewError(self._ended(line.worker))
        try:
            reply = self._decode(line.text)
        except msgspec.DecodeError as error:
            raise CrewError(f"{line.worker}: expected a reply, got {line.text[:200]!r} ({error})") from error
        message = self._failure(reply)
        if message is not None:
            raise CrewError(f"{line.worker}: {message}")
        return reply

    def _root_cause(self, first: _Line, error: CrewError) -> str:
        # A dying worker breaks its neighbours' collectives, and their complaints may arrive before the news of its end.
        if first.text is None:
            return str(error)
        stop_at = time.monotonic() + _ROOT_CAUSE_WAIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, stop_at - time.monotonic()))
            except queue.Empty:
                return str(error)
            if line.text is None:
                return f"{self._ended(line.worker)}\n(then {error})"

    def _ended(self, worker: str) -> str:
        process = self._workers[worker]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_GRACE_S)
        code = process.poll()
        how = (
            "closed its output" if code is None else f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        )
        return f"{worker}: the process ended too early ({how}){self._error_tail(worker)}"

    def _late(self, commands: Mapping[str, CommandT], replies: Mapping[str, ReplyT], deadline_s: float) -> str:
        missing = [worker for worker in commands if worker not in replies]
        what = type(commands[missing[0]]).__name__
        return f"{', '.join(missing)}: no answer to {what} within {deadline_s:g} s{self._error_tail(missing[0])}"

    def _error_tail(self, worker: str) -> str:
        text = self._log(worker).read_text(errors="replace").strip()[-_ERROR_TAIL_CHARACTERS:]
        return f"; its error output ends:\n{text}" if text else "; it wrote no error output"

    def _log(self, worker: str) -> Path:
        return self._log_folder / f"{worker.replace('/', '-')}.log"


def _signal_group(process_id: int, number: int) -> None:
    # The worker leads a group of its own (start_new_session), so its own helpers end with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, number)


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()
