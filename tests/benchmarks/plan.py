"""Plans at size: loads, simulated timelines and speedups against the bound, time, growth and memory.

Everything about updates is simulated, nothing of it measured; only the planner's own seconds and bytes are. Maps are
declared and shared by equal workers, as `transload plan` does it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from pathlib import Path

from adapters.cli.benchmark import Row
from adapters.cli.plan_report import peak_rss_bytes
from adapters.deployments import Deployment, read_deployment
from adapters.deployments_layouts import Megatron, Rollout
from layout_algebra.correspondence import correspond
from transfer_exec import make_plan, simulate
from transfer_exec.baselines import BASELINES
from transfer_exec.compiler import Compiler
from transfer_exec.replan import change_workers

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deployments"
DEPLOYMENTS = ("moonlight-16b", "qwen3-30b-a3b", "qwen3-235b-a22b", "kimi-k2")
REPLICAS = (1, 2, 4, 8, 16)
GROWTH_GPUS = (8, 32, 64, 128, 256)


def rows() -> list[Row]:
    """The benchmark's rows."""
    out = []
    for name in DEPLOYMENTS:
        out += timeline_rows(name, read_deployment(FOLDER / f"{name}.toml"))
    for name, deployment in sweeps():
        out += timeline_rows(name, deployment)
    return out + growth_rows() + kimi_rows()


def timeline_rows(name: str, deployment: Deployment) -> list[Row]:
    """The plan's load, its simulated end to end with 1 ms and 0.1 ms a round, and the baselines', over the bound."""
    _, holders, needers = deployment.maps()
    demand, topology = correspond(holders, needers), deployment.topology()
    buffer_bytes = deployment.update.buffer_bytes
    slow, fast = (
        make_plan(demand, topology, buffer_bytes=buffer_bytes, round_overhead_s=overhead) for overhead in (1e-3, 1e-4)
    )
    bound = slow.lower_bound_s
    out = [Row.against_floor(f"{name}: largest link load", value=slow.load_s, unit="s", floor=bound, bar=1.02)]
    for plan, overhead, bar in ((slow, 1e-3, 1.20), (fast, 1e-4, 1.08)):
        line = simulate(plan, topology, round_overhead_s=overhead)
        case = f"{name}: simulated, {overhead * 1e3:g} ms a round"
        out.append(Row.against_floor(case, value=line.end_to_end_s, unit="s", floor=bound, bar=bar))
    ours = simulate(slow, topology, round_overhead_s=1e-3).end_to_end_s
    for baseline, make in BASELINES.items():
        traffic = make(demand, topology, buffer_bytes=buffer_bytes)
        theirs = simulate(traffic, topology, round_overhead_s=1e-3).end_to_end_s
        out.append(Row.against_floor(f"{name}: simulated, {baseline} over ours", value=theirs, unit="s", floor=ours))
    return out


