"""What a kernel backend does: copy rows of elements from addresses to addresses, converting on the way.

    job = kernels.prepare(rows, packing=True)    # once per plan and round
    job.run()                                    # in every update

A row is ``count`` x ``length`` elements at ``source + i * source_step + j * source_stride`` that go to ``target + i *
target_step + j * target_stride``, all in bytes. One job does a whole round, for packing and assembling alike; the
rows come from `transfer_exec.binding`, which has checked them against live memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from layout_algebra.dtypes import IdArray


class RowColumn(IntEnum):
    """Columns of a bound row; int64."""

    SOURCE = 0
    SOURCE_STRIDE = 1
    SOURCE_STEP = 2
    TARGET = 3
    TARGET_STRIDE = 4
    TARGET_STEP = 5
    LENGTH = 6
    COUNT = 7
    CODE = 8


class Job(Protocol):
    """Rows made ready, to be copied as often as wanted."""

    def run(self) -> None:
        """Copy every element of every row, and return when all are written."""
        ...


class Kernels(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    def prepare(self, rows: IdArray, *, packing: bool) -> Job:
        """Make ready to copy every element of every row, converted as its code says (`transfer_exec.conversions`).

        Parameters
        ----------
        rows
            int64, shape ``(n, 9)``, columns as in `RowColumn`. No two rows write one byte, and no row reads what
            another writes.
        packing
            Targets are buffers, which are read next, and not tensors.
        """
        ...
