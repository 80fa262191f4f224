"""The laws between a plan and the demand it serves, checked in time linear in their size.

Everybody gets what they need, no node gets anything else, what a node holds does not cross the network, and what a
cluster holds and needs does not come from another cluster. What holds for any plan, whatever the demand, is in
`transfer_exec.laws`.
"""

from __future__ import annotations

import numpy as np

from layout_algebra.correspondence import Correspondence, DemandClass
from layout_algebra.dtypes import IdArray
from transfer_exec.errors import PlanError
from transfer_exec.laws import sorted_spans, tiles_of
from transfer_exec.plan import Plan
from transfer_exec.tiles import Share, Tile

_RECEIVE, _INTERNAL = 0, 2


def check_demand(plan: Plan, correspondence: Correspondence) -> None:
    """Check that a plan serves a demand, no more and no less.

    Raises
    ------
    PlanError
        Naming class, tensor, range and workers.
    """
    node_of = dict(zip(plan.workers, plan.nodes, strict=True))
    cluster_of = dict(zip(plan.workers, plan.clusters or (0,) * len(plan.workers), strict=True))
    classes = correspondence.classes
    class_of, sizes = _classes_of_routes(plan, correspondence)
    if _serves(plan, correspondence, np.array(class_of, dtype=np.int64), np.array(sizes, dtype=np.int64)):
        return
    members: list[list[int]] = [[] for _ in classes]
    for index, number in enumerate(class_of):
        members[number].append(index)
    for number, group in enumerate(classes):
        place = _Place(correspondence, number, group)
        held_at = {node_of[worker] for worker in group.holders}
        needing = {node_of[worker] for worker in group.needers}
        lacking = {cluster_of[worker] for worker in group.needers if node_of[worker] not in held_at}
        near = lacking & {cluster_of[worker] for worker in group.holders}
        received: dict[str, int] = {}
        for index in members[number]:
            route = plan.routes[index]
            if route.item_bytes != group.item_bytes:
                raise place.broken(f"route {index} has elements of {route.item_bytes} bytes, not {group.item_bytes}")
            if route.holder not in group.holders:
                raise place.broken(f"{route.holder} packs it and does not hold it; holders {', '.join(group.holders)}")
            for hop in route.hops:
                received[hop.target] = received.get(hop.target, 0) + sizes[index]
                if hop.stage.value == _INTERNAL:
                    if hop.target not in group.needers:
                        raise place.broken(f"{hop.target} gets it from {hop.source} and does not need it")
                    continue
                node = node_of[hop.target]
                if node not in needing:
                    raise place.broken(f"node {node} gets it through {hop.target} and nobody there needs it")
                if node in held_at:
                    raise place.broken(f"node {node} holds it and still gets it over the network at {hop.target}")
                crossing = (cluster_of[hop.source], cluster_of[hop.target])
                if near and hop.stage.value == _RECEIVE and not crossing[0] == crossing[1] in near:
                    raise place.broken(
                        f"{hop.source} -> {hop.target} crosses clusters that it need not; expected holder and first "
                        f"receiver in one of the clusters {sorted(near)}, which hold it and need it"
                    )
        for worker in group.needers:
            if received.get(worker, 0) != group.runs.elements:
                raise place.broken(f"{worker} gets {received.get(worker, 0)} of {group.runs.elements} elements")