def sweeps() -> Iterable[tuple[str, Deployment]]:
    """The paper's sweeps of Qwen3-30B-A3B: rollout replicas, trainer nodes, data parallel degrees of either side."""
    base = read_deployment(FOLDER / "qwen3-30b-a3b.toml")

    def variant(trainer: Megatron, rollout: Rollout, trainer_gpus: int, rollout_gpus: int) -> Deployment:
        return dataclasses.replace(
            base, trainer=trainer, rollout=rollout, trainer_gpus=trainer_gpus, rollout_gpus=rollout_gpus
        )

    one = Megatron(tp=4, dp=2, ep=8)
    for count in REPLICAS:
        yield f"30B, {count} rollout replicas", variant(one, Rollout(count, tp=8, ep=8), 8, 8 * count)
    for nodes in (1, 2, 4):
        trainer = Megatron(tp=4, dp=2 * nodes, ep=8)
        yield f"30B, {nodes} trainer nodes", variant(trainer, Rollout(4, tp=8, ep=8), 8 * nodes, 32)
    for dp in (1, 2, 4):
        trainer = Megatron(tp=4 // dp, dp=4 * dp, ep=16 // dp)
        yield f"30B, trainer dp {dp}", variant(trainer, Rollout(2, tp=8, ep=8), 16, 16)
    for dp in (1, 2, 4):
        rollout = Rollout(dp, tp=16 // dp, ep=16 // dp)
        yield f"30B, rollout dp {dp}", variant(Megatron(tp=4, dp=4, ep=8), rollout, 16, 16)


def growth_rows() -> list[Row]:
    """Seconds of a plan over trainers and as many rollouts, and the exponent of a line through their logarithms.

    Kimi-K2 with eight of its layers, engines of 8, so that every size has the same model; the floor is the smallest.
    """
    base = read_deployment(FOLDER / "kimi-k2.toml")
    model = dataclasses.replace(base.model, layers=base.model.layers[:8])
    seconds = []
    for gpus in GROWTH_GPUS:
        pp = min(8, gpus // 8)
        trainer = Megatron(tp=8, pp=pp, dp=gpus // 8 // pp, ep=min(32, gpus // pp))
        rollout = Rollout(gpus // 8, dp=8, ep=8)
        deployment = dataclasses.replace(
            base, model=model, trainer=trainer, rollout=rollout, trainer_gpus=gpus, rollout_gpus=gpus
        )
        _, holders, needers = deployment.maps()
        demand = correspond(holders, needers)
        began = time.perf_counter()
        make_plan(demand, deployment.topology(), buffer_bytes=base.update.buffer_bytes)
        seconds.append(time.perf_counter() - began)
    out = [
        Row.against_floor(f"growth: plan of {gpus} + {gpus} workers", value=value, unit="s", floor=seconds[0])
        for gpus, value in zip(GROWTH_GPUS, seconds, strict=True)
    ]
    exponent = slope([math.log(gpus) for gpus in GROWTH_GPUS], [math.log(value) for value in seconds])
    case = "growth: exponent of seconds in workers"
    return [*out, Row.against_floor(case, value=max(exponent, 1e-3), unit="1", floor=1.0)]


def slope(x: list[float], y: list[float]) -> float:
    """Of the line of least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / across


def kimi_rows() -> list[Row]:
    """Kimi-K2 on 64 nodes: seconds of correspondence, plan and of programs, which are compiled for one worker of either
    side and counted for all; the plan after an engine is lost; the process's peak memory."""
    deployment = read_deployment(FOLDER / "kimi-k2.toml")
    _, holders, needers = deployment.maps()
    maps = {**holders, **needers}
    began = time.perf_counter()
    demand = correspond(holders, needers)
    plan = make_plan(demand, deployment.topology(), buffer_bytes=deployment.update.buffer_bytes)
    planning = time.perf_counter() - began
    compiler = Compiler(plan)
    programs = 0.0
    for worker, count in ((plan.holders[0], len(plan.holders)), (plan.needers[0], len(plan.needers))):
        began = time.perf_counter()
        compiler.program(worker, maps[worker])
        programs += (time.perf_counter() - began) * count
    began = time.perf_counter()
    lost = change_workers(demand, lost=[worker for worker in plan.needers if worker.startswith("engine/7/")])
    make_plan(lost, deployment.topology(), buffer_bytes=deployment.update.buffer_bytes)
    replanning = time.perf_counter() - began
    return [
        Row.against_floor("Kimi-K2: correspondence and plan", value=planning, unit="s", floor=15.0, bar=1.0),
        Row.against_floor(
            "Kimi-K2: plan and all programs, from two", value=planning + programs, unit="s", floor=15.0, bar=1.0
        ),
        Row.against_floor("Kimi-K2: plan after an engine is lost", value=replanning, unit="s", floor=planning),
        Row.against_floor(
            "Kimi-K2: peak memory", value=float(peak_rss_bytes()), unit="bytes", floor=float(3 << 30), bar=1.0
        ),
    ]
