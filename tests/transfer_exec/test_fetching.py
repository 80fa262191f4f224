"""Direct moves between executors: order, deadlines, peers that die, give up or come back, and who is let go when."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from crossing_worker import in_memory_file, serve

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.compiler import Compiler
from transfer_exec.direct import Near
from transfer_exec.errors import (
    DeadlineError,
    PeerGoneError,
    ProgramError,
    TransportError,
    UnmappableError,
    UnreadableError,
)
from transfer_exec.executor import Executor
from transfer_exec.fetching import chunks_of
from transfer_exec.in_process import run_in_process
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.program import FetchColumn, Program
from transfer_exec.report import WorkerReport
from transfer_exec.topology import Topology
from transfer_exec.trace import critical_path
from transfer_exec.transport.base import Endpoint, Transport
from transfer_exec.transport.loopback import LENT, LoopbackNetwork, LoopbackPolicy
from transfer_exec.transport.shared_files import SharedRanges
from transfer_exec.transport.shared_memory import SharedMemoryTransport
from transfer_exec.transport.stretches import Stretches

SIZE = 4096
SPACE = CheckpointSpace([TensorSpec("w", (SIZE,), "F32"), TensorSpec("x", (8, 8), "F32")])
W, X = np.arange(1, SIZE + 1), np.arange(SIZE + 1, SIZE + 65).reshape(8, 8)


def case(*, transposed: bool = False) -> tuple[Plan, dict[str, SourceMap]]:
    """One trainer, two engines of one rank; with a transposed matrix there are rounds beside the direct moves."""
    x = {"x": X.T} if transposed else {}
    maps = {
        "trainer/0": SourceMap.from_ids(SPACE, {"w": W, "x": X}),
        "engine/0/0": SourceMap.from_ids(SPACE, {"w": W[: SIZE // 2], **x}),
        "engine/1/0": SourceMap.from_ids(SPACE, {"w": W[SIZE // 2 :], **x}),
    }
    topology = Topology.uniform(
        trainers=1, engines=2, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
    )
    sides = [{w: m for w, m in maps.items() if w.startswith(side)} for side in ("trainer", "engine")]
    return make_plan(correspond(*sides), topology, buffer_bytes=64), maps


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether the trainer's tensors are in shared memory."""
    return bool(request.param)


def programs_of(plan: Plan, maps: Mapping[str, SourceMap], shared: bool = False) -> dict[str, Program]:
    compiler = Compiler(plan, Near(maps, {}, shared={"trainer/0": ["w", "x"]} if shared else {}))
    return {worker: compiler.program(worker, maps[worker]) for worker in plan.workers}


def memory_for(maps: Mapping[str, SourceMap], shared: bool = False) -> dict[str, dict[str, np.ndarray]]:
    out = {w: {n: np.zeros(m.shape(n), dtype=np.float32) for n in m.parameters} for w, m in maps.items()}
    if shared:
        out["trainer/0"] = {name: in_memory_file(array) for name, array in out["trainer/0"].items()}
    out["trainer/0"]["w"][:] = np.arange(SIZE)
    out["trainer/0"]["x"][:] = np.arange(64).reshape(8, 8)
    return out


def is_right(memory: Mapping[str, Mapping[str, np.ndarray]], *, transposed: bool = False) -> bool:
    got = np.concatenate([memory["engine/0/0"]["w"], memory["engine/1/0"]["w"]])
    fits = not transposed or np.array_equal(memory["engine/1/0"]["x"], np.arange(64).reshape(8, 8).T)
    return np.array_equal(got, np.arange(SIZE)) and fits


def connected(
    programs: Mapping[str, Program],
    memory: Mapping[str, Mapping[str, np.ndarray]],
    make: Callable[[str], Transport] = SharedMemoryTransport,
    *,
    deadline_s: float = 20.0,
    before_read: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, Executor]:
    nothing = lambda: None  # noqa: E731
    executors = {
        worker: Executor(
            program,
            memory[worker],
            make(worker),
            deadline_s=deadline_s,
            before_read=(before_read or {}).get(worker, nothing),
        )
        for worker, program in programs.items()
    }
    endpoints = {w: Endpoint.from_bytes(executor.endpoint.to_bytes()) for w, executor in executors.items()}
    for executor in executors.values():
        executor.connect(endpoints)
    return executors


