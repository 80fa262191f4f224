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
from transfer_exec.descriptors import DescriptorTable
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column, GatherTable
from transfer_exec.plan import Stage
from transfer_exec.program import (
    Assemble,
    Await,
    Exchange,
    Instruction,
    Pack,
    Program,
    ProgramTensor,
    Release,
    Write,
)
from transfer_exec.regions import Buffer

_MAGIC = b"TLPROG\x00\x01"
MAX_BYTES = 1 << 31
"""Largest unpacked size that ``decode_program`` accepts."""
MAX_NUMBERS = 1 << 28
"""Most integers, over all tables, that ``decode_program`` accepts."""
_MAX_SPAN = 1 << 56
"""No index, offset or extent of a row may exceed this, so that sums of products stay inside int64 as floats show."""


class _Step(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    stage: int
    workers: tuple[str, ...]
    flags: tuple[int, ...]
    release: int
    tables: tuple[int, ...]


class _Tensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    staged: bool


class _Table(msgspec.Struct, array_like=True, frozen=True):
    buffer: int
    rows: Packed
    bounds: Packed


class _Program(msgspec.Struct, array_like=True, frozen=True):
    worker: str
    plan_digest: str
    map_digest: str
    rounds: int
    buffer_sizes: tuple[int, int, int, int]
    flags: int
    steps: tuple[_Step, ...]
    tensors: tuple[_Tensor, ...]
    descriptors: tuple[_Table, ...]
    pack: _Table
    assemble: _Table
    arriving: Packed


def plain_program(program: Program) -> bytes:
    """A program's content, before compression."""
    return msgspec.msgpack.encode(
        _Program(
            program.worker,
            program.plan_digest,
            program.map_digest,
            program.rounds,
            program.buffer_sizes,
            program.flags,
            tuple(_step(step) for step in program.instructions),
            tuple(_Tensor(each.name, each.shape, each.dtype, each.staged) for each in program.tensors),
            tuple(
                _Table(table.buffer.value, pack_table(table.rows.astype(np.int64)), pack_column(table.bounds))
                for table in program.descriptors
            ),
            _Table(0, pack_table(program.pack.rows), pack_column(program.pack.bounds)),
            _Table(0, pack_table(program.assemble.rows), pack_column(program.assemble.bounds)),
            pack_table(program.arriving.T),
        )
    )


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
    if program.rounds < 1 or min(program.buffer_sizes) < 0 or program.flags < 0:
        raise ProgramError(f"{program.worker}: rounds, buffer sizes and flags must not be negative")
    for tensor in program.tensors:
        dtype_of(tensor.dtype)
        if any(extent < 0 for extent in tensor.shape):
            raise ProgramError(f"{tensor.name}: shape {tensor.shape} has a negative extent")
    if program.arriving.shape != (len(Stage), program.rounds):
        raise ProgramError(f"{program.worker}: counts arriving bytes of {program.arriving.shape} stages and rounds")
    for step in program.instructions:
        _check_step(program, step)
    for table in program.descriptors:
        _check_bounds(program, table.bounds, len(table.rows))
        ends = table.rows[:, 0].astype(np.float64) + table.rows[:, 2].astype(np.float64)
        if len(ends) and float(ends.max()) > program.buffer_bytes(table.buffer):
            raise ProgramError(f"{program.worker}: a descriptor leaves the {table.buffer.name} buffer")
    _check_gather(program, program.pack, (Buffer.PACK,), packing=True)
    _check_gather(program, program.assemble, (Buffer.RECEIVE, Buffer.EXTERNAL, Buffer.INTERNAL), packing=False)


def _check_step(program: Program, step: Instruction) -> None:
    match step:
        case Write() | Exchange():
            good = 0 <= step.release < program.flags and step.flag >= 0 and bool(step.tables)
            good = good and all(0 <= table < len(program.descriptors) for table in step.tables)
        case Await():
            good = len(step.sources) == len(step.flags) and all(0 <= flag < program.flags for flag in step.flags)
        case Release():
            good = len(step.sources) == len(step.flags) and all(flag >= 0 for flag in step.flags)
        case _:
            good = True
    if not good:
        raise ProgramError(f"{program.worker}: instruction {step} names a flag or table that is not there")


def _check_bounds(program: Program, bounds: IdArray, rows: int) -> None:
    right = len(bounds) == program.rounds + 1 and int(bounds[0]) == 0 and int(bounds[-1]) == rows
    if not right or bool(np.any(np.diff(bounds) < 0)):
        raise ProgramError(f"{program.worker}: a table's rounds do not add up to its {rows} rows")


def _check_gather(program: Program, table: GatherTable, buffers: tuple[Buffer, ...], *, packing: bool) -> None:
    _check_bounds(program, table.bounds, len(table.rows))
    rows = table.rows
    if not len(rows):
        return
    if int(np.abs(rows).max()) > _MAX_SPAN or int(rows[:, [Column.LENGTH, Column.COUNT]].min()) < 1:
        raise ProgramError(f"{program.worker}: a gather row has a length, count or span that cannot be")
    tensor, buffer, code = rows[:, Column.TENSOR], rows[:, Column.BUFFER], rows[:, Column.CODE]
    if int(tensor.min()) < 0 or int(tensor.max()) >= len(program.tensors):
        raise ProgramError(f"{program.worker}: a gather row names a tensor that is not there")
    if int(code.min()) < 0 or int(code.max()) >= CODES:
        raise ProgramError(f"{program.worker}: a gather row names a conversion that is not there")
    if not set(np.unique(buffer).tolist()) <= {each.value for each in buffers}:
        raise ProgramError(f"{program.worker}: a gather row names a buffer that it may not use")
    item = np.array([dtype_of(each.dtype).item_bytes for each in program.tensors], dtype=np.int64)[tensor]
    mine, wire = (SOURCE_BYTES, TARGET_BYTES) if packing else (TARGET_BYTES, SOURCE_BYTES)
    if not np.array_equal(mine[code], item):
        raise ProgramError(f"{program.worker}: a gather row converts elements of another width than its tensor has")
    sizes = np.array([each.elements for each in program.tensors], dtype=np.float64)[tensor]
    capacity = np.array(program.buffer_sizes, dtype=np.float64)[buffer]
    written = rows[:, Column.LENGTH].astype(np.float64) * rows[:, Column.COUNT]
    room = capacity / wire[code] if packing else sizes
    if bool(np.any(written > room)):
        raise ProgramError(f"{program.worker}: a gather row writes more elements than there is room for")
    low, high = _reach(rows, Column.INDEX, Column.INDEX_STRIDE, Column.INDEX_STEP)
    if bool(np.any(low < 0) or np.any(high >= sizes)):
        raise ProgramError(f"{program.worker}: a gather row leaves its tensor")
    low, high = _reach(rows, Column.OFFSET, Column.OFFSET_STRIDE, Column.OFFSET_STEP)
    if bool(np.any(low < 0) or np.any(high + wire[code] > capacity)):
        raise ProgramError(f"{program.worker}: a gather row leaves its buffer")


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

    def gather(table: _Table) -> GatherTable:
        return GatherTable(rows_of(table.rows, len(Column)), unpack_column(table.bounds, budget, LayoutError))

    return Program(
        worker=packed.worker,
        plan_digest=packed.plan_digest,
        map_digest=packed.map_digest,
        rounds=packed.rounds,
        buffer_sizes=packed.buffer_sizes,
        flags=packed.flags,
        instructions=tuple(_instruction(step) for step in packed.steps),
        tensors=tuple(ProgramTensor(each.name, each.shape, each.dtype, each.staged) for each in packed.tensors),
        descriptors=tuple(
            DescriptorTable(
                Buffer(each.buffer),
                rows_of(each.rows, 3).astype(np.uint64),
                unpack_column(each.bounds, budget, LayoutError),
            )
            for each in packed.descriptors
        ),
        pack=gather(packed.pack),
        assemble=gather(packed.assemble),
        arriving=np.ascontiguousarray(rows_of(packed.arriving, len(Stage)).T),
    )
