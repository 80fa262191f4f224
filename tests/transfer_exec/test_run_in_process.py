"""run_in_process: random layouts, memory and budgets against the element-wise truth; the field's cases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from crossing import Crossing, make_memory, random_crossing

from transfer_exec.executor import Executor
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Plan, Stage
from transfer_exec.report import TransferReport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy


def poison(executors: Mapping[str, Executor]) -> None:
    """Fill every buffer with NaN patterns, so that a byte that nobody wrote is seen."""
    for executor in executors.values():
        for memory in executor.buffers.memory.values():
            memory[:] = 0xFF


def cross(
    crossing: Crossing,
    plan: Plan,
    rng: np.random.Generator,
    *,
    strided: bool = True,
    policy: LoopbackPolicy | None = None,
) -> TransferReport:
    """Run a plan on fresh memory and check every byte."""
    holders = make_memory(crossing, crossing.held, rng, strided=strided)
    needers = make_memory(crossing, crossing.needed, rng, strided=strided)
    for worker, parameters in holders.items():
        for name, memory in parameters.items():
            crossing.fill_holder(worker, name, memory.view)
    kept = {worker: {n: m.base.copy() for n, m in parameters.items()} for worker, parameters in holders.items()}
    before = {worker: {n: m.view.copy() for n, m in parameters.items()} for worker, parameters in needers.items()}
    memory = {w: {n: m.view for n, m in parameters.items()} for w, parameters in {**holders, **needers}.items()}
    report = run_in_process(plan, crossing.maps, memory, network=LoopbackNetwork(policy), inspect=poison)
    for worker, parameters in holders.items():
        for name, guard in parameters.items():
            assert np.array_equal(guard.base, kept[worker][name]), f"{name} on {worker} was written"
    for worker, parameters in needers.items():
        for name, guard in parameters.items():
            assert guard.outside_untouched(), f"bytes around {name} on {worker} changed"
            crossing.check_needer(worker, name, guard.view, before[worker][name])
    for worker in plan.workers:
        for stage in Stage:
            assert report.bytes_sent(worker, stage) == plan.bytes_sent(worker, stage)
            assert report.bytes_received(worker, stage) == plan.bytes_received(worker, stage)
    return report


@pytest.mark.parametrize("seed", range(120))
def test_random_layouts_memory_and_budgets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([8, 24, 100, 1 << 20])))
    cross(crossing, plan, rng, strided=bool(rng.integers(0, 2)))
