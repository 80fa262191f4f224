"""The processes of `transload bench host`: one worker of a plan over shared memory, or one rank of torch's own ways."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from layout_algebra.dtypes import dtype_of
from layout_algebra.fingerprint import fingerprint
from layout_algebra.source_map import SourceMap
from tests.transfer_exec.crossing_worker import in_memory_file
from transfer_exec.executor import Executor
from transfer_exec.program import Program
from transfer_exec.transport.base import Endpoint
from transfer_exec.transport.shared_memory import SharedMemoryTransport

Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""Tensor -> its shape, and the axis that a rollout shards; None for what every rank has whole."""


def serve(pipe: Connection, program: bytes, source_map: bytes, threads: int) -> None:
    """Run one worker's program as often as asked; memory is faulted in before the first run."""
    from transfer_exec.kernels.cpu import CpuKernels

    mine, worker_map = Program.from_bytes(program), SourceMap.from_bytes(source_map)
    memory = random_memory(mine)
    executor = Executor(mine, memory, SharedMemoryTransport(mine.worker), kernels=CpuKernels(threads=threads))
    pipe.send(executor.endpoint.to_bytes())
    executor.connect({name: Endpoint.from_bytes(data) for name, data in pipe.recv().items()})
    pipe.send("connected")
    while (asked := pipe.recv()) is not None:
        pipe.send(fingerprint(worker_map, memory) if asked == "digest" else executor.run(asked))
    executor.close()


def random_memory(program: Program) -> dict[str, np.ndarray]:
    """A program's tensors; those that peers map are in memory files, as after ``Tensor.share_memory_``."""
    random = np.random.default_rng(len(program.worker))
    memory = {}
    for position, tensor in enumerate(program.tensors):
        storage = dtype_of(tensor.dtype).storage
        filled = random.integers(0, 1 << 15, tensor.shape, dtype=np.uint16).astype(storage, copy=False)
        memory[tensor.name] = in_memory_file(filled) if position in program.mapped else filled
    return memory


def serve_torch(pipe: Connection, rank: int, ranks: int, folder: str, shapes: Shapes) -> None:
    """Reshard from trainers' chunks of axis 0 to rollouts' layout with torch alone; the first half of ranks trains.

    ``"dcp"``: trainers save a distributed checkpoint to memory, rollouts load it. ``"dtensor"``: trainers redistribute
    among themselves to the rollouts' layout, then each sends what it has to the rollout of the same place.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    side = ranks // 2
    trains = rank < side
    mesh = [DeviceMesh("cpu", list(range(first, first + side))) for first in (0, side)][not trains]

    def sharded(shape: tuple[int, ...], axis: int | None) -> DTensor:
        local = list(shape)
        if axis is not None:
            local[axis] //= side
        placement = Replicate() if axis is None else Shard(axis)
        return DTensor.from_local(torch.ones(local, dtype=torch.bfloat16), mesh, [placement], run_check=False)

    axes = {name: axis for name, (_, axis) in shapes.items()}
    mine = {name: sharded(shape, 0 if trains else axis) for name, (shape, axis) in shapes.items()}
    group = mesh.get_group()

    def checkpoint() -> None:
        if trains:
            dcp.save(mine, checkpoint_id=Path(folder) / "checkpoint", process_group=group)
        dist.barrier()
        if not trains:
            dcp.load(mine, checkpoint_id=Path(folder) / "checkpoint", process_group=group)

    def redistribute() -> None:
        for name, tensor in mine.items():
            if trains:
                axis = axes[name]
                wanted = tensor.redistribute(placements=[Replicate() if axis is None else Shard(axis)])
                dist.send(wanted.to_local().contiguous(), rank + side)
            else:
                dist.recv(tensor.to_local(), rank - side)

    pipe.send("connected")
    while (asked := pipe.recv()) is not None:
        dist.barrier()
        begun = time.monotonic()
        checkpoint() if asked == "dcp" else redistribute()
        dist.barrier()
        pipe.send(time.monotonic() - begun)
    dist.destroy_process_group()
