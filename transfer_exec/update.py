"""One version's way through a worker's program, as a generator of waits.

It runs as far as it can, yields a `Wait` whenever a flag or a write it needs is not there yet, and returns the
`WorkerReport`.

Flags carry numbers that only grow: version v has ``(v + 1) * (rounds + 1)`` for "ready for version v", and one more
per round; 0 is what a flag has before its first signal. A worker writes round k of a version only after the peer has
released round k - 1 of the same version, so a worker that is late for an old version never writes into a newer one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transfer_exec.buffers import Buffers
from transfer_exec.errors import TransportError
from transfer_exec.kernels.base import Job
from transfer_exec.plan import Stage
from transfer_exec.program import Assemble, Await, Exchange, Instruction, Pack, Program, Release, Write
from transfer_exec.regions import Buffer
from transfer_exec.report import PhaseTimes, WorkerReport
from transfer_exec.transport.base import Ticket, Transport


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """What a worker is waiting for; a new object for every wait.

    Attributes
    ----------
    version, round
        Where it is.
    stage
        ``"RECEIVE"``, ``"EXTERNAL"`` or ``"INTERNAL"``.
    what
        For whom and for what, in words.
    """

    version: int
    round: int
    stage: str
    what: str

    def __str__(self) -> str:
        return f"version {self.version}, round {self.round}, stage {self.stage}: {self.what}"


Steps: TypeAlias = Generator[Wait, None, WorkerReport]
"""One worker's update: yields while it waits, returns its report."""

_Waits: TypeAlias = Generator[Wait, None, None]


class Update:
    """One version's way through a program.

    Parameters
    ----------
    program, transport, buffers
        Connected and bound.
    kernels
        Name of the backend, for the report.
    version
        Which.
    """

    def __init__(self, program: Program, transport: Transport, kernels: str, buffers: Buffers, version: int) -> None:
        self._program = program
        self._transport = transport
        self._kernels = kernels
        self._handles = buffers.handles
        self._version = version
        self._base = first_number(version, program.rounds)
        self._sent = [0, 0, 0]
        self._write_s = [0.0, 0.0, 0.0]
        self._await_s = [0.0, 0.0, 0.0]
        self._pack_s = self._assemble_s = self._release_wait_s = 0.0
        self._first_byte_at: float | None = None
        self._last_byte_at: float | None = None

    def steps(self, pack: Sequence[Job], assemble: Sequence[Job]) -> Steps:
        """All rounds, with each round's prepared packing and assembling."""
        started_at = time.monotonic()
        if self._program.release is not None:
            self._signal_release(self._program.release, self._base)
        steps = _with_writes_together(self._program.instructions)
        for number in range(self._program.rounds):
            for step in steps:
                match step:
                    case Pack():
                        begun = time.monotonic()
                        pack[number].run()
                        self._pack_s += time.monotonic() - begun
                    case Assemble():
                        begun = time.monotonic()
                        assemble[number].run()
                        self._assemble_s += time.monotonic() - begun
                    case Await():
                        yield from self._await(step, number)
                    case Release():
                        self._signal_release(step, self._base + number + 1)
                    case _:
                        yield from _side_by_side([self._write(each, number) for each in step])
        return self._report(started_at)

    def _write(self, step: Write | Exchange, number: int) -> _Waits:
        begun = time.monotonic()
        free = Wait(self._version, number, step.stage.name, f"for {step.peer} to release its buffers")
        while not self._released(step, number):
            yield free
        posted = time.monotonic()
        self._release_wait_s += posted - begun
        self._touch(posted)
        tickets = []
        for table in step.tables:
            rows = self._program.descriptors[table].of_round(number)
            if len(rows):
                handle = self._handles[self._program.descriptors[table].buffer]
                tickets.append(self._transport.write(handle, step.peer, Buffer.of_stage(step.stage).name, rows))
        under_way = Wait(self._version, number, step.stage.name, f"for a write to {step.peer} to complete")
        yield from self._drain(tickets, under_way)
        done = time.monotonic()
        self._touch(done)
        self._write_s[step.stage.value] += done - posted
        self._sent[step.stage.value] += sum(
            self._program.descriptors[table].bytes_of_round(number) for table in step.tables
        )
        tag = message_tag(self._program.plan_digest, step.stage, self._program.worker, step.peer, number)
        self._transport.signal(step.peer, step.flag, self._base + number + 1, tag)

    def _drain(self, tickets: Sequence[Ticket], wait: Wait) -> _Waits:
        """Wait until every write has ended, and only then raise what failed."""
        failures: list[str] = []
        pending = list(tickets)
        while True:
            left = []
            for ticket in pending:
                try:
                    if not self._transport.finished(ticket):
                        left.append(ticket)
                except TransportError as error:
                    failures.append(str(error))
            pending = left
            if not pending:
                break
            yield wait
        if failures:
            raise TransportError(f"{self._program.worker}, {wait}: " + "; ".join(failures))

    def _released(self, step: Write | Exchange, number: int) -> bool:
        sequence = self._transport.flag(step.release).sequence
        if sequence > self._base + self._program.rounds:
            raise TransportError(
                f"{step.peer} is past version {self._version}, which {self._program.worker} is still sending; "
                "the update was given up there"
            )
        return sequence >= self._base + number

    def _await(self, step: Await, number: int) -> _Waits:
        begun = time.monotonic()
        for source, flag in zip(step.sources, step.flags, strict=True):
            wait = Wait(self._version, number, step.stage.name, f"for the message of {source}")
            while not self._arrived(step.stage, source, flag, number):
                yield wait
            self._touch(time.monotonic())
        self._await_s[step.stage.value] += time.monotonic() - begun

    def _arrived(self, stage: Stage, source: str, flag: int, number: int) -> bool:
        sequence, tag = self._transport.flag(flag)
        expected = self._base + number + 1
        if sequence < expected:
            return False
        mine = message_tag(self._program.plan_digest, stage, source, self._program.worker, number)
        if sequence > expected or tag != mine:
            raise TransportError(
                f"{self._program.worker}: {source} announced message {sequence} with layout {tag:#x} in stage "
                f"{stage.name}; expected message {expected} (version {self._version}, round {number}) with {mine:#x}"
            )
        return True

    def _signal_release(self, step: Release, sequence: int) -> None:
        for source, flag in zip(step.sources, step.flags, strict=True):
            self._transport.signal(source, flag, sequence, 0)

    def _touch(self, now: float) -> None:
        if self._first_byte_at is None:
            self._first_byte_at = now
        self._last_byte_at = now

    def _report(self, started_at: float) -> WorkerReport:
        return WorkerReport(
            worker=self._program.worker,
            version=self._version,
            transport=self._transport.name,
            kernels=self._kernels,
            rounds=self._program.rounds,
            bytes_sent=_three(self._sent),
            bytes_received=_three(self._program.arriving.sum(axis=1).tolist()),
            started_at=started_at,
            finished_at=time.monotonic(),
            first_byte_at=self._first_byte_at,
            last_byte_at=self._last_byte_at,
            phases=PhaseTimes(
                pack_s=self._pack_s,
                assemble_s=self._assemble_s,
                release_wait_s=self._release_wait_s,
                write_s=(self._write_s[0], self._write_s[1], self._write_s[2]),
                await_s=(self._await_s[0], self._await_s[1], self._await_s[2]),
            ),
        )


