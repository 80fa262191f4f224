"""What a kernel backend does: copy rows of elements from addresses to addresses, converting on the way.

A row is ``count`` x ``length`` elements at ``source + i * source_step + j * source_stride`` that go to ``target + i *
target_step + j * target_stride``, all in bytes. One call does a whole round, for packing and assembling alike; the
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


class Kernels(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    def copy_rows(self, rows: IdArray) -> None:
        """Copy every element of every row, converted as its code says (`transfer_exec.conversions`).

        Parameters
        ----------
        rows
            int64, shape ``(n, 9)``, columns as in `RowColumn`. No two rows write one byte, and no row reads what
            another writes.
        """
        ...
