"""Deployments as files: a model, how trainers and rollouts cut it, and the cluster they run on.

::

    name = "Qwen3-30B-A3B on 4 nodes"

    [model]                       # the numbers of config.json, or  config = "config.json"  beside this file
    model_type = "qwen3_moe"
    hidden_size = 2048            # and so on

    [cluster]
    gpus_per_node = 8
    nic_bytes_per_s = 50e9        # of every GPU
    local_bytes_per_s = 450e9     # inside a node, of every GPU

    [trainer]
    nodes = 2
    tp = 4                        # tp * pp * cp * dp multiply to the GPUs; ep * etp divide those of a stage
    dp = 4
    ep = 8                        # or  fsdp = 16  and  dp = 1

    [rollout]
    nodes = 2
    engines = 2                   # engines * tp * dp * pp multiply to the GPUs; ep divides a stage of an engine
    tp = 8
    ep = 8

    [update]                      # optional
    buffer_bytes = 536870912
    depth = 2
    round_overhead_s = 1e-3

Degrees that are left out are 1.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from adapters.deployments_layouts import Fsdp, Maps, Megatron, Rollout, rollout_maps, trainer_maps
from adapters.deployments_models import DeploymentError, Model, model_of
from layout_algebra.space import CheckpointSpace
from transfer_exec.topology import Topology

__all__ = ["BUFFER_BYTES", "Deployment", "DeploymentError", "UpdateSettings", "named", "read_deployment"]

BUFFER_BYTES = 512 << 20
"""Default budget per worker and round."""

_Table = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How an update runs: bytes of one buffer, rounds under way at once, seconds that each round costs a worker."""

    buffer_bytes: int = BUFFER_BYTES
    depth: int = 2
    round_overhead_s: float = 1e-3


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on a cluster.

    Attributes
    ----------
    name
        As a person knows it.
    model
        Tensors and how they are cut.
    trainer, rollout
        The layouts.
    trainer_gpus, rollout_gpus, gpus_per_node
        The cluster; nodes are full.
    nic_bytes_per_s, local_bytes_per_s
        Of every GPU, each way.
    update
        How updates run.
    """

    name: str
    model: Model
    trainer: Megatron | Fsdp
    rollout: Rollout
    trainer_gpus: int
    rollout_gpus: int
    gpus_per_node: int
    nic_bytes_per_s: float
    local_bytes_per_s: float
    update: UpdateSettings

    def topology(self) -> Topology:
        """The cluster, trainers' nodes first."""
        return Topology.uniform(
            trainers=self.trainer_gpus,
            engines=self.rollout.engines,
            engine_size=self.rollout_gpus // self.rollout.engines,
            workers_per_node=self.gpus_per_node,
            nic_bytes_per_s=self.nic_bytes_per_s,
            local_bytes_per_s=self.local_bytes_per_s,
        )

    def maps(self) -> tuple[CheckpointSpace, Maps, Maps]:
        """The checkpoint, and the source maps of trainers and of rollouts; equal ones are one object.

        Raises
        ------
        DeploymentError
            If the model does not divide as the layouts ask.
        """
        space = self.model.space()
        try:
            holders = trainer_maps(self.model, space, self.trainer)
        except DeploymentError as error:
            raise DeploymentError(f"trainer: {error}") from error
        try:
            return space, holders, rollout_maps(self.model, space, self.rollout)
        except DeploymentError as error:
            raise DeploymentError(f"rollout: {error}") from error


def named(path: Path, changes: Mapping[str, int | float] = MappingProxyType({})) -> str:
    """A file, and what was changed of it, as an error names it."""
    changed = ", ".join(f"{key} {value}" for key, value in changes.items())
    shown = str(path).encode(errors="backslashreplace").decode()
    return f"{shown} with {changed}" if changed else shown


def read_deployment(path: str | Path, changes: Mapping[str, int | float] = MappingProxyType({})) -> Deployment:
    """Read a deployment file.

    Parameters
    ----------
    path
        The file.
    changes
        ``section.key`` -> number, put in place of the file's.

    Raises
    ------
    DeploymentError
        If the file cannot be read, is no TOML, has a wrong or unknown key, or describes degrees that do not multiply to
        the GPUs; the message names file and place.
    """
    place = Path(path)
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{place}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DeploymentError(f"{place}: no TOML: {error}") from error
    try:
        for key, value in changes.items():
            section, _, inner = key.partition(".")
            table[section] = {**_table({section: table.get(section, {})}, section), inner: value}
        return _deployment(table, place.parent)
    except DeploymentError as error:
        raise DeploymentError(f"{named(place, changes)}: {error}") from error


