"""Rounds under way at once: they overlap, never share a slot, and nothing of them outlives a failure."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.compiler import compile_program
from transfer_exec.errors import TransportError
from transfer_exec.executor import Executor
from transfer_exec.in_process import run_in_process
from transfer_exec.kernels.base import Job
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.report import WorkerReport
from transfer_exec.topology import Topology
from transfer_exec.transport.base import Transport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.shared_memory import SharedMemoryTransport


def one_to(readers: int, *, elements: int, buffer_bytes: int) -> tuple[Plan, dict[str, SourceMap]]:
    """One trainer that holds everything, an engine whose ranks all need it, a node each."""
    space = CheckpointSpace([TensorSpec("w", (elements,), "F32")])
    whole = SourceMap.from_ids(space, {"w": np.arange(1, elements + 1)})
    needed = {f"engine/0/{rank}": whole for rank in range(readers)}
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=readers, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    plan = make_plan(correspond({"trainer/0": whole}, needed), topology, buffer_bytes=buffer_bytes)
    return plan, {"trainer/0": whole, **needed}


def memory_for(maps: Mapping[str, SourceMap]) -> dict[str, dict[str, np.ndarray]]:
    """Numbers on the trainer, zeros elsewhere."""
    memory = {worker: {"w": np.zeros(each.shape("w"), np.float32)} for worker, each in maps.items()}
    memory["trainer/0"]["w"][:] = np.arange(memory["trainer/0"]["w"].size)
    return memory


class Told:
    """A job that calls back before and after."""

    def __init__(self, job: Job, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._job, self._before, self._after = job, before, after

    def run(self) -> None:
        self._before()
        self._job.run()
        self._after()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_rounds_are_packed_while_one_is_on_the_wire(depth: int) -> None:
    """One round at a time is packed when the one before has been written; of more, as many as there are slots."""
    plan, maps = one_to(1, elements=48, buffer_bytes=32)
    assert plan.rounds == 6
    network = LoopbackNetwork(LoopbackPolicy(seed=depth, max_delay=40))
    unwritten: list[int] = []

    def watch(executors: Mapping[str, Executor]) -> None:
        sender = executors["trainer/0"]

        def begin(number: int) -> None:
            unwritten.append(number - sum(network.done(k) for k in range(len(network.records))))

        sender._pack = [Told(job, partial(begin, number), int) for number, job in enumerate(sender._pack)]

    memory = memory_for(maps)
    run_in_process(plan, maps, memory, network=network, depth=depth, inspect=watch)
    assert np.array_equal(memory["engine/0/0"]["w"], memory["trainer/0"]["w"])
    assert len(unwritten) == 6
    assert max(unwritten) == depth - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_m02_staging_does_not_grow_with_the_model(depth: int) -> None:
    """Everything an executor allocates, buffers included, for models of 1 MB and 8 MB."""
    peaks = []
    for elements in (1 << 18, 1 << 21):
        plan, maps = one_to(1, elements=elements, buffer_bytes=1 << 16)
        memory = memory_for(maps)
        run_in_process(plan, maps, memory, depth=depth, direct_bytes=None)
        tracemalloc.start()
        try:
            report = run_in_process(plan, maps, memory, depth=depth, direct_bytes=None, version=1)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert [each.staging_bytes for each in report.workers.values()] == [depth << 16] * 2
        assert np.array_equal(memory["engine/0/0"]["w"], memory["trainer/0"]["w"])
    per_round_bytes = (peaks[1] - peaks[0]) / (128 - 16)
    assert per_round_bytes < 4096, "tables grow by a few rows a round, staging not at all"
    assert peaks[1] < 2 * (depth << 16) + (1 << 20), "8 MB would not fit"


def executors_of(
    plan: Plan,
    maps: Mapping[str, SourceMap],
    memory: Mapping[str, Mapping[str, np.ndarray]],
    make: Callable[[str], Transport],
    **settings: float,
) -> dict[str, Executor]:
    executors = {
        worker: Executor(
            compile_program(plan, worker, maps[worker]),
            memory[worker],
            make(worker),
            deadline_s=settings.get("deadline_s", 20.0),
            depth=int(settings.get("depth", 2)),
        )
        for worker in plan.workers
    }
    endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
    for executor in executors.values():
        executor.connect(endpoints)
    return executors


def run_all(executors: Mapping[str, Executor], version: int) -> dict[str, WorkerReport | Exception]:
    def one(executor: Executor) -> WorkerReport | Exception:
        try:
            return executor.run(version)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(len(executors)) as pool:
        return dict(zip(executors, pool.map(one, executors.values()), strict=True))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", ["loopback", "shared_memory"])
def test_t11_every_reader_sees_every_round(kind: str, depth: int) -> None:
    """Readers of one buffer are slow in turn, and nobody reads a byte of another round."""
    plan, maps = one_to(2, elements=96, buffer_bytes=64)
    memory = memory_for(maps)
    network = LoopbackNetwork(LoopbackPolicy(seed=depth, max_delay=3, reorder=True))
    make = network.transport if kind == "loopback" else SharedMemoryTransport
    executors = executors_of(plan, maps, memory, make, depth=depth)
    for rank in range(2):
        slow = executors[f"engine/0/{rank}"]
        slow._assemble = [
            Told(job, (lambda: time.sleep(0.01)) if number % 2 == rank else int, int)
            for number, job in enumerate(slow._assemble)
        ]
    for version in range(4):
        memory["trainer/0"]["w"][:] = np.arange(96) + 100 * version
        reports = run_all(executors, version)
        assert all(isinstance(each, WorkerReport) for each in reports.values()), reports
        for rank in range(2):
            assert np.array_equal(memory[f"engine/0/{rank}"]["w"], memory["trainer/0"]["w"])


def ended(network: LoopbackNetwork, write: int) -> bool:
    """Whether a write is over, well or badly."""
    try:
        return network.done(write)
    except TransportError:
        return True


@pytest.mark.parametrize("seed", range(5))
def test_t16_writes_of_other_rounds_end_before_a_failure_is_raised(seed: int) -> None:
    plan, maps = one_to(3, elements=96, buffer_bytes=64)
    network = LoopbackNetwork(LoopbackPolicy(seed=seed, max_delay=30, failing_writes=frozenset(range(3, 99))))
    with pytest.raises(TransportError) as failure:
        run_in_process(plan, maps, memory_for(maps), network=network)
    source = str(failure.value).partition(",")[0]
    mine = [number for number, record in enumerate(network.records) if record.source == source]
    assert mine
    assert all(ended(network, number) for number in mine)
    for number in mine:
        assert (f"write {number} from" in str(failure.value)) == (number >= 3)


def test_a_kernel_that_has_begun_ends_before_an_abort_is_raised() -> None:
    plan, maps = one_to(1, elements=96, buffer_bytes=64)
    executors = executors_of(plan, maps, memory_for(maps), SharedMemoryTransport)
    receiver, ended = executors["engine/0/0"], threading.Event()
    begun = threading.Event()

    def slowly() -> None:
        begun.set()
        time.sleep(0.3)

    receiver._assemble = [Told(job, slowly, ended.set) for job in receiver._assemble]

    def abort() -> None:
        begun.wait(20)
        receiver.abort("enough")
        executors["trainer/0"].abort("enough")

    threading.Thread(target=abort).start()
    results = run_all(executors, 0)
    assert ended.is_set()
    assert "aborted (enough)" in str(results["engine/0/0"])


def test_a_slow_kernel_of_its_own_is_no_deadline() -> None:
    plan, maps = one_to(1, elements=8, buffer_bytes=64)
    executors = executors_of(plan, maps, memory_for(maps), SharedMemoryTransport, deadline_s=0.2)
    receiver = executors["engine/0/0"]
    receiver._assemble = [Told(job, lambda: time.sleep(0.6), int) for job in receiver._assemble]
    assert all(isinstance(each, WorkerReport) for each in run_all(executors, 0).values())


def test_workers_of_different_depths_are_refused() -> None:
    plan, maps = one_to(1, elements=96, buffer_bytes=64)
    memory, network = memory_for(maps), LoopbackNetwork()
    one, two = (
        Executor(compile_program(plan, worker, maps[worker]), memory[worker], network.transport(worker), depth=depth)
        for depth, worker in enumerate(plan.workers, start=1)
    )
    with pytest.raises(TransportError, match=r"at depth 2, trainer/0 for .* at depth 1; both must compile one plan"):
        one.connect({"engine/0/0": two.endpoint})


@pytest.mark.slow
def test_m01_many_small_tensors_are_few_operations() -> None:
    """20,000 tensors of 64 bytes, 2 + 2 workers: a write a round and peer, of one descriptor, and the same again."""
    count = 20_000
    space = CheckpointSpace(TensorSpec(f"layers.{number}.w", (32,), "BF16") for number in range(count))
    ids = np.arange(1, space.total_elements + 1).reshape(count, 32)
    by_name = dict(zip(space.names, ids, strict=True))
    halves = [SourceMap.from_ids(space, dict(list(by_name.items())[side::2])) for side in range(2)]
    columns = [SourceMap.from_ids(space, {"stacked": ids[:, 16 * side : 16 * side + 16]}) for side in range(2)]
    maps = {f"trainer/{r}": halves[r] for r in range(2)} | {f"engine/0/{r}": columns[r] for r in range(2)}
    topology = Topology.uniform(
        trainers=2, engines=1, engine_size=2, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    sides = [{w: m for w, m in maps.items() if w.startswith(side)} for side in ("trainer", "engine")]
    plan = make_plan(correspond(*sides), topology, buffer_bytes=100_000)
    memory = {
        worker: {n: np.full(each.shape(n), 7 if "trainer" in worker else 0, np.uint16) for n in each.parameters}
        for worker, each in maps.items()
    }
    network = LoopbackNetwork()
    executors = executors_of(plan, maps, memory, network.transport)
    peers = 4
    for version in (1, 2):
        before = len(network.records)
        reports = run_all(executors, version)
        assert all(isinstance(each, WorkerReport) for each in reports.values()), reports
        records = network.records[before:]
        assert len(records) <= plan.rounds * peers
        assert sum(len(record.pieces) for record in records) <= plan.rounds * peers
        assert sum(record.bytes for record in records) == count * 64
    assert all((tensor == 7).all() for worker in plan.needers for tensor in memory[worker].values())
