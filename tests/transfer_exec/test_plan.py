"""Plan: parts and moves, totals, bytes that are safe to read, and every law it refuses to break."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.correspondence import correspond
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import Packed, pack_table, seal
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import laws
from transfer_exec.demand_laws import check_demand
from transfer_exec.errors import PlanBytesError, PlanError
from transfer_exec.hops import HopTable
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.schedule import Schedule

RECEIVE, EXTERNAL, INTERNAL = Stage.RECEIVE, Stage.EXTERNAL, Stage.INTERNAL
HOLDERS = ("t0", "t1")
NEEDERS = ("a0", "a1", "b0", "b1")
NODES = (0, 1, 2, 2, 3, 3)
FULL = (
    Hop(RECEIVE, "t0", "a0"),
    Hop(EXTERNAL, "a0", "b1"),
    Hop(INTERNAL, "a0", "a1"),
    Hop(INTERNAL, "b1", "b0"),
)


def route(ids: range, *hops: Hop, holder: str = "t0", item_bytes: int = 2) -> Route:
    return Route(RunTable.from_ids(list(ids)), item_bytes, holder, hops)


def plan_of(*routes: Route, rounds: int = 1, nodes: tuple[int, ...] = NODES, clusters: tuple[int, ...] = ()) -> Plan:
    return Plan("s", HOLDERS, NEEDERS, nodes, routes, rounds, 64, 1.0, "link", 1.0, 1.0, clusters)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_parts_tile_every_route_and_rounds_are_even(sizes: list[int], rounds: int) -> None:
    starts = np.cumsum([0, *sizes])
    routes = [route(range(1 + first, 1 + last), *FULL) for first, last in pairwise(starts)]
    plan = plan_of(*routes, rounds=rounds)
    totals = np.zeros(rounds, dtype=int)
    for index, one in enumerate(routes):
        parts = [plan.part(index, number) for number in range(rounds)]
        assert [len(p.ids()) for p in parts] == [plan.part_elements(index, number) for number in range(rounds)]
        assert np.array_equal(np.concatenate([p.ids() for p in parts]), one.runs.ids()), "in order, nothing twice"
        counts = [p.elements for p in parts]
        assert max(counts) - min(counts) <= 1
        totals += counts
    assert totals.max() - totals.min() <= 1, "over all routes, rounds differ by an element at most"
    schedule = Schedule.of(np.array(sizes), rounds)
    assert np.array_equal(schedule.elements(0, rounds).sum(axis=0), totals)


def test_moves_come_in_order_and_merge_routes_of_one_way() -> None:
    plan = plan_of(route(range(1, 5), *FULL), route(range(5, 7), *FULL), route(range(7, 9), *FULL, item_bytes=4))
    seen = [(m.stage, m.source, m.target, m.item_bytes, m.runs.ids().tolist(), m.bytes) for m in plan.moves()]
    assert seen[:2] == [
        (RECEIVE, "t0", "a0", 2, [1, 2, 3, 4, 5, 6], 12),
        (RECEIVE, "t0", "a0", 4, [7, 8], 8),
    ]
    assert [row[:3] for row in seen[2::2]] == [tuple(hop) for hop in FULL[1:]]
    assert plan.bytes_sent("t0") == plan.bytes_received("a0") == 20
    assert plan.bytes_sent("a0") == 40
    assert plan.bytes_sent("a0", EXTERNAL) == plan.bytes_received("b1", EXTERNAL) == 20
    assert plan.bytes_received("t1") == plan.bytes_sent("t1", RECEIVE) == 0
    with pytest.raises(PlanError, match="nobody is not a worker of this plan; it has t0, t1, a0"):
        plan.bytes_sent("nobody")


def test_a_plan_without_routes() -> None:
    plan = plan_of(rounds=3)
    assert list(plan.moves()) == []
    assert Plan.from_bytes(plan.to_bytes()).digest() == plan.digest()


COLOCATED = (0, 1, 1, 1, 3, 3)
"""t1 sits in the node of a0 and a1."""


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([route(range(0), *FULL)], "0 elements"),
        ([route(range(1, 3), *FULL, item_bytes=0)], "of 0 bytes"),
        ([route(range(1, 3))], "ids 1:3 and on, packed by t0.: it goes nowhere"),
        ([route(range(1, 3), *FULL, holder="a0")], "its holder is not among the plan's holders"),
        ([route(range(1, 3), Hop(RECEIVE, "t0", "x"))], "x names a worker that is not in the plan"),
        ([route(range(1, 3), Hop(RECEIVE, "t0", "t1"))], "t1 gets what it has already"),
        ([route(range(1, 3), Hop(RECEIVE, "t1", "a0"))], "t1 sends to a0 what it has not got yet"),
        ([route(range(1, 3), FULL[0], Hop(RECEIVE, "t0", "b0"))], "RECEIVE comes from the holder and goes to one"),
        ([route(range(1, 3), FULL[0], Hop(RECEIVE, "a0", "b0"))], "RECEIVE comes from the holder and goes to one"),
        ([route(range(1, 3), Hop(EXTERNAL, "t0", "a0"))], "EXTERNAL hop from t0; expected the first receiver none"),
        (
            [route(range(1, 3), FULL[0], Hop(EXTERNAL, "t0", "b0"))],
            "EXTERNAL hop from t0; expected the first receiver a0",
        ),
        (
            [route(range(1, 3), FULL[0], Hop(EXTERNAL, "a0", "a1"))],
            "EXTERNAL hop to a1 crosses the network into|gets over",
        ),
        (
            [route(range(1, 3), *FULL[:2], Hop(EXTERNAL, "a0", "b0"))],
            "b0 gets over the network what b1 of its node got",
        ),
        (
            [route(range(1, 3), *FULL[:3], Hop(EXTERNAL, "a0", "b0"))],
            "after a later stage; expected hops in stage order",
        ),
        ([route(range(1, 3), FULL[0], Hop(INTERNAL, "a0", "b0"))], "INTERNAL hop a0 -> b0 leaves node 2"),
        ([route(range(1, 3), *FULL, Hop(INTERNAL, "a0", "b0"))], "b0 gets what it has already"),
        ([route(range(1, 3), *FULL[:2], Hop(INTERNAL, "a1", "a0"))], "a0 gets what it has already"),
        ([route(range(1, 3), *FULL), route(range(2, 5), *FULL)], "routes 0 and 1 both carry ids 2:3"),
        ([route(range(4, 6), *FULL), route(range(1, 3), *FULL)], "route 1 begins with id 1, before the route in front"),
        ([route(range(1, 3), *FULL), route(range(1, 3), *FULL)], "same ids and the same holder"),
        (
            [route(range(1, 3), FULL[0]), route(range(1, 3), Hop(RECEIVE, "t1", "a0"), holder="t1")],
            "reach a worker twice",
        ),
        (
            [route(range(1, 3), FULL[0]), route(range(1, 3), Hop(RECEIVE, "t1", "b0"), holder="t1")],
            "trainers send them over the network twice",
        ),
    ],
)
def test_laws_of_structure(routes: list[Route], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(*routes)


APART = (0, 0, 0, 0, 1, 1)
"""b0 and b1 are in a cluster of their own, in a node each here."""


@pytest.mark.parametrize(
    ("hops", "clusters", "message"),
    [
        ([FULL[0], Hop(EXTERNAL, "a0", "b0"), Hop(EXTERNAL, "b0", "b1")], APART, None),
        (
            [FULL[0], Hop(EXTERNAL, "a0", "b0"), Hop(EXTERNAL, "b0", "b1")],
            (),
            "from b0; expected the first receiver a0",
        ),
        (
            [FULL[0], Hop(EXTERNAL, "a0", "b0"), Hop(EXTERNAL, "a0", "b1")],
            APART,
            "from a0; expected the gateway b0",
        ),
        ([FULL[0], Hop(EXTERNAL, "b0", "b1")], APART, "b0 sends to b1 what it has not got yet"),
        (
            [FULL[0], Hop(EXTERNAL, "a0", "b0"), Hop(EXTERNAL, "b0", "a1")],
            APART,
            "from b0; expected the first receiver a0",
        ),
        ([Hop(RECEIVE, "t0", "b0"), Hop(EXTERNAL, "b0", "a0")], APART, "a0 goes back into the holder's cluster"),
        ([Hop(RECEIVE, "t0", "b0"), Hop(EXTERNAL, "b0", "a0")], (0, 0, 1, 1, 2, 2), None),
    ],
)
def test_laws_between_clusters(hops: list[Hop], clusters: tuple[int, ...], message: str | None) -> None:
    """A first receiver sends to one gateway of every other cluster, which forwards inside its own."""
    nodes = (0, 1, 2, 3, 4, 5)
    if message is None:
        plan = plan_of(route(range(1, 3), *hops), nodes=nodes, clusters=clusters)
        assert Plan.from_bytes(plan.to_bytes()).digest() == plan.digest()
        assert Plan.from_bytes(plan.to_bytes()).clusters == clusters
        return
    with pytest.raises(PlanError, match=message):
        plan_of(route(range(1, 3), *hops), nodes=nodes, clusters=clusters)


def test_a_gateways_moves_come_after_what_it_gets() -> None:
    hops = (FULL[0], Hop(EXTERNAL, "a0", "b1"), Hop(EXTERNAL, "b1", "b0"))
    plan = plan_of(route(range(1, 3), *hops), nodes=(0, 1, 2, 3, 4, 5), clusters=APART)
    assert plan.routes[0].legs() == (0, 0, 1)
    assert [(move.source, move.target) for move in plan.moves()] == [hop[1:] for hop in hops]


def test_a_rollout_passes_on_inside_its_node_only_what_came_from_outside() -> None:
    nodes = (0, 1, 2, 2, 2, 2)
    hops = (FULL[0], Hop(INTERNAL, "a0", "a1"), Hop(INTERNAL, "a1", "b0"))
    with pytest.raises(PlanError, match="a1 passes on what it got inside its node"):
        plan_of(route(range(1, 3), *hops), nodes=nodes)


def test_a_node_that_holds_ids_does_not_get_them_by_network() -> None:
    with pytest.raises(PlanError, match="crosses the network into the holder's node"):
        plan_of(route(range(1, 3), Hop(RECEIVE, "t1", "a0"), holder="t1"), nodes=COLOCATED)
    twins = [route(range(1, 3), FULL[0]), route(range(1, 3), Hop(INTERNAL, "t1", "a1"), holder="t1")]
    with pytest.raises(PlanError, match="node 1 holds their ids and gets them by network"):
        plan_of(*twins, nodes=COLOCATED)
    twins[0] = route(range(1, 3), Hop(RECEIVE, "t0", "b0"))
    plan_of(*twins, nodes=COLOCATED)
    with pytest.raises(PlanError, match="the same ids and different widths"):
        plan_of(twins[0], route(range(1, 3), Hop(INTERNAL, "t1", "a1"), holder="t1", item_bytes=4), nodes=COLOCATED)


def test_laws_hold_piece_by_piece_of_a_large_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [route(range(1 + 2 * number, 3 + 2 * number), *FULL) for number in range(5)]
    wrong = route(range(11, 13), FULL[0], Hop(EXTERNAL, "b1", "b0"))
    for cells in (1, 12, 1 << 22):
        monkeypatch.setattr(laws, "_CELLS", cells)
        plan_of(*good)
        with pytest.raises(PlanError, match=r"route 5 .* sends to b0 what it has not got yet"):
            plan_of(*good, wrong)


def test_hops_as_arrays_whether_routes_share_objects_or_not() -> None:
    shared = [route(range(1, 3), *FULL), route(range(3, 5), *FULL[:3])]
    apart = [replace(each, hops=tuple(Hop(*hop) for hop in each.hops)) for each in shared]
    expected = [(hop.stage.value, hop.source, hop.target) for each in shared for hop in each.hops]
    names = HOLDERS + NEEDERS
    for routes in (shared, apart):
        hops = HopTable.of(routes, names)
        rows = zip(hops.stage.tolist(), hops.source.tolist(), hops.target.tolist(), strict=True)
        assert [(stage, names[source], names[target]) for stage, source, target in rows] == expected
        assert (hops.counts.tolist(), hops.route.tolist()) == ([4, 3], [0, 0, 0, 0, 1, 1, 1])
    assert HopTable.of(shared, ("t0",)).target.tolist() == [-1] * 7


def test_fields_that_contradict() -> None:
    good = plan_of(route(range(1, 3), *FULL))
    with pytest.raises(PlanError, match="named twice"):
        replace(good, holders=("t0", "a0"))
    with pytest.raises(PlanError, match="2 node numbers for 6 workers"):
        replace(good, nodes=(0, 1))
    with pytest.raises(PlanError, match="0 rounds"):
        replace(good, rounds=0)
    with pytest.raises(PlanError, match="buffer of 0 bytes"):
        replace(good, buffer_bytes=0)


SPACE = CheckpointSpace([TensorSpec("w", (6,), "BF16")])


def demand(nodes_need: dict[str, range], held: dict[str, range] | None = None):  # type: ignore[no-untyped-def]
    def maps(side: dict[str, range]) -> dict[str, SourceMap]:
        return {
            w: SourceMap.from_ids(SPACE, {"p": np.array(list(ids), dtype=np.int64)}, {"p": "BF16"})
            for w, ids in side.items()
        }

    nobody = dict.fromkeys(NEEDERS, range(0))
    return correspond(maps(held or dict.fromkeys(HOLDERS, range(1, 7))), maps({**nobody, **nodes_need}))


EVERYBODY = dict.fromkeys(NEEDERS, range(1, 7))


@pytest.mark.parametrize(
    ("routes", "need", "held", "message"),
    [
        ([route(range(1, 5), *FULL)], EVERYBODY, None, r"class 0, w\[0:6\]: a0 gets 4 of 6 elements"),
        (
            [route(range(1, 7), *FULL)],
            {"a0": range(1, 7), "b0": range(1, 7)},
            None,
            "a1 gets it from a0 and does not need",
        ),
        ([route(range(1, 7), *FULL[:2], FULL[3])], {"a0": range(1, 7)}, None, "node 3 gets it through b1 and nobody"),
        (
            [route(range(1, 7), *FULL)],
            EVERYBODY,
            {"t0": range(1, 4), "t1": range(1, 7)},
            "route 0: ids 1:7 do not lie in",
        ),
        (
            [route(range(1, 4), *FULL), route(range(4, 7), *FULL)],
            EVERYBODY,
            {"t0": range(1, 4), "t1": range(1, 7)},
            r"class 1, w\[3:6\]: t0 packs it and does not hold it; holders t1",
        ),
        ([route(range(1, 7), *FULL, item_bytes=4)], EVERYBODY, None, "elements of 4 bytes, not 2"),
        ([route(range(1, 8), *FULL)], EVERYBODY, None, "route 0: ids 1:8 do not lie in one demand class"),
        ([], EVERYBODY, None, "a0 gets 0 of 6 elements"),
    ],
)
def test_laws_of_demand(
    routes: list[Route], need: dict[str, range], held: dict[str, range] | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_demand(plan_of(*routes), demand(need, held))


def test_the_demand_knows_holders_in_needing_clusters() -> None:
    """t1 is in the cluster of b0; a copy from t0 to b0 crosses for nothing, one from t1 does not."""
    apart = {"nodes": (0, 1, 2, 3, 4, 5), "clusters": (0, 1, 0, 0, 1, 1)}
    for holder, lawful in (("t0", False), ("t1", True)):
        plan = plan_of(route(range(1, 7), Hop(RECEIVE, holder, "b0"), holder=holder), **apart)  # type: ignore[arg-type]
        if lawful:
            check_demand(plan, demand({"b0": range(1, 7)}))
            continue
        with pytest.raises(
            PlanError, match=r"t0 -> b0 crosses clusters that it need not; .* one of the clusters \[1\]"
        ):
            check_demand(plan, demand({"b0": range(1, 7)}))


def test_the_demand_knows_other_holders_in_a_node() -> None:
    """The route alone is lawful; that t1 beside a0 holds the ids too is known from the demand only."""
    plan = plan_of(route(range(1, 7), *FULL), nodes=COLOCATED)
    with pytest.raises(PlanError, match="node 1 holds it and still gets it over the network at a0"):
        check_demand(plan, demand(EVERYBODY))


def test_bytes_round_trip_and_digest() -> None:
    plan = plan_of(route(range(1, 30, 3), *FULL), route(range(100, 120), FULL[0], FULL[2]), rounds=4)
    again = Plan.from_bytes(plan.to_bytes())
    assert again.to_bytes() == plan.to_bytes()
    assert again.same_as(plan)
    assert [(r.item_bytes, r.holder, r.hops) for r in again.routes] == [
        (r.item_bytes, r.holder, r.hops) for r in plan.routes
    ]
    assert all(a.runs.same_as(b.runs) for a, b in zip(again.routes, plan.routes, strict=True))
    for change in ({"rounds": 5}, {"load_s": 2.0}, {"space_digest": "other"}, {"buffer_bytes": 65}):
        assert not replace(plan, **change).same_as(plan)  # type: ignore[arg-type]


def test_bytes_that_are_no_plan() -> None:
    data = plan_of(route(range(1, 30, 3), *FULL)).to_bytes()
    for bad in (b"", data[:20], data[:-1], b"x" + data[1:], data + b"x", data[:30] + b"\0" + data[31:]):
        with pytest.raises(PlanBytesError):
            Plan.from_bytes(bad)


def forged(**changes: object) -> bytes:
    """A plan's bytes with altered fields and a right checksum."""
    from transfer_exec.plan_bytes import _MAGIC, _plain, _Plan

    fields = msgspec.msgpack.decode(_plain(plan_of(route(range(1, 30, 3), *FULL))), type=_Plan)
    values = {name: changes.get(name, getattr(fields, name)) for name in _Plan.__struct_fields__}
    return seal(_MAGIC, msgspec.msgpack.encode(_Plan(**values)))  # type: ignore[arg-type]


