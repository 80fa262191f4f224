"""Plans that keep tensors or rows of blocks in one round: every law, every bit, budgets, and what equality is left."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from crossing import random_crossing
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies
from plan_oracle import replay
from test_run_in_process import cross

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import schedule, together
from transfer_exec.errors import BudgetError, PlanError
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan, round_load_over_average
from transfer_exec.together import Unit, group_starts
from transfer_exec.topology import Topology


def rounds_of(plan: Plan) -> dict[int, set[int]]:
    """Rounds in which every id travels."""
    out: dict[int, set[int]] = {}
    for move in plan.moves():
        for i in move.runs.ids().tolist():
            out.setdefault(i, set()).add(move.round)
    return out


def check_together(plan: Plan, space: CheckpointSpace, unit: Unit) -> None:
    """The ids of every tensor, or of every ``unit`` rows of each of its matrices, travel in one round."""
    found = rounds_of(plan)
    for spec in space.specs:
        ids = np.arange(*space.id_range(spec.name))
        if unit == "tensor" or len(spec.shape) < 2:
            bands = [ids]
        else:
            matrices = ids.reshape(-1, *spec.shape[-2:])
            bands = [matrix[at : at + unit] for matrix in matrices for at in range(0, spec.shape[-2], unit)]
        for band in bands:
            seen = [found[i] for i in band.reshape(-1).tolist() if i in found]
            assert len(set().union(*seen)) <= 1, (spec.name, unit)


@settings(max_examples=60)
@given(st.data())
def test_every_law_holds_and_tensors_stay_whole(data: st.DataObject) -> None:
    case = data.draw(cases())
    topology = data.draw(topologies(case))
    buffer_bytes = data.draw(st.integers(17 * 8, 300))
    plan = make_plan(case.correspondence(), topology, buffer_bytes=buffer_bytes, keep_together="tensor")
    replay(plan, case, topology, buffer_bytes)
    check_together(plan, case.space, "tensor")
    again = Plan.from_bytes(plan.to_bytes())
    assert again.digest() == plan.digest()
    assert rounds_of(again) == rounds_of(plan)
    other = make_plan(case.correspondence(shuffled=True), topology, buffer_bytes=buffer_bytes, keep_together="tensor")
    assert other.digest() == plan.digest()
    apart = make_plan(case.correspondence(), topology, buffer_bytes=buffer_bytes)
    assert (plan.load_s, plan.optimum_s) == (apart.load_s, apart.optimum_s), "the way of no id depends on it"


@pytest.mark.parametrize("unit", ["tensor", 1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_bit_lands(unit: Unit, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = random_crossing(rng)
    engines = max(int(name.split("/")[1]) for name in made.needed) + 1
    topology = Topology.uniform(
        trainers=len(made.held), engines=engines, engine_size=2, workers_per_node=2, nic_bytes_per_s=1.0,
        local_bytes_per_s=10.0,
    )  # fmt: skip
    sides = [{worker: made.maps[worker] for worker in side} for side in (made.held, made.needed)]
    demand = correspond(*sides, cast=True)
    for buffer_bytes in (8 * max(spec.elements for spec in made.space.specs), 1 << 20):
        plan = make_plan(demand, topology, buffer_bytes=buffer_bytes, keep_together=unit)
        check_together(plan, made.space, unit)
        cross(made, plan, rng)


def layers(count: int, rows: int, width: int = 8) -> tuple[CheckpointSpace, Correspondence, Topology]:
    """Two trainers with half of the layers each, one engine of two that needs all."""
    space = CheckpointSpace(TensorSpec(f"layers.{n}.w", (rows, width), "BF16") for n in range(count))
    halves = [space.names[: count // 2], space.names[count // 2 :]]
    held = {f"trainer/{r}": declare(space, {n: whole(space, n) for n in half}) for r, half in enumerate(halves)}
    needed = {
        f"engine/0/{r}": declare(space, {n: whole(space, n).shard(0, r, 2) for n in space.names}) for r in range(2)
    }
    topology = Topology.uniform(
        trainers=2, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e3, local_bytes_per_s=1e4
    )
    return space, correspond(held, needed), topology


def test_equal_tensors_give_equal_rounds() -> None:
    """Sixteen layers in rounds of four: two of either trainer in each, so every link is as busy as in equal parts."""
    space, demand, topology = layers(16, rows=4)
    budget = 4 * space.total_bytes // 16 // 2
    plan = make_plan(demand, topology, buffer_bytes=budget, keep_together="tensor")
    assert plan.rounds == 4
    assert round_load_over_average(plan, topology) == pytest.approx(1.0)
    per_round = [sorted({i for m in plan.moves() if m.round == k for i in m.runs.ids().tolist()}) for k in range(4)]
    for ids in per_round:
        names = {space.locate(i)[0] for i in ids}
        assert len([n for n in names if int(n.split(".")[1]) < 8]) == 2


def test_rows_are_more_equal_than_tensors() -> None:
    """Three tensors of either trainer do not divide over two rounds; two against one is a third above the average."""
    _, demand, topology = layers(6, rows=16)
    units: tuple[Unit | None, ...] = ("tensor", 4, None)
    plans = [make_plan(demand, topology, buffer_bytes=512, keep_together=unit) for unit in units]
    assert [plan.rounds for plan in plans] == [2, 2, 2]
    assert [round_load_over_average(plan, topology) for plan in plans] == pytest.approx([4 / 3, 1, 1])


def test_what_does_not_fit_is_named() -> None:
    _, demand, topology = layers(4, rows=16)
    with pytest.raises(
        BudgetError,
        match=r"buffer_bytes is 100, and layers\.\d\.w\[0:128\], kept together, puts 256 bytes into one buffer of tr",
    ):
        make_plan(demand, topology, buffer_bytes=100, keep_together="tensor")
    with pytest.raises(BudgetError, match=r"layers\.\d\.w\[0:64\], kept together, puts 128 bytes .*at least 128 bytes"):
        make_plan(demand, topology, buffer_bytes=100, keep_together=8)
    assert make_plan(demand, topology, buffer_bytes=256, keep_together="tensor").rounds == 2
    for bad in ("layer", 0, -1, True, 1.5):
        with pytest.raises(PlanError, match="expected 'tensor' or a number of rows"):
            make_plan(demand, topology, buffer_bytes=100, keep_together=bad)  # type: ignore[arg-type]


def test_bands_begin_again_with_every_matrix() -> None:
    space = CheckpointSpace([TensorSpec("experts", (2, 3, 2), "F32"), TensorSpec("e", (0, 4), "F32")])
    assert group_starts(space, 2).tolist() == [1, 5, 7, 11]
    assert group_starts(CheckpointSpace([]), 2).tolist() == group_starts(CheckpointSpace([]), "tensor").tolist() == []


def test_nobody_needs_anything() -> None:
    space, _, topology = layers(4, rows=2)
    nothing = declare(space, {})
    demand = correspond(
        {"trainer/0": declare(space, {n: whole(space, n) for n in space.names})}, {"engine/0/0": nothing}
    )
    plan = make_plan(demand, topology, buffer_bytes=1, keep_together="tensor")
    assert (plan.rounds, list(plan.moves())) == (1, [])
    assert round_load_over_average(plan, topology) == 1.0


@pytest.mark.parametrize("module", [schedule, together])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
