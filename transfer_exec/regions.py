"""Where every part of every route stands in every buffer of every worker, round by round.

A worker has four buffers: what it packs, and what it receives in each of the three stages. In a round a buffer holds
the parts of the routes that pass it, one after the other, sorted by

    element width (wide first), the worker they come from, the way they go, the route's number

Wide elements first means that every part is naturally aligned without a byte of padding, so a buffer is exactly as
large as its fullest round. Routes that share a way lie side by side wherever they go, so their bytes merge into one
descriptor. Both ends of a message compute the same offsets from the same plan; nothing about them is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.plan import Plan, Stage

_CELLS = 1 << 24
"""Parts whose sizes and offsets are kept; workers that write to each other look at the same regions."""


class Buffer(Enum):
    """The buffers of one worker, by what fills them."""

    PACK = 0
    RECEIVE = 1
    EXTERNAL = 2
    INTERNAL = 3

    @staticmethod
    def of_stage(stage: Stage) -> Buffer:
        """The buffer that a stage's messages are written to."""
        return Buffer[stage.name]


class Message(NamedTuple):
    """What ``source`` writes to ``target`` in one stage of every round; leg 1 is what gateways forward after leg 0."""

    stage: Stage
    source: str
    target: str
    leg: int = 0


class Region(NamedTuple):
    """One worker's buffer."""

    worker: str
    buffer: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What stands where in one region.

    Attributes
    ----------
    routes
        Routes that pass the region, in the order of their parts; int64, shape ``(n,)``.
    sizes, offsets
        Bytes of every part and where it begins, per round; int64, shape ``(n, rounds)``.
    """

    routes: IdArray
    sizes: IdArray
    offsets: IdArray

    @property
    def size_bytes(self) -> int:
        """Bytes of the fullest round."""
        return int(self.sizes.sum(axis=0).max()) if len(self.routes) else 0

    def rows_of(self, routes: IdArray) -> IdArray:
        """Positions of some routes of this region, in the order given."""
        order = np.argsort(self.routes)
        return order[np.searchsorted(self.routes[order], routes)]


class Regions:
    """Which routes pass which buffer, for the whole plan.

    Parameters
    ----------
    plan
        The plan; it obeys the laws of plans, so a route is read from a buffer of an earlier stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._rank = {worker: position for position, worker in enumerate(plan.workers)}
        self._members: dict[Region, list[tuple[int, int, int, int]]] = {}
        self._sources: dict[Message, dict[Buffer, list[int]]] = {}
        self._layouts: dict[Region, Layout] = {}
        self._cells = 0
        for number, (route, way) in enumerate(zip(plan.routes, self._ways(), strict=True)):
            width = -route.item_bytes
            self._members.setdefault(Region(route.holder, Buffer.PACK), []).append((width, 0, way, number))
            stands_in = {route.holder: Buffer.PACK}
            for hop, leg in zip(route.hops, route.legs(), strict=True):
                buffer = Buffer.of_stage(hop.stage)
                origin = stands_in[hop.source]
                assert origin.value < buffer.value + leg, "a route is forwarded to a later stage, or a later leg"
                self._sources.setdefault(Message(*hop, leg), {}).setdefault(origin, []).append(number)
                member = (width, self._rank[hop.source], way, number)
                self._members.setdefault(Region(hop.target, buffer), []).append(member)
                stands_in[hop.target] = buffer

    def _ways(self) -> list[int]:
        """A number per route: equal for equal hops, ascending with the workers they go to."""
        rank = self._rank
        hops = [tuple((h.stage.value, rank[h.source], rank[h.target]) for h in r.hops) for r in self.plan.routes]
        number = {each: position for position, each in enumerate(sorted(set(hops)))}
        return [number[each] for each in hops]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages of a round, by stage, leg, source and target."""
        rank = self._rank
        return tuple(sorted(self._sources, key=lambda m: (m.stage.value, m.leg, rank[m.source], rank[m.target])))

    def incoming(self, worker: str) -> tuple[Message, ...]:
        """Messages to a worker; the position of each is the number of the flag that announces it."""
        return self._by_target.get(worker, ())

    def outgoing(self, worker: str) -> tuple[Message, ...]:
        """Messages from a worker."""
        return self._by_source.get(worker, ())

    @cached_property
    def _by_target(self) -> dict[str, tuple[Message, ...]]:
        return _grouped((message.target, message) for message in self.messages)

    @cached_property
    def _by_source(self) -> dict[str, tuple[Message, ...]]:
        return _grouped((message.source, message) for message in self.messages)

    def targets(self, worker: str) -> tuple[str, ...]:
        """Workers that a worker writes to, each once; the flags of their releases follow those of the messages."""
        return tuple(dict.fromkeys(message.target for message in self.outgoing(worker)))

    def origins(self, message: Message) -> tuple[tuple[Buffer, IdArray], ...]:
        """For every buffer of the message's source that it is read from, the routes read from it, ascending."""
        found = self._sources[message]
        return tuple((buffer, np.array(found[buffer], dtype=np.int64)) for buffer in Buffer if buffer in found)

    def layout(self, region: Region) -> Layout:
        """What stands where in one region; empty for one that nothing passes."""
        found = self._layouts.get(region)
        if found is None:
            found = self._layouts[region] = self._layout(region)
            self._cells += found.sizes.size
            while self._cells > _CELLS and len(self._layouts) > 1:
                oldest = next(iter(self._layouts))
                self._cells -= self._layouts.pop(oldest).sizes.size
        return found

    def _layout(self, region: Region) -> Layout:
        routes = np.array([member[-1] for member in sorted(self._members.get(region, ()))], dtype=np.int64)
        item_bytes = np.array([self.plan.routes[route].item_bytes for route in routes], dtype=np.int64)
        sizes = self.plan.schedule.elements(0, self.plan.rounds, routes) * item_bytes[:, None]
        return Layout(routes, sizes, np.cumsum(sizes, axis=0) - sizes)


