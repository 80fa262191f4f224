"""make_plan: every law, id by id, on random clusters and layouts; optimal where that can be told; the field's cases."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies
from plan_oracle import replay

from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan

thorough = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(st.data())
def test_every_law_on_random_clusters(data: st.DataObject) -> None:
    case = data.draw(cases())
    topology = data.draw(topologies(case))
    buffer_bytes = data.draw(st.integers(8, 200))
    plan = make_plan(case.correspondence(), topology, buffer_bytes=buffer_bytes)
    replay(plan, case, topology, buffer_bytes)
    assert plan.lower_bound_s <= plan.optimum_s * (1 + 1e-6) + 1e-9
    again = make_plan(case.correspondence(shuffled=True), topology, buffer_bytes=buffer_bytes)
    assert again.digest() == plan.digest()
    assert Plan.from_bytes(plan.to_bytes()).digest() == plan.digest()
