"""A job of real processes on a cluster of namespaces: trainers and rollouts, a node each, links of 400 Mbit/s.

Four trainers hold a 200 MB model in rows, every rollout holds all of it, fused. Everything below goes over the same
links in one run, ours and the floor in turns; times are medians.

    ewtt over bound       our update, end to end, against the least time that the links allow
    ewtt over sockets     against plain sockets that send the same traffic matrix, with no dependencies and no copies
    vs gloo               against gather on trainer 0, broadcast, and the rollouts' own load, tensor by tensor
    vs single source      against plain sockets that send every rollout a whole copy from trainer 0, who has it already
    vs round robin        against plain sockets that send every rollout a part from every trainer
    growth 6              how EWTT over the bound grows from one replica to six
    kernel share          the largest worker's packing and assembling, against EWTT
    average stall         AGST against EWTT
    bytes ...             what a node's interface counted, headers and all, against the plan
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adapters.cli.benchmark import Row
from tests.adapters.crew import compile_kernels
from tests.cluster.fleet import Fleet, Job
from tests.cluster.model import Shapes, shapes, total_bytes
from tests.cluster.network import Cluster, NodeSpec, why_not
from transfer_exec.report import Measures, TransferReport
from transfer_exec.topology import Topology

LINK_BYTES_PER_S = 50e6
TRAINERS, ROLLOUTS, MOST_ROLLOUTS = 4, 4, 6
MODEL = {"layers": 7, "hidden": 1024, "wide": 2816, "words": 9844}
BUFFER_BYTES = 4_000_000
REPEATS, FEW = 5, 3
LEAD_S = 0.5
GLOO_PORT = 29_511


def rows() -> list[Row]:
    """The benchmark's rows.

    Raises
    ------
    RuntimeError
        Where no cluster can be made, or Mooncake is not installed.
    """
    tensors = shapes(**MODEL)
    with job_of_nodes("cluster", tensors, TRAINERS, MOST_ROLLOUTS) as (cluster, fleet):
        return _Run(cluster, fleet, total_bytes(tensors)).rows()


@contextmanager
def job_of_nodes(benchmark: str, tensors: Shapes, trainers: int, rollouts: int) -> Iterator[tuple[Cluster, Fleet]]:
    """Trainers, then engines of one rank named by number, a node each on links of the benchmarks' rate, with digests.

    Raises
    ------
    RuntimeError
        Where no cluster can be made, or Mooncake is not installed.
    """
    reason = why_not()
    if reason:
        raise RuntimeError(f"benchmark {benchmark}: cannot run here: {reason}")
    importlib.import_module("mooncake.engine")
    compile_kernels()
    with tempfile.TemporaryDirectory() as folder:
        shared = (folder, "mooncake")
        jobs = [
            Job(rank, "tests.cluster.workers:TrainerNode", (tensors, trainers, *shared, "digest"))
            for rank in range(trainers)
        ]
        jobs += [
            Job(trainers + rank, "tests.cluster.workers:RolloutNode", (tensors, str(rank), *shared))
            for rank in range(rollouts)
        ]
        nodes = [NodeSpec(LINK_BYTES_PER_S, LINK_BYTES_PER_S)] * len(jobs)
        with Cluster(nodes) as cluster, Fleet(cluster, jobs) as fleet:
            yield cluster, fleet
            fleet.each(range(len(jobs)), "leave")


class _Run:
    """One run of the benchmark.

    Parameters
    ----------
    cluster, fleet
        Trainers first.
    size
        Bytes of the model.
    """

    def __init__(self, cluster: Cluster, fleet: Fleet, size: int) -> None:
        self._cluster, self._fleet, self._size = cluster, fleet, size
        self._nodes = range(TRAINERS + ROLLOUTS)
        self._version = 0

    def rows(self) -> list[Row]:
        """Measure everything."""
        everybody = range(len(self._fleet.jobs))
        self._fleet.each(everybody, "sockets.connect", self._fleet.each(everybody, "sockets.listen"))
        bound_of_1, alone = self._connect(["0"], 1), [self._send(1) for _ in range(FEW)]
        bound = self._connect([str(rank) for rank in range(1, ROLLOUTS)], ROLLOUTS)
        self._send(ROLLOUTS)
        ours, floor = [], []
        for _ in range(REPEATS):
            floor.append(self._sockets(self._same_matrix()))
            counted = [self._cluster.counters(node) for node in self._nodes]
            ours.append(self._send(ROLLOUTS))
        after = [self._cluster.counters(node) for node in self._nodes]
        gloo = self._gloo()
        single = self._sockets(self._matrix({0: self._size}))
        part = self._size // TRAINERS
        robin = statistics.median(self._sockets(self._matrix(dict.fromkeys(range(TRAINERS), part))) for _ in range(FEW))
        bound_of_6 = self._connect([str(rank) for rank in range(ROLLOUTS, MOST_ROLLOUTS)], MOST_ROLLOUTS)
        many = [self._send(MOST_ROLLOUTS) for _ in range(FEW)]

        typical = sorted(ours, key=_ewtt)[len(ours) // 2]
        ewtt, agst = _ewtt(typical), statistics.median(_measures(report).agst_s for report in ours)
        sockets = statistics.median(floor)
        kernels = max(each.phases.pack_s + each.phases.assemble_s for each in typical.workers.values())
        growth = [
            statistics.median(map(_ewtt, reports)) / least
            for reports, least in ((alone, bound_of_1), (many, bound_of_6))
        ]
        out = [
            Row.against_floor("ewtt over bound", value=ewtt, unit="s", floor=bound, bar=1.35),
            Row.against_floor("ewtt over sockets", value=ewtt, unit="s", floor=sockets, bar=1.1),
            Row.against_floor("sockets over bound", value=sockets, unit="s", floor=bound),
            Row.against_floor("vs gloo", value=ewtt, unit="s", floor=gloo, bar=1 / 2.5),
            Row.against_floor("vs single source", value=ewtt, unit="s", floor=single, bar=1 / 2.5),
            Row.against_floor("vs round robin", value=ewtt, unit="s", floor=robin),
            Row.against_floor("growth 6", value=growth[1], unit="bounds", floor=growth[0], bar=1.15),
            Row.against_floor("kernel share", value=kernels, unit="s", floor=ewtt, bar=0.03),
            Row.against_floor("average stall", value=agst, unit="s", floor=ewtt, bar=1.0),
        ]
        for node in self._nodes:
            name = f"trainer/{node}" if node < TRAINERS else f"engine/{node - TRAINERS}/0"
            ways = (
                ("out of", after[node].sent_bytes - counted[node].sent_bytes, ours[-1].bytes_sent(name)),
                ("into", after[node].received_bytes - counted[node].received_bytes, ours[-1].bytes_received(name)),
            )
            out += [
                Row.against_floor(f"bytes {way} {name}", value=float(passed), unit="bytes", floor=float(planned))
                for way, passed, planned in ways
                if planned
            ]
        return out

    def _connect(self, engines: list[str], rollouts: int) -> float:
        """Connect more engines; the bound of the plan for so many."""
        topology = Topology.uniform(
            trainers=TRAINERS,
            engines=rollouts,
            engine_size=1,
            workers_per_node=1,
            nic_bytes_per_s=LINK_BYTES_PER_S,
            local_bytes_per_s=1e10,
        )
        transport, _, bound = self._fleet.each(range(TRAINERS), "connect", engines, topology, BUFFER_BYTES)[0]
        assert transport == "mooncake"
        return float(bound)

    def _send(self, rollouts: int) -> TransferReport:
        """One update, checked bit by bit."""
        self._version += 1
        self._fleet.each(range(TRAINERS), "fill", self._version)
        report = self._fleet.each(range(TRAINERS), "send", self._version, time.monotonic() + LEAD_S)[0]
        if not all(self._fleet.each(range(TRAINERS, TRAINERS + rollouts), "holds", self._version)):
            raise RuntimeError(f"benchmark cluster: version {self._version} did not arrive bit by bit")
        assert isinstance(report, TransferReport)
        return report

    def _sockets(self, matrix: list[list[int]]) -> float:
        return _span(self._fleet.each(range(len(matrix)), "sockets.run", matrix, time.monotonic() + LEAD_S))

    def _gloo(self) -> float:
        self._fleet.each(self._nodes, "gloo.join", self._cluster.address(0), GLOO_PORT, TRAINERS, TRAINERS + ROLLOUTS)
        times = [_span(self._fleet.each(self._nodes, "gloo.update", time.monotonic() + LEAD_S)) for _ in range(FEW)]
        rollouts = range(TRAINERS, TRAINERS + ROLLOUTS)
        if not all(self._fleet.each(rollouts, "model.holds", self._version)):
            raise RuntimeError("benchmark cluster: gloo's update did not arrive bit by bit")
        self._fleet.each(self._nodes, "gloo.part")
        return statistics.median(times)

    def _matrix(self, sent_by: dict[int, int]) -> list[list[int]]:
        """Every rollout gets so many bytes from each of these trainers."""
        matrix = [[0] * len(self._nodes) for _ in self._nodes]
        for source, size in sent_by.items():
            matrix[source][TRAINERS:] = [size] * ROLLOUTS
        return matrix

    def _same_matrix(self) -> list[list[int]]:
        """What our plan sends: trainers one copy together, every rollout its part to every other."""
        matrix = self._matrix(dict.fromkeys(range(TRAINERS), self._size // (TRAINERS * ROLLOUTS)))
        for source in range(TRAINERS, TRAINERS + ROLLOUTS):
            for target in range(TRAINERS, TRAINERS + ROLLOUTS):
                if target != source:
                    matrix[source][target] = self._size // ROLLOUTS
        return matrix


def _span(times: Sequence[tuple[float, float]]) -> float:
    """From the first start to the last end."""
    return max(stop for _, stop in times) - min(start for start, _ in times)


def _measures(report: TransferReport) -> Measures:
    assert report.measures is not None
    return report.measures


def _ewtt(report: TransferReport) -> float:
    return _measures(report).ewtt_s
