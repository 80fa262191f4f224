"""Memory that others have mapped is not freed before the last of them has let go.

Whoever lends makes a file without a name and tells where it is; whoever maps opens it and holds a shared lock on it for
as long. The owner of the memory gets the file to itself only when nobody holds it any more. The system drops the locks
of a process that dies, so nobody is waited for in vain, and nobody has to be counted.

>>> lease = Lease("engine/a/0")
>>> held = hold("engine/a/0", lease.address)
>>> freed = threading.Event()
>>> lease.when_free(freed.set)                       # somebody has it: later
>>> freed.is_set()
False
>>> os.close(held); freed.wait(10)
True
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable

from transfer_exec.errors import TransportError


class Lease:
    """What peers hold as long as they have some memory of ours mapped.

    Parameters
    ----------
    worker
        Who lends.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._fd = os.memfd_create(f"transload lease {worker}", os.MFD_CLOEXEC)
        self.address = f"{os.getpid()}/{self._fd}/{os.fstat(self._fd).st_ino}"
        """Where the file is, for `hold`."""

    def when_free(self, act: Callable[[], None]) -> None:
        """End the lease, once: do something when nobody holds it, at once or in a thread, and let nobody begin to."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = f"transload-lease {self._worker}"
            threading.Thread(target=self._wait, args=(act,), name=name, daemon=True).start()
            return
        self._end(act)

    def _wait(self, act: Callable[[], None]) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._end(act)

    def _end(self, act: Callable[[], None]) -> None:
        act()
        os.close(self._fd)


def hold(worker: str, address: str) -> int:
    """Hold a worker's lease: a file descriptor, which ends it when it is closed.

    Raises
    ------
    TransportError
        If the lease has ended, or the address is none.
    """
    try:
        pid, fd, inode = (int(part) for part in address.split("/"))
    except ValueError as error:
        raise TransportError(f"{worker}: {address!r} is no address of a lease") from error
    try:
        held = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"{worker}: its memory was taken back, or process {pid} is gone: {error}") from error
    try:
        if os.fstat(held).st_ino != inode:
            raise TransportError(f"{worker}: file {fd} of process {pid} is no lease of it")
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise TransportError(f"{worker}: its memory is being taken back") from error
    except TransportError:
        os.close(held)
        raise
    return held
