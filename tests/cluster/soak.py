"""Fault trials on the one-machine cluster, one after the other; what `transload soak` runs in the checkout.

::

    python -m tests.cluster.soak --trials 12 --seed 0 [--mode rs] [--fault freeze]
    python -m tests.cluster.soak --updates 1000 --mode plain

Prints a `Place` and then a `TrialRecord` for every trial, or one `UpdatesReport`, one JSON object a line. Where no
network namespaces can be made, all workers run on this host as they are, and nobody is cut off.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from adapters.cli.soak_report import FAULTS, MODES, Holding, Place, TrialRecord, UpdatesReport
from adapters.cli.warm_up import compile_kernels
from tests.cluster.fleet import Fleet, Job
from tests.cluster.network import Cluster, NodeSpec, why_not
from tests.cluster.one_host import OneHost
from tests.cluster.soak_workers import Resources, Setting
from tests.cluster.trials import DEADLINE_S, ENGINES, LIMIT_S, TRAINERS, WORKERS, Course, Trial

LINK_BYTES_PER_S = 25e6
_WARM_UPDATES = 50


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--fault", choices=FAULTS)
    given = parser.parse_args()
    reason = why_not()
    if given.updates is not None:
        report = run_updates(given.updates, mode=given.mode, cables=not reason)
        print(msgspec.json.encode(report).decode(), flush=True)
        return
    where = f"on one host, nobody cut off: {reason}" if reason else "in network namespaces"
    print(msgspec.json.encode(Place(where, LIMIT_S)).decode(), flush=True)
    trials = choose_trials(given.trials, given.seed, mode=given.mode, fault=given.fault, cables=not reason)
    for record in run_trials(trials, cables=not reason):
        print(msgspec.json.encode(record).decode(), flush=True)


def choose_trials(
    count: int, seed: int, *, mode: str | None = None, fault: str | None = None, cables: bool = True
) -> list[Trial]:
    """The trials of the first seeds that are of a mode and a fault, those of one job after each other."""
    every = (Trial.of(number) for number in itertools.count(seed))
    fitting = (t for t in every if t.mode == (mode or t.mode) and t.fault == (fault or t.fault))
    possible = (t for t in fitting if cables or t.fault != "cut")
    chosen = list(itertools.islice(possible, count))
    return sorted(chosen, key=lambda t: (MODES.index(t.mode), t.transport, t.replicas, t.seed))


def run_trials(trials: list[Trial], *, cables: bool) -> Iterator[TrialRecord]:
    """Run trials on one fleet, which is made anew after a trial that went wrong."""
    compile_kernels()
    left = trials
    while left:
        for record in _run_on_one_fleet(left, cables=cables):
            left = left[1:]
            yield record
            if not record.ok:
                break


def run_updates(count: int, *, mode: str, transport: str = "shared_memory", cables: bool) -> UpdatesReport:
    """Send many versions on one fleet."""
    compile_kernels()
    with ExitStack() as stack:
        cluster, fleet = _enter_fleet(stack, cables=cables)
        course = Course(cluster, fleet, _setting(stack, mode, transport, replicas=False))
        course.begin()
        course.updates(_WARM_UPDATES)
        before: list[Resources] = fleet.each(range(len(WORKERS)), "resources")
        began = time.monotonic()
        wrong = course.updates(count)
        seconds = time.monotonic() - began
        after: list[Resources] = fleet.each(range(len(WORKERS)), "resources")
        workers = [Holding(name, *zip(*two, strict=True)) for name, *two in zip(WORKERS, before, after, strict=True)]
        grown = [one.worker for one in workers if one.grew]
        return UpdatesReport(mode, transport, count, seconds, wrong, workers, grown)


def _run_on_one_fleet(trials: list[Trial], *, cables: bool) -> Iterator[TrialRecord]:
    with ExitStack() as stack:
        cluster, fleet = _enter_fleet(stack, cables=cables)
        for (mode, transport, replicas), same in itertools.groupby(trials, lambda t: (t.mode, t.transport, t.replicas)):
            course = Course(cluster, fleet, _setting(stack, mode, transport, replicas=replicas))
            course.begin()
            for trial in same:
                yield course.run(trial)


def _enter_fleet(stack: ExitStack, *, cables: bool) -> tuple[Cluster | None, Fleet]:
    nodes = [NodeSpec(LINK_BYTES_PER_S, LINK_BYTES_PER_S)] * len(WORKERS)
    cluster = stack.enter_context(Cluster(nodes)) if cables else None
    return cluster, stack.enter_context(Fleet(cluster or OneHost(), _jobs()))


def _setting(stack: ExitStack, mode: str, transport: str, *, replicas: bool) -> Setting:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transload-soak-")))
    return Setting(folder, "ss" in mode, "rs" in mode, transport, replicas, DEADLINE_S)


def _jobs() -> list[Job]:
    module = "tests.cluster.soak_workers"
    jobs = [Job(rank, f"{module}:SoakTrainer", (rank, TRAINERS)) for rank in range(TRAINERS)]
    for engine, size in ENGINES.items():
        jobs += [Job(len(jobs) + rank, f"{module}:SoakRollout", (engine, rank, size)) for rank in range(size)]
    return jobs


if __name__ == "__main__":
    main()
