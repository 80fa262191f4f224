"""What of a plan goes straight from parameter to parameter, and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from crossing import random_crossing

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.compiler import Compiler, compile_program
from transfer_exec.direct import Division, MoveColumn, Near, divide
from transfer_exec.errors import ProgramError
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.program import FetchColumn, Program
from transfer_exec.topology import Topology

SPACE = CheckpointSpace([TensorSpec("a", (8, 16), "F32"), TensorSpec("b", (64,), "F32")])
A = np.arange(*SPACE.id_range("a")).reshape(8, 16)
B = np.arange(*SPACE.id_range("b"))
Ids = Mapping[str, Mapping[str, np.ndarray]]


def planned(
    held: Ids, needed: Ids, *, workers_per_node: int = 1, dtypes: Mapping[str, str] | None = None, space: object = SPACE
) -> tuple[Plan, dict[str, SourceMap]]:
    """A plan of 64 bytes a round; dtypes are those of the needers' parameters."""
    assert isinstance(space, CheckpointSpace)
    sides = [{w: SourceMap.from_ids(space, dict(p)) for w, p in held.items()}]
    sides += [{w: SourceMap.from_ids(space, dict(p), dtypes) for w, p in needed.items()}]
    engines = {name.rsplit("/", 1)[0] for name in needed}
    topology = Topology.uniform(
        trainers=len(held),
        engines=len(engines),
        engine_size=len(needed) // len(engines),
        workers_per_node=workers_per_node,
        nic_bytes_per_s=1e9,
        local_bytes_per_s=1e10,
    )
    return make_plan(correspond(*sides), topology, buffer_bytes=64), {**sides[0], **sides[1]}


def moved(division: Division) -> dict[tuple[str, str], list[list[int]]]:
    """Rows without their width."""
    return {pair: moves.rows[:, : MoveColumn.ITEM_BYTES].tolist() for pair, moves in division.moves.items()}


def test_whole_tensors_that_lie_alike_leave_nothing_for_rounds() -> None:
    plan, maps = planned({"trainer/0": {"a": A, "b": B}}, {"engine/0/0": {"ab": np.concatenate([A.reshape(-1), B])}})
    assert plan.rounds == 12
    division = divide(plan, Near(maps, {}))
    assert division.moves == {}, "768 bytes are less than 4 KiB"
    division = divide(plan, Near(maps, {}, least_bytes=256))
    assert moved(division) == {("trainer/0", "engine/0/0"): [[0, 0, 0, 0, 128], [1, 0, 0, 128, 64]]}
    assert division.moves["trainer/0", "engine/0/0"].bytes == 768
    assert (division.rest.routes, division.rest.rounds) == ((), 1)
    programs = {worker: Compiler(plan, Near(maps, {}, 256)).program(worker, maps[worker]) for worker in plan.workers}
    for program in programs.values():
        assert program.instructions == ()
        assert program.buffer_sizes == (0, 0, 0, 0)
        assert program.direct_bytes == 768
    assert (
        programs["trainer/0"].bytes_sent(Stage.RECEIVE) == programs["engine/0/0"].bytes_received(Stage.RECEIVE) == 768
    )


@pytest.mark.parametrize(
    ("needed", "dtypes", "scattered", "why"),
    [
        (A.T, None, {}, "transposed"),
        (A, {"p": "F64"}, {}, "converted"),
        (A, None, {"engine/0/0": {"p"}}, "not contiguous at the target"),
        (A, None, {"trainer/0": {"a"}}, "not contiguous at the source"),
        (A[:, ::2], None, {}, "single elements"),
        (np.stack([A, A[::-1, ::-1]]), None, {}, "needed a second time, backwards"),
    ],
)
def test_what_stays_in_rounds(
    needed: np.ndarray, dtypes: Mapping[str, str] | None, scattered: Mapping[str, set[str]], why: str
) -> None:
    plan, maps = planned({"trainer/0": {"a": A}}, {"engine/0/0": {"p": needed}}, dtypes=dtypes)
    division = divide(plan, Near(maps, scattered, least_bytes=16))
    assert division.moves == {}, why
    assert division.rest is plan


