"""A job of real processes on a cluster of namespaces, and the cluster itself: its speeds, its counters, its end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.adapters.crew import compile_kernels
from tests.cluster.fleet import Fleet, Job
from tests.cluster.model import shapes, total_bytes
from tests.cluster.network import Cluster, NodeSpec, has_netem, remove_leftovers, why_not
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology

REASON = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(REASON), reason=f"no cluster can be made here: {REASON}"),
]

ROOT = Path(__file__).resolve().parents[2]
FAST = 12.5e6
SLOW = 2.5e6
KILO = 1000


def namespaces(pid: int) -> set[str]:
    """Of a process' clusters."""
    return {path.name for path in Path("/run/netns").glob(f"transload-{pid}-*")}


def send_all(fleet: Fleet, matrix: list[list[int]]) -> float:
    """Run plain sockets; seconds from the first start to the last end."""
    times = fleet.each(range(len(matrix)), "run", matrix, time.monotonic() + 0.2)
    return max(stop for _, stop in times) - min(start for start, _ in times)


def test_links_are_as_slow_as_they_are_told_and_bytes_are_counted() -> None:
    """Generous limits: only that a limit is there, in both directions, and of the right size."""
    nodes = [NodeSpec(FAST, FAST), NodeSpec(SLOW, FAST), NodeSpec(FAST, SLOW)]
    jobs = [Job(node, "tests.cluster.plain_sockets:PlainSockets") for node in range(3)]
    with Cluster(nodes) as cluster, Fleet(cluster, jobs) as fleet:
        assert len(namespaces(os.getpid())) == 4
        addresses = fleet.each(range(3), "listen")
        fleet.each(range(3), "connect", addresses)
        size = 2_500 * KILO
        for source, target, speed in ((0, 1, FAST), (1, 0, SLOW), (0, 2, SLOW)):
            matrix = [[0] * 3 for _ in range(3)]
            matrix[source][target] = size
            counted = [cluster.counters(node) for node in range(3)]
            took = send_all(fleet, matrix)
            # The bucket's burst and what waits in its queue are free.
            assert took > 0.7 * size / speed, (source, target)
            after = [cluster.counters(node) for node in range(3)]
            assert size <= after[source].sent_bytes - counted[source].sent_bytes < 1.1 * size
            assert size <= after[target].received_bytes - counted[target].received_bytes < 1.1 * size
    assert not namespaces(os.getpid())


def test_nothing_is_left_behind_by_an_error_a_signal_or_a_kill() -> None:
    sleepers: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with Cluster([NodeSpec(FAST, FAST)]) as cluster:
            sleepers.append(cluster.spawn(0, ["sleep", "1000"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sleepers[0].returncode is not None
    assert not namespaces(os.getpid())
    script = (
        "import time\n"
        "from tests.cluster.network import Cluster, NodeSpec\n"
        "with Cluster([NodeSpec(1e6, 1e6)]):\n"
        "    print('made', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    for number, stays in ((signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, True)):
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        os.kill(process.pid, number)
        process.wait(30)
        process.stdout.close()
        assert bool(namespaces(process.pid)) == stays
    remove_leftovers()
    assert not namespaces(process.pid)


@pytest.mark.skipif(not REASON and not has_netem(), reason="this kernel has no netem, so links have no latency or loss")
def test_latency_is_added() -> None:
    with Cluster([NodeSpec(FAST, FAST, delay_s=0.05), NodeSpec(FAST, FAST)]) as cluster:
        ping = cluster.spawn(1, ["ping", "-c", "1", cluster.address(0)], stdout=subprocess.PIPE)
        said, _ = ping.communicate(timeout=30)
        assert float(said.decode().partition("time=")[2].split()[0]) >= 50


def test_a_job_moves_every_bit_over_mooncake_and_no_byte_more_than_planned(tmp_path: Path) -> None:
    """Two trainer nodes, two rollout nodes with a whole replica each; real adapters, TCP between namespaces."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        pytest.skip(f"mooncake is not installed: {error}")
    compile_kernels()
    tensors = shapes(layers=2, hidden=384, wide=1024, words=2000)
    size = total_bytes(tensors)
    topology = Topology.uniform(
        trainers=2, engines=2, engine_size=1, workers_per_node=1, nic_bytes_per_s=FAST, local_bytes_per_s=1e10
    )
    shared = (str(tmp_path), "mooncake")
    jobs = [Job(rank, "tests.cluster.workers:TrainerNode", (tensors, 2, *shared, "digest")) for rank in range(2)]
    jobs += [
        Job(2 + engine, "tests.cluster.workers:RolloutNode", (tensors, str(engine), *shared)) for engine in range(2)
    ]
    trainers, rollouts = range(2), range(2, 4)
    with Cluster([NodeSpec(FAST, FAST)] * 4) as cluster, Fleet(cluster, jobs, timeout_s=250) as fleet:
        connected = fleet.each(trainers, "connect", ["0", "1"], topology, size // 8)
        assert {transport for transport, _, _ in connected} == {"mooncake"}
        for version in (1, 2):
            fleet.each(trainers, "fill", version)
            counted = [cluster.counters(node) for node in range(4)]
            report = fleet.each(trainers, "send", version, time.monotonic() + 0.2)[0]
            assert fleet.each(rollouts, "holds", version) == [True, True]
            after = [cluster.counters(node) for node in range(4)]
            assert isinstance(report, TransferReport)
            assert report.transport == "mooncake"
            for node, worker in enumerate(("trainer/0", "trainer/1", "engine/0/0", "engine/1/0")):
                sent = after[node].sent_bytes - counted[node].sent_bytes
                received = after[node].received_bytes - counted[node].received_bytes
                # Headers, acknowledgements, flags and the control plane.
                slack = 0.05 * size + 200 * KILO
                assert report.bytes_sent(worker) <= sent <= report.bytes_sent(worker) + slack, worker
                assert report.bytes_received(worker) <= received <= report.bytes_received(worker) + slack, worker
            assert sum(report.bytes_sent(f"trainer/{rank}") for rank in range(2)) == size
            assert [report.bytes_received(f"engine/{engine}/0") for engine in range(2)] == [size, size]
        fleet.each(range(4), "leave")
