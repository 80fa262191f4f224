"""What a plan comes to, in numbers: how near the bound it is, what it takes to make, what every worker gets."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping

import msgspec

from adapters.cli.plan_source import Source
from adapters.deployments import UpdateSettings
from transfer_exec.baselines import BASELINES
from transfer_exec.compiler import Compiler
from transfer_exec.demand import place_demand
from transfer_exec.links import Links
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan, round_load_over_average
from transfer_exec.simulate import Timeline, simulate
from transfer_exec.together import Unit

__all__ = [
    "PlanReport",
    "SimulationReport",
    "load_over_bound",
    "network_copies",
    "peak_rss_bytes",
    "report_plan",
    "report_simulation",
]


_ALL_PROGRAMS = 512
"""Up to this many workers all programs are compiled unless another number is asked for."""
_SAMPLE = 4


class PlanReport(msgspec.Struct, frozen=True):
    """What `transload plan FILE --json` prints.

    Attributes
    ----------
    name, model_bytes, trainers, rollouts, distinct_maps, demand_classes, routes
        What was planned.
    rounds, buffer_bytes
        Rounds, and the budget of a worker in each.
    bound_s, bound_link, optimum_s, load_s
        Seconds: no lawful plan is faster, by which link; the best division; this plan.
    link_load_over_bound
        `load_s` over `bound_s`.
    trainer_copies_sent
        What trainers send over the network, over one copy of what some node needs and lacks; 1 is exactly one copy.
    node_ingress_over_need
        The largest, over nodes, of what a node receives over the network over what it needs and lacks.
    messages, peers_max
        Messages of a round, over all workers; the most workers that one worker sends to or receives from.
    round_load_over_average
        The longest time of any link in any round, over that of the busiest link in an average round.
    map_seconds, correspond_seconds, plan_seconds, program_seconds
        Declaring or reading maps; intersecting them; the plan; the programs of all workers that were compiled.
    programs, program_bytes_max, program_bytes_sum
        Programs that were compiled, the largest, and all.
    peak_rss_bytes
        Of this process so far.
    """

    name: str
    model_bytes: int
    trainers: int
    rollouts: int
    distinct_maps: int
    demand_classes: int
    routes: int
    rounds: int
    buffer_bytes: int
    bound_s: float
    bound_link: str
    optimum_s: float
    load_s: float
    link_load_over_bound: float
    trainer_copies_sent: float
    node_ingress_over_need: float
    messages: int
    peers_max: int
    round_load_over_average: float
    map_seconds: float
    correspond_seconds: float
    plan_seconds: float
    program_seconds: float
    programs: int
    program_bytes_max: int
    program_bytes_sum: int
    peak_rss_bytes: int


class SimulationReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `transload simulate FILE --json` prints; everything is simulated, nothing measured.

    Attributes
    ----------
    name
        What was simulated.
    rounds, depth, round_overhead_s
        How it ran.
    bound_s, end_to_end_s, stall_s
        Seconds; the stall is the average over workers.
    end_to_end_over_bound, stall_over_bound
        Over `bound_s`.
    binding_link
        The link with the largest bytes over bandwidth.
    baselines
        With `--compare` the same for every baseline.
    """

    name: str
    rounds: int
    depth: int
    round_overhead_s: float
    bound_s: float
    end_to_end_s: float
    stall_s: float
    end_to_end_over_bound: float
    stall_over_bound: float
    binding_link: str
    baselines: dict[str, SimulationReport] = {}


