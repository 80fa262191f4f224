"""Regions and descriptor lists, replayed id by id with the plan's own slow meaning."""

from __future__ import annotations

import numpy as np
import pytest
from crossing import random_crossing

from layout_algebra.runs import RunTable
from transfer_exec.descriptors import DescriptorTable, descriptor_tables
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.regions import Buffer, Message, Region, Regions


def random_plan(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    return random_crossing(rng).plan(
        workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([8, 40, 1 << 20]))
    )


def content(plan: Plan, regions: Regions, region: Region, number: int) -> list[tuple[int, int]]:
    """What a region holds in a round, byte by byte: (id, byte of the element). The slow meaning."""
    out: list[tuple[int, int]] = []
    for route in regions.layout(region).routes.tolist():
        width = plan.routes[route].item_bytes
        out += [(i, byte) for i in plan.part(route, number).ids().tolist() for byte in range(width)]
    return out


def tables_of(regions: Regions, worker: str) -> dict[Message, tuple[DescriptorTable, ...]]:
    """The descriptor tables of every message from a worker."""
    layouts = [regions.layout(Region(worker, buffer)) for buffer in Buffer]
    postings, letters = regions.outgoing(worker), regions.letters(worker)
    return {
        posting.message: descriptor_tables(letter, layouts) for posting, letter in zip(postings, letters, strict=True)
    }


def hops_of(plan: Plan) -> set[Message]:
    return {Message(*hop) for route in plan.routes for hop in route.hops}


@pytest.mark.parametrize("seed", range(12))
def test_replayed_messages_fill_every_region_with_the_right_ids(seed: int) -> None:
    plan = random_plan(seed)
    regions = Regions(plan)
    assert set(regions.messages) == hops_of(plan)
    tables = {message: made for worker in plan.workers for message, made in tables_of(regions, worker).items()}
    assert set(tables) == set(regions.messages)
    for number in range(plan.rounds):
        held: dict[Region, list[tuple[int, int] | None]] = {}
        for worker in plan.workers:
            for buffer in Buffer:
                region = Region(worker, buffer)
                expected = content(plan, regions, region, number)
                held[region] = list(expected) if buffer is Buffer.PACK else [None] * len(expected)
                assert regions.layout(region).size_bytes >= len(expected)
        for stage in Stage:  # a stage reads what the stages before it wrote
            for message in (each for each in regions.messages if each.stage is stage):
                for table in tables[message]:
                    source = held[Region(message.source, table.buffer)]
                    target = held[Region(message.target, Buffer.of_stage(stage))]
                    for start, to, size in table.of_round(number).astype(int).tolist():
                        assert all(byte is None for byte in target[to : to + size]), "written twice"
                        assert start + size <= len(source)
                        assert to + size <= len(target)
                        target[to : to + size] = source[start : start + size]
        for region, found in held.items():
            assert found == content(plan, regions, region, number)


@pytest.mark.parametrize("seed", range(12))
def test_regions_are_as_large_as_their_fullest_round_and_naturally_aligned(seed: int) -> None:
    plan = random_plan(seed)
    regions = Regions(plan)
    for worker in plan.workers:
        for buffer in Buffer:
            layout = regions.layout(Region(worker, buffer))
            per_round = [
                sum(
                    plan.part_elements(route, number) * plan.routes[route].item_bytes
                    for route in layout.routes.tolist()
                )
                for number in range(plan.rounds)
            ]
            assert layout.size_bytes == max(per_round) <= plan.buffer_bytes
            widths = np.array([plan.routes[route].item_bytes for route in layout.routes], dtype=np.int64)
            assert not len(widths) or not np.any(layout.offsets % widths[:, None])


@pytest.mark.parametrize("seed", range(12))
def test_neighbours_are_merged(seed: int) -> None:
    plan = random_plan(seed)
    regions = Regions(plan)
    for worker in plan.workers:
        for table in (table for made in tables_of(regions, worker).values() for table in made):
            for number in range(plan.rounds):
                rows = table.of_round(number).astype(int)
                assert np.all(rows[:, 2] > 0)
                ends = rows[:-1, :2] + rows[:-1, 2:]
                assert not np.any(np.all(ends == rows[1:, :2], axis=1))
                assert table.bytes_of_round(number) == rows[:, 2].sum()


def test_one_descriptor_for_routes_that_share_a_way() -> None:
    """Two classes with one way lie side by side at both ends, in every round."""
    hop = (Hop(Stage.RECEIVE, "t", "a"),)
    other = (Hop(Stage.RECEIVE, "t", "b"),)
    routes = (
        Route(RunTable.from_intervals([[1, 7]]), 4, "t", hop),
        Route(RunTable.from_intervals([[7, 13]]), 4, "t", other),
        Route(RunTable.from_intervals([[13, 19]]), 4, "t", hop),
        Route(RunTable.from_intervals([[19, 25]]), 2, "t", hop),
    )
    plan = Plan("x", ("t",), ("a", "b"), (0, 1, 2), routes, 3, 100, 1.0, "t", 1.0, 1.0)
    regions = Regions(plan)
    (table,) = tables_of(regions, "t")[Message(Stage.RECEIVE, "t", "a")]
    assert isinstance(table, DescriptorTable)
    assert [len(table.of_round(number)) for number in range(3)] == [2, 2, 2], "one for each width"
    assert table.of_round(1).tolist() == [[0, 0, 16], [24, 16, 4]]
