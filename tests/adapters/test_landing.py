"""Digests taken batch by batch: the same numbers as of the memory at rest, and no wrong byte goes unseen."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import adapters.landing
import transfer_exec.transport.shared_memory as shared_memory
from adapters.failures import VerificationError
from adapters.landing import Landed, Landing
from adapters.planning import topology_of_hosts
from adapters.verification import Digests, Proof, cells_of, check_digests, check_holders, plan_proof
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.dtypes import dtype_of
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import Crew
from tests.adapters.test_direct_moves import SPACE as LONG_SPACE
from tests.adapters.test_direct_moves import holding, weights
from tests.transfer_exec.crossing_worker import in_memory_file
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near
from transfer_exec.errors import DeadlineError, TransportError
from transfer_exec.executor import Executor
from transfer_exec.planner import make_plan
from transfer_exec.program import FetchColumn
from transfer_exec.transport.base import Endpoint, Transport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.process_memory import Ranges
from transfer_exec.transport.shared_memory import SharedMemoryTransport

Arrays = dict[str, np.ndarray]
Make = Callable[[str], Transport]
Hook = Callable[["Job", str, int], None]


@dataclass
class Job:
    """Trainers and rollouts of one process, bound and connected, with what proves them."""

    maps: Mapping[str, SourceMap]
    correspondence: Correspondence
    executors: dict[str, Executor]
    memory: dict[str, Arrays]
    proofs: dict[str, Proof]
    landings: dict[str, Landing]
    sent: Digests = field(default_factory=dict)

    def update(self, version: int, rng: np.random.Generator, hook: Hook | None = None) -> dict[str, Landed]:
        """New weights cross; what rollouts have digested so far. The hook is called before a batch is digested."""
        fill(self, rng)
        self.sent = {w: self.proofs[w].digests(self.memory[w]) for w in self.executors if w.startswith("trainer")}
        check_holders(self.correspondence, self.sent)
        landed = {worker: landing.begin() for worker, landing in self.landings.items()}

        def run(worker: str) -> None:
            def add(peer: str, number: int) -> None:
                if hook is not None:
                    hook(self, peer, number)
                landed[worker].add(peer, number)

            self.executors[worker].run(version, landed=add if worker in landed else None)

        with ThreadPoolExecutor(len(self.executors)) as pool:
            for each in [pool.submit(run, worker) for worker in self.executors]:
                each.result()
        return landed

    def digests(self, landed: Mapping[str, Landed]) -> dict[str, dict[int, int]]:
        return {w: each.digests(self.memory[w], self.executors[w].staged) for w, each in landed.items()}

    def at_rest(self) -> dict[str, dict[int, int]]:
        """Of all memory of the rollouts, read again."""
        return {w: self.proofs[w].digests(self.memory[w], self.executors[w].staged) for w in self.landings}

    def check(self, landed: Mapping[str, Landed]) -> None:
        check_digests(self.correspondence, self.sent, self.digests(landed))


def fill(job: Job, rng: np.random.Generator) -> None:
    """Random bits for every element, equal on all trainers; no NaNs of BF16, which turn quiet in wider parameters."""
    space = next(iter(job.maps.values())).space
    for spec in space.specs:
        bits = rng.integers(0, 256, space.total_elements * 8, dtype=np.uint8)
        values = bits[: spec.elements * dtype_of(spec.dtype).item_bytes].view(f"u{dtype_of(spec.dtype).item_bytes}")
        if spec.dtype == "BF16":
            values &= np.uint16(0xBFFF)
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
    batch_bytes: int = 4096,
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
        if worker in mapped:
            memory[worker] = {n: in_memory_file(a) if a.size else a for n, a in memory[worker].items()}
    programs = {w: compiler.program(w, maps[w]) for w in plan.workers}
    executors = {
        w: Executor(program, memory[w], make(w), deadline_s=30, batch_bytes=batch_bytes)
        for w, program in programs.items()
    }
    endpoints = {w: Endpoint.from_bytes(each.endpoint.to_bytes()) for w, each in executors.items()}
    for each in executors.values():
        each.connect(endpoints)
    staged = {w: [t.name for t in program.tensors if t.staged] for w, program in programs.items()}
    proofs = {w: plan_proof(maps[w], cells_of(made, w), staged=staged[w], threads=2) for w in programs}
    landings = {
        w: Landing.of(proofs[w], programs[w], executors[w].batches, memory[w], executors[w].staged)
        for w in programs
        if w in needed
    }
    try:
        yield Job(maps, made, executors, memory, proofs, landings)
    finally:
        for each in executors.values():
            each.close()


def cores_of(cores: range, _: int) -> range:
    """Stands for the system's answer, from which transports count their threads."""
    return cores


