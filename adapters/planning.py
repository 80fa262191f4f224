"""From everybody's source maps to one connection: checked coverage, a topology, a plan. Pure.

A connection is refused when an update would silently do less than the user expects: no name in common, elements that a
rollout needs and nobody holds, or a rollout whose loader knows only some of the checkpoint's names. ``allow_partial``
names the tensors or parameters for which that is meant to be so; they keep their old values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from adapters.failures import CoverageError, UsageError
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.residues import holds_codes
from layout_algebra.runs import RunTable
from layout_algebra.source_map import EMPTY, OPAQUE, SourceMap
from layout_algebra.space import CheckpointSpace, natural_key
from transfer_exec.errors import UnheldError
from transfer_exec.host import ASSUMED_NIC_BYTES_PER_S
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.topology import Engine, Node, Topology

__all__ = ["Connection", "group_of", "make_connection", "topology_of_hosts"]

DEFAULT_LOCAL_BYTES_PER_S = 10e9
"""Assumed inside a machine where no topology is given: shared memory on a CPU host."""

ROUND_OVERHEAD_S = 1e-3
"""Assumed cost of a round to every worker. A transfer that takes much longer is cut into more rounds than its buffers
need, so that packing, the wire and assembling overlap."""

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """What an update needs to know.

    Attributes
    ----------
    holders, needers
        Source map per worker; needers' without what they may keep.
    correspondence, plan
        As made from them.
    kept
        Parameters that keep some old values, as ``worker: parameter``.
    """

    holders: Mapping[str, SourceMap]
    needers: Mapping[str, SourceMap]
    correspondence: Correspondence
    plan: Plan
    kept: tuple[str, ...]

    @property
    def maps(self) -> dict[str, SourceMap]:
        """Of all workers, in the plan's order."""
        return {**self.holders, **self.needers}


def group_of(worker: str) -> str:
    """``"trainer"`` for ``"trainer/3"``, ``"engine/a"`` for ``"engine/a/0"``."""
    return worker.rpartition("/")[0]


def make_connection(
    holders: Mapping[str, SourceMap],
    needers: Mapping[str, SourceMap],
    topology: Topology,
    *,
    buffer_bytes: int,
    allow_partial: Collection[str] = (),
    cast: bool = False,
) -> Connection:
    """Check the maps against each other and plan.

    Raises
    ------
    CoverageError
        If the two sides have no checkpoint tensor in common, or a rollout's loader leaves parameters untouched that
        look like tensors it does not use.
    UnheldError
        If a rollout needs elements that no trainer holds, naming tensors, ranges and ranks.
    UsageError
        If ``allow_partial`` names something that does not exist.
    CorrespondenceError, PlanError
        As ``correspond`` and ``make_plan`` raise them.
    """
    _check_allowed(allow_partial, holders, needers)
    _check_common(holders, needers)
    _check_loaders(needers, allow_partial)
    correspondence = correspond(holders, needers, cast=cast)
    kept: tuple[str, ...] = ()
    if correspondence.unheld():
        needers, kept = _without_unheld(correspondence, holders, needers, allow_partial)
        correspondence = correspond(holders, needers, cast=cast)
    plan = make_plan(correspondence, topology, buffer_bytes=buffer_bytes, round_overhead_s=ROUND_OVERHEAD_S)
    return Connection(holders, needers, correspondence, plan, kept)


def topology_of_hosts(hosts: Mapping[str, str]) -> Topology:
    """Workers of one host form a node; bandwidths are assumed, see the constants above.

    Parameters
    ----------
    hosts
        Worker -> identity of its machine.
    """
    members: dict[str, list[str]] = {}
    for worker in sorted(hosts, key=natural_key):
        members.setdefault(hosts[worker], []).append(worker)
    engines: dict[str, list[str]] = {}
    for worker in sorted(hosts, key=natural_key):
        if worker.startswith("engine/"):
            engines.setdefault(group_of(worker), []).append(worker)
    return Topology(
        (
            Node.of(
                f"host {number}",
                workers,
                nic_bytes_per_s=ASSUMED_NIC_BYTES_PER_S,
                local_bytes_per_s=DEFAULT_LOCAL_BYTES_PER_S,
            )
            for number, workers in enumerate(members.values())
        ),
        (Engine(name, tuple(workers)) for name, workers in engines.items()),
    )


