"""Topology files.

::

    [[node]]
    name = "a"                           # optional
    workers = ["trainer/0", "trainer/1"]
    nic_bytes_per_s = 50e9               # of one NIC: a number, or { egress = 50e9, ingress = 25e9 }
    shared_nic = false                   # optional: one NIC for all workers of the node
    local_bytes_per_s = 900e9
    cluster = "east"                     # optional

    [[engine]]
    name = "engine/0"
    workers = ["engine/0/0", "engine/0/1"]

    [[link]]                             # one for every two clusters
    clusters = ["east", "west"]
    bytes_per_s = 100e9

Or one table ``[uniform]`` with the arguments of ``Topology.uniform``.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from transfer_exec.errors import TopologyError
from transfer_exec.topology import ClusterLink, Engine, Node, Topology

_Table = dict[str, object]
_UNIFORM = ("trainers", "engines", "engine_size", "workers_per_node", "nic_bytes_per_s", "local_bytes_per_s")


def read_topology(path: Path) -> Topology:
    """Read a file; TopologyError names file and place."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{path}: no TOML: {error}") from error
    try:
        return _topology(table)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error


def _topology(table: _Table) -> Topology:
    _check_keys("the file", table, needed=(), optional=("uniform", "node", "engine", "link"))
    if "uniform" in table:
        if len(table) > 1:
            raise TopologyError("[uniform] describes the whole cluster; expected no other tables beside it")
        return _uniform(table["uniform"])
    if "node" not in table:
        raise TopologyError("no [[node]] and no [uniform]; describe at least one node")
    return Topology(
        [_node(number, entry) for number, entry in enumerate(_tables(table, "node"))],
        [_engine(f"engine[{number}]", entry) for number, entry in enumerate(_tables(table, "engine"))],
        [_link(f"link[{number}]", entry) for number, entry in enumerate(_tables(table, "link"))],
    )


def _uniform(value: object) -> Topology:
    if not isinstance(value, dict):
        raise TopologyError("uniform: expected a table")
    _check_keys("uniform", value, needed=_UNIFORM, optional=())
    counts = {key: _whole(f"uniform.{key}", value[key]) for key in _UNIFORM[:4]}
    return Topology.uniform(
        trainers=counts["trainers"],
        engines=counts["engines"],
        engine_size=counts["engine_size"],
        workers_per_node=counts["workers_per_node"],
        nic_bytes_per_s=_number("uniform.nic_bytes_per_s", value["nic_bytes_per_s"]),
        local_bytes_per_s=_number("uniform.local_bytes_per_s", value["local_bytes_per_s"]),
    )


def _node(number: int, table: _Table) -> Node:
    place = f"node[{number}]"
    needed = ("workers", "nic_bytes_per_s", "local_bytes_per_s")
    _check_keys(place, table, needed=needed, optional=("name", "shared_nic", "cluster"))
    shared = table.get("shared_nic", False)
    if not isinstance(shared, bool):
        raise TopologyError(f"{place}.shared_nic: {shared!r}; expected true or false")
    speed = table["nic_bytes_per_s"]
    if isinstance(speed, dict):
        inner = f"{place}.nic_bytes_per_s"
        _check_keys(inner, speed, needed=("egress", "ingress"), optional=())
        both = (_number(f"{inner}.egress", speed["egress"]), _number(f"{inner}.ingress", speed["ingress"]))
    else:
        both = (_number(f"{place}.nic_bytes_per_s", speed),) * 2
    return Node.of(
        _text(f"{place}.name", table.get("name", f"node {number}")),
        _texts(f"{place}.workers", table["workers"]),
        nic_bytes_per_s=both,
        local_bytes_per_s=_number(f"{place}.local_bytes_per_s", table["local_bytes_per_s"]),
        shared_nic=shared,
        cluster=_text(f"{place}.cluster", table.get("cluster", "main")),
    )


def _engine(place: str, table: _Table) -> Engine:
    _check_keys(place, table, needed=("name", "workers"), optional=())
    return Engine(_text(f"{place}.name", table["name"]), _texts(f"{place}.workers", table["workers"]))


def _link(place: str, table: _Table) -> ClusterLink:
    _check_keys(place, table, needed=("clusters", "bytes_per_s"), optional=())
    clusters = _texts(f"{place}.clusters", table["clusters"])
    if len(clusters) != 2:
        raise TopologyError(f"{place}.clusters: {len(clusters)} names; expected two")
    return ClusterLink((clusters[0], clusters[1]), _number(f"{place}.bytes_per_s", table["bytes_per_s"]))


def _tables(table: _Table, key: str) -> list[_Table]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TopologyError(f"{key}: expected tables, each under its own [[{key}]]")
    return value


def _check_keys(place: str, table: _Table, *, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    known = (*needed, *optional)
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
            raise TopologyError(f"{place}: unknown key {key!r}; {hint}")
    for key in needed:
        if key not in table:
            raise TopologyError(f"{place}: {key} is missing")


def _whole(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TopologyError(f"{place}: {value!r}; expected an integer")
    return value


def _number(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise TopologyError(f"{place}: {value!r}; expected a number above zero, in bytes per second")
    try:
        return float(value)
    except OverflowError:
        raise TopologyError(f"{place}: too large a number; expected bytes per second") from None


def _text(place: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TopologyError(f"{place}: {value!r}; expected a non-empty string")
    return value


def _texts(place: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TopologyError(f"{place}: {value!r}; expected a list of names")
    return tuple(_text(f"{place}[{position}]", name) for position, name in enumerate(value))
