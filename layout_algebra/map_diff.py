"""Where two source maps say different things, as ranges of parameters and what each says there.

>>> from layout_algebra.blocks import concatenate, declare, whole
>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec(name, (4, 6), "BF16") for name in ("a", "b")])
>>> left = declare(space, {"p": whole(space, "a")})
>>> right = declare(space, {"p": concatenate([whole(space, "a").take(0, 0, 3), whole(space, "b").take(0, 0, 1)])})
>>> for difference in differences(left, right):
...     print(difference)
p[3:4, :]: a[3:4, :] / b[0:1, :]

Elements are never listed: both sides are cut into runs of consecutive elements, and the runs are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layout_algebra.coverage_faults import index_text
from layout_algebra.dtypes import IdArray
from layout_algebra.source_map import EMPTY, OPAQUE, ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, natural_key

MAX_RUNS = 1 << 23
"""Parameters that need more runs than this are compared as a whole."""
MAX_RANGES = 64
"""Most ranges of one parameter that are told apart."""
MAX_STRETCHES = 1 << 14
"""Stretches of one parameter among which regular ones are sought."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two maps do not agree on.

    Attributes
    ----------
    parameter
        Its name; a checkpoint tensor's if ``kind`` is ``"checkpoint"``.
    kind
        ``"checkpoint"``, ``"parameter"`` (on one side only), ``"shape"``, ``"dtype"``, ``"ids"``, ``"depends_on"``.
    where
        The range, as numpy indexes the parameter; empty for the whole of it.
    left, right
        What either map says.
    """

    parameter: str
    kind: str
    where: str
    left: str
    right: str

    def __str__(self) -> str:
        kind = "" if self.kind == "ids" else f" ({self.kind})"
        return f"{self.parameter}{self.where}{kind}: {self.left} / {self.right}"


def differences(left: SourceMap, right: SourceMap) -> tuple[Difference, ...]:
    """Everything that two maps do not agree on, by parameter; nothing exactly if they say the same.

    If they speak of different checkpoints, those are compared and the parameters are not, since ids mean nothing then.
    """
    if left.space != right.space:
        return tuple(_of_spaces(left.space, right.space))
    out: list[Difference] = []
    for name in sorted({*left.parameters, *right.parameters}, key=natural_key):
        if name in left and name in right:
            out += _of_parameters(left.space, name, left[name], right[name])
        else:
            said = _kind(left[name] if name in left else right[name])
            out.append(Difference(name, "parameter", "", *((said, "none") if name in left else ("none", said))))
    return tuple(out)


def _kind(entry: ParameterMap) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _of_spaces(left: CheckpointSpace, right: CheckpointSpace) -> list[Difference]:
    """Tensors that are on one side only, or of another shape or dtype."""
    specs = [{spec.name: f"{spec.dtype}{list(spec.shape)}" for spec in space.specs} for space in (left, right)]
    names = sorted({*specs[0], *specs[1]}, key=natural_key)
    said = [(name, specs[0].get(name, "none"), specs[1].get(name, "none")) for name in names]
    return [Difference(name, "checkpoint", "", mine, theirs) for name, mine, theirs in said if mine != theirs]


def _of_parameters(space: CheckpointSpace, name: str, left: ParameterMap, right: ParameterMap) -> list[Difference]:
    out = []
    if left.dtype != right.dtype:
        out.append(Difference(name, "dtype", "", left.dtype, right.dtype))
    if left.shape != right.shape:
        return [*out, Difference(name, "shape", "", str(list(left.shape)), str(list(right.shape)))]
    if not (np.array_equal(left.copies.rows, right.copies.rows) and left.opaque.same_as(right.opaque)):
        out += _of_ids(space, name, left, right)
    if left.depends_on != right.depends_on:
        sides = (", ".join(each.depends_on) or "nothing" for each in (left, right))
        out.append(Difference(name, "depends_on", "", *sides))
    return out


def _of_ids(space: CheckpointSpace, name: str, left: ParameterMap, right: ParameterMap) -> list[Difference]:
    """Ranges in which two parameters of one shape differ."""
    sides = (_runs(left), _runs(right))
    mine, theirs = sides
    if mine is None or theirs is None:
        return [Difference(name, "ids", "", f"{len(left.copies)} copies", f"{len(right.copies)} other copies")]
    edges = np.unique(np.concatenate([[0, left.elements], mine[:, 0], mine[:, 0] + mine[:, 1], theirs[:, 0],
                                      theirs[:, 0] + theirs[:, 1]]))  # fmt: skip
    starts, lengths = edges[:-1], np.diff(edges)
    rows = np.column_stack([starts, lengths, *_at(mine, starts), *_at(theirs, starts)])
    table = _chains(_joined(_unequal(rows)))
    shown = []
    for start, length, number, step, other, other_step, count, stride, leap, other_leap in table[:MAX_RANGES].tolist():
        where = box_text(left.shape, start, length, stride, count)
        said_left = _source(space, length, count, number, step, leap)
        said_right = _source(space, length, count, other, other_step, other_leap)
        shown.append(Difference(name, "ids", where, said_left, said_right))
    if len(table) > MAX_RANGES:
        rest = int((table[MAX_RANGES:, 1] * table[MAX_RANGES:, 6]).sum())
        shown.append(Difference(name, "ids", f" and {rest:,} more elements", "...", "..."))
    return shown


def _runs(entry: ParameterMap) -> IdArray | None:
    """A parameter as runs (flat start, length, first id, id step), sorted; opaque elements have id -1; None if many."""
    copies = entry.copies
    along = copies.target_strides == 1
    score = np.where(along & (copies.extents > 1), copies.extents, 0)
    inner = np.where(score.any(axis=1), np.argmax(score, axis=1), -1) if len(copies) else np.empty(0, dtype=np.int64)
    each = copies.elements // np.where(inner >= 0, np.take_along_axis(copies.extents, inner[:, None], axis=1)[:, 0], 1)
    if float(each.astype(np.float64).sum()) + float(entry.opaque.runs[:, 3].sum()) > MAX_RUNS:
        return None
    flat = copies.expand(inner).rows[:, [0, 2, 1, 4]] if len(copies) else np.empty((0, 4), dtype=np.int64)
    spans = entry.opaque.intervals
    opaque = np.zeros((len(spans), 4), dtype=np.int64)
    opaque[:, 0], opaque[:, 1], opaque[:, 2] = spans[:, 0], spans[:, 1] - spans[:, 0], OPAQUE
    rows = np.concatenate([flat, opaque])
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _at(runs: IdArray, starts: IdArray) -> tuple[IdArray, IdArray]:
    """Id and id step at every flat index; 0 where nothing is claimed."""
    if not len(runs):
        return np.full(len(starts), EMPTY), np.zeros(len(starts), dtype=np.int64)
    place = np.maximum(np.searchsorted(runs[:, 0], starts, side="right") - 1, 0)
    inside = (runs[place, 0] <= starts) & (starts < runs[place, 0] + runs[place, 1])
    step = np.where(inside, runs[place, 3], 0)
    return np.where(inside, runs[place, 2] + (starts - runs[place, 0]) * step, EMPTY), step


def _unequal(rows: IdArray) -> IdArray:
    """The parts of stretches in which both sides differ; with different steps they may still meet in one element."""
    _, length, number, step, other, other_step = rows.T
    crossing = (step != other_step) & (length > 1)
    slope = np.where(crossing, step - other_step, 1)
    meet = (other - number) // slope
    meets = crossing & ((other - number) % slope == 0) & (meet >= 0) & (meet < length)
    apart = rows[~meets & ((number != other) | crossing)]
    before, after = rows[meets].copy(), rows[meets].copy()
    at = meet[meets]
    before[:, 1] = at
    after[:, 0] += at + 1
    after[:, 1] -= at + 1
    after[:, 2] += (at + 1) * after[:, 3]
    after[:, 4] += (at + 1) * after[:, 5]
    out = np.concatenate([apart, before[before[:, 1] > 0], after[after[:, 1] > 0]])
    return out[np.argsort(out[:, 0], kind="stable")]


def _joined(rows: IdArray) -> IdArray:
    """Neighbouring stretches that go on alike on both sides as one; columns start, length, then id and step twice."""
    if len(rows) < 2:
        return rows
    goes_on = rows[1:, 0] == rows[:-1, 0] + rows[:-1, 1]
    for number, step in ((2, 3), (4, 5)):
        goes_on &= rows[1:, number] == rows[:-1, number] + rows[:-1, 1] * rows[:-1, step]
        goes_on &= (rows[1:, step] == rows[:-1, step]) | (rows[1:, 1] == 1)
    heads = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    out = rows[heads].copy()
    out[:, 1] = np.add.reduceat(rows[:, 1], heads)
    return out


def _chains(rows: IdArray) -> IdArray:
    """Stretches of one kind at equal distances as one row: further columns count, distance, and ids' distances."""
    out = []
    listed = rows[:MAX_STRETCHES].tolist()
    at = 0
    while at < len(listed):
        count, gap = 1, [0] * 6
        while at + count < len(listed):
            step = [b - a for a, b in zip(listed[at + count - 1], listed[at + count], strict=True)]
            if step[1] or step[3] or step[5] or (count > 1 and step != gap):
                break
            count, gap = count + 1, step
        if count == 2:
            count, gap = 1, [0] * 6
        out.append([*listed[at], count, gap[0], gap[2], gap[4]])
        at += count
    rest = np.zeros((max(0, len(rows) - MAX_STRETCHES), 10), dtype=np.int64)
    rest[:, :6], rest[:, 6] = rows[MAX_STRETCHES:], 1
    return np.concatenate([np.array(out, dtype=np.int64).reshape(-1, 10), rest])


