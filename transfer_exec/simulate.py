"""A plan's timeline without hardware.

Rounds pass the stages one after another, and as many rounds are under way at once as the pipeline is deep. In a round
a worker first pays the round's overhead and packs; in every stage it posts its messages, then waits for those that come
to it; at the end it assembles. A message begins when its sender has posted it, its target is in the same round, and the
sender's messages of that stage of the round before have left. Messages that share a link share it fairly (max-min):

>>> from transfer_exec.topology import Node
>>> from transfer_exec.traffic import Flow
>>> nodes = [Node.of(n, [n], nic_bytes_per_s=2.0, local_bytes_per_s=9.0) for n in ("t", "a", "b")]
>>> traffic = Traffic.of_flows(
...     "two from one", holders=("t",), needers=("a", "b"), stages=("out",), flows=[Flow(0, "t", "a", 8),
...     Flow(0, "t", "b", 4)], packed_bytes={}, buffer_bytes=8, lower_bound_s=6.0)
>>> line = simulate(traffic, Topology(nodes))      # 4 s for the first 4 bytes of both, 2 s for the rest
>>> line.end_to_end_s, line.ratio_to_bound, line.binding_link, line.stalls_s
(6.0, 1.0, 'NIC egress of t', {'t': 6.0, 'a': 6.0, 'b': 4.0})

All rounds are equal but for one element a route, so one round stands for all. Of many rounds the first and last ones
are simulated, and the steady pace between them is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer_exec._flow_kernels import Floats, run_rounds
from transfer_exec.errors import PlanError
from transfer_exec.links import Links
from transfer_exec.plan import Plan
from transfer_exec.rounds import MOST_SECONDS
from transfer_exec.topology import Topology
from transfer_exec.traffic import Flow, Traffic

_EXACT_FLOWS = 512
"""Up to this many messages a round every arrival is an event of its own."""
_GRAINS = 512
"""Beyond that, arrivals within this part of a round's least time count as one, at the end of it: a little too late."""
_SETTLING_ROUNDS = 6
"""Rounds at either end that are simulated and not repeated, per round under way at once at least one."""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What a simulated update takes; every worker stops computing at 0.

    Attributes
    ----------
    end_to_end_s
        Until the last worker is done with the last round.
    stall_s
        Average over all workers of the time until each may compute again: a trainer when its last bytes have left, a
        rollout when its last bytes are assembled and sent on, a worker without traffic at once.
    lower_bound_s, ratio_to_bound
        Of any lawful plan, and ``end_to_end_s`` over it; infinite where nothing has to move but something does.
    binding_link, binding_s
        The link with the largest bytes over bandwidth, and that time; empty without traffic.
    rounds, round_s
        Number of rounds, and the seconds that one more of them takes in the steady middle.
    stalls_s
        Per worker.
    """

    end_to_end_s: float
    stall_s: float
    lower_bound_s: float
    ratio_to_bound: float
    binding_link: str
    binding_s: float
    rounds: int
    round_s: float
    stalls_s: dict[str, float]


def simulate(
    plan: Plan | Traffic,
    topology: Topology,
    *,
    round_overhead_s: float = 0.0,
    message_overhead_s: float = 0.0,
    depth: int = 2,
    pack_bytes_per_s: float = math.inf,
    assemble_bytes_per_s: float = math.inf,
) -> Timeline:
    """Simulate one update, all workers starting together.

    Parameters
    ----------
    plan
        A plan, or the traffic of something else.
    topology
        Where the workers are.
    round_overhead_s
        Time of every worker before it packs; one round's follows the other's.
    message_overhead_s
        Time to post one message; those of one stage are posted together, after all of them.
    depth
        Rounds that a worker has buffers for. A round begins at a worker when the one ``depth`` before is done there.
    pack_bytes_per_s, assemble_bytes_per_s
        Of every worker, one round after the other. All that a rollout receives counts as assembled.

    Raises
    ------
    PlanError
        If an overhead is negative, a rate not above zero, or the depth below 1.
    TopologyError
        If a worker is in no node, or two clusters that exchange bytes have no link.
    """
    _check(round_overhead_s, message_overhead_s, depth, pack_bytes_per_s, assemble_bytes_per_s)
    traffic = Traffic.of(plan) if isinstance(plan, Plan) else plan
    links = Links.of(topology, traffic.holders, traffic.needers)
    if not traffic.flows:
        stalls = dict.fromkeys(traffic.workers, 0.0)
        return Timeline(0.0, 0.0, traffic.lower_bound_s, 1.0, "", 0.0, traffic.rounds, 0.0, stalls)
    number = {worker: position for position, worker in enumerate(links.workers)}
    crossed = [links.crossed(number[flow.source], number[flow.target]) for flow in traffic.flows]
    binding, binding_s = _binding(traffic.flows, crossed, links)
    busy = sorted({number[name] for flow in traffic.flows for name in (flow.source, flow.target)})
    template = _Template(traffic, crossed, links, busy)
    depth = min(depth, traffic.rounds)
    simulated = min(traffic.rounds, 2 * max(_SETTLING_ROUNDS, depth + len(traffic.stages)) + 1)
    done = template.run(
        simulated,
        least_s=binding_s / traffic.rounds,
        depth=depth,
        overhead_s=round_overhead_s,
        message_overhead_s=message_overhead_s,
        pack_bytes_per_s=pack_bytes_per_s,
        assemble_bytes_per_s=assemble_bytes_per_s,
    )
    # In the rounds that were simulated the busiest link may not have been held up by all that it has to carry.
    round_s = max(_pace(done, depth), binding_s / traffic.rounds)
    ends = done[-1] + (traffic.rounds - simulated) * round_s
    ends += max(0.0, binding_s - float(ends.max()))
    stalls = dict.fromkeys(traffic.workers, 0.0)
    stalls |= {links.workers[worker]: float(end) for worker, end in zip(busy, ends, strict=True)}
    end_to_end_s = float(ends.max())
    return Timeline(
        end_to_end_s=end_to_end_s,
        stall_s=sum(stalls.values()) / len(stalls),
        lower_bound_s=traffic.lower_bound_s,
        ratio_to_bound=end_to_end_s / traffic.lower_bound_s if traffic.lower_bound_s else math.inf,
        binding_link=binding,
        binding_s=binding_s,
        rounds=traffic.rounds,
        round_s=round_s,
        stalls_s=stalls,
    )


def _check(round_overhead_s: float, message_overhead_s: float, depth: int, *rates: float) -> None:
    for name, value in (("round_overhead_s", round_overhead_s), ("message_overhead_s", message_overhead_s)):
        if not isinstance(value, (int, float)) or not 0 <= value <= MOST_SECONDS:
            raise PlanError(f"{name} is {value!r}; expected seconds of at least 0, at most {MOST_SECONDS:g}")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise PlanError(f"depth is {depth!r}; expected at least one round under way")
    for name, value in zip(("pack_bytes_per_s", "assemble_bytes_per_s"), rates, strict=True):
        if not isinstance(value, (int, float)) or not value > 0:
            raise PlanError(f"{name} is {value!r}; expected bytes per second above zero")


def _binding(flows: Sequence[Flow], crossed: Sequence[tuple[int, ...]], links: Links) -> tuple[str, float]:
    loads = np.zeros(len(links.names))
    for flow, numbers in zip(flows, crossed, strict=True):
        for link in numbers:
            loads[link] += flow.bytes
    times = loads / links.bytes_per_s
    worst = int(times.argmax())
    return links.names[worst], float(times[worst])


def _pace(done: Floats, depth: int) -> float:
    """Seconds a round in the middle of some rounds, which are alike; their pattern may repeat every ``depth``."""
    rounds = len(done)
    if rounds < 2:
        return float(done[-1].max())
    finished = done.max(axis=1)
    margin = min(_SETTLING_ROUNDS // 2, (rounds - 2) // 2)
    first, last = margin, rounds - 1 - margin
    if last - first > depth:
        last -= (last - first) % depth
    return float((finished[last] - finished[first]) / (last - first))


class _Template:
    """One round as the arrays that the kernel takes; workers without traffic are left out."""

    def __init__(self, traffic: Traffic, crossed: Sequence[tuple[int, ...]], links: Links, busy: Sequence[int]) -> None:
        place = {links.workers[worker]: position for position, worker in enumerate(busy)}
        self._name, self._stages = traffic.name, len(traffic.stages)
        keys = np.array([place[flow.source] * self._stages + flow.stage for flow in traffic.flows], dtype=np.int64)
        order = np.argsort(keys, kind="stable")
        ordered = [traffic.flows[position] for position in order]
        self._source = np.array([place[flow.source] for flow in ordered], dtype=np.int64)
        self._target = np.array([place[flow.target] for flow in ordered], dtype=np.int64)
        stage = np.array([flow.stage for flow in ordered], dtype=np.int64)
        part = np.array([flow.bytes for flow in ordered], dtype=np.float64) / traffic.rounds
        self._size = part
        self._out_starts = np.searchsorted(keys[order], np.arange(len(busy) * self._stages + 1))
        self._arriving = np.zeros((len(busy), self._stages), dtype=np.int64)
        np.add.at(self._arriving, (self._target, stage), 1)
        self._sending = np.diff(self._out_starts).reshape(len(busy), self._stages)
        self._packed = np.array(
            [traffic.packed_bytes.get(links.workers[worker], 0) / traffic.rounds for worker in busy], dtype=np.float64
        )
        received = np.zeros(len(busy))
        np.add.at(received, self._target, part)
        needers = set(traffic.needers)
        self._assembled = received * np.array([links.workers[worker] in needers for worker in busy])
        numbers = [crossed[position] for position in order]
        self._link_starts = np.cumsum([0, *(len(each) for each in numbers)])
        self._link_numbers = np.array([link for each in numbers for link in each], dtype=np.int64)
        self._bytes_per_s = links.bytes_per_s

    def run(
        self,
        rounds: int,
        *,
        least_s: float,
        depth: int,
        overhead_s: float,
        message_overhead_s: float,
        pack_bytes_per_s: float,
        assemble_bytes_per_s: float,
    ) -> Floats:
        """When every busy worker is done with each of these many rounds."""
        done = run_rounds(
            rounds,
            depth,
            self._stages,
            self._source,
            self._target,
            self._size,
            self._out_starts,
            self._arriving,
            self._link_starts,
            self._link_numbers,
            self._bytes_per_s,
            overhead_s,
            message_overhead_s * self._sending,
            self._packed / pack_bytes_per_s,
            self._assembled / assemble_bytes_per_s,
            0.0 if len(self._size) <= _EXACT_FLOWS else least_s / _GRAINS,
        )
        if np.isnan(done).any():
            raise PlanError(f"{self._name}: workers wait for each other; a stage needs what a later one brings")
        return done
