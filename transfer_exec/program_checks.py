"""What makes a program harmless, whoever wrote it: nothing in it leaves its tensors, buffers, tables or flags.

Every number is bounded before anything is computed from it, so that no bytes make a kernel leave memory that the
program is bound to, or unfold to more than fits.
"""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from transfer_exec.conversions import CODES, SOURCE_BYTES, TARGET_BYTES
from transfer_exec.descriptors import buffers_of
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column
from transfer_exec.parts import part_elements, pieces_of
from transfer_exec.program import Await, Exchange, FetchColumn, Instruction, Program, Release, Write
from transfer_exec.regions import Letter
from transfer_exec.schedule import Schedule

MAX_NUMBERS = 1 << 28
"""Most integers, over all tables of all rounds, that a program accepted by ``decode_program`` unfolds to."""
_MAX_SPAN = 1 << 56
"""No number of a table may exceed this, so that sums of products stay inside int64 as floats show."""


def check_program(program: Program) -> None:
    """Check that nothing in a program leaves its tensors, buffers, tables or flags.

    Raises
    ------
    ProgramError
        Naming the part and what was expected.
    """
    if program.rounds < 1 or program.flags < 0:
        raise ProgramError(
            f"{program.worker}: {program.rounds} rounds, {program.flags} flags; expected 1 and 0 or more"
        )
    for tensor in program.tensors:
        dtype_of(tensor.dtype)
        if any(extent < 0 for extent in tensor.shape):
            raise ProgramError(f"{tensor.name}: shape {tensor.shape} has a negative extent")
    _check_parts(program)
    tables = sum(_check_letter(program, letter) for letter in program.letters)
    for step in program.instructions:
        _check_step(program, step, tables)
    edge = len(program.layouts[0].routes)
    last = sum(len(layout.routes) for layout in program.layouts)
    _check_templates(program, program.pack_templates, range(edge), packing=True)
    _check_templates(program, program.assemble_templates, range(edge, last), packing=False)
    _check_direct(program)


def _check_parts(program: Program) -> None:
    """Every part has room in its rounds: before anything is computed from its numbers."""
    cells = sum(len(layout.routes) for layout in program.layouts) * program.rounds
    if cells > MAX_NUMBERS:
        raise ProgramError(f"{program.worker}: {cells:,} parts in all rounds; expected at most {MAX_NUMBERS:,}")
    for layout in program.layouts:
        schedule = layout.schedule
        good = schedule.rounds == program.rounds and bool(np.isin(layout.item_bytes, SOURCE_BYTES).all())
        if isinstance(schedule, Schedule):
            elements = schedule.every.astype(np.float64) * program.rounds + schedule.extra
            below = [schedule.extra, schedule.offset]
            good = good and int(schedule.every.min(initial=0)) >= 0
        else:
            elements = schedule.sizes.astype(np.float64)
            below = [schedule.table[:, 1]]
            good = good and int(schedule.sizes.min(initial=1)) >= 1
        good = good and all(int(f.min(initial=0)) >= 0 and int(f.max(initial=0)) < program.rounds for f in below)
        if not good or float(elements.sum()) * max(SOURCE_BYTES) > _MAX_SPAN:
            raise ProgramError(f"{program.worker}: the parts of a buffer do not spread over {program.rounds} rounds")


def _check_letter(program: Program, letter: Letter) -> int:
    """The number of tables that a letter makes."""
    item_bytes = np.concatenate([layout.item_bytes for layout in program.layouts])
    parts, begins = letter.parts, letter.begins
    good = len(parts) > 0 and int(parts.min()) >= 0 and int(parts.max()) < len(item_bytes)
    good = good and len(np.unique(parts)) == len(parts)
    good = good and begins.shape[1] == program.rounds
    good = good and len(begins) == 1 + int(np.count_nonzero(np.diff(item_bytes[parts])))
    if not good or int(begins.min()) < 0 or int(begins.max()) > _MAX_SPAN:
        raise ProgramError(f"{program.worker}: a message names parts or places that cannot be")
    return len(buffers_of(letter, program.layouts))


def _check_step(program: Program, step: Instruction, tables: int) -> None:
    match step:
        case Write() | Exchange():
            good = 0 <= step.release < program.flags and step.flag >= 0 and bool(step.tables)
            good = good and all(0 <= table < tables for table in step.tables)
        case Await():
            good = len(step.sources) == len(step.flags) and all(0 <= flag < program.flags for flag in step.flags)
        case Release():
            good = len(step.sources) == len(step.flags) and all(flag >= 0 for flag in step.flags)
        case _:
            good = True
    if not good:
        raise ProgramError(f"{program.worker}: instruction {step} names a flag or table that is not there")


