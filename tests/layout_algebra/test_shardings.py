"""Declared layouts against hand-written ids, torch's own sharding, and the field's cases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from layout_algebra.blocks import whole
from layout_algebra.errors import MapError
from layout_algebra.shardings import (
    dtensor,
    expert_stack,
    fsdp1_flat,
    fsdp2,
    fused_qkv,
    gate_up,
    grouped_qkv,
    jax_sharding,
    padded_vocab,
    rotary_halves,
    rows_in_blocks,
)
from layout_algebra.space import CheckpointSpace, TensorSpec


def vectors(**rows: int) -> CheckpointSpace:
    return CheckpointSpace(TensorSpec(name, (count, 1), "BF16") for name, count in rows.items())


def values(layout: object, table: dict[int, int]) -> list[int]:
    return [table.get(i, -1) for i in layout.ids().reshape(-1).tolist()]  # type: ignore[attr-defined]


def test_grouped_and_fused_qkv_differ_as_the_field_reports() -> None:
    """Case P01: 4 query heads, 2 key-value heads."""
    space = vectors(q=4, k=2, v=2)
    q, k, v = (whole(space, name) for name in "qkv")
    content = {1: 10, 2: 11, 3: 0, 4: 1, 5: 2, 6: 3, 7: 20, 8: 21}
    options = {"heads": 4, "kv_heads": 2}
    assert values(grouped_qkv(q, k, v, rank=0, degree=1, **options), content) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert values(grouped_qkv(q, k, v, rank=1, degree=2, **options), content) == [2, 3, 11, 21]
    assert values(fused_qkv(q, k, v, rank=0, degree=1, **options), content) == [0, 1, 2, 3, 10, 11, 20, 21]
    for head_dim in (2, 3):
        space = vectors(q=4 * head_dim, k=2 * head_dim, v=2 * head_dim)
        q, k, v = (whole(space, name) for name in "qkv")
        by_head = [part.ids().reshape(-1, head_dim) for part in (q, k, v)]
        want = [by_head[0][0:2], by_head[1][0:1], by_head[2][0:1], by_head[0][2:4], by_head[1][1:2], by_head[2][1:2]]
        got = grouped_qkv(q, k, v, rank=0, degree=1, **options).ids()
        assert np.array_equal(got.reshape(-1, head_dim), np.concatenate(want))


def test_more_ranks_than_heads_replicate_them() -> None:
    """Case P05: 4 query heads, 2 key-value heads of 2 rows, 4 ranks."""
    space = vectors(q=8, k=4, v=4)
    q, k, v = (whole(space, name) for name in "qkv")
    content = {1 + i: 100 + i for i in range(4)} | {5 + i: i for i in range(8)} | {13 + i: 200 + i for i in range(4)}
    got = [values(fused_qkv(q, k, v, rank=r, degree=4, heads=4, kv_heads=2), content) for r in range(4)]
    assert got[3] == [6, 7, 102, 103, 202, 203]
    assert got[2][2:] == got[3][2:]
    with pytest.raises(MapError, match="4 ranks do not divide over 3"):
        fused_qkv(q, k, v, rank=0, degree=4, heads=4, kv_heads=3)
    with pytest.raises(MapError, match="3 query heads"):
        fused_qkv(q, k, v, rank=0, degree=2, heads=3, kv_heads=2)


def test_flat_fsdp1_cuts_through_rows_and_tensors() -> None:
    """Case U07."""
    space = CheckpointSpace([TensorSpec("a", (3, 4), "BF16"), TensorSpec("b", (5,), "BF16")])
    parts = [whole(space, name) for name in "ab"]
    got = [fsdp1_flat(parts, rank=r, degree=4).ids().tolist() for r in range(4)]
    assert got == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15], [16, 17, 0, 0, 0]]
    aligned = [fsdp1_flat(parts, rank=r, degree=1, align_elements=5).ids().tolist() for r in range(1)]
    assert aligned == [[*range(1, 13), 0, 0, 0, *range(13, 18)]]


def test_swiglu_under_tensor_and_data_parallel() -> None:
    """Case U05: [W; V] under TP2, then DP4 shards of 2 rows."""
    space = vectors(wv=16)
    got = [
        (rows_in_blocks(whole(space, "wv"), rank=tp, degree=2, blocks=2).shard(0, dp, 4).ids() - 1).ravel().tolist()
        for tp in range(2)
        for dp in range(4)
    ]
    assert got == [[0, 1], [2, 3], [8, 9], [10, 11], [4, 5], [6, 7], [12, 13], [14, 15]]


def test_gate_up_orders_and_expert_stacks() -> None:
    space = CheckpointSpace(TensorSpec(f"e.{e}.{n}", (2, 1), "BF16") for e in range(12) for n in ("gate", "up"))
    ids = {(e, n): whole(space, f"e.{e}.{n}").ids() for e in range(12) for n in ("gate", "up")}
    for order in ("gate_up", "up_gate", "interleaved"):
        experts = [
            gate_up(whole(space, f"e.{e}.gate"), whole(space, f"e.{e}.up"), rank=1, degree=2, order=order)
            for e in range(12)
        ]
        got = expert_stack(experts, rank=2, degree=4).ids()
        names = ("up", "gate") if order == "up_gate" else ("gate", "up")
        want = [np.concatenate([ids[e, name][1:] for name in names]) for e in (6, 7, 8)]
        assert np.array_equal(got, np.stack(want)), order
    with pytest.raises(MapError, match="gate_up, up_gate or interleaved"):
        gate_up(whole(space, "e.0.gate"), whole(space, "e.0.up"), rank=0, degree=1, order="sideways")
    with pytest.raises(MapError, match="12 experts have no part"):
        expert_stack(experts, rank=0, degree=5)


def test_padded_vocabularies() -> None:
    """Case P15: vocabulary 10 padded to 12 over 2 ranks and to 16 over 2 ranks."""
    space = vectors(embed=10)
    embed = whole(space, "embed")
    assert padded_vocab(embed, rank=1, degree=2, padded_rows=12).ids().ravel().tolist() == [7, 8, 9, 10, 0, 0]
    assert padded_vocab(embed, rank=1, degree=2, padded_rows=16).ids().ravel().tolist() == [9, 10, 0, 0, 0, 0, 0, 0]


def test_rotary_halves() -> None:
    """Case P17: one head of four rows, and two heads with two columns."""
    assert rotary_halves(whole(vectors(q=4), "q"), heads=1).ids().ravel().tolist() == [1, 3, 2, 4]
    space = CheckpointSpace([TensorSpec("q", (8, 2), "BF16")])
    rows = rotary_halves(whole(space, "q"), heads=2).ids()[:, 0]
    assert ((rows - 1) // 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.fixture
def fake_world() -> Iterator[object]:
    """Become one rank of a world that never communicates."""

    def enter(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((10, 3), (Shard(0), Replicate())),
        ((10, 3), (Shard(0), Shard(0))),
        ((7, 5), (Shard(1), Shard(0))),
        ((2, 6), (Replicate(), Shard(1))),
        ((1, 4), (Shard(0), Shard(1))),
        ((6,), (Replicate(), Replicate())),
    ],
)
def test_dtensor_placements_are_torchs(
    fake_world: object, shape: tuple[int, ...], placements: tuple[object, ...]
) -> None:
    space = CheckpointSpace([TensorSpec("w", shape, "F32")])
    full = torch.from_numpy(whole(space, "w").ids().copy())
    for rank in range(4):
        fake_world(rank, 4)  # type: ignore[operator]
        mesh = init_device_mesh("cpu", (2, 2))
        local = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()  # type: ignore[arg-type]
        mine = dtensor(whole(space, "w"), mesh_shape=(2, 2), placements=placements, coordinate=divmod(rank, 2))  # type: ignore[arg-type]
        assert mine.ids().tolist() == local.tolist()


def test_fsdp_over_tensor_parallel_cuts_what_that_leaves() -> None:
    layout, full = whole(vectors(w=12), "w"), np.arange(1, 13)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for fsdp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        mine = dtensor(layout, mesh_shape=(2, 2), placements=placements, coordinate=(fsdp, tp))
        assert mine.ids().ravel().tolist() == np.split(np.split(full, 2)[tp], 2)[fsdp].tolist()


def test_fsdp2_is_torchs_dim_0(fake_world: object) -> None:
    for rows in (10, 2, 5, 0):
        space = CheckpointSpace([TensorSpec("w", (rows, 2), "F32")])
        full = torch.from_numpy(whole(space, "w").ids().copy())
        for rank in range(4):
            fake_world(rank, 4)  # type: ignore[operator]
            local = distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None).to_local()
            assert fsdp2(whole(space, "w"), rank=rank, degree=4).ids().tolist() == local.tolist()


def test_partial_placements_are_refused() -> None:
    with pytest.raises(MapError, match="expected Shard or Replicate"):
        dtensor(whole(vectors(w=4), "w"), mesh_shape=(2,), placements=(Partial(),), coordinate=(0,))


def test_jax_shardings_are_read_by_their_slices() -> None:
    class Sharding:
        def devices_indices_map(self, global_shape: tuple[int, ...]) -> dict[object, tuple[slice, ...]]:
            assert global_shape == (4, 1)
            return {"cpu:0": (slice(0, 2), slice(None)), "cpu:1": (slice(2, 4), slice(None)), "odd": (slice(0, 4, 2),)}

    layout = whole(vectors(w=4), "w")
    assert jax_sharding(layout, sharding=Sharding(), device="cpu:1").ids().ravel().tolist() == [3, 4]
    with pytest.raises(MapError, match="cpu:7 is not in"):
        jax_sharding(layout, sharding=Sharding(), device="cpu:7")
    with pytest.raises(MapError, match="step 2"):
        jax_sharding(layout, sharding=Sharding(), device="odd")
