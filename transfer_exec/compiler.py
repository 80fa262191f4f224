"""From a plan and one worker's source map to that worker's program.

Everybody compiles from the same plan, so the two ends of a message agree on flags, offsets and sizes without a word:
that is why ranks compare the plan's digest first. Nothing here touches memory or a clock.

>>> import numpy as np
>>> from layout_algebra.runs import RunTable
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> from transfer_exec.plan import Hop, Plan, Route, Stage
>>> space = CheckpointSpace([TensorSpec("w", (4,), "F32")])
>>> held = SourceMap.from_ids(space, {"w": np.arange(1, 5)})
>>> route = Route(RunTable.from_ids([1, 2, 3, 4]), 4, "t", (Hop(Stage.RECEIVE, "t", "e"),))
>>> plan = Plan(space.digest(), ("t",), ("e",), (0, 1), (route,), 2, 8, 1.0, "t", 1.0, 1.0)
>>> [type(step).__name__ for step in compile_program(plan, "t", held).instructions]
['Pack', 'Write']
>>> [type(step).__name__ for step in compile_program(plan, "e", held).instructions]
['Await', 'Assemble', 'Release']
"""

from __future__ import annotations

import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import UnsupportedDtypeError
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from layout_algebra.strips import StripTable
from transfer_exec.conversions import code_of
from transfer_exec.descriptors import DescriptorTable, descriptor_tables
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column, GatherTable, Sources, gather_table
from transfer_exec.plan import Plan, Stage
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
from transfer_exec.regions import Buffer, Layout, Message, Region, Regions

_STAGE_BUFFERS = (Buffer.RECEIVE, Buffer.EXTERNAL, Buffer.INTERNAL)


def compile_program(plan: Plan, worker: str, source_map: SourceMap) -> Program:
    """Compile one worker's program.

    Parameters
    ----------
    plan
        The whole plan.
    worker
        One of its workers.
    source_map
        That worker's map, the one the plan was made with.

    Returns
    -------
    Program
        With the parameters that have traffic, and the checkpoint tensors that opaque parameters depend on.

    Raises
    ------
    ProgramError
        If the worker is not in the plan, the map is of another checkpoint, a holder lacks what the plan has it
        send, a needer does not get what its map needs, a buffer would exceed the plan's budget, or a conversion
        is not defined.
    """
    return compile_from_regions(Regions(plan), worker, source_map)


def compile_from_regions(regions: Regions, worker: str, source_map: SourceMap) -> Program:
    """`compile_program` for several workers of one plan, whose regions are made once."""
    plan = regions.plan
    if worker not in plan.workers:
        raise ProgramError(f"{worker} is not a worker of the plan; it has {', '.join(plan.workers)}")
    if plan.space_digest != source_map.space.digest():
        raise ProgramError(
            f"{worker}: its map is of checkpoint {source_map.space.digest()}, the plan of {plan.space_digest}; "
            "discover and plan with one checkpoint folder"
        )
    layouts = {buffer: regions.layout(Region(worker, buffer)) for buffer in Buffer}
    _check_budget(plan, worker, layouts)
    received = [(buffer, layouts[buffer]) for buffer in _STAGE_BUFFERS if len(layouts[buffer].routes)]
    packed = layouts[Buffer.PACK].routes
    _check_widths(plan, source_map.space, worker, layouts)
    _check_held(plan, source_map, worker, packed)
    if worker in plan.needers:
        _check_served(plan, source_map, worker, received)
    tensors = _tensors(source_map)
    pack = gather_table(plan, _holder_sources(source_map, tensors), [(Buffer.PACK, layouts[Buffer.PACK])])
    assemble = gather_table(plan, _needer_sources(source_map, tensors), received)
    _check_codes(worker, tensors, pack, assemble)
    tensors, pack, assemble = _used_only(tensors, pack, assemble)
    instructions, descriptors = _instructions(regions, worker, assembles=len(assemble.rows) > 0)
    return Program(
        worker=worker,
        plan_digest=plan.digest(),
        map_digest=source_map.digest(),
        rounds=plan.rounds,
        buffer_sizes=(
            layouts[Buffer.PACK].size_bytes,
            layouts[Buffer.RECEIVE].size_bytes,
            layouts[Buffer.EXTERNAL].size_bytes,
            layouts[Buffer.INTERNAL].size_bytes,
        ),
        flags=len(regions.incoming(worker)) + len(regions.targets(worker)),
        instructions=instructions,
        tensors=tensors,
        descriptors=descriptors,
        pack=pack,
        assemble=assemble,
        arriving=np.stack([layouts[buffer].sizes.sum(axis=0) for buffer in _STAGE_BUFFERS]),
    )


