"""run_in_process: random layouts, memory and budgets against the element-wise truth; the field's cases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from crossing import Crossing, make_memory, random_crossing

from layout_algebra.correspondence import correspond
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import ProgramError, TransportError
from transfer_exec.executor import Executor
from transfer_exec.in_process import run_in_process
from transfer_exec.kernels.cpu import CpuKernels
from transfer_exec.kernels.reference import ReferenceKernels
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.planner import make_plan
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology
from transfer_exec.transport.loopback import LoopbackNetwork, LoopbackPolicy


def poison(executors: Mapping[str, Executor]) -> None:
    """Fill every buffer with NaN patterns, so that a byte that nobody wrote is seen."""
    for executor in executors.values():
        for slots in executor.buffers.memory.values():
            for memory in slots:
                memory[:] = 0xFF


def cross(
    crossing: Crossing,
    plan: Plan,
    rng: np.random.Generator,
    *,
    strided: bool = True,
    policy: LoopbackPolicy | None = None,
    depth: int = 2,
    direct_bytes: int | None = None,
) -> TransferReport:
    """Run a plan on fresh memory and check every byte."""
    holders = make_memory(crossing, crossing.held, rng, strided=strided)
    needers = make_memory(crossing, crossing.needed, rng, strided=strided)
    for worker, parameters in holders.items():
        for name, memory in parameters.items():
            crossing.fill_holder(worker, name, memory.view)
    kept = {worker: {n: m.base.copy() for n, m in parameters.items()} for worker, parameters in holders.items()}
    before = {worker: {n: m.view.copy() for n, m in parameters.items()} for worker, parameters in needers.items()}
    memory = {w: {n: m.view for n, m in parameters.items()} for w, parameters in {**holders, **needers}.items()}
    network = LoopbackNetwork(policy)
    report = run_in_process(
        plan, crossing.maps, memory, network=network, depth=depth, direct_bytes=direct_bytes, inspect=poison
    )
    for worker, parameters in holders.items():
        for name, guard in parameters.items():
            assert np.array_equal(guard.base, kept[worker][name]), f"{name} on {worker} was written"
    for worker, parameters in needers.items():
        for name, guard in parameters.items():
            assert guard.outside_untouched(), f"bytes around {name} on {worker} changed"
            crossing.check_needer(worker, name, guard.view, before[worker][name])
    for worker in plan.workers:
        for stage in Stage:
            assert report.bytes_sent(worker, stage) == plan.bytes_sent(worker, stage)
            assert report.bytes_received(worker, stage) == plan.bytes_received(worker, stage)
    return report


BOTH_WAYS = pytest.mark.parametrize("direct_bytes", [None, 1, 12], ids=["in rounds", "directly", "partly directly"])


@BOTH_WAYS
@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_memory_and_budgets(seed: int, direct_bytes: int | None) -> None:
    rng = np.random.default_rng(seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([8, 24, 100, 1 << 20])))
    cross(crossing, plan, rng, strided=bool(rng.integers(0, 2)), direct_bytes=direct_bytes)


@BOTH_WAYS
@pytest.mark.parametrize("seed", range(30))
def test_a_network_that_delays_and_reorders(seed: int, direct_bytes: int | None) -> None:
    rng = np.random.default_rng(1000 + seed)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=int(rng.integers(1, 4)), buffer_bytes=int(rng.choice([16, 64, 1 << 20])))
    policy = LoopbackPolicy(seed=seed, max_delay=7, reorder=True)
    strided = bool(rng.integers(0, 2))
    cross(crossing, plan, rng, strided=strided, policy=policy, depth=int(rng.integers(1, 5)), direct_bytes=direct_bytes)


# what must be right before the first byte


def plan_for(held: SourceMap, needed: Mapping[str, SourceMap]) -> Plan:
    """One trainer on a node, one engine on another; 16 bytes a round."""
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=len(needed), workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    return make_plan(correspond({"trainer/0": held}, dict(needed)), topology, buffer_bytes=16)


def a_case() -> tuple[Plan, dict[str, SourceMap], dict[str, dict[str, np.ndarray]]]:
    """One trainer, one engine of two ranks; rank 1 also has an opaque parameter computed from x."""
    space = CheckpointSpace([TensorSpec("w", (6,), "F32"), TensorSpec("x", (4,), "F32")])
    opaque = ParameterMap((2,), "U8", CopyTable.empty(), RunTable.from_ids([0, 1]), ("x",))
    plain = SourceMap.from_ids(space, {"w": np.arange(1, 7)})
    both = SourceMap(space, {"w": plain["w"], "packed": opaque})
    maps = {
        "trainer/0": SourceMap.from_ids(space, {"w": np.arange(1, 7), "x": np.arange(7, 11)}),
        "engine/0/0": plain,
        "engine/0/1": both,
    }
    memory = {
        "trainer/0": {"w": np.arange(6, dtype=np.float32), "x": np.arange(4, dtype=np.float32) + 50},
        "engine/0/0": {"w": np.full(6, 9, dtype=np.float32), "unrelated": np.full(3, 9.0)},
        "engine/0/1": {"w": np.full(6, 9, dtype=np.float32), "packed": np.full(2, 9, dtype=np.uint8)},
    }
    return plan_for(maps["trainer/0"], {w: maps[w] for w in ("engine/0/0", "engine/0/1")}), maps, memory


@BOTH_WAYS
def test_opaque_parameters_are_left_alone_and_their_tensors_staged(direct_bytes: int | None) -> None:
    plan, maps, memory = a_case()
    staged: dict[str, Mapping[str, np.ndarray]] = {}

    def keep(executors: Mapping[str, Executor]) -> None:
        staged.update({worker: executor.staged for worker, executor in executors.items()})

    report = run_in_process(plan, maps, memory, direct_bytes=direct_bytes, inspect=keep)
    assert report.workers["engine/0/1"].direct_bytes == (16 if direct_bytes else 0), (
        "x; w comes by way of the other rank"
    )
    assert report.opaque == {"engine/0/1": ("packed",)}
    assert memory["engine/0/1"]["packed"].tolist() == [9, 9]
    assert memory["engine/0/0"]["unrelated"].tolist() == [9, 9, 9]
    assert memory["engine/0/1"]["w"].tolist() == memory["engine/0/0"]["w"].tolist() == list(range(6))
    assert {worker: {n: v.tolist() for n, v in tensors.items()} for worker, tensors in staged.items()} == {
        "trainer/0": {},
        "engine/0/0": {},
        "engine/0/1": {"x": [50, 51, 52, 53]},
    }
    assert report.measures is None


@BOTH_WAYS
def test_a_staged_tensor_may_have_a_parameters_name(direct_bytes: int | None) -> None:
    """The checkpoint's w is staged for an opaque parameter while a reversed copy of it is called w too."""
    space = CheckpointSpace([TensorSpec("w", (4,), "F32")])
    whole = SourceMap.from_ids(space, {"w": np.arange(1, 5)})
    opaque = ParameterMap((2,), "U8", CopyTable.empty(), RunTable.from_ids([0, 1]), ("w",))
    needed = SourceMap(space, {"w": SourceMap.from_ids(space, {"w": np.arange(4, 0, -1)})["w"], "packed": opaque})
    plan = plan_for(whole, {"engine/0/0": needed})
    memory = {"trainer/0": {"w": np.arange(4, dtype=np.float32)}, "engine/0/0": {"w": np.zeros(4, dtype=np.float32)}}
    staged: list[Mapping[str, np.ndarray]] = []
    maps = {"trainer/0": whole, "engine/0/0": needed}

    def keep(executors: Mapping[str, Executor]) -> None:
        staged.append(executors["engine/0/0"].staged)

    run_in_process(plan, maps, memory, direct_bytes=direct_bytes, inspect=keep)
    assert memory["engine/0/0"]["w"].tolist() == [3, 2, 1, 0]
    assert staged[0]["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("worker", "change", "match"),
    [
        ("engine/0/1", {"w": np.zeros(7, dtype=np.float32)}, r"w on engine/0/1: has shape \(7,\), its map has \(6,\)"),
        ("engine/0/1", {"w": np.zeros(6)}, "w on engine/0/1: numpy memory is float64"),
        ("engine/0/1", {}, "w on engine/0/1: no memory was given"),
        ("engine/0/1", {"w": "text"}, "w on engine/0/1: got str"),
        ("trainer/0", {"w": np.zeros(6, dtype=np.float32)}, "x on trainer/0: no memory was given"),
    ],
)
def test_unfit_memory_is_refused_and_nothing_is_written(worker: str, change: dict[str, object], match: str) -> None:
    plan, maps, memory = a_case()
    with pytest.raises(ProgramError, match=match):
        run_in_process(plan, maps, {**memory, worker: change})
    for rank in range(2):
        assert memory[f"engine/0/{rank}"]["w"].tolist() == [9] * 6


