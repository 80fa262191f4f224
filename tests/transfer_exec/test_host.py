"""Topology.detect: what counts as an interface, who uses which, and a made-up system folder read as it is."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path

import pytest

from transfer_exec import host as host_module
from transfer_exec.errors import TopologyError
from transfer_exec.host import ASSUMED_NIC_BYTES_PER_S, Host, Interface, network_interfaces, topology_of_host
from transfer_exec.host_reading import read_host
from transfer_exec.topology import Engine, Topology

CARD = Interface("eth0", up=True, physical=True, bond=False, in_bond=False, loopback=False, bytes_per_s=50e9)
LOOP = Interface("lo", up=True, physical=False, bond=False, in_bond=False, loopback=True, bytes_per_s=None)


def card(name: str, **changes: object) -> Interface:
    return replace(CARD, name=name, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interfaces", "chosen"),
    [
        ([LOOP, CARD], ["eth0"]),
        ([LOOP], []),
        ([], []),
        ([card("a"), card("b"), card("mgmt", bytes_per_s=0.125e9)], ["a", "b"]),
        ([card("a"), card("b", bytes_per_s=25e9)], ["a", "b"]),
        ([card("a"), card("silent", bytes_per_s=None)], ["a"]),
        ([card("a", bytes_per_s=None), card("b", bytes_per_s=None)], ["a", "b"]),
        ([card("a", up=False), card("b", bytes_per_s=1e9)], ["b"]),
        ([card("a", in_bond=True), card("b", in_bond=True), card("bond0", physical=False, bond=True)], ["bond0"]),
        ([card("a"), card("docker0", physical=False, bytes_per_s=100e9)], ["a"]),
        ([LOOP, card("veth", physical=False, bytes_per_s=1.25e9)], ["veth"]),
    ],
)
def test_which_interfaces_count(interfaces: list[Interface], chosen: list[str]) -> None:
    assert [each.name for each in network_interfaces(interfaces)] == chosen


def made(*interfaces: Interface, cores: int = 64) -> Host:
    return Host("here", interfaces, cores, 9e9)


@pytest.mark.parametrize(
    ("cards", "workers", "groups"),
    [
        (1, 3, [3]),
        (2, 3, [2, 1]),
        (2, 4, [2, 2]),
        (4, 4, [1, 1, 1, 1]),
        (8, 2, [1, 1]),
        (0, 2, [2]),
    ],
)
def test_who_uses_which(cards: int, workers: int, groups: list[int]) -> None:
    names = [f"trainer/{rank}" for rank in range(workers)]
    (node,) = topology_of_host(made(*(card(f"eth{n}") for n in range(cards))), names).nodes
    assert [len(nic.workers) for nic in node.nics] == groups
    assert node.workers == tuple(names)
    assert {nic.egress_bytes_per_s for nic in node.nics} == {50e9 if cards else ASSUMED_NIC_BYTES_PER_S}


def test_speeds_declared_and_found() -> None:
    names = ["trainer/0", "engine/a/0", "engine/a/1", "engine/b/0"]
    found = topology_of_host(made(CARD, cores=2), names)
    assert found.nodes[0].local_bytes_per_s == 4.5e9, "four workers on two cores"
    assert found.engines == (Engine("engine/a", ("engine/a/0", "engine/a/1")), Engine("engine/b", ("engine/b/0",)))
    told = topology_of_host(made(CARD), names, nic_bytes_per_s=1.0, local_bytes_per_s=2.0).nodes[0]
    assert (told.nics[0].ingress_bytes_per_s, told.local_bytes_per_s) == (1.0, 2.0)
    with pytest.raises(TopologyError, match="no workers; name those of this host"):
        topology_of_host(made(CARD), [])
    with pytest.raises(TopologyError, match=r"a: in node 0 .* twice"):
        topology_of_host(made(CARD), ["a", "a"])
    with pytest.raises(TopologyError, match="NIC egress of a is 0"):
        topology_of_host(made(CARD), ["a"], nic_bytes_per_s=0)


def test_a_systems_folder(tmp_path: Path) -> None:
    def interface(name: str, state: str, speed: str | None, *, kind: str = "1", folders: tuple[str, ...] = ()) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "operstate").write_text(state + "\n")
        (folder / "type").write_text(kind + "\n")
        if speed is not None:
            (folder / "speed").write_text(speed + "\n")
        for each in folders:
            (folder / each).mkdir()

    interface("eth0", "up", "400000", folders=("device",))
    interface("eth1", "down", "-1", folders=("device",))
    interface("bond0", "up", "200000", folders=("bonding",))
    interface("eth2", "up", "100000", folders=("device", "bonding_slave"))
    interface("lo", "unknown", None, kind="772")
    (tmp_path / "bonding_masters").write_text("bond0\n")
    found = read_host(tmp_path)
    assert {each.name: each.bytes_per_s for each in found.interfaces} == {
        "bond0": 25e9, "eth0": 50e9, "eth1": None, "eth2": 12.5e9, "lo": None,
    }  # fmt: skip
    assert [each.name for each in network_interfaces(found.interfaces)] == ["bond0", "eth0"]
    assert read_host(tmp_path / "none").interfaces == ()


def test_this_host() -> None:
    workers = ["trainer/0", "trainer/1", "engine/0/0"]
    topology = Topology.detect(workers)
    assert topology.workers == tuple(workers)
    assert [topology.node_of(worker) for worker in workers] == [0, 0, 0]
    assert topology.nodes[0].local_bytes_per_s > 1e6
    assert {engine.name for engine in Topology.detect().engines} == {"engine/0"}


def test_example() -> None:
    assert doctest.testmod(host_module) == (0, 6)
