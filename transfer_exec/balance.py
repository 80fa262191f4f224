"""Which fraction of every demand class goes which way, so that the slowest link is as fast as can be.

A linear program over fractions: ``x[class, holder]``, what each holder sends over the network; ``y[class, first
receiver]``; ``r[class, node, entry]``, what an entry worker lets into its node beyond what it got as first receiver
(``w = y + r`` is all that it lets in); ``z[class, node, holder]``, who serves a node that holds the class itself. Per
class x and y each sum to one, per remote node w does, per local node z does. First receivers send what they got to
every other remote node, entry workers and local holders to every other needer of their node.

With several clusters ``t[class, holder's cluster, first receiver's cluster]`` says what crosses between them at first,
and ``g[class, gateway]`` who lets a class into a cluster where it has no first receiver: there y and g sum to one, and
``w = y + g + r``. A first receiver sends to the nodes of its cluster and to one gateway of every other cluster, which
sends to the nodes of its own; so a class crosses into a cluster once.

The program minimizes the longest time of any link, then the bytes that come in through workers that do not need them,
then shares out what is not at the bottleneck (``levels``). Its solution is a vertex, so most fractions are zero
or one and a plan has few routes. HiGHS is deterministic and the program is built in worker and class order, so equal
demands give equal fractions.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer_exec.demand import Demand
from transfer_exec.levels import LevelProgram
from transfer_exec.links import Links
from transfer_exec.nodewise import balance_nodewise
from transfer_exec.shares import (
    Balance,
    Parts,
    Role,
    Shares,
    cluster_pairs,
    door_loads,
    first_sites,
    fixed_loads,
    kept,
    source_load,
)
from transfer_exec.spread import spread_demands

_COLUMNS = 20_000
"""Largest program that is solved as a whole: seconds."""


def balance(demands: Sequence[Demand], links: Links, *, bound_s: float, columns: int = _COLUMNS) -> Balance:
    """Divide every demand class over holders, first receivers and entry workers.

    Parameters
    ----------
    bound_s
        A lower bound of the result, which sets the program's scale; may be zero.
    columns
        A program with more columns (about ``2 * classes * rollout workers that may let one in``) is solved in
        two steps, first over nodes and then inside each (``nodewise``).

    Returns
    -------
    Balance
        If a solver fails, the division of ``spread_demands``, which fills links evenly, class by class, and is
        near the optimum where layouts are regular.
    """
    unit_s = bound_s or spread_demands(demands, links).optimum_s
    if not unit_s:
        return spread_demands(demands, links)
    doors = sum(len(site.doors) for demand in demands for site in demand.remote)
    if 2 * doors > columns:
        found = balance_nodewise(demands, links, unit_s)
    else:
        found = _balance_whole(demands, links, unit_s)
    return spread_demands(demands, links) if found is None else found


def _balance_whole(demands: Sequence[Demand], links: Links, unit_s: float) -> Balance | None:
    program = LevelProgram(speeds=links.bytes_per_s.tolist(), groups=links.groups, unit_s=unit_s)
    total = sum(demand.bytes for demand in demands)
    columns = [_Columns(demand, links, program, total) for demand in demands]
    solution = program.solve()
    if solution is None:
        return None
    shares = tuple(each.shares(solution.values) for each in columns)
    return Balance(shares, solution.longest_s, "whole program")


class _Columns:
    """The columns of one demand class, and the shares that their values mean."""

    def __init__(self, demand: Demand, links: Links, program: LevelProgram, total_bytes: int) -> None:
        self._demand, self._links, self._program = demand, links, program
        self._total_bytes = total_bytes
        self._sends: dict[int, int] = {}
        self._firsts: list[dict[int, int]] = []
        self._gateways: list[dict[int, int]] = []
        self._enters: list[dict[int, int]] = []
        self._crosses: dict[tuple[int, int], int] = {}
        program.constant(fixed_loads(demand, links).items())
        if demand.remote:
            self._sends = {h: program.column([(links.egress[h], demand.bytes)]) for h in demand.holders}
            self._sum(self._sends)
            self._add_doors(first_sites(demand, links))
            self._add_crossings()
        self._serves = [
            {source: program.column([source_load(demand, number, source, links)]) for source in site.doors}
            for number, site in enumerate(demand.local)
        ]
        for serves in self._serves:
            self._sum(serves)

    def _sum(self, *groups: dict[int, int]) -> None:
        self._program.sum([(column, 1.0) for group in groups for column in group.values()], 1.0)

    def _add_doors(self, firsts: Sequence[int]) -> None:
        sites = range(len(self._demand.remote))
        clusters = self._demand.clusters
        self._firsts = [self._doors(site, Role.FIRST) if site in firsts else {} for site in sites]
        self._sum(*self._firsts)
        self._gateways = [self._doors(site, Role.GATEWAY) if len(clusters) > 1 else {} for site in sites]
        if len(clusters) > 1:
            for members in clusters.values():
                self._sum(*(group[site] for site in members for group in (self._firsts, self._gateways)))
        if len(sites) > 1:
            self._enters = [self._doors(site, Role.ENTRY) for site in sites]
            for groups in zip(self._firsts, self._gateways, self._enters, strict=True):
                self._sum(*groups)

    def _doors(self, site: int, role: Role) -> dict[int, int]:
        here = self._demand.remote[site]
        share = self._demand.bytes / self._total_bytes
        return {
            door: self._program.column(
                door_loads(self._demand, site, door, self._links, role), 0.0 if door in here.needers else share
            )
            for door in here.doors
        }

    def _add_crossings(self) -> None:
        links, demand, program = self._links, self._demand, self._program
        for near, far in cluster_pairs(demand, links):
            loads = [] if near == far else [(links.between[near, far], demand.bytes)]
            self._crosses[near, far] = program.column(loads)
        for side, workers in ((0, [self._sends]), (1, self._firsts)):
            for cluster in sorted({pair[side] for pair in self._crosses}):
                pairs = [(column, 1.0) for pair, column in self._crosses.items() if pair[side] == cluster]
                members = [
                    (column, -1.0)
                    for group in workers
                    for worker, column in group.items()
                    if links.cluster[worker] == cluster
                ]
                program.sum([*pairs, *members], 0.0)

    def shares(self, values: Sequence[float]) -> Shares:
        """What the program's solution means for the class."""

        def parts(group: dict[int, int]) -> Parts:
            return kept((worker, values[column]) for worker, column in group.items())

        return Shares(
            holders=parts(self._sends),
            first=tuple(part for group in self._firsts for part in parts(group)),
            gateways=tuple(part for group in self._gateways for part in parts(group)),
            entries=tuple(parts(group) for group in self._enters),
            sources=tuple(parts(group) for group in self._serves),
            crossings=kept((pair, values[column]) for pair, column in self._crosses.items()),
        )
