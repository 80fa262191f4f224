"""What workers wait for, and what the flags that they raise say.

Flags carry numbers that only grow: version v has ``(v + 1) * (rounds + 1)`` for "ready for version v", and one more
per round; 0 is what a flag has before its first signal. So nothing is ever reset, and a worker that is late for an old
version never takes a newer one's flag for its own, nor writes into it.

>>> first_number(version=0, rounds=5), first_number(version=1, rounds=5)
(6, 12)
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from transfer_exec.plan import Stage
from transfer_exec.report import WorkerReport

PACK, ASSEMBLE, READ = "PACK", "ASSEMBLE", "READ"
"""Where a worker is while its own kernels run, or while it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """What a worker is waiting for; a new object whenever it has moved on.

    Attributes
    ----------
    version, round
        Where it is; of several rounds under way the oldest. -1 beside the rounds.
    stage
        ``"RECEIVE"``, ``"EXTERNAL"`` or ``"INTERNAL"``; ``"PACK"``, ``"ASSEMBLE"`` or ``"READ"`` while it copies
        itself.
    what
        For whom and for what, in words.
    """

    version: int
    round: int
    stage: str
    what: str

    def __str__(self) -> str:
        place = "beside the rounds" if self.round < 0 else f"round {self.round}"
        return f"version {self.version}, {place}, stage {self.stage}: {self.what}"

    @property
    def on_itself(self) -> bool:
        """Whether its own threads are copying, which no peer can hold up."""
        return self.stage in (PACK, ASSEMBLE, READ)


Steps: TypeAlias = Generator[Wait, None, WorkerReport]
"""One worker's update: yields while it waits, returns its report."""


def first_number(version: int, rounds: int) -> int:
    """What a worker raises its sources' flags to when it is ready for a version."""
    return (version + 1) * (rounds + 1)


def message_tag(plan_digest: str, stage: Stage, source: str, target: str) -> int:
    """63 bits that name one worker's messages to another in one plan, so that nobody reads bytes by another layout.

    The same in every round: a flag's number and tag may be read while the next round's are being stored.
    """
    return _tag_of(f"{plan_digest}/{stage.name}/{source}/{target}")


def lent_tag(plan_digest: str, stage: Stage, source: str, target: str) -> int:
    """As `message_tag`, of what is read directly."""
    return _tag_of(f"{plan_digest}/{stage.name}/{source}/{target}/lent")


def _tag_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
