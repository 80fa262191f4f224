"""The laws that hold for any plan, checked whenever one is made, in time linear in its size.

Routes are disjoint, hops follow each other from holder to first receiver to gateways to entry workers to their nodes,
each stage has the right kind of workers, a node gets an id over the network once at most, a cluster from other clusters
once at most, and no worker gets it twice. Whether a plan serves its demand is in `transfer_exec.demand_laws`.

Every law is checked for all hops at once; only a plan that breaks one is walked through for the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import RunTable
from transfer_exec.errors import PlanError
from transfer_exec.tiles import Share, TileTable, tiles_of_runs

if TYPE_CHECKING:
    from transfer_exec.hops import HopTable
    from transfer_exec.plan import Plan, Route
    from transfer_exec.schedule import Groups

_RECEIVE, _EXTERNAL, _INTERNAL = 0, 1, 2
_CELLS = 1 << 22
"""Routes times workers looked at in one step."""


def check_structure(plan: Plan) -> None:
    """Check what holds for any plan, whatever the demand.

    Raises
    ------
    PlanError
        Naming route, ids and workers.
    """
    _check_fields(plan)
    node_of = dict(zip(plan.workers, plan.nodes, strict=True))
    cluster_of = dict(zip(plan.workers, plan.clusters or (0,) * len(plan.workers), strict=True))
    holders = set(plan.holders)
    for index, route in enumerate(plan.routes):
        if not route.runs or route.item_bytes < 1:
            raise PlanError(f"route {index}: {route.runs.elements} elements of {route.item_bytes} bytes; expected some")
    if not _hops_follow(plan):
        for index, route in enumerate(plan.routes):
            _check_hops(index, route, node_of, cluster_of, holders)
    _check_disjoint(plan, node_of)


def _check_fields(plan: Plan) -> None:
    workers = plan.workers
    if len(set(workers)) != len(workers):
        raise PlanError("a worker is named twice in the plan; give holders and needers names of their own")
    if len(plan.nodes) != len(workers):
        raise PlanError(f"plan has {len(plan.nodes)} node numbers for {len(workers)} workers")
    if len(plan.clusters) not in (0, len(workers)):
        raise PlanError(f"plan has {len(plan.clusters)} cluster numbers for {len(workers)} workers")
    if plan.groups is not None:
        _check_groups(plan, plan.groups)
    if plan.clusters and len(set(zip(plan.nodes, plan.clusters, strict=True))) != len(set(plan.nodes)):
        raise PlanError("a node of the plan is in two clusters")
    if plan.rounds < 1 or plan.buffer_bytes < 1:
        raise PlanError(f"plan has {plan.rounds} rounds and a buffer of {plan.buffer_bytes} bytes; expected 1 or more")


def _check_groups(plan: Plan, groups: Groups) -> None:
    starts, rounds = groups.starts, groups.rounds
    if starts.shape != rounds.shape or starts.ndim != 1 or bool(np.any(starts[1:] <= starts[:-1])):
        raise PlanError("a plan's groups do not ascend, or have not one round each")
    if len(rounds) and not 0 <= int(rounds.min()) <= int(rounds.max()) < plan.rounds:
        raise PlanError(f"a group of ids has a round outside 0:{plan.rounds}")
    first = min((int(route.runs.intervals[0, 0]) for route in plan.routes if route.runs), default=None)
    if first is not None and (not len(starts) or first < int(starts[0])):
        raise PlanError(f"id {first} is in no group of ids")


def _hops_follow(plan: Plan) -> bool:
    """Whether ``_check_hops`` will find nothing, for all hops at once."""
    workers = len(plan.workers)
    number = {worker: position for position, worker in enumerate(plan.holders)}
    holders = np.array([number.get(route.holder, -1) for route in plan.routes], dtype=np.int64)
    hops = plan.hops
    if bool(np.any(holders < 0) or np.any(hops.counts == 0) or np.any(hops.source < 0) or np.any(hops.target < 0)):
        return False
    at_once = max(1, _CELLS // max(1, workers))
    return all(_chunk_follows(plan, part, holders[first : first + at_once]) for first, part in hops.chunks(at_once))


def _chunk_follows(plan: Plan, hops: HopTable, holders: IdArray) -> bool:
    """The same for the hops of some routes, with the routes' holders."""
    workers = len(plan.workers)
    holder, node = holders[hops.route], np.array(plan.nodes, dtype=np.int64)
    cluster = np.array(plan.clusters or (0,) * workers, dtype=np.int64)
    place = np.arange(len(hops.route))
    # Every worker gets a route once, and sends it on only after that; a holder has it from the start.
    got = hops.route * workers + hops.target
    when = np.full(len(holders) * workers, -1, dtype=np.int64)
    when[got] = place
    if bool(np.any(when[got] != place) or np.any(hops.target < len(plan.holders))):
        return False
    before = when[hops.route * workers + hops.source]
    packs = hops.source == holder
    if bool(np.any(~packs & ((before < 0) | (before >= place)))):
        return False
    begins = np.cumsum(hops.counts) - hops.counts
    falls = np.diff(hops.stage) < 0
    falls[begins[1:] - 1] = False
    inside, receives = hops.stage == _INTERNAL, hops.stage == _RECEIVE
    stays = node[hops.source] == node[hops.target]
    passes_on = inside & ~packs & (hops.stage[before] == _INTERNAL)
    comes_home = ~inside & (node[hops.target] == node[holder])
    wrong_source = receives & ~packs
    if bool(falls.any() or np.any(stays != inside) or np.any(passes_on | comes_home | wrong_source)):
        return False
    # Over the network a route enters a node once, and a cluster through its root: the first hop into it.
    outer = np.flatnonzero(~inside)
    entered = hops.route[outer] * (int(node.max(initial=0)) + 1) + node[hops.target[outer]]
    clusters = int(cluster.max(initial=0)) + 1
    into = hops.route[outer] * clusters + cluster[hops.target[outer]]
    first, which = np.unique(into, return_index=True, return_inverse=True)[1:]
    root = hops.target[outer][first][which]
    opens = np.zeros(len(outer), dtype=bool)
    opens[first] = True
    receiver = np.full(len(holders), -1, dtype=np.int64)
    receiver[hops.route[receives]] = hops.target[receives]
    external = ~receives[outer]
    expected = np.where(opens, receiver[hops.route[outer]], root)
    returns = external & opens & (cluster[hops.target[outer]] == cluster[holder[outer]])
    return bool(
        len(np.unique(entered)) == len(entered)
        and np.bincount(hops.route[receives], minlength=1).max() <= 1
        and not np.any(external & (hops.source[outer] != expected))
        and not returns.any()
    )


