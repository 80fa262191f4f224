"""Control messages of a connect and of an update: about linear in engines, ranks and trainers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from adapters.connect_report import ConnectReport
from adapters.probing import probe
from adapters.sender import SenderAdapter
from layout_algebra.source_map import SourceMap
from tests.adapters.simulation import DEADLINE_S, REPORT, Simulation, simulated
from tests.adapters.toy import SPACE, rollout, trainer

UPDATE_PER_RANK = 14
"""Most messages that a rank may cost an update, and a trainer too: up and down once per step, and a few that tell."""


@cache
def map_of(kind: str, rank: int, size: int) -> SourceMap:
    held = trainer(rank, size) if kind == "trainer" else rollout(rank, size)
    return probe(held.load_weights, held.tensors, SPACE)


def counted(job: Simulation, call: Callable[[SenderAdapter], object], kind: object) -> int:
    """Messages of one call by all trainers."""
    before = job.network.messages
    for worker, sender in job.senders().items():
        job.callers[worker].order(lambda sender=sender: call(sender))  # type: ignore[misc]
    job.run(lambda: not any(job.callers[worker].busy for worker in job.senders()), within_s=5 * DEADLINE_S)
    for worker in job.senders():
        result = job.callers[worker].results[-1]
        assert result is kind or isinstance(result, ConnectReport), result
    return job.network.messages - before


def messages(*, trainers: int, engines: int, ranks: int, staging: tuple[str, ...] = ()) -> tuple[int, int]:
    """Of a connect, and of the third update after it."""
    sizes = {"trainer": trainers} | {f"engine/{number}": ranks for number in range(engines)}
    maps = {
        f"{group}/{rank}": map_of("trainer" if group == "trainer" else "rollout", rank, size)
        for group, size in sizes.items()
        for rank in range(size)
    }
    stages = tuple(group for group in sizes if group.partition("/")[0] in staging)
    with simulated(maps, sizes, stages) as job:
        for group in sizes:
            job.start(group)
        job.drain()
        names = [group.removeprefix("engine/") for group in sizes if group != "trainer"]
        connecting = counted(job, lambda sender: sender.connect(names), None)
        updates = [
            counted(job, lambda sender, v=version: sender.send_weights(v).result(), REPORT)  # type: ignore[misc]
            for version in (1, 2, 3)
        ]
        return connecting, updates[-1]


@pytest.mark.parametrize("staging", [(), ("trainer", "engine")], ids=["in place", "staged"])
@pytest.mark.parametrize("what", ["engines", "ranks", "trainers"])
def test_messages_grow_linearly(what: str, staging: tuple[str, ...]) -> None:
    """Twice as many of a kind cost at most what twice as many would if all cost the same, and a tenth more."""
    sizes = (1, 2, 4, 8) if what != "ranks" else (1, 2, 3, 6)
    counts = []
    for size in sizes:
        job = {"trainers": 2, "engines": 2, "ranks": 2, what: size}
        counts.append(messages(**job, staging=staging))
    for connecting in (True, False):
        each = [count[0 if connecting else 1] for count in counts]
        slopes = [(b - a) / (n - m) for a, b, m, n in zip(each, each[1:], sizes, sizes[1:], strict=False)]
        assert slopes[-1] <= 1.1 * slopes[0], (what, each, slopes)


def test_what_an_update_costs_a_rank() -> None:
    for trainers, engines, ranks in ((2, 2, 2), (4, 8, 2), (2, 4, 6), (16, 16, 2)):
        _, update = messages(trainers=trainers, engines=engines, ranks=ranks)
        assert update <= UPDATE_PER_RANK * (trainers + engines * ranks), (trainers, engines, ranks, update)
