"""One host over shared memory: a 2 GB dense model from two FSDP trainers to an engine of two tensor-parallel ranks.

Every worker is a process. A run is timed from the first worker that starts to the last that ends, and the floor is a
copy of the model's bytes by all cores. Three ways are measured:

- *mapped*: trainers have their parameters in shared memory (``model.share_memory()``), which they must have arranged.
  Rollouts map it and copy what lies alike on both sides, in one pass.
- *read*: trainers' parameters are private memory, as where nobody has arranged anything. Rollouts read them with
  a system call, at 1.6 memcpys for long runs and 3 and more for short ones; runs below 4 KiB go in rounds.
- *staged*: everything goes in rounds. A byte is packed, written and assembled: three copies.

The other cases compare with what torch offers for the same change of layout, without fused parameters, which it cannot
build: a distributed checkpoint saved to and loaded from memory, and `DTensor.redistribute` and sends over gloo. Ours is
the mapped way; ``private`` names the other, which has the same bars. It misses that of DTensor, which needs 14 memcpys
on two quiet cores: a tenth of that is less than the system call alone takes.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from adapters.cli.benchmark import Row, interleaved_medians
from adapters.deployments_layouts import Fsdp, Rollout, rollout_maps, trainer_maps
from adapters.deployments_models import model_of
from adapters.planning import topology_of_hosts
from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from tests.benchmarks._host_worker import Shapes, serve, serve_torch
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near, divide
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.report import WorkerReport

LAYERS = 18
BUFFER_BYTES = 64 << 20
RANKS = 2
PATIENCE_S = 300.0
SETTINGS = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
}


def rows(layers: int = LAYERS) -> list[Row]:
    """The benchmark's rows."""
    space, plan, maps = crossing(layers)
    model_bytes = space.total_elements * 2
    copy = copy_of(model_bytes)
    shared = {worker: maps[worker].parameters for worker in plan.holders}
    out, ours = [], {}
    for way, near in (("mapped", Near(maps, {}, shared=shared)), ("read", Near(maps, {}))):
        ours[way], floor = measured(plan, maps, near, copy)
        direct = sum(moves.bytes for moves in divide(plan, near).moves.values())
        name = f"{model_bytes / 1e9:.1f} GB, {direct / 1e9:.1f} of them {way}"
        out.append(Row.against_floor(f"memcpys, {name}", value=ours[way], unit="s", floor=floor, bar=3.5))
    staged, floor = measured(plan, maps, None, copy)
    name = f"{model_bytes / 1e9:.1f} GB in {plan.rounds} rounds"
    out.append(Row.against_floor(f"staged memcpys, {name}", value=staged, unit="s", floor=floor))
    with torch_ranks(shapes_of(space)) as theirs:
        for case, asked in (("vs dcp", "dcp"), ("vs dtensor", "dtensor")):
            took = min(theirs(asked) for _ in range(3))
            for name, way in ((case, "mapped"), (f"{case}, private", "read")):
                name = f"{name}: ours over theirs"
                out.append(Row.against_floor(name, value=ours[way], unit="s", floor=took, bar=0.1))
    return out


def measured(
    plan: Plan, maps: Mapping[str, SourceMap], near: Near | None, copy: Callable[[], None]
) -> tuple[float, float]:
    """Seconds of an update and of a copy of its bytes, after one update whose bits were checked."""
    with workers(plan, maps, near) as run:
        versions = iter(range(1 << 20))
        check(run, next(versions))
        return interleaved_medians(lambda: run(next(versions)), copy)


def crossing(layers: int) -> tuple[CheckpointSpace, Plan, dict[str, SourceMap]]:
    """The checkpoint, the plan and everybody's maps."""
    model = model_of({**SETTINGS, "num_hidden_layers": layers})
    space = model.space()
    held = trainer_maps(model, space, Fsdp(RANKS))
    needed = rollout_maps(model, space, Rollout(engines=1, tp=RANKS))
    topology = topology_of_hosts(dict.fromkeys([*held, *needed], "here"))
    return space, make_plan(correspond(held, needed), topology, buffer_bytes=BUFFER_BYTES), {**held, **needed}