def _check_allowed(
    allowed: Collection[str], holders: Mapping[str, SourceMap], needers: Mapping[str, SourceMap]
) -> None:
    for name in allowed:
        maps = [*holders.values(), *needers.values()]
        if not any(name in each.space or name in each for each in maps):
            raise UsageError(f"allow_partial names {name}, which is neither a checkpoint tensor nor a parameter")


def _check_common(holders: Mapping[str, SourceMap], needers: Mapping[str, SourceMap]) -> None:
    held, needed = _used(holders.values()), _used(needers.values())
    if held & needed:
        return
    raise CoverageError(
        f"trainers and rollouts have no checkpoint tensor in common: trainers hold {_listed(held)}, rollouts need "
        f"{_listed(needed)}; give both sides a checkpoint in the engine's own names"
    )


def _check_loaders(needers: Mapping[str, SourceMap], allowed: Collection[str]) -> None:
    """Refuse an engine that leaves tensors unused while parameters that look like them stay untouched."""
    engines: dict[str, list[SourceMap]] = {}
    for worker in sorted(needers, key=natural_key):
        engines.setdefault(group_of(worker), []).append(needers[worker])
    for engine, maps in engines.items():
        used = _used(maps)
        unused = [spec for spec in maps[0].space.specs if spec.name not in used and spec.elements]
        filled = {name for each in maps for name in each.parameters if len(each[name].copies) or each[name].opaque}
        suspects = []
        for name in sorted({n for each in maps for n in each.parameters if each[n].elements} - filled, key=natural_key):
            entry = next(each[name] for each in maps if name in each and each[name].elements)
            alike = [s.name for s in unused if _tail(s.name) == _tail(name) or s.elements == entry.elements]
            may_keep = name in allowed or bool(set(alike) & set(allowed))
            if alike and not may_keep and dtype_of(entry.dtype).kind == "float":
                suspects.append(name)
        if suspects:
            touched = len({n for each in maps for n in each.parameters}) - len(suspects)
            raise CoverageError(
                f"{engine}: its loader filled {touched} of {touched + len(suspects)} parameters; {_listed(suspects)} "
                f"got nothing, and it did not use {len(unused)} checkpoint tensors: {_listed(s.name for s in unused)}. "
                "Rename one side, or name them in allow_partial if they are meant to keep their values"
            )


def _without_unheld(
    correspondence: Correspondence,
    holders: Mapping[str, SourceMap],
    needers: Mapping[str, SourceMap],
    allowed: Collection[str],
) -> tuple[dict[str, SourceMap], tuple[str, ...]]:
    """Needers' maps without the unheld elements that may keep old values; all others are refused."""
    space = correspondence.space
    unheld = [group.runs for group in correspondence.unheld()]
    missing = unheld[0].union(*unheld[1:])
    may_keep = RunTable.from_intervals([space.id_range(name) for name in allowed if name in space])
    out, kept = dict(needers), []
    refused: dict[str, RunTable] = {}
    for worker, source_map in needers.items():
        changed = {}
        for name in _touched(source_map, missing):
            entry = source_map[name]
            ids = source_map.ids(name)
            copied = RunTable.from_ids(ids[ids > EMPTY]).intersect(missing)
            unfed = [_ids_of(space, tensor).intersect(missing) for tensor in entry.depends_on]
            if name not in allowed and (wrong := copied.union(*unfed).subtract(may_keep)):
                refused[worker] = refused.get(worker, RunTable.empty()).union(wrong)
            # An opaque parameter is loaded as a whole or not at all.
            gone = np.isin(ids, copied.ids()) | ((ids == OPAQUE) & any(unfed))
            made = SourceMap.from_ids(space, {name: np.where(gone, EMPTY, ids)}, {name: entry.dtype})[name]
            changed[name] = replace(made, depends_on=() if not made.opaque else entry.depends_on)
            kept.append(f"{worker}: {name}")
        out[worker] = SourceMap(space, {n: changed.get(n, source_map[n]) for n in source_map.parameters})
    if refused:
        raise UnheldError(_describe_unheld(space, holders, refused))
    return out, tuple(kept)