def test_missing_or_other_maps_are_refused_and_nothing_is_written() -> None:
    plan, maps, memory = a_case()
    with pytest.raises(ProgramError, match="no source map of engine/0/1"):
        run_in_process(plan, {w: m for w, m in maps.items() if w != "engine/0/1"}, memory)
    other = CheckpointSpace([TensorSpec("w", (6,), "F32")])
    with pytest.raises(ProgramError, match="engine/0/0: its map is of checkpoint"):
        run_in_process(plan, {**maps, "engine/0/0": SourceMap.from_ids(other, {"w": np.arange(1, 7)})}, memory)
    with pytest.raises(ProgramError, match="trainer/0: the plan has it send"):
        run_in_process(plan, {**maps, "trainer/0": maps["engine/0/0"]}, memory)
    assert memory["engine/0/0"]["w"].tolist() == [9] * 6


@pytest.mark.parametrize("bad", [{"version": 1.5}, {"version": True}, {"version": -1}, {"depth": 0}, {"depth": 1.5}])
def test_arguments_that_are_no_numbers_are_refused_and_nothing_is_written(bad: dict[str, int]) -> None:
    plan, maps, memory = a_case()
    with pytest.raises(ProgramError, match=rf"{next(iter(bad))} is .*; expected an integer"):
        run_in_process(plan, maps, memory, **bad)  # type: ignore[arg-type]
    assert memory["engine/0/0"]["w"].tolist() == [9] * 6


