"""Kernels by where a tensor is: a worker's rows on its devices and on the host, each run where they are.

Buffers are memory that all of them reach. A row's tensor is told by its address.

>>> import numpy as np
>>> from transfer_exec.kernels.cpu import CpuKernels
>>> from transfer_exec.kernels.reference import ReferenceKernels
>>> here, there, buffer = np.arange(4, dtype=np.uint8), np.arange(4, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
>>> spans = np.array([[there.ctypes.data, there.ctypes.data + 4]])
>>> kernels = PlacedKernels(CpuKernels(), [Placed(spans, ReferenceKernels())])
>>> rows = np.array([[tensor.ctypes.data, 1, 0, buffer.ctypes.data + 4 * k, 1, 0, 4, 1, 0]
...                  for k, tensor in enumerate((here, there))])
>>> kernels.prepare(rows, packing=True).run()
>>> kernels.name, buffer.tolist()
('cpu+reference', [0, 1, 2, 3, 0, 1, 2, 3])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import ProgramError
from transfer_exec.kernels.base import Job, Kernels, RowColumn


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Kernels of one device.

    Attributes
    ----------
    spans
        Addresses of its tensors, half-open: int64, shape ``(n, 2)``. Spans of all devices are disjoint.
    kernels
        That move them.
    """

    spans: IdArray
    kernels: Kernels


class PlacedKernels:
    """A backend that hands every row to the kernels of its tensor's place.

    Parameters
    ----------
    host
        For rows whose tensor is on no device; None where buffers are out of the processor's reach.
    placed
        The devices.
    """

    def __init__(self, host: Kernels | None, placed: Sequence[Placed]) -> None:
        self._kernels = (host, *(each.kernels for each in placed))
        spans = np.concatenate([np.empty((0, 2), dtype=np.int64), *(each.spans for each in placed)])
        owner = np.repeat(np.arange(len(placed)) + 1, [len(each.spans) for each in placed])
        order = np.argsort(spans[:, 0], kind="stable")
        self._spans, self._owner = spans[order], owner[order]

    @property
    def name(self) -> str:
        """Names of all, for reports."""
        return "+".join(dict.fromkeys(each.name for each in self._kernels if each is not None))

    def prepare(self, rows: IdArray, *, packing: bool) -> Job:
        """See `Kernels.prepare`.

        Raises
        ------
        ProgramError
            If rows of the host's memory meet buffers that are out of its reach.
        """
        owner = self._owner_of(rows[:, RowColumn.SOURCE if packing else RowColumn.TARGET])
        jobs = []
        for one in np.unique(owner).tolist():
            kernels = self._kernels[one]
            if kernels is None:
                raise ProgramError(
                    f"{int((owner == 0).sum())} of {len(rows)} rows are of tensors in memory of the host, which cannot "
                    "meet buffers on a device; use a transport whose buffers are on the host"
                )
            jobs.append(kernels.prepare(rows[owner == one], packing=packing))
        return jobs[0] if len(jobs) == 1 else _Jobs(tuple(jobs))

    def _owner_of(self, addresses: IdArray) -> IdArray:
        """Numbers of kernels: 0 for the host's."""
        if not len(self._spans):
            return np.zeros(len(addresses), dtype=np.int64)
        at = np.searchsorted(self._spans[:, 0], addresses, side="right") - 1
        inside = (at >= 0) & (addresses < self._spans[at, 1])
        return np.where(inside, self._owner[at], 0)


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Rows of several places."""

    jobs: tuple[Job, ...]

    def run(self) -> None:
        """Copy every element of every row, and return when all are written."""
        for job in self.jobs:
            job.run()
