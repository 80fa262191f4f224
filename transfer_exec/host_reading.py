"""Look at this machine: its interfaces under ``/sys/class/net``, its cores, and how fast one copies memory.

The measurement takes about a tenth of a second; everything else is read.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np

from transfer_exec.host import Host, Interface

NETWORK = Path("/sys/class/net")
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