def test_lost_messages_are_a_named_deadlock() -> None:
    plan, maps, memory = a_case()
    network = LoopbackNetwork(LoopbackPolicy(lost_signals=frozenset(range(8, 99))))
    with pytest.raises(TransportError, match=r"no worker can go on: .*engine/0/\d at version 0, round \d+, stage"):
        run_in_process(plan, maps, memory, network=network)
    network = LoopbackNetwork(LoopbackPolicy(lost_writes=frozenset([2])))
    with pytest.raises(TransportError, match=r"no worker can go on: .*for a write to engine/0/\d to complete"):
        run_in_process(plan, maps, memory, network=network)


def test_failed_writes_are_raised_by_name() -> None:
    plan, maps, memory = a_case()
    network = LoopbackNetwork(LoopbackPolicy(failing_writes=frozenset([2])))
    with pytest.raises(TransportError, match=r"write 2 from .* failed"):
        run_in_process(plan, maps, memory, network=network)


def test_the_same_plan_runs_for_version_after_version() -> None:
    plan, maps, memory = a_case()
    for version in range(3):
        memory["trainer/0"]["w"][:] = np.arange(6) * version
        report = run_in_process(plan, maps, memory, version=version, inspect=poison)
        assert report.version == version
        assert memory["engine/0/1"]["w"].tolist() == [k * version for k in range(6)]


def test_the_reference_backend_agrees() -> None:
    rng = np.random.default_rng(77)
    crossing = random_crossing(rng)
    plan = crossing.plan(workers_per_node=2, buffer_bytes=64)
    results = []
    for kernels in (CpuKernels(), ReferenceKernels()):
        fill = np.random.default_rng(5)
        holders, needers = (make_memory(crossing, side, fill) for side in (crossing.held, crossing.needed))
        for worker, parameters in holders.items():
            for name, guard in parameters.items():
                crossing.fill_holder(worker, name, guard.view)
        memory = {w: {n: g.view for n, g in p.items()} for w, p in {**holders, **needers}.items()}
        report = run_in_process(plan, crossing.maps, memory, kernels=kernels)
        assert {each.kernels for each in report.workers.values()} == {kernels.name}
        results.append({(w, n): g.base for w, p in needers.items() for n, g in p.items()})
    assert all(np.array_equal(results[0][key], results[1][key]) for key in results[0])


# T16: every write that was posted ends before its failure is raised, and all failures are listed


