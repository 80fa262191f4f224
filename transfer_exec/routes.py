"""From fractions to routes: every demand class is a line of ids, cut where any of its choices changes.

::

    ids of a class      1 2 3 4 5 6 7 8
    holder              t0      | t1            both hold it
    first receiver      a0  | a1    | b0        nodes a and b need it
    entry into node a   a0  | a1    | a0
    entry into node b   b1      | b0
    routes              1 2 | 3 4 | 5 6 | 7 8   one way each

With several clusters there is a line of *roots* for each: the first receiver where it is of the cluster, gateways
elsewhere. Roots send to the entries of the other nodes of their cluster.

Fractions become whole numbers of elements by rounding the places of the cuts, so each link is off by less than one
element per cut.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from layout_algebra.correspondence import Correspondence
from layout_algebra.runs import RunTable
from transfer_exec.demand import Demand, Site
from transfer_exec.links import Links
from transfer_exec.plan import Hop, Route, Stage
from transfer_exec.shares import Parts, Shares

_WHOLE = 1 << 30
"""Units on the line of a class; finer than any fraction that matters, coarser than the solver's noise."""

_Key = TypeVar("_Key", bound=Hashable)
_Line = list[tuple[int, int]]
"""(stop, worker) in ascending units; a worker's stretch begins where the one before it stops."""


def make_routes(
    correspondence: Correspondence, demands: Sequence[Demand], shares: Sequence[Shares], links: Links
) -> tuple[Route, ...]:
    """The routes of a division, ascending by first id, then by holder."""
    routes: list[Route] = []
    known: dict[int, Hop] = {}
    for group, demand, share in zip(correspondence.classes, demands, shares, strict=True):
        cutter = _Cutter(demand, share, links, known)
        elements = group.runs.elements
        stops = cutter.stops()
        ranks = [(stop * elements + _WHOLE // 2) // _WHOLE for stop in stops]
        ways: list[tuple[int, tuple[int, ...]]] = []
        for stop, first, last in zip(stops, [0, *ranks], ranks, strict=False):
            if first == last:
                continue
            way = cutter.way(stop)
            if ways and ways[-1][1] == way:
                ways.pop()
            ways.append((last, way))
        pieces = split_at(group.runs, [last for last, _ in ways])
        for runs, (_, way) in zip(pieces, ways, strict=True):
            routes += [Route(runs, group.item_bytes, holder, hops) for holder, hops in cutter.hops(way)]
    order = {worker: number for number, worker in enumerate(links.workers)}
    return tuple(sorted(routes, key=lambda route: (int(route.runs.runs[0, 0]), order[route.holder])))


def split_at(table: RunTable, stops: Sequence[int]) -> list[RunTable]:
    """Consecutive parts of a table that end at ascending ranks; one pass over its intervals."""
    intervals = table.intervals
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    out = []
    for first, last in pairwise([0, *stops]):
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, last, side="left")) + 1
        piece = intervals[low:high].copy()
        piece[0, 0] = piece[0, 1] - (int(ends[low]) - first)
        piece[-1, 1] -= int(ends[high - 1]) - last
        out.append(RunTable.from_intervals(piece))
    return out


class _Cutter:
    """The choices of one class as lines, and the hops that a combination of choices means."""

    def __init__(self, demand: Demand, share: Shares, links: Links, known: dict[int, Hop]) -> None:
        self._demand, self._links, self._known = demand, links, known
        self._lines: list[_Line] = []
        self._clusters = demand.clusters
        if demand.remote:
            holders, first = _paired(share, links)
            self._lines += [holders, first]
            roots = {cluster: _roots(demand, cluster, first, share.gateways) for cluster in self._clusters}
            self._lines += roots.values()
            for position, site in enumerate(demand.remote):
                parts = share.entries[position] if share.entries else ()
                self._lines.append(_filled(roots[site.cluster], site.doors, parts))
        self._lines += [_line(_units(parts, _WHOLE)) for parts in share.sources]
        self._inside: dict[tuple[int, int], tuple[Hop, ...]] = {}

    def stops(self) -> list[int]:
        """Where any choice changes; the last is the end of the line."""
        return sorted({stop for line in self._lines for stop, _ in line})

    def way(self, stop: int) -> tuple[int, ...]:
        """The choice on every line just before a stop."""
        return tuple(next(worker for end, worker in line if end >= stop) for line in self._lines)

    def hops(self, way: tuple[int, ...]) -> list[tuple[str, tuple[Hop, ...]]]:
        """Who packs and where it goes from there: the network's holder, and other holders that serve their node."""
        names = self._links.workers
        by_holder: dict[int, list[Hop]] = {}
        sites = self._demand.remote
        inner: list[Hop] = []
        if sites:
            holder, first = way[:2]
            roots = dict(zip(self._clusters, way[2:], strict=False))
            entries = way[2 + len(roots) : 2 + len(roots) + len(sites)]
            outer = [self._hop(Stage.RECEIVE, holder, first)]
            outer += [self._hop(Stage.EXTERNAL, first, root) for root in roots.values() if root != first]
            for site, entry in zip(sites, entries, strict=True):
                root = roots[site.cluster]
                if entry != root:
                    outer.append(self._hop(Stage.EXTERNAL, root, entry))
                inner += self._fan_out(site, entry)
            by_holder[holder] = outer + inner
        sources = way[len(way) - len(self._demand.local) :]
        for site, source in zip(self._demand.local, sources, strict=True):
            by_holder.setdefault(source, []).extend(self._fan_out(site, source))
        return [(names[holder], tuple(by_holder[holder])) for holder in sorted(by_holder)]

    def _fan_out(self, site: Site, source: int) -> tuple[Hop, ...]:
        found = self._inside.get((site.node, source))
        if found is None:
            found = tuple(self._hop(Stage.INTERNAL, source, needer) for needer in site.needers if needer != source)
            self._inside[site.node, source] = found
        return found

    def _hop(self, stage: Stage, source: int, target: int) -> Hop:
        """One object for all equal hops of a plan: two workers have one stage in common at most."""
        names = self._links.workers
        key = source * len(names) + target
        hop = self._known.get(key)
        if hop is None:
            hop = self._known[key] = Hop(stage, names[source], names[target])
        return hop


