"""Kernels that cut one row, or one band of equal rows, into affine runs.

All arithmetic on ids is in a ring: integers modulo the product of a probe's moduli, or modulo 2**64 (``modulus == 0``)
where second differences are exact. Ids are compared and subtracted as plain numbers only once they are known to lie in
``1..top``. A row is given by its bends: the columns where its second difference is not 0, and those differences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel

Ints = npt.NDArray[np.int64]

RUN_FIELDS = 6
"""Of a run: column, width, id, step per row, slope, kind."""

HOLE, COPY, CONSTANT = 0, 1, 2
"""What an element holds: neither of the others, an id, one number in every pass."""


@kernel
def ring_add(left: int, right: int, modulus: int) -> int:
    """Sum in the ring."""
    total = left + right
    if modulus != 0 and total >= modulus:
        total -= modulus
    return total


@kernel
def ring_times(factor: int, count: int, modulus: int) -> int:
    """``factor * count`` in the ring, for ``0 <= count < 2**40`` and a modulus under 2**61.

    The quotient is taken in floating point, where it is off by at most one; the wrapped difference is exact.
    """
    if count == 1 or factor == 0:
        return factor
    if modulus == 0:
        return factor * count
    quotient = int(float(factor) * float(count) / float(modulus))
    rest = factor * count - quotient * modulus
    while rest < 0:
        rest += modulus
    while rest >= modulus:
        rest -= modulus
    return rest


@kernel
def kind_of(number: int, top: int, constants: Ints) -> int:
    """What an element holds: a copy of an id in ``1..top``, a constant, or neither."""
    if 1 <= number <= top:
        return COPY
    if number > top and len(constants) > 0:
        low, high = 0, len(constants)
        while low < high:
            middle = (low + high) // 2
            if constants[middle] < number:
                low = middle + 1
            else:
                high = middle
        if low < len(constants) and constants[low] == number:
            return CONSTANT
    return HOLE


@kernel
def steps_inside(start: int, step: int, top: int) -> int:
    """How many steps from an id in ``1..top`` stay there."""
    if step > 0:
        return (top - start) // step
    if step < 0:
        return (start - 1) // -step
    return 1 << 62


@kernel
def copy_row(out: Ints, to: int, table: Ints, row: int) -> None:
    """Copy one row; a loop, since slice assignment takes seconds to compile."""
    for field in range(table.shape[1]):
        out[to, field] = table[row, field]


@kernel
def grown(table: Ints, needed: int) -> Ints:
    """A copy of a table with room for at least ``needed`` rows."""
    fields = table.shape[1]
    out = np.empty((max(needed, 2 * len(table)), fields), dtype=np.int64)
    for row in range(len(table)):
        copy_row(out, row, table, row)
    return out


@kernel
def walk(
    columns: Ints, bends: Ints, used: int, active: int, column: int, value: int, slope: int, target: int, modulus: int
) -> tuple[int, int, int]:
    """Follow a piecewise affine function from ``column`` to ``target``; returns (active, value, slope) there.

    ``bends[k]`` is the second difference at ``columns[k]``; those before index ``active`` lie at or before ``column``.
    ``slope`` is the first difference at the column. Only the first ``used`` bends count.
    """
    while active < used and columns[active] <= target:
        gap = columns[active] - column
        value = ring_add(value, ring_times(slope, gap, modulus), modulus) if gap > 0 else value
        slope = ring_add(slope, bends[active], modulus)
        value = ring_add(value, bends[active], modulus)
        column = columns[active]
        active += 1
    if target > column:
        value = ring_add(value, ring_times(slope, target - column, modulus), modulus)
    return active, value, slope


@kernel
def runs_of_row(
    columns: Ints, bends: Ints, used: int, known: int, width: int, column: int, value: int, slope: int,
    modulus: int, top: int, constants: Ints,
) -> tuple[Ints, int, bool, int, int, int]:  # fmt: skip
    """Cut one row, from a column on, into maximal affine runs of ids (or of one constant).

    A pair whose second element begins a longer run gives it up.

    Parameters
    ----------
    columns, bends, used
        Where the row bends after ``column``, as far as that is known: all bends before column ``known``.
    known, width
        If all bends are known, ``known`` is the width; if not, cutting stops before what others could change.
    column, value, slope
        Where to begin, what is there, and the first difference there. A row begins with -1, 0, 0.

    Returns
    -------
    tuple
        Runs, their number, whether some element is neither an id, nor a constant, nor 0; and column, value and slope
        where to go on.
    """
    out = np.empty((max(8, used // 2 + 4), RUN_FIELDS), dtype=np.int64)
    count = 0
    dirty = False
    active = 0
    if column < 0:
        column = columns[0] if used > 0 else known
        active, value, slope = walk(columns, bends, used, 0, column, 0, 0, column, modulus)
    while column < width:
        if known < width and (column + 4 > known or active == used):
            break
        kind = kind_of(value, top, constants)
        if kind == HOLE:
            dirty = dirty or value != 0
            target = column + 1
            if slope == 0:
                target = columns[active] if active < used else width
            if target >= width:
                column = width
                break
            active, value, slope = walk(columns, bends, used, active, column, value, slope, target, modulus)
            column = target
            continue
        length = 1
        step = 0
        if column + 1 < width:
            second, value1, slope1 = walk(columns, bends, used, active, column, value, slope, column + 1, modulus)
            same = kind_of(value1, top, constants) == kind and (kind == COPY or value1 == value)
            if same:
                step = value1 - value
                if second == used and known < width:
                    break
                end = columns[second] if second < used else width
                length = min(end - column, 1 + steps_inside(value, step, top)) if kind == COPY else end - column
                if length == 2 and end == column + 2 and column + 3 < width:
                    third, value2, slope2 = walk(
                        columns, bends, used, second, column + 1, value1, slope1, column + 2, modulus
                    )
                    if not (third < used and columns[third] == column + 3):
                        value3 = ring_add(value2, slope2, modulus)
                        if kind == COPY:
                            longer = kind_of(value2, top, constants) == COPY and kind_of(value3, top, constants) == COPY
                        else:
                            longer = value2 == value and value3 == value
                        if longer:
                            length, step = 1, 0
        if count == len(out):
            out = grown(out, count + 1)
        out[count, 0] = column
        out[count, 1] = length
        out[count, 2] = value
        out[count, 3] = 0
        out[count, 4] = step
        out[count, 5] = kind
        count += 1
        if column + length >= width:
            column = width
            break
        active, value, slope = walk(columns, bends, used, active, column, value, slope, column + length, modulus)
        column += length
    return out, count, dirty, column, value, slope


@kernel
def segments_of_band(
    columns: Ints, bends: Ints, step_bends: Ints, used: int, width: int, modulus: int
) -> tuple[Ints, int]:
    """Cut a band of rows, each ``step`` after the one above, at the columns where value or step bend.

    Like ``runs_of_row`` for two functions at once: the first row and what is added per row. Columns that are 0 in
    every row belong to no segment. Returns rows (column, width, id, step per row, slope, slope of the step).
    """
    out = np.empty((max(8, used + 4), 6), dtype=np.int64)
    count = 0
    if used == 0:
        return out, 0
    column = columns[0]
    active, value, slope = walk(columns, bends, used, 0, column, 0, 0, column, modulus)
    _, step, step_slope = walk(columns, step_bends, used, 0, column, 0, 0, column, modulus)
    while column < width:
        target = column + 1
        dead = value == 0 and step == 0
        if dead and slope == 0 and step_slope == 0:
            target = columns[active] if active < used else width
        if target < width:
            following, value1, slope1 = walk(columns, bends, used, active, column, value, slope, target, modulus)
            _, step1, step_slope1 = walk(columns, step_bends, used, active, column, step, step_slope, target, modulus)
        else:
            following, value1, slope1, step1, step_slope1 = used, 0, 0, 0, 0
        length = 1
        if not dead and (value1 != 0 or step1 != 0):
            end = columns[following] if following < used else width
            length = end - column
            if length == 2 and column + 3 < width:
                third, value2, slope2 = walk(columns, bends, used, following, target, value1, slope1, end, modulus)
                _, step2, step_slope2 = walk(
                    columns, step_bends, used, following, target, step1, step_slope1, end, modulus
                )
                if not (third < used and columns[third] == column + 3) and (value2 != 0 or step2 != 0):
                    value3 = ring_add(value2, slope2, modulus)
                    step3 = ring_add(step2, step_slope2, modulus)
                    if value3 != 0 or step3 != 0:
                        length = 1
        if not dead:
            if count == len(out):
                out = grown(out, count + 1)
            out[count, 0] = column
            out[count, 1] = length
            out[count, 2] = value
            out[count, 3] = step
            out[count, 4] = slope1 if length > 1 else 0
            out[count, 5] = step_slope1 if length > 1 else 0
            count += 1
            if column + length >= width:
                break
            if length > 1:
                target = column + length
                following, value1, slope1 = walk(
                    columns, bends, used, following, column + 1, value1, slope1, target, modulus
                )
                # Both functions bend at the same listed columns, so one index serves the two.
                before = active
                while before < used and columns[before] <= column + 1:
                    before += 1
                _, step1, step_slope1 = walk(
                    columns, step_bends, used, before, column + 1, step1, step_slope1, target, modulus
                )
        column, active = target, following
        value, slope, step, step_slope = value1, slope1, step1, step_slope1
    return out, count


@kernel
def whole_rectangle(
    number: int, step: int, slope: int, rows: int, width: int, modulus: int, top: int, constants: Ints
) -> tuple[int, int, int]:
    """Kind, step and slope as plain numbers if all of an affine rectangle is ids (or one constant), else HOLE."""
    kind = kind_of(number, top, constants)
    if kind == CONSTANT and step == 0 and (width == 1 or slope == 0):
        return CONSTANT, 0, 0
    if kind != COPY:
        return HOLE, 0, 0
    below = ring_add(number, step, modulus)
    if kind_of(below, top, constants) != COPY:
        return HOLE, 0, 0
    plain_step, plain_slope = below - number, 0
    if steps_inside(number, plain_step, top) < rows - 1:
        return HOLE, 0, 0
    if width > 1:
        right = ring_add(number, slope, modulus)
        if kind_of(right, top, constants) != COPY:
            return HOLE, 0, 0
        plain_slope = right - number
        if steps_inside(number, plain_slope, top) < width - 1:
            return HOLE, 0, 0
        if steps_inside(number + plain_slope * (width - 1), plain_step, top) < rows - 1:
            return HOLE, 0, 0
    return COPY, plain_step, plain_slope


@kernel
def runs_of_band(
    columns: Ints,
    bends: Ints,
    step_bends: Ints,
    used: int,
    rows: int,
    width: int,
    modulus: int,
    top: int,
    constants: Ints,
) -> tuple[Ints, int, bool]:
    """Cut a band of at least three rows into affine rectangles, as runs with a step per row.

    A segment whose step differs from column to column becomes single columns if it has at most as many as the band has
    rows. The last result is False, and the runs are void, if some segment is no whole rectangle of ids (or of one
    constant): then the band's rows are to be taken one by one.
    """
    segments, count = segments_of_band(columns, bends, step_bends, used, width, modulus)
    out = np.empty((max(8, count), RUN_FIELDS), dtype=np.int64)
    run_count = 0
    for k in range(count):
        column, length, number = segments[k, 0], segments[k, 1], segments[k, 2]
        step, slope, twist = segments[k, 3], segments[k, 4], segments[k, 5]
        parts = 1
        if twist != 0:
            if length > rows:
                return out, 0, False
            parts, length = length, 1
        for _ in range(parts):
            if number != 0 or step != 0 or length > 1:
                kind, plain_step, plain_slope = whole_rectangle(
                    number, step, slope, rows, length, modulus, top, constants
                )
                if kind == HOLE:
                    return out, 0, False
                if run_count == len(out):
                    out = grown(out, run_count + 1)
                out[run_count, 0] = column
                out[run_count, 1] = length
                out[run_count, 2] = number
                out[run_count, 3] = plain_step
                out[run_count, 4] = plain_slope
                out[run_count, 5] = kind
                run_count += 1
            column += 1
            number = ring_add(number, slope, modulus)
            step = ring_add(step, twist, modulus)
    return out, run_count, True
