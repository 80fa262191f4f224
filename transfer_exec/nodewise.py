"""Balance for large clusters: one program over nodes, then a small one inside each.

Any rollout worker of a node may let in any class that the node needs, so the NICs of a node are nearly one pool. The
first program decides what each holder sends, who serves nodes that hold a class themselves, and which nodes receive
a class first, with one pooled egress and ingress per node. Then each node's own program divides what the node lets in
and sends on over its workers. Nodes that look alike share one solution.

Workers that need a class let it in where that costs nothing, so the first program also shares out what they will have
to send on, as if each node's needers did that alike.

``optimum_s`` is that of the first program: no division at all is better. The second step reaches it unless local
links or unequal NICs inside a node stand in the way; the plan's load says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer_exec.demand import Demand
from transfer_exec.levels import LevelProgram, Solution
from transfer_exec.links import Links
from transfer_exec.shares import (
    Balance,
    Parts,
    Role,
    Shares,
    cluster_pairs,
    door_loads,
    first_sites,
    forwarding_loads,
    kept,
    link_loads,
    onward,
    source_load,
)

_POOL_EGRESS, _POOL_INGRESS = 9, 10
"""Kinds of pooled links, past those of ``Links.groups``."""

_Inside = dict[Role, Parts]
"""How what comes into one node is divided over its workers, by what they do with it."""


def balance_nodewise(demands: Sequence[Demand], links: Links, unit_s: float) -> Balance | None:
    """Divide every demand class in two steps; None if a solver fails."""
    over_nodes = _OverNodes(demands, links, unit_s)
    solution = over_nodes.program.solve()
    if solution is None:
        return None
    outer = [over_nodes.shares(number, solution.values) for number in range(len(demands))]
    incoming = [over_nodes.incoming(number, solution.values) for number in range(len(demands))]
    fixed = link_loads(demands, outer, links)
    divided: list[dict[int, _Inside]] = [{} for _ in demands]
    known: dict[bytes, Solution] = {}
    comes: dict[int, list[tuple[int, Demand, int]]] = {}
    for number, demand in enumerate(demands):
        for position, site in enumerate(demand.remote):
            comes.setdefault(site.node, []).append((number, demand, position))
    for node, here in sorted(comes.items()):
        inside = _InsideNode(node, here, incoming, fixed, links, unit_s)
        key = inside.program.key()
        if key not in known:
            found = inside.program.solve(enough_s=solution.longest_s)
            if found is None:
                return None
            known[key] = found
        for number, inner in inside.parts(known[key].values).items():
            divided[number][node] = inner
    shares = []
    for demand, share, parts in zip(demands, outer, divided, strict=True):
        first = tuple(part for site in demand.remote for part in parts[site.node][Role.FIRST])
        gateways = tuple(part for site in demand.remote for part in parts[site.node][Role.GATEWAY])
        entries = tuple(parts[site.node][Role.ENTRY] for site in demand.remote) if len(demand.remote) > 1 else ()
        shares.append(Shares(share.holders, first, gateways, entries, share.sources, share.crossings))
    return Balance(tuple(shares), solution.longest_s, "program over nodes")


class _OverNodes:
    """The first program: holders one by one, rollouts by node."""

    def __init__(self, demands: Sequence[Demand], links: Links, unit_s: float) -> None:
        self._links = links
        doors = {site.node: site.doors for demand in demands for site in demand.remote}
        egress: dict[int, int] = {}
        ingress: dict[int, int] = {}
        speeds, groups = links.bytes_per_s.tolist(), list(links.groups)
        for node, workers in sorted(doors.items()):
            for pool, link_of, kind in ((egress, links.egress, _POOL_EGRESS), (ingress, links.ingress, _POOL_INGRESS)):
                pool[node] = len(speeds)
                speeds.append(sum(float(links.bytes_per_s[link]) for link in {link_of[worker] for worker in workers}))
                groups.append((kind, node))
        self.program = LevelProgram(speeds=speeds, groups=groups, unit_s=unit_s)
        self._sends: list[dict[int, int]] = []
        self._comes: list[dict[Role, dict[int, int]]] = []
        self._serves: list[list[dict[int, int]]] = []
        self._crosses: list[dict[tuple[int, int], int]] = []
        for demand in demands:
            self._add(demand, egress, ingress)

    def _add(self, demand: Demand, egress: dict[int, int], ingress: dict[int, int]) -> None:
        links, program = self._links, self.program
        sends: dict[int, int] = {}
        comes: dict[Role, dict[int, int]] = {Role.FIRST: {}, Role.GATEWAY: {}}
        crosses: dict[tuple[int, int], int] = {}
        if demand.remote:
            program.constant((ingress[site.node], demand.bytes) for site in demand.remote)
            sends = {h: program.column([(links.egress[h], demand.bytes)]) for h in demand.holders}
            clusters = demand.clusters
            places = {Role.FIRST: first_sites(demand, links)}
            places[Role.GATEWAY] = list(range(len(demand.remote))) if len(clusters) > 1 else []
            for role, positions in places.items():
                for position in positions:
                    site = demand.remote[position]
                    share = onward(demand, position, role) * demand.bytes / len(site.needers)
                    comes[role][site.node] = program.column(
                        forwarding_loads(demand, position, links, egress[site.node], role),
                        later=[(links.egress[needer], share) for needer in site.needers],
                    )
            for group in (sends, comes[Role.FIRST]):
                program.sum([(column, 1.0) for column in group.values()], 1.0)
            cluster_of = {site.node: site.cluster for site in demand.remote}
            for cluster in clusters if len(clusters) > 1 else ():
                both = [pair for group in comes.values() for pair in group.items()]
                program.sum([(column, 1.0) for node, column in both if cluster_of[node] == cluster], 1.0)
            for near, far in cluster_pairs(demand, links):
                loads = [] if near == far else [(links.between[near, far], demand.bytes)]
                crosses[near, far] = program.column(loads)
            for cluster in sorted({near for near, _ in crosses}):
                mine = [(column, -1.0) for holder, column in sends.items() if links.cluster[holder] == cluster]
                program.sum([*mine, *((column, 1.0) for pair, column in crosses.items() if pair[0] == cluster)], 0.0)
            for cluster in sorted({far for _, far in crosses}):
                mine = [(column, -1.0) for node, column in comes[Role.FIRST].items() if cluster_of[node] == cluster]
                program.sum([*mine, *((column, 1.0) for pair, column in crosses.items() if pair[1] == cluster)], 0.0)
        serves = [
            {source: program.column([source_load(demand, number, source, links)]) for source in site.doors}
            for number, site in enumerate(demand.local)
        ]
        for group in serves:
            program.sum([(column, 1.0) for column in group.values()], 1.0)
        for site in demand.local:
            program.constant((links.local_ingress[needer], demand.bytes) for needer in site.needers)
        self._sends.append(sends)
        self._comes.append(comes)
        self._serves.append(serves)
        self._crosses.append(crosses)

    def shares(self, number: int, values: Sequence[float]) -> Shares:
        """What is decided of one class: all but the workers through which it comes in."""
        return Shares(
            holders=kept((worker, values[column]) for worker, column in self._sends[number].items()),
            first=(),
            gateways=(),
            entries=(),
            sources=tuple(
                kept((worker, values[column]) for worker, column in group.items()) for group in self._serves[number]
            ),
            crossings=kept((pair, values[column]) for pair, column in self._crosses[number].items()),
        )

    def incoming(self, number: int, values: Sequence[float]) -> dict[Role, dict[int, float]]:
        """Fractions of one class that each node receives first, and lets into its cluster."""
        return {
            role: dict(kept((node, values[column]) for node, column in group.items()))
            for role, group in self._comes[number].items()
        }


class _InsideNode:
    """One node's program: through which workers its classes come in."""

    def __init__(
        self,
        node: int,
        here: Sequence[tuple[int, Demand, int]],
        incoming: Sequence[dict[Role, dict[int, float]]],
        fixed: dict[int, float],
        links: Links,
        unit_s: float,
    ) -> None:
        self.program = LevelProgram(speeds=links.bytes_per_s.tolist(), groups=links.groups, unit_s=unit_s)
        self._columns: dict[int, dict[Role, dict[int, int]]] = {}
        total = sum(demand.bytes for _, demand, _ in here)
        doors = here[0][1].remote[here[0][2]].doors
        used = {table[door] for door in doors for table in (links.egress, links.ingress, links.local_egress)}
        used |= {links.local_ingress[door] for door in doors}
        self.program.constant((link, fixed[link]) for link in sorted(used) if link in fixed)
        for number, demand, position in here:
            amounts = {role: parts.get(node, 0.0) for role, parts in incoming[number].items()}
            amounts[Role.ENTRY] = 1.0 - sum(amounts.values())
            site = demand.remote[position]
            self._columns[number] = {}
            for role, amount in amounts.items():
                columns = {
                    door: self.program.column(
                        [(link, n) for link, n in door_loads(demand, position, door, links, role) if link in used],
                        0.0 if door in site.needers else demand.bytes / total,
                    )
                    for door in (site.doors if amount > 0 else ())
                }
                if columns:
                    self.program.sum([(column, 1.0) for column in columns.values()], amount)
                self._columns[number][role] = columns

    def parts(self, values: Sequence[float]) -> dict[int, _Inside]:
        """Per class, how what comes in is divided over workers."""
        return {
            number: {
                role: kept((door, values[column]) for door, column in columns.items())
                for role, columns in roles.items()
            }
            for number, roles in self._columns.items()
        }