def test_runs_below_the_shortest_stay_in_rounds_but_neighbours_are_one_run() -> None:
    """Halves of rows of 16 are 32 bytes; two trainers' rows side by side are not one run."""
    near = lambda maps, least: Near(maps, {}, least)  # noqa: E731
    plan, maps = planned({"trainer/0": {"a": A}}, {"engine/0/0": {"p": A[:, :8]}})
    assert divide(plan, near(maps, 33)).moves == {}
    assert moved(divide(plan, near(maps, 32)))["trainer/0", "engine/0/0"] == [
        [0, 16 * r, 0, 8 * r, 8] for r in range(8)
    ]
    plan, maps = planned({"trainer/0": {"a": A[:4], "a2": A[4:]}}, {"engine/0/0": {"p": A}})
    assert moved(divide(plan, near(maps, 256)))["trainer/0", "engine/0/0"] == [[0, 0, 0, 0, 64], [1, 0, 0, 64, 64]]
    assert divide(plan, near(maps, 257)).moves == {}


def test_shared_tensors_have_a_shortest_run_of_their_own() -> None:
    """Rows of 32 bytes of a shared tensor are mapped, those of a private one stay in rounds; long ones are read."""
    plan, maps = planned(
        {"trainer/0": {"a": A[:4], "a2": A[4:], "b": B}}, {"engine/0/0": {"p": A[:, :8], "q": np.stack([B, B])}}
    )
    whole = [[2, 0, 1, 0, 64], [2, 0, 1, 64, 64]]
    upper, lower = ([[k, 16 * r, 0, 32 * k + 8 * r, 8] for r in range(4)] for k in (0, 1))
    for shared, rows, mapped, size in (
        ((), whole, [], 0),
        (("a",), upper + whole, [0], 4 * 32),
        (("a2",), lower + whole, [1], 4 * 32),
        (("a", "a2", "b"), upper + lower + whole, [0, 1, 2], 8 * 32 + 256),
        (("b",), whole, [2], 256),
    ):
        division = divide(plan, Near(maps, {}, 256, 32, {"trainer/0": shared}))
        moves = division.moves["trainer/0", "engine/0/0"]
        assert moved(division)["trainer/0", "engine/0/0"] == rows
        assert (moves.mapped.tolist(), moves.mapped_bytes) == (mapped, size)
        assert moves.bytes == 256 + 32 * (len(rows) - 2), "an id that is needed twice is counted once"


