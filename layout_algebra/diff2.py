"""Second differences of one parameter's code numbers: what a probe pass leaves behind.

Seen as a matrix, an affine copy is a rectangle on which ids are affine, and its second differences along rows and
columns vanish everywhere but near its border, at most 16 places. Taken modulo a pass's modulus the same holds, since
code numbers are linear in the id. So a parameter of any size leaves a short list.

>>> from layout_algebra.residues import FLOAT_CODES, Pass
>>> one = Pass(1919, 1)
>>> ids = np.arange(1, 101).reshape(10, 10)
>>> memory = FLOAT_CODES.table("BF16", one)[ids % 1919]
>>> found = encode(memory, (10, 10), FLOAT_CODES.decoding("BF16"), one)
>>> [(int(p), int(v)) for p, v in zip(*found.entries())]
[(0, 1), (10, 9), (11, 1910)]

Elements that hold no code count as 0 there and are listed apart, with their bits, in ``outside``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.residues import Decoding, Pass

DENSE_LIMIT_BYTES = 1 << 28


def view_of(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's shape as (rows, columns): columns are its last axis longer than one.

    >>> view_of((4, 3, 2, 1)), view_of((7,)), view_of(()), view_of((3, 0))
    ((12, 2), (1, 7), (1, 1), (0, 1))
    """
    extents = [extent for extent in shape if extent != 1]
    if 0 in extents:
        return 0, 1
    return math.prod(extents[:-1]), extents[-1] if extents else 1


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One stretch of flat elements ``start .. stop - 1`` of a parameter under one pass.

    All passes cut a parameter of one size into the same chunks.
    """

    start: int
    stop: int

    def outside(self) -> IdArray:
        """Elements that hold no code of this pass, as maximal runs of equal bits within the chunk.

        Returns
        -------
        ndarray
            int64, shape ``(n, 3)``: first flat index, index past the last, the element's bits (as a signed number
            for 64-bit elements); ascending.
        """
        raise NotImplementedError

    def is_outside(self) -> npt.NDArray[np.bool_]:
        """For every element of the chunk whether it holds no code; shape ``(stop - start,)``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Diff2:
    """Second differences of one parameter under one pass, and the elements that hold no code.

    Attributes
    ----------
    shape
        The parameter's.
    of_pass
        The pass whose codes were read.
    chunks
        In order; together they cover the parameter.
    """

    shape: tuple[int, ...]
    of_pass: Pass
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held by the lists."""
        raise NotImplementedError

    def entries(self) -> tuple[IdArray, IdArray]:
        """Flat positions, ascending, and second differences of ``id mod modulus`` there, in ``1 .. modulus - 1``."""
        raise NotImplementedError

    def outside(self) -> IdArray:
        """``Chunk.outside`` of all chunks, joined; int64, shape ``(n, 3)``. 24 bytes a run of equal bits."""
        raise NotImplementedError


def encode(
    memory: npt.NDArray[np.generic],
    shape: Sequence[int],
    decoding: Decoding,
    of_pass: Pass,
    *,
    executor: Executor | None = None,
    name: str = "parameter",
    dense_limit_bytes: int = DENSE_LIMIT_BYTES,
) -> Diff2:
    """Read one parameter after one pass.

    Parameters
    ----------
    memory
        Its elements' bits in row-major order: a C-contiguous array, of any shape, of ``decoding.storage`` or of
        another type of that width (a torch bfloat16 tensor viewed as int16 will do). Read only, never kept.
    shape
        The parameter's shape.
    decoding
        ``codebook.decoding(dtype of the parameter)``.
    of_pass
        The pass that was fed.
    executor
        Where chunks run side by side; the kernels release the GIL. By default this thread does all.
    name
        The parameter's name, for the message of a refusal.
    dense_limit_bytes
        A chunk whose lists would outgrow a plain array is kept as one, 2 bytes an element (or the element's own
        bytes where the bits without a code are irregular). This bounds their sum.

    Raises
    ------
    ProbeError
        If plain arrays would need more than ``dense_limit_bytes``: the content is too irregular to keep.
    """
    raise NotImplementedError
