"""Which fraction of every demand class goes which way, so that the slowest link is as fast as can be.

A linear program over fractions: ``x[class, holder]``, what each holder sends over the network; ``y[class, first
receiver]``; ``r[class, node, entry]``, what an entry worker lets into its node beyond what it got as first receiver
(``w = y + r`` is all that it lets in); ``z[class, node, holder]``, who serves a node that holds the class itself. Per
class x and y each sum to one, per remote node w does, per local node z does. First receivers send what they got to
every other remote node, entry workers and local holders to every other needer of their node. With several clusters
``t[class, holder's cluster, first receiver's cluster]`` says what crosses between them.

The program minimizes the longest time, bytes over bandwidth, of any link. A second one keeps that time as a limit and
minimizes, for each kind of link, the longest time of all and of each node, so that work that is not at the bottleneck
is shared out as well; then the bytes that come in through workers that do not need them.

The solution is a vertex of the program, so most fractions are zero or one and a plan has few routes. HiGHS is
deterministic and the program is built in worker and class order, so equal demands give equal fractions.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer_exec.demand import Demand
from transfer_exec.links import Links, Seconds
from transfer_exec.shares import Balance, Parts, Shares, door_loads, source_loads
from transfer_exec.solver import Triplets, minimize
from transfer_exec.spread import spread_demands

_NOTHING = 1e-9
"""Fractions below this are noise of the solver."""
_SLACK = 1e-7
"""How much longer than the optimum, relatively, the second program's solution may be."""
_DETOUR = 1e-3
"""Weight of needless entries beside the times of links."""


def balance(demands: Sequence[Demand], links: Links, *, bound_s: float) -> Balance:
    """Divide every demand class over holders, first receivers and entry workers.

    Parameters
    ----------
    bound_s
        A lower bound of the result, which sets the program's scale; may be zero.

    Cost: the program has about ``2 * classes * rollout workers`` columns. If the solver fails, the division of
    ``spread_demands`` stands, which fills links evenly, class by class, and is near the optimum where layouts are
    regular.
    """
    unit_s = bound_s or spread_demands(demands, links).optimum_s
    if not unit_s:
        return spread_demands(demands, links)
    program = _Program(demands, links, unit_s)
    solved = program.solve()
    if solved is None:
        return spread_demands(demands, links)
    values, optimum_s = solved
    return Balance(tuple(program.shares(values)), optimum_s, "linear program")