def part_intervals(plan: Plan, routes: Sequence[int] | IdArray) -> tuple[IdArray, IdArray]:
    """The ids of some routes that have none in common, cut by round; ``Plan.part`` for all rounds at once.

    Returns
    -------
    tuple
        Half-open id intervals ascending, shape ``(n, 2)``; and for each the position of its route in ``routes``,
        its round, and the rank of its first id in the route's part of that round, shape ``(n, 3)``.
    """
    spans, about = [np.empty((0, 2), dtype=np.int64)], [np.empty((0, 3), dtype=np.int64)]
    numbers = np.asarray(routes, dtype=np.int64)
    for position, pieces in enumerate(plan.schedule.pieces(numbers)):
        whole = plan.routes[int(numbers[position])].runs.intervals
        lengths = whole[:, 1] - whole[:, 0]
        begins = np.cumsum(lengths) - lengths
        cuts = pieces[:, 0]
        edges = np.union1d(begins, cuts)
        piece = np.searchsorted(cuts, edges, side="right") - 1
        inside = np.searchsorted(begins, edges, side="right") - 1
        starts = whole[inside, 0] + edges - begins[inside]
        stops = starts + np.diff(np.append(edges, lengths.sum()))
        spans.append(np.stack([starts, stops], axis=1))
        rank = pieces[piece, 2] + edges - cuts[piece]
        about.append(np.stack([np.full(len(edges), position), pieces[piece, 1], rank], axis=1))
    intervals, facts = np.concatenate(spans), np.concatenate(about)
    order = np.argsort(intervals[:, 0], kind="stable")
    return intervals[order], facts[order]


def _grouped(messages: Iterable[tuple[str, Message]]) -> dict[str, tuple[Message, ...]]:
    groups: dict[str, list[Message]] = {}
    for worker, message in messages:
        groups.setdefault(worker, []).append(message)
    return {worker: tuple(group) for worker, group in groups.items()}
