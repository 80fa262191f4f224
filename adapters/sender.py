"""The trainer's side: one `SenderAdapter` on every trainer rank.

::

    sender = SenderAdapter(load_weights, lambda: local_tensors(model), "checkpoint/", rank=rank, world_size=4,
                           rendezvous="/shared/run-17")
    print(sender.connect(["a", "b"]))                 # once; again when an engine joins or comes back
    for step in range(steps):
        train(model)
        sender.send_weights(step + 1).result()        # returns the report once every engine has the version

`connect` and `send_weights` are collective over the trainer ranks: every rank makes the same calls in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from adapters.arguments import JsonValue, check_trace, check_whole, encode_metadata, engine_name, names_of
from adapters.checkpoint import Checkpoint
from adapters.connect_report import ConnectReport
from adapters.duties import Duties
from adapters.duty_messages import Duty, Stage, Transfer
from adapters.events import log_event
from adapters.failures import Failure, StaleError, UsageError, failure_of, raise_failure
from adapters.messages import ConnectIntent, End, Intent, SendIntent
from adapters.pending_update import PendingUpdate
from adapters.probe_live import Parameters
from adapters.probe_worker import Progress
from adapters.probing import LoadWeights
from adapters.ready_event import ReadyEvent, wait_for_event
from adapters.rendezvous import Rendezvous, as_rendezvous
from adapters.station import Station
from adapters.steps import TRAINERS
from adapters.transports import cards_of, check_transport, data_address
from adapters.worker import Worker
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from transfer_exec.errors import TransferError
from transfer_exec.topology import Topology

__all__ = ["PendingUpdate", "ReadyEvent", "SenderAdapter"]

DEFAULT_DEADLINE_S = 300.0
DEFAULT_BUFFER_BYTES = 256 << 20
MAX_BUFFER_BYTES = 1 << 50
MAX_VERSION = (1 << 40) - 1

_STEPS_AFTER, _STEPS_BESIDE = 4, 8
"""Deadlines that what is left of an update can take: after this rank's last bytes, and after they were staged."""

_WAIT_SHARE = 0.8
"""Of the deadline, for waits on this rank alone, so that the others hear why before their own wait ends."""


