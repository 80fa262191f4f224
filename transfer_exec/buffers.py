"""A worker's four buffers, allocated from its transport and registered with it.

Each is exactly as large as the fullest round of the program needs, so together they never exceed the plan's budget
per stage. A buffer that nothing passes is not registered at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transfer_exec.program import Program
from transfer_exec.regions import Buffer
from transfer_exec.transport.base import Memory, RegionHandle, Transport


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Open buffers of one worker.

    Attributes
    ----------
    memory
        The bytes of every buffer, empty ones included.
    handles
        Of the buffers that are not empty.
    """

    memory: Mapping[Buffer, Memory]
    handles: Mapping[Buffer, RegionHandle]

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where the buffers begin, in the order of `Buffer`."""
        pack, receive, external, internal = (self.memory[buffer].ctypes.data for buffer in Buffer)
        return pack, receive, external, internal

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(memory.nbytes for memory in self.memory.values())


def open_buffers(program: Program, transport: Transport) -> Buffers:
    """Allocate and register a program's buffers under the names of `Buffer`, and open its flags.

    Raises
    ------
    TransportError
        If the transport cannot.
    """
    memory = {buffer: transport.allocate(program.buffer_bytes(buffer)) for buffer in Buffer}
    handles = {buffer: transport.register(buffer.name, each) for buffer, each in memory.items() if each.nbytes}
    transport.open_flags(program.flags)
    return Buffers(memory, handles)
