"""From maps to a connection: coverage, what may be kept, hosts, and what the report says."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.connect_report import ConnectReport, StageBytes, WorkerSummary, _bytes_of, describe_worker
from adapters.failures import CoverageError, UsageError, VerificationError
from adapters.planning import make_connection, topology_of_hosts
from adapters.probing import probe
from adapters.verification import cells_of, check_digests, check_holders, plan_proof
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import space_of
from transfer_exec.errors import UnheldError
from transfer_exec.topology import Engine, Node, Topology

SPACE = CheckpointSpace([TensorSpec("a", (4,), "BF16"), TensorSpec("b", (6,), "F32"), TensorSpec("c", (2,), "BF16")])


def holding(**ids: list[int]) -> SourceMap:
    return SourceMap.from_ids(SPACE, {name: np.array(values) for name, values in ids.items()})


ALL = holding(a=[1, 2, 3, 4], b=[5, 6, 7, 8, 9, 10], c=[11, 12])
TOPOLOGY = topology_of_hosts({"trainer/0": "x", "trainer/1": "x", "engine/e/0": "x", "engine/e/1": "x"})


def connect(holders: dict[str, SourceMap], needers: dict[str, SourceMap], *allowed: str) -> tuple[str, ...]:
    return make_connection(holders, needers, TOPOLOGY, buffer_bytes=1024, allow_partial=allowed).kept


def test_workers_of_one_host_are_a_node_in_natural_order() -> None:
    hosts = {f"trainer/{n}": f"h{n // 6}" for n in range(12)} | {"engine/a/0": "h1", "engine/a/1": "h2"}
    topology = topology_of_hosts(hosts)
    assert [node.workers for node in topology.nodes] == [
        ("engine/a/0", *(f"trainer/{n}" for n in range(6, 12))),
        ("engine/a/1",),
        tuple(f"trainer/{n}" for n in range(6)),
    ]
    assert [(engine.name, engine.workers) for engine in topology.engines] == [
        ("engine/a", ("engine/a/0", "engine/a/1"))
    ]


def test_a_long_transfer_is_cut_into_rounds_that_overlap() -> None:
    """What takes a third of a second at 100 bytes a second is worth many rounds; at the assumed speeds it is one."""
    nodes = [Node.of(w, [w], nic_bytes_per_s=100.0, local_bytes_per_s=1e9) for w in ("trainer/0", "engine/e/0")]
    slow = Topology(nodes, [Engine("engine/e", ("engine/e/0",))])
    rounds = [
        make_connection({"trainer/0": ALL}, {"engine/e/0": ALL}, topology, buffer_bytes=1024).plan.rounds
        for topology in (TOPOLOGY, slow)
    ]
    assert rounds[0] == 1
    assert rounds[1] > 4


def test_unheld_elements_are_named_with_range_and_ranks() -> None:
    held = {"trainer/0": holding(a=[1, 2], b=[5, 6, 7, 8, 9, 10]), "trainer/1": holding(c=[12])}
    with pytest.raises(UnheldError) as raised:
        connect(held, {"engine/e/0": ALL, "engine/e/1": holding(p=[3, 1])})
    text = str(raised.value)
    assert "a (elements 2:4), needed by engine/e/0" in text
    assert "c (elements 0:1), needed by engine/e/0" in text
    assert "engine/e/1" in text


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("F32", r"m \(all 6 elements; trainer/0 has it only in m, which its loader computes"),
        ("BOOL", r"m \(all 6 elements; trainer/0 loads it into m, but elements of BOOL cannot be told apart"),
    ],
)
def test_what_trainers_load_and_cannot_send_is_told_from_what_they_do_not_hold(dtype: str, words: str) -> None:
    space = space_of(w=("F32", 8), m=(dtype, 6))

    def maps(computed: str) -> SourceMap:
        live = {"w": torch.zeros(8), "m": torch.zeros(6)}

        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                live[name].copy_(tensor * 2 if name == computed else tensor)

        return probe(load, live, space)

    with pytest.raises(UnheldError, match=words):
        connect({"trainer/0": maps("m")}, {"engine/e/0": maps("")})


def test_only_what_is_named_may_be_kept() -> None:
    held = {"trainer/0": holding(a=[1, 2], b=[5, 6, 7, 8, 9, 10])}
    needed = {"engine/e/0": ALL, "engine/e/1": holding(p=[3, 1])}
    assert connect(held, needed, "a", "c") == ("engine/e/0: a", "engine/e/0: c", "engine/e/1: p")
    with pytest.raises(UnheldError, match=r"a \(elements 2:3\), needed by engine/e/1"):
        connect(held, {"engine/e/1": holding(p=[3, 1])}, "c")
    with pytest.raises(UnheldError, match="c "):
        connect(held, needed, "a")
    assert connect(held, {"engine/e/1": holding(p=[3, 1])}, "p") == ("engine/e/1: p",)
    with pytest.raises(UsageError, match="allow_partial names nothing_of_the_kind"):
        connect(held, needed, "nothing_of_the_kind")


def test_untouched_parameters_that_look_like_nothing_are_no_reason_to_refuse() -> None:
    engine = SourceMap.from_ids(SPACE, {"a": np.array([1, 2, 3, 4]), "cos_table": np.zeros(50, dtype=np.int64)})
    assert connect({"trainer/0": ALL}, {"engine/e/0": engine}) == ()


def test_a_rank_may_lack_what_another_rank_of_its_engine_fills() -> None:
    first = SourceMap.from_ids(SPACE, {"a": np.array([1, 2, 3, 4]), "b": np.zeros(6, dtype=np.int64)}, {"b": "F32"})
    second = SourceMap.from_ids(SPACE, {"a": np.array([0]), "b": np.arange(5, 11)}, {"a": "BF16"})
    assert connect({"trainer/0": ALL}, {"engine/e/0": first, "engine/e/1": second}) == ()
    with pytest.raises(CoverageError, match="b got nothing"):
        connect({"trainer/0": ALL}, {"engine/e/0": first})


@settings(max_examples=200)
@given(ids=st.lists(st.integers(1, 12), max_size=12, unique=True))
def test_needed_bytes_count_every_element_once(ids: list[int]) -> None:
    parts = {
        "a": np.array([i for i in ids if i < 5], dtype=np.int64),
        "b": np.array([i for i in ids if 5 <= i < 11], dtype=np.int64),
        "c": np.array([i for i in ids if i > 10] * 2, dtype=np.int64),
    }
    source_map = SourceMap.from_ids(SPACE, parts, {"a": "BF16", "b": "F32", "c": "BF16"})
    assert _bytes_of(source_map) == sum(4 if 5 <= i < 11 else 2 for i in ids)


def test_the_report_reads_and_travels() -> None:
    made = make_connection({"trainer/0": ALL}, {"engine/e/0": ALL}, TOPOLOGY, buffer_bytes=1024)
    summary = describe_worker("engine/e/0", ALL, made.plan)
    assert summary.bytes_received == 2 * 4 + 4 * 6 + 2 * 2 == summary.needed_bytes
    report = ConnectReport(
        engines=("e",),
        tensors=3,
        elements=12,
        layouts=1,
        unused={"trainer": (), "engine/e": ("x", "y")},
        kept=("engine/e/0: p",),
        plan_digest=made.plan.digest(),
        transport="shared_memory",
        buffer_bytes=1024,
        rounds=1,
        verify="digest",
        lower_bound_s=0.5,
        bound_link="local ingress of engine/e/0",
        optimum_s=0.5,
        planned_s=0.5,
        workers=(summary,),
        seconds={"plan": 0.25},
    )
    assert ConnectReport.from_bytes(report.to_bytes()) == report
    assert json.loads(report.to_json())["workers"][0]["worker"] == "engine/e/0"
    for words in ("engine/e/0: 3 parameters", "unused by engine/e: x, y", "keep their old values", "plan 0.250 s"):
        assert words in str(report)
    with pytest.raises(KeyError, match="engine/z/0 is not in this report"):
        report.worker("engine/z/0")
    assert isinstance(report.worker("engine/e/0"), WorkerSummary)
    assert StageBytes("internal", 0, summary.bytes_received) in summary.stages


def test_digests_agree_across_layouts_and_differ_with_one_bit() -> None:
    values = np.arange(1, 13, dtype=np.uint32) * 1000
    memory = {"a": values[:4].astype(np.uint16), "b": values[4:10].view(np.float32), "c": values[10:].astype(np.uint16)}
    needers = {"engine/e/0": ALL, "engine/e/1": holding(q=[12, 1], r=[8, 7])}
    made = make_connection({"trainer/0": ALL}, needers, TOPOLOGY, buffer_bytes=1024).correspondence
    sent = {"trainer/0": plan_proof(ALL, cells_of(made, "trainer/0")).digests(memory)}
    other = {"q": np.concatenate([memory["c"][[1]], memory["a"][[0]]]), "r": memory["b"][[3, 2]]}
    landed = {
        "engine/e/0": plan_proof(ALL, cells_of(made, "engine/e/0")).digests(memory),
        "engine/e/1": plan_proof(needers["engine/e/1"], cells_of(made, "engine/e/1")).digests(other),
    }
    check_digests(made, sent, landed)
    check_holders(made, sent)
    other["r"].view(np.uint32)[1] ^= 1
    landed["engine/e/1"] = plan_proof(needers["engine/e/1"], cells_of(made, "engine/e/1")).digests(other)
    with pytest.raises(VerificationError, match=r"engine/e/1: the bits of b\[2:4\] differ"):
        check_digests(made, sent, landed)


def test_replicas_that_differ_are_named() -> None:
    memory = {"a": np.arange(4, dtype=np.uint16), "b": np.zeros(6, np.float32), "c": np.zeros(2, np.uint16)}
    spoiled = {**memory, "c": np.array([0, 1], dtype=np.uint16)}
    made = make_connection(
        {"trainer/0": ALL, "trainer/1": ALL}, {"engine/e/0": ALL}, TOPOLOGY, buffer_bytes=1024
    ).correspondence
    proof = plan_proof(ALL, cells_of(made, "trainer/0"))
    with pytest.raises(VerificationError, match="trainer/0 and trainer/1 both hold"):
        check_holders(made, {"trainer/0": proof.digests(memory), "trainer/1": proof.digests(spoiled)})


def test_what_cannot_be_proved_is_not_claimed() -> None:
    narrow = SourceMap.from_ids(SPACE, {"b": np.arange(5, 11)}, {"b": "BF16"})
    made = make_connection({"trainer/0": ALL}, {"engine/e/0": narrow}, TOPOLOGY, buffer_bytes=1024).correspondence
    assert plan_proof(narrow, cells_of(made, "engine/e/0")).numbers == ()
    assert len(plan_proof(ALL, cells_of(made, "trainer/0")).numbers) == 1
    partly = holding(b=[5, 6])
    assert plan_proof(partly, cells_of(made, "trainer/0")).numbers == ()


def test_what_is_staged_is_proved_beside_what_is_copied() -> None:
    memory: dict[str, np.ndarray] = {
        "a": np.arange(4, dtype=np.uint16),
        "b": np.ones(6, np.float32),
        "c": np.full(2, 7, np.uint16),
    }
    made = make_connection({"trainer/0": ALL}, {"engine/e/0": ALL}, TOPOLOGY, buffer_bytes=1024).correspondence
    cells = cells_of(made, "engine/e/0")
    sent = plan_proof(ALL, cells).digests(memory)
    partly = holding(a=[1, 2, 3, 4], c=[11, 12])
    assert len(plan_proof(partly, cells).numbers) == 1  # a and c are of one dtype
    assert sorted(plan_proof(partly, cells, staged=["b"]).numbers) == sorted(sent)
    partly = holding(a=[1, 2, 3, 4])
    assert plan_proof(partly, cells).numbers == ()
    proof = plan_proof(partly, cells, staged=["b", "c"])
    staged: dict[str, np.ndarray] = {"b": memory["b"].copy(), "c": memory["c"]}
    copied = {"a": memory["a"]}
    assert proof.digests(copied, staged) == sent
    staged["b"].view(np.uint32)[3] ^= 1 << 17
    with pytest.raises(VerificationError, match=r"engine/e/0: the bits of "):
        check_digests(made, {"trainer/0": sent}, {"engine/e/0": proof.digests(copied, staged)})
