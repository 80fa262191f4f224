"""The standard layouts by name: one rank's part of checkpoint tensors, as ``Layout`` values.

Each function says what a trainer or an engine of that kind keeps on one rank, and equals what probing a loader of
that kind finds. ``rank`` and ``degree`` are the rank's index within its group and the group's size.

>>> from layout_algebra.blocks import declare
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec(n, (r, 1), "BF16") for n, r in (("k", 2), ("q", 4), ("v", 2))])
>>> q, k, v = (whole(space, name) for name in "qkv")
>>> fused_qkv(q, k, v, rank=1, degree=2, heads=4, kv_heads=2).ids().ravel().tolist()
[5, 6, 2, 8]
>>> grouped_qkv(q, k, v, rank=0, degree=1, heads=4, kv_heads=2).ids().ravel().tolist()
[3, 4, 1, 7, 5, 6, 2, 8]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from layout_algebra.blocks import Layout, concatenate, stack, whole
from layout_algebra.errors import MapError


def column_parallel(layout: Layout, *, rank: int, degree: int) -> Layout:
    """Output features (axis 0) in equal parts; biases likewise."""
    return layout.shard(0, rank, degree)


def row_parallel(layout: Layout, *, rank: int, degree: int) -> Layout:
    """Input features (axis 1) in equal parts."""
    return layout.shard(1, rank, degree)


def fsdp2(layout: Layout, *, rank: int, degree: int) -> Layout:
    """Axis 0 in ceil-sized chunks, the last ones short or empty, as ``fully_shard`` keeps a parameter."""
    return layout.chunk(0, rank, degree)


def fsdp1_flat(layouts: Iterable[Layout], *, rank: int, degree: int, align_elements: int = 1) -> Layout:
    """Tensors flattened one after another, padded to the group, cut into equal parts across rows and tensors.

    Parameters
    ----------
    layouts
        In the order of the flat parameter.
    align_elements
        Every tensor begins at a multiple of this many elements.
    """
    flat: Layout | None = None
    for layout in layouts:
        part = layout.flatten()
        if flat is None:
            flat = part
        else:
            flat = concatenate([flat.pad(0, -(-flat.shape[0] // align_elements) * align_elements), part])
    if flat is None:
        raise MapError("a flat parameter of no tensors")
    return flat.pad(0, -(-flat.shape[0] // degree) * degree).shard(0, rank, degree)


def fused_qkv(q: Layout, k: Layout, v: Layout, *, rank: int, degree: int, heads: int, kv_heads: int) -> Layout:
    """``[q | k | v]`` of one rank, as inference engines fuse them.

    With more ranks than key-value heads each head is replicated on ``degree / kv_heads`` neighbouring ranks.

    Raises
    ------
    MapError
        If heads do not divide over the ranks, or ranks over the heads.
    """
    if heads % degree:
        raise MapError(f"{heads} query heads do not divide over {degree} ranks")
    return concatenate([q.shard(0, rank, degree), *(_kv_part(part, rank, degree, kv_heads) for part in (k, v))])


def grouped_qkv(q: Layout, k: Layout, v: Layout, *, rank: int, degree: int, heads: int, kv_heads: int) -> Layout:
    """``[q.. k v | q.. k v]`` by key-value head, as Megatron fuses them; groups in equal parts over the ranks.

    Raises
    ------
    MapError
        If query heads do not divide over key-value heads, or those over the ranks.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise MapError(f"{heads} query heads do not divide over {kv_heads} key-value heads")
    groups = [part.split_axis(0, part.shape[0] // kv_heads) for part in (q, k, v)]
    return concatenate(groups, axis=1).shard(0, rank, degree).merge_axes(0)


def _kv_part(part: Layout, rank: int, degree: int, kv_heads: int) -> Layout:
    if kv_heads >= degree:
        return part.shard(0, rank, degree)
    if degree % kv_heads:
        raise MapError(f"{degree} ranks do not divide over {kv_heads} key-value heads")
    return part.shard(0, rank // (degree // kv_heads), kv_heads)


def gate_up(gate: Layout, up: Layout, *, rank: int, degree: int, order: str = "gate_up") -> Layout:
    """Gate and up projection of one rank in one parameter.

    Parameters
    ----------
    order
        ``"gate_up"`` or ``"up_gate"`` for halves, ``"interleaved"`` for rows gate, up, gate, up, ...
    """
    parts = [gate.shard(0, rank, degree), up.shard(0, rank, degree)]
    if order == "interleaved":
        return stack(parts, axis=1).merge_axes(0)
    if order not in ("gate_up", "up_gate"):
        raise MapError(f"order {order!r}: expected gate_up, up_gate or interleaved")
    return concatenate(parts if order == "gate_up" else parts[::-1])


def rows_in_blocks(layout: Layout, *, rank: int, degree: int, blocks: int) -> Layout:
    """Axis 0 as ``blocks`` equal blocks (such as ``[W; V]``), each cut over the ranks, the parts in block order."""
    return concatenate(layout.shard(0, block, blocks).shard(0, rank, degree) for block in range(blocks))


def expert_stack(experts: Sequence[Layout], *, rank: int = 0, degree: int = 1) -> Layout:
    """The rank's consecutive experts, stacked along a new first axis.

    Raises
    ------
    MapError
        If experts do not divide over the ranks.
    """
    if degree < 1 or not 0 <= rank < degree or len(experts) % degree:
        raise MapError(f"{len(experts)} experts have no part {rank} of {degree} equal parts")
    local = len(experts) // degree
    return stack(experts[rank * local : (rank + 1) * local])


def padded_vocab(layout: Layout, *, rank: int, degree: int, padded_rows: int) -> Layout:
    """Axis 0 padded with empty rows to ``padded_rows``, then in equal parts over the ranks."""
    return layout.pad(0, padded_rows).shard(0, rank, degree)


def rotary_halves(layout: Layout, *, heads: int) -> Layout:
    """Per head, rows ``x0 y0 x1 y1 ...`` reordered to ``x0 x1 ... y0 y1 ...``."""
    if heads < 1 or layout.shape[0] % (2 * heads):
        raise MapError(f"axis 0 of {layout.shape} does not split into {heads} heads of pairs")
    pairs = layout.split_axis(0, layout.shape[0] // heads).split_axis(1, 2)
    rest = range(3, len(pairs.shape))
    return pairs.transpose(0, 2, 1, *rest).merge_axes(1).merge_axes(0)


class DTensorPlacement(Protocol):
    """What is read of a torch placement: ``Shard``, ``Replicate`` or ``_StridedShard``."""

    def is_replicate(self) -> bool:
        """Whether every rank of the mesh axis holds the same."""


def dtensor(
    layout: Layout, *, mesh_shape: Sequence[int], placements: Sequence[DTensorPlacement], coordinate: Sequence[int]
) -> Layout:
    """One rank's local shard of a torch DTensor, from its placements; torch is not imported.

    Parameters
    ----------
    mesh_shape, coordinate
        Extents of the device mesh and the rank's place in it, one per mesh axis.
    placements
        One per mesh axis. Of the shards of one tensor axis, plain ones cut first, in mesh order; a
        ``_StridedShard`` (FSDP over tensor parallel) cuts what those leave.

    Raises
    ------
    MapError
        For a placement that is neither a shard nor a replica, such as ``Partial``.
    """
    cuts: list[tuple[bool, int, int, int]] = []
    for size, place, at in zip(mesh_shape, placements, coordinate, strict=True):
        if place.is_replicate():
            continue
        axis = getattr(place, "dim", None)
        if not isinstance(axis, int):
            raise MapError(f"placement {place!r} holds no slice of the tensor; expected Shard or Replicate")
        cuts.append((hasattr(place, "split_factor"), axis, at, size))
    for _, axis, at, size in sorted(cuts, key=lambda cut: cut[0]):
        layout = layout.chunk(axis, at, size)
    return layout


class NamedSharding(Protocol):
    """What is read of a ``jax.sharding.Sharding``."""

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> Mapping[object, tuple[slice, ...]]:
        """The slice of a global array that each device holds."""


def jax_sharding(layout: Layout, *, sharding: NamedSharding, device: object) -> Layout:
    """One device's part of a jax array, from its sharding; jax is not imported.

    Raises
    ------
    MapError
        If the device is not in the sharding or a slice has a step.
    """
    indices = sharding.devices_indices_map(layout.shape).get(device)
    if indices is None:
        raise MapError(f"device {device} is not in the sharding {sharding}")
    for axis, part in enumerate(indices):
        if part.step not in (None, 1):
            raise MapError(f"axis {axis} is cut with step {part.step}; expected whole slices")
        start, stop, _ = part.indices(layout.shape[axis])
        layout = layout.take(axis, start, stop)
    return layout


__all__ = [
    "column_parallel",
    "dtensor",
    "expert_stack",
    "fsdp1_flat",
    "fsdp2",
    "fused_qkv",
    "gate_up",
    "grouped_qkv",
    "jax_sharding",
    "padded_vocab",
    "rotary_halves",
    "row_parallel",
    "rows_in_blocks",
    "whole",
]
