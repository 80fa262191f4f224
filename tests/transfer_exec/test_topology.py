"""Topology: the uniform cut into nodes, files, and every description that contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_exec.errors import TopologyError
from transfer_exec.topology import ClusterLink, Engine, Nic, Node, Topology

UNIFORM = {
    "trainers": 5,
    "engines": 2,
    "engine_size": 3,
    "workers_per_node": 4,
    "nic_bytes_per_s": 50e9,
    "local_bytes_per_s": 900e9,
}


def node(*workers: str, nic: float = 1.0, local: float = 1.0, cluster: str = "main") -> Node:
    return Node.of("n", workers, nic_bytes_per_s=nic, local_bytes_per_s=local, cluster=cluster)


def test_uniform_cuts_the_two_sides_separately() -> None:
    topology = Topology.uniform(**UNIFORM)  # type: ignore[arg-type]
    assert [one.workers for one in topology.nodes] == [
        ("trainer/0", "trainer/1", "trainer/2", "trainer/3"),
        ("trainer/4",),
        ("engine/0/0", "engine/0/1", "engine/0/2", "engine/1/0"),
        ("engine/1/1", "engine/1/2"),
    ]
    assert [topology.node_of(w) for w in ("trainer/4", "engine/1/0", "engine/1/1")] == [1, 2, 3]
    assert topology.engines[1] == Engine("engine/1", ("engine/1/0", "engine/1/1", "engine/1/2"))
    assert all(nic == Nic((w,), 50e9, 50e9) for n in topology.nodes for nic, w in zip(n.nics, n.workers, strict=True))
    assert topology == Topology.uniform(**UNIFORM)  # type: ignore[arg-type]
    assert Topology.uniform(**{**UNIFORM, "trainers": 0, "engines": 0}).nodes == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainers": -1}, "trainers is -1"),
        ({"engine_size": 2.0}, r"engine_size is 2\.0; expected an integer"),
        ({"workers_per_node": 0}, "workers_per_node is 0; expected an integer of at least 1"),
        ({"nic_bytes_per_s": 0.0}, "NIC egress of trainer/0 is 0.0; expected bytes per second above zero"),
        ({"local_bytes_per_s": float("nan")}, "local_bytes_per_s is nan"),
    ],
)
def test_uniform_refuses(change: dict[str, float], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.uniform(**{**UNIFORM, **change})  # type: ignore[arg-type]


def test_a_worker_in_no_node() -> None:
    with pytest.raises(TopologyError, match=r"engine/9/9: in no node of this topology, whose 11 workers are trainer/0"):
        Topology.uniform(**UNIFORM).node_of("engine/9/9")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "engines", "links", "message"),
    [
        ([node("a", "b"), node("b")], [], [], r"b: in node 1 \(n\) and in node 0"),
        ([node("a", "a")], [], [], r"a: in node 0 \(n\) twice"),
        ([node("a"), node("b", nic=-1.0)], [], [], r"node 1 \(n\): NIC egress of b is -1.0"),
        ([node("a", local=0)], [], [], r"node 0 \(n\): local_bytes_per_s is 0;"),
        ([Node("n", (Nic(("a",), 1.0, 0.0),), 1.0)], [], [], "NIC ingress of a is 0.0"),
        ([Node("n", (Nic((), 1.0, 1.0),), 1.0)], [], [], "a NIC without workers"),
        ([node("")], [], [], "worker ''"),
        ([node("a")], [Engine("e", ("b",))], [], "b of engine e: in no node"),
        ([node("a")], [Engine("e", ("a",)), Engine("f", ("a",))], [], "a: in engine e and in engine f"),
        ([node("a")], [Engine("e", ("a",)), Engine("e", ())], [], "engine e: described 2 times"),
        ([node("a"), node("b", cluster="far")], [], [], "clusters far and main have no link"),
        ([node("a")], [], [ClusterLink(("main", "far"), 1.0)], "link between far and main: expected two of"),
        (
            [node("a"), node("b", cluster="far")],
            [],
            [ClusterLink(("main", "far"), 1.0), ClusterLink(("far", "main"), 2.0)],
            "link between far and main: given 2 times",
        ),
        ([node("a", nic=1e-320)], [], [], r"NIC egress of a is 1e-320; expected bytes per second from 1e-6 to 1e18"),
        ([node("a", local=10**400)], [], [], "expected bytes per second from 1e-6 to 1e18"),
        ([node("a", cluster="")], [], [], r"node 0 \(n\): cluster ''; expected a non-empty string"),
        ([node("a"), "b"], [], [], r"nodes\[1\] is 'b'; expected: Node"),
        (None, [], [], r"nodes\[0\] is None; expected: Node"),
        ([Node("n", ("a",), 1.0)], [], [], r"node 0 \(n\): nics\[0\] is 'a'; expected: Nic"),
        ([Node("n", (Nic("ab", 1.0, 1.0),), 1.0)], [], [], "workers is 'ab'; expected a list of names"),
        ([node("a")], ["e"], [], r"engines\[0\] is 'e'; expected: Engine"),
        (
            [node("a"), node("b", cluster="far")],
            [],
            [ClusterLink(("main",), 1.0)],
            r"link between \('main',\); expected the names of two clusters",
        ),
        (
            [node("a"), node("b", cluster="far")],
            [],
            [ClusterLink(("main", "far"), 0.0)],
            "link between main and far is",
        ),
    ],
)
def test_contradictions(nodes: list[Node], engines: list[Engine], links: list[ClusterLink], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(nodes, engines, links)


def test_a_text_is_no_list_of_workers() -> None:
    with pytest.raises(TopologyError, match="workers is 'ab'; expected a list of names"):
        Node.of("n", "ab", nic_bytes_per_s=1.0, local_bytes_per_s=1.0)
    with pytest.raises(TopologyError, match="workers is 'trainer/0'; expected a list of names"):
        Topology.detect("trainer/0")


GOOD = """
[[node]]
name = "a"
workers = ["trainer/0", "engine/0/0"]
nic_bytes_per_s = 50e9
local_bytes_per_s = 900e9
cluster = "east"

