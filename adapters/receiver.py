"""The rollout's side: one `ReceiverAdapter` on every rank of an engine.

::

    receiver = ReceiverAdapter(model.load_weights, lambda: live_tensors(model), "checkpoint/", engine="a", rank=rank,
                               world_size=2, rendezvous="/shared/run-17", after_update_hook=flush_caches)
    while serving:
        update = receiver.poll_requests()             # once per engine step, on every rank; costs nothing when idle
        if update is not None:
            log(update.version, update.metadata)
        step()

Every rank of an engine must poll once per step, so that all of them can stop at the same step. Everything happens
inside the poll at which they stop: probing at a connect, and writing at an update. With ``staging=True`` an update's
bytes land in host memory first, beside the caller, and only installing them happens inside a poll.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from adapters.arguments import JsonValue, decode_metadata, engine_name
from adapters.checkpoint import Checkpoint
from adapters.duties import Duties
from adapters.duty_messages import Duty, Install, Prepare, Publish, Result, Transfer
from adapters.events import log_event
from adapters.failures import Failure, StaleError, TornError, UsageError
from adapters.messages import End
from adapters.probe_live import Parameters
from adapters.probing import LoadWeights
from adapters.rendezvous import Rendezvous, as_rendezvous
from adapters.station import Station
from adapters.transports import cards_of, check_transport, data_address
from adapters.worker import Hook, Worker
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from transfer_exec.report import WorkerReport

__all__ = ["ReceiverAdapter", "State", "Update"]

DEFAULT_DEADLINE_S = 300.0

_WAIT_SHARE = 0.8


class State(Enum):
    """What a receiver's weights are."""

    IDLE = "idle"
    """Whole: those of its version, or its own from the start."""

    RECEIVING = "receiving"
    """Being written; only ever seen from a hook or another thread."""

    TORN = "torn"
    """Partly written by an update that failed: the engine must not generate until a full update succeeds."""


@dataclass(frozen=True, slots=True)
class Update:
    """A version that was installed.

    Attributes
    ----------
    version
        Its number.
    metadata
        What the sender passed along.
    report
        What this worker received and how long it took.
    parent
        The version that this rank had confirmed before; None before the first. Every update is a full copy, so nothing
        of what came between is missing.
    """

    version: int
    metadata: JsonValue
    report: WorkerReport
    parent: int | None = None