def ended(network: LoopbackNetwork, write: int) -> bool:
    """Whether a write is over, well or badly."""
    try:
        return network.done(write)
    except TransportError:
        return True


@pytest.mark.parametrize("seed", range(5))
def test_t16_two_of_five_writes_fail(seed: int) -> None:
    """One trainer writes to five engines; the failing writes are raised together, after all five have ended."""
    space = CheckpointSpace([TensorSpec("w", (50,), "F32")])
    maps = {"trainer/0": SourceMap.from_ids(space, {"w": np.arange(1, 51)})}
    for k in range(5):
        maps[f"engine/{k}/0"] = SourceMap.from_ids(space, {"w": np.arange(1 + 10 * k, 11 + 10 * k)})
    topology = Topology.uniform(
        trainers=1, engines=5, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    needed = {worker: each for worker, each in maps.items() if worker.startswith("engine")}
    plan = make_plan(correspond({"trainer/0": maps["trainer/0"]}, needed), topology, buffer_bytes=200)
    memory = {worker: {"w": np.ones(each.shape("w"), dtype=np.float32)} for worker, each in maps.items()}
    network = LoopbackNetwork(LoopbackPolicy(seed=seed, max_delay=30, failing_writes=frozenset([1, 3])))
    with pytest.raises(TransportError, match=r"write 1 from trainer/0 .*write 3 from|write 3 from .*write 1 from"):
        run_in_process(plan, maps, memory, network=network)
    assert len(network.records) == 5
    assert all(ended(network, write) for write in range(5))


@pytest.mark.parametrize("seed", range(5))
def test_t16_one_message_from_two_buffers(seed: int) -> None:
    """a0 forwards to a1 what it got in two stages: two writes of one message, of which the first fails."""
    space = CheckpointSpace([TensorSpec("w", (20,), "F32")])
    whole = SourceMap.from_ids(space, {"w": np.arange(1, 21)})
    hops = (Hop(Stage.RECEIVE, "t", "a0"), Hop(Stage.EXTERNAL, "a0", "b0"), Hop(Stage.INTERNAL, "a0", "a1"))
    back = (Hop(Stage.RECEIVE, "t", "b0"), Hop(Stage.EXTERNAL, "b0", "a0"), Hop(Stage.INTERNAL, "a0", "a1"))
    routes = (
        Route(RunTable.from_intervals([[1, 11]]), 4, "t", hops),
        Route(RunTable.from_intervals([[11, 21]]), 4, "t", back),
    )
    plan = Plan(space.digest(), ("t",), ("a0", "a1", "b0"), (0, 1, 1, 2), routes, 1, 100, 1.0, "t", 1.0, 1.0)
    maps = dict.fromkeys(plan.workers, whole)
    memory = {worker: {"w": np.ones(20, dtype=np.float32)} for worker in plan.workers}
    healthy = LoopbackNetwork()
    run_in_process(plan, maps, memory, network=healthy)
    forwarded = [k for k, record in enumerate(healthy.records) if (record.source, record.target) == ("a0", "a1")]
    assert len(forwarded) == 2
    policy = LoopbackPolicy(seed=seed, max_delay=400, failing_writes=frozenset(range(99)) - {0, 1, 2, 3, forwarded[1]})
    network = LoopbackNetwork(policy)
    with pytest.raises(TransportError, match=r"a0, version 0, round 0, stage INTERNAL: for a write to a1 .*failed"):
        run_in_process(plan, maps, memory, network=network)
    mine = [k for k, record in enumerate(network.records) if (record.source, record.target) == ("a0", "a1")]
    assert len(mine) == 2
    assert all(ended(network, write) for write in mine)


def test_nobody_needs_anything() -> None:
    space = CheckpointSpace([TensorSpec("w", (4,), "F32"), TensorSpec("nothing", (0, 3), "BF16")])
    whole = SourceMap.from_ids(space, {"w": np.arange(1, 5)})
    idle = SourceMap.from_ids(space, {"q": np.zeros(3, dtype=np.int64)}, {"q": "F32"})
    plan = plan_for(whole, {"engine/0/0": idle})
    report = run_in_process(plan, {"trainer/0": whole, "engine/0/0": idle}, {})
    assert report.transfer_s is None
    assert report.bytes_sent("trainer/0") == 0
