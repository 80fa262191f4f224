"""At which of its addresses a machine's peers reach it.

The system lists what there is (`transfer_exec.host_reading`) and says which way it would go to the trainers; here it is
only judged. An address is advertised if it is this machine's own and means the same to every peer: loopback does not
when there are several machines, a link-local one needs an interface's name, and a card lists those of containers too.

>>> table = [LocalAddress("lo", "127.0.0.1"), LocalAddress("eth0", "fe80::1"), LocalAddress("eth0", "10.0.0.3")]
>>> choose_address(table, machines=2, ways=["127.0.0.1"])
LocalAddress(interface='eth0', address='10.0.0.3', entry=0)
>>> choose_address(table, machines=1, ways=["127.0.0.1"]).address
'127.0.0.1'
>>> choose_address(table, machines=2, wanted="203.0.113.7")          # whoever says so knows of a way there
LocalAddress(interface='', address='203.0.113.7', entry=0)

The entries of an RDMA card (GIDs) are judged by the same rules; an IPv4 address stands there as ``::ffff:10.0.0.3``:

>>> gids = [LocalAddress("eth0", "fe80::1", 0), LocalAddress("docker0", "::ffff:172.17.0.1", 2),
...         LocalAddress("eth0", "::ffff:10.0.0.3", 3)]
>>> usable_addresses(gids, machines=2, own={"10.0.0.3", "fe80::1"})
(LocalAddress(interface='eth0', address='10.0.0.3', entry=3),)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from transfer_exec.errors import TransportError


class LocalAddress(NamedTuple):
    """One address of this machine.

    Attributes
    ----------
    interface
        Whose; empty for one that no interface has.
    address
        In numbers, without brackets or scope.
    entry
        Its place in the card's table, if it is of one.
    """

    interface: str
    address: str
    entry: int = 0


def choose_address(
    table: Iterable[LocalAddress], *, machines: int, ways: Sequence[str] = (), wanted: str = ""
) -> LocalAddress:
    """The address to advertise.

    Parameters
    ----------
    table
        All addresses of interfaces that are up.
    machines
        How many the job's workers are on.
    ways
        The own addresses from which the system would go to the others, the surest first.
    wanted
        An address or a name that the user gave: it is taken as it is, and need not be an interface's (a router may
        lead from there to here).

    Raises
    ------
    TransportError
        If what is wanted leads nowhere from another machine, or nothing is left.
    """
    listed = tuple(table)
    if wanted:
        return _as_wanted(listed, wanted, machines)
    left = usable_addresses(listed, machines=machines, ways=ways)
    if not left:
        there = ", ".join(f"{each.address} ({each.interface})" for each in listed) or "none"
        raise TransportError(
            f"none of this machine's addresses can be reached from the job's {machines} machines: {there}; pass host=, "
            "the address at which the others reach this one, to the rendezvous"
        )
    return left[0]


def usable_addresses(
    table: Iterable[LocalAddress], *, machines: int, ways: Sequence[str] = (), own: Collection[str] | None = None
) -> tuple[LocalAddress, ...]:
    """Those that peers can use, the best first: by ``ways``, then IPv4, then IPv6, each in the order listed.

    ``own`` are this machine's addresses, where the table has those of others.
    """
    good: list[tuple[tuple[bool, int, int], int, LocalAddress]] = []
    for each in table:
        place = _number(each.address)
        if place is None or place.is_unspecified or place.is_multicast or place.is_link_local:
            continue
        if (place.is_loopback and machines > 1) or (own is not None and str(place) not in own):
            continue
        order = [way for way, address in enumerate(ways) if _number(address) == place]
        rank = (place.is_loopback and not order, order[0] if order else len(ways), place.version)
        good.append((rank, len(good), each._replace(address=str(place))))
    return tuple(each for _, _, each in sorted(good))


def _as_wanted(table: Sequence[LocalAddress], wanted: str, machines: int) -> LocalAddress:
    place = _number(wanted)
    nowhere = wanted == "localhost" if place is None else place.is_loopback or place.is_unspecified
    if nowhere and machines > 1:
        raise TransportError(
            f"host {wanted!r} leads from every machine to itself, and the job's workers are on {machines}; pass the "
            "address at which the others reach this one"
        )
    for each in table:
        if place is not None and _number(each.address) == place:
            return each._replace(address=str(place))
    return LocalAddress("", wanted.strip("[]"))


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address as a number, an IPv4 one as such however it is spelled; None for a name."""
    try:
        place = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return place.ipv4_mapped or place if isinstance(place, ipaddress.IPv6Address) else place
