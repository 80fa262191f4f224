"""From fractions to routes: every demand class is a line of ids, cut where any of its choices changes.

::

    ids of a class      1 2 3 4 5 6 7 8
    holder              t0      | t1            both hold it
    first receiver      a0  | a1    | b0        nodes a and b need it
    entry into node a   a0  | a1    | a0
    entry into node b   b1      | b0
    routes              1 2 | 3 4 | 5 6 | 7 8   one way each

Fractions become whole numbers of elements by rounding the places of the cuts, so each link is off by less than one
element per cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from layout_algebra.correspondence import Correspondence
from layout_algebra.runs import RunTable
from transfer_exec.demand import Demand, Site
from transfer_exec.links import Links
from transfer_exec.plan import Hop, Route, Stage
from transfer_exec.shares import Parts, Shares

_WHOLE = 1 << 30
"""Units on the line of a class; finer than any fraction that matters, coarser than the solver's noise."""

_Line = list[tuple[int, int]]
"""(stop, worker) in ascending units; a worker's stretch begins where the one before it stops."""


def make_routes(
    correspondence: Correspondence, demands: Sequence[Demand], shares: Sequence[Shares], links: Links
) -> tuple[Route, ...]:
    """The routes of a division, ascending by first id, then by holder."""
    routes: list[Route] = []
    for group, demand, share in zip(correspondence.classes, demands, shares, strict=True):
        cutter = _Cutter(demand, share, links)
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

    def __init__(self, demand: Demand, share: Shares, links: Links) -> None:
        self._demand, self._links = demand, links
        self._lines: list[_Line] = []
        if demand.remote:
            holders, first = _paired(share, links)
            self._lines += [holders, first]
            for site, parts in zip(demand.remote, share.entries, strict=False):
                self._lines.append(_entries(first, site, parts))
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
            entries = way[2 : 2 + len(sites)] if len(sites) > 1 else (first,)
            outer = [Hop(Stage.RECEIVE, names[holder], names[first])]
            for site, entry in zip(sites, entries, strict=True):
                if entry != first:
                    outer.append(Hop(Stage.EXTERNAL, names[first], names[entry]))
                inner += self._fan_out(site, entry)
            by_holder[holder] = outer + inner
        sources = way[len(way) - len(self._demand.local) :]
        for site, source in zip(self._demand.local, sources, strict=True):
            by_holder.setdefault(source, []).extend(self._fan_out(site, source))
        return [(names[holder], tuple(by_holder[holder])) for holder in sorted(by_holder)]

    def _fan_out(self, site: Site, source: int) -> tuple[Hop, ...]:
        found = self._inside.get((site.node, source))
        if found is None:
            names = self._links.workers
            found = tuple(
                Hop(Stage.INTERNAL, names[source], names[needer]) for needer in site.needers if needer != source
            )
            self._inside[site.node, source] = found
        return found


def _units(parts: Parts, whole: int) -> list[tuple[int, int]]:
    """(worker, units) that add up to ``whole``, in proportion to the parts; those of none are left out."""
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
    holders, first = _units(share.holders, _WHOLE), _units(share.first, _WHOLE)
    if len(share.crossings) < 2:
        return _line(holders), _line(first)
    left: list[tuple[int, int]] = []
    right: list[tuple[int, int]] = []
    for ((source, target), _), units in zip(share.crossings, _cumulated(share), strict=True):
        left += _take(holders, units, source, links)
        right += _take(first, units, target, links)
    return _line(left), _line(right)


def _cumulated(share: Shares) -> list[int]:
    parts = tuple((number, part) for number, (_, part) in enumerate(share.crossings))
    units = dict(_units(parts, _WHOLE))
    return [units.get(number, 0) for number in range(len(parts))]


def _take(stretches: list[tuple[int, int]], units: int, cluster: int, links: Links) -> list[tuple[int, int]]:
    """Remove units from the front of a list of stretches, those of one cluster first."""
    taken = []
    stretches.sort(key=lambda stretch: links.cluster[stretch[0]] != cluster)
    while units:
        worker, there = stretches.pop(0)
        used = min(there, units)
        taken.append((worker, used))
        if used < there:
            stretches.insert(0, (worker, there - used))
        units -= used
    return taken


def _entries(first: _Line, site: Site, parts: Parts) -> _Line:
    """Who lets a class into one node: the first receiver where it is of the node, the entries' parts elsewhere."""
    doors = set(site.doors)
    own = sum(stop - start for (start, _), (stop, worker) in pairwise([(0, -1), *first]) if worker in doors)
    queue = _units(parts, _WHOLE - own) if parts else [(site.doors[0], _WHOLE - own)]
    stretches: list[tuple[int, int]] = []
    for (start, _), (stop, worker) in pairwise([(0, -1), *first]):
        units = stop - start
        if worker in doors:
            stretches.append((worker, units))
            continue
        while units:
            entry, there = queue.pop(0)
            used = min(there, units)
            stretches.append((entry, used))
            if used < there:
                queue.insert(0, (entry, there - used))
            units -= used
    return _line(stretches)