def _units(parts: Iterable[tuple[_Key, float]], whole: int) -> list[tuple[_Key, int]]:
    """Units that add up to ``whole``, in proportion to the parts; those of none are left out."""
    parts = tuple(parts)
    total = sum(part for _, part in parts)
    out, reached, before = [], 0.0, 0
    for position, (worker, part) in enumerate(parts):
        reached += part
        stop = whole if position == len(parts) - 1 else min(whole, round(reached / total * whole))
        if stop > before:
            out.append((worker, stop - before))
        before = stop
    return out


def _line(stretches: Iterable[tuple[int, int]]) -> _Line:
    line: _Line = []
    at = 0
    for worker, units in stretches:
        at += units
        if line and line[-1][1] == worker:
            line.pop()
        line.append((at, worker))
    return line


def _paired(share: Shares, links: Links) -> tuple[_Line, _Line]:
    """Lines of holders and of first receivers; with several clusters, laid so that pairs cross as agreed."""
    if not share.crossings:
        return _line(_units(share.holders, _WHOLE)), _line(_units(share.first, _WHOLE))
    sides = (_by_cluster(share.holders, links), _by_cluster(share.first, links))
    # What a solver leaves of a cluster may be noise on one side and nothing on the other.
    pairs = [(pair, part) for pair, part in share.crossings if pair[0] in sides[0] and pair[1] in sides[1]]
    crossings = _units(pairs, _WHOLE)
    lines = []
    for side, members in enumerate(sides):
        queues = {
            cluster: _units(parts, sum(units for pair, units in crossings if pair[side] == cluster))
            for cluster, parts in members.items()
        }
        lines.append(_line(each for pair, units in crossings for each in _take(queues[pair[side]], units)))
    return lines[0], lines[1]


def _by_cluster(parts: Parts, links: Links) -> dict[int, Parts]:
    clusters = dict.fromkeys(links.cluster[worker] for worker, _ in parts)
    return {each: tuple(part for part in parts if links.cluster[part[0]] == each) for each in clusters}


def _take(queue: list[tuple[int, int]], units: int) -> list[tuple[int, int]]:
    """Remove units from the front of a list of stretches."""
    taken = []
    while units:
        worker, there = queue.pop(0)
        used = min(there, units)
        taken.append((worker, used))
        if used < there:
            queue.insert(0, (worker, there - used))
        units -= used
    return taken


def _roots(demand: Demand, cluster: int, first: _Line, gateways: Parts) -> _Line:
    """Who has a class first in one cluster."""
    doors = {door for site in demand.clusters[cluster] for door in demand.remote[site].doors}
    return _filled(first, doors, tuple(part for part in gateways if part[0] in doors))


def _filled(line: _Line, members: Collection[int], parts: Parts) -> _Line:
    """A line where it names members, and the members' parts of the rest elsewhere."""
    own = sum(stop - start for (start, _), (stop, worker) in pairwise([(0, -1), *line]) if worker in members)
    queue = _units(parts or ((min(members), 1.0),), _WHOLE - own)
    stretches: list[tuple[int, int]] = []
    for (start, _), (stop, worker) in pairwise([(0, -1), *line]):
        stretches += [(worker, stop - start)] if worker in members else _take(queue, stop - start)
    return _line(stretches)