def _check_hops(
    index: int, route: Route, node_of: dict[str, int], cluster_of: dict[str, int], holders: set[str]
) -> None:
    def broken(what: str) -> PlanError:
        start, stop = route.runs.intervals[0].tolist()
        return PlanError(f"route {index} (ids {start}:{stop} and on, packed by {route.holder}): {what}")

    if route.holder not in holders:
        raise broken("its holder is not among the plan's holders")
    if not route.hops:
        raise broken("it goes nowhere")
    first_receiver = ""
    entered: dict[int, str] = {}
    roots: dict[int, str] = {}
    got = {route.holder}
    stage = _RECEIVE
    for hop in route.hops:
        step = hop.stage.value
        if hop.source not in node_of or hop.target not in node_of:
            raise broken(f"hop {hop.source} -> {hop.target} names a worker that is not in the plan")
        if step < stage:
            raise broken(f"{hop.stage.name} hop to {hop.target} after a later stage; expected hops in stage order")
        stage = step
        if hop.target in holders or hop.target in got:
            raise broken(f"{hop.target} gets what it has already")
        if hop.source not in got:
            raise broken(f"{hop.source} sends to {hop.target} what it has not got yet")
        inside = node_of[hop.source] == node_of[hop.target]
        if step == _INTERNAL:
            if not inside:
                raise broken(f"INTERNAL hop {hop.source} -> {hop.target} leaves node {node_of[hop.source]}")
            if hop.source != route.holder and hop.source != entered.get(node_of[hop.source]):
                raise broken(f"{hop.source} passes on what it got inside its node; expected holder or entry worker")
        else:
            if inside or node_of[hop.target] == node_of[route.holder]:
                raise broken(f"{hop.stage.name} hop to {hop.target} crosses the network into the holder's node")
            if node_of[hop.target] in entered:
                raise broken(f"{hop.target} gets over the network what {entered[node_of[hop.target]]} of its node got")
            if step == _RECEIVE:
                if first_receiver or hop.source != route.holder:
                    raise broken("RECEIVE comes from the holder and goes to one first receiver")
                first_receiver = hop.target
                roots[cluster_of[hop.target]] = hop.target
            else:
                cluster = cluster_of[hop.target]
                expected = roots.get(cluster, first_receiver)
                if hop.source != expected:
                    who = "the first receiver" if expected == first_receiver else "the gateway"
                    raise broken(f"EXTERNAL hop from {hop.source}; expected {who} {expected or 'none'}")
                if cluster not in roots and cluster == cluster_of[route.holder]:
                    raise broken(f"EXTERNAL hop to {hop.target} goes back into the holder's cluster")
                roots.setdefault(cluster, hop.target)
            entered[node_of[hop.target]] = hop.target
        got.add(hop.target)


