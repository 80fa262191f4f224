"""change_workers equals intersecting all maps again, for any workers that leave and join."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies
from plan_oracle import Case, replay

from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import PlanError, UnheldError
from transfer_exec.planner import make_plan
from transfer_exec.replan import change_workers, replan
from transfer_exec.topology import Node, Topology

thorough = settings(max_examples=60)


@st.composite
def changes(draw: st.DrawFn, case: Case) -> tuple[set[str], dict[str, str], Case]:
    """Workers that leave, workers that join, and the case that is left."""
    everyone = [*case.held, *case.needed]
    lost = draw(st.sets(st.sampled_from(everyone), max_size=3))
    joined = {
        (f"trainer/9{number}" if model in case.held else f"engine/9/{number}"): model
        for number, model in enumerate(draw(st.lists(st.sampled_from(everyone), max_size=3)))
    }
    sides = []
    for side in (case.held, case.needed):
        after = {worker: ids for worker, ids in side.items() if worker not in lost}
        after |= {worker: side[model] for worker, model in joined.items() if model in side}
        sides.append(after)
    return lost, joined, Case(case.space, sides[0], sides[1])


@thorough
@given(st.data())
def test_as_if_all_maps_were_intersected_again(data: st.DataObject) -> None:
    case = data.draw(cases())
    lost, joined, after = data.draw(changes(case))
    changed = change_workers(case.correspondence(), lost=lost, joined=joined)
    again = after.correspondence()
    assert (changed.holders, changed.needers) == (again.holders, again.needers)
    assert [(g.holders, g.needers, g.item_bytes, g.runs.runs.tolist()) for g in changed.classes] == [
        (g.holders, g.needers, g.item_bytes, g.runs.runs.tolist()) for g in again.classes
    ]
    if not after.held and not after.needed:
        return
    topology = data.draw(topologies(after))
    if changed.unheld():
        with pytest.raises(UnheldError):
            replan(case.correspondence(), topology, lost=lost, joined=joined, buffer_bytes=64)
        return
    _, plan = replan(case.correspondence(), topology, lost=lost, joined=joined, buffer_bytes=64)
    replay(plan, after, topology, 64)
    assert plan.digest() == make_plan(again, topology, buffer_bytes=64).digest()


@pytest.mark.parametrize(
    ("lost", "joined", "word"),
    [
        (["x"], {}, "cannot be lost"),
        ([], {"n": "x"}, "joins with the map of x"),
        ([], {"trainer/0": "trainer/0"}, "already"),
    ],
)
def test_changes_that_make_no_sense(lost: list[str], joined: dict[str, str], word: str) -> None:
    case = Case(
        CheckpointSpace([TensorSpec("t", (2,), "F32")]),
        {"trainer/0": frozenset({1, 2})},
        {"engine/0/0": frozenset({1})},
    )
    with pytest.raises(PlanError, match=word):
        change_workers(case.correspondence(), lost=lost, joined=joined)
    same = change_workers(case.correspondence(), lost=["engine/0/0"], joined={"engine/0/0": "engine/0/0"})
    assert same.needers == ("engine/0/0",)


def test_an_engine_that_grew() -> None:
    """Two ranks of halves become four of quarters, as another engine has them, then a replica of each joins."""
    space = CheckpointSpace([TensorSpec("t", (8,), "F32")])
    halves = {f"engine/0/{rank}": frozenset(range(1 + 4 * rank, 5 + 4 * rank)) for rank in range(2)}
    quarters = [frozenset({1 + 2 * rank, 2 + 2 * rank}) for rank in range(4)]
    held = {"trainer/0": frozenset(range(1, 9)), "trainer/1": frozenset(range(1, 9))}
    other = {f"engine/1/{rank}": ids for rank, ids in enumerate(quarters)}
    before = Case(space, held, {**halves, **other})
    grown = Case(space, held, {**{f"engine/0/{rank}": ids for rank, ids in enumerate(quarters)}, **other})
    doubled = Case(space, held, {f"engine/0/{4 + rank}": ids for rank, ids in enumerate(quarters)} | dict(grown.needed))

    def cluster(size: int) -> Topology:
        ranks = [f"engine/0/{rank}" for rank in range(size)]
        return Topology(
            Node.of(f"node{number}", workers, nic_bytes_per_s=1e9, local_bytes_per_s=4e9)
            for number, workers in enumerate((held, ranks, other))
        )

    after, plan = replan(
        before.correspondence(),
        cluster(4),
        lost=list(halves),
        joined={f"engine/0/{rank}": f"engine/1/{rank}" for rank in range(4)},
        buffer_bytes=16,
    )
    assert after.digest() == grown.correspondence().digest()
    replay(plan, grown, cluster(4), 16)
    after, plan = replan(
        after, cluster(8), joined={f"engine/0/{4 + rank}": f"engine/0/{rank}" for rank in range(4)}, buffer_bytes=16
    )
    assert after.digest() == doubled.correspondence().digest()
    assert plan.digest() == make_plan(doubled.correspondence(), cluster(8), buffer_bytes=16).digest()
    replay(plan, doubled, cluster(8), 16)
    assert plan.load_s == plan.lower_bound_s
