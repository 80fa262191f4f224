"""Kernels that put runs of successive rows together: what the sweep emits.

A chain is a run that repeats with one width, slope and kind on successive rows; its ids, one a row, are cut into affine
stretches as they come. Open chains are kept by column.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from layout_algebra._jit import kernel
from layout_algebra._run_kernels import CONSTANT, copy_row, grown

Ints = npt.NDArray[np.int64]

PIECE_FIELDS = 8
"""Of a piece: first row, first column, rows, columns, id, step per row, slope, kind."""

CHAIN_FIELDS = 11
# FIRST..STEP describe the affine stretch being grown, whose last id is LAST; LEAD tells that the row before it holds
# LEAD_ID and may yet take the stretch's first row as the second of a pair.
_COLUMN, _WIDTH, _SLOPE, _KIND, _FIRST, _ROWS, _ID, _STEP, _LAST, _LEAD, _LEAD_ID = range(CHAIN_FIELDS)


@kernel
def emit(out: Ints, count: int, chain: Ints, row: int, rows: int, number: int, step: int) -> int:
    """Append one stretch of a chain; the caller has made room."""
    piece = out[count]
    piece[0] = row
    piece[1] = chain[_COLUMN]
    piece[2] = rows
    piece[3] = chain[_WIDTH]
    piece[4] = number
    piece[5] = step
    piece[6] = chain[_SLOPE]
    piece[7] = chain[_KIND]
    return count + 1


@kernel
def close_chains(chains: Ints, start: int, stop: int, out: Ints, count: int) -> tuple[Ints, int]:
    """Emit what some open chains still hold: at most two pieces each."""
    if count + 2 * (stop - start) > len(out):
        out = grown(out, count + 2 * (stop - start))
    for k in range(start, stop):
        chain = chains[k]
        first, rows, number, step = chain[_FIRST], chain[_ROWS], chain[_ID], chain[_STEP]
        if chain[_LEAD] != 0:
            lead = chain[_LEAD_ID]
            count = emit(out, count, chain, first - 1, 2, lead, number - lead)
            first, rows, number = first + 1, 1, chain[_LAST]
        count = emit(out, count, chain, first, rows, number, step if rows > 1 else 0)
    return out, count


@kernel
def grow_chain(chain: Ints, number: int, out: Ints, count: int) -> int:
    """Append the id of one more row to a chain; emits at most one piece, for which there is room.

    A stretch is cut where its step changes. A pair whose second row begins a longer stretch gives it up.
    """
    last, rows, first, lead = chain[_LAST], chain[_ROWS], chain[_FIRST], chain[_LEAD_ID]
    step = number - last
    chain[_LAST] = number
    if rows == 1:
        chain[_STEP] = step
        chain[_ROWS] = 2
    elif step == chain[_STEP]:
        if chain[_LEAD] != 0:
            count = emit(out, count, chain, first - 1, 1, lead, 0)
            chain[_LEAD] = 0
        chain[_ROWS] = rows + 1
    elif rows > 2:
        count = emit(out, count, chain, first, rows, chain[_ID], chain[_STEP])
        chain[_FIRST] = first + rows
        chain[_ROWS] = 1
        chain[_ID] = number
    else:
        if chain[_LEAD] != 0:
            count = emit(out, count, chain, first - 1, 2, lead, chain[_ID] - lead)
            chain[_LEAD] = 0
        else:
            chain[_LEAD] = 1
            chain[_LEAD_ID] = chain[_ID]
        chain[_FIRST] = first + 1
        chain[_ID] = last
        chain[_STEP] = step
    return count


@kernel
def chain_runs(
    before: Ints, before_count: int, at: int, after: Ints, after_count: int, out: Ints, count: int,
    row: int, rows: int, runs: Ints, run_count: int,
) -> tuple[int, Ints, int, Ints, int]:  # fmt: skip
    """Add runs that repeat over ``rows`` rows, 1 or at least 3, to the chains above them or to new ones.

    Parameters
    ----------
    before, before_count, at
        Chains that reach the row above, by column; those from ``at`` on are not matched yet.
    after, after_count
        Chains that reach the last of the rows: one is added per run.
    out, count
        Pieces.
    row, rows
        The rows.
    runs, run_count
        In order of columns, right of what was added before.

    Returns
    -------
    tuple
        The new ``at``, ``after``, ``after_count``, ``out`` and ``count``.
    """
    if after_count + run_count > len(after):
        after = grown(after, after_count + run_count)
    for r in range(run_count):
        run = runs[r]
        column, width, number, step, slope, kind = run[0], run[1], run[2], run[3], run[4], run[5]
        passed = at
        while passed < before_count and before[passed, _COLUMN] < column:
            passed += 1
        joined = False
        if passed < before_count and before[passed, _COLUMN] == column:
            above = before[passed]
            joined = above[_WIDTH] == width and above[_SLOPE] == slope and above[_KIND] == kind
            if kind == CONSTANT and above[_ID] != number:
                joined = False
            if not joined:
                passed += 1
        if passed > at:
            out, count = close_chains(before, at, passed, out, count)
            at = passed
        if count + 3 > len(out):
            out = grown(out, count + 3)
        chain = after[after_count]
        after_count += 1
        done = 0
        if joined:
            copy_row(after, after_count - 1, before, at)
            at += 1
        else:
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
    return at, after, after_count, out, count
