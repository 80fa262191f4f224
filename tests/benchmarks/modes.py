"""The four synchronization modes over a fast link, shared memory of one host, and a slow one of 400 Mbit/s.

Two trainers hold a model in rows; every rollout holds all of it, fused. On the host they are the two ranks of one
engine, over the slow link an engine each, on a node of its own (`tests.cluster`). Every trainer overwrites its weights
as soon as `send_weights` returns, and every version is compared bit by bit where it lands. Modes are named by who
stages:

    sync, sender, receiver, both

Rows are medians. Where a side stages, its stall is measured against a plain copy of the same bytes by the same
processes at the same time, taken in turns with the updates; the bar is 1.3. Other rows have those of ``sync`` as their
floor, and those of ``sync`` the least time that the link allows, or on the host a plain copy of what a rollout holds.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from adapters.cli.benchmark import Row
from tests.adapters.crew import compile_kernels
from tests.cluster.fleet import Fleet, Job
from tests.cluster.model import shapes
from tests.cluster.network import Cluster, NodeSpec, why_not
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology

MODES = {"sync": (False, False), "sender": (True, False), "receiver": (False, True), "both": (True, True)}
LINK_BYTES_PER_S = 50e6
TRAINERS, ROLLOUTS = 2, 2
HOST_MODEL = {"layers": 14, "hidden": 1024, "wide": 2816, "words": 9844}
SLOW_MODEL = {"layers": 7, "hidden": 1024, "wide": 2816, "words": 9844}
HOST_BUFFER_BYTES, SLOW_BUFFER_BYTES = 64 << 20, 4_000_000
REPEATS = 7
LEAD_S = 0.3
BAR = 1.3

_TRAINERS = range(TRAINERS)
_ROLLOUTS = range(TRAINERS, TRAINERS + ROLLOUTS)
_MEASURES = {
    "AGST": "s",
    "EWTT": "s",
    "trainer stall": "s",
    "rollout stall": "s",
    "publication": "s",
    "host memory": "bytes",
}


def cases() -> dict[str, Callable[[], list[Row]]]:
    """Each link by itself."""
    return {"host": host_rows, "slow": slow_rows}


def rows() -> list[Row]:
    """Both links."""
    return [*host_rows(), *slow_rows()]


def host_rows() -> list[Row]:
    """Everybody on one host, over shared memory."""
    tensors = shapes(**HOST_MODEL)
    jobs = [Job(0, "tests.benchmarks._modes_worker:ModeTrainer", (tensors, rank, TRAINERS)) for rank in _TRAINERS]
    jobs += [
        Job(0, "tests.benchmarks._modes_worker:ModeRollout", (tensors, "0", rank, ROLLOUTS)) for rank in range(ROLLOUTS)
    ]
    return _run("host", [NodeSpec(1e9, 1e9)], jobs, ["0"], "shared_memory", None, HOST_BUFFER_BYTES)


def slow_rows() -> list[Row]:
    """Everybody on a node of its own."""
    importlib.import_module("mooncake.engine")
    tensors = shapes(**SLOW_MODEL)
    jobs = [Job(rank, "tests.benchmarks._modes_worker:ModeTrainer", (tensors, rank, TRAINERS)) for rank in _TRAINERS]
    jobs += [
        Job(TRAINERS + rank, "tests.benchmarks._modes_worker:ModeRollout", (tensors, str(rank), 0, 1))
        for rank in range(ROLLOUTS)
    ]
    topology = Topology.uniform(
        trainers=TRAINERS,
        engines=ROLLOUTS,
        engine_size=1,
        workers_per_node=1,
        nic_bytes_per_s=LINK_BYTES_PER_S,
        local_bytes_per_s=1e10,
    )
    nodes = [NodeSpec(LINK_BYTES_PER_S, LINK_BYTES_PER_S)] * len(jobs)
    engines = [str(rank) for rank in range(ROLLOUTS)]
    return _run("slow", nodes, jobs, engines, "mooncake", topology, SLOW_BUFFER_BYTES)


def _run(
    link: str,
    nodes: Sequence[NodeSpec],
    jobs: Sequence[Job],
    engines: list[str],
    transport: str,
    topology: Topology | None,
    buffer_bytes: int,
) -> list[Row]:
    """All modes in turn, in the same processes.

    Raises
    ------
    RuntimeError
        Where no cluster can be made, or a version does not arrive bit by bit.
    """
    reason = why_not()
    if reason:
        raise RuntimeError(f"benchmark modes: cannot run here: {reason}")
    compile_kernels()
    out: list[Row] = []
    with Cluster(nodes) as cluster, Fleet(cluster, jobs) as fleet:
        floors: dict[str, float] = {}
        for mode, (sender, receiver) in MODES.items():
            with tempfile.TemporaryDirectory() as folder:
                fleet.each(_TRAINERS, "join", folder, transport, sender)
                fleet.each(_ROLLOUTS, "join", folder, transport, receiver)
                bound = fleet.each(_TRAINERS, "connect", engines, topology, buffer_bytes)[0]
                measured = [_update(fleet, version) for version in range(1, REPEATS + 2)][1:]
                fleet.each(range(len(jobs)), "leave")
            values = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
            if not floors:
                least = values["rollout copy"] if topology is None else bound
                floors = {**dict.fromkeys(_MEASURES, least), "host memory": values["host memory"]}
            out += [
                Row.against_floor(f"{link} {mode} {name}", value=values[name], unit=unit, floor=floors[name])
                for name, unit in _MEASURES.items()
            ]
            for stages, side in ((sender, "trainer"), (receiver, "rollout")):
                if stages:
                    stall, copy = f"{side} stall", values[f"{side} copy"]
                    name = f"{link} {mode} {stall} over a copy"
                    out.append(Row.against_floor(name, value=values[stall], unit="s", floor=copy, bar=BAR))
            if mode == "sync":
                floors = values
    return out


def _update(fleet: Fleet, version: int) -> dict[str, float]:
    """One update, checked bit by bit, and a plain copy on either side."""
    fleet.each(_TRAINERS, "fill", version)
    report = fleet.each(_TRAINERS, "send", version, time.monotonic() + LEAD_S)[0]
    if not all(fleet.each(_ROLLOUTS, "holds", version)):
        raise RuntimeError(f"benchmark modes: version {version} did not arrive bit by bit")
    copies = {
        f"{side} copy": max(fleet.each(numbers, "copy", time.monotonic() + LEAD_S))
        for side, numbers in (("trainer", _TRAINERS), ("rollout", _ROLLOUTS))
    }
    return _values(report) | copies


def _values(report: TransferReport) -> dict[str, float]:
    measures = report.measures
    assert measures is not None
    stalls = measures.stall_s
    return {
        "AGST": measures.agst_s,
        "EWTT": measures.ewtt_s,
        "trainer stall": max(stall for worker, stall in stalls.items() if worker.startswith("trainer/")),
        "rollout stall": measures.rollout_pause_s,
        "publication": measures.publication_s,
        "host memory": float(sum(one.host_bytes + one.staging_bytes for one in report.workers.values())),
    }
