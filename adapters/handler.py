"""What the control plane's connections tell the worker that owns them."""

from __future__ import annotations

from typing import Protocol

from adapters.failures import Failure
from adapters.messages import Member, ToChild, ToParent

__all__ = ["Handler"]


class Handler(Protocol):
    """What a post tells its owner; every method runs on the control thread and must not wait."""

    def admit(self, member: Member) -> Failure | None:
        """A worker wants to be a child; why it may not, or None."""
        ...

    def newest(self) -> int:
        """The newest transaction of the group that this worker leads, which those who join now take no part in."""
        ...

    def from_child(self, worker: str, message: ToParent) -> None:
        """A welcomed child spoke."""
        ...

    def child_lost(self, worker: str, reason: str) -> None:
        """A welcomed child is gone."""
        ...

    def from_parent(self, message: ToChild) -> None:
        """The parent spoke."""
        ...

    def parent_joined(self, txn: int) -> None:
        """The parent said welcome, and what the newest transaction of its group is."""
        ...

    def parent_lost(self, failure: Failure, *, final: bool) -> None:
        """The parent is gone, or will not have this worker; a final failure is not tried again."""
        ...

    def broken(self, failure: Failure) -> None:
        """The thread ended by an error of its own."""
        ...

    def tick(self) -> None:
        """Some time has passed."""
        ...