def start(pool: ThreadPoolExecutor, executors: Mapping[str, Executor], version: int) -> dict[str, Future[WorkerReport]]:
    return {worker: pool.submit(executor.run, version) for worker, executor in executors.items()}


@pytest.mark.parametrize("transposed", [False, True], ids=["nothing in rounds", "rounds beside"])
@pytest.mark.parametrize("kind", ["loopback", "loopback that delays", "shared_memory", "mapped"])
def test_many_versions(kind: str, transposed: bool) -> None:
    plan, maps = case(transposed=transposed)
    memory = memory_for(maps, kind == "mapped")
    policy = LoopbackPolicy(seed=3, max_delay=5, reorder=True) if "delays" in kind else None
    network = LoopbackNetwork(policy)
    programs = programs_of(plan, maps, kind == "mapped")
    assert all(bool(program.instructions) == transposed for program in programs.values())
    executors = connected(programs, memory, network.transport if "loopback" in kind else SharedMemoryTransport)
    with ThreadPoolExecutor(3) as pool:
        for version in (0, 1, 5):
            memory["trainer/0"]["w"][:] = np.arange(SIZE) + version
            memory["trainer/0"]["x"][:] = version
            reports = {worker: each.result() for worker, each in start(pool, executors, version).items()}
            got = np.concatenate([memory["engine/0/0"]["w"], memory["engine/1/0"]["w"]])
            assert np.array_equal(got, np.arange(SIZE) + version)
            assert not transposed or (memory["engine/0/0"]["x"] == version).all()
    assert reports["trainer/0"].direct_bytes == 4 * SIZE
    assert reports["engine/0/0"].direct_bytes == 2 * SIZE
    assert reports["trainer/0"].mapped_bytes == (4 * SIZE if kind == "mapped" else 0)
    assert reports["engine/0/0"].mapped_bytes == (2 * SIZE if kind == "mapped" else 0)
    assert sum(reports["trainer/0"].bytes_sent) == plan.bytes_sent("trainer/0")
    assert sum(reports["engine/1/0"].bytes_received) == plan.bytes_received("engine/1/0")
    for executor in executors.values():
        executor.close()


def test_both_ways_move_the_same_bits_and_report_the_same_bytes() -> None:
    plan, maps = case(transposed=True)
    results = []
    for direct_bytes in (None, 4096, 64):
        memory = memory_for(maps)
        network = LoopbackNetwork()
        report = run_in_process(plan, maps, memory, network=network, direct_bytes=direct_bytes, trace=True)
        results.append((memory["engine/0/0"], memory["engine/1/0"]))
        assert is_right(memory, transposed=True)
        assert sum(each.bytes for each in network.records if each.region == LENT) == (4 * SIZE if direct_bytes else 0)
        window = [report.workers[w] for w in plan.workers]
        length_s = max(each.finished_at for each in window) - min(each.started_at for each in window)
        assert sum(critical_path(report).values()) == pytest.approx(length_s)
        kinds = {span.kind for each in window for span in each.spans or () if span.round < 0}
        assert kinds == ({"wire", "wait"} if direct_bytes else set())
    for name in ("w", "x"):
        assert all(np.array_equal(one[name], results[0][0][name]) for one, _ in results)