def _instructions(
    regions: Regions, worker: str, *, assembles: bool
) -> tuple[tuple[Instruction, ...], tuple[DescriptorTable, ...]]:
    """A round: per stage and leg first write what is there, then wait for what comes; then assemble and release."""
    steps: list[Instruction] = []
    tables: list[DescriptorTable] = []
    incoming = regions.incoming(worker)
    outgoing = regions.outgoing(worker)
    targets = regions.targets(worker)
    if any(buffer is Buffer.PACK for message in outgoing for buffer, _ in regions.origins(message)):
        steps.append(Pack())
    for stage, leg in ((stage, leg) for stage in Stage for leg in (0, 1)):
        for message in outgoing:
            if (message.stage, message.leg) == (stage, leg):
                made = descriptor_tables(regions, message)
                release = len(incoming) + targets.index(message.target)
                flag = regions.incoming(message.target).index(message)
                numbers = tuple(range(len(tables), len(tables) + len(made)))
                kind = Write if all(table.buffer is Buffer.PACK for table in made) else Exchange
                steps.append(kind(stage, message.target, flag, release, numbers))
                tables.extend(made)
        arriving = [
            (message.source, flag)
            for flag, message in enumerate(incoming)
            if (message.stage, message.leg) == (stage, leg)
        ]
        if arriving:
            steps.append(Await(stage, tuple(name for name, _ in arriving), tuple(flag for _, flag in arriving)))
    if assembles:
        steps.append(Assemble())
    if incoming:
        steps.append(_release(regions, worker, incoming))
    return tuple(steps), tuple(tables)


def _release(regions: Regions, worker: str, incoming: tuple[Message, ...]) -> Release:
    sources = tuple(dict.fromkeys(message.source for message in incoming))
    flags = [len(regions.incoming(source)) + regions.targets(source).index(worker) for source in sources]
    return Release(sources, tuple(flags))


def _tensors(source_map: SourceMap) -> tuple[ProgramTensor, ...]:
    parameters = [ProgramTensor(n, source_map.shape(n), source_map.dtype(n)) for n in source_map.parameters]
    specs = [source_map.space.spec(name) for name in source_map.staged_tensors()]
    return (*parameters, *(ProgramTensor(spec.name, spec.shape, spec.dtype, staged=True) for spec in specs))


def _holder_sources(source_map: SourceMap, tensors: tuple[ProgramTensor, ...]) -> Sources:
    return _sources(source_map.space, source_map.strips.disjoint(), tensors, packing=True)


def _needer_sources(source_map: SourceMap, tensors: tuple[ProgramTensor, ...]) -> Sources:
    rows = [source_map.strips.rows]
    first = len(source_map.parameters)
    for position, name in enumerate(source_map.staged_tensors()):
        start, stop = source_map.space.id_range(name)
        if stop > start:
            rows.append(np.array([[start, stop - start, first + position, 0, 1]], dtype=np.int64))
    return _sources(source_map.space, StripTable(np.concatenate(rows)), tensors, packing=False)


