"""Hypothesis strategies that several test files share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Ids = npt.NDArray[np.int64]


@st.composite
def overlapping_rectangles(draw: st.DrawFn, most_rows: int = 9, most_columns: int = 9) -> Ids:
    """A matrix of ids painted with affine rectangles, one over another, some of them holes; widths of one included."""
    rows, columns = draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    ids = np.zeros((rows, columns), dtype=np.int64)
    for _ in range(draw(st.integers(0, 5))):
        top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        height, width = draw(st.integers(1, rows - top)), draw(st.integers(1, columns - left))
        first, step, slope = (
            draw(st.integers(0, 60)),
            draw(st.integers(-9, 9)),
            draw(st.sampled_from([1, 1, 0, 2, -1, 7])),
        )
        block = first + step * np.arange(height)[:, None] + slope * np.arange(width)
        ids[top : top + height, left : left + width] = np.maximum(block, 0)
    return ids


@st.composite
def arbitrary_ids(draw: st.DrawFn, most_rows: int = 7, most_columns: int = 7) -> Ids:
    """A matrix of unrelated small ids and holes, or a permutation."""
    rows, columns = draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    size = rows * columns
    if draw(st.booleans()):
        listed = draw(st.permutations(range(1, size + 1)))
    else:
        listed = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    return np.array(listed, dtype=np.int64).reshape(rows, columns)


@st.composite
def strided_views(draw: st.DrawFn) -> Ids:
    """A view of a tensor as a loader might cut it: axes permuted, sliced with steps of either sign, repeated."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    first = draw(st.integers(1, 100))
    tensor = np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(shape)
    view = tensor.transpose(draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(None, None, draw(st.sampled_from([1, 1, 2, -1, -2]))) for _ in shape)]
    if draw(st.booleans()):
        view = np.broadcast_to(view, (draw(st.integers(1, 4)), *view.shape))
    return np.ascontiguousarray(view)


def id_matrices() -> st.SearchStrategy[Ids]:
    """Any of the above."""
    return st.one_of(overlapping_rectangles(), arbitrary_ids(), strided_views())
