"""Executors over real memory: many versions, real processes, deadlines, aborts, failures, dead peers."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import pytest
from crossing_worker import serve

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.buffers import slot_name
from transfer_exec.compiler import compile_program
from transfer_exec.errors import DeadlineError, ProgramError, TransportError
from transfer_exec.executor import Executor
from transfer_exec.kernels.base import Job
from transfer_exec.plan import Plan, Stage
from transfer_exec.planner import make_plan
from transfer_exec.regions import Buffer
from transfer_exec.report import WorkerReport, combine_reports
from transfer_exec.signals import first_number
from transfer_exec.topology import Topology
from transfer_exec.transport.base import Endpoint, Transport
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.shared_memory import SharedMemoryTransport

SIZE = 1024
SPACE = CheckpointSpace([TensorSpec("w", (SIZE,), "F32")])
IDS = np.arange(1, SIZE + 1)


def case(*, buffer_bytes: int = 512) -> tuple[Plan, dict[str, SourceMap]]:
    """Two trainers with halves, two engines of two ranks that need everything; each engine on a node of its own."""
    maps = {
        "trainer/0": SourceMap.from_ids(SPACE, {"w": IDS[: SIZE // 2]}),
        "trainer/1": SourceMap.from_ids(SPACE, {"w": IDS[SIZE // 2 :]}),
        **{f"engine/{e}/{r}": SourceMap.from_ids(SPACE, {"w": IDS}) for e in range(2) for r in range(2)},
    }
    topology = Topology.uniform(
        trainers=2, engines=2, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    sides = [{w: m for w, m in maps.items() if w.startswith(side)} for side in ("trainer", "engine")]
    return make_plan(correspond(*sides), topology, buffer_bytes=buffer_bytes), maps


def fresh_memory(maps: Mapping[str, SourceMap]) -> dict[str, dict[str, np.ndarray]]:
    return {worker: {"w": np.zeros(m.shape("w"), dtype=np.float32)} for worker, m in maps.items()}


def connected(
    plan: Plan,
    maps: Mapping[str, SourceMap],
    memory: Mapping[str, Mapping[str, np.ndarray]],
    transports: Mapping[str, Transport],
    *,
    deadline_s: float = 20.0,
    depth: int = 2,
) -> dict[str, Executor]:
    executors = {
        worker: Executor(
            compile_program(plan, worker, maps[worker]),
            memory[worker],
            transports[worker],
            deadline_s=deadline_s,
            depth=depth,
        )
        for worker in plan.workers
    }
    endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
    for executor in executors.values():
        executor.connect(endpoints)
    return executors


def run_threads(executors: Mapping[str, Executor], version: int) -> dict[str, WorkerReport | Exception]:
    """All workers at once, each on a thread."""

    def one(executor: Executor) -> WorkerReport | Exception:
        try:
            return executor.run(version)
        except (TransportError, DeadlineError, ProgramError) as error:
            return error

    with ThreadPoolExecutor(len(executors)) as pool:
        return dict(zip(executors, pool.map(one, executors.values()), strict=True))


def set_version(memory: Mapping[str, Mapping[str, np.ndarray]], version: int) -> np.ndarray:
    truth = np.arange(SIZE, dtype=np.float32) + 1000 * version
    memory["trainer/0"]["w"][:] = truth[: SIZE // 2]
    memory["trainer/1"]["w"][:] = truth[SIZE // 2 :]
    return truth


def transports_of(kind: str, plan: Plan) -> dict[str, Transport]:
    network = LoopbackNetwork(LoopbackPolicy(seed=4, max_delay=1, reorder=True))
    make = network.transport if kind == "loopback" else SharedMemoryTransport
    return {worker: make(worker) for worker in plan.workers}


@pytest.mark.parametrize("kind", ["loopback", "shared_memory"])
def test_many_versions_in_many_rounds(kind: str) -> None:
    """Buffers are used again and again; a byte that is read late or written early would be of another version."""
    plan, maps = case(buffer_bytes=64 if kind == "shared_memory" else 512)
    assert plan.rounds >= 4
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports_of(kind, plan))
    for version in (0, 1, 2, 7, 1_000_000_000):
        truth = set_version(memory, version % 9)
        reports = run_threads(executors, version)
        for worker in plan.needers:
            assert np.array_equal(memory[worker]["w"], truth)
        workers = {w: r for w, r in reports.items() if isinstance(r, WorkerReport)}
        report = combine_reports(plan, workers)
        assert (report.version, report.transport, report.rounds) == (version, kind, plan.rounds)
        assert report.transfer_s is not None
        assert report.transfer_s > 0
        for worker in plan.workers:
            for stage in Stage:
                assert report.bytes_sent(worker, stage) == plan.bytes_sent(worker, stage)


def test_reports_tell_where_the_time_went() -> None:
    plan, maps = case()
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports_of("shared_memory", plan))
    before = time.monotonic()
    reports = run_threads(executors, 0)
    after = time.monotonic()
    for worker, report in reports.items():
        assert isinstance(report, WorkerReport)
        assert before <= report.started_at <= report.finished_at <= after
        assert report.first_byte_at is not None
        assert report.last_byte_at is not None
        assert report.started_at <= report.first_byte_at <= report.last_byte_at <= report.finished_at
        phases = report.phases
        assert (phases.pack_s > 0) == (worker in plan.holders)
        assert (phases.assemble_s > 0) == (worker in plan.needers)
        assert phases.await_s[0] > 0 or worker in plan.holders
        assert report.kernels == "cpu"


# T11: a slot is free only after all its readers have finished copying


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_buffer_is_not_written_before_its_reader_has_copied(depth: int) -> None:
    """engine/0/1 sleeps inside its assembling; until it has released, nobody writes its buffers."""
    plan, maps = case(buffer_bytes=64)
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports_of("shared_memory", plan), depth=depth)
    slow = executors["engine/0/1"]
    seen: list[bool] = []

    class SlowJob:
        def __init__(self, job: Job, slot: int) -> None:
            self._job = job
            self._slot = slot

        def run(self) -> None:
            slots = [slow.buffers.memory[buffer][self._slot] for buffer in Buffer]
            received = [slot.copy() for slot in slots]
            time.sleep(0.01)
            seen.append(all(np.array_equal(was, slot) for was, slot in zip(received, slots, strict=True)))
            self._job.run()

    slow._assemble = [SlowJob(job, number % depth) for number, job in enumerate(slow._assemble)]
    for version in (0, 1):
        truth = set_version(memory, version)
        run_threads(executors, version)
        assert np.array_equal(memory["engine/0/1"]["w"], truth)
    assert len(seen) == 2 * plan.rounds
    assert all(seen)


# T16: failures


def test_failed_writes_are_raised_after_draining_and_all_listed() -> None:
    plan, maps = case(buffer_bytes=4096)
    memory = fresh_memory(maps)
    network = LoopbackNetwork(LoopbackPolicy(seed=1, max_delay=3, failing_writes=frozenset([1, 2])))
    transports = {worker: network.transport(worker) for worker in plan.workers}
    executors = connected(plan, maps, memory, transports, deadline_s=3.0)
    set_version(memory, 1)
    results = run_threads(executors, 1)
    failed = {w: str(r) for w, r in results.items() if isinstance(r, TransportError)}
    text = " ".join(failed.values())
    assert "write 1 from" in text
    assert "write 2 from" in text
    assert network.idle, "everything posted has ended"
    assert not all(isinstance(result, WorkerReport) for result in results.values())
    for worker in failed:
        with pytest.raises(ProgramError, match=r"version 1 failed: .*make a new executor on a new transport"):
            executors[worker].run(2)


def test_a_lost_signal_is_a_deadline_with_a_name() -> None:
    plan, maps = case(buffer_bytes=4096)
    network = LoopbackNetwork(LoopbackPolicy(lost_signals=frozenset(range(1000))))
    transports = {worker: network.transport(worker) for worker in plan.workers}
    executors = connected(plan, maps, fresh_memory(maps), transports, deadline_s=0.3)
    begun = time.monotonic()
    with pytest.raises(
        DeadlineError,
        match=r"engine/0/0: waited 0.3 s at version 5, round 0, stage RECEIVE: for the message of trainer/",
    ):
        executors["engine/0/0"].run(5)
    assert time.monotonic() - begun < 5


def test_a_sender_whose_receivers_are_absent_is_a_deadline_too() -> None:
    plan, maps = case()
    executors = connected(plan, maps, fresh_memory(maps), transports_of("shared_memory", plan), deadline_s=0.2)
    where = r"trainer/0.*version 0, round 0, stage RECEIVE: for engine/\d/\d to release"
    with pytest.raises(DeadlineError, match=where):
        executors["trainer/0"].run(0)


def test_abort_from_another_thread() -> None:
    plan, maps = case()
    executors = connected(plan, maps, fresh_memory(maps), transports_of("shared_memory", plan), deadline_s=60)
    threading.Timer(0.1, lambda: executors["engine/0/0"].abort("the leader said so")).start()
    with pytest.raises(TransportError, match=r"engine/0/0: aborted \(the leader said so\) at version 0, round 0"):
        executors["engine/0/0"].run(0)
    with pytest.raises(TransportError, match=r"aborted \(the leader said so\) before version 1"):
        executors["engine/0/0"].run(1)


def test_closing_stops_a_run() -> None:
    plan, maps = case()
    executors = connected(plan, maps, fresh_memory(maps), transports_of("shared_memory", plan), deadline_s=60)
    threading.Timer(0.1, executors["engine/0/0"].close).start()
    with pytest.raises(TransportError, match="closed"):
        executors["engine/0/0"].run(0)


# versions


def test_versions_must_grow() -> None:
    plan, maps = case()
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports_of("shared_memory", plan))
    run_threads(executors, 3)
    for version in (3, 2, -1):
        with pytest.raises(ProgramError, match=f"version {version} after version 3"):
            executors["trainer/0"].run(version)
    with pytest.raises(ProgramError, match="below 2"):
        executors["trainer/0"].run(1 << 63)
    assert all(isinstance(r, WorkerReport) for r in run_threads(executors, 4).values())


def test_workers_at_different_versions_do_not_mix_bytes() -> None:
    """trainer/1 lags at version 1 while everybody else runs version 2: nobody takes its bytes, everybody says so."""
    plan, maps = case()
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports_of("shared_memory", plan), deadline_s=0.5)
    set_version(memory, 5)

    def at(worker: str) -> Exception | WorkerReport:
        try:
            return executors[worker].run(1 if worker == "trainer/1" else 2)
        except (TransportError, DeadlineError) as error:
            return error

    with ThreadPoolExecutor(len(executors)) as pool:
        results = dict(zip(executors, pool.map(at, executors), strict=True))
    assert isinstance(results["trainer/1"], (TransportError, DeadlineError))
    for worker in plan.needers:
        assert isinstance(results[worker], (TransportError, DeadlineError))
        half = memory[worker]["w"][SIZE // 2 :]
        assert not half.any(), "bytes of version 1 arrived in version 2"


# T13: layouts are bound to their sender


def test_another_plans_buffers_are_refused() -> None:
    plan, maps = case()
    other, _ = case(buffer_bytes=4096)
    program = compile_program(plan, "trainer/0", maps["trainer/0"])
    sender = Executor(program, fresh_memory(maps)["trainer/0"], SharedMemoryTransport("trainer/0"))
    endpoints = {}
    kept = []
    for worker in plan.needers:
        transport = SharedMemoryTransport(worker)
        kept.append(Executor(compile_program(other, worker, maps[worker]), fresh_memory(maps)[worker], transport))
        endpoints[worker] = kept[-1].endpoint
    with pytest.raises(TransportError, match=f"laid out its buffers for plan {other.digest()}"):
        sender.connect(endpoints)


def test_crossed_or_missing_endpoints_are_refused() -> None:
    plan, maps = case()
    network = LoopbackNetwork()
    programs = {worker: compile_program(plan, worker, maps[worker]) for worker in plan.workers}
    executors = {w: Executor(p, fresh_memory(maps)[w], network.transport(w)) for w, p in programs.items()}
    endpoints = {worker: executor.endpoint for worker, executor in executors.items()}
    peer, other = programs["engine/0/0"].peers[:2]
    with pytest.raises(TransportError, match=f"got the endpoint of {other} as that of {peer}"):
        executors["engine/0/0"].connect({**endpoints, peer: endpoints[other]})
    with pytest.raises(TransportError, match=f"no endpoint of {peer}"):
        executors["engine/0/0"].connect({w: e for w, e in endpoints.items() if w != peer})
    with pytest.raises(TransportError, match="is not connected to"):
        executors["trainer/0"].run(0)
    with pytest.raises(TransportError, match="expected one worker"):
        Executor(programs["trainer/0"], {}, network.transport("trainer/1"))


def test_a_message_of_another_layout_is_not_read() -> None:
    """The receiver checks the tag of what is announced, not only that something came."""
    plan, maps = case()
    transports = transports_of("shared_memory", plan)
    memory = fresh_memory(maps)
    executors = connected(plan, maps, memory, transports, deadline_s=5)
    transports["trainer/0"].connect(executors["engine/0/0"].endpoint)
    step = next(s for s in executors["engine/0/0"].program.instructions if hasattr(s, "sources"))
    first = first_number(0, plan.rounds) + 1
    for flag in step.flags:
        transports["trainer/0"].signal("engine/0/0", flag, first, 12345)
    with pytest.raises(TransportError, match=f"announced message {first} with layout 0x3039 in stage RECEIVE"):
        executors["engine/0/0"].run(0)
    assert not memory["engine/0/0"]["w"].any()


# real processes


@contextmanager
def processes(
    plan: Plan, maps: Mapping[str, SourceMap], memory: Mapping[str, Mapping[str, np.ndarray]], deadline_s: float
) -> Iterator[tuple[dict[str, Connection], dict[str, multiprocessing.process.BaseProcess]]]:
    """Every worker in a spawned process of its own, connected; all of them are gone at the end."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    children: dict[str, multiprocessing.process.BaseProcess] = {}
    try:
        for worker in plan.workers:
            pipes[worker], theirs = context.Pipe()
            arguments = (theirs, worker, compile_program(plan, worker, maps[worker]).to_bytes(), deadline_s)
            children[worker] = context.Process(target=serve, args=arguments, daemon=True)
            children[worker].start()
            theirs.close()
            pipes[worker].send(dict(memory[worker]))
        endpoints = {worker: receive(pipe) for worker, pipe in pipes.items()}
        for pipe in pipes.values():
            pipe.send(endpoints)
        assert {receive(pipe) for pipe in pipes.values()} == {"connected"}
        yield pipes, children
        for worker, pipe in pipes.items():
            if children[worker].is_alive():
                pipe.send("exit")
        for child in children.values():
            child.join(30)
    finally:
        for child in children.values():
            if child.is_alive():
                child.kill()
            child.join(10)


