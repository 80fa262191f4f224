"""Everything with a bandwidth, numbered, and what a hop puts on it.

A link is one direction of one thing: what a NIC sends or receives over the network, what a worker sends or receives
inside its node, what one cluster sends another. A load is an array of bytes per link; loads over bandwidths are
times, and the longest of them is how fast a plan can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer_exec.topology import Topology

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """The links that some workers use.

    Attributes
    ----------
    workers
        Names; every array below that speaks of workers is in this order.
    node, cluster
        Numbers per worker.
    egress, ingress, local_egress, local_ingress
        Link number per worker; workers of one NIC share the first two.
    between
        Link number of ``(source cluster, target cluster)`` for every two clusters.
    groups
        Per link what kind it is and where: links of one kind and node are alike. Those of holders, of needers and
        between clusters are different kinds.
    bytes_per_s
        Per link.
    names
        Per link, as a person reads it.
    """

    workers: tuple[str, ...]
    node: tuple[int, ...]
    cluster: tuple[int, ...]
    egress: tuple[int, ...]
    ingress: tuple[int, ...]
    local_egress: tuple[int, ...]
    local_ingress: tuple[int, ...]
    between: dict[tuple[int, int], int]
    groups: tuple[tuple[int, int], ...]
    bytes_per_s: Seconds
    names: tuple[str, ...]

    @staticmethod
    def of(topology: Topology, holders: Sequence[str], needers: Sequence[str]) -> Links:
        """Number the links of these workers, holders first; TopologyError if one is in no node."""
        workers = (*holders, *needers)
        nodes = tuple(topology.node_of(worker) for worker in workers)
        cluster_number = {name: number for number, name in enumerate(topology.clusters)}
        nic_of = {}
        for number, node in enumerate(topology.nodes):
            for position, nic in enumerate(node.nics):
                for worker in nic.workers:
                    nic_of[worker] = (number, position)
        names: list[str] = []
        speeds: list[float] = []
        groups: list[tuple[int, int]] = []
        first: dict[tuple[int, int], int] = {}
        columns: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])

        def link(name: str, bytes_per_s: float, kind: int, place: int) -> int:
            names.append(name)
            speeds.append(float(bytes_per_s))
            groups.append((kind, place))
            return len(names) - 1

        for position, (worker, number) in enumerate(zip(workers, nodes, strict=True)):
            side = 4 * (position >= len(holders))
            key = nic_of[worker]
            node = topology.nodes[number]
            nic = node.nics[key[1]]
            if key not in first:
                whose = worker if len(nic.workers) == 1 else f"{node.name}, shared by {len(nic.workers)} workers"
                first[key] = link(f"NIC egress of {whose}", nic.egress_bytes_per_s, side, number)
                link(f"NIC ingress of {whose}", nic.ingress_bytes_per_s, side + 1, number)
            columns[0].append(first[key])
            columns[1].append(first[key] + 1)
            columns[2].append(link(f"local egress of {worker}", node.local_bytes_per_s, side + 2, number))
            columns[3].append(link(f"local ingress of {worker}", node.local_bytes_per_s, side + 3, number))
        between = {}
        for pair in topology.links:
            for source, target in (pair.clusters, pair.clusters[::-1]):
                number = link(f"link from cluster {source} to {target}", pair.bytes_per_s, 8, len(names))
                between[cluster_number[source], cluster_number[target]] = number
        return Links(
            workers=workers,
            node=nodes,
            cluster=tuple(cluster_number[topology.nodes[number].cluster] for number in nodes),
            egress=tuple(columns[0]),
            ingress=tuple(columns[1]),
            local_egress=tuple(columns[2]),
            local_ingress=tuple(columns[3]),
            between=between,
            groups=tuple(groups),
            bytes_per_s=np.array(speeds, dtype=np.float64),
            names=tuple(names),
        )

    def crossed(self, source: int, target: int) -> tuple[int, ...]:
        """Links that bytes from one worker to another load."""
        if self.node[source] == self.node[target]:
            return self.local_egress[source], self.local_ingress[target]
        if self.cluster[source] == self.cluster[target]:
            return self.egress[source], self.ingress[target]
        return self.egress[source], self.ingress[target], self.between[self.cluster[source], self.cluster[target]]
