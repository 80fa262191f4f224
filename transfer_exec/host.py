"""One machine as a topology: which of its interfaces count, and who uses which.

``host_reading`` finds out what there is; here it is only judged.

>>> from dataclasses import replace
>>> card = Interface("eth0", up=True, physical=True, bond=False, in_bond=False, loopback=False, bytes_per_s=50e9)
>>> cards = [replace(card, name=f"eth{n}") for n in range(2)] + [replace(card, name="mgmt", bytes_per_s=0.125e9)]
>>> host = Host("a", tuple(cards), cores=64, copy_bytes_per_s=9e9)
>>> (node,) = topology_of_host(host, ["trainer/0", "trainer/1", "trainer/2", "engine/0/0"]).nodes
>>> [(nic.workers, nic.egress_bytes_per_s) for nic in node.nics]
[(('trainer/0', 'trainer/1'), 50000000000.0), (('trainer/2', 'engine/0/0'), 50000000000.0)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transfer_exec.errors import TopologyError
from transfer_exec.topology import Engine, Nic, Node, Topology

ASSUMED_NIC_BYTES_PER_S = 12.5e9
"""Where no interface tells its speed: 100 Gb/s."""
_ALIKE = 0.5
"""An interface at least this fast, beside the fastest, is one for weights; slower ones are for management."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes
    ----------
    name
        As the system calls it.
    up
        Whether it has a carrier.
    physical
        Whether a device is behind it.
    bond, in_bond
        Whether it is a bond of others, or one of a bond's.
    loopback
        Whether it leaves the machine never.
    bytes_per_s
        Each way; None if it does not tell.
    """

    name: str
    up: bool
    physical: bool
    bond: bool
    in_bond: bool
    loopback: bool
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Host:
    """What a machine has.

    Attributes
    ----------
    name
        Of the machine.
    interfaces
        By name.
    cores
        That this process may use.
    copy_bytes_per_s
        What one core copies in memory.
    """

    name: str
    interfaces: tuple[Interface, ...]
    cores: int
    copy_bytes_per_s: float


def network_interfaces(interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    """The interfaces that weights would use, in their order.

    Those that are up and physical, or bonds of such; where there are none, as in a container, all that are up. A bond
    counts in place of its members. Of those that tell their speed the fast ones; others only where none tells.
    """
    there = [each for each in interfaces if each.up and not each.loopback and not each.in_bond]
    real = [each for each in there if each.physical or each.bond] or there
    fastest = max((each.bytes_per_s or 0.0 for each in real), default=0.0)
    return tuple(each for each in real if (each.bytes_per_s or 0.0) >= _ALIKE * fastest)


def topology_of_host(
    host: Host,
    workers: Iterable[str],
    *,
    nic_bytes_per_s: float | None = None,
    local_bytes_per_s: float | None = None,
) -> Topology:
    """One node with these workers.

    Consecutive workers share an interface where there are fewer of them, and some interfaces stay unused where there
    are more. ``engine/<name>/<rank>`` are the ranks of engine ``engine/<name>``; all others are trainers.

    Parameters
    ----------
    nic_bytes_per_s, local_bytes_per_s
        Declared; else what the interfaces tell, and what a core copies, less where workers share cores.

    Raises
    ------
    TopologyError
        If there are no workers, one is named twice, or a bandwidth is not above zero.
    """
    if isinstance(workers, str):
        raise TopologyError(f"workers is {workers!r}; expected a list of names")
    names = tuple(workers)
    if not names:
        raise TopologyError("no workers; name those of this host")
    cards = network_interfaces(host.interfaces) or (Interface("none", True, False, False, False, False, None),)
    groups: list[list[str]] = [[] for _ in cards]
    for position, worker in enumerate(names):
        groups[position * min(len(cards), len(names)) // len(names)].append(worker)
    nics = []
    for card, group in zip(cards, groups, strict=True):
        told = card.bytes_per_s or ASSUMED_NIC_BYTES_PER_S
        speed = told if nic_bytes_per_s is None else nic_bytes_per_s
        if group:
            nics.append(Nic(tuple(group), speed, speed))
    local = host.copy_bytes_per_s * min(1.0, host.cores / len(names))
    engines: dict[str, list[str]] = {}
    for worker in names:
        if worker.startswith("engine/"):
            engines.setdefault(worker.rpartition("/")[0], []).append(worker)
    node = Node(host.name, tuple(nics), local if local_bytes_per_s is None else local_bytes_per_s)
    return Topology([node], [Engine(name, tuple(group)) for name, group in engines.items()])
