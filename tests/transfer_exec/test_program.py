"""Programs as values and as bytes: equal after a round trip, harmless from a stranger."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from crossing import random_crossing

from layout_algebra.correspondence import correspond
from layout_algebra.sealed_bytes import seal
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.compiler import compile_program
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.program import Await, Pack, Program, Release, Write
from transfer_exec.program_bytes import _MAGIC, encode_program, plain_program
from transfer_exec.program_checks import check_program
from transfer_exec.regions import Buffer, Letter
from transfer_exec.schedule import Schedule
from transfer_exec.topology import Topology


def programs(seed: int) -> tuple[Plan, dict[str, Program]]:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([16, 1 << 20])))
    return plan, {worker: compile_program(plan, worker, crossing.maps[worker]) for worker in plan.workers}


@pytest.mark.parametrize("seed", range(15))
def test_bytes_give_an_equal_program(seed: int) -> None:
    plan, made = programs(seed)
    for worker, program in made.items():
        again = Program.from_bytes(program.to_bytes())
        assert again.digest() == program.digest()
        assert again.instructions == program.instructions
        assert again.tensors == program.tensors
        assert (again.worker, again.rounds, again.flags) == (worker, plan.rounds, program.flags)
        assert again.buffer_sizes == program.buffer_sizes
        assert np.array_equal(again.arriving, program.arriving)
        for mine, theirs in zip(program.descriptors, again.descriptors, strict=True):
            assert mine.buffer is theirs.buffer
            assert np.array_equal(mine.rows, theirs.rows)
            assert np.array_equal(mine.bounds, theirs.bounds)
        for name in ("pack", "assemble"):
            mine, theirs = getattr(program, name), getattr(again, name)
            assert np.array_equal(mine.rows, theirs.rows)
            assert np.array_equal(mine.bounds, theirs.bounds)


def test_digests_differ_between_workers_and_plans() -> None:
    digests = [program.digest() for seed in (1, 2) for program in programs(seed)[1].values()]
    assert len(set(digests)) == len(digests)
    assert [p.digest() for p in programs(1)[1].values()] == [p.digest() for p in programs(1)[1].values()]


@pytest.mark.parametrize("seed", range(10))
def test_bytes_sent_and_peers(seed: int) -> None:
    plan, made = programs(seed)
    for worker, program in made.items():
        for stage in Stage:
            assert program.bytes_sent(stage) == plan.bytes_sent(worker, stage)
            assert program.arriving[stage.value].sum() == plan.bytes_received(worker, stage)
        hops = [hop for route in plan.routes for hop in route.hops]
        around = {hop.target for hop in hops if hop.source == worker} | {
            hop.source for hop in hops if hop.target == worker
        }
        assert set(program.peers) == around


def a_program() -> Program:
    """One with rows in both tables and descriptors, whichever seed has it."""
    for seed in range(30):
        for program in programs(seed)[1].values():
            if len(program.pack.rows) and program.letters:
                return program
    raise AssertionError("no seed gives a sender")


def a_receiver() -> Program:
    for seed in range(30):
        for program in programs(seed)[1].values():
            if (program.assemble_templates[:1, Column.LENGTH] > 1).any():
                return program
    raise AssertionError("no seed gives a receiver")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"TLMAP\x00\x00\x01" + data[8:],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    ],
    ids=["empty", "header only", "truncated", "longer", "another kind", "one bit"],
)
def test_damaged_bytes_are_refused(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ProgramError):
        Program.from_bytes(damage(a_program().to_bytes()))


def signed(plain: bytes) -> bytes:
    """Bytes with a right digest around any content."""
    return seal(_MAGIC, plain)


def test_signed_nonsense_is_refused() -> None:
    for plain in (b"", b"\x00", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1, 2, 3])):
        with pytest.raises(ProgramError):
            Program.from_bytes(signed(plain))
    fields = msgspec.msgpack.decode(plain_program(a_program()))
    for position in range(len(fields)):
        for value in (None, -1, "x", [[]], b"123"):
            changed = [*fields[:position], value, *fields[position + 1 :]]
            if value == fields[position] or (isinstance(fields[position], str) and isinstance(value, str)):
                continue
            with pytest.raises(ProgramError):
                Program.from_bytes(signed(msgspec.msgpack.encode(changed)))


def with_row(rows: np.ndarray, column: Column, value: int) -> np.ndarray:
    rows = rows.copy()
    rows[0, column] = value
    return rows


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Column.TENSOR, 99),
        (Column.TENSOR, -1),
        (Column.BUFFER, -1),
        (Column.BUFFER, 99),
        (Column.CODE, 16),
        (Column.CODE, -1),
        (Column.LENGTH, 0),
        (Column.LENGTH, 1 << 40),
        (Column.COUNT, 1 << 40),
        (Column.COUNT, -5),
        (Column.INDEX, -1),
        (Column.INDEX, 1 << 30),
        (Column.INDEX, (1 << 63) - 1),
        (Column.OFFSET, 1 << 30),
        (Column.OFFSET_STRIDE, -1),
        (Column.OFFSET_STRIDE, 1 << 30),
        (Column.OFFSET, -8),
        (Column.OFFSET, -(1 << 63)),
    ],
)
def test_rows_that_leave_their_memory_are_refused(column: Column, value: int) -> None:
    program = a_receiver()
    bad = replace(program, assemble_templates=with_row(program.assemble_templates, column, value))
    with pytest.raises(ProgramError, match=program.worker):
        check_program(bad)
    with pytest.raises(ProgramError):
        Program.from_bytes(encode_program(bad))


def test_other_tables_that_leave_their_memory_are_refused() -> None:
    program = a_program()
    letter, pack = program.letters[0], program.layouts[0]
    schedule = pack.schedule
    assert isinstance(schedule, Schedule)
    late = replace(schedule, offset=schedule.offset + program.rounds)
    large = replace(schedule, every=schedule.every + (1 << 60))
    rest, others = program.letters[1:], program.layouts[1:]
    twice = np.repeat(program.pack_templates, 2, axis=0)
    twice[:, Column.COUNT] = 1 << 20
    cases = [
        replace(program, letters=(Letter(letter.parts + 99, letter.begins), *rest)),
        replace(program, letters=(Letter(letter.parts - 99, letter.begins), *rest)),
        replace(program, letters=(Letter(np.repeat(letter.parts, 2), letter.begins), *rest)),
        replace(program, letters=(Letter(letter.parts, letter.begins[:0]), *rest)),
        replace(program, letters=(Letter(letter.parts, letter.begins[:, 1:]), *rest)),
        replace(program, letters=(Letter(letter.parts, letter.begins - (1 << 40)), *rest)),
        replace(program, layouts=(replace(pack, schedule=late), *others)),
        replace(program, layouts=(replace(pack, schedule=large), *others)),
        replace(program, layouts=(replace(pack, item_bytes=pack.item_bytes * 3), *others)),
        replace(program, pack_templates=twice),
        replace(program, instructions=(*program.instructions, Await(Stage.RECEIVE, ("x",), (99,)))),
        replace(program, instructions=(*program.instructions, Await(Stage.RECEIVE, ("x",), ()))),
        replace(program, instructions=(*program.instructions, Write(Stage.RECEIVE, "x", 0, 0, (99,)))),
        replace(program, instructions=(*program.instructions, Write(Stage.RECEIVE, "x", 0, 99, (0,)))),
        replace(program, instructions=(*program.instructions, Release(("x",), (-1,)))),
        replace(program, rounds=0),
        replace(program, rounds=program.rounds + 1),
    ]
    for bad in cases:
        with pytest.raises(ProgramError):
            check_program(bad)
    check_program(program)


def test_bytes_do_not_grow_with_rounds() -> None:
    """Eight times the rounds, a few hundred bytes more: where messages begin in their targets' buffers."""
    space = CheckpointSpace([TensorSpec("w", (256, 256), "BF16")])
    ids = np.arange(1, 65537).reshape(256, 256)
    held, needed = SourceMap.from_ids(space, {"w": ids}), SourceMap.from_ids(space, {"w": ids[:, 64:192].T})
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    demand = correspond({"trainer/0": held}, {"engine/0/0": needed})
    sizes = []
    for buffer_bytes in (8192, 1024):
        plan = make_plan(demand, topology, buffer_bytes=buffer_bytes)
        sizes.append(
            [len(compile_program(plan, w, m).to_bytes()) for w, m in (("trainer/0", held), ("engine/0/0", needed))]
        )
    assert max(abs(few - many) for few, many in zip(*sizes, strict=True)) < 200


def test_properties() -> None:
    program = a_program()
    assert isinstance(program.instructions[0], Pack)
    assert program.release is None or isinstance(program.release, Release)
    assert program.buffer_bytes(Buffer.PACK) == program.buffer_sizes[0] > 0
    assert program.table_bytes >= program.pack.rows.nbytes