def test_too_many_short_runs_stay_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of 32 bytes of a shared tensor; long runs of the same worker are direct all the same."""
    plan, maps = planned({"trainer/0": {"a": A, "b": B}}, {"engine/0/0": {"p": A[:4, :8], "q": B}})
    near = Near(maps, {}, 256, 32, {"trainer/0": ["a", "b"]})
    for most, rows in ((4, 5), (3, 1)):
        monkeypatch.setattr("transfer_exec.direct.MOST_SHORT_RUNS", most)
        division = divide(plan, near)
        assert len(division.moves["trainer/0", "engine/0/0"].rows) == rows
        assert bool(division.rest.routes) is (rows == 1)


def test_a_worker_that_forwards_gets_its_part_in_rounds() -> None:
    """Two ranks of one node: the first receives for both and forwards, so it is not direct; alone it is."""
    plan, maps = planned({"trainer/0": {"a": A}}, {"engine/0/0": {"p": A}, "engine/0/1": {"p": A}}, workers_per_node=2)
    assert divide(plan, Near(maps, {}, 16)).moves == {}
    needed = {"engine/0/0": {"p": A[:4]}, "engine/0/1": {"p": A[4:]}}
    plan, maps = planned({"trainer/0": {"a": A}}, needed, workers_per_node=2)
    assert len(divide(plan, Near(maps, {}, 16)).moves) == 2
    few = {worker: each for worker, each in maps.items() if worker != "engine/0/1"}
    assert list(divide(plan, Near(few, {}, 16)).moves) == [("trainer/0", "engine/0/0")], "nobody else can be read"


def test_a_route_is_cut_where_only_some_of_it_is_direct() -> None:
    needed = {"engine/0/0": {"p": np.concatenate([A[:4].reshape(-1), A[4:].T[::-1].reshape(-1)])}}
    plan, maps = planned({"trainer/0": {"a": A}}, needed)
    division = divide(plan, Near(maps, {}, 16))
    assert moved(division) == {("trainer/0", "engine/0/0"): [[0, 0, 0, 0, 64]]}
    (route,) = division.rest.routes
    assert np.array_equal(route.runs.ids(), A[4:].reshape(-1))
    assert division.rest.rounds == 4 < plan.rounds


@pytest.mark.parametrize("seed", range(60))
def test_direct_and_rest_are_the_plan(seed: int) -> None:
    """Every hop's ids travel once, by rounds or directly; the rest is lawful, or it could not have been made."""
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([8, 24, 100])))
    shared = {w: [n for n in crossing.maps[w].parameters if rng.integers(0, 2)] for w in plan.holders}
    least, least_mapped = (int(rng.choice([1, 4, 16])) for _ in range(2))
    near = Near(crossing.maps, {}, least, least_mapped, shared)
    division = divide(plan, near)
    hops: list[dict[tuple[str, str, str], list[int]]] = []
    for each in (plan, division.rest):
        found: dict[tuple[str, str, str], list[int]] = {}
        for route in each.routes:
            for hop in route.hops:
                found.setdefault((hop.stage.name, hop.source, hop.target), []).extend(route.runs.ids().tolist())
        hops.append(found)
    whole, rest = hops
    for (stage, source, target), ids in whole.items():
        left = rest.pop((stage, source, target), [])
        assert len(set(left)) == len(left)
        gone = set(ids) - set(left)
        assert set(left) <= set(ids)
        moves = division.moves.get((source, target))
        held, needed = (
            {n: m.ids(n).reshape(-1) for n in m.parameters} for m in (crossing.maps[source], crossing.maps[target])
        )
        read: set[int] = set()
        mapped: set[int] = set()
        if moves is not None and moves.stage.name == stage:
            for row in moves.rows.tolist():
                a, begin, b, to, length, width = row
                mine = list(held.values())[a][begin : begin + length]
                assert np.array_equal(mine, list(needed.values())[b][to : to + length])
                assert length * width >= 1
                read |= set(mine.tolist())
                if list(held)[a] in shared[source]:
                    mapped |= set(mine.tolist())
                    assert a in moves.mapped
            for ids, size in ((read, moves.bytes), (mapped, moves.mapped_bytes)):
                specs = [crossing.space.spec(crossing.space.locate(i)[0]) for i in ids]
                assert size == sum(spec.element_type.item_bytes for spec in specs)
        assert read == gone
    assert rest == {}


def test_tensors_that_stay_together_in_rounds_may_be_partly_direct() -> None:
    """The rest keeps the rounds that tensors were dealt to; one that is direct as a whole leaves its round empty."""
    plan, maps = planned(
        {"trainer/0": {"a": A, "b": B}}, {"engine/0/0": {"p": np.concatenate([A[:3], A[:2:-1]]), "q": B}}
    )
    sides = [{w: maps[w] for w in side} for side in (plan.holders, plan.needers)]
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    plan = make_plan(correspond(*sides), topology, buffer_bytes=512, keep_together="tensor")
    assert plan.rounds == 2
    division = divide(plan, Near(maps, {}, 65))
    assert division.moves["trainer/0", "engine/0/0"].bytes == 4 * (48 + 64)
    assert division.rest.rounds == 2
    values = np.arange(1, 193, dtype=np.float32)
    memory = {"trainer/0": {"a": values[A - 1], "b": values[B - 1]}}
    memory["engine/0/0"] = {"p": np.zeros((8, 16), dtype=np.float32), "q": np.zeros(64, dtype=np.float32)}
    run_in_process(plan, maps, memory, direct_bytes=65)
    assert np.array_equal(memory["engine/0/0"]["p"], np.concatenate([A[:3], A[:2:-1]]))
    assert np.array_equal(memory["engine/0/0"]["q"], B)


