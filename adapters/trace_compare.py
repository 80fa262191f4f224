"""Two source maps of one worker side by side: the probe's, which saw values, and the trace's, which saw operations.

>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (6,), "F32")])
>>> probed = SourceMap.from_ids(space, {"p": np.array([1, 2, 3, 0])})
>>> traced = SourceMap.from_ids(space, {"p": np.array([1, 2, 4, -1])})
>>> for one in differences(probed, traced):
...     print(one.contradiction, one.text)
True 1 elements are copies of different checkpoint elements, such as element 2: w[2:3] by the probe, w[3:4] by the trace
False 1 elements are empty by the probe and opaque by the trace
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import ProbeError
from layout_algebra.recover import without
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import OPAQUE, ParameterMap, SourceMap

_SHOWN = 8
_CHUNK_ELEMENTS = 1 << 25
_WORDS = ("opaque", "empty", "copies")


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two maps differ about one parameter.

    Attributes
    ----------
    parameter
        Its name.
    contradiction
        Whether the maps cannot both be right: two copies of different elements, or a copy where the other map says
        that nothing was loaded. An opaque element in one of them is none: that map only says less.
    text
        What differs, with a count of elements.
    """

    parameter: str
    contradiction: bool
    text: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"


def differences(probed: SourceMap, traced: SourceMap) -> tuple[Difference, ...]:
    """Everything in which a probe's and a trace's map differ, by parameter in natural order.

    Raises
    ------
    ProbeError
        If they are not about the same parameters.
    """
    if probed.parameters != traced.parameters:
        odd = sorted(set(probed.parameters) ^ set(traced.parameters))
        raise ProbeError(f"{odd[0]}: only one of two maps knows it; expected maps of the same worker")
    return tuple(
        Difference(name, contradiction, text)
        for name in probed.parameters
        for contradiction, text in _between(probed, traced, name)
    )


def probe_against_trace(
    probe: Callable[[], SourceMap], trace: Callable[[], SourceMap], note: Callable[[str], None]
) -> SourceMap:
    """The probe's map, after comparing it with the trace's.

    Parameters
    ----------
    probe, trace
        Find the maps; both are always run, the trace first.
    note
        Told about what differs without contradiction, and about a loader that the trace cannot follow.

    Raises
    ------
    ProbeError
        If the maps contradict each other, naming parameters; or what ``probe`` raised.
    """
    traced: SourceMap | None = None
    try:
        traced = trace()
    except ProbeError as error:
        note(f"not compared, since the loader could not be traced: {error}")
    probed = probe()
    found = differences(probed, traced) if traced is not None else ()
    for one in found:
        if not one.contradiction:
            note(str(one))
    wrong = [str(one) for one in found if one.contradiction]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ProbeError(
            f"the probe and the trace contradict each other: {'; '.join(wrong[:_SHOWN])}{more}. Expected one map. A "
            "loader that does other things from call to call, or works outside of torch, explains it; else it is a "
            "fault of this library"
        )
    return probed


def _between(probed: SourceMap, traced: SourceMap, name: str) -> list[tuple[bool, str]]:
    """Whether each way of differing is a contradiction, and its text."""
    left, right = probed[name], traced[name]
    widths = dtype_of(left.dtype).bits, dtype_of(right.dtype).bits
    if left.shape != right.shape or widths[0] != widths[1]:
        return [(True, f"{left.dtype} {left.shape} by the probe, {right.dtype} {right.shape} by the trace")]
    if np.array_equal(left.copies.rows, right.copies.rows) and left.opaque.same_as(right.opaque):
        return []
    apart = 0
    example: tuple[int, int, int] | None = None
    kinds = np.zeros((3, 3), dtype=np.int64)
    for first in range(0, left.elements, _CHUNK_ELEMENTS):
        last = min(first + _CHUNK_ELEMENTS, left.elements)
        one, two = _ids(left, first, last), _ids(right, first, last)
        np.add.at(kinds, (np.sign(one) + 1, np.sign(two) + 1), 1)
        both = np.flatnonzero((one > 0) & (two > 0) & (one != two))
        apart += len(both)
        if len(both) and example is None:
            example = first + int(both[0]), int(one[both[0]]), int(two[both[0]])
    out = []
    if example is not None:
        where = [probed.space.describe_ids(number, number + 1) for number in example[1:]]
        text = f"{apart:,} elements are copies of different checkpoint elements, such as element {example[0]}: "
        out.append((True, f"{text}{where[0]} by the probe, {where[1]} by the trace"))
    for here, there in ((1, 0), (0, 1), (1, -1), (-1, 1), (0, -1), (-1, 0)):
        count = int(kinds[here + 1, there + 1])
        if count:
            text = f"{count:,} elements are {_WORDS[here + 1]} by the probe and {_WORDS[there + 1]} by the trace"
            out.append((OPAQUE not in (here, there), text))
    return out


def _ids(entry: ParameterMap, first: int, last: int) -> IdArray:
    """A stretch of a parameter's elements, as ``SourceMap.ids`` lists them."""
    outside = np.array([[0, first], [last, entry.elements]], dtype=np.int64)
    rows = without(entry.copies, outside[outside[:, 1] > outside[:, 0]], entry.shape).rows.copy()
    rows[:, 0] -= first
    out = np.zeros(last - first, dtype=np.int64)
    CopyTable(rows).write_ids(out)
    out[entry.opaque.intersect(RunTable.from_intervals([[first, last]])).ids() - first] = OPAQUE
    return out
