"""Which transport a job uses: agreement, machines, and an update over mooncake."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from adapters.failures import UsageError
from adapters.job_key import new_key
from adapters.messages import Member
from adapters.rendezvous import SENDER, Addresses, Record, SharedFolder
from adapters.transports import cards_of, check_transport, choose_transport, data_address, make_transport
from tests.adapters.crew import Crew
from tests.adapters.toy import rollout, same_bits, trainer
from tests.transfer_exec.fake_device import FakeDevice, FakeDriver
from transfer_exec.errors import TransportError
from transfer_exec.transport.addresses import LocalAddress
from transfer_exec.transport.shared_memory import SharedMemoryTransport


def members(*asked: str, hosts: str = "") -> list[Member]:
    """Workers that ask for transports, on hosts named by letters."""
    places = hosts or "x" * len(asked)
    return [Member(f"w/{n}", n, len(asked), "i", places[n], asked[n], None) for n in range(len(asked))]


@pytest.mark.parametrize(
    ("asked", "wanted", "hosts", "chosen"),
    [
        (("auto", "auto"), "auto", "xx", "shared_memory"),
        (("shared_memory", "auto"), "shared_memory", "xx", "shared_memory"),
        (("mooncake", "mooncake"), "mooncake", "xx", "mooncake"),
        (("mooncake", "auto"), "mooncake", "xy", "mooncake"),
        (("auto", "mooncake-rdma"), "auto", "xy", "mooncake-rdma"),
        (("auto", "device_memory"), "auto", "xx", "device_memory"),
    ],
)
def test_names_agree(asked: tuple[str, ...], wanted: str, hosts: str, chosen: str) -> None:
    assert choose_transport(members(*asked, hosts=hosts), wanted) == chosen


@pytest.mark.parametrize(
    ("asked", "wanted", "hosts", "match"),
    [
        (("auto", "mooncake"), "shared_memory", "xx", "w/1 asks for transport mooncake, the trainers for shared"),
        (("mooncake", "shared_memory"), "auto", "xx", "w/1 asks for transport shared_memory"),
        (("auto", "auto"), "auto", "xy", r"w/0 runs on x, w/1 on y, and none is chosen silently; pass .*'mooncake'"),
        (("auto", "auto"), "shared_memory", "xy", "w/1 on y, and shared_memory stays inside one machine"),
        (("auto", "auto"), "device_memory", "xy", "w/1 on y, and device_memory stays inside one machine"),
    ],
)
def test_disagreement_and_silence_are_refused(asked: tuple[str, ...], wanted: str, hosts: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        choose_transport(members(*asked, hosts=hosts), wanted)


def test_names_are_checked() -> None:
    assert check_transport("mooncake-rdma") == "mooncake-rdma"
    assert check_transport("mooncake-rdma:=mlx5_1,mlx5_2") == "mooncake-rdma"
    assert cards_of("mooncake-rdma:=mlx5_1,mlx5_2") == "=mlx5_1,mlx5_2"
    assert cards_of("mooncake-rdma") == ""
    for without in ("mooncake:mlx5_0", "auto:"):
        with pytest.raises(UsageError, match="uses no RDMA cards; only 'mooncake-rdma' takes some"):
            check_transport(without)
    with pytest.raises(UsageError, match="transport 'pigeon' is not available; pass 'auto'"):
        check_transport("pigeon")
    with pytest.raises(UsageError, match="w: transport 'pigeon' is not available; expected one of shared_memory"):
        make_transport("pigeon", "w", address=str, deadline_s=1.0)
    assert isinstance(make_transport("shared_memory", "w", address=str, deadline_s=1.0), SharedMemoryTransport)
    with pytest.raises(TransportError, match="w: device_memory needs a device, and no tensor is on one"):
        make_transport("device_memory", "w", address=str, deadline_s=1.0)
    there = make_transport("device_memory", "w", address=str, deadline_s=1.0, devices=[FakeDevice(FakeDriver())])
    assert there.name == "device_memory"


def test_the_data_address_is_that_of_the_interface_towards_the_sender(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    folder.publish(SENDER, Record("tcp://127.0.0.1:4242").encode())
    assert data_address(folder, "engine/a/1", 1, deadline_s=1.0) == "127.0.0.1"


def test_workers_on_several_machines_never_advertise_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the trainers' name means 127.0.1.1 on their own machine, as installers like to write it."""
    table = [LocalAddress("lo", "127.0.0.1"), LocalAddress("docker0", "172.17.0.1"), LocalAddress("eth0", "10.0.0.3")]
    monkeypatch.setattr("adapters.transports.read_addresses", lambda: table)
    monkeypatch.setattr("adapters.transports.ways_out", lambda: ("10.0.0.3",))
    folder = SharedFolder(tmp_path)
    folder.publish(SENDER, Record("tcp://localhost:4242").encode())
    assert data_address(folder, SENDER, 1, deadline_s=1.0) == "127.0.0.1"
    assert data_address(folder, SENDER, 2, deadline_s=1.0) == "10.0.0.3"
    monkeypatch.setattr("adapters.transports.read_addresses", lambda: table[:1])
    with pytest.raises(TransportError, match=r"from the job's 2 machines: 127\.0\.0\.1 \(lo\); pass host="):
        data_address(folder, SENDER, 2, deadline_s=1.0)


def test_the_host_that_a_worker_was_given_wins(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path, host="203.0.113.7")
    assert data_address(folder, "engine/a/1", 2, deadline_s=0.0) == "203.0.113.7"
    known = Addresses({"sender": "tcp://[fd00::9]:4242", "engine/a": "tcp://node-7:4243"}, key=new_key())
    assert data_address(known, "sender", 2, deadline_s=0.0) == "fd00::9"
    assert data_address(known, "engine/a", 2, deadline_s=0.0) == "node-7"


def test_an_update_over_mooncake(tmp_path: Path) -> None:
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        pytest.skip(f"mooncake is not installed: {error}")
    engines = {"a": [rollout(0, 2), rollout(1, 2)], "b": [rollout(0, 1)]}
    with Crew(tmp_path, [trainer(0, 2), trainer(1, 2)], engines, transport="mooncake") as crew:
        (report, _) = crew.connect(buffer_bytes=200)
        assert report.transport == "mooncake"  # type: ignore[attr-defined]
        assert report.places == dict.fromkeys(report.places, "127.0.0.1 on lo")  # type: ignore[attr-defined]
        assert set(report.places) == {one.worker for one in report.workers}  # type: ignore[attr-defined]
        assert "engine/a/1 at 127.0.0.1 on lo: " in str(report)
        for version in (1, 2, 3):
            (sent, _) = crew.send(version)
            assert sent.transport == "mooncake"  # type: ignore[attr-defined]
            for one in crew.rollouts.values():
                assert same_bits(one.holding.tensors, one.holding.expected(version))