def peak_rss_bytes() -> int:
    """Most memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def report_plan(
    source: Source, settings: UpdateSettings, *, sample: int | None = None, keep_together: Unit | None = None
) -> tuple[Plan, PlanReport]:
    """Make a plan and the programs of its workers.

    Parameters
    ----------
    settings
        Budget per worker and round, and what the number of rounds depends on.
    sample
        Compile the programs of about this many workers only, evenly spread. By default those of all up to 512
        workers, and of four in a larger cluster.
    keep_together
        As `make_plan`.

    Raises
    ------
    TransferError
        As `make_plan` and `compile_program`.
    """
    started = time.perf_counter()
    plan = make_plan(
        source.correspondence,
        source.topology,
        buffer_bytes=settings.buffer_bytes,
        round_overhead_s=settings.round_overhead_s,
        depth=settings.depth,
        keep_together=keep_together,
    )
    planned = time.perf_counter()
    sizes = program_sizes(plan, source, sample=sample)
    compiled = time.perf_counter()
    copies, ingress = network_copies(plan, source)
    return plan, PlanReport(
        name=source.name,
        model_bytes=source.model_bytes,
        trainers=len(plan.holders),
        rollouts=len(plan.needers),
        distinct_maps=len({id(each) for each in source.maps.values()}),
        demand_classes=len(source.correspondence.classes),
        routes=len(plan.routes),
        rounds=plan.rounds,
        buffer_bytes=settings.buffer_bytes,
        bound_s=plan.lower_bound_s,
        bound_link=plan.bound_link,
        optimum_s=plan.optimum_s,
        load_s=plan.load_s,
        link_load_over_bound=load_over_bound(plan),
        trainer_copies_sent=copies,
        node_ingress_over_need=ingress,
        messages=len({hop for route in plan.routes for hop in route.hops}),
        peers_max=_peers_max(plan),
        round_load_over_average=round_load_over_average(plan, source.topology),
        map_seconds=source.maps_s,
        correspond_seconds=source.correspond_s,
        plan_seconds=planned - started,
        program_seconds=compiled - planned,
        programs=len(sizes),
        program_bytes_max=max(sizes.values(), default=0),
        program_bytes_sum=sum(sizes.values()),
        peak_rss_bytes=peak_rss_bytes(),
    )


def program_sizes(plan: Plan, source: Source, *, sample: int | None = None) -> dict[str, int]:
    """Bytes of the programs of all workers, or of about `sample` evenly spread ones."""
    compiler = Compiler(plan)
    if sample is None:
        sample = len(plan.workers) if len(plan.workers) <= _ALL_PROGRAMS else _SAMPLE
    step = max(1, len(plan.workers) // max(1, sample))
    return {worker: len(compiler.program(worker, source.maps[worker]).to_bytes()) for worker in plan.workers[::step]}


def _peers_max(plan: Plan) -> int:
    pairs = {frozenset((hop.source, hop.target)) for route in plan.routes for hop in route.hops}
    counted = Counter(worker for pair in pairs for worker in pair)
    return max(counted.values(), default=0)


def load_over_bound(plan: Plan) -> float:
    """The largest link load over the bound; 1 where nothing has to move."""
    return plan.load_s / plan.lower_bound_s if plan.lower_bound_s else 1.0


def network_copies(plan: Plan, source: Source) -> tuple[float, float]:
    """What trainers send over one copy of what some node lacks, and the largest ingress over need of a node."""
    links = Links.of(source.topology, plan.holders, plan.needers)
    node_of = dict(zip(plan.workers, plan.nodes, strict=True))
    need: dict[int, int] = {}
    needed = 0
    for demand in place_demand(source.correspondence, links):
        needed += demand.bytes if demand.remote else 0
        for site in demand.remote:
            need[site.node] = need.get(site.node, 0) + demand.bytes
    sent = 0
    got: dict[int, int] = {}
    for route in plan.routes:
        for hop in route.hops:
            if node_of[hop.source] != node_of[hop.target]:
                sent += route.bytes if hop.stage is Stage.RECEIVE else 0
                got[node_of[hop.target]] = got.get(node_of[hop.target], 0) + route.bytes
    largest = max((count / need[node] if node in need else math.inf for node, count in got.items()), default=1.0)
    return sent / needed if needed else 1.0, largest


def report_simulation(source: Source, plan: Plan, settings: UpdateSettings, *, compare: bool) -> SimulationReport:
    """Simulate a plan, and with `compare` the baselines on the same demand and cluster."""

    def line(traffic_name: str, timeline: Timeline, others: Mapping[str, SimulationReport]) -> SimulationReport:
        bound = timeline.lower_bound_s
        return SimulationReport(
            name=traffic_name,
            rounds=timeline.rounds,
            depth=settings.depth,
            round_overhead_s=settings.round_overhead_s,
            bound_s=bound,
            end_to_end_s=timeline.end_to_end_s,
            stall_s=timeline.stall_s,
            end_to_end_over_bound=timeline.ratio_to_bound,
            stall_over_bound=timeline.stall_s / bound if bound else math.inf if timeline.stall_s else 1.0,
            binding_link=timeline.binding_link,
            baselines=dict(others),
        )

    how = {"round_overhead_s": settings.round_overhead_s}
    others = {}
    if compare:
        for name, make in BASELINES.items():
            traffic = make(source.correspondence, source.topology, buffer_bytes=settings.buffer_bytes)
            others[name] = line(name, simulate(traffic, source.topology, depth=settings.depth, **how), {})
    return line(source.name, simulate(plan, source.topology, depth=settings.depth, **how), others)
