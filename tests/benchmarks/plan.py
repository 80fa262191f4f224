"""Plans at size: loads, simulated timelines and speedups against the bound, time, growth and memory.

Everything about updates is simulated, nothing of it measured; only the planner's own seconds and bytes are. Maps are
declared and shared by equal workers, as `transload plan` does it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from adapters.cli.benchmark import Row
from adapters.cli.plan_report import peak_rss_bytes
from adapters.deployments import Deployment, read_deployment
from adapters.deployments_layouts import Megatron, Rollout
from layout_algebra.correspondence import Correspondence, correspond
from transfer_exec import make_plan, simulate
from transfer_exec.baselines import BASELINES
from transfer_exec.compiler import Compiler
from transfer_exec.plan import Plan
from transfer_exec.program import Program
from transfer_exec.replan import replan

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deployments"
DEPLOYMENTS = ("moonlight-16b", "qwen3-30b-a3b", "qwen3-235b-a22b", "kimi-k2")
REPLICAS = (1, 2, 4, 8, 16)
GROWTH_GPUS = (8, 32, 64, 128, 256)


def cases() -> dict[str, Callable[[], list[Row]]]:
    """Parts that run alone."""
    return {"kimi": kimi_rows, "growth": growth_rows, "replan": replanning_rows, "4096": large_rows}


def rows() -> list[Row]:
    """The benchmark's rows, but those of 4,096 + 4,096 workers, which take minutes: case ``4096``."""
    out = kimi_rows()
    for name in DEPLOYMENTS:
        out += timeline_rows(name, read_deployment(FOLDER / f"{name}.toml"))
    for name, deployment in sweeps():
        out += timeline_rows(name, deployment)
    return out + growth_rows() + replanning_rows()


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
    """Seconds over trainers and as many rollouts, step by step, and the exponent of a line through their logarithms.

    Kimi-K2 with eight of its layers, engines of 8, so that every size has the same model; the floor is the smallest.
    """
    base = read_deployment(FOLDER / "kimi-k2.toml")
    model = dataclasses.replace(base.model, layers=base.model.layers[:8])
    seconds: dict[str, list[float]] = {"correspondence": [], "plan": [], "programs": []}
    cpu: dict[str, list[float]] = {f"{name}, processor": [] for name in seconds}
    for gpus in GROWTH_GPUS:
        pp = min(8, gpus // 8)
        trainer = Megatron(tp=8, pp=pp, dp=gpus // 8 // pp, ep=min(32, gpus // pp))
        rollout = Rollout(gpus // 8, dp=8, ep=8)
        deployment = dataclasses.replace(
            base, model=model, trainer=trainer, rollout=rollout, trainer_gpus=gpus, rollout_gpus=gpus
        )
        steps = Steps.of(deployment)
        for step, value in zip([*seconds.values(), *cpu.values()], steps.seconds + steps.cpu_seconds, strict=True):
            step.append(value)
    out = []
    for name, step in {**seconds, **cpu}.items():
        for gpus, value in zip(GROWTH_GPUS, step, strict=True):
            case = f"growth: {name} of {gpus} + {gpus} workers"
            out.append(Row.against_floor(case, value=value, unit="s", floor=step[0]))
        exponent = slope([math.log(gpus) for gpus in GROWTH_GPUS], [math.log(value) for value in step])
        case = f"growth: exponent of {name} in workers"
        out.append(Row.against_floor(case, value=max(exponent, 1e-3), unit="1", floor=1.0))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """A deployment's correspondence, its plan, and what making them and the programs took.

    Attributes
    ----------
    demand, plan
        What was made.
    seconds, cpu_seconds
        Of the correspondence, the plan, and the bytes of the programs; by the clock, and of the processor.
    program_bytes_max
        Of the largest program.
    """

    demand: Correspondence
    plan: Plan
    seconds: tuple[float, float, float]
    cpu_seconds: tuple[float, float, float]
    program_bytes_max: int

    @staticmethod
    def of(deployment: Deployment, *, every: int = 1) -> Steps:
        """Go through them; programs of every so many-th worker only."""
        _, holders, needers = deployment.maps()
        maps = {**holders, **needers}
        began = _clocks()
        demand = correspond(holders, needers)
        met = _clocks()
        plan = make_plan(demand, deployment.topology(), buffer_bytes=deployment.update.buffer_bytes)
        planned = _clocks()
        compiler = Compiler(plan)
        largest = max(len(compiler.program(worker, maps[worker]).to_bytes()) for worker in plan.workers[::every])
        steps = np.diff([began, met, planned, _clocks()], axis=0)
        wall, cpu = ((float(a), float(b), float(c)) for a, b, c in steps.T)
        return Steps(demand, plan, wall, cpu, largest)


def _clocks() -> tuple[float, float]:
    """Seconds by the clock and of the processor; the second does not count what other processes take."""
    return time.perf_counter(), time.process_time()


def slope(x: list[float], y: list[float]) -> float:
    """Of the line of least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / across


def kimi_rows() -> list[Row]:
    """Kimi-K2 on 64 nodes: correspondence, plan and the programs of all 512 workers; what one worker then unfolds."""
    deployment = read_deployment(FOLDER / "kimi-k2.toml")
    steps = Steps.of(deployment)
    peak = float(peak_rss_bytes())
    _, _, needers = deployment.maps()
    worker = steps.plan.needers[0]
    data = Compiler(steps.plan).program(worker, needers[worker]).to_bytes()
    began = time.perf_counter()
    program = Program.from_bytes(data)
    tables = program.table_bytes
    unfolding = time.perf_counter() - began
    correspondence, plan, programs = steps.seconds
    return [
        Row.against_floor("Kimi-K2: correspondence", value=correspondence, unit="s", floor=10.0, bar=1.0),
        Row.against_floor("Kimi-K2: plan and all programs", value=plan + programs, unit="s", floor=15.0, bar=1.0),
        Row.against_floor("Kimi-K2: all programs", value=programs, unit="s", floor=plan),
        Row.against_floor("Kimi-K2: peak memory", value=peak, unit="bytes", floor=float(3 << 30), bar=1.0),
        Row.against_floor(
            "Kimi-K2: largest program", value=float(steps.program_bytes_max), unit="bytes", floor=float(tables)
        ),
        Row.against_floor("Kimi-K2: one worker's tables from its program", value=unfolding, unit="s", floor=programs),
    ]


def large_rows() -> list[Row]:
    """Kimi-K2 on 4,096 + 4,096 workers: correspondence, plan and the programs of 16 of them."""
    base = read_deployment(FOLDER / "kimi-k2.toml")
    trainer, rollout = Megatron(tp=8, pp=8, cp=4, dp=16, ep=32), Rollout(128, dp=32, ep=32)
    steps = Steps.of(
        dataclasses.replace(base, trainer=trainer, rollout=rollout, trainer_gpus=4096, rollout_gpus=4096), every=512
    )
    peak = float(peak_rss_bytes())
    return [
        Row.against_floor(
            "4096 + 4096: plan and 16 programs", value=sum(steps.seconds[1:]), unit="s", floor=120.0, bar=1.0
        ),
        Row.against_floor("4096 + 4096: correspondence", value=steps.seconds[0], unit="s", floor=steps.seconds[1]),
        *(
            Row.against_floor(f"4096 + 4096: {name}, processor", value=cpu, unit="s", floor=wall)
            for name, cpu, wall in zip(
                ("correspondence", "plan", "16 programs"), steps.cpu_seconds, steps.seconds, strict=True
            )
        ),
        Row.against_floor("4096 + 4096: peak memory", value=peak, unit="bytes", floor=float(8 << 30), bar=1.0),
    ]


def replanning_rows() -> list[Row]:
    """Kimi-K2 to 64 engines of four GPUs: the demand and the plan after one engine is lost, and after it is back."""
    base = read_deployment(FOLDER / "kimi-k2.toml")
    steps = Steps.of(dataclasses.replace(base, rollout=Rollout(64, dp=4, ep=4)), every=64)
    lost = [worker for worker in steps.plan.needers if worker.startswith("engine/63/")]
    topology = dataclasses.replace(base, rollout=Rollout(64, dp=4, ep=4)).topology()
    buffer_bytes = base.update.buffer_bytes
    began = _clocks()
    left, _ = replan(steps.demand, topology, lost=lost, buffer_bytes=buffer_bytes)
    gone = _clocks()
    joined = {worker: worker.replace("engine/63/", "engine/0/") for worker in lost}
    _, again = replan(left, topology, joined=joined, buffer_bytes=buffer_bytes)
    back = _clocks()
    assert again.digest() == steps.plan.digest(), "planning again gives what planning from the start gives"
    out = []
    for clock, anew in enumerate((steps.seconds, steps.cpu_seconds)):
        suffix = ", processor" if clock else ""
        for name, first, last in (("one lost", began, gone), ("one back", gone, back)):
            case = f"Kimi-K2, 64 engines: plan again, {name}{suffix}"
            out.append(Row.against_floor(case, value=last[clock] - first[clock], unit="s", floor=anew[0] + anew[1]))
    return out
