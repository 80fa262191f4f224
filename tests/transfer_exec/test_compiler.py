"""compile_program: templates by hand, and every refusal before anything runs."""

from __future__ import annotations

import doctest
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec import compiler
from transfer_exec.compiler import compile_program
from transfer_exec.errors import ProgramError
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.program import Assemble, Await, Exchange, Pack, ProgramTensor, Release, Write
from transfer_exec.transport import loopback

SPACE = CheckpointSpace([TensorSpec("w", (12,), "F32"), TensorSpec("x", (4,), "BF16")])
IDS = np.arange(1, 13)


def a_map(ids: np.ndarray, name: str = "w", dtype: str = "F32") -> SourceMap:
    return SourceMap.from_ids(SPACE, {name: ids}, {name: dtype})


def a_plan(*routes: Route, nodes: tuple[int, ...] = (0, 0, 1, 1, 2)) -> Plan:
    """Two rounds; t0 and t1 on node 0; a0 and a1 on node 1; b0 on node 2."""
    return Plan(SPACE.digest(), ("t0", "t1"), ("a0", "a1", "b0"), nodes, routes, 2, 100, 1.0, "t", 1.0, 1.0)


def route(start: int, stop: int, *hops: tuple[Stage, str, str], width: int = 4) -> Route:
    return Route(RunTable.from_intervals([[start, stop]]), width, hops[0][1], tuple(Hop(*hop) for hop in hops))


def three_stages() -> Plan:
    """Ids 1..6 by t0 and a0, ids 7..12 by t1 and b0; both go on to the other node and inside it."""
    return a_plan(
        route(1, 7, (Stage.RECEIVE, "t0", "a0"), (Stage.EXTERNAL, "a0", "b0"), (Stage.INTERNAL, "a0", "a1")),
        route(7, 13, (Stage.RECEIVE, "t1", "b0"), (Stage.EXTERNAL, "b0", "a1"), (Stage.INTERNAL, "a1", "a0")),
    )


def test_templates_of_three_stages() -> None:
    plan = three_stages()
    whole = a_map(IDS)
    assert compile_program(plan, "t0", whole).instructions == (Pack(), Write(Stage.RECEIVE, "a0", 0, 0, (0,)))
    assert compile_program(plan, "a0", whole).instructions == (
        Await(Stage.RECEIVE, ("t0",), (0,)),
        Exchange(Stage.EXTERNAL, "b0", 1, 2, (0,)),
        Exchange(Stage.INTERNAL, "a1", 1, 3, (1,)),
        Await(Stage.INTERNAL, ("a1",), (1,)),
        Assemble(),
        Release(("t0", "a1"), (0, 2)),
    )
    assert compile_program(plan, "a1", whole).instructions == (
        Await(Stage.EXTERNAL, ("b0",), (0,)),
        Exchange(Stage.INTERNAL, "a0", 1, 2, (0,)),
        Await(Stage.INTERNAL, ("a0",), (1,)),
        Assemble(),
        Release(("b0", "a0"), (2, 3)),
    )


def test_flags_agree_at_both_ends() -> None:
    """Who raises a flag and who waits for it mean the same message, for every pair."""
    plan = three_stages()
    programs = {worker: compile_program(plan, worker, a_map(IDS)) for worker in plan.workers}
    awaited = {
        (worker, flag): (step.stage, source)
        for worker, program in programs.items()
        for step in program.instructions
        if isinstance(step, Await)
        for source, flag in zip(step.sources, step.flags, strict=True)
    }
    released = {
        (source, flag): worker
        for worker, program in programs.items()
        for step in program.instructions
        if isinstance(step, Release)
        for source, flag in zip(step.sources, step.flags, strict=True)
    }
    for worker, program in programs.items():
        raised = {flag for owner, flag in [*awaited, *released] if owner == worker}
        assert raised == set(range(program.flags))
    for worker, program in programs.items():
        for step in program.instructions:
            if isinstance(step, (Write, Exchange)):
                assert awaited.pop((step.peer, step.flag)) == (step.stage, worker)
                assert released[worker, step.release] == step.peer
    assert not awaited


def test_buffers_equal_the_regions_of_the_plan() -> None:
    plan = three_stages()
    sizes = {worker: compile_program(plan, worker, a_map(IDS)).buffer_sizes for worker in plan.workers}
    assert sizes == {
        "t0": (12, 0, 0, 0),
        "t1": (12, 0, 0, 0),
        "a0": (0, 12, 0, 12),
        "a1": (0, 0, 12, 12),
        "b0": (0, 12, 12, 0),
    }


