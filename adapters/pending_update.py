"""An update that goes on after `send_weights` has returned, and how it ends."""

from __future__ import annotations

from pathlib import Path

from adapters.arguments import check_seconds
from adapters.failures import UsageError, raise_failure
from adapters.messages import End
from adapters.probe_worker import Progress
from adapters.session import Session
from adapters.update_report import read_report
from transfer_exec.errors import DeadlineError
from transfer_exec.report import TransferReport
from transfer_exec.trace import write_trace

__all__ = ["PendingUpdate"]


class PendingUpdate:
    """An update that this trainer has done its part of.

    Attributes
    ----------
    patience_s
        How long the steps that are left can take at most.
    trace
        Where `result` writes a Chrome trace; None for nowhere.
    """

    def __init__(
        self,
        version: int,
        txn: int,
        session: Session,
        *,
        patience_s: float,
        trace: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._version = version
        self._txn = txn
        self._session = session
        self.patience_s = patience_s
        self.trace = trace
        self._progress = progress
        self._end: End | None = None

    @property
    def version(self) -> int:
        """The version that was sent."""
        return self._version

    def done(self) -> bool:
        """Whether the update has ended, well or not."""
        return self._wait(0.0) is not None

    def result(self, timeout_s: float | None = None) -> TransferReport:
        """Wait until every engine has confirmed the version.

        Parameters
        ----------
        timeout_s
            How long to wait; by default until the steps that are left must have ended.

        Raises
        ------
        DeadlineError
            If the update has not ended by then; it goes on, and ``result`` may be called again.
        TransferError
            Why some engine does not have the version; the message names them.
        UsageError
            If ``timeout_s`` is no time, or the trace cannot be written.
        """
        waited_s = self.patience_s if timeout_s is None else check_seconds("timeout_s", timeout_s, zero=True)
        end = self._wait(waited_s, self._progress)
        if end is None:
            raise DeadlineError(
                f"{self._session.worker}: version {self._version} is not confirmed by every engine within {waited_s:g} "
                f"s, last of {self._session.phase}; it goes on, and result() may be called again"
            )
        if end.failure is not None:
            raise_failure(end.failure)
        report = read_report(end.outcome)
        path, self.trace = self.trace, None
        if path is not None:
            try:
                write_trace(report, path)
            except OSError as error:
                raise UsageError(
                    f"version {self._version} is confirmed by every engine, but its trace cannot be written: {error}; "
                    "result() called again gives the report"
                ) from error
        return report

    def succeeded(self, within_s: float) -> bool:
        """Whether every engine has confirmed the version within so many seconds."""
        end = self._wait(within_s)
        return end is not None and end.failure is None

    def _wait(self, timeout_s: float, progress: Progress | None = None) -> End | None:
        if self._end is None:
            self._end = self._session.wait_end(self._txn, timeout_s, progress)
        return self._end
