"""Irregular layouts of some size, through the probe: exact, and few copies where there is a pattern."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adapters.probing import probe
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

Change = Callable[[torch.Tensor], torch.Tensor]


def found(shape: tuple[int, ...], change: Change) -> tuple[SourceMap, CopyTable]:
    """The map of a worker that keeps a changed tensor beside a plain one; the first one's copies."""
    space = CheckpointSpace([TensorSpec("first", (5,), "BF16"), TensorSpec("w", shape, "BF16")])
    live = {"first": torch.zeros(5, dtype=torch.bfloat16), "w": torch.zeros(shape, dtype=torch.bfloat16)}

    def load(weights: object) -> None:
        for name, tensor in weights:  # type: ignore[attr-defined]
            live[name].copy_(change(tensor) if name == "w" else tensor)

    made = probe(load, live, space)
    listed = torch.arange(live["w"].numel()).reshape(shape) + 6
    assert torch.equal(torch.from_numpy(made.ids("w")), change(listed).reshape(shape))
    return made, made["w"].copies


def permuted(count: int, axis: int) -> Change:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return lambda tensor: tensor.index_select(axis, order)


def test_a_random_permutation_of_rows() -> None:
    made, copies = found((100_000, 12), permuted(100_000, 0))
    assert len(copies) <= 100_000
    assert SourceMap.from_bytes(made.to_bytes()).digest() == made.digest()


def test_a_random_permutation_of_columns() -> None:
    _, copies = found((300, 4096), permuted(4096, 1))
    assert len(copies) <= 4096


@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000)])
def test_a_random_permutation_of_elements(shape: tuple[int, ...]) -> None:
    order = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(1))
    made, copies = found(shape, lambda tensor: tensor.reshape(-1)[order].reshape(shape))
    assert len(copies) < 550_000
    assert len(made.to_bytes()) < 8 * 1_000_000


def test_a_swizzle_over_a_stack_of_experts() -> None:
    experts, rows, columns = 4, 512, 640
    where = (torch.arange(columns) ^ (torch.arange(rows) % 16)[:, None]).expand(experts, rows, columns)
    made, copies = found((experts, rows, columns), lambda tensor: tensor.gather(2, where))
    assert len(copies) == 34
    assert len(made.to_bytes()) < 2000


def test_packed_blocks_of_sixteen_rows() -> None:
    """As CPU kernels for mixtures of experts pack them: pairs of columns of 16 rows side by side."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        experts, rows, columns = tensor.shape
        blocks = tensor.reshape(experts, rows // 16, 16, columns // 2, 2)
        return blocks.permute(0, 1, 3, 2, 4).reshape(experts, rows, columns)

    _, copies = found((6, 256, 512), pack)
    assert len(copies) == 1