class _Program:
    """The program's columns, in class order, and its rows: one per link, then one per sum."""

    def __init__(self, demands: Sequence[Demand], links: Links, unit_s: float) -> None:
        self._demands, self._links, self._unit_s = demands, links, unit_s
        self._loads = Triplets()
        self._sums = Triplets()
        self._totals: list[float] = []
        self._detours: list[float] = []
        self._total = sum(demand.bytes for demand in demands)
        for demand in demands:
            self._add_demand(demand)

    def _column(self, loads: list[tuple[int, int]], detour: float = 0.0) -> int:
        number = len(self._detours)
        self._detours.append(detour)
        for link, count in loads:
            if count:
                self._loads.add(link, number, count / (float(self._links.bytes_per_s[link]) * self._unit_s))
        return number

    def _sum(self, terms: Sequence[tuple[int, float]], total: float) -> None:
        for column, value in terms:
            self._sums.add(len(self._totals), column, value)
        self._totals.append(total)

    def _add_demand(self, demand: Demand) -> None:
        links = self._links
        if demand.remote:
            sends = [self._column([(links.egress[holder], demand.bytes)]) for holder in demand.holders]
            self._sum([(column, 1.0) for column in sends], 1.0)
            firsts = [self._doors(demand, site, first=True) for site in range(len(demand.remote))]
            self._sum([(column, 1.0) for columns in firsts for column in columns], 1.0)
            if len(demand.remote) > 1:
                for site, columns in enumerate(firsts):
                    enters = self._doors(demand, site, first=False)
                    self._sum([(column, 1.0) for column in (*columns, *enters)], 1.0)
            self._add_crossings(demand, sends, firsts)
        for site, here in enumerate(demand.local):
            serves = [self._column(source_loads(demand, site, source, links)) for source in here.doors]
            self._sum([(column, 1.0) for column in serves], 1.0)

    def _doors(self, demand: Demand, site: int, *, first: bool) -> list[int]:
        here = demand.remote[site]
        share = demand.bytes / self._total
        return [
            self._column(
                door_loads(demand, site, door, self._links, first=first), 0.0 if door in here.needers else share
            )
            for door in here.doors
        ]

    def _add_crossings(self, demand: Demand, sends: list[int], firsts: list[list[int]]) -> None:
        pairs = _cluster_pairs(demand, self._links)
        if not pairs:
            return
        columns = {
            (source, target): self._column(
                [] if source == target else [(self._links.between[source, target], demand.bytes)]
            )
            for source, target in pairs
        }
        for source in sorted({source for source, _ in pairs}):
            mine = [(column, 1.0) for pair, column in columns.items() if pair[0] == source]
            theirs = [
                (column, -1.0)
                for holder, column in zip(demand.holders, sends, strict=True)
                if self._links.cluster[holder] == source
            ]
            self._sum([*mine, *theirs], 0.0)
        for target in sorted({target for _, target in pairs}):
            mine = [(column, 1.0) for pair, column in columns.items() if pair[1] == target]
            theirs = [
                (column, -1.0)
                for site, group in zip(demand.remote, firsts, strict=True)
                if self._links.cluster[site.doors[0]] == target
                for column in group
            ]
            self._sum([*mine, *theirs], 0.0)

    def solve(self) -> tuple[Sequence[float], float] | None:
        """Values of all columns and the longest link time in seconds, or None if the solver gives up."""
        columns, links = len(self._detours), len(self._links.names)
        longest = Triplets(list(range(links)), [columns] * links, [-1.0] * links)
        found = minimize(
            [0.0] * columns + [1.0], self._loads.extended(longest), [0.0] * links, self._sums, self._totals
        )
        if found is None:
            return None
        optimum = float(found[columns])
        better = self._share_out(optimum)
        return (found[:columns] if better is None else better[:columns]).tolist(), optimum * self._unit_s

    def _share_out(self, optimum: float) -> Seconds | None:
        """Columns, then the longest time of each group of links, then of each kind of link."""
        columns, links = len(self._detours), self._links
        groups = sorted(set(links.groups))
        number_of = {group: number for number, group in enumerate(groups)}
        kinds = sorted({kind for kind, _ in groups})
        costs = [_DETOUR * share for share in self._detours]
        costs += [1.0 / sum(other == kind for other, _ in groups) for kind, _ in groups]
        costs += [1.0] * len(kinds)
        caps = Triplets()
        for link, group in enumerate(links.groups):
            caps.add(link, columns + number_of[group], -1.0)
        limits = [0.0] * len(links.groups)
        for number, (kind, _) in enumerate(groups):
            caps.add(len(limits), columns + number, 1.0)
            caps.add(len(limits), columns + len(groups) + kinds.index(kind), -1.0)
            limits.append(0.0)
        for number in range(len(kinds)):
            caps.add(len(limits), columns + len(groups) + number, 1.0)
            limits.append(optimum * (1 + _SLACK))
        return minimize(costs, self._loads.extended(caps), limits, self._sums, self._totals)

    def shares(self, values: Sequence[float]) -> list[Shares]:
        """The columns' values as shares, in the order in which the columns were added."""
        at = 0

        def take(workers: Sequence[int]) -> list[tuple[int, float]]:
            nonlocal at
            parts = list(zip(workers, values[at : at + len(workers)], strict=True))
            at += len(workers)
            return [(worker, part) for worker, part in parts if part > _NOTHING]

        out = []
        for demand in self._demands:
            holders: Parts = ()
            first: list[tuple[int, float]] = []
            entries: list[Parts] = []
            crossings: tuple[tuple[tuple[int, int], float], ...] = ()
            if demand.remote:
                holders = tuple(take(demand.holders))
                for site in demand.remote:
                    first += take(site.doors)
                if len(demand.remote) > 1:
                    entries = [tuple(take(site.doors)) for site in demand.remote]
                pairs = _cluster_pairs(demand, self._links)
                taken = take(range(len(pairs)))
                crossings = tuple((pairs[number], part) for number, part in taken)
            sources = tuple(tuple(take(site.doors)) for site in demand.local)
            out.append(Shares(holders, tuple(first), tuple(entries), sources, crossings))
        return out


def _cluster_pairs(demand: Demand, links: Links) -> list[tuple[int, int]]:
    """(holder's cluster, first receiver's cluster) of a class, where there is more than one cluster."""
    if not links.between:
        return []
    sources = sorted({links.cluster[holder] for holder in demand.holders})
    targets = sorted({links.cluster[site.doors[0]] for site in demand.remote})
    return [(source, target) for source in sources for target in targets]