def first_number(version: int, rounds: int) -> int:
    """What a worker raises its sources' flags to when it is ready for a version."""
    return (version + 1) * (rounds + 1)


def message_tag(plan_digest: str, stage: Stage, source: str, target: str, number: int) -> int:
    """63 bits that name one message of one plan, so that a receiver never reads bytes by another layout."""
    text = f"{plan_digest}/{stage.name}/{source}/{target}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _with_writes_together(
    instructions: Sequence[Instruction],
) -> list[Pack | Await | Assemble | Release | list[Write | Exchange]]:
    """Neighbouring writes of one stage become one list."""
    out: list[Pack | Await | Assemble | Release | list[Write | Exchange]] = []
    for step in instructions:
        if not isinstance(step, (Write, Exchange)):
            out.append(step)
            continue
        last = out[-1] if out else None
        if isinstance(last, list) and last[-1].stage is step.stage:
            last.append(step)
        else:
            out.append([step])
    return out


def _side_by_side(jobs: Sequence[_Waits]) -> _Waits:
    """Poll several generators in turn until all have ended; no slow peer holds up the others.

    If some fail, the rest still end before the failures are raised.
    """
    pending = list(jobs)
    failures: list[TransportError] = []
    while pending:
        left, waits = [], []
        for job in pending:
            try:
                waits.append(next(job))
                left.append(job)
            except StopIteration:
                continue
            except TransportError as error:
                failures.append(error)
        pending = left
        if waits:
            yield waits[0]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise TransportError("; ".join(str(error) for error in failures))


def _three(counts: Sequence[int]) -> tuple[int, int, int]:
    return counts[0], counts[1], counts[2]
