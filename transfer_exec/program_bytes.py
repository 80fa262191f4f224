"""A program as bytes: compact, versioned, checked, and harmless when they come from a stranger.

In an envelope (``layout_algebra.sealed_bytes``) lies one msgpack array, whose tables are kept as differences from row
to row. A decoded program is checked row by row (`transfer_exec.program_checks`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
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
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column
from transfer_exec.parts import Spread
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
from transfer_exec.program_checks import MAX_NUMBERS, check_program
from transfer_exec.regions import Buffer, Layout, Letter
from transfer_exec.schedule import GroupedSchedule, Schedule

_MAGIC = b"TLPROG\x00\x04"
MAX_BYTES = 1 << 31
"""Largest unpacked size that ``decode_program`` accepts."""


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
    mapped_bytes: int


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
    mapped: tuple[int, ...]
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
            tuple(_direct(each) for each in program.offers),
            tuple(_direct(each) for each in program.fetches),
            program.lent,
            program.mapped,
            tuple(len(rows) for rows in program.fetch_rows),
            pack_table(np.concatenate([np.empty((0, len(FetchColumn)), dtype=np.int64), *program.fetch_rows])),
        )
    )


def _direct(step: Offer | Fetch) -> _Direct:
    return _Direct(step.stage.value, step.peer, step.flag, step.done, step.bytes, step.mapped_bytes)


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
        offers=tuple(Offer(Stage(each.stage), *msgspec.structs.astuple(each)[1:]) for each in packed.offers),
        fetches=tuple(Fetch(Stage(each.stage), *msgspec.structs.astuple(each)[1:]) for each in packed.fetches),
        lent=packed.lent,
        mapped=packed.mapped,
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
