"""Gather tables, expanded element by element, against ids and parts."""

from __future__ import annotations

import numpy as np
import pytest
from crossing import Crossing, random_crossing

from layout_algebra.correspondence import correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.compiler import compile_program
from transfer_exec.conversions import PAIRS, code_of
from transfer_exec.gather import Column, GatherTable, fold_rows
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.program import Program
from transfer_exec.regions import Buffer, Region, Regions
from transfer_exec.topology import Topology


def expand(table: GatherTable, number: int) -> list[tuple[int, int, int, int, int]]:
    """Every element of a round: tensor, flat index, buffer, byte offset, code. The slow meaning."""
    out = []
    for row in table.of_round(number).tolist():
        for i in range(row[Column.COUNT]):
            for j in range(row[Column.LENGTH]):
                index = row[Column.INDEX] + i * row[Column.INDEX_STEP] + j * row[Column.INDEX_STRIDE]
                offset = row[Column.OFFSET] + i * row[Column.OFFSET_STEP] + j * row[Column.OFFSET_STRIDE]
                out.append((row[Column.TENSOR], index, row[Column.BUFFER], offset, row[Column.CODE]))
    return out


def places(plan: Plan, worker: str, number: int) -> dict[tuple[int, int], int]:
    """Which id begins at which byte of which buffer."""
    regions = Regions(plan)
    out = {}
    for buffer in Buffer:
        at = 0
        for route in regions.layout(Region(worker, buffer)).routes.tolist():
            for element in plan.part(route, number).ids().tolist():
                out[buffer.value, at] = element
                at += plan.routes[route].item_bytes
    return out


def check_table(crossing: Crossing, plan: Plan, program: Program, number: int, *, packing: bool) -> list[int]:
    """Every row element is the id that stands there; the ids that were seen."""
    worker = program.worker
    stands = places(plan, worker, number)
    seen = []
    table = program.pack if packing else program.assemble
    targets = set()
    for tensor, index, buffer, offset, code in expand(table, number):
        about = program.tensors[tensor]
        element = stands[buffer, offset]
        assert crossing.maps[worker].ids(about.name).reshape(-1)[index] == element
        wire = crossing.space.spec(crossing.space.locate(element)[0]).dtype
        assert code == (code_of(about.dtype, wire) if packing else code_of(wire, about.dtype))
        assert packing or (tensor, index) not in targets
        targets.add((tensor, index))
        seen.append(element)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_random_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([16, 64, 1 << 20])))
    for worker in plan.workers:
        program = compile_program(plan, worker, crossing.maps[worker])
        packed, assembled = [], []
        for number in range(plan.rounds):
            packed += check_table(crossing, plan, program, number, packing=True)
            assembled += check_table(crossing, plan, program, number, packing=False)
        sent = [i for route in plan.routes if route.holder == worker for i in route.runs.ids().tolist()]
        assert sorted(packed) == sorted(sent), "each id is packed once, from one home"
        if worker in plan.needers:
            every = [i for ids in crossing.needed[worker].values() for i in ids.reshape(-1).tolist() if i > 0]
            assert sorted(assembled) == sorted(every), "every element that copies an id is written once"


def cut_evenly(ids: np.ndarray, axis: int, rank: int, degree: int) -> np.ndarray:
    return np.array_split(ids, degree, axis=axis)[rank]


def arranged(ids: np.ndarray, rng: np.random.Generator, rank: int, degree: int) -> np.ndarray:
    """A rank's part of a tensor: rows, columns, interleaved, transposed, permuted, a swizzle, a broadcast, or whole."""
    axis = int(rng.integers(0, ids.ndim))
    match int(rng.integers(0, 9)):
        case 0 | 1:
            return cut_evenly(ids, axis, rank, degree)
        case 2:
            return np.take(ids, np.arange(rank, ids.shape[axis], degree), axis=axis)
        case 3:
            return np.moveaxis(cut_evenly(ids, axis, rank, degree), axis, 0).swapaxes(0, -1)
        case 4:
            halves = np.array_split(ids, 2, axis=axis)
            return np.concatenate([cut_evenly(half, axis, rank, degree) for half in reversed(halves)], axis=axis)
        case 5:
            return np.flip(cut_evenly(ids, axis, rank, degree), axis=axis)
        case 6:
            return np.take(ids, rng.permutation(ids.shape[axis]), axis=axis)
        case 7:
            blocks = (
                np.stack([cut_evenly(ids, axis, k, 2) for k in (0, 1)], axis=-1) if not ids.shape[axis] % 2 else ids
            )
            return cut_evenly(blocks, blocks.ndim - 1, rank % 2, 2)
        case _:
            return np.broadcast_to(ids[..., :1], (*ids.shape[:-1], 3)).copy()


