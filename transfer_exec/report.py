"""What an update moved and how long it took.

Every worker hands back a `WorkerReport`; together they are a `TransferReport`. Times are seconds of CLOCK_MONOTONIC
(``time.monotonic()``): comparable between the processes of one host and never set back. Between hosts they are not
comparable; whoever gathers reports from several hosts shifts them to one clock first.

Measures have fixed boundaries, and a missing event is an error, never a zero:

==============  ==============================================================================
EWTT            first worker stops computing until the last one resumes
stall           the time one worker could not compute because of the update
AGST            the sum of all workers' stalls over their number
transfer        first to last payload byte
rollout pause   the longest stall of a rollout worker
publication     ``send_weights`` called until the last engine is ready at the new version
==============  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from transfer_exec.errors import ReportError
from transfer_exec.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds a worker spent in each phase, summed over rounds.

    Attributes
    ----------
    pack_s, assemble_s
        In the kernels.
    release_wait_s
        Waiting for peers to free their buffers.
    write_s, await_s
        Writing until complete, and waiting for messages, by stage: receive, external, internal.
    """

    pack_s: float = 0.0
    assemble_s: float = 0.0
    release_wait_s: float = 0.0
    write_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    await_s: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Span(NamedTuple):
    """Something a worker did; CLOCK_MONOTONIC.

    Attributes
    ----------
    kind
        One of `transfer_exec.trace.KINDS`.
    round
        In which round; -1 for what belongs to none.
    peer
        Whom it wrote to or waited for; empty for work of its own.
    of
        Of a wait: for a message of ``"wire"``, ``"external"`` or ``"internal"``, or for the ``"release"`` of buffers.
    start, stop
        Seconds.
    """

    kind: str
    round: int
    peer: str
    of: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's part of one update.

    Attributes
    ----------
    worker, version
        Whose and which.
    transport, kernels
        Names of what really ran.
    rounds, depth
        Rounds passed, which may be fewer than the plan's where much goes directly, and how many of them at once.
    staging_bytes
        Memory of the buffers: ``depth`` times what the fullest round needs.
    bytes_sent, bytes_received
        Payload by stage: receive, external, internal.
    started_at, finished_at
        When the program began and ended; CLOCK_MONOTONIC.
    first_byte_at, last_byte_at
        When this worker's first payload byte was sent, or its first message seen, and its last; None without traffic.
    phases
        Where the time went.
    spans
        The same span by span, if the update was traced.
    direct_bytes
        Of the bytes sent or received, those that went straight from parameter to parameter.
    mapped_bytes
        Of those, what came out of memory of the trainer that the rollout has mapped; the others were read.
    host_bytes
        Memory of the copies of its tensors that a worker keeps in a staging mode.
    """

    worker: str
    version: int
    transport: str
    kernels: str
    rounds: int
    depth: int
    staging_bytes: int
    bytes_sent: tuple[int, int, int]
    bytes_received: tuple[int, int, int]
    started_at: float
    finished_at: float
    first_byte_at: float | None
    last_byte_at: float | None
    phases: PhaseTimes
    spans: tuple[Span, ...] | None = None
    direct_bytes: int = 0
    mapped_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which a worker could not compute because of the update; CLOCK_MONOTONIC."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """What one worker's caller saw of an update.

    Attributes
    ----------
    stalls
        Every time it could not compute; at least one.
    called_at
        When ``send_weights`` was called; trainers only.
    ready_at
        When it was ready at the new version; rollouts only.
    """

    stalls: tuple[Stall, ...]
    called_at: float | None = None
    ready_at: float | None = None


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures above, in seconds; ``stall_s`` by worker."""

    ewtt_s: float
    stall_s: Mapping[str, float]
    agst_s: float
    rollout_pause_s: float
    publication_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One update of all workers.

    Attributes
    ----------
    version
        Which.
    transport
        Name of the transport that ran.
    rounds
        Of the plan.
    workers
        Every worker's report.
    transfer_s
        First to last payload byte; None if nothing had to move.
    lower_bound_s, bound_link
        No lawful plan is faster, and the link that says so.
    measures
        None where no computing stopped, as in `run_in_process`.
    opaque
        Parameters, by worker, that hold opaque elements: their own loader must still be called.
    verification
        How the caller compared what was sent with what landed; empty if it did not.
    verify_s, verify_from
        Seconds that took, by worker, and when it began.
    stalls
        When each worker could not compute; empty where nobody computes.
    parents
        By engine, the version that it had confirmed before; None before its first. An engine that is not here did not
        get this version.
    left_out
        By engine, why it did not, though it is connected: it was gone when the update began. It is taken in again by
        itself when its processes are back.
    """

    version: int
    transport: str
    rounds: int
    workers: Mapping[str, WorkerReport]
    transfer_s: float | None
    lower_bound_s: float
    bound_link: str
    measures: Measures | None = None
    opaque: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    verification: str = ""
    verify_s: Mapping[str, float] = field(default_factory=dict)
    verify_from: Mapping[str, float] = field(default_factory=dict)
    stalls: Mapping[str, tuple[Stall, ...]] = field(default_factory=dict)
    parents: Mapping[str, int | None] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio_to_bound(self) -> float | None:
        """``transfer_s`` over the bound; None if nothing had to move."""
        if self.transfer_s is None or self.lower_bound_s <= 0:
            return None
        return self.transfer_s / self.lower_bound_s

    @property
    def verify_total_s(self) -> float:
        """Seconds of all workers' comparing together."""
        return sum(self.verify_s.values())

    @property
    def verify_at_most_s(self) -> float:
        """What comparing added to the time from end to end, at most: the longest before the transfer and after it."""
        before = {worker for worker, start in self.verify_from.items() if start < self.workers[worker].started_at}
        sides = ([s for worker, s in self.verify_s.items() if (worker in before) == side] for side in (True, False))
        return sum(max(side, default=0.0) for side in sides)

    def bytes_sent(self, worker: str, stage: Stage | None = None) -> int:
        """Payload bytes a worker sent, in one stage or in all."""
        return _of_stage(self.workers[worker].bytes_sent, stage)

    def bytes_received(self, worker: str, stage: Stage | None = None) -> int:
        """Payload bytes a worker received, in one stage or in all."""
        return _of_stage(self.workers[worker].bytes_received, stage)

    def to_json(self) -> dict[str, object]:
        """Plain values for ``json.dumps``."""
        out = asdict(self)
        out["workers"] = {worker: asdict(report) for worker, report in self.workers.items()}
        out["measures"] = None if self.measures is None else asdict(self.measures)
        out["opaque"] = {worker: list(names) for worker, names in self.opaque.items()}
        out["verify_s"] = dict(self.verify_s)
        out["verify_from"] = dict(self.verify_from)
        out["stalls"] = {worker: [asdict(stall) for stall in stalls] for worker, stalls in self.stalls.items()}
        out["ratio_to_bound"] = self.ratio_to_bound
        out["verify_total_s"], out["verify_at_most_s"] = self.verify_total_s, self.verify_at_most_s
        return out

    def __str__(self) -> str:
        ratio = self.ratio_to_bound
        took = "nothing moved" if self.transfer_s is None else f"transfer {self.transfer_s:.4f} s"
        over = (
            "" if ratio is None else f", {ratio:.2f} times the bound of {self.lower_bound_s:.4f} s ({self.bound_link})"
        )
        lines = [f"version {self.version} over {self.transport} in {self.rounds} rounds: {took}{over}"]
        if self.measures is not None:
            m = self.measures
            lines.append(
                f"EWTT {m.ewtt_s:.4f} s, AGST {m.agst_s:.4f} s, rollout pause {m.rollout_pause_s:.4f} s, "
                f"publication {m.publication_s:.4f} s"
            )
        if self.verification:
            lines.append(
                f"verified by {self.verification}: {self.verify_at_most_s:.4f} s from end to end, "
                f"{self.verify_total_s:.4f} s of all workers"
            )
        for worker, report in self.workers.items():
            sent, received = (_by_stage(each) for each in (report.bytes_sent, report.bytes_received))
            direct = f"; {report.direct_bytes:,} of them directly" if report.direct_bytes else ""
            direct += f" ({report.mapped_bytes:,} mapped)" if report.mapped_bytes else ""
            lines.append(f"  {worker}: sent {sent}; received {received}{direct}")
        lines += [f"  {engine}: left out: {why}" for engine, why in self.left_out.items()]
        lines += [
            f"  {worker}: {len(names)} opaque parameters: {', '.join(names)}" for worker, names in self.opaque.items()
        ]
        return "\n".join(lines)


