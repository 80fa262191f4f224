"""What one worker has done in one update so far: bytes, seconds and spans, and the report that comes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transfer_exec.plan import Stage
from transfer_exec.program import Program
from transfer_exec.report import PhaseTimes, Span, WorkerReport

WRITING = ("wire", "external", "internal")
"""Kinds of spans in which bytes move between workers, by stage."""


class Ledger:
    """Filled while an update runs.

    Parameters
    ----------
    program, version
        Whose update to which version.
    trace
        Keep spans for the report.

    Attributes
    ----------
    moves
        Counts up whenever the worker has come further.
    pack_s, assemble_s, release_wait_s, write_s, await_s
        As in `PhaseTimes`.
    sent
        Payload bytes by stage.
    """

    def __init__(self, program: Program, version: int, *, trace: bool) -> None:
        self._program = program
        self._version = version
        self._spans: list[Span] | None = [] if trace else None
        self._started_at = time.monotonic()
        self._first_byte_at: float | None = None
        self._last_byte_at: float | None = None
        self.moves = 0
        self.sent = [0, 0, 0]
        self.write_s = [0.0, 0.0, 0.0]
        self.await_s = [0.0, 0.0, 0.0]
        self.pack_s = self.assemble_s = self.release_wait_s = 0.0

    def took(self, kind: str, number: int, begun: float, peer: str = "", of: str = "") -> float:
        """Seconds since something began, which has ended now; number is its round, -1 beside the rounds."""
        now = time.monotonic()
        if self._spans is not None:
            self._spans.append(Span(kind, number, peer, of, begun, now))
        return now - begun

    def touch(self, now: float) -> None:
        """A payload byte moved."""
        if self._first_byte_at is None:
            self._first_byte_at = now
        self._last_byte_at = now

    def report(self, *, transport: str, kernels: str, depth: int, staging_bytes: int) -> WorkerReport:
        """Everything, now that the update has ended."""
        program = self._program
        return WorkerReport(
            worker=program.worker,
            version=self._version,
            transport=transport,
            kernels=kernels,
            rounds=program.rounds,
            depth=depth,
            staging_bytes=staging_bytes,
            bytes_sent=_three(self.sent),
            bytes_received=_three([program.bytes_received(stage) for stage in Stage]),
            started_at=self._started_at,
            finished_at=time.monotonic(),
            first_byte_at=self._first_byte_at,
            last_byte_at=self._last_byte_at,
            phases=PhaseTimes(
                pack_s=self.pack_s,
                assemble_s=self.assemble_s,
                release_wait_s=self.release_wait_s,
                write_s=(self.write_s[0], self.write_s[1], self.write_s[2]),
                await_s=(self.await_s[0], self.await_s[1], self.await_s[2]),
            ),
            spans=None if self._spans is None else tuple(self._spans),
            direct_bytes=program.direct_bytes,
            mapped_bytes=program.mapped_bytes,
        )


def _three(counts: Sequence[int]) -> tuple[int, int, int]:
    return counts[0], counts[1], counts[2]
