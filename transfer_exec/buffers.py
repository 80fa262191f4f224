"""A worker's four buffers, each in as many slots as rounds are under way, allocated once and registered.

Round k uses slot ``k % depth`` of every buffer. A slot is exactly as large as the fullest round of the program needs,
and a region of its own, so that a descriptor of one round cannot reach into another's. All slots lie in one
allocation, each from a multiple of 64 bytes on. A buffer that nothing passes is not registered at all.

>>> slot_name(Buffer.RECEIVE, 1)
'RECEIVE/1'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.errors import ProgramError, TransportError
from transfer_exec.program import Program
from transfer_exec.regions import Buffer
from transfer_exec.transport.base import Memory, RegionHandle, Transport

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Open buffers of one worker.

    Attributes
    ----------
    depth
        Slots of every buffer.
    memory
        The bytes of every buffer's slots, empty ones included.
    handles
        Of the slots of buffers that are not empty.
    """

    depth: int
    memory: Mapping[Buffer, tuple[Memory, ...]]
    handles: Mapping[Buffer, tuple[RegionHandle, ...]]

    @property
    def addresses(self) -> IdArray:
        """Where the slots begin: int64, shape ``(4, depth)``, in the order of `Buffer`."""
        return np.array([[slot.ctypes.data for slot in self.memory[buffer]] for buffer in Buffer], dtype=np.int64)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots together: ``depth`` times the fullest round's."""
        return sum(slot.nbytes for slots in self.memory.values() for slot in slots)


def open_buffers(program: Program, transport: Transport, depth: int) -> Buffers:
    """Allocate and register a program's buffers under the names of `slot_name`, and open its flags.

    Parameters
    ----------
    program
        What passes through them.
    transport
        Closed if this fails, so that nothing stays registered.
    depth
        Rounds under way at once, equal on all workers; more than the program has are as many as it has.

    Raises
    ------
    ProgramError
        If the depth is below 1.
    TransportError
        If the transport cannot.
    """
    if isinstance(depth, bool) or depth < 1:
        raise ProgramError(f"{program.worker}: depth is {depth!r}; expected at least one round under way")
    depth = min(depth, program.rounds)
    sizes = [program.buffer_bytes(buffer) for buffer in Buffer for _ in range(depth)]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    try:
        whole = transport.allocate(starts[-1])
        slots = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        memory = {buffer: tuple(slots[buffer.value * depth :][:depth]) for buffer in Buffer}
        handles = {
            buffer: tuple(transport.register(slot_name(buffer, k), slot) for k, slot in enumerate(memory[buffer]))
            for buffer in Buffer
            if program.buffer_bytes(buffer)
        }
        transport.open_flags(program.flags)
    except TransportError:
        transport.close()
        raise
    return Buffers(depth, memory, handles)


def slot_name(buffer: Buffer, slot: int) -> str:
    """The region of one slot of a buffer."""
    return f"{buffer.name}/{slot}"
