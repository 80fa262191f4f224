"""Between the devices of one host: memory of a device that peers map, and copies that their own devices make.

A region is memory that a `transfer_exec.device.Device` gave; its address in an endpoint is the text by which another
process maps it. A write is work of the device that has the source, and has ended when that device says so: the bytes
are in the peer's memory then, so a flag that is raised afterwards does not overtake them. Flags, incarnations and the
news that a peer has closed or died are those of shared memory, over which both sides meet::

    source device   | wait for what the caller gave it | copy | event
    writing host                                              | the event has happened: raise the peer's flag
    reading host                                              | the flag: let the reading device begin

Peers that have mapped a worker's memory hold its lease (`transfer_exec.transport.lease`): when it closes, the memory is
freed when the last of them has ended its copies and let go, or has died.

A worker may use several devices. Each region is shared by the device that it is on, whichever was used last, and the
same device maps what it is copied to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.device import Device, Event
from transfer_exec.errors import TransportError
from transfer_exec.transport.base import Endpoint, Flag, Memory
from transfer_exec.transport.checked import CheckedTransport, Limits
from transfer_exec.transport.lease import Lease, hold
from transfer_exec.transport.queues import Bases
from transfer_exec.transport.shared_memory import SharedMemoryTransport


class DeviceMemoryTransport(CheckedTransport[Event]):
    """One worker's end of the transport ``"device_memory"``.

    Parameters
    ----------
    worker
        Its name in the plan.
    devices
        The devices of this worker; `allocate` gives memory of the first one.

    Raises
    ------
    TransportError
        If there is no device, or where shared memory does not run.
    """

    def __init__(self, worker: str, devices: Sequence[Device]) -> None:
        if not devices:
            raise TransportError(f"{worker}: device_memory needs a device, and no tensor is on one; use shared_memory")
        super().__init__(worker, "device_memory", Limits(), devices[0])
        self._devices = tuple(devices)
        self._meeting = SharedMemoryTransport(worker)
        self.incarnation = self._meeting.incarnation
        self._lease = Lease(worker)
        self._allocated: list[Memory] = []
        self._opened: dict[str, _Opened] = {}

    def _allocate(self, size_bytes: int) -> Memory:
        memory = self._devices[0].allocate(size_bytes)
        self._allocated.append(memory)
        return memory

    def _expose(self, memory: Memory) -> str:
        for device in self._devices:
            if device.owns(memory):
                return device.share(memory)
        names = ", ".join(device.name for device in self._devices)
        raise TransportError(f"it was not allocated on {names}; peers map only what their transports allocated")

    def _withdraw(self, memory: Memory) -> None:
        """Nothing to undo: what was allocated is freed at the end."""

    def _make_flags(self, channels: int) -> str:
        self._meeting.open_flags(channels)
        return f"{self._meeting.endpoint('').flags_address} {self._lease.address}"

    def _reach(self, peer: Endpoint) -> Bases:
        self._meeting.connect(_meeting_place(peer))
        self._let_go(peer.worker)
        held = hold(peer.worker, peer.flags_address.partition(" ")[2])
        opened = self._opened[peer.worker] = _Opened(held, {device.name: {} for device in self._devices})
        try:
            for device in self._devices:
                for region in peer.regions:
                    for shared in region.addresses:
                        opened.bases[device.name].setdefault(region.name, []).append(device.open(shared))
        except TransportError as error:
            self._let_go(peer.worker)
            raise TransportError(f"{peer.worker}: {error}; exchange endpoints again") from error
        return {name: tuple(bases) for name, bases in opened.bases[self._devices[0].name].items()}

    def _why_gone(self, peer: Endpoint) -> str:
        return self._meeting.why_gone(_meeting_place(peer))

    def _post(self, peer: Endpoint, region: str, rows: IdArray) -> Event | None:
        if not len(rows):
            return None
        memory, _ = self._regions.holding(self.worker, int(rows[0, 0]), int(rows[0, 2]))
        device = next(device for device in self._devices if device.owns(memory))
        opened = self._opened[peer.worker]
        there, first = (opened.bases[one.name][region][0] for one in (device, self._devices[0]))
        copied = device.copy(rows + np.array([0, there - first, 0]))
        opened.under_way = [*(each for each in opened.under_way if not _has_ended(each)), copied]
        return copied

    def _ended(self, posted: Event) -> bool:
        return posted.done()

    def _raise(self, peer: Endpoint, channel: int, flag: Flag) -> None:
        self._meeting.signal(peer.worker, channel, flag.sequence, flag.tag)

    def _read(self, channel: int) -> Flag:
        return self._meeting.flag(channel)

    def _close(self) -> None:
        """Say that it is closed, end what is under way, let go of peers' memory, and of its own when they have."""
        self._meeting.close()
        if os.getpid() != self._regions.pid:
            return
        for peer in list(self._opened):
            self._let_go(peer)
        self._lease.when_free(self._free)

    def _free(self) -> None:
        for memory in self._allocated:
            self._devices[0].free(memory)
        self._allocated.clear()

    def _let_go(self, peer: str) -> None:
        """Unmap what a peer shares, when the last copy to it has ended."""
        opened = self._opened.pop(peer, None)
        if opened is None:
            return
        for copied in opened.under_way:
            with suppress(TransportError):  # whoever holds its ticket is told
                copied.wait()
        for device in self._devices:
            for bases in opened.bases[device.name].values():
                for address in bases:
                    device.let_go(address)
        os.close(opened.lease)


@dataclass(slots=True, eq=False)
class _Opened:
    """A connected peer: its lease, by device and region where its pieces are, and copies that may not have ended."""

    lease: int
    bases: dict[str, dict[str, list[int]]]
    under_way: list[Event] = field(default_factory=list)


def _has_ended(copied: Event) -> bool:
    try:
        return copied.done()
    except TransportError:
        return True


def _meeting_place(peer: Endpoint) -> Endpoint:
    """A peer's flags as shared memory knows them."""
    flags = peer.flags_address.partition(" ")[0]
    return Endpoint(peer.worker, "shared_memory", peer.incarnation, "", peer.channels, flags, ())