def random_sides(rng: np.random.Generator) -> tuple[dict[str, SourceMap], dict[str, SourceMap]]:
    """Two trainers that hold rows, or everything; rollouts with whole, cut, turned, fused, padded, wider parameters."""
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
        needed[f"engine/{rank}/0"] = SourceMap.from_ids(
            space, parameters, {n: wider.get(n, space.spec(n).dtype) for n in parameters}
        )
    return held, needed


@pytest.mark.parametrize("part", range(4))
def test_200_random_jobs_give_the_digests_of_the_memory_at_rest(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, mapped and late; batches from 64 bytes on, several versions in a row, with one thread and with four."""
    batches = alone = 0
    for seed in range(50 * part, 50 * part + 50):
        rng = np.random.default_rng(seed)
        held, needed = random_sides(rng)
        if not any(len(each.parameters) for each in needed.values()):
            continue
        cores = range(int(rng.choice([1, 16])))
        monkeypatch.setattr(os, "sched_getaffinity", partial(cores_of, cores))
        policy = LoopbackPolicy(seed=seed, max_delay=int(rng.integers(0, 4)), reorder=True)
        make: Make = LoopbackNetwork(policy).transport if seed % 4 == 0 else SharedMemoryTransport
        sizes = {"batch_bytes": int(rng.choice([64, 1024, 8192])), "least_bytes": int(rng.choice([16, 64, 2048]))}
        with job_of(held, needed, make=make, shared=bool(seed % 4 > 1), **sizes) as job:
            batches += sum(len(landing.tables) for landing in job.landings.values())
            alone += sum(not landing.rest.plan.parts for landing in job.landings.values())
            for version in range(3):
                landed = job.update(version, rng)
                assert job.digests(landed) == job.at_rest(), f"seed {seed}"
                job.check(landed)
    assert batches > 500
    assert alone > 5, "rollouts of which everything lands directly"


ROWS, COLUMNS = 32, 256
W_SPACE = CheckpointSpace([TensorSpec("w", (ROWS, COLUMNS), "F32"), TensorSpec("x", (16, 16), "BF16")])
W = np.arange(1, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS)
X = np.arange(W.size + 1, W.size + 257).reshape(16, 16)
PADDED = np.concatenate([W[:16], np.zeros((1, COLUMNS), dtype=int), W[16:]])
"""With a row that no checkpoint element is in."""
BATCH_BYTES = 4096


@contextmanager
def small_job(*, shared: bool = False, **options: int) -> Iterator[Job]:
    """A padded matrix that is read in batches of four rows, and a turned one in rounds."""
    held = {"trainer/0": SourceMap.from_ids(W_SPACE, {"w": W, "x": X})}
    needed = {"engine/0/0": SourceMap.from_ids(W_SPACE, {"w": PADDED, "x": X.T})}
    with job_of(held, needed, shared=shared, **{"batch_bytes": BATCH_BYTES, **options}) as job:
        assert len(job.landings["engine/0/0"].tables) == ROWS * COLUMNS * 4 // BATCH_BYTES
        assert job.landings["engine/0/0"].rest.plan.parameters == ("x",)
        yield job


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether the trainer's tensors are in shared memory."""
    return bool(request.param)


def landed_bytes(job: Job, peer: str, number: int) -> np.ndarray:
    """What a batch has brought, in place."""
    (row,) = job.executors["engine/0/0"].batches[peer][number]
    begin, size = int(row[FetchColumn.OFFSET]), int(row[FetchColumn.BYTES])
    return job.memory["engine/0/0"]["w"].reshape(-1).view(np.uint8)[begin : begin + size]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("place", [0, 1, 2047, BATCH_BYTES - 1])
def test_a_bit_that_differs_in_any_batch_is_seen(number: int, place: int, shared: bool) -> None:
    """At its borders too; parameter, rank and what to do are named."""

    def spoil(job: Job, peer: str, at: int) -> None:
        if at == number:
            landed_bytes(job, peer, at)[place] ^= 1 << (place % 8)

    with small_job(shared=shared) as job:
        landed = job.update(1, np.random.default_rng(1), spoil)
        with pytest.raises(
            VerificationError, match=r"engine/0/0: the bits of w.* differ from those that trainer/0 sent"
        ):
            job.check(landed)


def swapped(job: Job, peer: str, number: int) -> None:
    """A batch and the one before it."""
    if number == 3:
        one, other = landed_bytes(job, peer, 2), landed_bytes(job, peer, 3)
        one[:], other[:] = other.copy(), one.copy()


def shifted(job: Job, peer: str, number: int) -> None:
    """By an element."""
    if number == 3:
        landed_bytes(job, peer, 3)[:] = np.roll(landed_bytes(job, peer, 3), 4)


def halves_swapped(job: Job, peer: str, number: int) -> None:
    """Inside of one batch."""
    if number == 5:
        landed_bytes(job, peer, 5)[:] = np.roll(landed_bytes(job, peer, 5), BATCH_BYTES // 2)


@pytest.mark.parametrize("wrong", [swapped, shifted, halves_swapped])
def test_what_is_in_the_wrong_place_is_seen(wrong: Hook, shared: bool) -> None:
    with small_job(shared=shared) as job:
        landed = job.update(1, np.random.default_rng(1), wrong)
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(landed)


def test_what_is_of_the_version_before_is_seen(shared: bool) -> None:
    with small_job(shared=shared) as job:
        job.check(job.update(1, np.random.default_rng(1)))
        before = [landed_bytes(job, "trainer/0", 6).copy()]

        def stale(job: Job, peer: str, number: int) -> None:
            if number == 6:
                landed_bytes(job, peer, number)[:] = before[0]

        landed = job.update(2, np.random.default_rng(2), stale)
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(landed)


def test_a_transport_that_reads_the_wrong_bytes_is_seen(shared: bool) -> None:
    """Batches of another place in the trainer's memory, of the right size: nobody but the digests can tell."""
    with small_job(shared=shared) as job:
        executor = job.executors["engine/0/0"]
        (reading,) = executor._readings.values()
        batch = reading.batches[1]
        if shared:
            batch.mapped[:, 0] += 4
        else:
            batch.read[0].theirs[:, 0] += 4
        landed = job.update(1, np.random.default_rng(1))
        assert job.digests(landed) == job.at_rest(), "digests are of what is in memory"
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(landed)


def test_what_differs_in_rounds_is_seen_and_padding_is_not_looked_at(shared: bool) -> None:
    with small_job(shared=shared) as job:
        landed = job.update(1, np.random.default_rng(1))
        job.memory["engine/0/0"]["w"].view(np.uint32)[16] ^= 1
        job.check(landed)
        job.memory["engine/0/0"]["x"][3, 5] ^= 1
        with pytest.raises(VerificationError, match="engine/0/0: the bits of x"):
            job.check(landed)


def test_a_batch_counts_once_and_none_may_be_missing() -> None:
    with small_job() as job:
        landed = job.update(1, np.random.default_rng(1))
        for number in (0, 3, 3):
            landed["engine/0/0"].add("trainer/0", number)
        landed["engine/0/0"].add("nobody", 0)
        assert job.digests(landed) == job.at_rest()
        other = job.landings["engine/0/0"].begin()
        for number in (0, 1, 2, 4, 5, 6, 7):
            other.add("trainer/0", number)
        with pytest.raises(VerificationError, match=r"1 of 8 batches were not digested .* batch 3 of trainer/0"):
            job.digests({"engine/0/0": other})
        other.add("trainer/0", 3)
        assert job.digests({"engine/0/0": other}) == job.at_rest()


def test_an_update_after_one_that_was_aborted_has_its_own_digests(shared: bool) -> None:
    """The first is given up after its second batch; bound again to the same memory, nothing of it is left."""
    with small_job(shared=shared) as first:

        def give_up(job: Job, _: str, number: int) -> None:
            if number == 1:
                for each in job.executors.values():
                    each.abort("enough")

        with pytest.raises(TransportError, match="enough"):
            first.update(1, np.random.default_rng(1), give_up)
    with small_job(shared=shared) as again:
        for name, array in first.memory["engine/0/0"].items():
            again.memory["engine/0/0"][name][...] = array
        for version in (2, 3):
            landed = again.update(version, np.random.default_rng(version))
            assert again.digests(landed) == again.at_rest()
            again.check(landed)


def test_a_digest_that_fails_ends_the_read() -> None:
    """No further batch is begun, and the error is the update's."""
    told = []

    def fail(_: Job, __: str, number: int) -> None:
        told.append(number)
        raise TransportError("cannot look")

    with small_job() as job:
        job.executors["trainer/0"]._deadline_s = 1
        with pytest.raises((TransportError, DeadlineError), match=r"cannot look|waited 1 s"):
            job.update(1, np.random.default_rng(1), fail)
        assert told == [0]


def test_what_is_staged_for_a_loader_is_digested_where_it_lands() -> None:
    """A checkpoint tensor that arrives whole for a computed parameter, beside one that is copied."""
    opaque = ParameterMap((4,), "F32", CopyTable.empty(), RunTable.from_ids(range(4)), ("w",))
    copied = SourceMap.from_ids(W_SPACE, {"x": X})
    needed = SourceMap(W_SPACE, {"computed": opaque, **{name: copied[name] for name in copied.parameters}})
    held = {"trainer/0": SourceMap.from_ids(W_SPACE, {"w": W, "x": X})}
    with job_of(held, {"engine/0/0": needed}) as job:
        landing = job.landings["engine/0/0"]
        assert not landing.rest.plan.parts
        assert not landing.rest.staged.parts
        landed = job.update(1, np.random.default_rng(1))
        assert job.digests(landed) == job.at_rest()
        job.check(landed)

        def spoil(job: Job, _: str, number: int) -> None:
            if number == 2:
                job.executors["engine/0/0"].staged["w"].view(np.uint32)[10, 7] ^= 1

        landed = job.update(2, np.random.default_rng(2), spoil)
        with pytest.raises(VerificationError, match="engine/0/0: the bits of w"):
            job.check(landed)


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_a_job_whose_read_went_wrong_names_engine_and_tensor(
    tmp_path: Path, staging: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = shared_memory.read_process

    def spoiling(pid: int, calls: Sequence[Ranges]) -> None:
        read(pid, calls)
        byte = ctypes.c_uint8.from_address(int(calls[0].mine[0, 0]))
        byte.value ^= 1

    trainer, rollout = holding(turn=False), holding(turn=True)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=LONG_SPACE, staging=staging) as crew:
        crew.connect()
        trainer.load_weights(weights(1).items())
        report = crew.trainers(lambda sender, _: sender.send_weights(1).result())[0].value
        assert report is not None
        assert report.workers["engine/a/0"].direct_bytes > 0
        monkeypatch.setattr(shared_memory, "read_process", spoiling)
        (outcome,) = crew.trainers(lambda sender, _: sender.send_weights(2).result())
        assert isinstance(outcome.error, VerificationError)
        assert "engine/a/0: the bits of long" in str(outcome.error)


def test_without_verification_nothing_is_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("digested")

    trainer, rollout = holding(turn=False), holding(turn=True)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=LONG_SPACE, verify="off") as crew:
        monkeypatch.setattr(adapters.landing, "digest_strips", refuse)
        monkeypatch.setattr(import_module("layout_algebra.fingerprint"), "digest_strips", refuse)
        crew.connect()
        trainer.load_weights(weights(1).items())
        (outcome,) = crew.trainers(lambda sender, _: sender.send_weights(1).result())
        assert outcome.value is not None, outcome.error
        assert outcome.value.workers["engine/a/0"].direct_bytes > 0