def test_t11_a_source_is_let_go_when_its_last_reader_has_finished(shared: bool) -> None:
    """Whoever calls may overwrite its weights the moment its run returns; a reader that sleeps is waited for."""
    plan, maps = case()
    memory = memory_for(maps, shared)
    executors = connected(programs_of(plan, maps, shared), memory, before_read={"engine/1/0": lambda: time.sleep(0.2)})

    def train_on() -> WorkerReport:
        report = executors["trainer/0"].run(1)
        memory["trainer/0"]["w"][:] = -1
        return report

    with ThreadPoolExecutor(3) as pool:
        sent = pool.submit(train_on)
        got = start(pool, {w: e for w, e in executors.items() if w != "trainer/0"}, 1)
        assert sent.result().finished_at >= got["engine/1/0"].result().last_byte_at - 1e-3  # type: ignore[operator]
        got["engine/0/0"].result()
    assert is_right(memory)


def test_nothing_is_read_before_its_source_is_ready(shared: bool) -> None:
    """Readers that come first wait; what the trainer writes until then is what they get."""
    plan, maps = case()
    memory = memory_for(maps, shared)
    memory["trainer/0"]["w"][:] = -1
    executors = connected(programs_of(plan, maps, shared), memory)
    with ThreadPoolExecutor(3) as pool:
        got = start(pool, {w: e for w, e in executors.items() if w != "trainer/0"}, 1)
        time.sleep(0.1)
        assert not memory["engine/0/0"]["w"].any()
        memory["trainer/0"]["w"][:] = np.arange(SIZE)
        executors["trainer/0"].run(1)
        for each in got.values():
            each.result()
    assert is_right(memory)


def test_a_reader_that_hangs_is_named_and_finds_the_tensors_taken_back(shared: bool) -> None:
    """The trainer gives up and trains on; the reader that wakes up must not take what it read for the version."""
    plan, maps = case()
    memory = memory_for(maps, shared)
    executors = connected(
        programs_of(plan, maps, shared), memory, deadline_s=1.5, before_read={"engine/1/0": lambda: time.sleep(3)}
    )
    with ThreadPoolExecutor(3) as pool:
        runs = start(pool, executors, 1)
        with pytest.raises(
            DeadlineError, match=r"waited 1.5 s at version 1, beside the rounds, .*for engine/1/0 to read"
        ):
            runs["trainer/0"].result()
        memory["trainer/0"]["w"][:] = -1
        with pytest.raises(TransportError, match="trainer/0 has gone past the direct moves of version 1"):
            runs["engine/1/0"].result()
        runs["engine/0/0"].result()


def test_a_source_that_does_not_come_is_named() -> None:
    plan, maps = case()
    memory = memory_for(maps)
    executors = connected(programs_of(plan, maps), memory, deadline_s=0.2)
    with pytest.raises(DeadlineError, match="for trainer/0 to lend its tensors"):
        executors["engine/0/0"].run(1)
    assert not memory["engine/0/0"]["w"].any()


def test_an_aborted_reader_writes_nothing_after_its_run_has_returned(shared: bool) -> None:
    plan, maps = case()
    memory = memory_for(maps, shared)
    executors: dict[str, Executor] = {}
    abort = {"engine/0/0": lambda: executors["engine/0/0"].abort("enough")}
    executors |= connected(programs_of(plan, maps, shared), memory, deadline_s=1.5, before_read=abort)
    with ThreadPoolExecutor(3) as pool:
        runs = start(pool, executors, 1)
        with pytest.raises(TransportError, match=r"engine/0/0: aborted \(enough\)"):
            runs["engine/0/0"].result()
        memory["engine/0/0"]["w"][:] = 7
        with pytest.raises(DeadlineError, match="for engine/0/0 to read"):
            runs["trainer/0"].result()
        runs["engine/1/0"].result()
    time.sleep(0.05)
    assert (memory["engine/0/0"]["w"] == 7).all()


def test_a_failed_read_is_raised_and_others_go_on() -> None:
    plan, maps = case()
    memory = memory_for(maps)
    network = LoopbackNetwork(LoopbackPolicy(failing_writes=frozenset([0])))
    executors = connected(programs_of(plan, maps), memory, network.transport, deadline_s=1.5)
    with ThreadPoolExecutor(3) as pool:
        errors = {worker: each.exception() for worker, each in start(pool, executors, 1).items()}
    (failed,) = [worker for worker in plan.needers if errors[worker] is not None]
    begin = 0 if failed == "engine/0/0" else 2 * SIZE
    assert f"write 0 from trainer/0 to {failed} lent[{begin}:{begin + 2 * SIZE}] failed" in str(errors[failed])
    assert f"for {failed} to read its tensors" in str(errors["trainer/0"]), "it waited for a reader that failed"