def _deployment(table: _Table, folder: Path) -> Deployment:
    _check_keys("the file", table, ("name", "model", "cluster", "trainer", "rollout"), ("update",))
    cluster = _table(table, "cluster")
    _check_keys("cluster", cluster, ("gpus_per_node", "nic_bytes_per_s", "local_bytes_per_s"), ())
    per_node = _whole("cluster.gpus_per_node", cluster["gpus_per_node"])
    trainer, trainer_gpus = _trainer(_table(table, "trainer"), per_node)
    rollout, rollout_gpus = _rollout(_table(table, "rollout"), per_node)
    name = table["name"]
    if not isinstance(name, str) or not name:
        raise DeploymentError(f"name: {name!r}; expected a non-empty string")
    try:
        model = model_of(_config(_table(table, "model"), folder))
    except DeploymentError as error:
        raise DeploymentError(f"model.{error}") from error
    return Deployment(
        name=name,
        model=model,
        trainer=trainer,
        rollout=rollout,
        trainer_gpus=trainer_gpus,
        rollout_gpus=rollout_gpus,
        gpus_per_node=per_node,
        nic_bytes_per_s=_number("cluster.nic_bytes_per_s", cluster["nic_bytes_per_s"]),
        local_bytes_per_s=_number("cluster.local_bytes_per_s", cluster["local_bytes_per_s"]),
        update=_update(_table(table, "update") if "update" in table else {}),
    )


def _config(table: _Table, folder: Path) -> _Table:
    if "config" not in table:
        return table
    beside = [key for key in table if key != "config"]
    if beside:
        raise DeploymentError(
            f"config: expected alone, or the model's numbers without it; {beside[0]} stands beside it"
        )
    if not isinstance(table["config"], str):
        raise DeploymentError(f"config: {table['config']!r}; expected the name of a file")
    path = folder / table["config"]
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"config: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DeploymentError(f"config: {path} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise DeploymentError(f"config: {path} holds no object")
    return read


def _trainer(table: _Table, per_node: int) -> tuple[Megatron | Fsdp, int]:
    if "fsdp" in table:
        degrees, gpus = _degrees("trainer", table, ("fsdp", "dp"), (), per_node)
        return Fsdp(degrees["fsdp"], degrees["dp"]), gpus
    degrees, gpus = _degrees("trainer", table, ("tp", "pp", "cp", "dp"), ("ep", "etp"), per_node)
    stage = gpus // degrees["pp"]
    if stage % (degrees["ep"] * degrees["etp"]):
        raise DeploymentError(
            f"trainer: ep {degrees['ep']} x etp {degrees['etp']} do not divide the {stage} GPUs of a pipeline stage"
        )
    return Megatron(**degrees), gpus


def _rollout(table: _Table, per_node: int) -> tuple[Rollout, int]:
    degrees, gpus = _degrees("rollout", table, ("engines", "tp", "dp", "pp"), ("ep",), per_node)
    stage = degrees["tp"] * degrees["dp"]
    if stage % degrees["ep"]:
        raise DeploymentError(f"rollout: ep {degrees['ep']} does not divide the {stage} GPUs of an engine's stage")
    return Rollout(**degrees), gpus


def _degrees(
    place: str, table: _Table, factors: Sequence[str], others: Sequence[str], per_node: int
) -> tuple[dict[str, int], int]:
    """The degrees of one side and its GPUs, which the factors must multiply to."""
    _check_keys(place, table, ("nodes",), (*factors, *others))
    nodes = _whole(f"{place}.nodes", table["nodes"])
    degrees = {key: _whole(f"{place}.{key}", table.get(key, 1)) for key in (*factors, *others)}
    product = 1
    for key in factors:
        product *= degrees[key]
    if product != nodes * per_node:
        raise DeploymentError(
            f"{place}: {' x '.join(f'{key} {degrees[key]}' for key in factors)} multiply to {product}, and "
            f"{nodes} nodes of {per_node} have {nodes * per_node} GPUs; make the two equal"
        )
    return degrees, nodes * per_node


def _update(table: _Table) -> UpdateSettings:
    _check_keys("update", table, (), ("buffer_bytes", "depth", "round_overhead_s"))
    default = UpdateSettings()
    overhead = table.get("round_overhead_s", default.round_overhead_s)
    if isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 <= overhead < float("inf"):
        raise DeploymentError(f"update.round_overhead_s: {overhead!r}; expected seconds of at least 0")
    return UpdateSettings(
        _whole("update.buffer_bytes", table.get("buffer_bytes", default.buffer_bytes)),
        _whole("update.depth", table.get("depth", default.depth)),
        float(overhead),
    )


def _table(table: _Table, key: str) -> _Table:
    value = table[key]
    if not isinstance(value, dict):
        raise DeploymentError(f"{key}: expected a table [{key}]")
    return value


def _check_keys(place: str, table: _Table, needed: Sequence[str], optional: Sequence[str]) -> None:
    known = (*needed, *optional)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
            raise DeploymentError(f"{place}: unknown key {key!r}; {hint}")
    for key in needed:
        if key not in table:
            raise DeploymentError(f"{place}: {key} is missing")


def _whole(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DeploymentError(f"{place}: {value!r}; expected a whole number above zero")
    return value


def _number(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise DeploymentError(f"{place}: {value!r}; expected a number above zero, in bytes per second")
    try:
        return float(value)
    except OverflowError:
        raise DeploymentError(f"{place}: too large a number; expected bytes per second") from None