def program_bytes(direct: bool = True) -> tuple[Program, Program]:
    plan, maps = planned({"trainer/0": {"a": A, "b": B}}, {"engine/0/0": {"p": A.T, "q": B}})
    compiler = Compiler(plan, Near(maps, {}, 64, 64, {"trainer/0": ["b"]}) if direct else None)
    source, target = (compiler.program(worker, maps[worker]) for worker in plan.workers)
    return source, target


def test_programs_with_direct_moves_travel() -> None:
    for program in program_bytes():
        back = Program.from_bytes(program.to_bytes())
        assert back.digest() == program.digest()
        assert (back.offers, back.fetches) == (program.offers, program.fetches)
        assert (back.lent, back.mapped) == (program.lent, program.mapped)
        assert program.mapped_bytes == 256
        assert [rows.tolist() for rows in back.fetch_rows] == [rows.tolist() for rows in program.fetch_rows]
        assert program.plan_digest != program_bytes(direct=False)[0].plan_digest


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (FetchColumn.TENSOR, 2),
        (FetchColumn.TENSOR, -1),
        (FetchColumn.OFFSET, 1),
        (FetchColumn.OFFSET, -1),
        (FetchColumn.BYTES, 257),
        (FetchColumn.BYTES, (1 << 63) - 1),
        (FetchColumn.OFFSET, (1 << 63) - 1),
        (FetchColumn.LENT, -1),
        (FetchColumn.LENT_OFFSET, -4),
    ],
)
def test_bytes_of_a_program_that_would_write_past_a_tensor_are_refused(column: FetchColumn, value: int) -> None:
    _, target = program_bytes()
    target.fetch_rows[0][0, column] = value
    with pytest.raises(ProgramError, match="what it reads from trainer/0 leaves its tensor"):
        Program.from_bytes(target.to_bytes())


def test_bytes_of_a_program_with_flags_or_tensors_that_are_not_there_are_refused() -> None:
    source, target = program_bytes()
    changed: Sequence[tuple[Program, str, object]] = [
        (target, "fetches", (type(target.fetches[0])(Stage.RECEIVE, "trainer/0", target.flags, 0, 0),)),
        (target, "fetches", (type(target.fetches[0])(Stage.RECEIVE, "trainer/0", 0, -1, 0),)),
        (target, "fetches", (type(target.fetches[0])(Stage.RECEIVE, "trainer/0", 0, 0, -5),)),
        (target, "fetches", ()),
        (source, "lent", (7,)),
        (source, "lent", (0, 0)),
        (source, "lent", ()),
        (source, "mapped", (7,)),
        (source, "offers", (replace(source.offers[0], mapped_bytes=source.offers[0].bytes + 1),)),
        (target, "fetches", (replace(target.fetches[0], mapped_bytes=-1),)),
    ]
    for program, field, value in changed:
        fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
        with pytest.raises(ProgramError, match=r"direct move|do not add up"):
            Program.from_bytes(Program(**{**fields, field: value}).to_bytes())


def test_the_same_program_as_before_where_nobody_is_near() -> None:
    plan, maps = planned({"trainer/0": {"a": A}}, {"engine/0/0": {"p": A}})
    for worker in plan.workers:
        assert (
            Compiler(plan, None).program(worker, maps[worker]).digest()
            == compile_program(plan, worker, maps[worker]).digest()
        )
