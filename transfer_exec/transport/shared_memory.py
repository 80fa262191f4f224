"""Between the processes of one host: memory files that peers map and write with plain copies.

Memory that is allocated here is a ``memfd``, memory with a file descriptor and no name: nothing is left behind when a
process dies. A peer opens ``/proc/<pid>/fd/<fd>`` (same user, same PID namespace), checks the inode and the
incarnation, and maps it. A write is a ``memcpy`` by the writer, complete when the call returns. Flags are pairs of
64-bit words; the tag is stored first and the sequence number last, with release order, and read with acquire order, so
whoever sees the number sees the bytes on any processor. Numbers only grow, so nothing is ever reset.

Memory that is not ours, such as a parameter, is written with ``process_vm_writev`` and read with ``process_vm_readv``
where the kernel allows it (`transfer_exec.transport.process_memory`); where it does not, registering or connecting is
refused by name. What is lent as a place in a file (`transfer_exec.transport.shared_files`) is mapped when the peer is
connected, read-only, and copied from there, which takes no system call. Both run on threads of their own, beside
whoever polls.

Files are sealed against shrinking, so a peer cannot make a mapping fault. All pages are faulted in when allocated
and when mapped: first touch is ten times slower than a copy. A peer that closed, was restarted or died is noticed
before the next write to it: it clears its incarnation when it closes, and a process descriptor tells when it ends.
"""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from layout_algebra.signal_safe import Job, ThreadPool
from transfer_exec.device import Device
from transfer_exec.errors import TransportError, UnmappableError, UnreadableError
from transfer_exec.kernels.cpu import copy_ranges, publish_word, read_word
from transfer_exec.transport.base import Endpoint, Flag, Memory
from transfer_exec.transport.checked import CheckedTransport, Limits
from transfer_exec.transport.process_memory import why_not, why_not_process, write_process
from transfer_exec.transport.queues import Bases
from transfer_exec.transport.reading import Batch, Sums
from transfer_exec.transport.shared_files import make_shared, map_file, map_places
from transfer_exec.transport.stretches import MAPPED, Stretches

_HEADER_BYTES = 64
_FLAG_BYTES = 16
_FOREIGN = "process"
_STREAMED_BYTES = 8 << 20
"""A write of this size is not found in the cache by whoever assembles it."""
_READERS = 4
"""Most threads that read; one keeps a quarter of a large socket's memory busy."""