def _sources(
    space: CheckpointSpace, strips: StripTable, tensors: tuple[ProgramTensor, ...], *, packing: bool
) -> Sources:
    dtypes = list(dict.fromkeys(spec.dtype for spec in space.specs))
    number = np.array([dtypes.index(spec.dtype) for spec in space.specs], dtype=np.int64)
    filled = np.flatnonzero(np.diff(space.starts) > 0)
    opens = np.ones(len(filled), dtype=bool)
    opens[1:] = number[filled][1:] != number[filled][:-1]
    edges = filled[opens]
    codes = np.full((len(tensors), len(dtypes)), -1, dtype=np.int64)
    for row, tensor in zip(codes, tensors, strict=True):
        for column, dtype in enumerate(dtypes):
            pair = (tensor.dtype, dtype) if packing else (dtype, tensor.dtype)
            row[column] = _code_or_none(*pair)
    bits = {spec.dtype: spec.element_type.bits for spec in space.specs}
    wire_bytes = np.array([bits[dtype] // 8 for dtype in dtypes], dtype=np.int64)
    return Sources(strips, space.starts[edges], number[edges], codes, wire_bytes)


def _code_or_none(source: str, target: str) -> int:
    try:
        return code_of(source, target)
    except (ProgramError, UnsupportedDtypeError):
        return -1


def _used_only(
    tensors: tuple[ProgramTensor, ...], pack: GatherTable, assemble: GatherTable
) -> tuple[tuple[ProgramTensor, ...], GatherTable, GatherTable]:
    """Drop parameters without traffic; staged tensors stay, empty ones too, since a loader may ask for them."""
    used = np.array([tensor.staged for tensor in tensors], dtype=bool)
    for table in (pack, assemble):
        used[table.rows[:, Column.TENSOR]] = True
    number = np.cumsum(used) - 1
    out = []
    for table in (pack, assemble):
        rows = table.rows.copy()
        rows[:, Column.TENSOR] = number[rows[:, Column.TENSOR]]
        out.append(GatherTable(rows, table.bounds))
    return tuple(tensor for tensor, keep in zip(tensors, used, strict=True) if keep), out[0], out[1]


def _check_budget(plan: Plan, worker: str, layouts: dict[Buffer, Layout]) -> None:
    for buffer, layout in layouts.items():
        if layout.size_bytes > plan.buffer_bytes:
            fullest = int(layout.sizes.sum(axis=0).argmax())
            raise ProgramError(
                f"{worker}: round {fullest} puts {layout.size_bytes} bytes into the {buffer.name} buffer, "
                f"the plan allows {plan.buffer_bytes}; plan again"
            )


def _check_widths(plan: Plan, space: CheckpointSpace, worker: str, layouts: dict[Buffer, Layout]) -> None:
    """Every route's element width is that of the tensors its ids belong to."""
    for layout in layouts.values():
        for route in layout.routes.tolist():
            intervals, width = plan.routes[route].runs.intervals, plan.routes[route].item_bytes
            if int(intervals[-1, 1]) > space.total_elements + 1 or int(intervals[0, 0]) < 1:
                raise ProgramError(f"{worker}: route {route} names ids past {space.total_elements}; plan again")
            first = np.searchsorted(space.starts, intervals[:, 0], side="right") - 1
            last = np.searchsorted(space.starts, intervals[:, 1] - 1, side="right") - 1
            wrong = np.zeros(len(space) + 1, dtype=np.int64)
            wrong[1:] = np.cumsum((space.item_bits != 8 * width) & (np.diff(space.starts) > 0))
            bad = np.flatnonzero(wrong[last + 1] > wrong[first])
            if len(bad):
                where = space.describe_ids(*intervals[bad[0]].tolist())
                raise ProgramError(f"{worker}: route {route} moves {where} as {width} bytes an element; plan again")


def _check_held(plan: Plan, source_map: SourceMap, worker: str, routes: IdArray) -> None:
    sent = RunTable.empty().union(*(plan.routes[route].runs for route in routes.tolist()))
    missing = sent.subtract(source_map.held())
    if missing:
        start, stop = missing.intervals[0].tolist()
        raise ProgramError(
            f"{worker}: the plan has it send {source_map.space.describe_ids(start, stop)}, which its map does not "
            f"hold ({missing.elements} of {sent.elements} elements); compile with the map the plan was made with"
        )


def _check_served(plan: Plan, source_map: SourceMap, worker: str, received: list[tuple[Buffer, Layout]]) -> None:
    arriving = [plan.routes[route].runs for _, layout in received for route in layout.routes.tolist()]
    missing = source_map.needed().subtract(RunTable.empty().union(*arriving))
    if missing:
        start, stop = missing.intervals[0].tolist()
        raise ProgramError(
            f"{worker}: its map needs {source_map.space.describe_ids(start, stop)}, which the plan does not bring "
            f"({missing.elements} elements); compile with the map the plan was made with"
        )


def _check_codes(worker: str, tensors: tuple[ProgramTensor, ...], pack: GatherTable, assemble: GatherTable) -> None:
    for table, verb in ((pack, "sent from"), (assemble, "assembled into")):
        bad = np.flatnonzero(table.rows[:, Column.CODE] < 0)
        if len(bad):
            tensor = tensors[int(table.rows[bad[0], Column.TENSOR])]
            raise ProgramError(
                f"{tensor.name} on {worker} is {tensor.dtype}: a checkpoint tensor of another dtype is {verb} it, "
                "and no conversion between the two is defined"
            )