@contextmanager
def workers(plan: Plan, maps: Mapping[str, SourceMap], near: Near | None) -> Iterator[Callable[[object], float]]:
    """Every worker of a plan in a process; a call runs a version and says how long it took, or ``"digest"`` checks.

    With ``near``, what can goes directly; what it has in shared memory is there.
    """
    compiler = Compiler(plan, near)
    threads = max(1, (os.cpu_count() or 1) // len(plan.workers))
    arguments = [
        (compiler.program(worker, maps[worker]).to_bytes(), maps[worker].to_bytes(), threads) for worker in plan.workers
    ]
    with processes(serve, arguments) as pipes:
        endpoints = dict(zip(plan.workers, answers(pipes), strict=True))
        ask(pipes, endpoints)
        answers(pipes)

        def run(version: object) -> float:
            ask(pipes, version)
            got = answers(pipes)
            if version == "digest":
                return float(differing(plan, got))
            reports = [report for report in got if isinstance(report, WorkerReport)]
            return max(report.finished_at for report in reports) - min(report.started_at for report in reports)

        yield run


def check(run: Callable[[object], float], version: int) -> None:
    """One update, after which trainers and rollouts must have the same bits."""
    run(version)
    wrong = run("digest")
    if wrong:
        raise ValueError(f"{wrong:.0f} tensors differ between trainers and rollouts after an update")


def differing(plan: Plan, digests: Sequence[object]) -> int:
    """Tensors whose digests, summed over the ranks of a side, differ."""
    sums = [Counter[str](), Counter[str]()]
    for worker, mine in zip(plan.workers, digests, strict=True):
        assert isinstance(mine, dict)
        for name, value in mine.items():
            sums[worker in plan.needers][name] += int(value)
    whole = {name for name, value in sums[1].items() if (value - sums[0][name]) % (1 << 64)}
    # What every rollout rank has whole is summed twice there.
    return sum((sums[1][name] - RANKS * sums[0][name]) % (1 << 64) != 0 for name in whole)


def copy_of(total_bytes: int) -> Callable[[], None]:
    """A copy of so many bytes by all cores, from memory that no cache holds."""
    cores = len(os.sched_getaffinity(0))
    chunk = 256 << 20
    pairs = [(np.ones(chunk, dtype=np.uint8), np.zeros(chunk, dtype=np.uint8)) for _ in range(cores)]
    pool = ThreadPoolExecutor(cores)

    def one(core: int) -> None:
        source, target = pairs[core]
        for begin in range(0, total_bytes // cores, chunk):
            size = min(chunk, total_bytes // cores - begin)
            target[:size] = source[:size]

    return lambda: list(pool.map(one, range(cores))).clear()


@contextmanager
def torch_ranks(shapes: Shapes) -> Iterator[Callable[[str], float]]:
    """Trainers and rollouts in torch's process group; a call reshards once and says how long the slowest rank took."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        with processes(serve_torch, [(rank, 2 * RANKS, folder, shapes) for rank in range(2 * RANKS)]) as pipes:
            answers(pipes)

            def run(asked: str) -> float:
                ask(pipes, asked)
                return max(float(str(took)) for took in answers(pipes))

            yield run
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shapes_of(space: CheckpointSpace) -> Shapes:
    """The checkpoint's tensors, and the axis by which tensor parallelism cuts each."""
    rows_cut = ("o_proj.weight", "down_proj.weight")
    return {
        spec.name: (spec.shape, None if len(spec.shape) == 1 else int(spec.name.endswith(rows_cut)))
        for spec in space.specs
    }


@contextmanager
def processes(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[list[Connection]]:
    """Spawned processes and a pipe to each; all of them are gone at the end."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    try:
        for each in arguments:
            mine, theirs = context.Pipe()
            children.append(context.Process(target=target, args=(theirs, *each), daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(mine)
        yield pipes
        ask(pipes, None)
        for child in children:
            child.join(30)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join(10)


def ask(pipes: Sequence[Connection], what: object) -> None:
    """Send one thing to everybody."""
    for pipe in pipes:
        pipe.send(what)


def answers(pipes: Sequence[Connection]) -> list[object]:
    """Everybody's answer.

    Raises
    ------
    TimeoutError
        If a process says nothing for a long time.
    """
    out = []
    for number, pipe in enumerate(pipes):
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"process {number} of the benchmark said nothing for {PATIENCE_S:g} s")
        out.append(pipe.recv())
    return out