def combine_reports(
    plan: Plan,
    reports: Mapping[str, WorkerReport],
    *,
    events: Mapping[str, WorkerEvents] | None = None,
    opaque: Mapping[str, tuple[str, ...]] | None = None,
) -> TransferReport:
    """Make one report of all workers'.

    Parameters
    ----------
    plan
        That they ran.
    reports
        One per worker of the plan.
    events
        What the callers saw, one per worker; without them there are no measures.
    opaque
        Opaque parameters by worker.

    Raises
    ------
    ReportError
        If a worker's report or event is missing, versions or transports differ, a worker moved other than the
        planned bytes, or an event contradicts another.
    """
    missing = [worker for worker in plan.workers if worker not in reports]
    if missing or len(reports) != len(plan.workers):
        got, of = len(reports), len(plan.workers)
        raise ReportError(f"{got} reports for {of} workers; missing {', '.join(missing) or 'none'}")
    ordered = {worker: reports[worker] for worker in plan.workers}
    version = _only("version", {worker: str(report.version) for worker, report in ordered.items()})
    transport = _only("transport", {worker: report.transport for worker, report in ordered.items()})
    for worker, report in ordered.items():
        _check_bytes(plan, worker, report)
    firsts = [report.first_byte_at for report in ordered.values() if report.first_byte_at is not None]
    lasts = [report.last_byte_at for report in ordered.values() if report.last_byte_at is not None]
    return TransferReport(
        version=int(version),
        transport=transport,
        rounds=plan.rounds,
        workers=ordered,
        transfer_s=max(lasts) - min(firsts) if firsts and lasts else None,
        lower_bound_s=plan.lower_bound_s,
        bound_link=plan.bound_link,
        measures=None if events is None else measure(plan, events),
        stalls={} if events is None else {worker: events[worker].stalls for worker in plan.workers},
        opaque={} if opaque is None else {worker: opaque[worker] for worker in plan.workers if opaque.get(worker)},
    )


