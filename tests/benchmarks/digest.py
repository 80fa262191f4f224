"""What proving an update costs, with `verify="digest"`.

    host       a dense model between processes over shared memory, straight out of the trainers' parameters, in memory
               of their own and in shared memory: with digests against the same without
    staged     the same in rounds through buffers
    cluster    four trainers to four rollouts on links of 400 Mbit/s, with adapters: end to end against that without the
               trainers' and the rollouts' longest digest
    loop       digests of the trainers' parameters by all cores, against a plain read of the same bytes

Trainers digest what they hold before the first byte leaves, rollouts what has landed; the digests must agree, class by
class, or there is no row. One byte of a model is moved by one copy or by three, read once more by its trainer, and by
its rollout if it came in rounds; what is copied directly is digested as it lands.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from adapters.cli.benchmark import Row, interleaved_medians
from adapters.verification import cells_of, check_digests, check_holders
from layout_algebra._jit import kernel
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.fingerprint import plan_fingerprints
from layout_algebra.source_map import SourceMap
from tests.benchmarks._digest_worker import Ran, serve
from tests.benchmarks.cluster import LINK_BYTES_PER_S, MODEL, job_of_nodes
from tests.benchmarks.host import answers, ask, crossing, processes
from tests.cluster.fleet import Fleet
from tests.cluster.model import shapes, total_bytes
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near
from transfer_exec.plan import Plan
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology

LAYERS = 8
NODES = 4
REPEATS = 7
UPDATES = 4


def cases() -> dict[str, Callable[[], list[Row]]]:
    """The benchmark's cases."""
    return {"host": host, "staged": staged, "cluster": cluster, "loop": loop}


def rows() -> list[Row]:
    """All rows."""
    return [row for case in cases().values() for row in case()]


def host() -> list[Row]:
    """Updates of processes on this host that copy directly: parameters in private and in shared memory."""
    _, plan, maps = crossing(LAYERS)
    shared = {worker: maps[worker].parameters for worker in plan.holders}
    return [in_turns("host", Near(maps, {})), in_turns("host, shared", Near(maps, {}, shared=shared))]


def staged() -> list[Row]:
    """The same in rounds."""
    return [in_turns("staged", None)]


def in_turns(name: str, near: Near | None) -> Row:
    """Updates with digests and updates without, of two jobs of their own, in turns."""
    space, plan, maps = crossing(LAYERS)
    classes = classes_of(plan, maps)
    with workers(plan, maps, classes, near) as proven, workers(plan, maps, None, near) as plain:
        value, floor = interleaved_medians(proven, plain, repeats=REPEATS)
    title = f"{name}, {space.total_elements * 2 / 1e9:.1f} GB"
    return Row.against_floor(title, value=value, unit="s", floor=floor, bar=1.6)


def loop() -> list[Row]:
    """Digests alone."""
    space, plan, maps = crossing(LAYERS)
    trainers = [maps[name] for name in plan.holders]
    memories = [memory_of(each, number) for number, each in enumerate(trainers)]
    classes = [group.runs for group in classes_of(plan, maps).classes]
    plans = [plan_fingerprints(each, classes) for each in trainers]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    shares = [(share, memory) for one, memory in zip(plans, memories, strict=True) for share in one.shares(8)]
    words = [array.reshape(-1).view(np.uint64) for memory in memories for array in memory.values()]

    def digest() -> None:
        list(pool.map(lambda share: share[0].sums(share[1]), shares))

    value, floor = interleaved_medians(digest, lambda: list(pool.map(read, words)), repeats=REPEATS)
    return [Row.against_floor(f"loop, {space.total_elements * 2 / 1e9:.1f} GB", value=value, unit="s", floor=floor)]


def cluster() -> list[Row]:
    """Updates of real adapters on the one-machine cluster; what digests add is in their reports.

    Raises
    ------
    RuntimeError
        Where no cluster can be made, or bits did not arrive.
    """
    tensors = shapes(**MODEL)
    with job_of_nodes("digest", tensors, NODES, NODES) as (_, fleet):
        reports = updates(fleet)
    ewtt = [one.measures.ewtt_s for one in reports if one.measures is not None]
    without = [one.measures.ewtt_s - one.verify_at_most_s for one in reports if one.measures is not None]
    return [
        Row.against_floor(
            f"cluster, {total_bytes(tensors) / 1e9:.1f} GB",
            value=statistics.median(ewtt),
            unit="s",
            floor=statistics.median(without),
            bar=1.02,
        )
    ]


def updates(fleet: Fleet) -> list[TransferReport]:
    """Reports of several updates, the first left out."""
    topology = Topology.uniform(
        trainers=NODES,
        engines=NODES,
        engine_size=1,
        workers_per_node=1,
        nic_bytes_per_s=LINK_BYTES_PER_S,
        local_bytes_per_s=1e10,
    )
    trainers, rollouts = range(NODES), range(NODES, 2 * NODES)
    fleet.each(trainers, "connect", [str(rank) for rank in range(NODES)], topology, 4_000_000)
    out = []
    for version in range(1, UPDATES + 1):
        fleet.each(trainers, "fill", version)
        report = fleet.each(trainers, "send", version, time.monotonic() + 0.5)[0]
        assert isinstance(report, TransferReport)
        if not all(fleet.each(rollouts, "holds", version)):
            raise RuntimeError(f"benchmark digest: version {version} did not arrive bit by bit")
        out.append(report)
    return out[1:]


@kernel
def read(words: npt.NDArray[np.uint64]) -> np.uint64:
    """Look at every word."""
    total = np.uint64(0)
    for number in range(len(words)):
        total ^= words[number]
    return total


def memory_of(source_map: SourceMap, seed: int) -> dict[str, npt.NDArray[np.uint16]]:
    """Random parameters of two bytes an element."""
    random = np.random.default_rng(seed)
    return {n: random.integers(0, 1 << 15, source_map.shape(n), dtype=np.uint16) for n in source_map.parameters}


def classes_of(plan: Plan, maps: dict[str, SourceMap]) -> Correspondence:
    """What a plan's trainers hold and rollouts need."""
    return correspond({name: maps[name] for name in plan.holders}, {name: maps[name] for name in plan.needers})


@contextmanager
def workers(
    plan: Plan, maps: dict[str, SourceMap], correspondence: Correspondence | None, near: Near | None
) -> Iterator[Callable[[], float]]:
    """Every worker of a plan in a process; a call runs the next version and says how many seconds it took.

    With digests of all classes of a correspondence, or with none.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // len(plan.workers))
    compiler = Compiler(plan, near)
    arguments = [
        (
            compiler.program(worker, maps[worker]).to_bytes(),
            maps[worker].to_bytes(),
            [] if correspondence is None else [(cell.number, cell.runs) for cell in cells_of(correspondence, worker)],
            threads,
            worker in plan.needers,
        )
        for worker in plan.workers
    ]
    versions = iter(range(1 << 20))
    with processes(serve, arguments) as pipes:
        ask(pipes, dict(zip(plan.workers, answers(pipes), strict=True)))
        answers(pipes)

        def run() -> float:
            ask(pipes, next(versions))
            ran: dict[str, Ran] = dict(zip(plan.workers, answers(pipes), strict=True))  # type: ignore[arg-type]
            if correspondence is not None:
                sides = ({w: one[2] for w, one in ran.items() if (w in plan.needers) == side} for side in (False, True))
                sent, landed = sides
                check_holders(correspondence, sent)
                check_digests(correspondence, sent, landed)
            return max(one[1] for one in ran.values()) - min(one[0] for one in ran.values())

        yield run
