"""A division without a solver: fill links like vessels, one demand class after another, the largest first.

Each class is poured over its holders so that the fullest of their links rises least, then over the workers of
each needing node, then over those of them that may receive it first or let it into their cluster. Near the optimum
where layouts are regular; its cost is about ``classes * workers``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_exec.demand import Demand
from transfer_exec.links import Links, Seconds
from transfer_exec.shares import (
    Balance,
    Parts,
    Role,
    Shares,
    cluster_pairs,
    first_sites,
    link_loads,
    longest_s,
    onward,
)

_NOTHING = 1e-12


def spread_demands(demands: Sequence[Demand], links: Links) -> Balance:
    """Divide every class by pouring; ``optimum_s`` is the longest link time that this gives."""
    loads = np.zeros(len(links.bytes_per_s))
    shares: list[Shares | None] = [None] * len(demands)
    order = sorted(range(len(demands)), key=lambda index: (-demands[index].bytes, index))
    for index in order:
        shares[index] = _spread_one(demands[index], links, loads)
    done = tuple(share for share in shares if share is not None)
    return Balance(done, longest_s(link_loads(demands, done, links), links), "poured")


def _spread_one(demand: Demand, links: Links, loads: Seconds) -> Shares:
    sources = []
    for local in demand.local:
        sources.append(_pour(demand.bytes * len(local.needers), local.doors, links.local_egress, links, loads))
    if not demand.remote:
        return Shares((), (), (), (), tuple(sources), ())
    holders = _pour(demand.bytes, demand.holders, links.egress, links, loads)
    lets_in = [_pour(demand.bytes, site.doors, links.ingress, links, loads) for site in demand.remote]
    first = _first(demand, holders, lets_in, links, loads)
    roots = dict(first)
    gateways: list[tuple[int, float]] = []
    for members in demand.clusters.values() if len(demand.clusters) > 1 else ():
        limits = {door: part - roots.get(door, 0.0) for site in members for door, part in lets_in[site]}
        lacking = 1.0 - sum(roots.get(door, 0.0) for door in limits)
        gateways += _forward(demand, lacking, len(members) - 1, limits, links, loads)
    for door, part in gateways:
        roots[door] = roots.get(door, 0.0) + part
    entries = tuple(
        tuple((door, part - roots.get(door, 0.0)) for door, part in parts if part > roots.get(door, 0.0))
        for parts in lets_in
    )
    return Shares(holders, first, tuple(gateways), entries, tuple(sources), _crossings(holders, first, links))


def _first(demand: Demand, holders: Parts, lets_in: Sequence[Parts], links: Links, loads: Seconds) -> Parts:
    """First receivers; in the clusters of holders as much as those send, if there are any sites."""
    groups = [(first_sites(demand, links), 1.0)]
    if any(near == far for near, far in cluster_pairs(demand, links)):
        sent: dict[int, float] = {}
        for holder, part in holders:
            sent[links.cluster[holder]] = sent.get(links.cluster[holder], 0.0) + part
        groups = [(demand.clusters[near], part) for near, part in sent.items()]
    first: list[tuple[int, float]] = []
    for sites, part in groups:
        limits = {door: share for site in sites for door, share in lets_in[site]}
        first += _forward(demand, part, onward(demand, sites[0], Role.FIRST), limits, links, loads)
    return tuple(first)


def _forward(
    demand: Demand, share: float, nodes: int, limits: dict[int, float], links: Links, loads: Seconds
) -> list[tuple[int, float]]:
    """Divide a share of a class over workers that each send it on to some nodes; none takes more than its limit."""
    room = sum(limits.values())
    if share <= _NOTHING or room <= 0:
        return []
    if not nodes:
        return [(door, part * share / room) for door, part in limits.items()]
    parts = _pour(share * nodes * demand.bytes, tuple(limits), links.egress, links, loads, limits, nodes * demand.bytes)
    return [(door, part * share) for door, part in parts]


def _pour(
    amount: float,
    workers: Sequence[int],
    link_of: Sequence[int],
    links: Links,
    loads: Seconds,
    limits: dict[int, float] | None = None,
    limit_bytes: float = 0.0,
) -> Parts:
    """Divide bytes over workers so that their links' times rise to one level; adds them to ``loads`` (bytes).

    Workers that share a link share its part. A worker gets at most its limit, a fraction of ``limit_bytes``.
    """
    sharing: dict[int, list[int]] = {}
    for worker in workers:
        sharing.setdefault(link_of[worker], []).append(worker)
    keys = list(sharing)
    speed = np.minimum(links.bytes_per_s[keys], 1e300)
    present = loads[keys] / speed
    room = np.array(
        [sum(1.0 if limits is None else limits[worker] for worker in sharing[key]) for key in keys], dtype=np.float64
    )
    whole = amount if limits is None else limit_bytes
    fractions = _fill(present, speed, room * whole, float(amount))
    parts = []
    for key, fraction, space in zip(keys, fractions.tolist(), room.tolist(), strict=True):
        loads[key] += fraction * amount
        for worker in sharing[key]:
            own = 1.0 if limits is None else limits[worker]
            if fraction * own > 0:
                parts.append((worker, fraction * own / space))
    return tuple(parts)


def _fill(present: Seconds, speed: Seconds, room: Seconds, amount: float) -> Seconds:
    """Fractions of ``amount`` that lift vessels at times ``present`` to one level, none past its room (bytes)."""
    low, high = float(present.min()), float(present.max() + amount / speed.min() + 1e-300)
    for _ in range(100):
        level = (low + high) / 2
        if float(np.minimum(np.maximum(level - present, 0.0) * speed, room).sum()) < amount:
            low = level
        else:
            high = level
    poured = np.minimum(np.maximum(high - present, 0.0) * speed, room)
    fractions: Seconds = poured / poured.sum()
    return fractions


def _crossings(holders: Parts, first: Parts, links: Links) -> tuple[tuple[tuple[int, int], float], ...]:
    """Pair holders and first receivers of one cluster as far as they go, then the rest in order."""
    have: dict[int, float] = {}
    want: dict[int, float] = {}
    for worker, part in holders:
        have[links.cluster[worker]] = have.get(links.cluster[worker], 0.0) + part
    for worker, part in first:
        want[links.cluster[worker]] = want.get(links.cluster[worker], 0.0) + part
    pairs = [(own, own) for own in sorted(have) if own in want]
    pairs += [(source, target) for source in sorted(have) for target in sorted(want) if source != target]
    out = []
    for source, target in pairs:
        part = min(have[source], want[target])
        if part > 0:
            have[source] -= part
            want[target] -= part
            out.append(((source, target), part))
    return tuple(out)
