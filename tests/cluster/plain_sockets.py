"""A floor: plain sockets carry a traffic matrix, all flows at once, with no dependencies and no copies.

Every flow has a connection and two threads, a sender that sends one buffer again and again and a receiver that
receives into one. Nothing is packed, awaited or checked.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

_CHUNK_BYTES = 1 << 20


class PlainSockets:
    """One node's flows.

    Parameters
    ----------
    node, address
        Where it is.
    """

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        self._server = socket.create_server((address, 0), backlog=64)
        self._out: dict[int, socket.socket] = {}
        self._in: dict[int, socket.socket] = {}

    def listen(self) -> tuple[str, int]:
        """Where others reach this node."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Open one connection to every other node, by node; all nodes must do it at the same time."""

        def accept() -> None:
            for _ in range(len(addresses) - 1):
                opened, _ = self._server.accept()
                self._in[int.from_bytes(opened.recv(1), "little")] = opened

        accepting = threading.Thread(target=accept)
        accepting.start()
        for node, address in enumerate(addresses):
            if node != self._node:
                opened = socket.create_connection(address, timeout=30)
                opened.settimeout(None)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opened.sendall(self._node.to_bytes(1, "little"))
                self._out[node] = opened
        accepting.join()

    def run(self, matrix: Sequence[Sequence[int]], start_at: float) -> tuple[float, float]:
        """Send this node's row and receive its column; when it began and when all was there, CLOCK_MONOTONIC."""
        chunk = memoryview(bytearray(_CHUNK_BYTES))

        def send(to: socket.socket, size: int) -> None:
            while size:
                to.sendall(chunk[: min(size, _CHUNK_BYTES)])
                size -= min(size, _CHUNK_BYTES)

        def receive(source: socket.socket, size: int) -> None:
            space = memoryview(bytearray(_CHUNK_BYTES))
            while size:
                size -= source.recv_into(space[: min(size, _CHUNK_BYTES)])

        jobs = [threading.Thread(target=send, args=(self._out[to], size)) for to, size in self._row(matrix[self._node])]
        column = [row[self._node] for row in matrix]
        jobs += [threading.Thread(target=receive, args=(self._in[source], size)) for source, size in self._row(column)]
        time.sleep(max(0.0, start_at - time.monotonic()))
        began = time.monotonic()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return began, time.monotonic()

    def _row(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        return [(node, size) for node, size in enumerate(sizes) if size and node != self._node]
