"""make_plan: every law, id by id, on random clusters and layouts; optimal where that can be told; the field's cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies
from plan_oracle import replay

from transfer_exec.balance import balance
from transfer_exec.bound import lower_bound
from transfer_exec.demand import Demand, place_demand
from transfer_exec.demand_laws import check_demand
from transfer_exec.hops import HopTable
from transfer_exec.links import Links
from transfer_exec.plan import Plan
from transfer_exec.planner import largest_load_s, make_plan
from transfer_exec.rounds import count_rounds
from transfer_exec.routes import make_routes
from transfer_exec.shares import Balance
from transfer_exec.spread import spread_demands

thorough = settings(max_examples=100)


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


def over_nodes(demands: Sequence[Demand], links: Links) -> Balance:
    """The program in two steps, whatever its size."""
    return balance(demands, links, bound_s=lower_bound(demands, links).seconds, columns=-1)


@pytest.mark.parametrize("divide", [over_nodes, spread_demands])
def test_every_law_with_other_divisions(divide: Callable[[Sequence[Demand], Links], Balance]) -> None:
    """What large clusters get, and what is left where a solver fails, obey the laws that plans of every size obey."""

    @thorough
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(cases())
        topology = data.draw(topologies(case))
        demand = case.correspondence()
        links = Links.of(topology, demand.holders, demand.needers)
        placed = place_demand(demand, links)
        bound = lower_bound(placed, links)
        division = divide(placed, links)
        routes = make_routes(demand, placed, division.shares, links)
        plan = Plan(
            space_digest=demand.space.digest(),
            holders=demand.holders,
            needers=demand.needers,
            nodes=links.node,
            routes=routes,
            rounds=count_rounds(routes, 64),
            buffer_bytes=64,
            lower_bound_s=bound.seconds,
            bound_link=bound.link,
            optimum_s=division.optimum_s,
            load_s=largest_load_s(routes, links, HopTable.of(routes, links.workers)),
            clusters=links.cluster,
        )
        check_demand(plan, demand)
        replay(plan, case, topology, 64)
        assert plan.load_s >= bound.seconds * (1 - 1e-9)

    check()
