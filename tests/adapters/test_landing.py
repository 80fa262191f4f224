"""Digests of what is copied straight into place: the numbers of the memory at rest, and no wrong byte unseen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

import transfer_exec.fetching as fetching
import transfer_exec.transport.reading as reading
from adapters.failures import VerificationError
from adapters.planning import topology_of_hosts
from adapters.verification import Digests, Proof, cells_of, check_digests, check_holders, plan_proof
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.transfer_exec.crossing_worker import in_memory_file
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near
from transfer_exec.executor import Executor
from transfer_exec.planner import make_plan
from transfer_exec.program import StripColumn
from transfer_exec.transport.base import Endpoint, Transport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.reading import Batch, Sums
from transfer_exec.transport.shared_memory import SharedMemoryTransport

TIED = " tied"
"""Behind the name of a parameter that is the same memory as another."""

Arrays = dict[str, np.ndarray]
Make = Callable[[str], Transport]


@dataclass
class Job:
    """Trainers and rollouts of one process, bound and connected, with what proves them."""

    maps: Mapping[str, SourceMap]
    correspondence: Correspondence
    executors: dict[str, Executor]
    memory: dict[str, Arrays]
    proofs: dict[str, Proof]
    strips: dict[str, IdArray]
    rests: dict[str, Proof]
    sent: Digests = field(default_factory=dict)

    def update(self, version: int, rng: np.random.Generator) -> dict[str, dict[int, int]]:
        """New weights cross; the digests of the rollouts."""
        fill(self, rng)
        self.sent = {w: self.proofs[w].digests(self.memory[w]) for w in self.executors if w.startswith("trainer")}
        check_holders(self.correspondence, self.sent)
        sums = {worker: self.proofs[worker].zeros() for worker in self.rests}
        with ThreadPoolExecutor(len(self.executors)) as pool:
            runs = [pool.submit(e.run, version, sums=sums.get(w)) for w, e in self.executors.items()]
            for each in runs:
                each.result()
        return {w: self.rests[w].digests(self.memory[w], self.executors[w].staged, sums[w]) for w in sums}

    def at_rest(self) -> dict[str, dict[int, int]]:
        """Of all memory of the rollouts, read again."""
        return {w: self.proofs[w].digests(self.memory[w], self.executors[w].staged) for w in self.rests}

    def check(self, landed: Digests) -> None:
        check_digests(self.correspondence, self.sent, landed)


def fill(job: Job, rng: np.random.Generator) -> None:
    """Random bits for every element, NaNs of all kinds among them, equal on all trainers."""
    space = next(iter(job.maps.values())).space
    for spec in space.specs:
        bits = rng.integers(0, 256, space.total_elements * 8, dtype=np.uint8)
        values = bits[: spec.elements * dtype_of(spec.dtype).item_bytes].view(f"u{dtype_of(spec.dtype).item_bytes}")
        first = space.element_id(spec.name, 0) if spec.elements else 1
        for worker, arrays in job.memory.items():
            if worker.startswith("trainer"):
                for name, array in arrays.items():
                    ids = job.maps[worker].ids(name) - first
                    mine = (ids >= 0) & (ids < spec.elements)
                    array.view(f"u{array.itemsize}")[mine] = values[ids[mine]]


@contextmanager
def job_of(
    held: Mapping[str, SourceMap],
    needed: Mapping[str, SourceMap],
    *,
    make: Make = SharedMemoryTransport,
    shared: bool = False,
    least_bytes: int = 64,
) -> Iterator[Job]:
    """Bind and connect; padding and everything else that nobody sends is 0xA5."""
    maps = {**held, **needed}
    made = correspond(held, needed)
    plan = make_plan(made, topology_of_hosts(dict.fromkeys(maps, "here")), buffer_bytes=512)
    mapped = {w: m.parameters for w, m in held.items()} if shared else {}
    compiler = Compiler(plan, Near(maps, {}, least_bytes, least_bytes, shared=mapped))
    memory = {}
    for worker, each in maps.items():
        widths = {name: dtype_of(each.dtype(name)) for name in each.parameters}
        memory[worker] = {n: np.full(each.shape(n), 0, widths[n].storage) for n in each.parameters}
        for array in memory[worker].values():
            array.view(np.uint8)[...] = 0xA5
        for name in memory[worker]:
            if name.endswith(TIED):
                memory[worker][name] = memory[worker][name.removesuffix(TIED)]
        if worker in mapped:
            memory[worker] = {n: in_memory_file(a) if a.size else a for n, a in memory[worker].items()}
    programs = {w: compiler.program(w, maps[w]) for w in plan.workers}
    staged = {w: [t.name for t in program.tensors if t.staged] for w, program in programs.items()}
    proofs = {w: plan_proof(maps[w], cells_of(made, w), staged=staged[w], threads=2) for w in programs}
    divided = {w: proofs[w].divide(programs[w]) for w in programs if w in needed}
    executors = {
        w: Executor(program, memory[w], make(w), deadline_s=30, strips=divided[w][0] if w in divided else None)
        for w, program in programs.items()
    }
    endpoints = {w: Endpoint.from_bytes(each.endpoint.to_bytes()) for w, each in executors.items()}
    for each in executors.values():
        each.connect(endpoints)
    strips, rests = ({w: each[k] for w, each in divided.items()} for k in (0, 1))
    try:
        yield Job(maps, made, executors, memory, proofs, strips, rests)
    finally:
        for each in executors.values():
            each.close()


def cores_of(cores: range, _: int) -> range:
    """Stands for the system's answer, from which transports count their threads."""
    return cores


