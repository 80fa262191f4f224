"""Events that tell when the weights to be sent are in memory, of devices and of threads."""

from __future__ import annotations

import threading
import time
from typing import Protocol, TypeAlias, runtime_checkable

from adapters.failures import UsageError
from transfer_exec.errors import DeadlineError, TransferError

__all__ = ["ReadyEvent", "wait_for_event"]

_LOOK_AGAIN_S = 100e-6


@runtime_checkable
class Asked(Protocol):
    """An event of a device, such as ``torch.cuda.Event``, which can be asked, so that waiting for it has a deadline."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...


@runtime_checkable
class Synchronizes(Protocol):
    """An event of a device that can only be waited for."""

    def synchronize(self) -> object:
        """Block until it has happened."""
        ...


@runtime_checkable
class Waits(Protocol):
    """An event of a thread, such as ``threading.Event``."""

    def wait(self) -> object:
        """Block until it has happened."""
        ...


ReadyEvent: TypeAlias = Asked | Synchronizes | Waits
"""Happens when the weights to be sent are in memory."""


def wait_for_event(event: ReadyEvent, version: int, deadline_s: float) -> None:
    """Wait until it has happened.

    Raises
    ------
    DeadlineError
        If it has not within so many seconds; of an event that can only be waited for this cannot be told.
    UsageError
        If it is no event, or what it was asked raised.
    """
    if not isinstance(event, (Asked, Synchronizes, Waits)):
        raise UsageError(
            f"send_weights({version}): ready_event is {event!r}; expected an object with query(), synchronize() or "
            "wait()"
        )
    try:
        _wait(event, version, deadline_s)
    except TransferError:
        raise
    except Exception as error:
        raise UsageError(f"send_weights({version}): ready_event {event!r} raised {error!r}") from error


def _wait(event: ReadyEvent, version: int, deadline_s: float) -> None:
    if isinstance(event, threading.Event):
        if not event.wait(deadline_s):
            raise DeadlineError(f"send_weights({version}): ready_event did not happen within {deadline_s:g} s")
    elif isinstance(event, Asked):
        # A device event's own wait() only holds back its stream.
        stop_at = time.monotonic() + deadline_s
        while not event.query():
            if time.monotonic() > stop_at:
                raise DeadlineError(f"send_weights({version}): ready_event did not happen within {deadline_s:g} s")
            time.sleep(_LOOK_AGAIN_S)
    elif isinstance(event, Synchronizes):
        event.synchronize()
    else:
        event.wait()
