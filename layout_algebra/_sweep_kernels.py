"""The row sweep: sorted second differences in, affine rectangles out.

``layout_algebra.recover`` says what is computed. The state is the row's own second differences and what they change by
from row to row, at the columns where one of them is not 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._chain_kernels import CHAIN_FIELDS, PIECE_FIELDS, chain_runs, close_chains
from layout_algebra._jit import kernel
from layout_algebra._run_kernels import (
    ring_add,
    ring_times,
    runs_of_band,
    runs_of_row,
)

Ints = npt.NDArray[np.int64]


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
def bent_columns(columns: Ints, bends: Ints, used: int) -> tuple[Ints, Ints, int]:
    """The columns where a row itself bends."""
    out_columns = np.empty(used, dtype=np.int64)
    out_bends = np.empty(used, dtype=np.int64)
    count = 0
    for k in range(used):
        if bends[k] != 0:
            out_columns[count] = columns[k]
            out_bends[count] = bends[k]
            count += 1
    return out_columns, out_bends, count


@kernel
def less(left: Ints, right: Ints, used: int, modulus: int) -> Ints:
    """``left - right`` in the ring."""
    out = np.empty(used, dtype=np.int64)
    for k in range(used):
        out[k] = left[k] - right[k]
        if modulus != 0 and out[k] < 0:
            out[k] += modulus
    return out


@kernel
def sweep(
    position: Ints, value: Ints, final: bool, rows: int, width: int, modulus: int, top: int, constants: Ints,
    row: int, above: int, before: Ints, before_count: int, columns: Ints, bends: Ints, steps: Ints, used: int,
) -> tuple[Ints, int, bool, int, int, int, Ints, int, Ints, Ints, Ints, int]:  # fmt: skip
    """Rectangles of one parameter, as far as the second differences given so far tell.

    Parameters
    ----------
    position, value
        Flat places in ascending order, each once, and the second differences there, in the ring of ``modulus``.
    final
        Whether there are no others. If not, the sweep stops at the first row that others may belong to, or two rows
        before; call it again with those that are left, the others, and the state.
    rows, width
        Of the matrix.
    modulus
        Product of a probe's moduli, more than ``2 * top``; or 0 for exact second differences, modulo 2**64.
    top
        Ids are ``1..top``.
    constants
        Numbers past ``top`` that stand for constants, ascending.
    row, above, before, before_count, columns, bends, steps, used
        The state: the next row, the row that the columns are at, open chains, and the columns. It begins with 0, -1 and
        nothing else.

    Returns
    -------
    tuple
        Pieces, their number, whether some element is neither an id, nor a constant, nor 0, the entries used up, and the
        state.
    """
    out = np.empty((16, PIECE_FIELDS), dtype=np.int64)
    count = 0
    after = np.empty((len(before), CHAIN_FIELDS), dtype=np.int64)
    dirty = False
    entry, total = 0, len(position)
    while row < rows:
        if entry == total and not final:
            break
        if used == 0:
            out, count = close_chains(before, 0, before_count, out, count)
            before_count = 0
            if entry == total:
                break
            row = position[entry] // width
        if not final and position[total - 1] < (row + 2) * width:
            break
        # Bring the state to this row, unless a band that was not whole left it there.
        stop = entry
        if above < row:
            while stop < total and position[stop] < (row + 1) * width:
                stop += 1
            columns, bends, steps, used = advance(
                columns, bends, steps, used, row - above, modulus, position, value, entry, stop, width
            )
            above, entry = row, stop
        # A band is rows row, row + 1, ... whose second differences along the rows vanish from the third on.
        while stop < total and position[stop] < (row + 2) * width:
            stop += 1
        height = (position[stop] // width if stop < total else rows) - row
        row_bends = bends
        whole = height >= 3
        if whole:
            columns, bends, steps, used = advance(
                columns, bends, steps, used, 1, modulus, position, value, entry, stop, width
            )
            above, entry = row + 1, stop
            row_bends = less(bends, steps, used, modulus)
            runs, run_count, whole = runs_of_band(
                columns, row_bends, steps, used, height, width, modulus, top, constants
            )
        if not whole:
            height = 1
            row_columns, row_bends, bent = bent_columns(columns, row_bends, used)
            runs, run_count, odd, _, _, _ = runs_of_row(
                row_columns, row_bends, bent, width, width, -1, 0, 0, modulus, top, constants
            )
            dirty = dirty or odd
        at, after, after_count, out, count = chain_runs(
            before, before_count, 0, after, 0, out, count, row, height, runs, run_count
        )
        out, count = close_chains(before, at, before_count, out, count)
        before, after = after, before
        before_count = after_count
        row += height
    if final:
        out, count = close_chains(before, 0, before_count, out, count)
        before_count = 0
    return out, count, dirty, entry, row, above, before, before_count, columns, bends, steps, used
