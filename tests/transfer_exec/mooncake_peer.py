"""A process with one mooncake transport that peers write to; it answers a few questions over a pipe."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np

from transfer_exec.transport.mooncake import MooncakeTransport


def serve(pipe: Connection, worker: str, size_bytes: int) -> None:
    """Send the endpoint, then answer ``("read", None)`` and ``("flag", channel)`` until the pipe closes."""
    transport = MooncakeTransport(worker, "127.0.0.1")
    memory = transport.allocate(size_bytes)
    transport.register("RECEIVE", memory)
    transport.open_flags(2)
    pipe.send(transport.endpoint("plan").to_bytes())
    while True:
        try:
            what, channel = pipe.recv()
        except EOFError:
            transport.close()
            return
        pipe.send(np.array(memory) if what == "read" else transport.flag(channel))