def structured_crossing(rng: np.random.Generator) -> Crossing:
    """Matrices and stacks of them cut by rows and columns on both sides, with more rows than any table should have."""
    shapes = [(12, 16), (24, 8), (3, 8, 12), (40,), (6, 10), (2, 3, 4, 6)]
    dtypes = ["BF16", "F32", "F16", "F64"]
    space = CheckpointSpace(
        [TensorSpec(f"t{n}", shapes[rng.integers(0, len(shapes))], str(rng.choice(dtypes))) for n in range(3)]
    )
    whole = {spec.name: np.arange(*space.id_range(spec.name)).reshape(spec.shape) for spec in space.specs}
    trainers, rollouts = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    held: dict[str, dict[str, np.ndarray]] = {f"trainer/{rank}": {} for rank in range(trainers)}
    chosen: dict[tuple[str, str], str] = {}
    for spec in space.specs:
        axis = int(rng.integers(0, len(spec.shape)))
        for rank in range(trainers):
            part = cut_evenly(whole[spec.name], axis, rank, trainers)
            held[f"trainer/{rank}"][spec.name] = part.T if rng.integers(0, 2) else part
            if rng.integers(0, 3) == 0:  # a second home of the same ids, partly
                held[f"trainer/{rank}"][f"{spec.name}.again"] = arranged(whole[spec.name], rng, rank, trainers)
            for name in held[f"trainer/{rank}"]:
                chosen.setdefault((f"trainer/{rank}", name), spec.dtype)
    needed = {f"engine/{e}/{r}": {} for e in range(2) for r in range(rollouts)}
    for worker, parts in needed.items():
        for spec in space.specs:
            if rng.integers(0, 4):
                parts[spec.name] = arranged(whole[spec.name], rng, int(worker.rpartition("/")[2]), rollouts)
                chosen[worker, spec.name] = str(rng.choice(dtypes))
        if not parts:
            parts["t0"], chosen[worker, "t0"] = whole["t0"], space.spec("t0").dtype
    return Crossing(space, held, needed, chosen, rng)


@pytest.mark.parametrize("seed", range(40))
def test_structured_tables(seed: int) -> None:
    """Columns, rows, transposes, interleavings and copies of copies, in several rounds: exactly what they must hold."""
    rng = np.random.default_rng(seed)
    crossing = structured_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([64, 200, 1 << 20])))
    for worker in plan.workers:
        program = Program.from_bytes(compile_program(plan, worker, crossing.maps[worker]).to_bytes())
        rounds = range(plan.rounds)
        packed = [i for k in rounds for i in check_table(crossing, plan, program, k, packing=True)]
        assembled = [i for k in rounds for i in check_table(crossing, plan, program, k, packing=False)]
        sent = [i for route in plan.routes if route.holder == worker for i in route.runs.ids().tolist()]
        assert sorted(packed) == sorted(sent)
        mine = crossing.needed.get(worker, {}).values()
        assert sorted(assembled) == sorted(i for ids in mine for i in ids.reshape(-1).tolist())


def one_way_plan(held: SourceMap, needed: SourceMap, *, buffer_bytes: int) -> Plan:
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    demand = correspond({"trainer/0": held}, {"engine/0/0": needed}, cast=True)
    return make_plan(demand, topology, buffer_bytes=buffer_bytes)


