"""Baselines: everybody gets what it needs, and how many bytes that takes is what each is known for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, topologies

from layout_algebra.correspondence import Correspondence
from layout_algebra.space import CheckpointSpace
from transfer_exec import make_plan, simulate
from transfer_exec.baselines import BASELINES, gather_and_broadcast
from transfer_exec.errors import BudgetError
from transfer_exec.topology import Node, Topology


@settings(max_examples=40)
@given(st.data())
def test_bytes_of_every_baseline(data: st.DataObject) -> None:
    case = data.draw(cases())
    topology = data.draw(topologies(case))
    demand = case.correspondence()
    plan = make_plan(demand, topology, buffer_bytes=64)
    for name, make in BASELINES.items():
        traffic = make(demand, topology, buffer_bytes=64)
        assert traffic.lower_bound_s == plan.lower_bound_s
        for worker in demand.needers:
            needed = sum(group.bytes for group in demand.classes if worker in group.needers)
            everything = name == "gather and broadcast"
            assert traffic.bytes_received(worker) == (demand.needed_bytes if everything else needed)
        line = simulate(traffic, topology)
        assert line.end_to_end_s >= line.binding_s * (1 - 1e-9)


def test_no_demand_is_no_traffic() -> None:
    nobody = Correspondence(CheckpointSpace([]), ("t",), ("e",), ())
    topology = Topology([Node.of("n", ["t", "e"], nic_bytes_per_s=1.0, local_bytes_per_s=1.0)])
    assert gather_and_broadcast(nobody, topology, buffer_bytes=1).flows == ()


@pytest.mark.parametrize("name", BASELINES)
def test_buffers_below_a_byte_are_refused(name: str) -> None:
    with pytest.raises(BudgetError):
        BASELINES[name](Correspondence(CheckpointSpace([]), (), (), ()), Topology([]), buffer_bytes=0)
