"""How fast any lawful plan can be: the paper's Equation 1, for every link that must carry something.

``T_min = max(M / B_T, max over nodes of M_v / B_v)``: the trainers together send one copy of the M bytes that some
node lacks, and node v receives the M_v bytes that it needs and does not hold. Beside the trainers as a whole, every
group of trainers counts that alone holds some of the bytes, and beside the nodes the links between clusters, what
first receivers must send on, and what local links must carry where a node holds its bytes itself.

The bound is not always reachable: it looks at one group of links at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from transfer_exec.demand import Demand
from transfer_exec.links import Links


class Bound(NamedTuple):
    """A time that no lawful plan beats, and the links that need it."""

    seconds: float
    link: str


def lower_bound(demands: Sequence[Demand], links: Links) -> Bound:
    """The largest required time of any constrained group of links; zero seconds if nothing must move."""
    found = Bound(0.0, "nothing has to move")
    for bound in _bounds(demands, links):
        if bound.seconds > found.seconds:
            found = bound
    return found


def _bounds(demands: Sequence[Demand], links: Links) -> Iterator[Bound]:
    remote = [demand for demand in demands if demand.remote]
    yield from _trainers(remote, links)
    yield from _nodes(remote, links)
    yield from _forwarding(remote, links)
    yield from _clusters(remote, links)
    yield from _inside(demands, links)


def _speed(numbers: Iterable[int], links: Links) -> float:
    return float(links.bytes_per_s[sorted(set(numbers))].sum())


def _trainers(remote: Sequence[Demand], links: Links) -> Iterator[Bound]:
    """What only some trainers may send leaves through their NICs, once."""
    held: dict[frozenset[int], int] = {}
    for demand in remote:
        group = frozenset(demand.holders)
        held[group] = held.get(group, 0) + demand.bytes
    everyone = frozenset().union(*held) if held else frozenset[int]()
    if everyone:
        yield Bound(sum(held.values()) / _speed((links.egress[h] for h in everyone), links), "egress of all trainers")
    for group, count in _within(held).items():
        speed = _speed((links.egress[holder] for holder in group), links)
        yield Bound(count / speed, f"egress of {_group(group, links)}")


def _within(need: dict[frozenset[int], int]) -> dict[frozenset[int], int]:
    """Of bytes that must use one of a set each: for every set, all that can use nothing outside it."""
    masks = [(sum(1 << number for number in group), count) for group, count in need.items()]
    return {
        group: sum(count for other, count in masks if other | mask == mask)
        for group, (mask, _) in zip(need, masks, strict=True)
    }


def _group(workers: frozenset[int], links: Links) -> str:
    names = [links.workers[worker] for worker in sorted(workers)]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} workers)"


def _nodes(remote: Sequence[Demand], links: Links) -> Iterator[Bound]:
    """What a node needs and lacks comes in through its rollouts' NICs."""
    need: dict[int, int] = {}
    doors: dict[int, tuple[int, ...]] = {}
    for demand in remote:
        for site in demand.remote:
            need[site.node] = need.get(site.node, 0) + demand.bytes
            doors[site.node] = site.doors
    for node, count in sorted(need.items()):
        speed = _speed((links.ingress[door] for door in doors[node]), links)
        yield Bound(count / speed, f"ingress of node {node} ({_group(frozenset(doors[node]), links)})")


def _forwarding(remote: Sequence[Demand], links: Links) -> Iterator[Bound]:
    """Whoever receives first sends to all other nodes that need it."""
    doors = {door for demand in remote for site in demand.remote for door in site.doors}
    if doors:
        count = sum(demand.bytes * (len(demand.remote) - 1) for demand in remote)
        yield Bound(count / _speed((links.egress[door] for door in doors), links), "egress of all rollouts")


def _clusters(remote: Sequence[Demand], links: Links) -> Iterator[Bound]:
    """What a cluster needs and nobody in it holds comes in over its links; all crossings use some link together."""
    into: dict[int, dict[frozenset[int], int]] = {}
    everywhere: dict[frozenset[int], int] = {}
    for demand in remote:
        holding = {links.cluster[holder] for holder in demand.holders}
        near = holding & demand.clusters.keys()
        every: frozenset[int] = frozenset()
        for cluster in demand.clusters:
            sources = (near or holding | demand.clusters.keys()) - {cluster}
            group = frozenset(links.between[source, cluster] for source in sources)
            every |= group
            if cluster not in holding:
                counted = into.setdefault(cluster, {})
                counted[group] = counted.get(group, 0) + demand.bytes
        if every:
            crossings = len(demand.clusters) - bool(near)
            everywhere[every] = everywhere.get(every, 0) + crossings * demand.bytes
    for _, counted in sorted(into.items()):
        yield from _over_links(counted, links)
    yield from _over_links(everywhere, links)


def _over_links(need: dict[frozenset[int], int], links: Links) -> Iterator[Bound]:
    if not need:
        return
    every = frozenset().union(*need)
    for group, count in {every: sum(need.values()), **_within(need)}.items():
        # In an order that does not depend on that in which the topology lists its links.
        yield Bound(count / _speed(group, links), " and ".join(sorted(links.names[number] for number in group)))


def _inside(demands: Sequence[Demand], links: Links) -> Iterator[Bound]:
    """Where a node holds a class, each of its needers gets it over a local link."""
    need: dict[int, int] = {}
    for demand in demands:
        for site in demand.local:
            for worker in site.needers:
                need[links.local_ingress[worker]] = need.get(links.local_ingress[worker], 0) + demand.bytes
    for link, count in sorted(need.items()):
        yield Bound(count / _speed([link], links), links.names[link])
