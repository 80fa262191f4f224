"""Demand classes seen from the nodes: who must be served over the network and who inside the node.

::

    class  holders t0 t1   needers e0 e1 | e2        node 0: t0 e0    node 1: t1 e1    node 2: e2 e3
    local  node 0: t0 -> e0    node 1: t1 -> e1      remote  node 2: e2 needs it, e2 or e3 lets it in

Between clusters a class crosses no link that it need not: where clusters with remote sites have holders, one of those
sends the class, and its first receiver is in the same cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layout_algebra.correspondence import Correspondence
from transfer_exec.errors import UnheldError
from transfer_exec.links import Links

_RANGES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Site:
    """One node that needs a class.

    Attributes
    ----------
    node, cluster
        Its number, and that of its cluster.
    needers
        Worker numbers that need the class.
    doors
        Where the class comes from, as worker numbers. In a remote site the rollout workers of the node, any of
        which can let it in; in a local one the holders in the node.
    """

    node: int
    cluster: int
    needers: tuple[int, ...]
    doors: tuple[int, ...]


@dataclass(frozen=True)
class Demand:
    """One demand class, placed.

    Attributes
    ----------
    bytes
        Of one copy.
    holders
        Worker numbers of those that may send it over the network: the holders in clusters with remote sites, or all if
        those clusters have none.
    remote
        Sites without a holder, ascending by node.
    local
        Sites with a holder, ascending by node.
    """

    bytes: int
    holders: tuple[int, ...]
    remote: tuple[Site, ...]
    local: tuple[Site, ...]

    @cached_property
    def clusters(self) -> dict[int, list[int]]:
        """Positions of the remote sites of every cluster that has some."""
        found: dict[int, list[int]] = {}
        for position, site in enumerate(self.remote):
            found.setdefault(site.cluster, []).append(position)
        return found


def place_demand(correspondence: Correspondence, links: Links) -> tuple[Demand, ...]:
    """Place every class of a correspondence, in its order.

    Raises
    ------
    UnheldError
        If somebody needs what nobody holds; names tensors, ranges and workers.
    """
    if correspondence.unheld():
        raise _unheld(correspondence)
    number = {worker: position for position, worker in enumerate(links.workers)}
    rollouts: dict[int, list[int]] = {}
    for worker in correspondence.needers:
        rollouts.setdefault(links.node[number[worker]], []).append(number[worker])
    out = []
    for group in correspondence.classes:
        holders = tuple(number[worker] for worker in group.holders)
        held_at: dict[int, list[int]] = {}
        for holder in holders:
            held_at.setdefault(links.node[holder], []).append(holder)
        needed_at: dict[int, list[int]] = {}
        for worker in group.needers:
            needed_at.setdefault(links.node[number[worker]], []).append(number[worker])
        remote, local = [], []
        for node, needers in sorted(needed_at.items()):
            if node in held_at:
                local.append(Site(node, links.cluster[needers[0]], tuple(needers), tuple(held_at[node])))
            else:
                remote.append(Site(node, links.cluster[needers[0]], tuple(needers), tuple(rollouts[node])))
        needing = {site.cluster for site in remote}
        near = tuple(holder for holder in holders if links.cluster[holder] in needing)
        out.append(Demand(group.bytes, near or holders, tuple(remote), tuple(local)))
    return tuple(out)


def _unheld(correspondence: Correspondence) -> UnheldError:
    groups = correspondence.unheld()
    lines: list[str] = []
    for group in groups:
        for start, stop in group.runs.intervals.tolist():
            while start < stop and len(lines) < _RANGES_SHOWN:
                name, first = correspondence.space.locate(start)
                inside = min(stop - start, correspondence.space.spec(name).elements - first)
                lines.append(f"{name}[{first}:{first + inside}], needed by {', '.join(group.needers)}")
                start += inside
    ranges = sum(len(group.runs.intervals) for group in groups)
    elements = sum(group.runs.elements for group in groups)
    more = f"; {elements} elements in {ranges} ranges altogether" if len(lines) >= _RANGES_SHOWN else ""
    return UnheldError(
        f"nobody holds {'; '.join(lines)}{more}. Holders are {', '.join(correspondence.holders) or 'none'}; "
        "give one of them these elements, or leave them out of the rollouts' maps"
    )
