"""One process on every node of a cluster, told what to do all at once; they may die, freeze and be started again.

    with Cluster(nodes) as cluster, Fleet(cluster, jobs) as fleet:
        ports = fleet.each(range(4), "sockets.listen")
        fleet.each(range(4), "sockets.connect", ports)

Processes are forked from a server that has imported what they need and has run none of it, so a new one is there at
once. It ends with its parent, even when it is frozen.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from tests.cluster.node_process import main

_START_S = 300.0
_END_S = 10.0


class Nodes(Protocol):
    """Where processes run: `tests.cluster.network.Cluster`, or one host (`tests.cluster.one_host`)."""

    def address(self, node: int) -> str:
        """A node's address."""
        ...

    def namespace(self, node: int) -> str:
        """The file of its network namespace; empty for that of the parent."""
        ...


class Job(NamedTuple):
    """One process to start.

    Attributes
    ----------
    node
        Where.
    target
        ``"module:Class"``; it is made with the node's number, its address, and ``arguments``.
    arguments
        More.
    """

    node: int
    target: str
    arguments: tuple[object, ...] = ()


class Answer(NamedTuple):
    """What came of a call.

    Attributes
    ----------
    value
        What was returned.
    error
        Why nothing was: a traceback, ``DIED`` or ``LATE``.
    """

    value: Any = None
    error: str = ""


DIED, LATE = "it died", "it said nothing"


class Fleet:
    """Processes on nodes; each makes one object.

    Parameters
    ----------
    nodes
        Where.
    jobs
        One a process; processes are numbered in this order.
    timeout_s
        Of every answer.
    """

    def __init__(self, nodes: Nodes, jobs: Sequence[Job], *, timeout_s: float = 120.0) -> None:
        self.jobs = tuple(jobs)
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(sorted({job.target.partition(":")[0] for job in jobs}))
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, ForkServerProcess] = {}
        try:
            self.start(range(len(self.jobs)))
        except BaseException:
            self.close()
            raise

    def start(self, numbers: Iterable[int]) -> None:
        """Start processes, which are new or have ended, and let each make its object."""
        numbers = list(numbers)
        for number in numbers:
            job = self.jobs[number]
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=main, args=(theirs, self._nodes.namespace(job.node)), daemon=True)
            process.start()
            theirs.close()
            self._pipes[number], self._processes[number] = mine, process
        for number in numbers:
            job = self.jobs[number]
            self.tell(number, job.target, job.node, self._nodes.address(job.node), *job.arguments)
        for number in numbers:
            self._value(number, self.answer(number, _START_S))

    def call(self, calls: Mapping[int, tuple[object, ...]]) -> list[Any]:
        """Call a method, ``(name, *arguments)``, on several processes at the same time; the answers in that order.

        Raises
        ------
        RuntimeError
            If one raised or did not answer in time.
        """
        for number, (method, *arguments) in calls.items():
            self.tell(number, str(method), *arguments)
        return [self._value(number, self.answer(number, self._timeout_s)) for number in calls]

    def each(self, numbers: Iterable[int], method: str, *arguments: object) -> list[Any]:
        """Call a method with the same arguments on several processes at the same time."""
        return self.call(dict.fromkeys(numbers, (method, *arguments)))

    def tell(self, number: int, method: str, *arguments: object) -> None:
        """Call a method and do not wait; nothing happens in a process that has died."""
        try:
            self._pipes[number].send((method, arguments))
        except OSError:
            return  # `answer` says so

    def answer(self, number: int, within_s: float) -> Answer:
        """What came of the oldest call that was not asked for yet."""
        pipe = self._pipes[number]
        try:
            if not pipe.poll(within_s):
                return Answer(error=f"{LATE} for {within_s:g} s")
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return Answer(error=DIED)
        return Answer(error=value) if kind == "error" else Answer(value)

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a process; one that kills has done so on return."""
        process = self._processes[number]
        assert process.pid is not None
        os.kill(process.pid, what)
        if what is signal.SIGKILL:
            process.join(_END_S)

    def close(self) -> None:
        """Let the processes end, and wait for them; those that do not are killed."""
        for pipe in self._pipes.values():
            pipe.close()
        stop_at = time.monotonic() + _END_S
        for process in self._processes.values():
            process.join(max(0.0, stop_at - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_END_S)
            process.close()
        self._processes.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _value(self, number: int, answer: Answer) -> Any:
        if answer.error:
            raise RuntimeError(f"process {number} on node {self.jobs[number].node}: {answer.error}")
        return answer.value
