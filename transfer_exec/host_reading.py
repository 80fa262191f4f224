"""Look at this machine: its interfaces and their addresses, its RDMA cards, its cores, and how fast one copies memory.

The measurement takes about a tenth of a second; everything else is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from transfer_exec.host import Host, Interface
from transfer_exec.transport.addresses import LocalAddress

NETWORK = Path("/sys/class/net")
RDMA = Path("/sys/class/infiniband")
_UP = 1
_ADDRESS_AT = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""By family, where in a socket address the number begins, and its bytes."""
_SOMEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has: the way there is the way to everywhere."""
_LOOPBACK = "772"
_COPIED_BYTES = 64 << 20
_COPIES = 3


def read_host(network: Path = NETWORK) -> Host:
    """This machine as it is now; a system without such a folder has no interfaces."""
    folders = sorted(network.iterdir()) if network.is_dir() else []
    return Host(
        name=socket.gethostname(),
        interfaces=tuple(_interface(folder) for folder in folders if folder.is_dir()),
        cores=_cores(),
        copy_bytes_per_s=_copy_bytes_per_s(),
    )


def read_addresses() -> tuple[LocalAddress, ...]:
    """Every address of every interface that is up, in the system's order; none where it does not tell (Linux does)."""
    if not sys.platform.startswith("linux"):
        return ()
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Listed)()
    if libc.getifaddrs(ctypes.byref(first)):
        return ()
    try:
        return tuple(dict.fromkeys(_addresses(first)))
    finally:
        libc.freeifaddrs(first)


def ways_out() -> tuple[str, ...]:
    """The own addresses from which the system would go to machines that it knows nothing of; nothing is sent."""
    found = []
    for family, target in zip((socket.AF_INET, socket.AF_INET6), _SOMEWHERE, strict=True):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((target, 9))
            found.append(str(asking.getsockname()[0]))
    return tuple(found)


def read_devices(cards: Path = RDMA) -> tuple[str, ...]:
    """Names of this machine's RDMA devices, sorted."""
    return tuple(sorted(each.name for each in cards.iterdir())) if cards.is_dir() else ()


def read_gids(device: str, cards: Path = RDMA) -> tuple[LocalAddress, ...]:
    """A card's RoCE entries, of version 2; none of an InfiniBand card, whose entries are its ports."""
    port = cards / device / "ports" / "1"
    if _text(port / "link_layer") != "Ethernet" or not (port / "gids").is_dir():
        return ()
    entries = sorted((int(each.name), _text(each)) for each in (port / "gids").iterdir() if each.name.isdigit())
    about = port / "gid_attrs"
    return tuple(
        LocalAddress(_text(about / "ndevs" / str(index)), gid, index)
        for index, gid in entries
        if gid and _text(about / "types" / str(index)) == "RoCE v2"
    )


class _Listed(ctypes.Structure):
    """The system's ``struct ifaddrs``."""


_Listed._fields_ = [
    ("next", ctypes.POINTER(_Listed)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def _addresses(first: ctypes._Pointer[_Listed]) -> Iterator[LocalAddress]:
    at = first
    while at:
        listed = at.contents
        if listed.address and listed.flags & _UP:
            family = ctypes.c_uint16.from_address(listed.address).value
            if family in _ADDRESS_AT:
                begin, size = _ADDRESS_AT[family]
                number = ctypes.string_at(listed.address + begin, size)
                yield LocalAddress(listed.name.decode(), socket.inet_ntop(family, number))
        at = listed.next


def _interface(folder: Path) -> Interface:
    megabits = _text(folder / "speed")
    told = megabits.isdigit() and int(megabits) > 0  # -1, or an error, where nothing is known
    return Interface(
        name=folder.name,
        up=_text(folder / "operstate") in ("up", "unknown"),
        physical=(folder / "device").exists(),
        bond=(folder / "bonding").is_dir(),
        in_bond=(folder / "bonding_slave").is_dir(),
        loopback=_text(folder / "type") == _LOOPBACK,
        bytes_per_s=int(megabits) * 1e6 / 8 if told else None,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _copy_bytes_per_s() -> float:
    source = np.ones(_COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        begun = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return _COPIED_BYTES / max(best, 1e-9)