SHAPES = {
    "as it is": (lambda ids: ids, 1, 1),
    "transposed": (lambda ids: ids.T, 1, 1),
    "columns": (lambda ids: ids[:, 8:40], 1, 1),
    "halves swapped": (lambda ids: np.concatenate([ids[32:], ids[:32]]), 2, 2),
    "even columns, transposed": (lambda ids: ids[:, ::2].T, 2, 1),
    "experts, transposed inside": (lambda ids: ids.reshape(4, 16, 64).transpose(0, 2, 1), 4, 1),
    "heads of three": (lambda ids: ids[:48].reshape(3, 4, 4, 64).transpose(1, 0, 2, 3), 12, 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_regular_layouts_stay_small(name: str) -> None:
    """Tables grow with the regular pieces of a layout, never with its rows or elements."""
    arrange, needer_rows, holder_rows = SHAPES[name]
    space = CheckpointSpace([TensorSpec("w", (64, 64), "BF16")])
    ids = np.arange(1, 64 * 64 + 1).reshape(64, 64)
    held, needed = SourceMap.from_ids(space, {"w": ids}), SourceMap.from_ids(space, {"w": arrange(ids)})
    plan = one_way_plan(held, needed, buffer_bytes=1 << 20)
    assert plan.rounds == 1
    assert len(compile_program(plan, "engine/0/0", needed).assemble.rows) <= needer_rows
    assert len(compile_program(plan, "trainer/0", held).pack.rows) <= holder_rows
    many = one_way_plan(held, needed, buffer_bytes=1 << 10)
    assert many.rounds > 2
    rows = len(compile_program(many, "engine/0/0", needed).assemble.rows)
    assert rows <= 4 * (needer_rows + 1) * many.rounds, "a cut adds a few rows a round"


def test_strips_that_cross_tensors_of_two_dtypes_are_cut_there() -> None:
    """A flat F32 shard holds a BF16 tensor and an F32 tensor side by side: two conversions."""
    space = CheckpointSpace([TensorSpec("a", (5,), "BF16"), TensorSpec("b", (4,), "F32")])
    ids = {"flat": np.arange(1, 10)}
    held = SourceMap.from_ids(space, ids, {"flat": "F32"})
    plan = one_way_plan(held, held, buffer_bytes=99)
    codes = compile_program(plan, "trainer/0", held).pack.rows[:, Column.CODE].tolist()
    assert sorted(codes) == sorted([code_of("F32", "BF16"), code_of("F32", "F32")])
    codes = compile_program(plan, "engine/0/0", held).assemble.rows[:, Column.CODE].tolist()
    assert sorted(codes) == sorted([code_of("BF16", "F32"), code_of("F32", "F32")])


@pytest.mark.parametrize("seed", range(50))
def test_folding_keeps_every_element(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 40))
    rows = np.zeros((count, len(Column)), dtype=np.int64)
    rows[:, Column.TENSOR] = rng.integers(0, 2, count)
    rows[:, Column.LENGTH] = rng.choice([1, 1, 2], count)
    rows[:, Column.COUNT] = 1
    rows[:, Column.INDEX_STRIDE] = rng.choice([1, 3], count)
    rows[:, Column.OFFSET_STRIDE] = 2
    if seed % 2:
        rows[:, Column.INDEX] = rng.choice([1, 2], count) * np.arange(count)
        rows[:, Column.OFFSET] = rng.choice([2, 4], count) * rng.permutation(count)
    else:  # progressions that meet in a shared row
        rows[:, [Column.TENSOR, Column.LENGTH, Column.INDEX_STRIDE]] = 0, 1, 1
        steps = np.repeat(rng.choice([[2, 4], [3, 4], [2, 6], [1, 8]], count), rng.integers(1, 5, count), axis=0)
        rows[:, [Column.INDEX, Column.OFFSET]] = np.cumsum(steps[:count], axis=0)
    rounds = np.sort(rng.integers(0, 2, count))

    def elements(number: np.ndarray, table: np.ndarray) -> list[tuple[int, ...]]:
        bounds = np.searchsorted(number, np.arange(3))
        return sorted((k, *e) for k in range(2) for e in expand(GatherTable(table, bounds), k))

    out_rounds, out = fold_rows(rounds, rows)
    assert len(out) <= count
    assert elements(out_rounds, out) == elements(rounds, rows)


def test_widths_follow_the_conversion_table() -> None:
    for source, target in PAIRS:
        assert code_of(source, target) >= 4
    assert [code_of(name, name) for name in ("U8", "BF16", "F32", "C64")] == [0, 1, 2, 3]
    assert dtype_of("C64").item_bytes == 8