class SenderAdapter:
    """One trainer rank.

    Parameters
    ----------
    load_weights
        Loads ``(name, tensor)`` pairs of the checkpoint into this rank's parameters; run by `connect` to find out what
        this rank holds.
    parameters
        Live tensors by name, or a callable that lists them anew. May be empty.
    checkpoint
        A folder of safetensors whose names, shapes and dtypes the loaders of both sides understand, or its space.
    rank, world_size
        Among the trainers.
    rendezvous
        Where workers find each other; a path is a folder that all of them can write.
    staging
        Copy the weights into host memory first: `send_weights` returns when that is done, and the transfer goes on
        beside the caller. Costs host memory for what this rank holds; the same on all ranks.
    transport
        ``"auto"`` (shared memory, and no choice where workers are on several machines), ``"shared_memory"``,
        ``"device_memory"`` (GPUs of one machine), ``"mooncake"`` (TCP) or ``"mooncake-rdma"``, with this worker's own
        cards after a colon where not all are meant: ``"mooncake-rdma:^mlx5_0"``. Explicit names of all workers must
        agree.
    verify
        ``"digest"`` compares digests of what was sent and what landed in every update; ``"full"`` does that, and lets
        every rollout compare what landed with its own ``load_weights``' work, bit by bit; ``"off"`` does neither.
    activation
        ``"engine"``: every engine goes on with the new version as soon as it has it. ``"fleet"``: none does before all
        engines that are not lost have its bytes, and have compared them; and none at all if one of these failed.
    cast
        Let trainers hold elements wider than the checkpoint's; they are rounded to nearest even when sent.
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
        rank: int,
        world_size: int,
        rendezvous: Rendezvous | str | Path,
        staging: bool = False,
        transport: str = "auto",
        verify: str = "digest",
        activation: Literal["engine", "fleet"] = "engine",
        cast: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        if activation not in ("engine", "fleet"):
            raise UsageError(f"activation is {activation!r}; expected 'engine' or 'fleet'")
        if verify not in ("digest", "full", "off"):
            raise UsageError(f"verify is {verify!r}; expected 'digest', 'full' or 'off'")
        self._transport = check_transport(transport)
        self._verify, self._cast, self._deadline_s = verify, cast, deadline_s
        self._staging, self._activation = staging, activation
        self._beside: threading.Thread | None = None
        self._rank = rank
        space = Checkpoint.of(checkpoint).space
        self._pending: PendingUpdate | None = None
        self._version: int | None = None
        meeting_place = as_rendezvous(rendezvous)
        self._station = Station(
            TRAINERS,
            rank,
            world_size,
            meeting_place,
            transport=self._transport,
            deadline_s=deadline_s,
            version=lambda: self._version,
        )
        worker = Worker(
            self._station.worker,
            load_weights,
            parameters,
            space,
            False,
            staging,
            None,
            None,
            deadline_s * _WAIT_SHARE,
            partial(data_address, meeting_place, self._station.meets_as, deadline_s=deadline_s),
            cards_of(transport),
        )
        self._duties = Duties(worker, self._station.session)

    @property
    def version(self) -> int | None:
        """The newest version that every engine has confirmed; None before the first."""
        if self._pending is not None and self._pending.succeeded(0.0):
            self._version = self._pending.version
        return self._version

    @property
    def source_map(self) -> SourceMap | None:
        """What this rank holds, as the last `connect` found; None before."""
        return self._duties.source_map

    def connect(
        self,
        engines: Iterable[str],
        *,
        topology: Topology | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        allow_partial: Collection[str] = (),
        progress: Progress | None = None,
    ) -> ConnectReport:
        """Find out what everybody holds and needs, plan, and get ready to send; collective over the trainers.

        Parameters
        ----------
        engines
            Names of engines to discover anew. Engines of an earlier connect that are not named stay connected with
            the layout they had, unless their processes are gone.
        topology
            The cluster; by default the workers of one machine form a node, at assumed bandwidths.
        buffer_bytes
            Budget per worker and round.
        allow_partial
            Checkpoint tensors or parameters that may keep old values where no trainer holds them.
        progress
            Called as ``progress(what, done, total)``, on this thread, with every step of this rank and with what it
            waits for; on rank 0 also with every engine that is done. What it raises ends the call.

        Returns
        -------
        ConnectReport
            The same on every rank.

        Raises
        ------
        TransferError, LayoutError
            On every rank, with the reason, before any byte of weights has moved: an engine that does not come
            (DeadlineError), a loader that cannot be probed (ProbeError), elements nobody holds (UnheldError), sides
            that do not fit (CoverageError, CorrespondenceError), ranks with different arguments (DisagreementError).
        """
        if topology is not None and not isinstance(topology, Topology):
            raise UsageError(
                f"topology is a {type(topology).__name__}; expected a Topology, or None for assumed speeds"
            )
        intent = ConnectIntent(
            engines=tuple(dict.fromkeys(engine_name(name) for name in names_of("engines", engines))),
            buffer_bytes=check_whole("buffer_bytes", buffer_bytes, least=1, most=MAX_BUFFER_BYTES),
            allow_partial=tuple(sorted(names_of("allow_partial", allow_partial))),
            transport=self._transport,
            verify=self._verify,
            cast=self._cast,
            topology="" if topology is None else hashlib.blake2b(repr(topology).encode(), digest_size=8).hexdigest(),
            staging=self._staging,
            activation=self._activation,
        )
        if not intent.engines:
            raise UsageError("connect needs the name of at least one engine")
        self._begin("connect", intent)
        if self._station.conductor is not None:
            self._station.conductor.offer_topology(topology)
        end = self._call(intent, b"", None, progress=progress)
        assert isinstance(end, End)
        if end.failure is not None:
            raise_failure(end.failure)
        report = ConnectReport.from_bytes(end.outcome)
        if all(one.worker != self._station.worker for one in report.workers):
            raise StaleError(
                f"{self._station.worker}: the others connected without this rank, which did not call connect in time; "
                "call it on every trainer rank"
            )
        return report

    def send_weights(
        self,
        version: int,
        metadata: JsonValue = None,
        ready_event: ReadyEvent | None = None,
        *,
        trace: str | Path | None = None,
        progress: Progress | None = None,
    ) -> PendingUpdate:
        """Send this rank's part of a new version; collective over the trainers.

        Returns as soon as this rank's last bytes are packed and written, or with staging copied into host memory, so
        that training may go on. With staging everything else, and what goes wrong with it, is for ``result()``.

        Parameters
        ----------
        version
            Greater than that of every engine, the same on all ranks.
        metadata
            Plain values that receivers get with the update; those of rank 0 travel.
        ready_event
            Waited for before anything is read: the weights are in memory when it happens.
        trace
            Trace the update, on all ranks or on none; rank 0's ``result()`` writes a Chrome trace to this path
            (`transfer_exec.trace`). Times of several hosts are not on one clock.
        progress
            As for `connect`, with every round of this rank; ``result()`` goes on calling it.

        Raises
        ------
        TransferError
            On every rank, with the reason. Nothing was written if a version is not newer (VersionError), ranks
            named different ones (DisagreementError), or storage was replaced since connect (StaleError). Once bytes
            moved, engines that did not finish are torn until an update succeeds.
        """
        called_at = time.monotonic()
        intent = SendIntent(check_whole("version", version, least=0, most=MAX_VERSION), trace is not None)
        data, failure = self._begin(
            f"send_weights({version})", intent, lambda: self._ready(version, metadata, ready_event, trace)
        )
        session = self._station.session
        self._duties.stalled_since = called_at
        until = Stage if self._staging else Transfer
        outcome = self._call(intent, data, failure, until=until, progress=progress)
        if isinstance(outcome, End):
            late = "took no part: it came after the last connect; call connect on every trainer rank"
            raise_failure(outcome.failure or Failure(StaleError.__name__, self._station.worker, late))
        log_event("sent", self._station.worker, version, seconds=time.monotonic() - called_at)
        if self._staging:
            self._beside = threading.Thread(
                target=partial(self._go_on, outcome), name=f"transload update {version}", daemon=True
            )
            self._beside.start()
        path = trace if self._rank == 0 else None
        patience_s = (_STEPS_BESIDE if self._staging else _STEPS_AFTER) * self._deadline_s
        self._pending = PendingUpdate(version, outcome, session, patience_s=patience_s, trace=path, progress=progress)
        return self._pending

    def close(self) -> None:
        """Leave: end threads, close sockets, let go of shared memory. May be called again."""
        self._station.close()
        self._end_beside()
        self._duties.close()

    def _call(
        self,
        intent: Intent,
        metadata: bytes,
        failure: Failure | None,
        *,
        until: type[Duty] | None = None,
        progress: Progress | None,
    ) -> End | int:
        """Make a collective call and do this rank's part; however it is left, the others hear of it."""
        session = self._station.session
        try:
            after = session.call(intent, metadata, failure)
            return session.serve(self._duties.perform, after=after, until=until, progress=progress)
        except BaseException as error:
            # An interrupt may strike after the call has left and before `serve` has begun.
            session.abandon(error)
            raise

    def _go_on(self, txn: int) -> None:
        """Do the rest of an update whose weights are staged; the caller's thread is elsewhere."""
        try:
            self._station.session.serve(self._duties.perform, after=txn - 1, until=Transfer)
        except TransferError as error:
            # The others have been told, and `result` hears it from them.
            log_event("gave_up", self._station.worker, level=logging.WARNING, why=str(error))

    def _end_beside(self) -> None:
        """Wait for the thread of the last update, which has ended by now or is about to."""
        if self._beside is not None:
            self._beside.join(self._deadline_s)
            self._beside = None

    def _begin(
        self, what: str, intent: Intent, ready: Callable[[], tuple[bytes, Failure | None]] = lambda: (b"", None)
    ) -> tuple[bytes, Failure | None]:
        """What every collective call does first, ``ready`` included; the others hear of an interrupt."""
        self._station.check()
        try:
            self._station.wait_joined(what)
            if self._pending is not None and self._pending.succeeded(self._pending.patience_s):
                # A failed one is told by its own result().
                self._version = self._pending.version
            self._end_beside()
            return ready()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._station.session.call(intent, b"", failure_of(error, self._station.worker))
                self._station.session.abandon(error)
            raise

    def _ready(
        self, version: int, metadata: JsonValue, ready_event: ReadyEvent | None, trace: str | Path | None
    ) -> tuple[bytes, Failure | None]:
        """Metadata as bytes, or what keeps this rank from sending; the other ranks must hear of it too."""
        try:
            data = encode_metadata(metadata)
            if trace is not None and self._rank == 0:
                check_trace(trace)
            if ready_event is not None:
                wait_for_event(ready_event, version, self._deadline_s * _WAIT_SHARE)
            self._duties.check_storage()
        except Exception as error:  # noqa: BLE001 - whatever it is, none of them can send
            return b"", failure_of(error, self._station.worker)
        return data, None
