"""Between the processes of one host: memory files that peers map and write with plain copies.

Every region is a ``memfd``, memory with a file descriptor and no name: nothing is left behind when a process dies. A
peer opens ``/proc/<pid>/fd/<fd>`` (same user, same PID namespace), checks the inode and the incarnation, and maps it.
A write is a ``memcpy`` by the writer, complete when the call returns. Flags are pairs of 64-bit words; the tag is
stored first and the sequence number last, with release order, and read with acquire order, so whoever sees the number
sees the bytes on any processor. Numbers only grow, so nothing is ever reset.

Files are sealed against shrinking, so a peer cannot make a mapping fault. All pages are faulted in when allocated
and when mapped: first touch is ten times slower than a copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from transfer_exec.errors import TransportError
from transfer_exec.kernels.cpu import copy_ranges, publish_word, read_word
from transfer_exec.transport.base import (
    Descriptors,
    Endpoint,
    Flag,
    Memory,
    RegionHandle,
    RegionInfo,
    RegionTable,
    Ticket,
    check_descriptors,
    check_peer,
    check_process,
    new_incarnation,
)

_HEADER_BYTES = 64
_FLAG_BYTES = 16
_DONE = Ticket(0)


class SharedMemoryTransport:
    """One worker's end of the shared memory transport.

    Parameters
    ----------
    worker
        Its name in the plan.

    Raises
    ------
    TransportError
        Where the system has no ``memfd_create`` (it is Linux only).
    """

    def __init__(self, worker: str) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransportError(f"{worker}: shared_memory needs Linux (memfd_create); use another transport")
        self._worker = worker
        self._incarnation = new_incarnation()
        self._regions = RegionTable()
        self._files: dict[int, tuple[int, Memory]] = {}
        self._flags: Memory | None = None
        self._flags_address = 0
        self._channels = 0
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the implementation."""
        return "shared_memory"

    @property
    def worker(self) -> str:
        """The worker this end belongs to."""
        return self._worker

    def allocate(self, size_bytes: int) -> Memory:
        """Zeroed shared memory, faulted in; see `Transport.allocate`."""
        self._check()
        if size_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        fd = os.memfd_create(f"transload {self._worker}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = _map(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise TransportError(f"{self._worker}: cannot get {size_bytes} bytes of shared memory: {error}") from error
        self._files[memory.ctypes.data] = fd, memory
        return memory

    def register(self, name: str, memory: Memory) -> RegionHandle:
        """Let peers write to a region that `allocate` returned; see `Transport.register`."""
        self._check()
        if self._place(memory) is None:
            raise TransportError(
                f"{self._worker}: region {name} is no memory that this transport allocated; peers could not map it"
            )
        return self._regions.add(self._worker, name, memory)

    def open_flags(self, channels: int) -> None:
        """Make the flags; see `Transport.open_flags`."""
        if self._flags is not None:
            raise TransportError(f"{self._worker}: flags are open already")
        self._flags = self.allocate(_HEADER_BYTES + _FLAG_BYTES * channels)
        self._flags[:8].view(np.uint64)[0] = self._incarnation
        self._flags_address = self._flags.ctypes.data + _HEADER_BYTES
        self._channels = channels

    def endpoint(self, program: str) -> Endpoint:
        """What peers need; see `Transport.endpoint`."""
        self._check()
        regions = tuple(
            RegionInfo(name, memory.nbytes, self._address(memory)) for name, memory in self._regions.items()
        )
        return Endpoint(
            self._worker,
            self.name,
            self._incarnation,
            program,
            self._channels,
            self._address(self._own_flags()),
            regions,
        )

    def connect(self, peer: Endpoint) -> None:
        """Map a peer's flags and regions; see `Transport.connect`."""
        self._check()
        check_peer(self._worker, self.name, peer)
        files: dict[str, Memory] = {}
        flags = _open(peer.worker, peer.flags_address, _HEADER_BYTES + _FLAG_BYTES * peer.channels, files)
        incarnation = int(flags[:8].view(np.uint64)[0])
        if incarnation != peer.incarnation:
            raise TransportError(
                f"{peer.worker}: endpoint is of incarnation {peer.incarnation}, its memory of {incarnation}; "
                "exchange endpoints again"
            )
        regions = {region.name: _open(peer.worker, region.address, region.size_bytes, files) for region in peer.regions}
        self._peers[peer.worker] = _Peer(peer, flags, regions)

    def write(self, source: RegionHandle, peer: str, region: str, descriptors: Descriptors) -> Ticket:
        """Copy into a peer's region; complete when this returns. See `Transport.write`."""
        self._check()
        known = self._peer(peer)
        name, memory = self._regions.of(self._worker, source)
        known.endpoint.region(region)
        target = known.regions[region]
        check_descriptors(
            descriptors,
            source_bytes=memory.nbytes,
            target_bytes=target.nbytes,
            source=f"{self._worker} {name}",
            target=f"{peer} {region}",
        )
        copy_ranges(np.ascontiguousarray(descriptors), memory.ctypes.data, target.ctypes.data)
        return _DONE

    def finished(self, ticket: Ticket) -> bool:
        """Always: a write is complete when `write` returns."""
        return True

    def signal(self, peer: str, channel: int, sequence: int, tag: int) -> None:
        """Raise a peer's flag; see `Transport.signal`."""
        self._check()
        known = self._peer(peer)
        if not 0 <= channel < known.endpoint.channels:
            raise TransportError(f"{peer}: has no flag {channel}; it has {known.endpoint.channels}")
        address = known.flags_address + _FLAG_BYTES * channel
        publish_word(address + 8, tag)
        publish_word(address, sequence)

    def flag(self, channel: int) -> Flag:
        """Read an own flag; see `Transport.flag`."""
        self._check()
        if not 0 <= channel < self._channels:
            raise TransportError(f"{self._worker}: has no flag {channel}; it has {self._channels}")
        address = self._flags_address + _FLAG_BYTES * channel
        sequence = read_word(address)
        return Flag(sequence, read_word(address + 8))

    def close(self) -> None:
        """Close the files. Mappings live as long as this object, since another thread may be reading a flag."""
        if self._closed:
            return
        self._closed = True
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def _own_flags(self) -> Memory:
        if self._flags is None:
            raise TransportError(f"{self._worker}: flags are not open")
        return self._flags

    def _address(self, memory: Memory) -> str:
        place = self._place(memory)
        assert place is not None, "what is registered was allocated here"
        fd, offset = place
        return f"{self._regions.pid}/{fd}/{os.fstat(fd).st_ino}/{offset}"

    def _place(self, memory: Memory) -> tuple[int, int] | None:
        """The file that memory lies in, and from which byte on."""
        for begin, (fd, whole) in self._files.items():
            offset = memory.ctypes.data - begin
            if 0 <= offset <= whole.nbytes - memory.nbytes:
                return fd, offset
        return None

    def _check(self) -> None:
        check_process(self._regions.pid, self._worker)
        if self._closed:
            raise TransportError(f"{self._worker}: transport is closed")

    def _peer(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            names = ", ".join(self._peers) or "nobody"
            raise TransportError(f"{self._worker}: is not connected to {peer}; it is to {names}")
        return known


class _Peer:
    """A connected peer's mapped memory."""

    __slots__ = ("endpoint", "flags", "flags_address", "regions")

    def __init__(self, endpoint: Endpoint, flags: Memory, regions: dict[str, Memory]) -> None:
        self.endpoint = endpoint
        self.flags = flags
        self.flags_address = flags.ctypes.data + _HEADER_BYTES
        self.regions = regions


def _map(fd: int, size_bytes: int) -> Memory:
    mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(mapped, dtype=np.uint8)


def _open(worker: str, address: str, size_bytes: int, files: dict[str, Memory]) -> Memory:
    """A stretch of a peer's file, which is mapped once, after checking that it is the one the address means."""
    file, _, start = address.rpartition("/")
    try:
        pid, fd, inode = (int(part) for part in file.split("/"))
        offset = int(start)
    except ValueError as error:
        raise TransportError(f"{worker}: {address!r} is no shared memory address") from error
    if file not in files:
        files[file] = _map_peer(worker, pid, fd, inode)
    whole = files[file]
    if not 0 <= offset <= whole.nbytes - size_bytes:
        raise TransportError(
            f"{worker}: file {fd} of process {pid} has {whole.nbytes} bytes; the endpoint names {size_bytes} from byte "
            f"{offset} on; exchange endpoints again"
        )
    return whole[offset : offset + size_bytes]


def _map_peer(worker: str, pid: int, fd: int, inode: int) -> Memory:
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise TransportError(f"{worker}: process {pid} is gone, or its memory was closed") from error
    except PermissionError as error:
        raise TransportError(
            f"{worker}: may not open memory of process {pid}; both must run as one user, in one container, dumpable"
        ) from error
    try:
        found = os.fstat(opened)
        if found.st_ino != inode:
            raise TransportError(
                f"{worker}: file {fd} of process {pid} has inode {found.st_ino}; the endpoint says {inode}; exchange "
                "endpoints again"
            )
        return _map(opened, found.st_size)
    except OSError as error:
        raise TransportError(f"{worker}: cannot map memory of process {pid}: {error}") from error
    finally:
        os.close(opened)
