"""The files that this process' shared memory lies in, and mapping what a peer has in one.

Memory that was shared (``Tensor.share_memory_()``, a memory file, a shared mapping of any file) is a mapping that
``/proc/self/maps`` lists with a device and an inode. A peer maps the same bytes if it can open that file: by a
descriptor that this process still has, which it finds below ``/proc/<pid>/fd``, or by the file's own path.

>>> import mmap, os
>>> import numpy as np
>>> fd = os.memfd_create("weights"); os.ftruncate(fd, 8192)
>>> weights = np.frombuffer(mmap.mmap(fd, 8192), dtype=np.uint8)
>>> place = SharedRanges.of_this_process().place(weights.ctypes.data + 4096, 100)
>>> place.offset, place.path == f"/proc/{os.getpid()}/fd/{fd}"
(4096, True)
>>> weights[4096] = 7
>>> int(map_places([place], [100])[0][0])
7

Whoever shrinks a file while a peer copies out of it ends the peer's process (SIGBUS). Files of this library are sealed
against that; those of others are trusted, as all is that workers of one job and one user tell each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt


class FilePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where in a file a stretch of memory lies.

    Attributes
    ----------
    device, inode
        Of the file, by which it is known again.
    offset
        In bytes.
    path
        Under which other processes open it; empty if there is none.
    """

    device: int
    inode: int
    offset: int
    path: str


class _Range(NamedTuple):
    """A stretch of addresses that continues in one file."""

    start: int
    stop: int
    device: int
    inode: int
    offset: int
    path: str


@dataclass(frozen=True)
class SharedRanges:
    """All shared mappings of files that this process has now; ascending."""

    ranges: tuple[_Range, ...]

    @staticmethod
    def of_this_process() -> SharedRanges:
        """Read them; none where the system does not tell (Linux does). Takes about a microsecond a mapping."""
        found: list[_Range] = []
        for each in filter(None, map(_parsed, mappings())):
            if found and _continues(found[-1], each):
                found[-1] = found[-1]._replace(stop=each.stop)
            else:
                found.append(each)
        return SharedRanges(tuple(found))

    def whereabouts(self, address: int, size_bytes: int) -> FilePlace | None:
        """Where memory lies, if all of it is in one file; the path is what the system calls that."""
        at = bisect_right(self.ranges, address, key=lambda each: each.start) - 1
        if at < 0 or size_bytes <= 0 or address + size_bytes > self.ranges[at].stop:
            return None
        within = self.ranges[at]
        return FilePlace(within.device, within.inode, within.offset + address - within.start, within.path)

    def place(self, address: int, size_bytes: int) -> FilePlace | None:
        """Where memory lies, if all of it is in one file that others may open."""
        bare = self.whereabouts(address, size_bytes)
        if bare is None:
            return None
        for path in (self._descriptors.get((bare.device, bare.inode), ""), bare.path):
            if _identity(path) == (bare.device, bare.inode):
                return msgspec.structs.replace(bare, path=path)
        return None

    @cached_property
    def _descriptors(self) -> dict[tuple[int, int], str]:
        """The lowest descriptor of every file that this process has open, as others open it."""
        numbers = sorted((int(each) for each in os.listdir("/proc/self/fd")), reverse=True)
        paths = [f"/proc/{os.getpid()}/fd/{number}" for number in numbers]
        return {found: path for path in paths if (found := _identity(path)) is not None}


def mappings() -> list[list[str]]:
    """What the system says of every stretch of addresses of this process, ascending; nothing where it does not tell.

    Addresses, permissions such as ``rw-p``, offset, device, inode and, if there is one, path.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").split("\n")
    return [fields for fields in (line.split(maxsplit=5) for line in lines) if len(fields) >= 5]


def addresses(fields: list[str]) -> tuple[int, int]:
    """Where one of the `mappings` begins and ends."""
    start, stop = fields[0].split("-")
    return int(start, 16), int(stop, 16)


def make_shared(name: str, size_bytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """Zeroed memory in a file without a name that nobody can shrink, faulted in; the file's descriptor, and the memory.

    Raises
    ------
    OSError
        If the system does not give it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # Reserves the pages: without it a host that is full would kill the process at the first write.
        os.posix_fallocate(fd, 0, size_bytes)
        return fd, map_file(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise


def map_file(fd: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """A file from its beginning, to be read and written, faulted in; OSError if the system does not map it."""
    return np.frombuffer(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=np.uint8)


def map_places(places: Sequence[FilePlace], sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Map stretches of files, which may be a peer's, to be read only; a file is mapped once, and faulted in.

    Raises
    ------
    OSError, ValueError
        If a file cannot be opened or mapped, or is not the one that is meant, or shorter than it was.
    """
    mapped: dict[tuple[int, int, str], tuple[int, npt.NDArray[np.uint8]]] = {}
    spans: dict[tuple[int, int, str], tuple[int, int]] = {}
    for place, size in zip(places, sizes, strict=True):
        key = place.device, place.inode, place.path
        low, high = spans.get(key, (place.offset, place.offset + size))
        spans[key] = min(low, place.offset), max(high, place.offset + size)
    for (device, inode, path), (low, high) in spans.items():
        low -= low % mmap.ALLOCATIONGRANULARITY
        mapped[device, inode, path] = low, _map(device, inode, path, low, high)
    out = []
    for place, size in zip(places, sizes, strict=True):
        low, whole = mapped[place.device, place.inode, place.path]
        out.append(whole[place.offset - low : place.offset - low + size])
    return out


def _map(device: int, inode: int, path: str, low: int, high: int) -> npt.NDArray[np.uint8]:
    # What is no regular file, which opening might wait for, is not waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (device, inode):
            raise OSError(f"{path} is another file than the one that was shared")
        if found.st_size < high:
            raise OSError(f"{path} has {found.st_size} bytes; shared were {low}:{high}")
        return _map_to_read(fd, low, high - low)
    finally:
        os.close(fd)


def _map_to_read(fd: int, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map without keeping the descriptor, as ``mmap.mmap`` does: a model may have a file for every parameter."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size_bytes).atexit = False  # a thread may still be looking
    array = np.ctypeslib.as_array(memory)
    array.setflags(write=False)
    return array


def _parsed(fields: list[str]) -> _Range | None:
    """An entry of the system's list, if it is of a shared mapping of a file."""
    if fields[1][3] != "s" or fields[4] == "0":
        return None
    start, stop = addresses(fields)
    major, minor = (int(each, 16) for each in fields[3].split(":"))
    path = fields[5] if len(fields) == 6 else ""
    return _Range(start, stop, os.makedev(major, minor), int(fields[4]), int(fields[2], 16), path)


def _continues(last: _Range, each: _Range) -> bool:
    same_file = (each.device, each.inode) == (last.device, last.inode)
    return same_file and each.start == last.stop and each.offset - last.offset == each.start - last.start


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a regular file; None of anything else."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None