def _serves(plan: Plan, correspondence: Correspondence, class_of: IdArray, sizes: IdArray) -> bool:
    """Whether ``check_demand`` will find nothing, for all hops at once."""
    number = {worker: position for position, worker in enumerate(plan.workers)}
    classes, workers = correspondence.classes, len(plan.workers)
    node = np.array(plan.nodes, dtype=np.int64)
    cluster = np.array(plan.clusters or (0,) * workers, dtype=np.int64)
    holds, needs = np.zeros((len(classes), workers), dtype=bool), np.zeros((len(classes), workers), dtype=bool)
    held_at, needed_at = (np.zeros((len(classes), int(node.max(initial=0)) + 1), dtype=bool) for _ in range(2))
    near = np.zeros((len(classes), int(cluster.max(initial=0)) + 1), dtype=bool)
    for row, group in enumerate(classes):
        holders = np.array([number[worker] for worker in group.holders], dtype=np.int64)
        needers = np.array([number[worker] for worker in group.needers], dtype=np.int64)
        holds[row, holders], needs[row, needers] = True, True
        held_at[row, node[holders]], needed_at[row, node[needers]] = True, True
        near[row, cluster[needers[~held_at[row, node[needers]]]]] = True
        near[row, np.setdiff1d(np.arange(near.shape[1]), cluster[holders])] = False
    widths = np.array([group.item_bytes for group in classes], dtype=np.int64)
    mine = np.array([route.item_bytes for route in plan.routes], dtype=np.int64)
    holder = np.array([number[route.holder] for route in plan.routes], dtype=np.int64)
    if not bool(np.all(mine == widths[class_of]) and np.all(holds[class_of, holder])):
        return False
    hops = plan.hops
    kind, inside = class_of[hops.route], hops.stage == _INTERNAL
    good = np.where(
        inside, needs[kind, hops.target], needed_at[kind, node[hops.target]] & ~held_at[kind, node[hops.target]]
    )
    same = cluster[hops.source] == cluster[hops.target]
    lawful = ~np.asarray(near.any(axis=1))[kind] | (same & near[kind, cluster[hops.target]]) | (hops.stage != _RECEIVE)
    received = np.zeros(len(classes) * workers, dtype=np.int64)
    np.add.at(received, kind * workers + hops.target, sizes[hops.route])
    elements = np.array([each.runs.elements for each in classes], dtype=np.int64)
    whole = received.reshape(len(classes), workers) == elements[:, None]
    return bool(np.all(good & lawful) and np.all(whole | ~needs))


class _Place:
    """Where a law broke, for messages."""

    def __init__(self, correspondence: Correspondence, number: int, group: DemandClass) -> None:
        self._correspondence, self._number, self._group = correspondence, number, group

    def broken(self, what: str) -> PlanError:
        start, stop = self._group.runs.intervals[0].tolist()
        where = self._correspondence.space.describe_ids(start, stop)
        more = len(self._group.runs.intervals) - 1
        rest = f" and {more} more ranges" if more else ""
        return PlanError(f"class {self._number}, {where}{rest}: {what}")


def _classes_of_routes(plan: Plan, correspondence: Correspondence) -> tuple[list[int], list[int]]:
    """Class and size of every route; a route must lie within one class."""
    sizes = [route.runs.elements for route in plan.routes]
    if not plan.routes:
        return [], []
    classes_of, routes_of = (
        tiles_of([g.runs for g in correspondence.classes]),
        tiles_of([r.runs for r in plan.routes]),
    )
    shares = classes_of.within(routes_of.rows[:, :4])
    kind, route = classes_of.rows[shares[:, Share.TILE], Tile.TENSOR], routes_of.rows[shares[:, Share.RUN], Tile.TENSOR]
    found = np.zeros(len(sizes), dtype=np.int64)
    found[route] = kind
    inside = np.zeros(len(sizes), dtype=np.int64)
    same = found[route] == kind
    np.add.at(inside, route[same], (shares[:, Share.LENGTH] * shares[:, Share.COUNT])[same])
    if inside.tolist() == sizes:
        return found.tolist(), sizes
    spans, owner = sorted_spans([group.runs for group in correspondence.classes])
    counts = [len(route.runs.intervals) for route in plan.routes]
    flat = np.concatenate([route.runs.intervals for route in plan.routes])
    begins = np.cumsum(counts) - counts
    # A class's intervals are maximal, so an interval of a route lies in one of them or the route is unlawful.
    position = np.searchsorted(spans[:, 0], flat[:, 0], side="right") - 1
    lost = position < 0
    if len(spans):
        lost |= flat[:, 1] > spans[position, 1]
        lost |= owner[position] != np.repeat(owner[position[begins]], counts)
    if lost.any():
        at = int(np.argmax(lost))
        index = int(np.searchsorted(begins, at, side="right")) - 1
        start, stop = flat[at].tolist()
        raise PlanError(f"route {index}: ids {start}:{stop} do not lie in one demand class with the route's others")
    classes: list[int] = owner[position[begins]].tolist()
    return classes, sizes
