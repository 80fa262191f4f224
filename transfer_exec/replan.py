"""Planning again when workers come or go, without looking at maps again.

A worker that leaves takes its name out of every demand class; one that joins and has the same map as a worker that is
there stands in every class beside it. Classes that become alike are joined, those that nobody needs any more are gone.
Maps are neither read nor intersected, which is most of the work before a plan; a worker with a map that nobody has yet
needs ``correspond``.

>>> import numpy as np
>>> from layout_algebra.correspondence import correspond
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (6,), "F32")])
>>> whole = SourceMap.from_ids(space, {"w": np.arange(1, 7)})
>>> half = SourceMap.from_ids(space, {"w": np.arange(3, 7)})
>>> before = correspond({"t": whole}, {"a": whole, "b": half})
>>> for group in change_workers(before, lost=["b"]).classes:
...     print(group.needers, group.runs.ids().tolist())
('a',) [1, 2, 3, 4, 5, 6]
>>> after = correspond({"t": whole}, {"a": whole, "b": half, "c": half})
>>> change_workers(before, joined={"c": "b"}).digest() == after.digest()
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layout_algebra.correspondence import Correspondence, DemandClass
from layout_algebra.space import natural_key
from transfer_exec.errors import PlanError
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.topology import Topology


def replan(
    correspondence: Correspondence,
    topology: Topology,
    *,
    lost: Iterable[str] = (),
    joined: Mapping[str, str] | None = None,
    buffer_bytes: int,
) -> tuple[Correspondence, Plan]:
    """The demand and the plan after workers have left or joined.

    Parameters
    ----------
    correspondence
        The demand before.
    topology
        The cluster after.
    lost
        Workers that are gone: those of an engine, or a trainer replica.
    joined
        New worker -> a worker of the demand before that has the same map; both on one side. It may be a lost one.
    buffer_bytes
        As ``make_plan``.

    Raises
    ------
    PlanError
        As ``change_workers`` and ``make_plan``: UnheldError if a lost trainer was the last holder of something needed.
    """
    changed = change_workers(correspondence, lost=lost, joined=joined)
    return changed, make_plan(changed, topology, buffer_bytes=buffer_bytes)


def change_workers(
    correspondence: Correspondence, *, lost: Iterable[str] = (), joined: Mapping[str, str] | None = None
) -> Correspondence:
    """The correspondence without some workers and with others; the same as intersecting all maps again.

    Raises
    ------
    PlanError
        If a lost worker or a model of a joined one is not there, or a joined one is there already.
    """
    gone, new = set(lost), dict(joined or {})
    there = {*correspondence.holders, *correspondence.needers}
    for worker in sorted(gone - there, key=natural_key):
        raise PlanError(f"{worker}: cannot be lost, it is not among the {len(there)} workers of the plan")
    for worker, model in new.items():
        if model not in there:
            raise PlanError(f"{worker}: joins with the map of {model}, which is not among the workers of the plan")
        if worker in there - gone:
            raise PlanError(f"{worker}: joins, but is there already; name it among the lost ones if it came back")
    copies: dict[str, list[str]] = {}
    for worker, model in new.items():
        copies.setdefault(model, []).append(worker)

    def changed(workers: tuple[str, ...]) -> tuple[str, ...]:
        kept = [worker for worker in workers if worker not in gone]
        added = [worker for model in workers for worker in copies.get(model, ())]
        return tuple(sorted([*kept, *added], key=natural_key)) if added else tuple(kept)

    groups: dict[tuple[tuple[str, ...], tuple[str, ...], int], list[DemandClass]] = {}
    sides: dict[tuple[str, ...], tuple[str, ...]] = {}
    for group in correspondence.classes:
        for workers in (group.holders, group.needers):
            if workers not in sides:
                sides[workers] = changed(workers)
        needers = sides[group.needers]
        if needers:
            groups.setdefault((sides[group.holders], needers, group.item_bytes), []).append(group)
    classes = [
        DemandClass(holders, needers, same[0].runs.union(*(each.runs for each in same[1:])), item_bytes)
        for (holders, needers, item_bytes), same in groups.items()
    ]
    return Correspondence(
        space=correspondence.space,
        holders=changed(correspondence.holders),
        needers=changed(correspondence.needers),
        classes=tuple(sorted(classes, key=lambda group: int(group.runs.runs[0, 0]))),
    )
