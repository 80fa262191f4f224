"""Families of ranks: every constructor of ``shardings`` as (space, rank, degree) -> declared layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from layout_algebra.blocks import Layout, concatenate, declare, stack, whole
from layout_algebra.shardings import (
    column_parallel,
    expert_stack,
    fsdp1_flat,
    fsdp2,
    fused_qkv,
    gate_up,
    grouped_qkv,
    padded_vocab,
    rotary_halves,
    row_parallel,
    rows_in_blocks,
)
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec


@dataclass(frozen=True)
class FamilyCase:
    """A layout by rank and degree, the degrees at which it exists, and those without which it does not show itself."""

    name: str
    space: CheckpointSpace
    layouts: Callable[[int, int], Mapping[str, Layout]]
    degrees: tuple[int, ...]
    replicated: tuple[str, ...] = ()
    showing: tuple[int, ...] = ()

    def at(self, rank: int, degree: int) -> SourceMap:
        return declare(self.space, self.layouts(rank, degree))


def _space(**shapes: tuple[int, ...]) -> CheckpointSpace:
    return CheckpointSpace(TensorSpec(name, shape, "BF16") for name, shape in shapes.items())


def _experts(count: int, layers: int = 2) -> CheckpointSpace:
    return CheckpointSpace(
        TensorSpec(f"layers.{layer}.experts.{expert}.{name}_proj", (6, 4) if name != "down" else (4, 6), "BF16")
        for layer in range(layers)
        for expert in range(count)
        for name in ("gate", "up", "down")
    )


def cases() -> list[FamilyCase]:
    out: list[FamilyCase] = []

    def add(
        name: str,
        space: CheckpointSpace,
        degrees: tuple[int, ...],
        layouts: Callable[[int, int], Mapping[str, Layout]],
        replicated: tuple[str, ...] = (),
        showing: tuple[int, ...] = (),
    ) -> None:
        out.append(FamilyCase(name, space, layouts, degrees, replicated, showing))

    matrix = _space(w=(48, 6), b=(48,))
    w, b = whole(matrix, "w"), whole(matrix, "b")
    add("column", matrix, (1, 2, 3, 4, 6, 8), lambda r, d: {
        "w": column_parallel(w, rank=r, degree=d), "b": column_parallel(b, rank=r, degree=d)})  # fmt: skip
    add("replicated", matrix, (1, 2, 3, 5), lambda r, d: {"w": w, "b": b}, ("*",))
    row = _space(w=(6, 48))
    add("row", row, (1, 2, 3, 4, 8), lambda r, d: {"w": row_parallel(whole(row, "w"), rank=r, degree=d)})
    add("transposed", row, (1, 2, 4, 8), lambda r, d: {
        "w": row_parallel(whole(row, "w"), rank=r, degree=d).transpose()})  # fmt: skip
    cube = _space(w=(6, 4, 8))
    add("middle axis of three, turned", cube, (1, 2, 4), lambda r, d: {
        "w": whole(cube, "w").shard(1, r, d).transpose(2, 0, 1)})  # fmt: skip
    uneven = _space(w=(10, 3), n=(2,), t=(7, 2))
    add("fsdp2", uneven, (1, 2, 3, 4, 5, 8), lambda r, d: {
        name: fsdp2(whole(uneven, name), rank=r, degree=d) for name in uneven.names})  # fmt: skip
    flat = _space(a=(3, 4), b=(5,), c=(2, 3, 2), d=(7,))
    add("fsdp1", flat, (1, 2, 3, 4, 5, 7), lambda r, d: {
        "flat": fsdp1_flat([whole(flat, name) for name in "abcd"], rank=r, degree=d)})  # fmt: skip
    add("fsdp1, aligned", flat, (1, 2, 3, 4, 5), lambda r, d: {
        "flat": fsdp1_flat([whole(flat, name) for name in "dcba"], rank=r, degree=d, align_elements=8)})  # fmt: skip
    heads = _space(q=(64, 6), k=(16, 6), v=(16, 6))
    q, k, v = (whole(heads, name) for name in "qkv")
    add("fused qkv", heads, (1, 2, 4, 8, 16), lambda r, d: {
        "qkv": fused_qkv(q, k, v, rank=r, degree=d, heads=16, kv_heads=4)}, ("k", "v"), (2, 16))  # fmt: skip
    add("fused qkv, one key-value head", heads, (1, 2, 4, 8), lambda r, d: {
        "qkv": fused_qkv(q, k, v, rank=r, degree=d, heads=16, kv_heads=1)}, ("k", "v"))  # fmt: skip
    add("grouped qkv", heads, (1, 2, 4), lambda r, d: {
        "qkv": grouped_qkv(q, k, v, rank=r, degree=d, heads=16, kv_heads=4)})  # fmt: skip
    one = _space(qkv=(96, 6))
    fused = whole(one, "qkv")
    rows = ((0, 64), (64, 80), (80, 96))
    add("qkv fused in the checkpoint", one, (1, 2, 4, 8), lambda r, d: {
        "qkv": concatenate([fused.take(0, a, z).shard(0, r, d) for a, z in rows])}, (), (2, 4))  # fmt: skip
    mlp = _space(gate=(24, 6), up=(24, 6), down=(6, 24))
    gate, up = whole(mlp, "gate"), whole(mlp, "up")
    for order in ("gate_up", "up_gate", "interleaved"):
        add(f"gate and up, {order}", mlp, (1, 2, 3, 4, 6), lambda r, d, order=order: {
            "w13": gate_up(gate, up, rank=r, degree=d, order=order),
            "w2": row_parallel(whole(mlp, "down"), rank=r, degree=d)})  # fmt: skip
    swiglu = _space(wv=(48, 3))
    add("rows in blocks", swiglu, (1, 2, 3, 4, 6), lambda r, d: {
        "wv": rows_in_blocks(whole(swiglu, "wv"), rank=r, degree=d, blocks=2)})  # fmt: skip
    add("rows in three blocks", swiglu, (1, 2, 4, 8), lambda r, d: {
        "wv": rows_in_blocks(whole(swiglu, "wv"), rank=r, degree=d, blocks=3)})  # fmt: skip
    experts = _experts(12)

    def stacks(rank: int, degree: int, tensor_degree: int = 1) -> dict[str, Layout]:
        layouts: dict[str, Layout] = {}
        for layer in range(2):
            parts = [
                [whole(experts, f"layers.{layer}.experts.{e}.{n}_proj") for e in range(12)]
                for n in ("gate", "up", "down")
            ]
            halves = [gate_up(g, u, rank=0, degree=tensor_degree) for g, u in zip(*parts[:2], strict=True)]
            layouts[f"layers.{layer}.w13"] = expert_stack(halves, rank=rank, degree=degree)
            layouts[f"layers.{layer}.w2"] = expert_stack(parts[2], rank=rank, degree=degree)
        return layouts

    add("experts", experts, (1, 2, 3, 4, 6, 12), stacks)
    add("experts under tensor parallel", experts, (1, 2, 3, 6), lambda r, d: {
        f"layers.{layer}.w13": stack([
            gate_up(whole(experts, f"layers.{layer}.experts.{e}.gate_proj"),
                    whole(experts, f"layers.{layer}.experts.{e}.up_proj"), rank=r, degree=d) for e in range(12)])
        for layer in range(2)})  # fmt: skip
    add("experts, transposed", experts, (1, 2, 3, 4), lambda r, d: {
        f"layers.{layer}.w2": expert_stack(
            [whole(experts, f"layers.{layer}.experts.{e}.down_proj").transpose() for e in range(12)], rank=r, degree=d)
        for layer in range(2)})  # fmt: skip
    words = _space(embed=(10, 3), head=(16, 3))
    add("padded vocabulary", words, (1, 2, 4, 8), lambda r, d: {
        "embed": padded_vocab(whole(words, "embed"), rank=r, degree=d, padded_rows=16),
        "head": padded_vocab(whole(words, "head"), rank=r, degree=d, padded_rows=16)})  # fmt: skip
    add("rotary", heads, (1, 2, 4), lambda r, d: {
        "q": rotary_halves(q.shard(0, r, d), heads=8 // d)})  # fmt: skip
    add("round robin rows", matrix, (1, 2, 3, 4), lambda r, d: {
        "w": w.split_axis(0, d).take(1, r, r + 1).merge_axes(0)}, (), (3, 4))  # fmt: skip
    return out
