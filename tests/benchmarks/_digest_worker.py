"""A process of `transload bench digest`: one worker of a plan over shared memory, with digests or without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from adapters.duty_messages import Cell
from adapters.verification import plan_proof
from layout_algebra.source_map import SourceMap
from tests.benchmarks._host_worker import random_memory
from transfer_exec.executor import Executor
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.program import Program
from transfer_exec.transport.base import Endpoint
from transfer_exec.transport.shared_memory import SharedMemoryTransport

Ran = tuple[float, float, dict[int, int]]
"""When a worker began and ended, and its digests."""


def serve(
    pipe: Connection,
    program: bytes,
    source_map: bytes,
    cells: Sequence[tuple[int, bytes]],
    threads: int,
    receives: bool,
) -> None:
    """Run a version whenever one is asked for: trainers digest before, rollouts what has landed, as the adapters do."""
    mine, worker_map = Program.from_bytes(program), SourceMap.from_bytes(source_map)
    memory = random_memory(mine)
    proof = plan_proof(worker_map, [Cell(*cell) for cell in cells], threads=threads)
    strips, rest = proof.divide(mine)
    transport, kernels = SharedMemoryTransport(mine.worker), CpuKernels(threads=threads)
    executor = Executor(mine, memory, transport, kernels=kernels, strips=strips)
    pipe.send(executor.endpoint.to_bytes())
    executor.connect({name: Endpoint.from_bytes(data) for name, data in pipe.recv().items()})
    pipe.send("connected")
    while (version := pipe.recv()) is not None:
        begun = time.monotonic()
        sums = proof.digests(memory) if cells and not receives else {}
        landed = proof.zeros() if cells and receives else None
        executor.run(version, sums=landed)
        sums = sums if landed is None else rest.digests(memory, landed=landed)
        pipe.send((begun, time.monotonic(), sums))
    executor.close()