def table(rows: list[list[int]]) -> Packed:
    return pack_table(np.array(rows, dtype=np.int64))


HOP_ROWS = [[0, 0, 2], [1, 2, 5], [2, 2, 3], [2, 5, 4]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": table([[1, 1, 3, 1 << 40]])}, "runs reach past|stretches"),
        ({"runs": table([[1, 1, 1, 1 << 35]])}, "stretches"),
        ({"runs": table([[1, 1 << 62, 3, 1]])}, "outside 1.."),
        ({"runs": table([[-1, 1, 3, 2]])}, "outside 1.."),
        ({"runs": table([[1, 1, 1, 5]])}, "not in normal form"),
        ({"runs": table([[1, 1, 3]])}, "a table has 3 columns, expected 4"),
        ({"runs": Packed(1 << 40, 4, b"\0\0\0\0")}, "numbers than the"),
        ({"runs": Packed(1, 4, b"123")}, "no plan: "),
        ({"routes": table([[2, 2, 0, 4]])}, "do not add up"),
        ({"routes": table([[-1, 2, 0, 4]])}, "that are not there"),
        ({"routes": table([[1, 2, 6, 4]])}, "number is outside 0:6"),
        ({"hops": table([[3, 0, 2], *HOP_ROWS[1:]])}, "a hop has no stage"),
        ({"hops": table([[0, 0, -2], *HOP_ROWS[1:]])}, "number is outside 0:6"),
        ({"hops": table([[0, 1, 2], *HOP_ROWS[1:]])}, "breaks a law.*t1 sends to a0"),
        ({"rounds": "three"}, "no plan: "),
        ({"rounds": 1 << 62}, r"rounds for \d+ elements to be moved"),
        ({"nodes": (0,)}, "breaks a law"),
        ({"groups": table([[5, 0], [3, 0]])}, "breaks a law.*groups do not ascend"),
        ({"groups": table([[1, 1]])}, "breaks a law.*has a round outside 0:1"),
        ({"groups": table([[5, 0]])}, "breaks a law.*id 1 is in no group"),
        ({"groups": table([[1, 0, 0]])}, "a table has 3 columns, expected 2"),
        ({"clusters": (0, 1)}, "breaks a law.*2 cluster numbers for 6 workers"),
        ({"clusters": (0, 0, 0, 1, 1, 1)}, "breaks a law.*node of the plan is in two clusters"),
    ],
)
def test_forged_bytes_are_refused(changes: dict[str, object], message: str) -> None:
    assert len(Plan.from_bytes(forged()).routes) == 1
    with pytest.raises(PlanBytesError, match=message):
        Plan.from_bytes(forged(**changes))


@settings(max_examples=200)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    good = bytearray(plan_of(route(range(1, 30, 3), *FULL)).to_bytes())
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PlanBytesError):
        Plan.from_bytes(bytes(good))