def _touched(source_map: SourceMap, ids: RunTable) -> list[str]:
    """Parameters that copy one of some ids, or depend on a tensor that has one."""
    names = source_map.parameters
    copying = np.unique(source_map.strips.within(ids.intervals)[0].rows[:, 2]).tolist()
    depending = {
        name
        for name in source_map.opaque
        for tensor in source_map.depends_on(name)
        if _ids_of(source_map.space, tensor).intersect(ids)
    }
    return sorted({names[position] for position in copying} | depending, key=natural_key)


def _ids_of(space: CheckpointSpace, tensor: str) -> RunTable:
    return RunTable.from_intervals([space.id_range(tensor)])


def _describe_unheld(space: CheckpointSpace, holders: Mapping[str, SourceMap], refused: Mapping[str, RunTable]) -> str:
    workers: dict[str, list[str]] = {}
    for worker, runs in refused.items():
        for name in _tensors_of(space, runs):
            start = space.id_range(name)[0]
            inside = runs.intersect(_ids_of(space, name)).intervals - start
            ranges = ", ".join(f"{a}:{b}" for a, b in inside[:3].tolist()) + (", ..." if len(inside) > 3 else "")
            elements = int((inside[:, 1] - inside[:, 0]).sum())
            whole = f"all {elements} elements" if elements == space.spec(name).elements else f"elements {ranges}"
            workers.setdefault(f"{name} ({whole}{_why_unheld(space, holders, name)})", []).append(worker)
    lines = [f"{what}, needed by {_listed(needers)}" for what, needers in workers.items()]
    return (
        f"no trainer holds {'; '.join(lines[:_NAMES_SHOWN])}"
        + (f"; and {len(lines) - _NAMES_SHOWN} more" if len(lines) > _NAMES_SHOWN else "")
        + ". Hold them on a trainer, or name them in allow_partial to let the rollouts keep their values"
    )


def _why_unheld(space: CheckpointSpace, holders: Mapping[str, SourceMap], tensor: str) -> str:
    """Why no trainer holds a tensor although some loader uses it; empty if none does."""
    dtype = space.spec(tensor).dtype
    for worker in sorted(holders, key=natural_key):
        source_map = holders[worker]
        made = [name for name in source_map.opaque if tensor in source_map.depends_on(name)]
        if made and not holds_codes(dtype):
            return f"; {worker} loads it into {made[0]}, but elements of {dtype} cannot be told apart, so not sent"
        if made:
            return f"; {worker} has it only in {made[0]}, which its loader computes, and only copies can be sent"
    return ""


def _used(maps: Iterable[SourceMap]) -> set[str]:
    """Checkpoint tensors that some map copies or depends on."""
    return {name for each in maps for name in _tensors_of(each.space, each.needed())}


def _tensors_of(space: CheckpointSpace, runs: RunTable) -> list[str]:
    touched = runs.intervals
    first = np.searchsorted(touched[:, 1], space.starts[:-1], side="right")
    last = np.searchsorted(touched[:, 0], space.starts[1:], side="left")
    return [space.specs[position].name for position in np.flatnonzero(last > first).tolist()]


def _tail(name: str) -> list[str]:
    return name.split(".")[-2:]


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names, key=natural_key)
    more = len(ordered) - _NAMES_SHOWN
    return (", ".join(ordered[:_NAMES_SHOWN]) or "none") + (f" and {more} more" if more > 0 else "")