def test_a_trainer_inside_the_node_sends_in_the_internal_stage() -> None:
    plan = a_plan(route(1, 13, (Stage.INTERNAL, "t0", "a0")), nodes=(1, 1, 1, 1, 2))
    assert compile_program(plan, "t0", a_map(IDS)).instructions == (Pack(), Write(Stage.INTERNAL, "a0", 0, 0, (0,)))
    idle = compile_program(plan, "t1", a_map(IDS))
    assert (idle.instructions, idle.tensors, idle.flags, idle.buffer_sizes) == ((), (), 0, (0, 0, 0, 0))


def test_a_first_receiver_that_needs_nothing_assembles_nothing() -> None:
    plan = a_plan(route(1, 13, (Stage.RECEIVE, "t0", "a0"), (Stage.INTERNAL, "a0", "a1")))
    program = compile_program(plan, "a0", a_map(np.zeros(2, dtype=np.int64)))
    assert [type(step) for step in program.instructions] == [Await, Exchange, Release]
    assert program.tensors == ()


def test_opaque_parameters_get_their_checkpoint_tensors_staged() -> None:
    """The opaque parameter itself is no target; its tensor is, and also feeds a copied parameter."""
    opaque = ParameterMap((4,), "BF16", CopyTable.empty(), RunTable.from_ids(range(4)), ("x",))
    copied = a_map(np.array([13, 14]), "half", "BF16")["half"]
    needed = SourceMap(SPACE, {"o": opaque, "half": copied})
    plan = a_plan(route(13, 17, (Stage.RECEIVE, "t0", "a0"), width=2))
    program = compile_program(plan, "a0", needed)
    assert program.tensors == (ProgramTensor("half", (2,), "BF16"), ProgramTensor("x", (4,), "BF16", staged=True))
    assert program.tensors[1].bytes == 8


def refused(match: str, plan: Plan, worker: str, source_map: SourceMap) -> None:
    with pytest.raises(ProgramError, match=match):
        compile_program(plan, worker, source_map)


def test_refusals() -> None:
    whole = a_map(IDS)
    plan = three_stages()
    refused("nobody is not a worker of the plan; it has t0, t1, a0", plan, "nobody", whole)
    other = CheckpointSpace([TensorSpec("w", (13,), "F32")])
    refused("its map is of checkpoint", plan, "t0", SourceMap.from_ids(other, {"w": np.arange(1, 14)}))
    refused(r"t0: the plan has it send w\[3:6\].*3 of 6 elements", plan, "t0", a_map(IDS[:3]))
    both = SourceMap.from_ids(SPACE, {"w": IDS, "x": np.arange(13, 17)})
    refused(r"a0: its map needs x\[0:4\], which the plan does not bring \(4 elements", plan, "a0", both)
    refused(r"t0: round 0 puts 24 bytes into the PACK buffer, the plan allows 10", tight(plan), "t0", whole)
    wide = a_plan(route(1, 13, (Stage.RECEIVE, "t0", "a0"), width=2))
    refused(r"route 0 moves w\[0:12\] as 2 bytes an element", wide, "t0", whole)
    past = a_plan(route(10, 30, (Stage.RECEIVE, "t0", "a0")))
    refused("route 0 names ids past 16", past, "t0", whole)


def tight(plan: Plan) -> Plan:
    return replace(plan, rounds=1, buffer_bytes=10)


def test_conversions_that_do_not_exist_are_refused_by_name() -> None:
    space = CheckpointSpace([TensorSpec("w", (4,), "I32")])
    held = SourceMap.from_ids(space, {"w": np.arange(1, 5)}, {"w": "I32"})
    needed = SourceMap.from_ids(space, {"w": np.arange(1, 5)}, {"w": "F32"})
    plan = replace(a_plan(route(1, 5, (Stage.RECEIVE, "t0", "a0"))), space_digest=space.digest())
    compile_program(plan, "t0", held)
    refused("w on a0 is F32: a checkpoint tensor of another dtype is assembled into it", plan, "a0", needed)
    refused("w on t0 is F32: a checkpoint tensor of another dtype is sent from it", plan, "t0", needed)


@pytest.mark.parametrize("module", [compiler, loopback])
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).attempted > 5
    assert doctest.testmod(module).failed == 0
