"""A program as bytes: compact, versioned, checked, and harmless when they come from a stranger.

In an envelope (``layout_algebra.sealed_bytes``) lies one msgpack array, whose tables are kept as differences from row
to row. A decoded program is checked row by row against its own tensors and buffers, so that no bytes make a kernel
leave memory that the program is bound to.
"""

from __future__ import annotations

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import LayoutError
from layout_algebra.sealed_bytes import (
    Budget,
    Packed,
    pack_column,
    pack_table,
    seal,
    unpack_column,
    unpack_table,
    unseal,
)
from transfer_exec.conversions import CODES, SOURCE_BYTES, TARGET_BYTES
from transfer_exec.descriptors import buffers_of
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column
from transfer_exec.parts import Spread, part_elements, pieces_of
from transfer_exec.plan import Stage
from transfer_exec.program import (
    Assemble,
    Await,
    Exchange,
    Fetch,
    FetchColumn,
    Instruction,
    Offer,
    Pack,
    Program,
    ProgramTensor,
    Release,
    Write,
)
from transfer_exec.regions import Buffer, Layout, Letter
from transfer_exec.schedule import GroupedSchedule, Schedule

_MAGIC = b"TLPROG\x00\x03"
MAX_BYTES = 1 << 31
"""Largest unpacked size that ``decode_program`` accepts."""
MAX_NUMBERS = 1 << 28
"""Most integers, over all tables of all rounds, that a program accepted by ``decode_program`` unfolds to."""
_MAX_SPAN = 1 << 56
"""No number of a table may exceed this, so that sums of products stay inside int64 as floats show."""


