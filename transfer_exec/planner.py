"""From a demand and a cluster to a plan.

``make_plan`` is a pure function: place the demand classes in nodes, divide them over workers by a linear program,
cut them into routes, choose the number of rounds, and check every law of the result.

>>> from layout_algebra.correspondence import correspond
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (8,), "F32")])
>>> whole = SourceMap.from_ids(space, {"w": np.arange(1, 9)})
>>> topology = Topology.uniform(
...     trainers=1, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=50e9, local_bytes_per_s=900e9)
>>> plan = make_plan(
...     correspond({"trainer/0": whole}, {"engine/0/0": whole, "engine/0/1": whole}), topology, buffer_bytes=1024)
>>> for move in plan.moves():
...     print(move.stage.name, move.source, move.target, move.runs.ids())
RECEIVE trainer/0 engine/0/0 [1 2 3 4]
RECEIVE trainer/0 engine/0/1 [5 6 7 8]
INTERNAL engine/0/0 engine/0/1 [1 2 3 4]
INTERNAL engine/0/1 engine/0/0 [5 6 7 8]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layout_algebra.correspondence import Correspondence
from transfer_exec.balance import balance
from transfer_exec.bound import lower_bound
from transfer_exec.demand import place_demand
from transfer_exec.demand_laws import check_demand
from transfer_exec.hops import HopTable
from transfer_exec.links import Links
from transfer_exec.plan import Plan, Route
from transfer_exec.rounds import checked_budget, count_rounds, rounds_worth
from transfer_exec.routes import make_routes
from transfer_exec.together import Unit, group_rounds
from transfer_exec.topology import Topology


def make_plan(
    correspondence: Correspondence,
    topology: Topology,
    *,
    buffer_bytes: int,
    round_overhead_s: float | None = None,
    depth: int = 2,
    keep_together: Unit | None = None,
) -> Plan:
    """Plan one update of all needers.

    Parameters
    ----------
    correspondence
        Who holds and who needs which ids.
    topology
        Where the workers are; every one of the correspondence's must be in it.
    buffer_bytes
        Budget per worker and round, for what it receives in one stage and for the distinct bytes it packs.
    round_overhead_s
        What a round costs a worker; then there may be more rounds than the budget needs, to fill the pipeline sooner
        (``rounds_worth``). By default as few as fit.
    depth
        Rounds under way at once, which that choice depends on.
    keep_together
        ``"tensor"`` keeps every checkpoint tensor in one round, a number so many rows of every matrix (``together``).
        Rounds are then only as equal as these pieces allow, and there may be more of them. By default rounds cut
        anywhere and are equal.

    Returns
    -------
    Plan
        The same for equal arguments, in whatever order their parts were given.

    Raises
    ------
    UnheldError
        If somebody needs an element that nobody holds.
    BudgetError
        If one element, or what is kept together, does not fit into ``buffer_bytes``, the budget or the depth is no
        whole number of at least 1, or the overhead is negative.
    TopologyError
        If a worker is in no node.
    """
    buffer_bytes = checked_budget(buffer_bytes, round_overhead_s, depth)
    links = Links.of(topology, correspondence.holders, correspondence.needers)
    demands = place_demand(correspondence, links)
    bound = lower_bound(demands, links)
    division = balance(demands, links, bound_s=bound.seconds)
    routes = make_routes(correspondence, demands, division.shares, links)
    hops = HopTable.of(routes, links.workers)
    load_s = largest_load_s(routes, links, hops)
    at_least = 1 if round_overhead_s is None else rounds_worth(load_s, round_overhead_s, depth)
    if keep_together is None:
        groups, rounds = None, count_rounds(routes, buffer_bytes, at_least=at_least, hops=hops)
    else:
        groups, rounds = group_rounds(routes, correspondence.space, keep_together, buffer_bytes, at_least=at_least)
    plan = Plan(
        space_digest=correspondence.space.digest(),
        holders=correspondence.holders,
        needers=correspondence.needers,
        nodes=links.node,
        routes=routes,
        rounds=rounds,
        buffer_bytes=buffer_bytes,
        lower_bound_s=bound.seconds,
        bound_link=bound.link,
        # The solver is off by its tolerance; a bound from below and a plan from above are exact.
        optimum_s=max(bound.seconds, min(division.optimum_s, load_s)),
        load_s=load_s,
        clusters=links.cluster if links.between else (),
        groups=groups,
        table=hops,
    )
    check_demand(plan, correspondence)
    return plan


def largest_load_s(routes: Sequence[Route], links: Links, hops: HopTable) -> float:
    """The longest time, bytes over bandwidth, that any link needs for these routes and their hops."""
    count = len(links.bytes_per_s)
    carried = np.array([route.bytes for route in routes], dtype=np.float64)[hops.route]
    node, cluster = np.array(links.node), np.array(links.cluster)
    inside = node[hops.source] == node[hops.target]
    loads = np.zeros(count)
    for ends, local, outer in (
        (hops.source, links.local_egress, links.egress),
        (hops.target, links.local_ingress, links.ingress),
    ):
        crossed = np.where(inside, np.array(local)[ends], np.array(outer)[ends])
        loads += np.bincount(crossed, carried, minlength=count)
    for (near, far), link in links.between.items():
        loads[link] += carried[(cluster[hops.source] == near) & (cluster[hops.target] == far)].sum()
    return float((loads / links.bytes_per_s).max(initial=0.0))


def round_load_over_average(plan: Plan, topology: Topology) -> float:
    """The longest time of any link in any round, over that of the busiest link in an average round.

    Equal rounds give 1, give or take an element a route; where pieces are kept together it says what that costs.
    """
    links = Links.of(topology, plan.holders, plan.needers)
    number = {worker: position for position, worker in enumerate(links.workers)}
    crossing: dict[tuple[int, int], int] = {}
    for index, route in enumerate(plan.routes):
        for hop in route.hops:
            for link in links.crossed(number[hop.source], number[hop.target]):
                crossing[link, index] = crossing.get((link, index), 0) + route.item_bytes
    if not plan.load_s:
        return 1.0
    longest = 0.0
    keys = np.array(list(crossing), dtype=np.int64)
    weights = np.array(list(crossing.values()), dtype=np.float64) / links.bytes_per_s[keys[:, 0]]
    for first in range(plan.rounds):
        elements = plan.schedule.elements(first, first + 1)[:, 0]
        times = np.bincount(keys[:, 0], weights * elements[keys[:, 1]])
        longest = max(longest, float(times.max()))
    return longest * plan.rounds / plan.load_s
