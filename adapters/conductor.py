"""The conductor: one thread of trainer rank 0 that carries out connects and updates for everybody.

It waits until every trainer rank has made the same call, and runs it. Any failure ends the transaction for everyone
who takes part, with the reason, so that nobody waits to learn it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from adapters.connecting import connect
from adapters.events import log_event
from adapters.failures import ClosedError, DisagreementError, LostWorkerError, failure_of, raise_failure
from adapters.fleet import Fleet
from adapters.messages import Call, ConnectIntent, FromLead, SendIntent, ToLead
from adapters.steps import GroupLost, Steps
from adapters.updating import update
from transfer_exec.errors import DeadlineError
from transfer_exec.topology import Topology

__all__ = ["Conductor"]

_LISTEN_S = 0.5


class Conductor:
    """Runs on trainer rank 0.

    Parameters
    ----------
    trainers
        Worker names in rank order.
    send
        Takes a message to a group's lead; any thread may call it.
    deadline_s
        Of every step.
    turned_away
        How many callers without the job's key have been.
    progress
        Told of every phase, as by `Steps`.
    """

    def __init__(
        self,
        trainers: Sequence[str],
        send: Callable[[str, ToLead], None],
        *,
        deadline_s: float,
        turned_away: Callable[[], int] = lambda: 0,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self._trainers = tuple(trainers)
        self._steps = Steps(send, deadline_s=deadline_s, turned_away=turned_away, progress=progress)
        self._fleet = Fleet(trainers, self._steps)
        self._topology: Topology | None = None
        self._thread = threading.Thread(target=self._run, name="transload conductor", daemon=True)

    def hear(self, item: FromLead | GroupLost) -> None:
        """Take something from a lead; any thread may call it."""
        self._steps.hear(item)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._steps.close()
        self._thread.join()

    def offer_topology(self, topology: Topology | None) -> None:
        """Rank 0's own argument of the connect that it is about to call."""
        self._topology = topology

    # The thread

    def _run(self) -> None:
        waiting_since: float | None = None
        while True:
            try:
                self._steps.listen(_LISTEN_S)
                calls = self._steps.calls
                if not calls:
                    waiting_since = None
                    continue
                waiting_since = waiting_since or time.monotonic()
                if self._check_calls(calls, time.monotonic() - waiting_since):
                    self._conduct(calls)
                    waiting_since = None
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainers that called must hear of it
                self._fail(error)
                waiting_since = None

    def _fail(self, error: Exception) -> None:
        failure = failure_of(error, "")
        log_event("failed", self._trainers[0], level=logging.WARNING, phase=self._steps.phase, why=str(failure))
        self._steps.end_all(failure)

    def _check_calls(self, calls: Mapping[str, Call], waited_s: float) -> bool:
        """Whether every trainer has called; raises what keeps the call from beginning.

        Nothing is raised before all are there, or the deadline is over: a rank that has not called would not hear it.
        """
        first = next(iter(calls.values()))
        missing = [worker for worker in self._trainers if worker not in calls]
        gone = [worker for worker in missing if worker in self._steps.gone]
        if isinstance(first.intent, SendIntent) and self._fleet.connection is not None:
            # Whether the others can do without those that are gone is for the plan to say.
            missing = [worker for worker in missing if worker not in gone and worker in self._fleet.connection.holders]
            gone = []
        connecting = isinstance(first.intent, ConnectIntent)
        if missing and (connecting or not gone) and waited_s < self._steps.deadline_s:
            return False
        if connecting and self._trainers[0] in calls:
            # Those that did not call in time may hold nothing that the others do not hold.
            missing, gone = [], []
        self._steps.open(_kind(first))
        for call in calls.values():
            if call.failure is not None:
                raise_failure(call.failure)
            if call.intent != first.intent:
                raise DisagreementError(
                    f"{first.worker} called {_shown(first)}, {call.worker} called {_shown(call)}; every trainer rank "
                    "must make the same call"
                )
        if gone:
            raise LostWorkerError(f"{', '.join(gone)} is gone, and {_shown(first)} is collective over the trainers")
        if missing:
            raise DeadlineError(
                f"{', '.join(missing)} did not call {_shown(first)} within {self._steps.deadline_s:g} s; it is "
                "collective over the trainers"
            )
        return True

    def _conduct(self, calls: Mapping[str, Call]) -> None:
        call = calls[self._trainers[0]]
        match call.intent:
            case ConnectIntent():
                absent = [worker for worker in self._trainers if worker not in calls]
                connect(self._fleet, self._steps, call.intent, self._topology, absent)
            case SendIntent(version, trace):
                update(self._fleet, self._steps, version, call.metadata, trace=trace)


def _kind(call: Call) -> str:
    return f"version {call.intent.version}" if isinstance(call.intent, SendIntent) else "connect"


def _shown(call: Call) -> str:
    match call.intent:
        case SendIntent(version):
            return f"send_weights({version})"
        case ConnectIntent():
            named = ", ".join(f"{k}={v!r}" for k, v in msgspec.structs.asdict(call.intent).items() if v)
            return f"connect({named})"