def test_a_source_that_closed_or_came_back_is_not_read(shared: bool) -> None:
    plan, maps = case()
    memory = memory_for(maps, shared)
    programs = programs_of(plan, maps, shared)
    executors = connected(programs, memory)
    reader = executors["engine/0/0"]
    reading = reader._readings["trainer/0"]
    executors["trainer/0"].close()
    with pytest.raises(PeerGoneError, match="trainer/0: has closed"):
        reader._transport.read(reading)
    again = Executor(programs["trainer/0"], memory["trainer/0"], SharedMemoryTransport("trainer/0"))
    with pytest.raises(PeerGoneError, match="trainer/0: has closed"):
        reader._transport.read(reading)
    again.close()


@pytest.mark.parametrize("when", ["before the first read", "before the reader looks again"])
def test_a_source_that_is_killed_while_it_is_read(when: str, shared: bool) -> None:
    plan, maps = case()
    memory = memory_for(maps, shared)
    programs = programs_of(plan, maps, shared)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(
        target=serve, args=(theirs, "trainer/0", programs["trainer/0"].to_bytes(), 20.0), daemon=True
    )
    child.start()

    def kill() -> None:
        child.kill()
        child.join()

    try:
        mine.send(memory["trainer/0"])
        assert mine.poll(90)
        endpoints = {"trainer/0": Endpoint.from_bytes(mine.recv())}
        executors = {
            worker: Executor(
                programs[worker],
                memory[worker],
                SharedMemoryTransport(worker),
                before_read=kill if (worker, when[:12]) == ("engine/0/0", "before the f") else lambda: None,
            )
            for worker in plan.needers
        }
        endpoints |= {worker: executor.endpoint for worker, executor in executors.items()}
        mine.send({worker: endpoint.to_bytes() for worker, endpoint in endpoints.items()})
        for executor in executors.values():
            executor.connect(endpoints)
        assert mine.poll(90)
        mine.recv()
        reader = executors["engine/0/0"]
        if "again" in when:
            finished = reader._transport.finished
            reader._transport.finished = lambda ticket: (kill(), finished(ticket))[1]  # type: ignore[method-assign]
        mine.send(("run", 1))
        with pytest.raises(TransportError, match=r"No such process|its process has ended"):
            reader.run(1)
        for executor in executors.values():
            executor.close()
    finally:
        kill()


def test_a_peer_that_may_not_be_read_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting fails with an error of its own, so that whoever plans can do without; nothing was read."""
    plan, maps = case()
    monkeypatch.setattr(
        "transfer_exec.transport.shared_memory.why_not_process", lambda pid, address: "Operation not permitted"
    )
    with pytest.raises(UnreadableError, match="trainer/0: its memory cannot be read with process_vm_readv: Operation"):
        connected(programs_of(plan, maps), memory_for(maps))


def test_shared_memory_that_cannot_be_mapped_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of its own, so that whoever plans can have it read; nothing was."""
    plan, maps = case()

    def refuse(*_: object) -> list[np.ndarray]:
        raise PermissionError(13, "Permission denied", "/proc/1/fd/3")

    monkeypatch.setattr("transfer_exec.transport.shared_memory.map_places", refuse)
    with pytest.raises(UnmappableError, match=r"trainer/0: its shared memory cannot be mapped: .*Permission denied"):
        connected(programs_of(plan, maps, True), memory_for(maps, True))


def test_a_tensor_that_is_in_no_shared_memory_any_more_is_refused_by_name() -> None:
    plan, maps = case()
    with pytest.raises(ProgramError, match="w on trainer/0: is not in shared memory, which peers were to map"):
        connected(programs_of(plan, maps, True), memory_for(maps))


