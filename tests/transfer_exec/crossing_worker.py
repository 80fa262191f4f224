"""One real process that runs one worker's program over shared memory; driven through a pipe."""

from __future__ import annotations

import mmap
import os
import signal
import weakref
from multiprocessing.connection import Connection

import numpy as np

from transfer_exec.executor import Executor
from transfer_exec.program import Program
from transfer_exec.transport.base import Endpoint
from transfer_exec.transport.shared_memory import SharedMemoryTransport


def in_memory_file(array: np.ndarray) -> np.ndarray:
    """A copy that other processes can map."""
    fd = os.memfd_create("weights")
    os.ftruncate(fd, array.nbytes)
    out = np.frombuffer(mmap.mmap(fd, array.nbytes), dtype=array.dtype).reshape(array.shape)
    weakref.finalize(out.base, os.close, fd)
    out[...] = array
    return out


def serve(pipe: Connection, worker: str, data: bytes, deadline_s: float) -> None:
    """Answer commands until the pipe closes: memory, connect, run, read, die. What peers map is in memory files."""
    program = Program.from_bytes(data)
    memory: dict[str, np.ndarray] = pipe.recv()
    memory |= {n: in_memory_file(memory[n]) for n in (program.tensors[position].name for position in program.mapped)}
    executor = Executor(program, memory, SharedMemoryTransport(worker), deadline_s=deadline_s)
    pipe.send(executor.endpoint.to_bytes())
    executor.connect({name: Endpoint.from_bytes(data) for name, data in pipe.recv().items()})
    pipe.send("connected")
    while True:
        match pipe.recv():
            case ("run", version):
                try:
                    pipe.send(executor.run(version))
                except Exception as error:  # noqa: BLE001  the parent asserts on whatever it was
                    pipe.send((type(error).__name__, str(error)))
            case ("set", values):
                for name, value in values.items():
                    memory[name][...] = value
                pipe.send("set")
            case "read":
                pipe.send(memory)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                executor.close()
                return