def _source(space: CheckpointSpace, length: int, count: int, number: int, step: int, leap: int) -> str:
    """What a side says of a chain of stretches."""
    more = f" and {count - 1} more, {leap} apart" if count > 1 else ""
    if number == OPAQUE:
        return "computed"
    if number == EMPTY:
        return "empty"
    name, first = space.locate(number)
    shape = space.spec(name).shape
    inside = first + (length - 1) * step + (count - 1) * leap < space.spec(name).elements
    if length == 1 or step == 1:
        if inside and (count == 1 or leap > 0):
            return f"{name}{box_text(shape, first, length, leap, count)}"
        return space.describe_ids(number, number + length) + (
            f" and {count - 1} more, {leap} apart" if count > 1 else ""
        )
    spread = f".flat[{first}]" if step == 0 else f".flat[{first}:{first + length * step}:{step}]"
    return f"{name}{spread}{more}"


def box_text(shape: tuple[int, ...], start: int, length: int, stride: int, count: int) -> str:
    """Stretches at equal distances as numpy indexes them.

    >>> box_text((4, 6), 2, 3, 6, 4), box_text((4, 6), 6, 6, 12, 2)
    ('[:, 2:5]', '[1:2, :] and 1 more, 12 apart')
    """
    if count == 1:
        return index_text(shape, start, start + length)
    width = shape[-1] if shape else 1
    row, column = divmod(start, width)
    if len(shape) == 2 and stride == width and column + length <= width:
        columns = ":" if length == width else f"{column}:{column + length}"
        rows = ":" if count == shape[0] else f"{row}:{row + count}"
        return f"[{rows}, {columns}]"
    return f"{index_text(shape, start, start + length)} and {count - 1} more, {stride} apart"