def test_what_is_mapped_is_mapped_once_and_let_go_when_a_reader_closes() -> None:
    """Also by a reader that somebody still holds, and of a source whose reader was connected to it again."""
    plan, maps = case()
    memory = memory_for(maps, True)
    place = SharedRanges.of_this_process().place(memory["trainer/0"]["w"].ctypes.data, 4 * SIZE)
    assert place is not None

    def mappings() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(line.split()[4] == str(place.inode) for line in lines)

    assert mappings() == 1
    executors = connected(programs_of(plan, maps, True), memory)
    assert mappings() == 3, "the trainer's own and one of each engine"
    executors["engine/0/0"].connect({w: each.endpoint for w, each in executors.items()})
    assert mappings() == 3
    with ThreadPoolExecutor(3) as pool:
        for each in start(pool, executors, 1).values():
            each.result()
    assert is_right(memory)
    for executor in executors.values():
        executor.close()
    assert mappings() == 1


def test_memory_that_is_not_contiguous_any_more_is_refused() -> None:
    plan, maps = case()
    memory = memory_for(maps)
    memory["engine/0/0"]["w"] = np.zeros(SIZE, dtype=np.float32)[::2]
    with pytest.raises(
        ProgramError, match=r"w on engine/0/0: has extents and byte strides .* expected contiguous memory"
    ):
        connected(programs_of(plan, maps), memory)
    memory["engine/0/0"]["w"] = np.zeros(SIZE // 2, dtype=np.float32)
    memory["engine/0/0"]["w"].setflags(write=False)
    with pytest.raises(ProgramError, match="read-only"):
        connected(programs_of(plan, maps), memory)


def test_rows_that_leave_what_the_peer_lends_are_refused_before_a_byte() -> None:
    plan, maps = case()
    for column, value in (
        (FetchColumn.LENT, 1),
        (FetchColumn.LENT_OFFSET, 4 * SIZE),
        (FetchColumn.LENT_OFFSET, 1 << 60),
    ):
        programs = programs_of(plan, maps)
        programs["engine/0/0"].fetch_rows[0][0, column] = value
        with pytest.raises(TransportError, match=r"of lent tensor .* of trainer/0, which lends 1 tensors"):
            connected(programs, memory_for(maps))


def test_another_division_of_the_plan_is_refused() -> None:
    """A worker that compiled everything in rounds would wait for messages that never come."""
    plan, maps = case()
    programs = programs_of(plan, maps)
    programs["engine/0/0"] = Compiler(plan).program("engine/0/0", maps["engine/0/0"])
    with pytest.raises(TransportError, match="both must compile one plan"):
        connected(programs, memory_for(maps))


def test_chunks_keep_every_byte_in_its_place() -> None:
    """Long rows are cut and many short ones grouped; 3 MiB and 20 MiB and 40,000 rows of 8 bytes."""
    sizes = [3 << 20, 20 << 20, *[8] * 40_000]
    starts = np.cumsum([0, *sizes])[:-1]
    rows = np.zeros((len(sizes), len(FetchColumn)), dtype=np.int64)
    rows[:, FetchColumn.LENT_OFFSET] = starts[::-1]
    rows[:, FetchColumn.OFFSET] = starts
    rows[:, FetchColumn.BYTES] = sizes
    whole = Stretches(np.array([4096]), np.array([2 * sum(sizes)]))
    chunks = chunks_of("e", "t", rows, whole, whole)
    for chunk in chunks:
        assert len(chunk) <= 1 << 14
        assert int(chunk[:, 2].sum()) <= 16 << 20
    cut = np.concatenate(chunks).astype(np.int64)
    assert len(chunks) < 12
    owner = np.searchsorted(starts, cut[:, 1], side="right") - 1
    assert np.array_equal(np.bincount(owner, cut[:, 2]), sizes)
    assert np.array_equal(cut[:, 0] - rows[owner, FetchColumn.LENT_OFFSET], cut[:, 1] - starts[owner])
