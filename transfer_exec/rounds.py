"""How many rounds an update takes so that every worker's buffer holds each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges
from transfer_exec.errors import BudgetError
from transfer_exec.hops import HopTable
from transfer_exec.plan import Route
from transfer_exec.schedule import Schedule

_CELLS = 1 << 22
"""Entry-round pairs looked at in one step."""
_MOST_WORTH = 64
"""Rounds past which the pipeline's filling no longer matters."""
MOST_SECONDS = 1e9
"""Longest overhead of a round."""
_PATIENCE = 64
"""Numbers of rounds tried one by one before the steps grow."""
_MOST_BYTES = 1 << 62
"""Largest budget; more does not fit into a plan's bytes."""


def checked_budget(buffer_bytes: object, round_overhead_s: object = None, depth: object = 1) -> int:
    """The budget as an integer, after a look at everything that rounds are chosen from.

    Raises
    ------
    BudgetError
        If the budget is no integer from 1 to 2**62, the overhead neither None nor seconds from 0 to 1e9, or the
        depth no integer of at least 1.
    """
    budget = _whole("buffer_bytes", buffer_bytes, "bytes")
    if budget > _MOST_BYTES:
        raise BudgetError(f"buffer_bytes is {budget}; expected at most {_MOST_BYTES}")
    _whole("depth", depth, "rounds under way")
    if round_overhead_s is None:
        return budget
    number = isinstance(round_overhead_s, (int, float)) and not isinstance(round_overhead_s, bool)
    if not number or not 0 <= round_overhead_s <= MOST_SECONDS:  # type: ignore[operator]
        raise BudgetError(
            f"round_overhead_s is {round_overhead_s!r}; expected seconds of at least 0, at most {MOST_SECONDS:g}"
        )
    return budget


def _whole(name: str, value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise BudgetError(f"{name} is {value!r}; expected a whole number of {what}, at least 1")
    return int(value)


def rounds_worth(load_s: float, round_overhead_s: float, depth: int) -> int:
    """The number of rounds that costs least beside the load itself, buffers aside.

    With ``depth`` rounds under way, up to three stages overlap, and the stages before and after the overlap show:
    about ``(min(depth, 3) - 1) * load_s / rounds``. Each round costs ``round_overhead_s`` at most. The sum is least
    where both are equal. One round at a time overlaps nothing, so more of them never help.

    >>> rounds_worth(0.16, 1e-3, 2), rounds_worth(0.16, 1e-4, 2), rounds_worth(0.16, 1e-3, 1)
    (13, 40, 1)
    """
    checked_budget(1, round_overhead_s, depth)
    showing_s = (min(depth, 3) - 1) * load_s
    if not showing_s:
        return 1
    return min(_MOST_WORTH, max(1, round(math.sqrt(showing_s / round_overhead_s)))) if round_overhead_s else _MOST_WORTH


def count_rounds(routes: Sequence[Route], buffer_bytes: int, *, at_least: int = 1, hops: HopTable | None = None) -> int:
    """The smallest number of rounds, but ``at_least`` so many if there are so many elements, in which everything fits.

    In every round no worker may receive more than ``buffer_bytes`` in one stage, nor pack more distinct bytes. If
    the first 64 candidates fail, which takes many routes of few elements, later ones are tried in growing steps,
    and the result is the smallest of those tried. ``hops`` are the routes' if somebody has them already.

    Raises
    ------
    BudgetError
        If the buffer cannot hold one element.
    """
    if not routes:
        return 1
    widest = max(routes, key=lambda route: route.item_bytes)
    if widest.item_bytes > buffer_bytes:
        first = int(widest.runs.runs[0, 0])
        raise BudgetError(
            f"buffer_bytes is {buffer_bytes}, and one element (id {first}, packed by {widest.holder}) has "
            f"{widest.item_bytes} bytes; give a buffer of at least {widest.item_bytes} bytes"
        )
    sizes = np.array([route.runs.elements for route in routes], dtype=np.int64)
    buffers = Buffers.of(routes, hops)
    enough = int(sizes.sum())
    rounds = max(1, min(at_least, enough), -(-int(buffers.use(sizes[:, None]).max()) // buffer_bytes))
    tried = 0
    while rounds < enough and not buffers.hold(sizes, rounds, buffer_bytes):
        tried += 1
        rounds += 1 if tried < _PATIENCE else max(1, rounds // _PATIENCE)
    return min(rounds, enough)


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Which routes pass which buffer: one buffer per worker and stage that receives, and one per worker that packs.

    Attributes
    ----------
    starts
        Where each buffer's entries begin.
    routes
        Route of every entry.
    item_bytes
        Bytes of one element of that route.
    """

    starts: IdArray
    routes: IdArray
    item_bytes: IdArray

    @staticmethod
    def of(routes: Sequence[Route], hops: HopTable | None = None) -> Buffers:
        """The buffers of some routes; at least one route."""
        if hops is None:
            targets = {hop.target for route in routes for hop in route.hops}
            hops = HopTable.of(routes, sorted(targets | {route.holder for route in routes}))
        # Every route has hops, and its holder is the source of the first.
        holder = hops.source[np.cumsum(hops.counts) - hops.counts]
        buffer = np.concatenate([4 * holder, 4 * hops.target + hops.stage + 1])
        order = np.argsort(buffer, kind="stable")
        entries = np.concatenate([np.arange(len(routes)), hops.route])[order]
        starts = np.unique(buffer[order], return_index=True)[1]
        widths = np.array([route.item_bytes for route in routes], dtype=np.int64)
        return Buffers(starts, entries, widths[entries])

    def use(self, elements: IdArray) -> IdArray:
        """Bytes per buffer: elements of shape ``(routes, cases)`` give bytes of shape ``(buffers, cases)``."""
        entry_bytes = elements[self.routes] * self.item_bytes[:, None]
        used: IdArray = np.add.reduceat(entry_bytes, self.starts, axis=0)
        return used

    def hold(self, sizes: IdArray, rounds: int, buffer_bytes: int) -> bool:
        """Whether so many bytes suffice in every round, exactly, for routes of these many elements.

        No round carries more of a route than its elements over the rounds, rounded up. Where that fits there is nothing
        to count; the other buffers, few of many, are counted round by round.
        """
        full = np.flatnonzero(self.use(-(-sizes // rounds)[:, None])[:, 0] > buffer_bytes)
        if not len(full):
            return True
        counts = np.diff(self.starts, append=len(self.routes))[full]
        entries = expand_ranges(self.starts[full], counts)
        these = Buffers(np.cumsum(counts) - counts, self.routes[entries], self.item_bytes[entries])
        schedule = Schedule.of(sizes, rounds)
        step = max(1, _CELLS // len(entries))
        return not any(
            int(these.use(schedule.elements(first, min(first + step, rounds))).max()) > buffer_bytes
            for first in range(0, rounds, step)
        )
