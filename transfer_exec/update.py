"""One version's way through a worker's program, as a generator of waits.

Up to ``depth`` rounds are under way at once, each in a slot of its own of every buffer: round k in slot ``k % depth``.
A slot passes its rounds one after the other, each from its packing to its release, and the slots go side by side: while
one round is on the wire, the next is packed and the one before assembled. Every instruction takes the rounds in order.

::

    slot 0    pack 0 | write 0           | pack 2 | write 2 ...
    slot 1             pack 1 | write 1           | pack 3 | ...

Beside the slots goes what is read straight from parameter to parameter (`transfer_exec.fetching`). It runs as far as it
can, yields a new `Wait` whenever it went on and the same one while it cannot, and returns the `WorkerReport`.

A worker writes round k of a version only after the peer has released round k - depth of the same version
(`transfer_exec.signals`), which is after the peer's last reader of that slot has finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from layout_algebra.signal_safe import Job as Running
from layout_algebra.signal_safe import ThreadPool
from transfer_exec.buffers import Buffers, slot_name
from transfer_exec.errors import PeerGoneError, TransportError
from transfer_exec.fetching import Fetching
from transfer_exec.kernels.base import Job
from transfer_exec.ledger import WRITING, Ledger
from transfer_exec.plan import Stage
from transfer_exec.program import Assemble, Await, Exchange, Instruction, Pack, Program, Release, Write
from transfer_exec.regions import Buffer
from transfer_exec.signals import ASSEMBLE, PACK, Steps, Wait, first_number, message_tag
from transfer_exec.transport.base import Ticket, Transport
from transfer_exec.transport.reading import Reading, Sums

_Waits: TypeAlias = Generator[Wait, None, None]
_Group: TypeAlias = list[tuple[int, Instruction]]


class Update:
    """One version's way through a program.

    Parameters
    ----------
    program, transport, buffers, readings
        Connected and bound.
    kernels
        Name of the backend, for the report.
    version
        Which.
    trace
        Keep a span of everything it does, for the report.
    pool
        Where packing and assembling run, one at a time, beside the caller; without one, on the calling thread.
    before_read
        Called before anything is read straight into memory.
    sums
        To which the digests of that are added, or None.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        kernels: str,
        buffers: Buffers,
        readings: Mapping[str, Reading],
        version: int,
        *,
        pool: ThreadPool | None,
        trace: bool,
        before_read: Callable[[], None],
        sums: Sums | None,
    ) -> None:
        self._program = program
        self._transport = transport
        self._kernels = kernels
        self._buffers = buffers
        self._version = version
        self._pool = pool
        self._base = first_number(version, program.rounds)
        self._passed = [0] * len(program.instructions)
        self._in_flight: dict[Ticket, Wait] = {}
        self._running: list[Running[None]] = []
        self._failures: list[TransportError] = []
        self._ledger = Ledger(program, version, trace=trace)
        self._fetching = Fetching(program, transport, readings, version, self._ledger, before_read, sums)

    def steps(self, pack: Sequence[Job], assemble: Sequence[Job]) -> Steps:
        """All rounds, with each round's prepared packing and assembling."""
        if self._program.release is not None:
            self._signal_release(self._program.release, self._base)
        groups = _with_writes_together(self._program.instructions)
        depth = min(self._buffers.depth, self._program.rounds)
        slots = [self._slot(first, groups, pack, assemble) for first in range(depth)]
        try:
            yield from self._all_slots([*self._fetching.jobs(), *slots])
        finally:
            for kernel in self._running:  # one that has begun writes to its end, whatever else has failed
                kernel.wait()
            self._fetching.end()
        return self._ledger.report(
            transport=self._transport.name,
            kernels=self._kernels,
            depth=self._buffers.depth,
            staging_bytes=self._buffers.total_bytes,
        )

    def _all_slots(self, slots: list[_Waits]) -> _Waits:
        """Take every round as far as it can go, the oldest first; what failed is raised when all writes have ended.

        A wait that was not yielded before says that something went on, so whoever drives this should not sleep.
        """
        shown: Wait | None = None
        while slots:
            before = self._ledger.moves
            left, waits = [], []
            for slot in slots:
                try:
                    waits.append(next(slot))
                    left.append(slot)
                except StopIteration:
                    self._ledger.moves += 1
                except TransportError as error:
                    yield from self._give_up(error)
            slots = left
            if not slots:
                return
            if shown is None or self._ledger.moves != before:
                shown = replace(min(waits, key=lambda each: (each.round < 0, each.round)))
            yield shown

    def _give_up(self, error: TransportError) -> _Waits:
        """Wait until every write of any round has ended, then raise all that failed."""
        self._note(error)
        while self._in_flight:
            for ticket, under_way in list(self._in_flight.items()):
                try:
                    self._ended(ticket)
                except TransportError as another:
                    self._note(TransportError(f"{self._program.worker}, {under_way}: {another}"))
            if self._in_flight:
                yield next(iter(self._in_flight.values()))
        if len(self._failures) == 1:
            raise error
        raise TransportError("; ".join(str(each) for each in self._failures))

    def _note(self, error: TransportError) -> None:
        if error not in self._failures:
            self._failures.append(error)

    def _slot(self, first: int, groups: Sequence[_Group], pack: Sequence[Job], assemble: Sequence[Job]) -> _Waits:
        """Every ``depth``-th round from the first."""
        for number in range(first, self._program.rounds, self._buffers.depth):
            for group in groups:
                index, step = group[0]
                match step:
                    case Pack():
                        begun = yield from self._run(pack[number], PACK, index, number)
                        self._ledger.pack_s += self._ledger.took("pack", number, begun)
                    case Assemble():
                        begun = yield from self._run(assemble[number], ASSEMBLE, index, number)
                        self._ledger.assemble_s += self._ledger.took("assemble", number, begun)
                    case Await():
                        yield from self._await(step, index, number)
                    case Release():
                        yield from self._in_turn(index, number)
                        self._signal_release(step, self._base + number + 1)
                    case _:
                        yield from self._side_by_side([self._write(each, at, number) for at, each in group])
                        continue
                self._pass(index)

    def _in_turn(self, index: int, number: int) -> _Waits:
        """Wait until an instruction has passed the round before."""
        turn = Wait(self._version, number, "ORDER", "for the round before")
        while self._passed[index] < number:
            yield turn

    def _pass(self, index: int) -> None:
        self._passed[index] += 1
        self._ledger.moves += 1

    def _run(self, job: Job, stage: str, index: int, number: int) -> Generator[Wait, None, float]:
        """Run a kernel; when it began."""
        yield from self._in_turn(index, number)
        begun = time.monotonic()
        if self._pool is None:
            job.run()
            return begun
        try:
            running = self._pool.submit(job.run)
        except RuntimeError as error:
            raise TransportError(f"{self._program.worker}: was closed at {stage.lower()} {number}") from error
        self._running = [*(each for each in self._running if not each.done()), running]
        busy = Wait(self._version, number, stage, "for its own kernel")
        while not running.done():
            yield busy
        running.result()
        return begun

    def _write(self, step: Instruction, index: int, number: int) -> _Waits:
        assert isinstance(step, (Write, Exchange))
        yield from self._in_turn(index, number)
        begun = time.monotonic()
        free = Wait(self._version, number, step.stage.name, f"for {step.peer} to release its buffers")
        while not self._released(step, number):
            yield free
        posted = time.monotonic()
        self._ledger.release_wait_s += self._ledger.took("wait", number, begun, step.peer, "release")
        self._ledger.touch(posted)
        self._ledger.moves += 1
        under_way = Wait(self._version, number, step.stage.name, f"for a write to {step.peer} to complete")
        slot = number % self._buffers.depth
        tickets = []
        for table in step.tables:
            rows = self._program.descriptors[table].of_round(number)
            if len(rows):
                source = self._buffers.handles[self._program.descriptors[table].buffer][slot]
                target = slot_name(Buffer.of_stage(step.stage), slot)
                tickets.append(self._transport.write(source, step.peer, target, rows))
                self._in_flight[tickets[-1]] = under_way
        yield from self._drain(tickets, under_way)
        self._ledger.touch(time.monotonic())
        self._ledger.write_s[step.stage.value] += self._ledger.took(
            WRITING[step.stage.value], number, posted, step.peer
        )
        self._ledger.sent[step.stage.value] += sum(
            self._program.descriptors[table].bytes_of_round(number) for table in step.tables
        )
        tag = message_tag(self._program.plan_digest, step.stage, self._program.worker, step.peer)
        self._transport.signal(step.peer, step.flag, self._base + number + 1, tag)
        self._pass(index)

    def _side_by_side(self, jobs: Sequence[_Waits]) -> _Waits:
        """Poll several generators in turn until all have ended; no slow peer holds up the others.

        If some fail, the rest still end before the first failure is raised.
        """
        pending = list(jobs)
        failed: list[TransportError] = []
        while pending:
            left, waits = [], []
            for job in pending:
                try:
                    waits.append(next(job))
                    left.append(job)
                except StopIteration:
                    continue
                except TransportError as error:
                    self._note(error)
                    failed.append(error)
            pending = left
            if waits:
                yield waits[0]
        if failed:
            raise failed[0]

    def _drain(self, tickets: Sequence[Ticket], under_way: Wait) -> _Waits:
        """Wait until every write has ended, and only then raise what failed."""
        failures: list[str] = []
        pending = list(tickets)
        while True:
            left = []
            for ticket in pending:
                try:
                    if not self._ended(ticket):
                        left.append(ticket)
                except TransportError as error:
                    failures.append(str(error))
            pending = left
            if not pending:
                break
            yield under_way
        if failures:
            raise TransportError(f"{self._program.worker}, {under_way}: " + "; ".join(failures))

    def _ended(self, ticket: Ticket) -> bool:
        """Whether a write has ended; raises what failed, once."""
        if ticket not in self._in_flight:
            return True
        try:
            ended = self._transport.finished(ticket)
        except TransportError:
            del self._in_flight[ticket]
            raise
        if ended:
            del self._in_flight[ticket]
        return ended

    def _released(self, step: Write | Exchange, number: int) -> bool:
        sequence = self._transport.flag(step.release).sequence
        if sequence > self._base + self._program.rounds:
            raise TransportError(
                f"{step.peer} is past version {self._version}, which {self._program.worker} is still sending; "
                "the update was given up there"
            )
        return sequence >= self._base + max(number + 1 - self._buffers.depth, 0)

    def _await(self, step: Await, index: int, number: int) -> _Waits:
        yield from self._in_turn(index, number)
        for source, flag in zip(step.sources, step.flags, strict=True):
            begun = time.monotonic()
            message = Wait(self._version, number, step.stage.name, f"for the message of {source}")
            while not self._arrived(step.stage, source, flag, number):
                yield message
            self._ledger.touch(time.monotonic())
            self._ledger.await_s[step.stage.value] += self._ledger.took(
                "wait", number, begun, source, WRITING[step.stage.value]
            )
            self._ledger.moves += 1

    def _arrived(self, stage: Stage, source: str, flag: int, number: int) -> bool:
        """Whether a round's message is there; its source may have announced those of later slots since."""
        sequence, tag = self._transport.flag(flag)
        expected = self._base + number + 1
        if sequence < expected:
            return False
        last = self._base + min(number + self._buffers.depth, self._program.rounds)
        mine = message_tag(self._program.plan_digest, stage, source, self._program.worker)
        if sequence > last or tag != mine:
            raise TransportError(
                f"{self._program.worker}: {source} announced message {sequence} with layout {tag:#x} in stage "
                f"{stage.name}; expected message {expected} (version {self._version}, round {number}) with {mine:#x}"
            )
        return True

    def _signal_release(self, step: Release, sequence: int) -> None:
        for source, flag in zip(step.sources, step.flags, strict=True):
            # A source that is gone writes no more, and needs no leave to; if it still owes a message, that is missed.
            with suppress(PeerGoneError):
                self._transport.signal(source, flag, sequence, 0)


def _with_writes_together(instructions: Sequence[Instruction]) -> list[_Group]:
    """Instructions and their positions; neighbouring writes of one stage are one group, others are alone."""
    groups: list[_Group] = []
    for index, step in enumerate(instructions):
        last = groups[-1][-1][1] if groups else None
        if isinstance(step, (Write, Exchange)) and isinstance(last, (Write, Exchange)) and last.stage is step.stage:
            groups[-1].append((index, step))
        else:
            groups.append([(index, step)])
    return groups
