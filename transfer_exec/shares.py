"""How demand classes are divided over workers, in fractions, and the link times that follow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from transfer_exec.demand import Demand
from transfer_exec.links import Links

_Key = TypeVar("_Key", bound=Hashable)
_NOTHING = 1e-9

Parts = tuple[tuple[int, float], ...]
"""Worker numbers and their fractions."""


class Role(Enum):
    """What a worker does for ids that come into its node through it."""

    FIRST = 0
    """Gets them from the holder; sends them to the other nodes of its cluster and to a gateway of every other one."""
    GATEWAY = 1
    """Gets them over a link between clusters; sends them to the other nodes of its cluster."""
    ENTRY = 2
    """Lets them into its node and sends them to no other."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How one demand class is divided.

    Attributes
    ----------
    holders
        Who sends it over the network; empty if it has no remote site.
    first
        First receivers.
    gateways
        Who lets into a cluster what no first receiver of the cluster got; fractions of the whole class, which add up
        to one with the cluster's first receivers. Empty if all remote sites are in one cluster.
    entries
        Per remote site, who lets in what no first receiver or gateway of the site got; fractions of the whole class,
        which add up to one with those.
    sources
        Per local site, the holders in the node that serve it.
    crossings
        Fraction per (holder's cluster, first receiver's cluster).
    """

    holders: Parts
    first: Parts
    gateways: Parts
    entries: tuple[Parts, ...]
    sources: tuple[Parts, ...]
    crossings: tuple[tuple[tuple[int, int], float], ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """Shares per demand class, and how good they are.

    Attributes
    ----------
    shares
        In the order of the demands.
    optimum_s
        The longest link time of an optimal division, in seconds.
    method
        How the shares were found, as a person reads it.
    """

    shares: tuple[Shares, ...]
    optimum_s: float
    method: str


def kept(parts: Iterable[tuple[_Key, float]]) -> tuple[tuple[_Key, float], ...]:
    """The parts that are more than a solver's noise."""
    return tuple((key, part) for key, part in parts if part > _NOTHING)


def fixed_loads(demand: Demand, links: Links) -> dict[int, float]:
    """Bytes per link that every division has, as if each needer got all of its class inside its node."""
    out: dict[int, float] = {}
    for site in (*demand.remote, *demand.local):
        for needer in site.needers:
            link = links.local_ingress[needer]
            out[link] = out.get(link, 0) + demand.bytes
    return out


def door_loads(demand: Demand, site: int, door: int, links: Links, role: Role) -> list[tuple[int, int]]:
    """Bytes per link, on top of the fixed ones, if the whole class comes into a remote site through one worker."""
    here = demand.remote[site]
    needs = door in here.needers
    out = [(links.ingress[door], demand.bytes), (links.local_egress[door], (len(here.needers) - needs) * demand.bytes)]
    if needs:
        out.append((links.local_ingress[door], -demand.bytes))
    return out + forwarding_loads(demand, site, links, links.egress[door], role)


def forwarding_loads(demand: Demand, site: int, links: Links, egress: int, role: Role) -> list[tuple[int, int]]:
    """Bytes per link if somebody in a remote site, through one egress link, sends on the whole class."""
    if role is Role.ENTRY:
        return []
    mine = demand.remote[site].cluster
    out = [(egress, onward(demand, site, role) * demand.bytes)]
    if role is Role.FIRST:
        out += [(links.between[mine, other], demand.bytes) for other in demand.clusters if other != mine]
    return out


def onward(demand: Demand, site: int, role: Role) -> int:
    """To how many nodes somebody in a remote site sends what comes in through him."""
    if role is Role.ENTRY:
        return 0
    clusters = demand.clusters
    own = len(clusters[demand.remote[site].cluster]) - 1
    return own + (len(clusters) - 1 if role is Role.FIRST else 0)


def source_load(demand: Demand, site: int, source: int, links: Links) -> tuple[int, int]:
    """Link and bytes, on top of the fixed ones, if one holder serves a whole local site."""
    return links.local_egress[source], len(demand.local[site].needers) * demand.bytes


def cluster_pairs(demand: Demand, links: Links) -> list[tuple[int, int]]:
    """Lawful (holder's cluster, first receiver's cluster) of a class, where there is more than one cluster."""
    if not links.between:
        return []
    sources = sorted({links.cluster[holder] for holder in demand.holders})
    targets = sorted(demand.clusters)
    within = [(cluster, cluster) for cluster in sources if cluster in demand.clusters]
    return within or [(source, target) for source in sources for target in targets]


def first_sites(demand: Demand, links: Links) -> list[int]:
    """Positions of the remote sites that may receive a class first."""
    allowed = {far for _, far in cluster_pairs(demand, links)}
    return [number for number, site in enumerate(demand.remote) if not allowed or site.cluster in allowed]


def link_loads(demands: Sequence[Demand], shares: Sequence[Shares], links: Links) -> dict[int, float]:
    """Bytes that a division puts on every link."""
    loads: dict[int, float] = {}
    for demand, share in zip(demands, shares, strict=True):
        parts: list[tuple[int, float]] = list(fixed_loads(demand, links).items())
        parts += [(links.egress[holder], part * demand.bytes) for holder, part in share.holders]
        site_of = {door: site for site, here in enumerate(demand.remote) for door in here.doors}
        entries = tuple(part for site in share.entries for part in site)
        for role, doors in ((Role.FIRST, share.first), (Role.GATEWAY, share.gateways), (Role.ENTRY, entries)):
            for door, part in doors:
                parts += [(link, part * n) for link, n in door_loads(demand, site_of[door], door, links, role)]
        for site, sources in enumerate(share.sources):
            for source, part in sources:
                link, count = source_load(demand, site, source, links)
                parts.append((link, part * count))
        for (near, far), part in share.crossings:
            if near != far:
                parts.append((links.between[near, far], part * demand.bytes))
        for link, amount in parts:
            loads[link] = loads.get(link, 0) + amount
    return loads


def longest_s(loads: dict[int, float], links: Links) -> float:
    """The longest time that any link needs for its bytes."""
    return max((count / float(links.bytes_per_s[link]) for link, count in loads.items()), default=0.0)