def measure(plan: Plan, events: Mapping[str, WorkerEvents]) -> Measures:
    """Compute the measures.

    Raises
    ------
    ReportError
        Naming the worker and the event that is missing, or two that contradict each other.
    """
    for worker in plan.workers:
        if worker not in events:
            raise ReportError(f"{worker}: no events; a measure without them would be a guess")
        if not events[worker].stalls:
            raise ReportError(f"{worker}: no stall was recorded; expected when it stopped and resumed")
        for stall in events[worker].stalls:
            if stall.stop < stall.start:
                raise ReportError(f"{worker}: resumed at {stall.stop}, before it stopped at {stall.start}")
    called = [_event(worker, "called_at", events[worker].called_at) for worker in plan.holders]
    ready = [_event(worker, "ready_at", events[worker].ready_at) for worker in plan.needers]
    if not called or not ready:
        raise ReportError(f"a plan of {len(called)} trainers and {len(ready)} rollouts has no publication to measure")
    if max(ready) < min(called):
        raise ReportError(f"the last engine was ready at {max(ready)}, before send_weights at {min(called)}")
    stalls = [stall for worker in plan.workers for stall in events[worker].stalls]
    per_worker = {worker: sum(stall.seconds for stall in events[worker].stalls) for worker in plan.workers}
    return Measures(
        ewtt_s=max(stall.stop for stall in stalls) - min(stall.start for stall in stalls),
        stall_s=per_worker,
        agst_s=sum(per_worker.values()) / len(per_worker),
        rollout_pause_s=max(per_worker[worker] for worker in plan.needers),
        publication_s=max(ready) - min(called),
    )


def _event(worker: str, name: str, value: float | None) -> float:
    if value is None:
        raise ReportError(f"{worker}: event {name} is missing")
    return value


def _only(what: str, found: Mapping[str, str]) -> str:
    if len(set(found.values())) != 1:
        raise ReportError(f"workers report different {what}s: {dict(found)}")
    return next(iter(found.values()))


def _check_bytes(plan: Plan, worker: str, report: WorkerReport) -> None:
    for stage in Stage:
        for verb, got, expected in (
            ("sent", report.bytes_sent[stage.value], plan.bytes_sent(worker, stage)),
            ("received", report.bytes_received[stage.value], plan.bytes_received(worker, stage)),
        ):
            if got != expected:
                raise ReportError(f"{worker}: {verb} {got} bytes in stage {stage.name}; the plan has {expected}")


def _of_stage(counts: tuple[int, int, int], stage: Stage | None) -> int:
    return sum(counts) if stage is None else counts[stage.value]


def _by_stage(counts: tuple[int, int, int]) -> str:
    named = [f"{count:,} {stage.name.lower()}" for stage, count in zip(Stage, counts, strict=True) if count]
    return ", ".join(named) or "nothing"
