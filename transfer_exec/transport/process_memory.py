"""Other processes' memory with ``process_vm_readv`` and ``process_vm_writev``: no mapping, no copy in between.

The kernel allows it between processes of one user, unless a policy (Yama's ``ptrace_scope``, seccomp, a user namespace)
says no. So it is asked before it is relied on: `why_not` at the start, `why_not_process` for one peer.

::

    why_not() or why_not_process(pid, address) or write_process(pid, rows)      # rows: address here, there, bytes
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import TransportError

RANGES = 1024
"""The system takes so many at once."""
_CALL_BYTES = 1 << 30
"""Below the kernel's own limit of 2 GiB less a page, so that a whole call is one answer."""


def why_not() -> str:
    """Why this process cannot use ``process_vm_writev`` at all; empty if it can."""
    word = np.ones(1, dtype=np.int64)
    return why_not_process(os.getpid(), word.ctypes.data)


def why_not_process(pid: int, address: int) -> str:
    """Why a process's memory at an address cannot be reached; empty if it can."""
    word = np.zeros(1, dtype=np.uint8)
    mine, theirs = (np.array([[place, 1]], dtype=np.int64) for place in (word.ctypes.data, address))
    try:
        _call("process_vm_readv", pid, mine, theirs)
    except OSError as error:
        return f"process {pid}: {os.strerror(error.errno or 0)}" + _hint(error)
    return ""


class Ranges(NamedTuple):
    """What one call moves, as the system takes it.

    Attributes
    ----------
    mine, theirs
        Address and bytes of every range, here and there; int64, shape ``(n, 2)``.
    bytes
        Of all of them.
    """

    mine: npt.NDArray[np.int64]
    theirs: npt.NDArray[np.int64]
    bytes: int


def ranges_of(rows: IdArray) -> tuple[Ranges, ...]:
    """Rows, as `write_process` takes them, in calls that the system takes; may be done long before they move."""
    return tuple(
        Ranges(np.ascontiguousarray(part[:, ::2]), np.ascontiguousarray(part[:, 1:]), int(part[:, 2].sum()))
        for part in _calls(rows)
    )


def write_process(pid: int, rows: IdArray) -> None:
    """Copy ranges into another process's memory.

    Parameters
    ----------
    pid
        The process.
    rows
        int64, shape ``(n, 3)``: address here, address there, bytes.

    Raises
    ------
    TransportError
        If the process is gone, a range is not mapped there, or the kernel does not allow it.
    """
    _move("process_vm_writev", pid, ranges_of(rows), "written")


def read_process(pid: int, calls: Sequence[Ranges]) -> None:
    """Copy ranges out of another process's memory; they come from `ranges_of`, otherwise as `write_process`."""
    _move("process_vm_readv", pid, calls, "read")


def _move(name: str, pid: int, calls: Sequence[Ranges], done: str) -> None:
    for call in calls:
        try:
            moved = _call(name, pid, call.mine, call.theirs)
        except OSError as error:
            raise TransportError(
                f"process {pid}: {len(call.mine)} ranges cannot be {done}: {os.strerror(error.errno or 0)}"
                f"{_hint(error)}"
            ) from error
        if moved != call.bytes:
            raise TransportError(
                f"process {pid}: {moved} of {call.bytes} bytes could be {done}; part of the range is not mapped there"
            )


def _calls(rows: IdArray) -> list[IdArray]:
    """Rows in groups that one call takes."""
    out: list[IdArray] = []
    for part in np.split(rows, range(RANGES, len(rows), RANGES)):
        if int(part[:, 2].sum()) <= _CALL_BYTES:
            out.append(part)
            continue
        for source, target, size in part.tolist():
            out += [
                np.array([[source + at, target + at, min(_CALL_BYTES, size - at)]], dtype=np.int64)
                for at in range(0, size, _CALL_BYTES)
            ]
    return [part for part in out if len(part)]


def _call(name: str, pid: int, mine: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]) -> int:
    done = int(_function(name)(pid, mine.ctypes.data, len(mine), theirs.ctypes.data, len(theirs), 0))
    if done < 0:
        raise OSError(ctypes.get_errno(), name)
    return done


@cache
def _function(name: str) -> Callable[[int, int, int, int, int, int], int]:
    """A function of the C library; looking it up takes as long as a call moves a mebibyte."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    found: Callable[[int, int, int, int, int, int], int] = function
    return found


def _hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "; both must run as one user, and kernel.yama.ptrace_scope must be 0"
    return ""