def receive(pipe: Connection, timeout_s: float = 90) -> object:
    assert pipe.poll(timeout_s), "a worker process said nothing"
    return pipe.recv()


def small_case() -> tuple[Plan, dict[str, SourceMap]]:
    """One trainer, one engine of two ranks on one node: every stage but the external one, three processes."""
    maps = {
        "trainer/0": SourceMap.from_ids(SPACE, {"w": IDS.reshape(32, 32).T}),
        "engine/0/0": SourceMap.from_ids(SPACE, {"w": IDS.reshape(32, 32)}),
        "engine/0/1": SourceMap.from_ids(SPACE, {"w": IDS[::-1].copy()}),
    }
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    demand = correspond({"trainer/0": maps["trainer/0"]}, {w: maps[w] for w in ("engine/0/0", "engine/0/1")})
    return make_plan(demand, topology, buffer_bytes=256), maps


@pytest.mark.processes
def test_real_processes_over_shared_memory_and_a_killed_peer() -> None:
    plan, maps = small_case()
    assert plan.rounds >= 8
    memory = fresh_memory(maps)
    deadline_s = 2.0
    with processes(plan, maps, memory, deadline_s) as (pipes, children):
        for version in (1, 2, 5):
            truth = np.arange(SIZE, dtype=np.float32) * version
            pipes["trainer/0"].send(("set", {"w": truth.reshape(32, 32).T}))
            assert receive(pipes["trainer/0"]) == "set"
            for pipe in pipes.values():
                pipe.send(("run", version))
            reports = {worker: receive(pipe) for worker, pipe in pipes.items()}
            assert all(isinstance(report, WorkerReport) for report in reports.values()), reports
            combined = combine_reports(plan, reports)  # type: ignore[arg-type]
            assert combined.transport == "shared_memory"
            for worker, expected in (("engine/0/0", truth.reshape(32, 32)), ("engine/0/1", truth[::-1])):
                pipes[worker].send("read")
                assert np.array_equal(receive(pipes[worker])["w"], expected)  # type: ignore[index]
        pipes["engine/0/1"].send("die")
        children["engine/0/1"].join(30)
        begun = time.monotonic()
        for worker in ("trainer/0", "engine/0/0"):
            pipes[worker].send(("run", 6))
        for worker in ("trainer/0", "engine/0/0"):
            kind, text = receive(pipes[worker])  # type: ignore[misc]
            assert kind == "DeadlineError", text
            assert "version 6, round" in text
            assert "engine/0/1" in text or worker == "trainer/0"
        assert time.monotonic() - begun < deadline_s + 20


def test_endpoints_survive_the_wire() -> None:
    plan, maps = case()
    program = compile_program(plan, "engine/0/0", maps["engine/0/0"])
    executor = Executor(program, fresh_memory(maps)["engine/0/0"], SharedMemoryTransport("engine/0/0"))
    again = Endpoint.from_bytes(executor.endpoint.to_bytes())
    assert again == executor.endpoint
    sizes = {region.name: region.size_bytes for region in again.regions}
    assert sizes == {
        slot_name(b, slot): program.buffer_bytes(b) for b in Buffer for slot in range(2) if program.buffer_bytes(b)
    }
    assert again.program == f"{plan.digest()} at depth 2"
