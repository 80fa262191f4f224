"""What the acting half asks of a device with memory and streams of its own.

Work is given to a device and ends later. Every `Device` orders it in two ways only: what it is given itself comes after
what the caller's stream had been given when `follow` was called, and an `Event` tells when something has ended. So a
byte may be read, sent or overwritten when an event says so, and never because time has passed.

::

    device.follow()                                 # gradients, casts and forwards that were begun here come first
    copied = device.copy(rows)                      # absolute (source, target, bytes); returns at once
    copied.done()                                   # asked until it is true; then the bytes are there for everybody

Buffers are of one of two kinds. Those of `allocate` are on the device; other processes of this machine map them by the
text of `share`. Memory of the host that was given to `pin` can be read and written by the device's kernels in place, so
a round is packed straight into what a transport of host memory sends, and assembled straight out of it.

`transfer_exec.cuda_device` is one such device.
"""

from __future__ import annotations

from typing import Protocol

from layout_algebra.dtypes import IdArray
from transfer_exec.kernels.base import Kernels
from transfer_exec.transport.base import Memory


class Event(Protocol):
    """The end of some work."""

    def done(self) -> bool:
        """Whether it has ended; never blocks. TransportError if it failed."""
        ...

    def wait(self) -> None:
        """Block until it has ended. TransportError if it failed."""
        ...


class Device(Protocol):
    """One device as one worker uses it. Not thread-safe, except that its kernels may run beside everything else."""

    @property
    def name(self) -> str:
        """As torch spells it: ``"cuda:0"``."""
        ...

    @property
    def kernels(self) -> Kernels:
        """Kernels for rows of its memory and of pinned memory; their jobs return when everything is written."""
        ...

    def follow(self) -> None:
        """Let later work begin after all that the calling thread's current stream was given so far."""
        ...

    def allocate(self, size_bytes: int) -> Memory:
        """Zeroed memory on the device. An array, of which only address and size mean something to the processor.

        Raises
        ------
        TransportError
            If there is not so much.
        """
        ...

    def owns(self, memory: Memory) -> bool:
        """Whether some memory is (part of) what `allocate` gave."""
        ...

    def free(self, memory: Memory) -> None:
        """Give back what `allocate` gave; nobody may have it mapped, and no work may be under way on it."""
        ...

    def pin(self, memory: Memory) -> None:
        """Let kernels of every device of this process reach memory of the host. TransportError if it cannot be."""
        ...

    def unpin(self, memory: Memory) -> None:
        """Undo `pin`; no kernel may be running on it."""
        ...

    def copy(self, rows: IdArray) -> Event:
        """Begin to copy rows of absolute ``(source, target, bytes)``; int64, shape ``(n, 3)``."""
        ...

    def share(self, memory: Memory) -> str:
        """A text by which a device of another process on this machine maps what `allocate` gave, or a part of it."""
        ...

    def open(self, shared: str) -> int:
        """Map what another process shares; the address here.

        Raises
        ------
        TransportError
            If the text means nothing, or the memory is gone or out of this device's reach.
        """
        ...

    def let_go(self, address: int) -> None:
        """Undo `open`; no copy to it may be under way."""
        ...