class SharedMemoryTransport(CheckedTransport["_Copying"]):
    """One worker's end of the shared memory transport.

    Parameters
    ----------
    worker
        Its name in the plan.
    device
        Whose kernels reach what is allocated.

    Raises
    ------
    TransportError
        Where the system has no ``memfd_create`` (it is Linux only).
    """

    def __init__(self, worker: str, *, device: Device | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise TransportError(f"{worker}: shared_memory needs Linux (memfd_create); use another transport")
        super().__init__(worker, "shared_memory", Limits(), device)
        self._files: dict[int, tuple[int, Memory]] = {}
        self._flags: Memory | None = None
        self._flags_begin = 0
        self._reached: dict[str, _Reached] = {}
        self._lent_files: dict[str, tuple[npt.NDArray[np.uint8], ...]] = {}
        # Peers read at the same time, and copiers must not take each other's cores.
        self._threads = max(1, min(_READERS, len(os.sched_getaffinity(0)) // 4))
        self._readers = ThreadPool(self._threads, "transload-reads")
        self.foreign_refused = why_not()
        """Why memory that was not allocated here cannot be registered; empty where it can."""

    def close(self) -> None:
        """See `Transport.close`; what reads have begun ends first, and until then says so to whoever asks."""
        readings = [each.reading for each in list(self._writes.values()) if each.reading is not None]
        for reading in readings:
            reading.stop()
        self._readers.shutdown()
        self._lent_files.clear()  # nobody looks at them any more
        for reading in readings:
            reading.mappings = ()
        super().close()

    def _allocate(self, size_bytes: int) -> Memory:
        try:
            fd, memory = make_shared(f"transload {self.worker}", size_bytes)
        except OSError as error:
            raise TransportError(f"{self.worker}: cannot get {size_bytes} bytes of shared memory: {error}") from error
        self._files[memory.ctypes.data] = fd, memory
        return memory

    def _expose(self, memory: Memory) -> str:
        place = self._place(memory)
        if place is not None:
            fd, offset = place
            return f"{self._regions.pid}/{fd}/{os.fstat(fd).st_ino}/{offset}"
        if self.foreign_refused:
            raise TransportError(
                f"this transport did not allocate it, so peers cannot map it, and process_vm_writev cannot be used: "
                f"{self.foreign_refused}"
            )
        return f"{_FOREIGN}/{self._regions.pid}/{memory.ctypes.data:#x}"

    def _withdraw(self, memory: Memory) -> None:
        """Nothing to undo: a file is closed at the end, and other memory was only named."""

    def _make_flags(self, channels: int) -> str:
        self._flags = self._allocate(_HEADER_BYTES + _FLAG_BYTES * channels)
        self._flags_begin = self._flags.ctypes.data
        publish_word(self._flags_begin, self.incarnation)
        return self._expose(self._flags)

    def _reach(self, peer: Endpoint) -> Bases:
        files: dict[str, Memory] = {}
        flags = _open(peer.worker, peer.flags_address, _HEADER_BYTES + _FLAG_BYTES * peer.channels, files)
        incarnation = read_word(flags.ctypes.data)
        if incarnation != peer.incarnation:
            raise TransportError(
                f"{peer.worker}: endpoint is of incarnation {peer.incarnation}, its memory of {incarnation}; "
                "exchange endpoints again"
            )
        bases, foreign = {}, {}
        for region in peer.regions:
            if region.address.startswith(f"{_FOREIGN}/"):
                foreign[region.name], bases[region.name] = _foreign(peer.worker, region.address)
            else:
                bases[region.name] = tuple(
                    _open(peer.worker, address, region.size_bytes, files).ctypes.data for address in region.addresses
                )
        process = _descriptor(peer.worker, int(peer.flags_address.partition("/")[0]))
        reached = _Reached(flags, tuple(files.values()), foreign, process)
        if process is not None:
            weakref.finalize(reached, os.close, process)
        self._reached[peer.worker] = reached
        return bases

    def _why_gone(self, peer: Endpoint) -> str:
        reached = self._reached[peer.worker]
        incarnation = read_word(reached.flags.ctypes.data)
        if incarnation != peer.incarnation:
            return "has closed" if not incarnation else f"runs as incarnation {incarnation}, not {peer.incarnation}"
        return "its process has ended" if reached.has_ended() else ""

    def _post(self, peer: Endpoint, region: str, rows: IdArray) -> None:
        pid = self._reached[peer.worker].foreign.get(region)
        if pid is None:
            copy_ranges(np.ascontiguousarray(rows), int(rows[:, 2].sum()) >= _STREAMED_BYTES)
        else:
            write_process(pid, rows)

    def _lend(self, memory: Stretches) -> str:
        return f"{_FOREIGN}/{self._regions.pid}"

    def _reach_lent(self, peer: Endpoint, lent: Stretches) -> Stretches:
        assert peer.lent is not None
        addresses, found = lent.addresses.copy(), []
        if lent.files:
            numbers = sorted(lent.files)
            try:
                found = map_places([lent.files[number] for number in numbers], lent.sizes[numbers].tolist())
            except (OSError, ValueError) as error:
                raise UnmappableError(f"{peer.worker}: its shared memory cannot be mapped: {error}") from error
            addresses[numbers] = [each.ctypes.data + MAPPED for each in found]
            copy_ranges(np.empty((0, 3), dtype=np.int64), True)  # compiles it
        self._lent_files[peer.worker] = tuple(found)
        _check_readable(peer.worker, peer.lent.where, lent.addresses[(addresses < MAPPED) & (lent.sizes > 0)])
        return Stretches(addresses, lent.sizes)

    def _get_ready(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            batch.compile()

    def _fetch(self, peer: Endpoint, batches: Sequence[Batch], sums: Sums | None) -> _Copying:
        assert peer.lent is not None
        pid = int(peer.lent.where.rpartition("/")[2])
        copying = _Copying(pid, deque(batches), self._lent_files[peer.worker], sums)
        try:
            copying.running = [self._readers.submit(copying.run) for _ in range(min(self._threads, len(batches)))]
        except RuntimeError as error:
            raise TransportError(f"{self.worker}: transport is closed") from error
        return copying

    def _stop(self, posted: _Copying) -> None:
        posted.stop()

    def _ended(self, posted: _Copying) -> bool:
        ended = all(each.done() for each in posted.running)
        if ended:
            found = [each.result() for each in posted.running]
            if posted.stopped:
                raise TransportError(f"{self.worker}: a read was stopped")
            for sums in found:
                if posted.sums is not None and sums is not None:
                    posted.sums += sums
        return ended

    def _raise(self, peer: Endpoint, channel: int, flag: Flag) -> None:
        address = self._reached[peer.worker].flags.ctypes.data + _HEADER_BYTES + _FLAG_BYTES * channel
        publish_word(address + 8, flag.tag)
        publish_word(address, flag.sequence)

    def _read(self, channel: int) -> Flag:
        address = self._flags_begin + _HEADER_BYTES + _FLAG_BYTES * channel
        sequence = read_word(address)
        return Flag(sequence, read_word(address + 8))

    def _close(self) -> None:
        """Close the files. Mappings live as long as this object, since another thread may be reading a flag."""
        if self._flags is not None:
            publish_word(self._flags_begin, 0)
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def _place(self, memory: Memory) -> tuple[int, int] | None:
        """The file that memory lies in, and from which byte on."""
        for begin, (fd, whole) in self._files.items():
            offset = memory.ctypes.data - begin
            if 0 <= offset <= whole.nbytes - memory.nbytes:
                return fd, offset
        return None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Reached:
    """What is held of a connected peer: mappings, the process of regions that are not mapped, a descriptor of its own.

    Without such a descriptor, which a sandbox may forbid, a dead peer is noticed by the deadline instead.
    """

    flags: Memory
    mappings: tuple[npt.NDArray[np.uint8], ...]
    foreign: dict[str, int]
    process: int | None

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self.process is None:
            return False
        poller = select.poll()
        poller.register(self.process, select.POLLIN)
        return bool(poller.poll(0))


def _descriptor(worker: str, pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise TransportError(f"{worker}: process {pid} is gone") from error
    except OSError:
        return None


def _foreign(worker: str, address: str) -> tuple[int, tuple[int, ...]]:
    """Process and address of a region that cannot be mapped, after reading a byte of it."""
    try:
        _, process, place = address.split("/")
        pid, base = int(process), int(place, 16)
    except ValueError as error:
        raise TransportError(f"{worker}: {address!r} is no shared memory address") from error
    refused = why_not_process(pid, base)
    if refused:
        raise TransportError(f"{worker}: its memory cannot be written with process_vm_writev: {refused}")
    return pid, (base,)


@dataclass(slots=True, eq=False)
class _Copying:
    """A read under way: batches that no thread has begun, and mappings, which live as long as they are looked at.

    Threads digest into sums of their own, which are added to the caller's when all have ended.
    """

    pid: int
    left: deque[Batch]
    mappings: tuple[npt.NDArray[np.uint8], ...]
    sums: Sums | None
    running: list[Job[Sums | None]] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> Sums | None:
        """Copy batches until none is left, and digest them; after an error no other thread begins one."""
        mine = None if self.sums is None else np.zeros_like(self.sums)
        while (batch := self._next()) is not None:
            try:
                batch.move(self.pid, mine)
            except TransportError:
                self.left.clear()
                raise
        return mine

    def stop(self) -> None:
        """Begin no more batches."""
        self.stopped = True
        self.left.clear()

    def _next(self) -> Batch | None:
        try:
            return self.left.popleft()
        except IndexError:
            return None


def _check_readable(worker: str, where: str, addresses: IdArray) -> None:
    """Read a byte of what a peer lends; UnreadableError if that is not allowed."""
    kind, _, process = where.partition("/")
    if kind != _FOREIGN or not process.isdigit():
        raise TransportError(f"{worker}: {where!r} is no process of a shared memory endpoint")
    refused = why_not_process(int(process), int(addresses[0])) if len(addresses) else ""
    if refused:
        raise UnreadableError(f"{worker}: its memory cannot be read with process_vm_readv: {refused}")


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
        return map_file(opened, found.st_size)
    except OSError as error:
        raise TransportError(f"{worker}: cannot map memory of process {pid}: {error}") from error
    finally:
        os.close(opened)
