"""Which transport a job uses, and making a worker's end of it.

Users name one, or leave it to ``"auto"``. That is shared memory where all workers share a machine; between machines
nothing is chosen silently, since a slow path that works is noticed too late. A worker may add which of its cards
RDMA uses, in the spelling of `transfer_exec.transport.devices`; that concerns nobody else. Between the GPUs of one
machine there is ``"device_memory"``.

>>> check_transport("mooncake")
'mooncake'
>>> check_transport("mooncake-rdma:^mlx5_0"), cards_of("mooncake-rdma:^mlx5_0")
('mooncake-rdma', '^mlx5_0')
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from adapters.failures import RendezvousError, UsageError
from adapters.messages import Member
from adapters.placing import DEVICE_MEMORY
from adapters.rendezvous import SENDER, Record, Rendezvous, address_towards
from transfer_exec.device import Device
from transfer_exec.host_reading import read_addresses, ways_out
from transfer_exec.transport.addresses import choose_address
from transfer_exec.transport.base import Transport
from transfer_exec.transport.device_memory import DeviceMemoryTransport
from transfer_exec.transport.mooncake import NAMES, MooncakeTransport
from transfer_exec.transport.shared_memory import SharedMemoryTransport

__all__ = ["cards_of", "check_transport", "choose_transport", "data_address", "make_transport", "reads_memory"]

_SHARED_MEMORY = "shared_memory"
_RDMA = "mooncake-rdma"
_KNOWN = (_SHARED_MEMORY, DEVICE_MEMORY, *NAMES)
_INSIDE = (_SHARED_MEMORY, DEVICE_MEMORY)


def check_transport(transport: str) -> str:
    """The name of a transport that may be asked for, without the cards behind it.

    Raises
    ------
    UsageError
        If there is none of that name, or it has no cards to choose from.
    """
    name, colon, _ = transport.partition(":") if isinstance(transport, str) else (transport, "", "")
    if name not in ("auto", *_KNOWN):
        raise UsageError(
            f"transport {transport!r} is not available; pass 'auto', 'shared_memory' (one machine), "
            "'device_memory' (GPUs of one machine), 'mooncake' (TCP) or 'mooncake-rdma'"
        )
    if colon and name != _RDMA:
        raise UsageError(f"transport {transport!r}: {name} uses no RDMA cards; only {_RDMA!r} takes some after a colon")
    return name


def cards_of(transport: str) -> str:
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
        If workers ask for different ones, a transport of one machine would have to cross to another, or nobody names
        one and the workers are on several machines.
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
    if chosen in ("auto", *_INSIDE):
        inside = f"{chosen} stays inside one machine" if chosen in _INSIDE else "none is chosen silently"
        raise UsageError(
            f"{members[0].worker} runs on {members[0].host}, {elsewhere.worker} on {elsewhere.host}, and {inside}; "
            "pass transport='mooncake' (TCP) or 'mooncake-rdma' to the adapters of the trainers"
        )
    return chosen


def reads_memory(transport: str) -> bool:
    """Whether a job's workers can read each other's memory, so that bytes can go straight from one to another."""
    return transport == _SHARED_MEMORY


def make_transport(
    name: str,
    worker: str,
    *,
    address: Callable[[], str],
    deadline_s: float,
    cards: str = "",
    devices: Sequence[Device] = (),
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
    cards
        Which RDMA cards, where it uses some.
    devices
        Of the worker's tensors.

    Raises
    ------
    UsageError
        If there is no transport of that name.
    TransportError
        If it does not run here.
    """
    pinning = devices[0] if devices else None
    if name == _SHARED_MEMORY:
        return SharedMemoryTransport(worker, device=pinning)
    if name == DEVICE_MEMORY:
        return DeviceMemoryTransport(worker, devices)
    if name in NAMES:
        return MooncakeTransport(
            worker, address(), protocol=NAMES[name], devices=cards, deadline_s=deadline_s, device=pinning
        )
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