def random_sides(rng: np.random.Generator) -> tuple[dict[str, SourceMap], dict[str, SourceMap]]:
    """Two trainers that hold rows, or everything; rollouts with whole, cut, turned, padded, wider, tied parameters."""
    dtypes = rng.choice(["BF16", "F32", "U8", "F64"], int(rng.integers(1, 4)))
    shapes = [(2 * int(rng.integers(1, 12)), 2 * int(rng.integers(1, 200))) for _ in dtypes]
    space = CheckpointSpace(
        [TensorSpec(f"t{k}", s, str(d)) for k, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    )
    ids = {
        spec.name: np.arange(spec.elements).reshape(spec.shape) + space.element_id(spec.name, 0) for spec in space.specs
    }
    replicas = bool(rng.integers(0, 2))
    held = {}
    for rank in range(2):
        rows = {n: a if replicas else np.split(a, 2)[rank] for n, a in ids.items()}
        held[f"trainer/{rank}"] = SourceMap.from_ids(space, rows)
    needed = {}
    for rank in range(int(rng.integers(1, 4))):
        parameters, wider = {}, {}
        for name, whole in ids.items():
            match rng.integers(0, 9):
                case 0:
                    mine = whole
                case 1:
                    mine = np.split(whole, 2, axis=1)[rank % 2]
                case 2:
                    mine = np.ascontiguousarray(whole.T)
                case 3:
                    mine = whole[::2]
                case 4:
                    mine = whole.reshape(-1)[::-1].copy()
                case 5:
                    mine = np.concatenate(
                        [np.split(whole, 2)[1], np.zeros((3, whole.shape[1]), int), np.split(whole, 2)[0]]
                    )
                case 6:
                    mine = whole[:, ::2]
                case 7:
                    mine = whole
                    wider |= {name: "F32"} if space.spec(name).dtype == "BF16" else {}
                case _:
                    continue
            parameters[name] = mine
            if rng.integers(0, 3) == 0:
                parameters[name + TIED] = mine
                wider |= {name + TIED: wider[name]} if name in wider else {}
        needed[f"engine/{rank}/0"] = SourceMap.from_ids(
            space, parameters, {n: wider.get(n, space.spec(n.removesuffix(TIED)).dtype) for n in parameters}
        )
    return held, needed


@pytest.mark.parametrize("part", range(4))
def test_100_random_jobs_give_the_digests_of_the_memory_at_rest(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, mapped and late; chunks from 64 bytes on, several versions in a row, with one thread and with four."""
    strips = alone = 0
    for seed in range(25 * part, 25 * part + 25):
        rng = np.random.default_rng(seed)
        held, needed = random_sides(rng)
        if not any(len(each.parameters) for each in needed.values()):
            continue
        cores = range(int(rng.choice([1, 16])))
        monkeypatch.setattr(os, "sched_getaffinity", partial(cores_of, cores))
        monkeypatch.setattr(fetching, "_CHUNK_BYTES", int(rng.choice([64, 1024, 8192])))
        monkeypatch.setattr(reading, "_PIECE_BYTES", int(rng.choice([64, 512])))
        policy = LoopbackPolicy(seed=seed, max_delay=int(rng.integers(0, 4)), reorder=True)
        make: Make = LoopbackNetwork(policy).transport if seed % 4 == 0 else SharedMemoryTransport
        least = int(rng.choice([16, 64, 2048]))
        with job_of(held, needed, make=make, shared=bool(seed % 4 > 1), least_bytes=least) as job:
            strips += sum(len(each) for each in job.strips.values())
            alone += sum(not each.plan.parts for each in job.rests.values())
            for version in range(3):
                landed = job.update(version, rng)
                assert landed == job.at_rest(), f"seed {seed}"
                job.check(landed)
    assert strips > 100
    assert alone > 1, "rollouts of which everything lands directly"


ROWS, COLUMNS = 32, 256
W_SPACE = CheckpointSpace([TensorSpec("w", (ROWS, COLUMNS), "F32"), TensorSpec("x", (16, 16), "BF16")])
W = np.arange(1, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS)
X = np.arange(W.size + 1, W.size + 257).reshape(16, 16)
PADDED = np.concatenate([W[:16], np.zeros((1, COLUMNS), dtype=int), W[16:]])
"""With a row that no checkpoint element is in."""


@contextmanager
def small_job(*, shared: bool = False) -> Iterator[Job]:
    """A padded matrix that goes directly, and a turned one in rounds."""
    held = {"trainer/0": SourceMap.from_ids(W_SPACE, {"w": W, "x": X})}
    needed = {"engine/0/0": SourceMap.from_ids(W_SPACE, {"w": PADDED, "x": X.T})}
    with job_of(held, needed, shared=shared) as job:
        assert job.strips["engine/0/0"][:, StripColumn.BYTES].sum() == W.size * 4
        assert job.rests["engine/0/0"].plan.parameters == ("x",)
        yield job


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether the trainer's tensors are in shared memory."""
    return bool(request.param)


Spoil = Callable[[np.ndarray], None]


def spoiled_on_the_way(monkeypatch: pytest.MonkeyPatch, job: Job, spoil: Spoil) -> None:
    """What the trainer holds is something else while the rollout copies it."""
    move, source = Batch.move, job.memory["trainer/0"]["w"]

    def spoiling(batch: Batch, pid: int, sums: Sums | None) -> None:
        kept = source.copy()
        spoil(source)
        move(batch, pid, sums)
        source[...] = kept

    monkeypatch.setattr(Batch, "move", spoiling)


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 16384, ROWS * COLUMNS * 4 - 1])
def test_a_bit_that_differs_anywhere_is_seen(place: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter, rank and what to do are named."""

    def flip(source: np.ndarray) -> None:
        source.reshape(-1).view(np.uint8)[place] ^= 1 << (place % 8)

    with small_job(shared=shared) as job:
        spoiled_on_the_way(monkeypatch, job, flip)
        with pytest.raises(
            VerificationError, match=r"engine/0/0: the bits of w.* differ from those that trainer/0 sent"
        ):
            job.check(job.update(1, np.random.default_rng(1)))


def swap_rows(source: np.ndarray) -> None:
    source[[3, 20]] = source[[20, 3]]


def shift(source: np.ndarray) -> None:
    source.reshape(-1)[2000:3000] = np.roll(source.reshape(-1)[2000:3000], 1)


def swap_elements(source: np.ndarray) -> None:
    flat = source.reshape(-1)
    flat[[100, 101]] = flat[[101, 100]]


@pytest.mark.parametrize("wrong", [swap_rows, shift, swap_elements])
def test_what_is_in_the_wrong_place_is_seen(wrong: Spoil, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_job(shared=shared) as job:
        spoiled_on_the_way(monkeypatch, job, wrong)
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(job.update(1, np.random.default_rng(1)))


def test_what_is_of_the_version_before_is_seen(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_job(shared=shared) as job:
        job.check(job.update(1, np.random.default_rng(1)))
        old = job.memory["trainer/0"]["w"][5].copy()

        def stale(source: np.ndarray) -> None:
            source[5] = old

        spoiled_on_the_way(monkeypatch, job, stale)
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(job.update(2, np.random.default_rng(2)))


def test_what_differs_in_rounds_is_seen_and_padding_is_not_looked_at(shared: bool) -> None:
    with small_job(shared=shared) as job:
        job.check(job.update(1, np.random.default_rng(1)))
        rest, memory = job.rests["engine/0/0"], job.memory["engine/0/0"]
        before = rest.digests(memory)
        memory["w"].view(np.uint32)[16] ^= 1
        assert rest.digests(memory) == before
        memory["x"][3, 5] ^= 1
        assert rest.digests(memory) != before


def test_what_is_staged_for_a_loader_is_digested_as_it_lands() -> None:
    """A checkpoint tensor that arrives whole for a computed parameter, beside one that is copied."""
    opaque = ParameterMap((4,), "F32", CopyTable.empty(), RunTable.from_ids(range(4)), ("w",))
    copied = SourceMap.from_ids(W_SPACE, {"x": X})
    needed = SourceMap(W_SPACE, {"computed": opaque, **{name: copied[name] for name in copied.parameters}})
    held = {"trainer/0": SourceMap.from_ids(W_SPACE, {"w": W, "x": X})}
    with job_of(held, {"engine/0/0": needed}) as job:
        rest = job.rests["engine/0/0"]
        assert not rest.plan.parts
        assert not rest.staged.parts
        landed = job.update(1, np.random.default_rng(1))
        assert landed == job.at_rest()
        job.check(landed)
