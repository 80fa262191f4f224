"""Which transport a job uses, and making a worker's end of it.

Users name one, or leave it to ``"auto"``. That is shared memory where all workers share a machine; between machines
nothing is chosen silently, since a slow path that works is noticed too late.

>>> check_transport("mooncake")
'mooncake'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adapters.failures import UsageError
from adapters.messages import Member
from adapters.rendezvous import SENDER, Record, Rendezvous, address_towards
from transfer_exec.transport.base import Transport
from transfer_exec.transport.mooncake import NAMES, MooncakeTransport
from transfer_exec.transport.shared_memory import SharedMemoryTransport

__all__ = ["check_transport", "choose_transport", "data_address", "make_transport"]

_SHARED_MEMORY = "shared_memory"
_KNOWN = (_SHARED_MEMORY, *NAMES)


def check_transport(transport: str) -> str:
    """The name of a transport that may be asked for.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    if transport not in ("auto", *_KNOWN):
        raise UsageError(
            f"transport {transport!r} is not available; pass 'auto', 'shared_memory' (one machine), 'mooncake' (TCP) "
            "or 'mooncake-rdma'"
        )
    return transport


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


def make_transport(name: str, worker: str, *, address: Callable[[], str], deadline_s: float) -> Transport:
    """Make one end of a transport.

    Parameters
    ----------
    name, worker
        Of the transport, and of the worker in plans.
    address
        Says at which address peers reach this machine; called only if they need one.
    deadline_s
        Of connecting to one peer.

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
        return MooncakeTransport(worker, address(), protocol=NAMES[name], deadline_s=deadline_s)
    raise UsageError(f"{worker}: transport {name!r} is not available; expected one of {', '.join(_KNOWN)}")


def data_address(rendezvous: Rendezvous, deadline_s: float) -> str:
    """The address at which this machine is reached from the network that trainer rank 0 is on.

    Raises
    ------
    RendezvousError
        If no interface leads there.
    """
    address = Record.decode(rendezvous.lookup(SENDER, deadline_s)).address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return address_towards(host, int(port))
