"""Kernels of the row sweep: sorted second differences in, affine rectangles out.

All arithmetic on ids is in a ring: integers modulo the product of a probe's moduli, or modulo 2**64 (``modulus == 0``)
where second differences are exact. Ids are compared and subtracted as plain numbers only once they are known to lie in
``1..top``. ``layout_algebra.recover`` says what is computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import inlined, kernel

Ints = npt.NDArray[np.int64]

# A piece: first row, first column, rows, columns, id, step per row, step per column, kind.
PIECE_FIELDS = 8
HOLE, COPY, CONSTANT = 0, 1, 2

# An open chain of equal runs on successive rows. FIRST..STEP describe the affine stretch being grown, whose last id is
# LAST; LEAD tells that the row before it holds LEAD_ID and may yet join the stretch's first row as a pair.
_COLUMN, _WIDTH, _SLOPE, _KIND, _FIRST, _ROWS, _ID, _STEP, _LAST, _LEAD, _LEAD_ID = range(11)
_CHAIN_FIELDS = 11


@inlined
def ring_add(left: int, right: int, modulus: int) -> int:
    """Sum in the ring."""
    total = left + right
    if modulus != 0 and total >= modulus:
        total -= modulus
    return total


@inlined
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


@inlined
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


@inlined
def steps_inside(start: int, step: int, top: int) -> int:
    """How many steps from an id in ``1..top`` stay there."""
    if step > 0:
        return (top - start) // step
    if step < 0:
        return (start - 1) // -step
    return 1 << 62


@inlined
def emit(
    out: Ints, count: int, row: int, column: int, rows: int, width: int, number: int, step: int, slope: int, kind: int
) -> int:
    """Append one piece; the caller has made room."""
    out[count, 0] = row
    out[count, 1] = column
    out[count, 2] = rows
    out[count, 3] = width
    out[count, 4] = number
    out[count, 5] = step if rows > 1 else 0
    out[count, 6] = slope
    out[count, 7] = kind
    return count + 1


@inlined
def close_chain(chain: Ints, out: Ints, count: int) -> int:
    """Emit what an open chain still holds: at most two pieces."""
    column, width, slope, kind = chain[_COLUMN], chain[_WIDTH], chain[_SLOPE], chain[_KIND]
    first, rows, number, step = chain[_FIRST], chain[_ROWS], chain[_ID], chain[_STEP]
    if chain[_LEAD] != 0:
        lead = chain[_LEAD_ID]
        count = emit(out, count, first - 1, column, 2, width, lead, number - lead, slope, kind)
        return emit(out, count, first + 1, column, 1, width, chain[_LAST], 0, slope, kind)
    return emit(out, count, first, column, rows, width, number, step, slope, kind)


@inlined
def grow_chain(chain: Ints, number: int, out: Ints, count: int) -> int:
    """Append the id of one more row to a chain; emits at most one piece.

    A stretch is cut where its step changes. A pair whose second row begins a longer stretch gives it up.
    """
    last, rows = chain[_LAST], chain[_ROWS]
    column, width, slope, kind = chain[_COLUMN], chain[_WIDTH], chain[_SLOPE], chain[_KIND]
    chain[_LAST] = number
    if rows == 1:
        chain[_STEP] = number - last
        chain[_ROWS] = 2
    elif number - last == chain[_STEP]:
        if chain[_LEAD] != 0:
            count = emit(out, count, chain[_FIRST] - 1, column, 1, width, chain[_LEAD_ID], 0, slope, kind)
            chain[_LEAD] = 0
        chain[_ROWS] = rows + 1
    elif rows > 2:
        count = emit(out, count, chain[_FIRST], column, rows, width, chain[_ID], chain[_STEP], slope, kind)
        chain[_FIRST] += rows
        chain[_ROWS] = 1
        chain[_ID] = number
    else:
        if chain[_LEAD] != 0:
            lead = chain[_LEAD_ID]
            count = emit(out, count, chain[_FIRST] - 1, column, 2, width, lead, chain[_ID] - lead, slope, kind)
            chain[_LEAD] = 0
        else:
            chain[_LEAD] = 1
            chain[_LEAD_ID] = chain[_ID]
        chain[_FIRST] += 1
        chain[_ID] = last
        chain[_STEP] = number - last
    return count


@inlined
def push(
    before: Ints, before_count: int, at: int, after: Ints, after_count: int, out: Ints, count: int,
    row: int, rows: int, column: int, width: int, number: int, step: int, slope: int, kind: int,
) -> tuple[int, int]:  # fmt: skip
    """Add a run that repeats over ``rows`` rows, 1 or at least 3, to the chain above it or to a new one.

    ``before`` holds the chains that reach the row above, by column; those from ``at`` on are not matched yet. Pushes
    come in order of columns. Returns the new ``at`` and ``count``; ``after`` grows by one chain.
    """
    while at < before_count and before[at, _COLUMN] < column:
        count = close_chain(before[at], out, count)
        at += 1
    chain = after[after_count]
    joined = False
    if at < before_count and before[at, _COLUMN] == column:
        above = before[at]
        joined = above[_WIDTH] == width and above[_SLOPE] == slope and above[_KIND] == kind
        if kind == CONSTANT and above[_ID] != number:
            joined = False
        if joined:
            chain[:] = above
        else:
            count = close_chain(above, out, count)
        at += 1
    done = 0
    if not joined:
        chain[_COLUMN] = column
        chain[_WIDTH] = width
        chain[_SLOPE] = slope
        chain[_KIND] = kind
        chain[_FIRST] = row
        chain[_ROWS] = 1
        chain[_ID] = number
        chain[_STEP] = 0
        chain[_LAST] = number
        chain[_LEAD] = 0
        chain[_LEAD_ID] = 0
        done = 1
    while done < rows and done < 3:
        count = grow_chain(chain, number + done * step, out, count)
        done += 1
    if done < rows:
        # Three rows of one step fix the stretch: the others only make it longer.
        chain[_ROWS] += rows - done
        chain[_LAST] += (rows - done) * step
    return at, count


@kernel
def grown(table: Ints, needed: int) -> Ints:
    """A copy of a table with room for at least ``needed`` rows."""
    out = np.empty((max(needed, 2 * len(table)), table.shape[1]), dtype=np.int64)
    out[: len(table)] = table
    return out


@inlined
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
    columns: Ints, bends: Ints, used: int, width: int, modulus: int, top: int, constants: Ints
) -> tuple[Ints, int, bool]:
    """Cut one row into maximal affine runs of ids (or of one constant).

    A pair whose second element begins a longer run gives it up. Returns rows (column, width, id, slope, kind), their
    number, and whether some element is neither an id, nor a constant, nor 0.
    """
    out = np.empty((max(8, used + 4), 5), dtype=np.int64)
    count = 0
    dirty = False
    column = active = value = slope = 0
    if used > 0:
        column = columns[0]
        active, value, slope = walk(columns, bends, used, 0, column, 0, 0, column, modulus)
    else:
        column = width
    while column < width:
        kind = kind_of(value, top, constants)
        if kind == HOLE:
            dirty = dirty or value != 0
            target = column + 1
            if slope == 0:
                target = columns[active] if active < used else width
            if target >= width:
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
        out[count, 3] = step
        out[count, 4] = kind
        count += 1
        if column + length >= width:
            break
        active, value, slope = walk(columns, bends, used, active, column, value, slope, column + length, modulus)
        column += length
    return out, count, dirty


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


@inlined
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


@inlined
def runs_of_line(
    number: int, slope: int, width: int, modulus: int, top: int, constants: Ints
) -> tuple[Ints, int, bool]:
    """Runs of one affine row: ``runs_of_row`` with bends at its first two columns only."""
    columns = np.empty(2, dtype=np.int64)
    bends = np.empty(2, dtype=np.int64)
    columns[0], columns[1] = 0, 1
    bends[0] = number
    bends[1] = ring_add(slope, modulus - number if modulus != 0 else -number, modulus)
    return runs_of_row(columns, bends, 2 if width > 1 else 1, width, modulus, top, constants)


@kernel
def advance(
    columns: Ints, bends: Ints, steps: Ints, used: int, rows: int, modulus: int,
    position: Ints, value: Ints, start: int, stop: int, width: int,
) -> tuple[Ints, Ints, Ints, int]:  # fmt: skip
    """Move the column state down by ``rows`` rows and apply the second differences listed for the row reached.

    ``bends`` are the row's own second differences, ``steps`` what they changed by since the row above; columns where
    both are 0 are dropped.
    """
    size = used + stop - start
    new_columns = np.empty(size, dtype=np.int64)
    new_bends = np.empty(size, dtype=np.int64)
    new_steps = np.empty(size, dtype=np.int64)
    out = 0
    old, entry = 0, start
    while old < used or entry < stop:
        column = columns[old] if old < used else width
        bend = step = 0
        if entry < stop:
            column = min(column, position[entry] % width)
        if old < used and columns[old] == column:
            step = steps[old]
            bend = bends[old]
            if rows > 1:
                bend = ring_add(bend, ring_times(step, rows - 1, modulus), modulus)
            old += 1
        if entry < stop and position[entry] % width == column:
            step = ring_add(step, value[entry], modulus)
            entry += 1
        bend = ring_add(bend, step, modulus)
        if bend != 0 or step != 0:
            new_columns[out] = column
            new_bends[out] = bend
            new_steps[out] = step
            out += 1
    return new_columns, new_bends, new_steps, out


@kernel
def sweep(
    position: Ints, value: Ints, rows: int, width: int, modulus: int, top: int, constants: Ints
) -> tuple[Ints, int, bool]:
    """All rectangles of one parameter.

    ``position`` holds flat places in ascending order, each once, ``value`` the second differences there. Returns
    pieces (``PIECE_FIELDS`` columns), their number, and whether some element is neither an id, a constant, nor 0.
    """
    out = np.empty((16, PIECE_FIELDS), dtype=np.int64)
    count = 0
    before = np.empty((8, _CHAIN_FIELDS), dtype=np.int64)
    after = np.empty((8, _CHAIN_FIELDS), dtype=np.int64)
    inner = np.empty((8, _CHAIN_FIELDS), dtype=np.int64)
    spare = np.empty((8, _CHAIN_FIELDS), dtype=np.int64)
    before_count = 0
    dirty = False
    columns = np.empty(0, dtype=np.int64)
    bends = np.empty(0, dtype=np.int64)
    steps = np.empty(0, dtype=np.int64)
    used = 0
    entry, total = 0, len(position)
    at_row = -1
    row = 0
    while True:
        if used == 0:
            if before_count > 0:
                out = grown(out, count + 2 * before_count) if count + 2 * before_count > len(out) else out
                for chain in range(before_count):
                    count = close_chain(before[chain], out, count)
                before_count = 0
            if entry == total:
                break
            row = position[entry] // width
        if row >= rows:
            break
        stop = entry
        while stop < total and position[stop] < (row + 1) * width:
            stop += 1
        columns, bends, steps, used = advance(
            columns, bends, steps, used, row - at_row, modulus, position, value, entry, stop, width
        )
        at_row = row
        entry = stop
        # A band is rows row, row + 1, ... whose second differences along the rows vanish from the third on.
        while stop < total and position[stop] < (row + 2) * width:
            stop += 1
        band_stop = position[stop] // width if stop < total else rows
        at = after_count = 0
        if band_stop - row >= 3:
            columns, bends, steps, used = advance(
                columns, bends, steps, used, 1, modulus, position, value, entry, stop, width
            )
            at_row = row + 1
            entry = stop
            height = band_stop - row
            first_bends = np.empty(used, dtype=np.int64)
            for k in range(used):
                back = modulus - steps[k] if modulus != 0 and steps[k] != 0 else -steps[k]
                first_bends[k] = ring_add(bends[k], back, modulus)
            segments, segment_count = segments_of_band(columns, first_bends, steps, used, width, modulus)
            for k in range(segment_count):
                column, length, number, step, slope, twist = segments[k]
                parts = 1
                if twist != 0 and length <= height:
                    # Steps differ along the row: as many single columns, or rows below, whichever are fewer.
                    parts, length = length, 1
                for part in range(parts):
                    if part > 0:
                        column += 1
                        number = ring_add(number, slope, modulus)
                        step = ring_add(step, twist, modulus)
                    if number == 0 and step == 0 and length == 1:
                        continue
                    kind, plain_step, plain_slope = HOLE, 0, 0
                    if twist == 0 or parts > 1:
                        kind, plain_step, plain_slope = whole_rectangle(
                            number, step, slope, height, length, modulus, top, constants
                        )
                    room = count + 2 * (before_count - at) + 8
                    out = grown(out, room) if room > len(out) else out
                    if kind != HOLE:
                        after = grown(after, after_count + 1) if after_count == len(after) else after
                        at, count = push(
                            before, before_count, at, after, after_count, out, count,
                            row, height, column, length, number, plain_step, plain_slope, kind,
                        )  # fmt: skip
                        after_count += 1
                        continue
                    # Row by row: an edge of it is no id, or its slope differs from row to row.
                    inner_count = 0
                    line, line_slope = number, slope
                    for line_row in range(row, band_stop):
                        runs, run_count, odd = runs_of_line(line, line_slope, length, modulus, top, constants)
                        dirty = dirty or odd
                        inner_at = spare_count = 0
                        spare = grown(spare, run_count) if run_count > len(spare) else spare
                        room = count + 2 * (before_count - at) + 2 * inner_count + 8 * (run_count + 1)
                        out = grown(out, room) if room > len(out) else out
                        for r in range(run_count):
                            run = runs[r]
                            if line_row == row:
                                at, count = push(
                                    before, before_count, at, spare, spare_count, out, count,
                                    row, 1, column + run[0], run[1], run[2], 0, run[3], run[4],
                                )  # fmt: skip
                            else:
                                inner_at, count = push(
                                    inner, inner_count, inner_at, spare, spare_count, out, count,
                                    line_row, 1, column + run[0], run[1], run[2], 0, run[3], run[4],
                                )  # fmt: skip
                            spare_count += 1
                        for chain in range(inner_at, inner_count):
                            count = close_chain(inner[chain], out, count)
                        inner, spare = spare, inner
                        inner_count = spare_count
                        line = ring_add(line, step, modulus)
                        line_slope = ring_add(line_slope, twist, modulus)
                    after = grown(after, after_count + inner_count) if after_count + inner_count > len(after) else after
                    after[after_count : after_count + inner_count] = inner[:inner_count]
                    after_count += inner_count
            # On to the band's last row; what is listed for the next row is applied there.
            if height > 2:
                for k in range(used):
                    bends[k] = ring_add(bends[k], ring_times(steps[k], height - 2, modulus), modulus)
            at_row = band_stop - 1
            row = band_stop
        else:
            bent = 0
            row_columns = np.empty(used, dtype=np.int64)
            row_bends = np.empty(used, dtype=np.int64)
            for k in range(used):
                if bends[k] != 0:
                    row_columns[bent] = columns[k]
                    row_bends[bent] = bends[k]
                    bent += 1
            runs, run_count, odd = runs_of_row(row_columns, row_bends, bent, width, modulus, top, constants)
            dirty = dirty or odd
            after = grown(after, run_count) if run_count > len(after) else after
            room = count + 2 * before_count + 8 * (run_count + 1)
            out = grown(out, room) if room > len(out) else out
            for r in range(run_count):
                run = runs[r]
                at, count = push(
                    before, before_count, at, after, after_count, out, count,
                    row, 1, run[0], run[1], run[2], 0, run[3], run[4],
                )  # fmt: skip
                after_count += 1
            row += 1
        room = count + 2 * (before_count - at)
        out = grown(out, room) if room > len(out) else out
        for chain in range(at, before_count):
            count = close_chain(before[chain], out, count)
        before, after = after, before
        before_count = after_count
    room = count + 2 * before_count
    out = grown(out, room) if room > len(out) else out
    for chain in range(before_count):
        count = close_chain(before[chain], out, count)
    return out, count, dirty
