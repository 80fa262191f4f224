"""Which transport a job uses, and making a worker's end of it.

Users name one, or leave it to ``"auto"``. That is shared memory where all workers share a machine; between machines
nothing is chosen silently, since a slow path that works is noticed too late. A worker may add which of its cards
RDMA uses, in the spelling of `transfer_exec.transport.devices`; that concerns nobody else.

>>> check_transport("mooncake")
'mooncake'
>>> check_transport("mooncake-rdma:^mlx5_0"), devices_of("mooncake-rdma:^mlx5_0")
('mooncake-rdma', '^mlx5_0')
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from adapters.failures import RendezvousError, UsageError
from adapters.messages import Member
from adapters.rendezvous import SENDER, Record, Rendezvous, address_towards
from transfer_exec.host_reading import read_addresses, ways_out
from transfer_exec.transport.addresses import choose_address
from transfer_exec.transport.base import Transport
from transfer_exec.transport.mooncake import NAMES, MooncakeTransport
from transfer_exec.transport.shared_memory import SharedMemoryTransport

__all__ = ["check_transport", "choose_transport", "data_address", "devices_of", "make_transport", "reads_memory"]

_SHARED_MEMORY = "shared_memory"
_RDMA = "mooncake-rdma"
_KNOWN = (_SHARED_MEMORY, *NAMES)


def check_transport(transport: str) -> str:
    """The name of a transport that may be asked for, without the cards behind it.

    Raises
    ------
    UsageError
        If there is none of that name, or it has no cards to choose from.
    """
    name, colon, _ = transport.partition(":")
    if name not in ("auto", *_KNOWN):
        raise UsageError(
            f"transport {transport!r} is not available; pass 'auto', 'shared_memory' (one machine), 'mooncake' (TCP) "
            "or 'mooncake-rdma'"
        )
    if colon and name != _RDMA:
        raise UsageError(f"transport {transport!r}: {name} uses no RDMA cards; only {_RDMA!r} takes some after a colon")
    return name


def devices_of(transport: str) -> str:
    """Which cards a worker's spelling of a transport means; empty for all."""
    return transport.partition(":")[2]


def choose_transport(members: Sequence[Member], wanted: str) -> str:
    """The transport of a job.

    Parameters
    ----------
    members
        All workers, each with the transport that it asks for.
    wanted
        What the trainers ask for.

    Raises
    ------
    UsageError
        If workers ask for different ones, shared memory would have to cross machines, or nobody names a transport
        and the workers are on several machines.
    """
    chosen = wanted
    for member in members:
        if member.transport == "auto":
            continue
        if chosen not in ("auto", member.transport):
            raise UsageError(f"{member.worker} asks for transport {member.transport}, the trainers for {wanted}")
        chosen = member.transport
    elsewhere = next((member for member in members if member.host != members[0].host), None)
    if elsewhere is None:
        return _SHARED_MEMORY if chosen == "auto" else chosen
    if chosen in ("auto", _SHARED_MEMORY):
        inside = "shared_memory stays inside one machine" if chosen == _SHARED_MEMORY else "none is chosen silently"
        raise UsageError(
            f"{members[0].worker} runs on {members[0].host}, {elsewhere.worker} on {elsewhere.host}, and {inside}; "
            "pass transport='mooncake' (TCP) or 'mooncake-rdma' to the adapters of the trainers"
        )
    return chosen


def reads_memory(transport: str) -> bool:
    """Whether a job's workers can read each other's memory, so that bytes can go straight from one to another."""
    return transport == _SHARED_MEMORY


def make_transport(
    name: str, worker: str, *, address: Callable[[], str], deadline_s: float, devices: str = ""
) -> Transport:
    """Make one end of a transport.

    Parameters
    ----------
    name, worker
        Of the transport, and of the worker in plans.
    address
        Says at which address peers reach this machine; called only if they need one.
    deadline_s
        Of connecting to one peer.
    devices
        Which RDMA cards, where it uses some.

    Raises
    ------
    UsageError
        If there is no transport of that name.
    TransportError
        If it does not run here.
    """
    if name == _SHARED_MEMORY:
        return SharedMemoryTransport(worker)
    if name in NAMES:
        return MooncakeTransport(worker, address(), protocol=NAMES[name], devices=devices, deadline_s=deadline_s)
    raise UsageError(f"{worker}: transport {name!r} is not available; expected one of {', '.join(_KNOWN)}")


def data_address(rendezvous: Rendezvous, name: str, machines: int, *, deadline_s: float) -> str:
    """The address at which peers reach this machine.

    That is the one that this worker was given to listen at, unless it is a loopback address, as by default; else the
    one from which the system goes to trainer rank 0, or anywhere (`transfer_exec.transport.addresses`).

    Parameters
    ----------
    rendezvous, name
        Where the worker meets the others, and its own name there.
    machines
        How many the job's workers are on.
    deadline_s
        Of finding trainer rank 0.

    Raises
    ------
    TransportError
        If no address of this machine can be reached from others.
    """
    given = ""
    with contextlib.suppress(RendezvousError):  # addresses may be known of others only
        given = _host_of(rendezvous.listen_address(name))
    table = read_addresses()
    wanted = "" if Record(f"tcp://{given}:0").is_loopback else given
    ways = [] if wanted else [*_way_to_trainers(rendezvous, deadline_s), *ways_out()]
    return choose_address(table, machines=machines, ways=ways, wanted=wanted).address


def _way_to_trainers(rendezvous: Rendezvous, deadline_s: float) -> list[str]:
    address = Record.decode(rendezvous.lookup(SENDER, deadline_s)).address
    with contextlib.suppress(RendezvousError):  # its name means nothing here
        return [address_towards(_host_of(address), int(address.rpartition(":")[2]))]
    return []


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
