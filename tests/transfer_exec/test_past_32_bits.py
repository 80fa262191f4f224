"""Stacks of experts whose elements, offsets and bytes pass 2**31 and 2**32: maps, plans and programs stay exact.

No memory of that size is needed: maps are slice copies, and plans and programs are runs and rows.
"""

from __future__ import annotations

import numpy as np
import pytest

from layout_algebra.blocks import declare, stack, whole
from layout_algebra.correspondence import correspond
from layout_algebra.shardings import column_parallel, expert_stack
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import Topology, make_plan
from transfer_exec.compiler import compile_program
from transfer_exec.plan import Plan, Stage
from transfer_exec.program import Program

SHAPES = [(256, 4096, 6144), (512, 2048, 4096), (64, 4096, 14336)]


def stacked(shape: tuple[int, int, int]) -> tuple[CheckpointSpace, SourceMap]:
    """One checkpoint tensor an expert, one stack on the engine."""
    space = CheckpointSpace(TensorSpec(f"experts.{e}.w", shape[1:], "BF16") for e in range(shape[0]))
    experts = [whole(space, f"experts.{e}.w") for e in range(shape[0])]
    return space, declare(space, {"w": expert_stack(experts)})


@pytest.mark.parametrize("shape", SHAPES)
def test_maps_hold_elements_past_32_bits(shape: tuple[int, int, int]) -> None:
    space, held = stacked(shape)
    each = shape[1] * shape[2]
    offset = (shape[0] - 1) * each
    assert offset > 2**31
    assert offset * 2 > 2**32
    again = SourceMap.from_bytes(held.to_bytes())
    assert again.digest() == held.digest()
    assert len(held.to_bytes()) < 2000
    assert [str(copy) for copy in again.slice_copies("w")] == [f"0+({shape[0] * each}:1) <- 1+({shape[0] * each}:1)"]
    assert space.element_id(f"experts.{shape[0] - 1}.w", each - 1) == shape[0] * each
    assert space.locate(offset + 1) == (f"experts.{shape[0] - 1}.w", 0)
    assert (held.coverage().copied_elements, held.coverage().unused_tensors) == (shape[0] * each, ())


def test_a_transposed_stack_keeps_its_offsets() -> None:
    """Columns of every expert, transposed: target and source strides, and starts, past 2**31."""
    shape = SHAPES[0]
    space = CheckpointSpace([TensorSpec("w", shape, "BF16")])
    part = whole(space, "w").take(0, 128, 256).transpose(0, 2, 1)
    held = SourceMap.from_bytes(declare(space, {"p": part}).to_bytes())
    (copy,) = held.slice_copies("p")
    each = shape[1] * shape[2]
    assert copy.shape == (128, shape[2], shape[1])
    assert copy.source.start == 1 + 128 * each > 2**31
    last = copy.source.start + sum((n - 1) * s for n, s in zip(copy.shape, copy.source.strides, strict=True))
    assert last == 256 * each > 2**32
    assert copy.target.strides == (each, shape[1], 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_plans_and_programs_keep_offsets(shape: tuple[int, int, int]) -> None:
    """Two trainers hold half the experts' rows each; one engine of two ranks keeps halves of the experts."""
    space, _ = stacked(shape)
    experts = [whole(space, f"experts.{e}.w") for e in range(shape[0])]
    holders = {
        f"trainer/{r}": declare(space, {"p": stack([column_parallel(each, rank=r, degree=2) for each in experts])})
        for r in range(2)
    }
    needers = {f"engine/0/{r}": declare(space, {"w": expert_stack(experts, rank=r, degree=2)}) for r in range(2)}
    topology = Topology.uniform(
        trainers=2, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    plan = make_plan(correspond(holders, needers), topology, buffer_bytes=1 << 30)
    again = Plan.from_bytes(plan.to_bytes())
    assert again.digest() == plan.digest()
    size, each = shape[0] * shape[1] * shape[2], shape[1] * shape[2]
    received: dict[str, list[np.ndarray]] = {worker: [] for worker in needers}
    for move in again.moves():
        received[move.target].append(move.runs.intervals)
        if move.stage is Stage.RECEIVE:
            rows = (move.runs.intervals - 1) % each // (each // 2)
            assert (rows[:, 0] == int(move.source[-1])).all(), "a trainer sends the half that it holds"
    for rank, worker in enumerate(needers):
        spans = np.concatenate(received[worker])
        spans = spans[np.argsort(spans[:, 0])]
        assert (spans[1:, 0] >= spans[:-1, 1]).all()
        mine = spans[(spans[:, 0] >= 1 + rank * size // 2) & (spans[:, 1] <= 1 + (rank + 1) * size // 2)]
        assert int((mine[:, 1] - mine[:, 0]).sum()) == size // 2
    assert sum(plan.bytes_sent(worker) for worker in holders) == 2 * size > 2**32
    for worker, source_map in {**holders, **needers}.items():
        program = Program.from_bytes(compile_program(again, worker, source_map).to_bytes())
        assert program.digest() == compile_program(plan, worker, source_map).digest()
        assert sum(tensor.bytes for tensor in program.tensors) == size
        assert program.bytes_sent(Stage.RECEIVE) == plan.bytes_sent(worker, Stage.RECEIVE)


def test_one_copy_of_more_than_two_to_the_31_bytes() -> None:
    """A worker that needs 4.3 GB of one tensor in one piece, in one round: no length is cut or wrapped."""
    space = CheckpointSpace([TensorSpec("first", (3,), "BF16"), TensorSpec("w", (2048, 2**20 + 1), "BF16")])
    held = declare(space, {"w": whole(space, "w"), "first": whole(space, "first")})
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    plan = make_plan(correspond({"trainer/0": held}, {"engine/0/0": held}), topology, buffer_bytes=1 << 33)
    size = 2048 * (2**20 + 1)
    assert plan.rounds == 1
    assert plan.bytes_received("engine/0/0") == 2 * (size + 3) > 2**32
    sender, taker = (
        Program.from_bytes(compile_program(plan, worker, held).to_bytes()) for worker in ("trainer/0", "engine/0/0")
    )
    assert sender.bytes_sent(Stage.RECEIVE) == int(taker.arriving.sum()) == 2 * (size + 3)
    assert sum(taker.buffer_sizes) >= 2 * (size + 3)
    assert max(int(move.runs.intervals[:, 1].max()) for move in plan.moves()) == size + 4