class _Step(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    stage: int
    workers: tuple[str, ...]
    flags: tuple[int, ...]
    release: int
    tables: tuple[int, ...]


class _Direct(msgspec.Struct, array_like=True, frozen=True):
    stage: int
    peer: str
    flag: int
    done: int
    bytes: int


class _Tensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    staged: bool


class _Program(msgspec.Struct, array_like=True, frozen=True):
    worker: str
    plan_digest: str
    map_digest: str
    rounds: int
    flags: int
    steps: tuple[_Step, ...]
    tensors: tuple[_Tensor, ...]
    part_counts: tuple[int, int, int, int]
    parts: Packed
    grouped: bool
    pieces: Packed
    letter_counts: Packed
    letter_parts: Packed
    letter_begins: Packed
    pack: Packed
    assemble: Packed
    offers: tuple[_Direct, ...]
    fetches: tuple[_Direct, ...]
    lent: tuple[int, ...]
    fetch_counts: tuple[int, ...]
    fetch_rows: Packed


def plain_program(program: Program) -> bytes:
    """A program's content, before compression."""
    parts, pieces = zip(*(_spread_rows(layout) for layout in program.layouts), strict=True)
    pack, receive, external, internal = (len(table) for table in parts)
    counts = [(len(letter.parts), len(letter.begins)) for letter in program.letters]
    begins = [np.empty((0, program.rounds), dtype=np.int64), *(letter.begins for letter in program.letters)]
    numbers = [np.empty(0, dtype=np.int64), *(letter.parts for letter in program.letters)]
    return msgspec.msgpack.encode(
        _Program(
            program.worker,
            program.plan_digest,
            program.map_digest,
            program.rounds,
            program.flags,
            tuple(_step(step) for step in program.instructions),
            tuple(_Tensor(each.name, each.shape, each.dtype, each.staged) for each in program.tensors),
            (pack, receive, external, internal),
            pack_table(np.concatenate(parts)),
            isinstance(program.layouts[0].schedule, GroupedSchedule),
            pack_table(np.concatenate(pieces)),
            pack_table(np.array(counts, dtype=np.int64).reshape(-1, 2)),
            pack_column(np.concatenate(numbers)),
            pack_table(np.concatenate(begins).T),
            pack_table(program.pack_templates),
            pack_table(program.assemble_templates),
            tuple(_Direct(each.stage.value, each.peer, each.flag, each.done, each.bytes) for each in program.offers),
            tuple(_Direct(each.stage.value, each.peer, each.flag, each.done, each.bytes) for each in program.fetches),
            program.lent,
            tuple(len(rows) for rows in program.fetch_rows),
            pack_table(np.concatenate([np.empty((0, len(FetchColumn)), dtype=np.int64), *program.fetch_rows])),
        )
    )


def _spread_rows(layout: Layout) -> tuple[IdArray, IdArray]:
    """Per part its route, element width and what its rounds follow from; rounds and ids of pieces, if they do not."""
    schedule = layout.schedule
    if isinstance(schedule, Schedule):
        fields = (layout.routes, layout.item_bytes, schedule.every, schedule.extra, schedule.offset)
        return np.stack(fields, axis=1), np.empty((0, 2), dtype=np.int64)
    counts, nothing = np.diff(schedule.bounds), np.zeros_like(layout.routes)
    fields = (layout.routes, layout.item_bytes, counts, nothing, nothing)
    return np.stack(fields, axis=1), np.stack([schedule.table[:, 1], schedule.sizes], axis=1)


def encode_program(program: Program) -> bytes:
    """Serialize a program."""
    return seal(_MAGIC, plain_program(program))


def decode_program(data: bytes) -> Program:
    """Read ``encode_program``'s output.

    Raises
    ------
    ProgramError
        For anything that ``encode_program`` of this version did not write, and for a row that leaves its memory.
    """
    try:
        plain = unseal(data, _MAGIC, what="a program", limit=MAX_BYTES, error=LayoutError)
        program = _rebuild(msgspec.msgpack.decode(plain, type=_Program))
        check_program(program)
    except (msgspec.MsgspecError, LayoutError, ValueError, OverflowError) as error:
        raise ProgramError(f"these bytes are no program: {error}") from error
    return program


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
    sizes = [each.bytes for each in program.offers] + [each.bytes for each in program.fetches]
    good = all(0 <= flag < program.flags for flag in flags) and all(number >= 0 for number in (*theirs, *sizes))
    good = good and all(0 <= position < len(program.tensors) for position in program.lent)
    good = good and len(program.fetch_rows) == len(program.fetches) and bool(program.lent) == bool(program.offers)
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


def _step(step: Instruction) -> _Step:
    match step:
        case Pack():
            return _Step("pack", 0, (), (), 0, ())
        case Write(stage, peer, flag, release, tables):
            return _Step("write", stage.value, (peer,), (flag,), release, tables)
        case Exchange(stage, peer, flag, release, tables):
            return _Step("exchange", stage.value, (peer,), (flag,), release, tables)
        case Await(stage, sources, flags):
            return _Step("await", stage.value, sources, flags, 0, ())
        case Assemble():
            return _Step("assemble", 0, (), (), 0, ())
        case Release(sources, flags):
            return _Step("release", 0, sources, flags, 0, ())


def _instruction(step: _Step) -> Instruction:
    match step.kind:
        case "pack":
            return Pack()
        case "write":
            return Write(Stage(step.stage), step.workers[0], step.flags[0], step.release, step.tables)
        case "exchange":
            return Exchange(Stage(step.stage), step.workers[0], step.flags[0], step.release, step.tables)
        case "await":
            return Await(Stage(step.stage), step.workers, step.flags)
        case "assemble":
            return Assemble()
        case "release":
            return Release(step.workers, step.flags)
        case _:
            raise ProgramError(f"instruction {step.kind!r} is unknown")


def _rebuild(packed: _Program) -> Program:
    if any(step.kind in ("write", "exchange") and not (step.workers and step.flags) for step in packed.steps):
        raise ProgramError(f"{packed.worker}: a write names no peer")
    budget = Budget(MAX_NUMBERS)

    def rows_of(table: Packed, columns: int) -> IdArray:
        if table.columns != columns:
            raise ProgramError(f"{packed.worker}: a table has {table.columns} columns; expected {columns}")
        return unpack_table(table, budget, LayoutError)

    budget.spend(len(Buffer) * packed.rounds, LayoutError)
    counts = rows_of(packed.letter_counts, 2)
    parts, begins = rows_of(packed.parts, 5), unpack_table(packed.letter_begins, budget, LayoutError)
    if not 1 <= packed.rounds == len(begins):
        raise ProgramError(f"{packed.worker}: places of messages in {len(begins)} rounds; it has {packed.rounds}")
    numbers, pieces = unpack_column(packed.letter_parts, budget, LayoutError), rows_of(packed.pieces, 2)
    _check_counts(packed.worker, np.array(packed.part_counts, dtype=np.int64), len(parts))
    _check_counts(packed.worker, counts[:, 0], len(numbers))
    fetched = rows_of(packed.fetch_rows, len(FetchColumn))
    _check_counts(packed.worker, np.array(packed.fetch_counts, dtype=np.int64), len(fetched))
    _check_counts(packed.worker, counts[:, 1], begins.shape[1])
    edges = np.cumsum(packed.part_counts)[:-1]
    pack, receive, external, internal = (
        Layout(rows[:, 0], rows[:, 1], schedule)
        for rows, schedule in zip(np.split(parts, edges), _schedules(packed, parts, edges, pieces), strict=True)
    )
    letters = zip(
        np.split(numbers, np.cumsum(counts[:, 0])[:-1]),
        np.split(np.ascontiguousarray(begins.T), np.cumsum(counts[:, 1])[:-1]),
        strict=True,
    )
    return Program(
        worker=packed.worker,
        plan_digest=packed.plan_digest,
        map_digest=packed.map_digest,
        rounds=packed.rounds,
        flags=packed.flags,
        instructions=tuple(_instruction(step) for step in packed.steps),
        tensors=tuple(ProgramTensor(each.name, each.shape, each.dtype, each.staged) for each in packed.tensors),
        layouts=(pack, receive, external, internal),
        letters=tuple(Letter(*each) for each in letters) if len(counts) else (),
        pack_templates=rows_of(packed.pack, len(Column)),
        assemble_templates=rows_of(packed.assemble, len(Column)),
        offers=tuple(Offer(Stage(each.stage), each.peer, each.flag, each.done, each.bytes) for each in packed.offers),
        fetches=tuple(Fetch(Stage(each.stage), each.peer, each.flag, each.done, each.bytes) for each in packed.fetches),
        lent=packed.lent,
        fetch_rows=tuple(np.split(fetched, np.cumsum(packed.fetch_counts)[:-1])) if packed.fetch_counts else (),
    )


def _schedules(packed: _Program, parts: IdArray, edges: IdArray, pieces: IdArray) -> list[Spread]:
    split = np.split(parts, edges)
    if not packed.grouped:
        return [Schedule(packed.rounds, *rows[:, 2:].T) for rows in split]
    _check_counts(packed.worker, parts[:, 2], len(pieces))
    if len(pieces) and not (int(pieces[:, 0].min()) >= 0 and int(pieces[:, 0].max()) < packed.rounds):
        raise ProgramError(f"{packed.worker}: a piece of a part has a round outside 0:{packed.rounds}")
    mine = np.split(pieces, np.cumsum([int(rows[:, 2].sum()) for rows in split])[:-1])
    return [
        GroupedSchedule.of_pieces(packed.rounds, rows[:, 2], *each.T) for rows, each in zip(split, mine, strict=True)
    ]


def _check_counts(worker: str, counts: IdArray, total: int) -> None:
    if int(counts.min(initial=0)) < 0 or int(counts.max(initial=0)) > total or int(counts.sum()) != total:
        raise ProgramError(f"{worker}: counts {counts[:4].tolist()}... do not add up to the {total} rows there are")
