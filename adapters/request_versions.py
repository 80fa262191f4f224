"""Which versions a request was answered with: the one at its start, the one at its end, and all in between.

With an update in the middle of a request its tokens come from two versions, and off-policy corrections need to know
both. A version that is read when the request is done would say that all of it came from the newer one.

    versions = RequestVersions(lambda: receiver.version)
    versions.begin(request.id)                 # when it is dispatched to the engine
    ...
    record = versions.end(request.id)          # when its last token is there
    record.start, record.end                   # (4, 5)

The engine's loop tells of every update that it installs, so that versions in between are not missed:

    update = receiver.poll_requests()
    if update is not None:
        versions.installed(update.version)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from adapters.failures import UsageError

__all__ = ["RequestRecord", "RequestVersions"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's versions.

    Attributes
    ----------
    start, end
        The version when it was dispatched, and when its last token came; None before the first update.
    versions
        All it met, in order, each once.
    """

    start: int | None
    end: int | None
    versions: tuple[int | None, ...]

    @property
    def mixed(self) -> bool:
        """Whether its tokens may come from several versions."""
        return len(self.versions) > 1


class RequestVersions:
    """The versions of all requests in flight; may be used from several threads.

    Parameters
    ----------
    current
        Says which version the engine has now: ``lambda: receiver.version``.
    """

    def __init__(self, current: Callable[[], int | None]) -> None:
        self._current = current
        self._lock = threading.Lock()
        self._open: dict[Hashable, list[int | None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: Hashable) -> None:
        """A request is dispatched.

        Raises
        ------
        UsageError
            If one of that name is in flight.
        """
        with self._lock:
            if request in self._open:
                raise UsageError(f"request {request!r} is in flight already; end it, or give each its own name")
            self._open[request] = [self._current()]

    def installed(self, version: int) -> None:
        """The engine has another version now; every request in flight goes on with it."""
        with self._lock:
            for met in self._open.values():
                _meet(met, version)

    def end(self, request: Hashable) -> RequestRecord:
        """A request's last token is there, or it was aborted; its record.

        Raises
        ------
        UsageError
            If no request of that name is in flight.
        """
        with self._lock:
            met = self._open.pop(request, None)
            if met is None:
                raise UsageError(f"request {request!r} is not in flight; call begin when it is dispatched")
            _meet(met, self._current())
        return RequestRecord(met[0], met[-1], tuple(met))


def _meet(met: list[int | None], version: int | None) -> None:
    if met[-1] != version:
        met.append(version)
