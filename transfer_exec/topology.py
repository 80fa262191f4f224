"""The cluster: which worker sits in which node, and how fast bytes leave and enter.

A node is a machine. Each of its workers sends and receives over one NIC, its own or a shared one, and exchanges
bytes with the other workers of the node over local links. Nodes may stand in several clusters joined by links.

>>> topology = Topology.uniform(
...     trainers=2, engines=2, engine_size=3, workers_per_node=4, nic_bytes_per_s=50e9, local_bytes_per_s=900e9)
>>> for node in topology.nodes:
...     print(node.name, *node.workers)
node 0 trainer/0 trainer/1
node 1 engine/0/0 engine/0/1 engine/0/2 engine/1/0
node 2 engine/1/1 engine/1/2
>>> topology.node_of("engine/1/2")
2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from transfer_exec.errors import TopologyError

_NAMES_SHOWN = 8
_MOST_WORKERS = 1 << 20
_SLOWEST, _FASTEST = 1e-6, 1e18
"""Bytes per second; what is outside is a unit mistaken, and its quotients are no numbers."""
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Nic:
    """One network interface and the workers that use it.

    Attributes
    ----------
    workers
        At least one; several share the bandwidth.
    egress_bytes_per_s, ingress_bytes_per_s
        Above zero, from 1e-6 to 1e18; ``inf`` where the interface never limits.
    """

    workers: tuple[str, ...]
    egress_bytes_per_s: float
    ingress_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    Attributes
    ----------
    name
        As a person knows it.
    nics
        Interfaces; their workers are the node's.
    local_bytes_per_s
        What one worker sends to, and at the same time receives from, the others of the node; ``inf`` where it
        never limits.
    cluster
        Group of nodes with a full network between them.
    """

    name: str
    nics: tuple[Nic, ...]
    local_bytes_per_s: float
    cluster: str = "main"

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of all interfaces, in order."""
        return tuple(worker for nic in self.nics for worker in nic.workers)

    @staticmethod
    def of(
        name: str,
        workers: Iterable[str],
        *,
        nic_bytes_per_s: float | tuple[float, float],
        local_bytes_per_s: float,
        shared_nic: bool = False,
        cluster: str = "main",
    ) -> Node:
        """A node whose interfaces are alike.

        Parameters
        ----------
        nic_bytes_per_s
            Of one interface, in both directions or as ``(egress, ingress)``.
        shared_nic
            One interface for all workers instead of one each.
        """
        egress, ingress = nic_bytes_per_s if isinstance(nic_bytes_per_s, tuple) else (nic_bytes_per_s,) * 2
        members = _names(f"node {name}", workers)
        groups = ((members,) if members else ()) if shared_nic else tuple((worker,) for worker in members)
        return Node(name, tuple(Nic(group, egress, ingress) for group in groups), local_bytes_per_s, cluster)


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """What two clusters can send each other, each way at the same time."""

    clusters: tuple[str, str]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """The ranks of one rollout engine, in rank order."""

    name: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster description that holds together.

    Parameters
    ----------
    nodes
        Every worker is in exactly one; a node's number is its position.
    engines
        The rollout engines; a worker in none of them is a trainer.
    links
        One for every two clusters among the nodes'.

    Raises
    ------
    TopologyError
        If a part is no Node, Nic, Engine or ClusterLink, a worker is in two nodes, interfaces or engines, an engine's
        worker is in no node, a bandwidth is not above zero, or two clusters have no link or two.
    """

    nodes: tuple[Node, ...]
    engines: tuple[Engine, ...] = ()
    links: tuple[ClusterLink, ...] = ()
    _node_of: dict[str, int] = field(init=False, repr=False, compare=False)

    def __init__(
        self, nodes: Iterable[Node], engines: Iterable[Engine] = (), links: Iterable[ClusterLink] = ()
    ) -> None:
        object.__setattr__(self, "nodes", _all_of("nodes", nodes, Node))
        object.__setattr__(self, "engines", _all_of("engines", engines, Engine))
        object.__setattr__(self, "links", _all_of("links", links, ClusterLink))
        object.__setattr__(self, "_node_of", _place_workers(self.nodes))
        _check_bandwidths(self.nodes, self.links)
        _check_engines(self.engines, self._node_of)
        _check_links(self.nodes, self.links)

    @staticmethod
    def uniform(
        *,
        trainers: int,
        engines: int,
        engine_size: int,
        workers_per_node: int,
        nic_bytes_per_s: float,
        local_bytes_per_s: float,
    ) -> Topology:
        """Like nodes with one NIC per worker.

        Trainers are ``trainer/0, trainer/1, ...``; rank r of engine e is ``engine/<e>/<r>``. Trainers, and apart
        from them the rollouts in order of (engine, rank), are cut into nodes of ``workers_per_node``, so a node may
        hold ranks of two engines and the last of either side may be smaller.

        Raises
        ------
        TopologyError
            If a count is negative, ``workers_per_node`` is below 1, or a bandwidth is not above zero.
        """
        for name, count, least in [
            ("trainers", trainers, 0),
            ("engines", engines, 0),
            ("engine_size", engine_size, 0),
            ("workers_per_node", workers_per_node, 1),
        ]:
            if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= _MOST_WORKERS:
                most = f" and at most {_MOST_WORKERS:,}" if isinstance(count, int) and count > _MOST_WORKERS else ""
                raise TopologyError(f"{name} is {count!r}; expected an integer of at least {least}{most}")
        sides = [
            [f"trainer/{rank}" for rank in range(trainers)],
            [f"engine/{engine}/{rank}" for engine in range(engines) for rank in range(engine_size)],
        ]
        groups = [side[at : at + workers_per_node] for side in sides for at in range(0, len(side), workers_per_node)]
        return Topology(
            (
                Node.of(f"node {n}", group, nic_bytes_per_s=nic_bytes_per_s, local_bytes_per_s=local_bytes_per_s)
                for n, group in enumerate(groups)
            ),
            (
                Engine(f"engine/{engine}", tuple(f"engine/{engine}/{rank}" for rank in range(engine_size)))
                for engine in range(engines)
            ),
        )

    @staticmethod
    def from_toml(path: str | Path) -> Topology:
        """Read a topology file; ``topology_file`` shows its form.

        Raises
        ------
        TopologyError
            If the file cannot be read, is no TOML, has a wrong or unknown key, or describes no lawful cluster;
            the message names file and place.
        """
        from transfer_exec.topology_file import read_topology

        return read_topology(Path(path))

    @staticmethod
    def detect(
        workers: Iterable[str] = ("trainer/0", "engine/0/0"),
        *,
        nic_bytes_per_s: float | None = None,
        local_bytes_per_s: float | None = None,
    ) -> Topology:
        """This host as one node with the workers named.

        Interfaces and their speeds are those of the system, 100 Gb/s where it does not know; local bandwidth is what a
        core copies in memory, measured in about a tenth of a second. What is declared is not looked up: accelerators
        that are joined by faster links of their own need ``local_bytes_per_s``.

        Parameters
        ----------
        workers
            In the order of interfaces: consecutive ones share an interface where there are fewer of them. Ranks of
            engines are named ``engine/<name>/<rank>``; all others are trainers.
        nic_bytes_per_s, local_bytes_per_s
            Of one interface each way, and of one worker inside the node.

        Raises
        ------
        TopologyError
            If no worker is named or one twice, or a bandwidth is not above zero.
        """
        from transfer_exec.host import topology_of_host
        from transfer_exec.host_reading import read_host

        return topology_of_host(
            read_host(), workers, nic_bytes_per_s=nic_bytes_per_s, local_bytes_per_s=local_bytes_per_s
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """Every worker, by node."""
        return tuple(self._node_of)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Names of all clusters, sorted."""
        return tuple(sorted({node.cluster for node in self.nodes}))

    def node_of(self, worker: str) -> int:
        """Number of the node a worker is in.

        Raises
        ------
        TopologyError
            If it is in none.
        """
        found = self._node_of.get(worker)
        if found is None:
            raise TopologyError(
                f"{worker}: in no node of this topology, whose {len(self._node_of)} workers are {_listed(self.workers)}"
            )
        return found


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none"
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _all_of(what: str, given: Iterable[_Part], kind: type[_Part]) -> tuple[_Part, ...]:
    parts = tuple(given) if isinstance(given, Iterable) else (given,)
    for position, part in enumerate(parts):
        if not isinstance(part, kind):
            raise TopologyError(f"{what}[{position}] is {part!r}; expected: {kind.__name__}")
    return parts


def _names(place: str, workers: Iterable[str]) -> tuple[str, ...]:
    if isinstance(workers, str) or not isinstance(workers, Iterable):
        raise TopologyError(f"{place}: workers is {workers!r}; expected a list of names")
    return tuple(workers)


def _place_workers(nodes: tuple[Node, ...]) -> dict[str, int]:
    places: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if not isinstance(node.cluster, str) or not node.cluster:
            raise TopologyError(f"node {number} ({node.name}): cluster {node.cluster!r}; expected a non-empty string")
        for nic in _all_of(f"node {number} ({node.name}): nics", node.nics, Nic):
            if not _names(f"node {number} ({node.name})", nic.workers):
                raise TopologyError(f"node {number} ({node.name}): a NIC without workers; leave it out")
        for worker in node.workers:
            if not isinstance(worker, str) or not worker:
                raise TopologyError(f"node {number} ({node.name}): worker {worker!r}; expected a non-empty string")
            if worker in places:
                first = places[worker]
                where = "twice" if first == number else f"and in node {first} ({nodes[first].name})"
                raise TopologyError(f"{worker}: in node {number} ({node.name}) {where}; expected in one node, once")
            places[worker] = number
    return places


def _check_bandwidths(nodes: tuple[Node, ...], links: tuple[ClusterLink, ...]) -> None:
    for number, node in enumerate(nodes):
        place = f"node {number} ({node.name})"
        _check_bandwidth(f"{place}: local_bytes_per_s", node.local_bytes_per_s)
        for nic in node.nics:
            _check_bandwidth(f"{place}: NIC egress of {_listed(nic.workers)}", nic.egress_bytes_per_s)
            _check_bandwidth(f"{place}: NIC ingress of {_listed(nic.workers)}", nic.ingress_bytes_per_s)
    for link in links:
        if len(link.clusters) != 2 or not all(isinstance(name, str) for name in link.clusters):
            raise TopologyError(f"link between {link.clusters!r}; expected the names of two clusters")
        _check_bandwidth(f"link between {' and '.join(link.clusters)}", link.bytes_per_s)


def _check_bandwidth(what: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise TopologyError(f"{what} is {value!r}; expected bytes per second above zero")
    if not _SLOWEST <= value <= _FASTEST and value != math.inf:
        raise TopologyError(f"{what} is {str(value)[:24]}; expected bytes per second from 1e-6 to 1e18, or inf")


def _check_engines(engines: tuple[Engine, ...], places: dict[str, int]) -> None:
    names = Counter(engine.name for engine in engines)
    for name, times in names.items():
        if times > 1:
            raise TopologyError(f"engine {name}: described {times} times")
    owner: dict[str, str] = {}
    for engine in engines:
        for worker in engine.workers:
            if worker not in places:
                raise TopologyError(f"{worker} of engine {engine.name}: in no node; add it to one")
            if worker in owner:
                raise TopologyError(f"{worker}: in engine {owner[worker]} and in engine {engine.name}, or twice in one")
            owner[worker] = engine.name


def _check_links(nodes: tuple[Node, ...], links: tuple[ClusterLink, ...]) -> None:
    clusters = sorted({node.cluster for node in nodes})
    counted = Counter(tuple(sorted(link.clusters)) for link in links)
    for pair, times in counted.items():
        if pair[0] == pair[1] or not set(pair) <= set(clusters):
            raise TopologyError(
                f"link between {' and '.join(pair)}: expected two of the clusters {', '.join(clusters)}"
            )
        if times > 1:
            raise TopologyError(f"link between {' and '.join(pair)}: given {times} times; add up their bandwidths")
    for pair in combinations(clusters, 2):
        if pair not in counted:
            raise TopologyError(f"clusters {pair[0]} and {pair[1]} have no link; say what they can send each other")