def _check_disjoint(plan: Plan, node_of: dict[str, int]) -> None:
    """Routes have the same ids or none in common, and those with the same differ in all that they do."""
    groups: dict[bytes, list[int]] = {}
    previous = -1
    for index, route in enumerate(plan.routes):
        first = int(route.runs.runs[0, 0])
        if first < previous:
            raise PlanError(f"route {index} begins with id {first}, before the route in front of it")
        previous = first
        groups.setdefault(route.runs.runs.tobytes(), []).append(index)
    tables = [plan.routes[same[0]].runs for same in groups.values()]
    clash = _first_overlap(tables)
    if clash is not None:
        one, other, start, stop = clash
        indices = [same[0] for same in groups.values()]
        raise PlanError(f"routes {indices[one]} and {indices[other]} both carry ids {start}:{stop}, among others")
    for same in groups.values():
        if len(same) > 1:
            _check_twins(plan, same, node_of)


def _check_twins(plan: Plan, same: Sequence[int], node_of: dict[str, int]) -> None:
    routes = [plan.routes[index] for index in same]
    packers = [route.holder for route in routes]
    targets = [hop.target for route in routes for hop in route.hops]
    sent = [route for route in routes if route.hops[0].stage.value == _RECEIVE]
    entered = {node_of[hop.target] for route in sent for hop in route.hops if hop.stage.value != _INTERNAL}
    if len(set(packers)) != len(packers):
        raise PlanError(f"routes {list(same)} have the same ids and the same holder; make them one route")
    if len(set(targets)) != len(targets):
        raise PlanError(f"routes {list(same)} have the same ids and reach a worker twice")
    if len(sent) > 1:
        raise PlanError(f"routes {list(same)} have the same ids, and trainers send them over the network twice")
    for worker in packers:
        if node_of[worker] in entered:
            raise PlanError(f"routes {list(same)}: node {node_of[worker]} holds their ids and gets them by network")
    if len({route.item_bytes for route in routes}) > 1:
        raise PlanError(f"routes {list(same)} have the same ids and different widths")


def _first_overlap(tables: Sequence[RunTable]) -> tuple[int, int, int, int] | None:
    """Two tables that share ids, and an interval they share; None if there are none."""
    tiles = tiles_of(tables)
    shares = tiles.within(tiles.rows[:, :4])
    if bool(np.all(shares[:, Share.TILE] == shares[:, Share.RUN])):
        return None
    spans, owner = sorted_spans(tables)
    bad = np.flatnonzero(spans[1:, 0] < spans[:-1, 1])
    if not len(bad):
        return None
    at = int(bad[0])
    stop = min(int(spans[at, 1]), int(spans[at + 1, 1]))
    return int(owner[at]), int(owner[at + 1]), int(spans[at + 1, 0]), stop


def tiles_of(tables: Sequence[RunTable]) -> TileTable:
    """The runs of some tables, each with the table's position."""
    runs = np.concatenate([np.empty((0, 4), dtype=np.int64), *(table.runs for table in tables)])
    return tiles_of_runs(runs, np.repeat(np.arange(len(tables)), [len(table) for table in tables]))


def sorted_spans(tables: Sequence[RunTable]) -> tuple[IdArray, IdArray]:
    """The intervals of some tables in ascending order, and the table of each."""
    if not tables:
        return np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.int64)
    spans = np.concatenate([table.intervals for table in tables])
    owner = np.repeat(np.arange(len(tables)), [len(table.intervals) for table in tables])
    order = np.argsort(spans[:, 0], kind="stable")
    return spans[order], owner[order]
