"""Random crossings for execution tests: layouts, live memory of any strides with guard bytes, and the dumb truth.

A crossing knows a true F64 value (or random bits) per checkpoint element. Holders have it in their own dtype, the wire
has it rounded to the checkpoint's, and a needer must end with the wire's value converted to its dtype. The truth is
computed with torch, element positions with plain id arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from layout_algebra.correspondence import correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.topology import Topology

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
WIDER = {"BF16": ["BF16", "F32", "F64"], "F16": ["F16", "F32", "F64"], "F32": ["F32", "F64"], "F64": ["F64"]}
Ids = dict[str, np.ndarray]


@dataclass
class Guarded:
    """A view of any strides inside a larger buffer of random bytes."""

    view: np.ndarray
    base: np.ndarray
    outside: np.ndarray
    before: np.ndarray

    def outside_untouched(self) -> bool:
        """Whether every byte that is no element's is as it was."""
        return bool(np.array_equal(self.base[self.outside], self.before[self.outside]))


def guarded(shape: tuple[int, ...], storage: np.dtype, rng: np.random.Generator, *, strided: bool = True) -> Guarded:
    """Memory for one tensor: axes in random order, with gaps, some reversed; random bytes everywhere."""
    width = storage.itemsize
    order = rng.permutation(len(shape)) if strided else np.arange(len(shape))
    strides = [0] * len(shape)
    step = width
    for axis in reversed(order.tolist()):
        strides[axis] = step
        step *= shape[axis] + (int(rng.integers(0, 3)) if strided else 0)
    offset = 64 - 64 % width
    base = rng.integers(0, 256, max(step, width) + 2 * offset, dtype=np.uint8)
    aligned = offset - base.ctypes.data % width if base.ctypes.data % width else offset
    for axis in range(len(shape)):
        if strided and shape[axis] > 1 and rng.integers(0, 3) == 0:
            aligned += (shape[axis] - 1) * strides[axis]
            strides[axis] = -strides[axis]

    def view_of(raw: np.ndarray) -> np.ndarray:
        return np.ndarray(shape, storage, raw.data, aligned, tuple(strides))

    inside = np.zeros(base.shape, dtype=np.uint8)
    view_of(inside).view(f"u{width}" if storage.kind != "b" else storage)[...] = np.iinfo(f"u{width}").max
    return Guarded(view_of(base), base, inside == 0, base.copy())


@dataclass
class Crossing:
    """Layouts of both sides and the truth about every element."""

    space: CheckpointSpace
    held: dict[str, Ids]
    needed: dict[str, Ids]
    dtypes: dict[tuple[str, str], str]
    rng: np.random.Generator
    true_values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for spec in self.space.specs:
            if spec.dtype in FLOATS:
                values = self.rng.standard_normal(spec.elements) * 2.0 ** self.rng.integers(-30, 20, spec.elements)
                special = self.rng.integers(0, 12, spec.elements)
                values[special == 0] = 0.0
                values[special == 1] = np.inf
                values[special == 2] = -1e-7
                self.true_values[spec.name] = torch.from_numpy(values)
            else:
                raw = self.rng.integers(
                    0, 2 if spec.dtype == "BOOL" else 256, spec.elements * dtype_of(spec.dtype).item_bytes
                )
                self.true_values[spec.name] = torch.from_numpy(raw.astype(np.uint8))
        self.maps = {
            worker: SourceMap.from_ids(self.space, ids, {p: self.dtypes[worker, p] for p in ids})
            for worker, ids in [*self.held.items(), *self.needed.items()]
        }

    def plan(self, *, workers_per_node: int, buffer_bytes: int) -> Plan:
        """The library's own plan, on a uniform cluster."""
        engines = max(int(name.split("/")[1]) for name in self.needed) + 1
        size = max(int(name.split("/")[2]) for name in self.needed) + 1
        topology = Topology.uniform(
            trainers=len(self.held),
            engines=engines,
            engine_size=size,
            workers_per_node=workers_per_node,
            nic_bytes_per_s=1e9,
            local_bytes_per_s=1e10,
        )
        sides = [{worker: self.maps[worker] for worker in side} for side in (self.held, self.needed)]
        return make_plan(correspond(*sides, cast=True), topology, buffer_bytes=buffer_bytes)

    def wire_bytes(self, tensor: str) -> np.ndarray:
        """A checkpoint tensor's wire content: shape ``(elements, item bytes)``."""
        spec = self.space.spec(tensor)
        return as_bytes(self.values_as(tensor, spec.dtype), dtype_of(spec.dtype).item_bytes)

    def values_as(self, tensor: str, dtype: str) -> torch.Tensor:
        """What a holder of that dtype has: narrow types by way of F32, as torch rounds."""
        values = self.true_values[tensor]
        if self.space.spec(tensor).dtype not in FLOATS:
            return values
        return values if dtype == "F64" else values.to(torch.float32).to(FLOATS[dtype])

    def fill_holder(self, worker: str, parameter: str, view: np.ndarray) -> None:
        """Put the truth into a holder's memory, element by element; EMPTY elements keep their random bytes."""
        dtype = self.dtypes[worker, parameter]
        width = dtype_of(dtype).item_bytes
        for place, element in np.ndenumerate(self.held[worker][parameter]):
            if element > 0:
                tensor, flat = self.space.locate(int(element))
                raw = as_bytes(self.values_as(tensor, dtype), width)[flat]
                view[place] = raw.view(view.dtype)[0]

    def check_needer(self, worker: str, parameter: str, got: np.ndarray, before: np.ndarray) -> None:
        """Every element is its wire value converted, or what it was."""
        dtype = self.dtypes[worker, parameter]
        width = dtype_of(dtype).item_bytes
        for place, element in np.ndenumerate(self.needed[worker][parameter]):
            mine = np.atleast_1d(got[place]).view(np.uint8)
            if element <= 0:
                assert np.array_equal(mine, np.atleast_1d(before[place]).view(np.uint8)), (worker, parameter, place)
                continue
            tensor, flat = self.space.locate(int(element))
            wire = self.values_as(tensor, self.space.spec(tensor).dtype)
            if dtype != self.space.spec(tensor).dtype:
                wire = wire.to(FLOATS[dtype])
            expected = as_bytes(wire, width)[flat]
            assert np.array_equal(mine, expected), (worker, parameter, place, tensor, flat, mine, expected)


