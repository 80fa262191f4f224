"""One process on every node of a cluster, told what to do all at once.

with Cluster(nodes) as cluster, Fleet(cluster, "tests.cluster.plain_sockets:PlainSockets") as fleet:
    ports = fleet.each("listen")
    fleet.each("connect", [(ports,)] * len(nodes))
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.cluster.network import Cluster

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 300.0


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


class Fleet:
    """Processes on nodes; each makes one object.

    Parameters
    ----------
    cluster
        Where.
    jobs
        One a process; processes are numbered in this order.
    timeout_s
        Of every answer.
    """

    def __init__(self, cluster: Cluster, jobs: Sequence[Job], *, timeout_s: float = 120.0) -> None:
        self.jobs = tuple(jobs)
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="transload-fleet-"))
        self._pipes: dict[int, Connection] = {}
        address = str(self._folder / "parent")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            with Listener(address, family="AF_UNIX", backlog=len(self.jobs)) as listener:
                for number, job in enumerate(self.jobs):
                    command = [sys.executable, "-m", "tests.cluster.node_process", address, str(number)]
                    self._processes.append(cluster.spawn(job.node, command, cwd=_ROOT))
                # The listener has no timeout of its own.
                listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
                for _ in self.jobs:
                    pipe = listener.accept()
                    self._pipes[pipe.recv()] = pipe
            self.call(
                {
                    number: (job.target, job.node, cluster.address(job.node), *job.arguments)
                    for number, job in enumerate(self.jobs)
                }
            )
        except BaseException:
            self.close()
            raise

    def call(self, calls: Mapping[int, tuple[object, ...]]) -> list[Any]:
        """Call a method, ``(name, *arguments)``, on several processes at the same time; the answers in that order.

        Raises
        ------
        RuntimeError
            If one raised or did not answer in time.
        """
        for number, (method, *arguments) in calls.items():
            self._pipes[number].send((method, tuple(arguments)))
        return [self._answer(number) for number in calls]

    def each(self, numbers: Iterable[int], method: str, *arguments: object) -> list[Any]:
        """Call a method with the same arguments on several processes at the same time."""
        return self.call(dict.fromkeys(numbers, (method, *arguments)))

    def close(self) -> None:
        """Let the processes end, and wait for them."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            try:
                process.wait(10 if self._pipes else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, number: int) -> Any:
        pipe, who = self._pipes[number], f"process {number} on node {self.jobs[number].node}"
        if not pipe.poll(self._timeout_s):
            raise RuntimeError(f"{who} said nothing for {self._timeout_s:g} s")
        try:
            outcome, value = pipe.recv()
        except EOFError:
            raise RuntimeError(f"{who} died") from None
        if outcome == "error":
            raise RuntimeError(f"{who}:\n{value}")
        return value
