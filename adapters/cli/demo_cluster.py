"""The demo's cluster: four trainers, two engines of two ranks, and the machines they are made to believe in.

All processes run on one machine. The topology tells the planner of four, two workers each, so that bytes travel as
between machines: from a trainer to one engine, and from that engine to the other.
"""

from __future__ import annotations

from pathlib import Path

from adapters.cli.demo_messages import WorkerSetup
from transfer_exec.topology import Topology

__all__ = ["BUFFER_BYTES", "COMPILER", "ENGINES", "demo_topology", "worker_setups"]

ENGINES = ("0", "1")
COMPILER = "compiler"
"""A process that compiles the kernels and takes no part in the transfer."""

BUFFER_BYTES = 1 << 20
"""Of the plan, per worker and round; small, so that an update takes several rounds."""

_TRAINERS = 4
_ENGINE_SIZE = 2
_WORKERS_PER_NODE = 2
_NIC_BYTES_PER_S = 12.5e9
_LOCAL_BYTES_PER_S = 100e9


def demo_topology() -> Topology:
    """Two trainer nodes and a node for each engine, 100 Gbit/s a worker."""
    return Topology.uniform(
        trainers=_TRAINERS,
        engines=len(ENGINES),
        engine_size=_ENGINE_SIZE,
        workers_per_node=_WORKERS_PER_NODE,
        nic_bytes_per_s=_NIC_BYTES_PER_S,
        local_bytes_per_s=_LOCAL_BYTES_PER_S,
    )


def worker_setups(folder: Path, layers: int, *, deadline_s: float) -> dict[str, WorkerSetup]:
    """Every process's setup by name: the compiler, trainers, rollouts."""
    places = [(COMPILER, 0, 1)]
    places += [(f"trainer/{rank}", rank, _TRAINERS) for rank in range(_TRAINERS)]
    places += [(f"engine/{engine}/{rank}", rank, _ENGINE_SIZE) for engine in ENGINES for rank in range(_ENGINE_SIZE)]
    return {
        worker: WorkerSetup(
            worker=worker, rank=rank, group_size=size, folder=str(folder), layers=layers, deadline_s=deadline_s
        )
        for worker, rank, size in places
    }
