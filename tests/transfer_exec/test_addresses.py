"""Which address a machine is reached at: tables of interfaces and of a card's entries, and this machine's own."""

from __future__ import annotations

import doctest
import socket
from pathlib import Path

import pytest

from transfer_exec.errors import TransportError
from transfer_exec.host_reading import read_addresses, read_devices, read_gids, ways_out
from transfer_exec.transport import addresses
from transfer_exec.transport.addresses import LocalAddress, choose_address, usable_addresses

LOOP, LOOP6 = LocalAddress("lo", "127.0.0.1"), LocalAddress("lo", "::1")
LINK, LINK4 = LocalAddress("eth0", "fe80::42"), LocalAddress("eth0", "169.254.3.4")
PLAIN, SECOND = LocalAddress("eth0", "10.0.0.3"), LocalAddress("ib0", "10.1.0.3")
MAPPED = LocalAddress("eth0", "::ffff:10.0.0.3")
PURE6 = LocalAddress("eth0", "fd00::3")
ALL = [LOOP, LINK4, LINK, PURE6, PLAIN, SECOND, LOOP6]


@pytest.mark.parametrize(
    ("table", "machines", "ways", "wanted", "chosen"),
    [
        # One machine: whatever way leads to the trainers, loopback too; without a way a real address first.
        (ALL, 1, ["127.0.0.1"], "", "127.0.0.1"),
        ([LOOP], 1, [], "", "127.0.0.1"),
        ([LOOP6], 1, [], "", "::1"),
        ([LOOP, PLAIN], 1, [], "", "10.0.0.3"),
        # Several: the way, if others can use it too.
        (ALL, 2, ["10.1.0.3"], "", "10.1.0.3"),
        (ALL, 2, ["127.0.0.1", "10.1.0.3"], "", "10.1.0.3"),
        (ALL, 2, ["fd00::3", "10.0.0.3"], "", "fd00::3"),
        (ALL, 2, ["fe80::42%eth0"], "", "10.0.0.3"),
        (ALL, 2, ["169.254.3.4"], "", "10.0.0.3"),
        (ALL, 2, ["198.51.100.9"], "", "10.0.0.3"),
        ([LOOP, PURE6, LINK], 3, [], "", "fd00::3"),
        # An IPv4 address is one however it is spelled.
        ([LOOP, MAPPED], 2, [], "", "10.0.0.3"),
        ([PURE6, SECOND, PLAIN], 2, ["::ffff:10.0.0.3"], "", "10.0.0.3"),
        # What the user says wins, on this machine or not.
        (ALL, 2, ["10.0.0.3"], "10.1.0.3", "10.1.0.3"),
        (ALL, 2, ["10.0.0.3"], "[fd00::3]", "fd00::3"),
        (ALL, 2, ["10.0.0.3"], "203.0.113.7", "203.0.113.7"),
        (ALL, 2, [], "node-7", "node-7"),
        (ALL, 2, [], "169.254.3.4", "169.254.3.4"),
        (ALL, 1, ["10.0.0.3"], "127.0.0.1", "127.0.0.1"),
    ],
)
def test_choices(table: list[LocalAddress], machines: int, ways: list[str], wanted: str, chosen: str) -> None:
    found = choose_address(table, machines=machines, ways=ways, wanted=wanted)
    assert found.address == chosen
    listed = [each.interface for each in table if each.address in (chosen, f"::ffff:{chosen}")]
    assert found.interface == (listed[0] if listed else "")


@pytest.mark.parametrize("table", [[], [LOOP], [LOOP6, LINK, LINK4], [LocalAddress("a", "0.0.0.0")]])
def test_nothing_that_others_reach_is_refused_by_what_there_is(table: list[LocalAddress]) -> None:
    with pytest.raises(TransportError, match=r"reached from the job's 2 machines: .*; pass host=") as refused:
        choose_address(table, machines=2, ways=["127.0.0.1"])
    assert all(each.address in str(refused.value) for each in table)


@pytest.mark.parametrize(
    "wanted", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_an_address_that_leads_every_machine_to_itself_is_refused(wanted: str) -> None:
    with pytest.raises(TransportError, match=r"leads from every machine to itself, .* on 4; pass the address"):
        choose_address(ALL, machines=4, wanted=wanted)


OWN = {"10.0.0.3", "fd00::3", "fe80::42"}
FOREIGN = LocalAddress("docker0", "::ffff:172.17.0.1", 1)


@pytest.mark.parametrize(
    ("entries", "way", "chosen"),
    [
        (["fe80::42", "::ffff:172.17.0.1", "fd00::3", "::ffff:10.0.0.3"], "10.0.0.3", [3, 2]),
        (["fe80::42", "::ffff:172.17.0.1", "fd00::3", "::ffff:10.0.0.3"], "fd00::3", [2, 3]),
        (["fe80::42", "::ffff:172.17.0.1", "fd00::3"], "10.0.0.3", [2]),
        (["fe80::42", "::ffff:172.17.0.1"], "10.0.0.3", []),
        (["0000:0000:0000:0000:0000:ffff:0a00:0003", "fe80::42"], "node-7", [0]),
        (["::", "ff02::1", "not an address"], "10.0.0.3", []),
    ],
)
def test_a_card_s_entries(entries: list[str], way: str, chosen: list[int]) -> None:
    table = [LocalAddress("eth0", gid, number) for number, gid in enumerate(entries)]
    found = usable_addresses(table, machines=2, ways=[way], own=OWN)
    assert [each.entry for each in found] == chosen


def test_a_card_as_the_system_shows_it(tmp_path: Path) -> None:
    def card(name: str, link_layer: str, entries: dict[int, tuple[str, str, str]]) -> None:
        port = tmp_path / name / "ports" / "1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True)
        (port / "link_layer").write_text(f"{link_layer}\n")
        for number, (gid, kind, interface) in entries.items():
            (port / "gids" / str(number)).write_text(f"{gid}\n")
            (port / "gid_attrs/types" / str(number)).write_text(f"{kind}\n")
            (port / "gid_attrs/ndevs" / str(number)).write_text(f"{interface}\n")

    mapped = "0000:0000:0000:0000:0000:ffff:0a00:0003"
    card("mlx5_1", "InfiniBand", {0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "")})
    card(
        "mlx5_0",
        "Ethernet",
        {10: (mapped, "RoCE v2", "eth0"), 2: (mapped, "IB/RoCE v1", "eth0"), 3: ("fd00::3", "RoCE v2", "eth0")},
    )
    assert read_devices(tmp_path) == ("mlx5_0", "mlx5_1")
    assert read_gids("mlx5_0", tmp_path) == (
        LocalAddress("eth0", "fd00::3", 3),
        LocalAddress("eth0", mapped, 10),
    )
    assert read_gids("mlx5_1", tmp_path) == read_gids("none", tmp_path) == ()
    assert read_devices(tmp_path / "none") == ()
    (best, _) = usable_addresses(read_gids("mlx5_0", tmp_path), machines=2, ways=["10.0.0.3"], own=OWN)
    assert best == LocalAddress("eth0", "10.0.0.3", 10)


def test_this_machine_s_own_addresses_can_be_listened_at() -> None:
    table = read_addresses()
    assert any(each.address == "127.0.0.1" for each in table)
    for each in usable_addresses(table, machines=2, ways=ways_out()):
        family = socket.AF_INET6 if ":" in each.address else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((each.address, 0))
    assert set(ways_out()) <= {each.address for each in table}


def test_the_page_s_own_examples() -> None:
    assert doctest.testmod(addresses).failed == 0
