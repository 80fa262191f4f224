"""How demand classes are divided over workers, in fractions, and the link times that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer_exec.demand import Demand
from transfer_exec.links import Links, Seconds

Parts = tuple[tuple[int, float], ...]
"""Worker numbers and their fractions."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How one demand class is divided.

    Attributes
    ----------
    holders
        Who sends it over the network; empty if it has no remote site.
    first
        First receivers.
    entries
        Per remote site, who lets in what no first receiver of the site got; fractions of the whole class, which
        add up to one with the site's first receivers.
    sources
        Per local site, the holders in the node that serve it.
    crossings
        Fraction per (holder's cluster, first receiver's cluster).
    """

    holders: Parts
    first: Parts
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


def door_loads(demand: Demand, site: int, door: int, links: Links, *, first: bool) -> list[tuple[int, int]]:
    """Bytes per link if the whole class comes into a remote site through one worker.

    Parameters
    ----------
    first
        Whether the worker is the first receiver and so sends the class on to every other remote site.
    """
    here = demand.remote[site]
    passed_on = len(here.needers) - (door in here.needers)
    out = [(links.ingress[door], demand.bytes), (links.local_egress[door], passed_on * demand.bytes)]
    out += [(links.local_ingress[needer], demand.bytes) for needer in here.needers if needer != door]
    if first:
        out.append((links.egress[door], (len(demand.remote) - 1) * demand.bytes))
        mine = links.cluster[door]
        for other in demand.remote:
            theirs = links.cluster[other.doors[0]]
            if theirs != mine:
                out.append((links.between[mine, theirs], demand.bytes))
    return out


def source_loads(demand: Demand, site: int, source: int, links: Links) -> list[tuple[int, int]]:
    """Bytes per link if one holder serves a whole local site."""
    here = demand.local[site]
    out = [(links.local_egress[source], len(here.needers) * demand.bytes)]
    return out + [(links.local_ingress[needer], demand.bytes) for needer in here.needers]


def link_times(demands: Sequence[Demand], shares: Sequence[Shares], links: Links) -> Seconds:
    """Seconds that every link takes under a division."""
    loads = np.zeros(len(links.bytes_per_s))
    for demand, share in zip(demands, shares, strict=True):
        for holder, part in share.holders:
            loads[links.egress[holder]] += part * demand.bytes
        site_of = {door: site for site, here in enumerate(demand.remote) for door in here.doors}
        for door, part in share.first:
            for link, count in door_loads(demand, site_of[door], door, links, first=True):
                loads[link] += part * count
        for site, parts in enumerate(share.entries):
            for door, part in parts:
                for link, count in door_loads(demand, site, door, links, first=False):
                    loads[link] += part * count
        for site, parts in enumerate(share.sources):
            for source, part in parts:
                for link, count in source_loads(demand, site, source, links):
                    loads[link] += part * count
        for (source, target), part in share.crossings:
            if source != target:
                loads[links.between[source, target]] += part * demand.bytes
    times: Seconds = loads / links.bytes_per_s
    return times