class ReceiverAdapter:
    """One rank of a rollout engine.

    Parameters
    ----------
    load_weights
        The engine's own loader: takes ``(name, tensor)`` pairs of the checkpoint and writes this rank's part of them.
    parameters
        Live tensors by name, or a callable that lists them anew.
    checkpoint
        A folder of safetensors with the checkpoint's names, shapes and dtypes, or its space.
    engine
        The engine's name.
    rank, world_size
        Within the engine.
    rendezvous
        Where workers find each other; a path is a folder that all of them can write.
    staging
        Let updates land in host memory while the engine goes on; it stops only to install what has landed and was
        compared, and keeps its version whole until then. Costs host memory for this rank's weights; the same on all
        ranks of an engine.
    transport
        ``"auto"`` (shared memory, and no choice where workers are on several machines), ``"shared_memory"``,
        ``"device_memory"`` (GPUs of one machine), ``"mooncake"`` (TCP) or ``"mooncake-rdma"``, with this worker's own
        cards after a colon where not all are meant: ``"mooncake-rdma:^mlx5_0"``. Explicit names of all workers must
        agree.
    before_update_hook
        Called with the ranks stopped, before any byte is written or installed: drain or pause. May be followed by no
        update, if another worker refuses.
    after_update_hook
        Called exactly once per installed version on ranks that got bytes, after all bytes of all ranks have landed:
        flush caches, refresh what is derived from weights.
    deadline_s
        Of every wait.

    Raises
    ------
    UsageError
        For an argument that cannot be honoured.
    CheckpointError, RendezvousError
        If the folder is no checkpoint, or rank 0 cannot publish its address.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        parameters: Parameters,
        checkpoint: str | Path | CheckpointSpace,
        *,
        engine: str,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous | str | Path,
        staging: bool = False,
        transport: str = "auto",
        before_update_hook: Hook | None = None,
        after_update_hook: Hook | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        space = Checkpoint.of(checkpoint).space
        self._deadline_s = deadline_s
        self._state = State.IDLE
        self._connected = False
        self._asleep = False
        self._last_failure: Failure | None = None
        self._version: int | None = None
        meeting_place = as_rendezvous(rendezvous)
        self._station = Station(
            f"engine/{engine_name(engine)}",
            rank,
            world_size,
            meeting_place,
            transport=check_transport(transport),
            deadline_s=deadline_s,
            version=lambda: self._version,
            beside=staging,
        )
        self._session = self._station.session
        worker = Worker(
            self._station.worker,
            load_weights,
            parameters,
            space,
            True,
            staging,
            before_update_hook,
            after_update_hook,
            deadline_s * _WAIT_SHARE,
            partial(data_address, meeting_place, self._station.meets_as, deadline_s=deadline_s),
            cards_of(transport),
        )
        self._duties = Duties(worker, self._session)
        self._writes: type[Duty] = Install if staging else Transfer
        self._update: Update | None = None
        self._metadata: JsonValue = None
        self._polling = False
        self._beside: threading.Thread | None = None
        if staging:
            serve = partial(self._session.serve_beside, self._perform, self._note_end)
            self._beside = threading.Thread(target=serve, name="transload staging", daemon=True)
            self._beside.start()

    @property
    def version(self) -> int | None:
        """The version that was installed last; None before the first."""
        return self._version

    @property
    def state(self) -> State:
        """What this rank's weights are."""
        return self._state

    @property
    def ready(self) -> bool:
        """Whether this rank may generate: it has a version, whole, and its memory is mapped."""
        return self._version is not None and self._state is State.IDLE and not self._asleep

    @property
    def connected(self) -> bool:
        """Whether a connect has included this rank since it was made."""
        return self._connected

    @property
    def last_failure(self) -> str:
        """Why the last connect or update that reached this rank came to nothing; empty after one that succeeded."""
        return "" if self._last_failure is None else str(self._last_failure)

    @property
    def source_map(self) -> SourceMap | None:
        """What this rank's parameters copy, as the last connect found; None before."""
        return self._duties.source_map

    def poll_requests(self, step: int | None = None) -> Update | None:
        """Serve what all ranks of the engine have agreed to serve at this poll; usually nothing.

        Parameters
        ----------
        step
            Number of the engine's step, for engines that do not poll at every step on every rank; it must grow, and
            be the same on every rank for the same step. Requests are served at a step that all ranks poll at; while
            one waits there for the others, none of them may need it to go on. By default polls are counted.

        Returns
        -------
        Update or None
            What was installed; None if nothing was, also when a connect or an update came to nothing without having
            written (see `last_failure`).

        Raises
        ------
        TornError
            If an update failed after it began to write: this rank is torn.
        DeadlineError
            If the others went silent; nothing was written, the engine may go on.
        UsageError
            If ``step`` did not grow, or this rank is in a poll already: one that calls a hook, or another thread's.
        """
        self._station.check()
        if self._polling:
            raise UsageError(
                f"{self._station.worker}: poll_requests was called inside poll_requests; call it once a step, on one "
                "thread, and not from a hook or a loader"
            )
        try:
            self._polling = True
            txn = self._enter(step)
            return None if txn is None else self._serve(txn)
        except (UsageError, TornError):
            # What failed is over for everybody, and this rank may have promised to stop for the next already.
            raise
        except BaseException as error:
            # Above all KeyboardInterrupt, wherever it strikes: the others must not wait for this rank.
            self._session.abandon(error)
            raise
        finally:
            self._polling = False

    def before_sleep(self) -> None:
        """Say that the engine is about to release its memory: from now on every update is refused by name."""
        self._station.check()
        self._asleep = True
        self._session.refuse(
            StaleError(f"{self._station.worker} is asleep: its memory is released; call after_wake before an update")
        )

    def after_wake(self) -> None:
        """Say that memory is mapped again: the next update registers it anew before it moves a byte."""
        self._station.check()
        self._asleep = False
        self._duties.memory_moved()
        self._session.refuse(None)

    def close(self) -> None:
        """Leave: end threads, close sockets, let go of shared memory. May be called again."""
        self._station.close()
        if self._beside is not None:
            self._beside.join(self._deadline_s)
        self._duties.close()

    def _enter(self, step: int | None) -> int | None:
        try:
            return self._session.enter_poll(step)
        except ValueError as error:
            raise UsageError(f"{self._station.worker}: {error}") from None

    def _serve(self, txn: int) -> Update | None:
        self._duties.stalled_since = self._session.stopped_at
        self._update = None
        torn_before, torn = self._state is State.TORN, True
        try:
            outcome = self._session.serve(self._perform, after=txn - 1, until=Publish)
            torn = isinstance(outcome, End) and outcome.torn
        finally:
            torn = self._duties.wrote or torn_before or (torn and self._state is not State.IDLE)
            self._state = State.TORN if torn and self._update is None else State.IDLE
        if isinstance(outcome, End):
            self._last_failure = outcome.failure
            if self._state is State.TORN:
                log_event("torn", self._station.worker, level=logging.WARNING, why=str(outcome.failure))
            if outcome.failure is not None and self._state is State.TORN:
                raise TornError(
                    f"{self._station.worker}: an update failed after it had begun to write, so this rank is torn and "
                    f"must not generate until an update succeeds: {outcome.failure}"
                )
            self._connected = self._connected or outcome.failure is None
            return None
        self._last_failure = None
        assert self._update is not None
        received, stall_s = sum(self._update.report.bytes_received), time.monotonic() - self._duties.stalled_since
        log_event("activated", self._station.worker, self._version, bytes=received, stall_s=stall_s)
        return self._update

    def _note_end(self, end: End) -> None:
        """An update has ended that landed beside the caller, at least in part."""
        self._last_failure = end.failure

    def _perform(self, duty: Duty) -> Result:
        if isinstance(duty, Prepare) and self._asleep:
            raise StaleError(f"{self._station.worker} is asleep: its memory is released; call after_wake first")
        if isinstance(duty, self._writes):
            self._state = State.RECEIVING
        if isinstance(duty, Prepare):
            # Metadata that cannot be read refuses an update that has not begun.
            self._metadata = decode_metadata(duty.metadata)
        result = self._duties.perform(duty)
        if isinstance(duty, Publish):
            # Before the answer leaves: whoever hears that this rank has the version must find it so, and the next
            # update may already be landing.
            report = self._duties.report
            assert report is not None
            parent, self._version, self._state = self._version, duty.version, State.IDLE
            self._update = Update(duty.version, self._metadata, report, parent)
        return result
