"""Several groups taken through steps side by side, each on a path of its own: none waits for another.

A path is a generator. It yields what is to be said to its group, is sent what the ranks answered, and returns when the
group has nothing left to do; ``yield from`` puts paths together:

::

    def path():
        moved = yield (Transfer(version),)
        published = yield (Publish(version),)
        return moved, published

A group fails when its ranks do, when they are silent, or when its path raises. A group without which others cannot go
on takes them along when it fails to bind, to probe or to transfer: they would wait for it in vain. Nothing here sends.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping
from typing import Generic, TypeAlias, TypeVar

from adapters.duty_messages import Bind, Probe, Result, Transfer
from adapters.failures import Failure, failure_of
from adapters.messages import Gathered
from layout_algebra.errors import LayoutError
from transfer_exec.errors import TransferError

__all__ = ["Answers", "Path", "Paths"]

S = TypeVar("S")
T = TypeVar("T")

Answers: TypeAlias = tuple[Result | None, ...]
"""Of a group's ranks, in rank order."""

Path: TypeAlias = Generator[S, Answers, T]
"""Yields what is said, returns what came of it."""

_DRAIN_S = 10.0


class Paths(Generic[S, T]):
    """Groups on their paths.

    Parameters
    ----------
    paths
        By group.
    decisive
        Groups that take along others when they fail.
    within_s
        How long a step of a group may take.

    Attributes
    ----------
    to_say
        What is to be said next, by group.
    waiting, late_at
        The step that a group is at, and when it is late with it.
    done
        What the paths returned that came to their end.
    failures
        Why the others did not.
    """

    def __init__(self, paths: Mapping[str, Path[S, T]], decisive: Collection[str], *, within_s: float) -> None:
        self._paths, self._decisive, self._within_s = paths, decisive, within_s
        self._said: dict[str, S] = {}
        self._cancelled = False
        self.to_say: dict[str, S] = {}
        self.waiting: dict[str, int] = {}
        self.late_at: dict[str, float] = {}
        self.done: dict[str, T] = {}
        self.failures: dict[str, Failure] = {}
        for group in paths:
            self._go_on(group, None)

    @property
    def going(self) -> bool:
        """Whether any group is still on its path."""
        return bool(self.to_say or self.waiting)

    def wait_for(self, steps: Mapping[str, int]) -> None:
        """What was to be said has been said, and began these steps."""
        late_at = time.monotonic() + self._within_s
        for group, step in steps.items():
            self._said[group] = self.to_say.pop(group)
            self.waiting[group], self.late_at[group] = step, late_at

    def hear(self, answer: Gathered) -> dict[str, Failure]:
        """Take a group's answer; whom to cancel because of it, and why."""
        group, failure = answer.group, answer.failure
        del self.waiting[group]
        if failure is None:
            self._go_on(group, answer.results)
            return {}
        self._paths[group].close()
        self.failures[group] = failure
        kind = _needs_all(self._said[group])
        if kind is None or group not in self._decisive or self._cancelled:
            return {}
        self._cancelled = True
        stop_at = time.monotonic() + _DRAIN_S
        along = [other for other in self.waiting if _needs_all(self._said[other]) is kind]
        for other in along:
            self.late_at[other] = min(self.late_at[other], stop_at)
        return dict.fromkeys(along, failure)

    def _go_on(self, group: str, answers: Answers | None) -> None:
        path = self._paths[group]
        try:
            self.to_say[group] = next(path) if answers is None else path.send(answers)
        except StopIteration as over:
            self.done[group] = over.value
        except (TransferError, LayoutError) as error:
            self.failures[group] = failure_of(error, "")


def _needs_all(said: object) -> type[object] | None:
    """The kind of what is said, if no group can do it when another has given it up."""
    first = next((duty for duty in said if duty is not None), None) if isinstance(said, tuple) else None
    return next((kind for kind in (Bind, Probe, Transfer) if isinstance(first, kind)), None)
