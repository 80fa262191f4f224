"""What `transload plan` and `transload simulate` work on: a deployment file, or saved maps and a topology file.

Saved maps are files `<worker>.map` as `SourceMap.to_bytes` writes them, `/` in the worker's name written as `-`:
`trainer-0.map`, `engine-0-1.map`. Equal files are read once. A worker of one of the topology's engines needs its map,
any other holds it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from adapters.deployments import BUFFER_BYTES, DeploymentError, UpdateSettings, named, read_deployment
from adapters.deployments_layouts import Maps
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.errors import LayoutError
from layout_algebra.source_map import SourceMap
from transfer_exec.errors import TopologyError
from transfer_exec.topology import Topology

__all__ = ["Source", "load_source"]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A demand on a cluster.

    Attributes
    ----------
    name
        As a person knows it.
    model_bytes
        Of the checkpoint.
    maps
        Of all workers; equal ones are one object.
    correspondence, topology, update
        What a plan is made of.
    maps_s, correspond_s
        Seconds to declare or read the maps, and to intersect them.
    """

    name: str
    model_bytes: int
    maps: Maps
    correspondence: Correspondence
    topology: Topology
    update: UpdateSettings
    maps_s: float
    correspond_s: float


def load_source(
    file: Path | None,
    *,
    maps: Path | None,
    topology: Path | None,
    changes: Mapping[str, int | float] = MappingProxyType({}),
) -> Source:
    """Read a deployment file, or a folder of maps; a topology file takes the place of the deployment's own cluster.

    ``changes`` are ``section.key`` -> number, put in place of the deployment file's.

    Raises
    ------
    DeploymentError, TransferError, LayoutError
        If anything is missing, unreadable or contradicts itself; the message names the file and the place in it.
    """
    started = time.perf_counter()
    if (file is None) == (maps is None):
        raise DeploymentError("give either a deployment file, or --maps DIR with --topology FILE")
    if file is not None:
        deployment = read_deployment(file, changes)
        try:
            space, holders, needers = deployment.maps()
            own = deployment.topology()
        except (DeploymentError, LayoutError, TopologyError) as error:
            raise DeploymentError(f"{named(file, changes)}: {error}") from error
        where = own if topology is None else _placed(topology, [*holders, *needers])
        name, update, model_bytes = deployment.name, deployment.update, space.total_bytes
    else:
        if maps is None or topology is None:
            raise DeploymentError("--maps needs --topology FILE, which says where the workers are")
        where = Topology.from_toml(topology)
        holders, needers = _read_maps(maps, where)
        name, update = named(maps), UpdateSettings(BUFFER_BYTES)
        model_bytes = next(iter({**holders, **needers}.values())).space.total_bytes
    read = time.perf_counter()
    found = correspond(holders, needers)
    done = time.perf_counter()
    return Source(name, model_bytes, {**holders, **needers}, found, where, update, read - started, done - read)


def _placed(file: Path, workers: Iterable[str]) -> Topology:
    """The topology of a file that has all of a deployment's workers."""
    topology = Topology.from_toml(file)
    for worker in workers:
        try:
            topology.node_of(worker)
        except TopologyError as error:
            raise TopologyError(f"{file}: {error}") from error
    return topology


def _read_maps(folder: Path, topology: Topology) -> tuple[Maps, Maps]:
    rollouts = {worker for engine in topology.engines for worker in engine.workers}
    known: dict[bytes, SourceMap] = {}
    sides: tuple[Maps, Maps] = ({}, {})
    for worker in topology.workers:
        path = folder / f"{worker.replace('/', '-')}.map"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error.strerror}; it is the map of {worker}") from error
        key = hashlib.blake2b(data).digest()
        if key not in known:
            try:
                known[key] = SourceMap.from_bytes(data)
            except LayoutError as error:
                raise DeploymentError(f"{path}: {error}") from error
        sides[worker in rollouts][worker] = known[key]
    if not sides[0] or not sides[1]:
        side = "trainers" if not sides[0] else "rollout engines"
        raise DeploymentError(f"{folder}: the topology has no {side}; add them to its nodes and engines")
    return sides