def as_bytes(values: torch.Tensor, width: int) -> np.ndarray:
    """Elements as rows of bytes."""
    return values.contiguous().view(torch.uint8).numpy().reshape(-1, width)


def storage_of(dtype: str) -> np.dtype:
    """The numpy type that carries a dtype's bits."""
    storage = dtype_of(dtype).storage
    assert storage is not None
    return storage


def random_crossing(rng: np.random.Generator) -> Crossing:
    """A few tensors of mixed dtypes, one to three trainers, one to four rollouts, arbitrary layouts."""
    dtypes = ["BF16", "F32", "F16", "F64", "I8", "F8_E4M3", "I64", "BOOL"]
    specs = [
        TensorSpec(
            f"t{n}", tuple(rng.integers(1, 7, rng.integers(0, 4)).tolist()), dtypes[rng.integers(0, len(dtypes))]
        )
        for n in range(rng.integers(1, 6))
    ]
    space = CheckpointSpace(specs)
    chosen: dict[tuple[str, str], str] = {}
    trainers = [f"trainer/{rank}" for rank in range(rng.integers(1, 4))]
    rollouts = [f"engine/{e}/{r}" for e in range(rng.integers(1, 3)) for r in range(2)]
    held = _hold_everything(space, trainers, chosen, rng)
    needed = {worker: _layouts_of(space, worker, chosen, rng) for worker in rollouts}
    return Crossing(space, held, needed, chosen, rng)


def _hold_everything(
    space: CheckpointSpace, trainers: list[str], chosen: dict[tuple[str, str], str], rng: np.random.Generator
) -> dict[str, Ids]:
    """Flat FSDP shards with padding, or whole tensors on some ranks, transposed or not."""
    held: dict[str, Ids] = {worker: {} for worker in trainers}
    for spec in space.specs:
        ids = np.arange(*space.id_range(spec.name)).reshape(spec.shape)
        kind = rng.integers(0, 3)
        if kind == 0:
            flat = ids.reshape(-1)
            size = -(-len(flat) // len(trainers))
            padded = np.concatenate([flat, np.zeros(size * len(trainers) - len(flat), dtype=np.int64)])
            parts = dict(zip(trainers, np.split(padded, len(trainers)), strict=True))
        else:
            owners = [w for w in trainers if rng.integers(0, 2)] or [trainers[0]]
            parts = dict.fromkeys(owners, ids.T if kind == 1 else ids)
        for worker, part in parts.items():
            held[worker][spec.name] = part
            chosen[worker, spec.name] = str(rng.choice(WIDER.get(spec.dtype, [spec.dtype])))
    return held


def _layouts_of(
    space: CheckpointSpace, worker: str, chosen: dict[tuple[str, str], str], rng: np.random.Generator
) -> Ids:
    out: Ids = {}
    for number in range(rng.integers(1, 4)):
        name = f"p{number}"
        picked = [space.specs[rng.integers(0, len(space))] for _ in range(rng.integers(1, 4))]
        floats = all(spec.dtype in FLOATS for spec in picked)
        if not floats:
            picked = [spec for spec in picked if spec.dtype == picked[0].dtype]
        parts = [np.arange(*space.id_range(spec.name)).reshape(spec.shape) for spec in picked]
        out[name] = _arrange(parts, rng)
        chosen[worker, name] = str(rng.choice(list(FLOATS))) if floats else picked[0].dtype
    return out


def _arrange(parts: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    part = parts[0]
    kind = rng.integers(0, 7)
    if kind == 0:
        return part.T
    if kind == 1 and part.ndim:
        axis = int(rng.integers(0, part.ndim))
        return np.take(part, np.arange(0, part.shape[axis], rng.integers(1, 3)), axis=axis)
    if kind == 2:
        return np.concatenate([each.reshape(-1) for each in parts] + [np.zeros(rng.integers(0, 4), dtype=np.int64)])
    if kind == 3 and part.ndim > 1:
        return (
            np.stack(
                [part[..., ::2].reshape(-1)[: part.size // 2], part.reshape(-1)[part.size // 2 :][: part.size // 2]]
            )
            if part[..., ::2].size >= part.size // 2
            else part
        )
    if kind == 4:
        return np.stack([part, np.zeros_like(part), part])
    if kind == 5:
        return np.flip(part)
    return part


def make_memory(
    crossing: Crossing, workers: Mapping[str, Ids], rng: np.random.Generator, *, strided: bool = True
) -> dict[str, dict[str, Guarded]]:
    """Guarded memory for every parameter of some workers."""
    return {
        worker: {
            name: guarded(ids.shape, storage_of(crossing.dtypes[worker, name]), rng, strided=strided)
            for name, ids in layouts.items()
        }
        for worker, layouts in workers.items()
    }
