"""Where every part of every route stands in every buffer of every worker, round by round.

A worker has four buffers: what it packs, and what it receives in each of the three stages. In a round a buffer holds
the parts of the routes that pass it, one after the other, sorted by

    element width (wide first), the worker they come from, the leg, the way they go, the route's number

Wide elements first means that every part is naturally aligned without a byte of padding, so a buffer is exactly as
large as its fullest round. Routes that share a way lie side by side wherever they go, so their bytes merge into one
descriptor. Both ends of a message compute the same offsets from the same plan; nothing about them is sent.

The parts of one width in one message are a *block* of the buffer they go to. From where its blocks begin there, and
the order of parts inside, a source knows where everything goes; it needs nothing else of its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.parts import Spread, of_routes, sums_by_round
from transfer_exec.plan import Plan, Stage

_CELLS = 1 << 24
"""Block-round pairs that are kept; workers that write to each other look at the same regions."""


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


@dataclass(frozen=True, eq=False)
class Layout:
    """What stands where in one region.

    Attributes
    ----------
    routes
        Routes that pass the region, in the order of their parts; int64, shape ``(n,)``.
    item_bytes
        Bytes of an element of each.
    schedule
        How many elements of each travel in which round.
    """

    routes: IdArray
    item_bytes: IdArray
    schedule: Spread

    @cached_property
    def sizes(self) -> IdArray:
        """Bytes of every part, per round; int64, shape ``(n, rounds)``."""
        return self.schedule.elements(0, self.schedule.rounds) * self.item_bytes[:, None]

    @cached_property
    def offsets(self) -> IdArray:
        """Where every part begins, per round; int64, shape ``(n, rounds)``."""
        before: IdArray = np.cumsum(self.sizes, axis=0) - self.sizes
        return before

    @cached_property
    def bytes_of_rounds(self) -> IdArray:
        """Bytes of all parts together; int64, shape ``(rounds,)``."""
        total: IdArray = sums_by_round(self.schedule, self.item_bytes, np.zeros_like(self.routes), 1)[0]
        return total

    @property
    def size_bytes(self) -> int:
        """Bytes of the fullest round."""
        return int(self.bytes_of_rounds.max())


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """A message of every round, as its source knows it.

    Attributes
    ----------
    parts
        What is written, in the target's order: positions in the source's four buffers, counted through in the order of
        `Buffer`; int64, shape ``(n,)``. Wide elements come first; those of one width are a block.
    begins
        Where each block begins in the target's buffer, per round; int64, shape ``(blocks, rounds)``.
    """

    parts: IdArray
    begins: IdArray


class Posting(NamedTuple):
    """A message and its flags.

    Attributes
    ----------
    message
        The message.
    flag
        The target's flag that announces it: its position among the messages to that target.
    release
        The source's flag by which the target releases its buffers; those of releases follow those of messages, one for
        each worker that the source writes to, in the order of their first messages.
    """

    message: Message
    flag: int
    release: int


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """All messages of a round, by stage, leg, source and target; arrays of one number a message.

    ``starts`` says where its routes begin in ``routes``, which has them in the order of their parts in the target.
    """

    stage: IdArray
    leg: IdArray
    source: IdArray
    target: IdArray
    flag: IdArray
    release: IdArray
    starts: IdArray
    routes: IdArray

    @staticmethod
    def of(keys: IdArray, starts: IdArray, routes: IdArray, workers: int) -> _Messages:
        """From ascending keys ``((2 * stage + leg) * workers + source) * workers + target``."""
        pair = keys % workers**2
        source, target = np.divmod(pair, workers)
        stage, leg = np.divmod(keys // workers**2, 2)
        first, which = np.unique(pair, return_index=True, return_inverse=True)[1:]
        opens = np.zeros_like(keys)
        opens[first] = 1
        peer = _place_in_group(source, opens)[first][which]
        flag = _place_in_group(target, np.ones_like(keys))
        release = np.bincount(target, minlength=workers)[source] + peer
        return _Messages(stage, leg, source, target, flag, release, starts, routes)


class Regions:
    """Which routes pass which buffer, for the whole plan.

    Parameters
    ----------
    plan
        The plan; it obeys the laws of plans, so a route is read from a buffer that it came to before.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._rank = {worker: position for position, worker in enumerate(plan.workers)}
        self._item_bytes = np.array([route.item_bytes for route in plan.routes], dtype=np.int64)
        self._blocks: dict[int, tuple[IdArray, IdArray]] = {}
        self._cells = 0
        rank, workers = self._rank, len(plan.workers)
        counts, stage, source, target = plan.hops.counts, plan.hops.stage, plan.hops.source, plan.hops.target
        holder = np.array([rank[route.holder] for route in plan.routes], dtype=np.int64)
        every = np.arange(len(counts))
        route = plan.hops.route
        leg = _legs(route * workers + source, route * workers + target, stage)
        way = _ways(np.stack([stage, source, target], axis=1), counts)
        width = -self._item_bytes
        region = np.concatenate([4 * holder, 4 * target + stage + 1])
        origin = np.concatenate([np.full(len(counts), -1), 2 * source + leg])
        member = np.concatenate([every, route])
        order = np.lexsort((member, way[member], origin, width[member], region))
        self._region, self._origin, self._member = region[order], origin[order], member[order]
        key = ((2 * stage + leg) * workers + source) * workers + target
        order = np.lexsort((route, way[route], width[route], key))
        keys, starts = np.unique(key[order], return_index=True)
        self._messages = _Messages.of(keys, np.append(starts, len(order)), route[order], workers)
        self._by_source, self._by_target = (
            (np.argsort(each, kind="stable"), np.sort(each)) for each in (self._messages.source, self._messages.target)
        )

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages of a round, by stage, leg, source and target."""
        return tuple(posting.message for posting in self._postings(np.arange(len(self._messages.stage))))

    def incoming(self, worker: str) -> tuple[Posting, ...]:
        """The messages to a worker; the position of each is the number of the flag that announces it."""
        return self._postings(self._numbers(self._by_target, worker))

    def outgoing(self, worker: str) -> tuple[Posting, ...]:
        """The messages from a worker."""
        return self._postings(self._numbers(self._by_source, worker))

    def layout(self, region: Region) -> Layout:
        """What stands where in one region; empty for one that nothing passes."""
        routes = self._member[self._members_of(4 * self._rank[region.worker] + region.buffer.value)]
        return Layout(routes, self._item_bytes[routes], of_routes(self.plan.schedule, routes))

    def letters(self, worker: str) -> tuple[Letter, ...]:
        """The messages from a worker, in the order of `outgoing`."""
        first = 4 * self._rank[worker]
        held = self._member[slice(self._members_of(first).start, self._members_of(first + 3).stop)]
        part = np.argsort(held)
        held = held[part]
        found = self._messages
        out = []
        for number in self._numbers(self._by_source, worker).tolist():
            routes = found.routes[found.starts[number] : found.starts[number + 1]]
            origin, begins = self._blocks_of(4 * int(found.target[number]) + int(found.stage[number]) + 1)
            mine = origin == 2 * found.source[number] + found.leg[number]
            out.append(Letter(part[np.searchsorted(held, routes)], begins[mine]))
        return tuple(out)

    def _numbers(self, ordered: tuple[IdArray, IdArray], worker: str) -> IdArray:
        order, workers = ordered
        return order[slice(*np.searchsorted(workers, [self._rank[worker], self._rank[worker] + 1]).tolist())]

    def _postings(self, numbers: IdArray) -> tuple[Posting, ...]:
        found, names, stages = self._messages, self.plan.workers, tuple(Stage)
        fields = (found.stage, found.source, found.target, found.leg, found.flag, found.release)
        return tuple(
            Posting(Message(stages[stage], names[source], names[target], leg), flag, release)
            for stage, source, target, leg, flag, release in zip(
                *(field[numbers].tolist() for field in fields), strict=True
            )
        )

    def _members_of(self, region: int) -> slice:
        return slice(*np.searchsorted(self._region, [region, region + 1]).tolist())

    def _blocks_of(self, region: int) -> tuple[IdArray, IdArray]:
        """Source and leg of every block of a region, and where it begins in every round."""
        found = self._blocks.get(region)
        if found is None:
            members = self._members_of(region)
            routes, origin = self._member[members], self._origin[members]
            layout = Layout(routes, self._item_bytes[routes], of_routes(self.plan.schedule, routes))
            opens = np.ones(len(routes), dtype=bool)
            opens[1:] = (origin[1:] != origin[:-1]) | (layout.item_bytes[1:] != layout.item_bytes[:-1])
            heads = np.flatnonzero(opens)
            sums = sums_by_round(layout.schedule, layout.item_bytes, np.cumsum(opens) - 1, len(heads))
            found = self._blocks[region] = (origin[heads], np.cumsum(sums, axis=0) - sums)
            self._cells += sums.size
            while self._cells > _CELLS and len(self._blocks) > 1:
                self._cells -= self._blocks.pop(next(iter(self._blocks)))[1].size
        return found


def _legs(sent: IdArray, got: IdArray, stage: IdArray) -> IdArray:
    """1 for every external hop whose source got the route by an external hop itself, else 0.

    ``sent`` and ``got`` name a route with a hop's source and with its target; a route comes to a worker once at most.
    """
    external = stage == Stage.EXTERNAL.value
    legs: IdArray = (external & np.isin(sent, got[external])).astype(np.int64)
    return legs


def _ways(hops: IdArray, counts: IdArray) -> IdArray:
    """A number per route: equal for equal hops, ascending with the stages and workers of their hops."""
    data = hops.astype(">i4").tobytes()
    stops = (12 * np.cumsum(counts)).tolist()
    keys = [data[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    number = {key: position for position, key in enumerate(sorted(set(keys)))}
    return np.array([number[key] for key in keys], dtype=np.int64)


def _place_in_group(group: IdArray, counted: IdArray) -> IdArray:
    """How many counted ones of the same group stand before each."""
    order = np.argsort(group, kind="stable")
    before = np.cumsum(counted[order]) - counted[order]
    first = np.searchsorted(group[order], group[order])
    out = np.empty_like(before)
    out[order] = before - before[first]
    return out