[[node]]
workers = ["engine/0/1", "engine/1/0"]
nic_bytes_per_s = { egress = 40e9, ingress = 25e9 }
shared_nic = true
local_bytes_per_s = inf
cluster = "west"

[[engine]]
name = "engine/0"
workers = ["engine/0/0", "engine/0/1"]

[[link]]
clusters = ["east", "west"]
bytes_per_s = 1e9
"""


def test_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    topology = Topology.from_toml(path)
    assert topology == Topology(
        [
            Node("a", (Nic(("trainer/0",), 50e9, 50e9), Nic(("engine/0/0",), 50e9, 50e9)), 900e9, "east"),
            Node("node 1", (Nic(("engine/0/1", "engine/1/0"), 40e9, 25e9),), float("inf"), "west"),
        ],
        [Engine("engine/0", ("engine/0/0", "engine/0/1"))],
        [ClusterLink(("east", "west"), 1e9)],
    )
    path.write_text("[uniform]\n" + "\n".join(f"{key} = {value!r}" for key, value in UNIFORM.items()))
    assert Topology.from_toml(str(path)) == Topology.uniform(**UNIFORM)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "nic_bytes_per_s = 50e9",
            "nic_byte_per_s = 50e9",
            r"node\[0\]: unknown key 'nic_byte_per_s'; did you mean nic",
        ),
        ("nic_bytes_per_s = 50e9", "", r"node\[0\]: nic_bytes_per_s is missing"),
        ("50e9", '"50 GB"', r"node\[0\].nic_bytes_per_s: '50 GB'; expected a number above zero"),
        ("egress = 40e9", "egres = 40e9", r"node\[1\].nic_bytes_per_s: unknown key 'egres'; did you mean egress"),
        ("egress = 40e9", "egress = -1", r"node\[1\].nic_bytes_per_s.egress: -1; expected a number above zero"),
        ("shared_nic = true", "shared_nic = 1", r"node\[1\].shared_nic: 1; expected true or false"),
        ('["engine/0/1", "engine/1/0"]', '["engine/0/1", 7]', r"node\[1\].workers\[1\]: 7; expected a non-empty"),
        ('["engine/0/1", "engine/1/0"]', '"engine/0/1"', r"node\[1\].workers: 'engine/0/1'; expected a list"),
        ('["east", "west"]', '["east"]', r"link\[0\].clusters: 1 names; expected two"),
        ("[[link]]", "[[lnik]]", "the file: unknown key 'lnik'; did you mean link"),
        ("[[link]]", "[link]", r"link: expected tables, each under its own \[\[link\]\]"),
        (
            'workers = ["engine/0/0", "engine/0/1"]',
            'workers = ["engine/5/0"]',
            "engine/5/0 of engine engine/0: in no node",
        ),
        ("[[node]]\nname", "[[node\nname", "no TOML: .*line 2"),
        (GOOD, "", r"no \[\[node\]\] and no \[uniform\]"),
        (GOOD, "[uniform]\ntrainers = 1\n", "uniform: engines is missing"),
        (GOOD, "uniform = 3", "uniform: expected a table"),
        ("[[node]]\nname", "[uniform]\n[[node]]\nname", "expected no other tables"),
    ],
)
def test_a_file_with_a_mistake_names_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TopologyError, match=message) as caught:
        Topology.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"none.toml: cannot be read: No such file"):
        Topology.from_toml(tmp_path / "none.toml")