def _check_direct(program: Program) -> None:
    """Every row that is read lands in its tensor; where it comes from is checked against what the peer lends."""
    flags = [each.flag for each in program.fetches] + [each.done for each in program.offers]
    theirs = [each.done for each in program.fetches] + [each.flag for each in program.offers]
    good = all(0 <= flag < program.flags for flag in flags) and all(number >= 0 for number in theirs)
    good = good and all(0 <= each.mapped_bytes <= each.bytes for each in program.direct_steps)
    good = good and all(0 <= position < len(program.tensors) for position in program.lent)
    good = good and len(program.fetch_rows) == len(program.fetches) and bool(program.lent) == bool(program.offers)
    good = good and set(program.mapped) <= set(program.lent)
    if not good or len(set(program.lent)) < len(program.lent):
        raise ProgramError(f"{program.worker}: a direct move names a flag or tensor that is not there")
    room = np.array([each.bytes for each in program.tensors], dtype=np.float64)
    for fetch, rows in zip(program.fetches, program.fetch_rows, strict=True):
        wide, tensor = rows.astype(np.float64), rows[:, FetchColumn.TENSOR]
        good = int(rows.min(initial=0)) >= 0 and int(tensor.max(initial=-1)) < len(room)
        stop = wide[:, FetchColumn.OFFSET] + wide[:, FetchColumn.BYTES]
        if not good or bool(np.any(stop > room[tensor])) or bool(np.any(rows > _MAX_SPAN)):
            raise ProgramError(f"{program.worker}: what it reads from {fetch.peer} leaves its tensor")


def _check_templates(program: Program, rows: IdArray, parts: range, *, packing: bool) -> None:
    """Every row lies in its tensor and in the ids of its part, line behind line; then so do all its cuts."""
    if not len(rows):
        return
    if int(np.abs(rows).max()) > _MAX_SPAN or int(rows[:, [Column.LENGTH, Column.COUNT]].min()) < 1:
        raise ProgramError(f"{program.worker}: a gather row has a length, count or span that cannot be")
    tensor, part, code = rows[:, Column.TENSOR], rows[:, Column.BUFFER], rows[:, Column.CODE]
    if int(tensor.min()) < 0 or int(tensor.max()) >= len(program.tensors):
        raise ProgramError(f"{program.worker}: a gather row names a tensor that is not there")
    if int(code.min()) < 0 or int(code.max()) >= CODES:
        raise ProgramError(f"{program.worker}: a gather row names a conversion that is not there")
    if int(part.min()) < parts.start or int(part.max()) >= parts.stop:
        raise ProgramError(f"{program.worker}: a gather row names a part of a buffer that it may not use")
    item = np.array([dtype_of(each.dtype).item_bytes for each in program.tensors], dtype=np.int64)[tensor]
    wire = np.concatenate([layout.item_bytes for layout in program.layouts])[part]
    expected = (SOURCE_BYTES, TARGET_BYTES) if packing else (TARGET_BYTES, SOURCE_BYTES)
    if not np.array_equal(expected[0][code], item) or not np.array_equal(expected[1][code], wire):
        raise ProgramError(f"{program.worker}: a gather row converts elements of another width than they have")
    sizes = np.array([each.elements for each in program.tensors], dtype=np.float64)[tensor]
    elements = np.concatenate([part_elements(layout.schedule) for layout in program.layouts]).astype(np.float64)[part]
    written = rows[:, Column.LENGTH].astype(np.float64) * rows[:, Column.COUNT]
    if bool(np.any(written > (elements if packing else sizes))):
        raise ProgramError(f"{program.worker}: a gather row writes more elements than there is room for")
    low, high = _reach(rows, Column.INDEX, Column.INDEX_STRIDE, Column.INDEX_STEP)
    if bool(np.any(low < 0) or np.any(high >= sizes)):
        raise ProgramError(f"{program.worker}: a gather row leaves its tensor")
    low, high = _reach(rows, Column.OFFSET, Column.OFFSET_STRIDE, Column.OFFSET_STEP)
    if bool(np.any(low < 0) or np.any(high >= elements)):
        raise ProgramError(f"{program.worker}: a gather row leaves its part of a buffer")
    line = (rows[:, Column.LENGTH] - 1).astype(np.float64) * rows[:, Column.OFFSET_STRIDE]
    behind = (rows[:, Column.COUNT] == 1) | (line < rows[:, Column.OFFSET_STEP])
    if not behind.all() or int(rows[:, Column.OFFSET_STRIDE].min()) < 0:
        raise ProgramError(f"{program.worker}: a gather row's lines are not one behind the other")
    # A row is cut where a piece of its part ends, in a part of a line before and one after.
    pieces = sum(int(pieces_of(layout.schedule).shape[1]) for layout in program.layouts)
    if len(rows) * pieces > MAX_NUMBERS and _cuts(program, rows) > MAX_NUMBERS:
        raise ProgramError(f"{program.worker}: its gather rows unfold to more than {MAX_NUMBERS:,} numbers")


def _cuts(program: Program, rows: IdArray) -> int:
    """At most so many numbers are the rows of all rounds."""
    counts = np.concatenate(
        [np.bincount(pieces_of(each.schedule)[0], minlength=len(each.routes)) for each in program.layouts]
    )
    return 3 * len(Column) * int(counts[rows[:, Column.BUFFER]].sum())


def _reach(rows: IdArray, start: Column, stride: Column, step: Column) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest value of every row, as floats, which cannot wrap."""
    wide = rows.astype(np.float64)
    inner = (wide[:, Column.LENGTH] - 1) * wide[:, stride]
    outer = (wide[:, Column.COUNT] - 1) * wide[:, step]
    low = wide[:, start] + np.minimum(inner, 0) + np.minimum(outer, 0)
    return low, wide[:, start] + np.maximum(inner, 0) + np.maximum(outer, 0)
