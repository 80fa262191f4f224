"""What proving an update costs: a 1 GB dense model over shared memory with digests, against the same without.

Two FSDP trainers to an engine of two tensor-parallel ranks, a process each. Trainers digest what they hold before the
first byte leaves, rollouts what has landed; the digests must agree, class by class, or there is no row. The second case
is the loop alone, over the trainers' memory in one process, against a memcpy of as many bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from adapters.cli.benchmark import Row, interleaved_medians
from adapters.verification import cells_of, check_digests, check_holders
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.fingerprint import plan_fingerprints
from layout_algebra.source_map import SourceMap
from tests.benchmarks._digest_worker import Ran, serve
from tests.benchmarks.host import answers, ask, copy_of, crossing, processes
from transfer_exec.compiler import compile_program
from transfer_exec.plan import Plan

LAYERS = 8


def rows() -> list[Row]:
    """The benchmark's rows."""
    space, plan, maps = crossing(LAYERS)
    needers = set(plan.needers)
    correspondence = correspond(
        {name: each for name, each in maps.items() if name not in needers},
        {name: each for name, each in maps.items() if name in needers},
    )
    model_bytes = space.total_elements * 2
    with workers(plan, maps, correspondence) as run:
        value, floor = interleaved_medians(lambda: run(True), lambda: run(False), repeats=7)
    name = f"{model_bytes / 1e9:.1f} GB"
    host = Row.against_floor(f"host {name}", value=value, unit="s", floor=floor, bar=1.6)
    trainers = [maps[name] for name in plan.holders]
    value, floor = interleaved_medians(digests_of(trainers, correspondence), copy_of(model_bytes), repeats=7)
    return [host, Row.against_floor(f"loop {name}", value=value, unit="s", floor=floor)]


def digests_of(maps: Sequence[SourceMap], correspondence: Correspondence) -> Callable[[], object]:
    """Digests of every class of some workers' memory, a thread each."""
    classes = [group.runs for group in correspondence.classes]
    jobs = []
    for each in maps:
        random = np.random.default_rng(1)
        memory = {n: random.integers(0, 1 << 15, each.shape(n), dtype=np.uint16) for n in each.parameters}
        jobs.append(partial(plan_fingerprints(each, classes).sums, memory))
    pool = ThreadPoolExecutor(len(jobs))
    return lambda: [future.result() for future in [pool.submit(job) for job in jobs]]


@contextmanager
def workers(
    plan: Plan, maps: dict[str, SourceMap], correspondence: Correspondence
) -> Iterator[Callable[[bool], float]]:
    """Every worker of a plan in a process; a call runs the next version, with digests or without; its seconds."""
    threads = max(1, len(os.sched_getaffinity(0)) // len(plan.workers))
    arguments = [
        (
            compile_program(plan, worker, maps[worker]).to_bytes(),
            maps[worker].to_bytes(),
            [(cell.number, cell.runs) for cell in cells_of(correspondence, worker)],
            threads,
        )
        for worker in plan.workers
    ]
    versions = iter(range(1 << 20))
    with processes(serve, arguments) as pipes:
        ask(pipes, dict(zip(plan.workers, answers(pipes), strict=True)))
        answers(pipes)

        def run(digests: bool) -> float:
            ask(pipes, (next(versions), digests))
            ran: dict[str, Ran] = dict(zip(plan.workers, answers(pipes), strict=True))  # type: ignore[arg-type]
            if digests:
                sides = ({w: one[2] for w, one in ran.items() if (w in plan.needers) == side} for side in (False, True))
                sent, landed = sides
                check_holders(correspondence, sent)
                check_digests(correspondence, sent, landed)
            return max(one[1] for one in ran.values()) - min(one[0] for one in ran.values())

        yield run
