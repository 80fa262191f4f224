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
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType

from tests.cluster.network import Cluster

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0


class Fleet:
    """Processes on nodes; each makes one object.

    Parameters
    ----------
    cluster
        Where.
    target
        ``"module:Class"``; it is made with the node's number, its address, and ``arguments``.
    nodes
        Which nodes, by default all, one process each; a number may come several times.
    arguments
        For each process.
    timeout_s
        Of every answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        target: str,
        *,
        nodes: Sequence[int] | None = None,
        arguments: Iterable[tuple[object, ...]] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.nodes = tuple(range(len(cluster.nodes))) if nodes is None else tuple(nodes)
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="transload-fleet-"))
        self._pipes: dict[int, Connection] = {}
        address = str(self._folder / "parent")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            with Listener(address, family="AF_UNIX", backlog=len(self.nodes)) as listener:
                for number, node in enumerate(self.nodes):
                    command = [sys.executable, "-m", "tests.cluster.node_process", address, str(number)]
                    self._processes.append(cluster.spawn(node, command, cwd=_ROOT))
                # The listener has no timeout of its own.
                listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
                for _ in self.nodes:
                    pipe = listener.accept()
                    self._pipes[pipe.recv()] = pipe
            given = [()] * len(self.nodes) if arguments is None else list(arguments)
            self._send_all([(target, (node, cluster.address(node), *given[k])) for k, node in enumerate(self.nodes)])
            self._gather()
        except BaseException:
            self.close()
            raise

    def each(self, method: str, arguments: Sequence[tuple[object, ...]] | None = None) -> list[object]:
        """Call a method on every process at the same time; the answers in order.

        Raises
        ------
        RuntimeError
            If one raised or did not answer in time.
        """
        given = [()] * len(self.nodes) if arguments is None else arguments
        self._send_all([(method, one) for one in given])
        return self._gather()

    def one(self, number: int, method: str, *arguments: object) -> object:
        """Call a method on one process."""
        self._pipes[number].send((method, arguments))
        return self._answer(number)

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

    def _send_all(self, messages: Sequence[tuple[str, tuple[object, ...]]]) -> None:
        for number, message in enumerate(messages):
            self._pipes[number].send(message)

    def _gather(self) -> list[object]:
        return [self._answer(number) for number in range(len(self.nodes))]

    def _answer(self, number: int) -> object:
        pipe = self._pipes[number]
        if not pipe.poll(self._timeout_s):
            raise RuntimeError(f"process {number} on node {self.nodes[number]} said nothing for {self._timeout_s:g} s")
        try:
            outcome, value = pipe.recv()
        except EOFError:
            raise RuntimeError(f"process {number} on node {self.nodes[number]} died") from None
        if outcome == "error":
            raise RuntimeError(f"process {number} on node {self.nodes[number]}:\n{value}")
        return value
