"""A whole plan in one process: every worker's program over loopback, stepped in turn by one thread.

Programs, tables, kernels and flags are those of a real run; only the wire is a copy in memory. Everything is checked
before the first byte: if it raises a ProgramError, no memory has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layout_algebra.source_map import SourceMap
from transfer_exec.aliases import Member, check_aliases
from transfer_exec.binding import scattered_names
from transfer_exec.compiler import Compiler
from transfer_exec.direct import LEAST_BYTES, Near
from transfer_exec.errors import ProgramError, TransportError
from transfer_exec.executor import DEPTH, Executor
from transfer_exec.kernels.base import Kernels
from transfer_exec.plan import Plan
from transfer_exec.report import TransferReport, WorkerReport, combine_reports
from transfer_exec.signals import Steps, Wait
from transfer_exec.transport.loopback import LoopbackNetwork


def run_in_process(
    plan: Plan,
    maps: Mapping[str, SourceMap],
    memory: Mapping[str, Mapping[str, object]],
    *,
    version: int = 0,
    network: LoopbackNetwork | None = None,
    kernels: Kernels | None = None,
    depth: int = DEPTH,
    direct_bytes: int | None = LEAST_BYTES,
    trace: bool = False,
    inspect: Callable[[Mapping[str, Executor]], None] | None = None,
) -> TransferReport:
    """Run one update of all workers of a plan, in place.

    Parameters
    ----------
    plan
        What goes where.
    maps
        The source map of every worker of the plan; others are ignored.
    memory
        For every worker its parameters, as numpy arrays or torch tensors of any strides; needers' are written.
        Parameters without traffic may be missing.
    version
        Of the update.
    network
        A loopback network that may misbehave; by default one that does not.
    kernels
        Backend; numba by default.
    depth
        Rounds under way at once.
    direct_bytes
        Shortest run that goes straight from parameter to parameter; None if everything shall go in rounds.
    trace
        Keep spans in the report (`transfer_exec.trace`).
    inspect
        Called with the executors, connected, before the first byte.

    Returns
    -------
    TransferReport
        Without measures, since nobody computes. Opaque parameters are left alone and listed.

    Raises
    ------
    ProgramError
        If ``version`` or ``depth`` is no number of its kind, a map or memory is missing or does not fit, or memory that
        is to be written holds different elements by two names; nothing was written.
    TransportError
        If a write failed, or no worker can go on.
    """
    for argument, value, least in (("version", version, 0), ("depth", depth, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ProgramError(f"{argument} is {value!r}; expected an integer of at least {least}")
    network = LoopbackNetwork() if network is None else network
    missing = [worker for worker in plan.workers if worker not in maps]
    if missing:
        raise ProgramError(f"no source map of {', '.join(missing)}; the plan has workers {', '.join(plan.workers)}")
    near = None
    if direct_bytes is not None:
        scattered = {worker: scattered_names(memory.get(worker, {})) for worker in plan.workers}
        near = Near({worker: maps[worker] for worker in plan.workers}, scattered, direct_bytes)
    compiler = Compiler(plan, near)
    programs = {worker: compiler.program(worker, maps[worker]) for worker in plan.workers}
    executors: dict[str, Executor] = {}
    try:
        for worker, program in programs.items():
            given = memory.get(worker, {})
            executors[worker] = Executor(program, given, network.transport(worker), kernels=kernels, depth=depth)
        check_aliases([Member(one.program, one.tensors, maps[w], w in plan.needers) for w, one in executors.items()])
        endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
        for executor in executors.values():
            executor.connect(endpoints)
        if inspect is not None:
            inspect(executors)
        runs = {worker: executor.start(version, trace=trace) for worker, executor in executors.items()}
        reports = _run_all(runs, network)
    finally:
        for executor in executors.values():
            executor.close()
    return combine_reports(plan, reports, opaque={worker: maps[worker].opaque for worker in plan.workers})


def _run_all(runs: dict[str, Steps], network: LoopbackNetwork) -> dict[str, WorkerReport]:
    """Step every worker in turn until all are done."""
    reports: dict[str, WorkerReport] = {}
    waits: dict[str, Wait] = {}
    while runs:
        progress = not network.idle
        for worker in list(runs):
            try:
                wait = next(runs[worker])
            except StopIteration as done:
                reports[worker] = done.value
                del runs[worker]
                waits.pop(worker, None)
                progress = True
                continue
            progress = progress or wait is not waits.get(worker)
            waits[worker] = wait
        if runs and not progress:
            stuck = "; ".join(f"{worker} at {wait}" for worker, wait in waits.items())
            raise TransportError(f"no worker can go on: {stuck}")
        network.advance()
    return reports
