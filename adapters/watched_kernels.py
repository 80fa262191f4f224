"""Kernels that note whether they have run: whether a rollout's parameters were written since it was last whole."""

from __future__ import annotations

from dataclasses import dataclass

from layout_algebra.dtypes import IdArray
from transfer_exec.kernels.base import Job, Kernels
from transfer_exec.kernels.cpu import CpuKernels

__all__ = ["WatchedKernels"]


class WatchedKernels:
    """A worker's kernels, and whether they have copied anything: into parameters, on a rollout.

    Attributes
    ----------
    ran
        Whether anything was copied since somebody set it to False.
    """

    def __init__(self) -> None:
        self._kernels: Kernels = CpuKernels()
        self.ran = False

    def use(self, kernels: Kernels) -> None:
        """Take others, for other tensors."""
        self._kernels = kernels

    @property
    def name(self) -> str:
        """What reports say."""
        return self._kernels.name

    def prepare(self, rows: IdArray, *, packing: bool) -> Job:
        """Rows that are noted when they run."""
        job = self._kernels.prepare(rows, packing=packing)
        return _WatchedJob(self, job) if len(rows) else job

    def before_run(self) -> None:
        """Parameters are about to be written, by a kernel or by reading into them."""
        self.ran = True


@dataclass(frozen=True, slots=True, eq=False)
class _WatchedJob:
    kernels: WatchedKernels
    job: Job

    def run(self) -> None:
        self.kernels.before_run()
        self.job.run()
