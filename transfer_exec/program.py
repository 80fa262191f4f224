"""What one worker does in every round of an update.

A program is a template of instructions, the same for every round, and tables that say which bytes each instruction
moves in which round. It names buffers and flags, never addresses, and is bound to live memory by the executor.

::

    a trainer       Pack  Write(engine/0/0)  Write(engine/1/0)
    a rollout       Await(RECEIVE)  Exchange(engine/1/0)  Await(EXTERNAL)  Await(INTERNAL)  Assemble  Release

`Write` and `Exchange` first wait until the peer has released what it got in the round before; they then write and
raise the peer's flag. `Release` tells every worker that wrote here that all buffers are free again, which is after
the last reader has finished: the forwarding and the assembling.

What goes straight from parameter to parameter goes beside the rounds, once an update: `Offer` at its source, `Fetch` at
its target. A receiver reads, it is never written to, so nobody writes old bytes into parameters after all others have
given up; and a source does not end before all who read from it have.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from transfer_exec.descriptors import DescriptorTable, descriptor_tables
from transfer_exec.gather import GatherTable, cut_by_round
from transfer_exec.plan import Stage
from transfer_exec.regions import Buffer, Layout, Letter


@dataclass(frozen=True, slots=True)
class Pack:
    """Copy this round's elements from the tensors into the PACK buffer, in the wire's dtype."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write packed parts to a peer and raise its flag.

    Attributes
    ----------
    stage, peer
        The message.
    flag
        The peer's flag that announces it.
    release
        The own flag by which the peer releases its buffers.
    tables
        Positions in `Program.descriptors`.
    """

    stage: Stage
    peer: str
    flag: int
    release: int
    tables: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Forward received parts to a peer, straight from the buffers they arrived in; otherwise a `Write`."""

    stage: Stage
    peer: str
    flag: int
    release: int
    tables: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until every source of a stage has written its message of this round.

    Attributes
    ----------
    stage
        The stage.
    sources, flags
        Who writes, and the own flag that announces each; as many of either.
    """

    stage: Stage
    sources: tuple[str, ...]
    flags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assemble:
    """Copy everything this worker needs of the round from its three stage buffers into its tensors."""


@dataclass(frozen=True, slots=True)
class Release:
    """Tell every source that this worker's buffers may be written again.

    Attributes
    ----------
    sources, flags
        Who writes here, and the flag of each that this worker raises; as many of either.
    """

    sources: tuple[str, ...]
    flags: tuple[int, ...]


Instruction: TypeAlias = Pack | Write | Exchange | Await | Assemble | Release


@dataclass(frozen=True, slots=True)
class Offer:
    """Let a peer read the lent tensors, and wait until it has.

    Attributes
    ----------
    stage, peer
        Whose hops this stands for.
    flag
        The peer's flag that says that the tensors are ready.
    done
        The own flag by which the peer says that it has finished reading.
    bytes, mapped_bytes
        Of the plan's ids that go this way, and of those that the peer maps.
    """

    stage: Stage
    peer: str
    flag: int
    done: int
    bytes: int
    mapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read out of a peer's tensors into the own, when it has said that they are ready.

    Attributes
    ----------
    stage, peer
        Whose hops this stands for.
    flag
        The own flag by which the peer says that its tensors are ready.
    done
        The peer's flag that says that they were read.
    bytes, mapped_bytes
        Of the plan's ids that go this way, and of those that are mapped.
    """

    stage: Stage
    peer: str
    flag: int
    done: int
    bytes: int
    mapped_bytes: int = 0


class FetchColumn(IntEnum):
    """Columns of what is read: the peer's lent tensor and the byte in it, the own tensor and the byte, how many."""

    LENT = 0
    LENT_OFFSET = 1
    TENSOR = 2
    OFFSET = 3
    BYTES = 4


class StripColumn(IntEnum):
    """Columns of what is digested as it lands: the own tensor, the byte in it and how many, ids, and which sum."""

    TENSOR = 0
    OFFSET = 1
    BYTES = 2
    FIRST_ID = 3
    ITEM_BYTES = 4
    SUM = 5


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor that the program reads or writes.

    Attributes
    ----------
    name
        Of a parameter, or of a checkpoint tensor if ``staged``.
    shape, dtype
        As the source map, or the checkpoint, has them.
    staged
        A checkpoint tensor assembled in host memory for an opaque parameter's own loader.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    staged: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory if contiguous."""
        return self.elements * dtype_of(self.dtype).item_bytes


@dataclass(frozen=True, eq=False)
class Program:
    """One worker's part of a plan.

    It is kept and sent as templates, whose size does not grow with rounds; the tables of all rounds follow from them
    and are made when they are first looked at.

    Attributes
    ----------
    worker
        Whose.
    plan_digest, map_digest
        Of the plan and of how it is divided into direct moves and others, and of the source map it was compiled with.
    rounds
        Rounds of an update.
    flags
        Number of flags that peers raise here.
    instructions
        Of one round.
    tensors
        Every tensor that is read or written, parameters first.
    layouts
        What stands where in the four buffers, in the order of `Buffer`.
    letters
        The messages this worker sends, in the order of its writes.
    pack_templates, assemble_templates
        Which tensor elements are packed, and assembled, from and into which parts; see `transfer_exec.gather`.
    offers, fetches
        Direct moves, each once an update, beside the rounds.
    lent
        Positions in ``tensors`` of what peers read, in the order in which they count it.
    mapped
        Of those, what is in shared memory, and peers map.
    fetch_rows
        What each fetch reads: int64, shape ``(n, 5)``, columns as in `FetchColumn`.
    """

    worker: str
    plan_digest: str
    map_digest: str
    rounds: int
    flags: int
    instructions: tuple[Instruction, ...]
    tensors: tuple[ProgramTensor, ...]
    layouts: tuple[Layout, Layout, Layout, Layout]
    letters: tuple[Letter, ...]
    pack_templates: IdArray
    assemble_templates: IdArray
    offers: tuple[Offer, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    lent: tuple[int, ...] = ()
    mapped: tuple[int, ...] = ()
    fetch_rows: tuple[IdArray, ...] = ()

    @cached_property
    def pack(self) -> GatherTable:
        """Which tensor elements stand where in the PACK buffer, in every round."""
        return cut_by_round(self.pack_templates, self.layouts)

    @cached_property
    def assemble(self) -> GatherTable:
        """Which tensor elements stand where in the three other buffers, in every round."""
        return cut_by_round(self.assemble_templates, self.layouts)

    @cached_property
    def descriptors(self) -> tuple[DescriptorTable, ...]:
        """The tables of the messages this worker sends: for each letter one for every buffer it is read from."""
        return tuple(table for letter in self.letters for table in descriptor_tables(letter, self.layouts))

    @cached_property
    def arriving(self) -> IdArray:
        """Payload bytes that are written to this worker, by stage and round; int64, shape ``(3, rounds)``."""
        return np.stack([layout.bytes_of_rounds for layout in self.layouts[1:]])

    def bytes_received(self, stage: Stage) -> int:
        """Payload bytes that come to this worker in one stage of one update, what it reads itself included."""
        fetched = sum(fetch.bytes for fetch in self.fetches if fetch.stage is stage)
        return int(self.arriving[stage.value].sum()) + fetched

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int, int]:
        """Bytes of the four buffers, in the order of `Buffer`."""
        pack, receive, external, internal = (layout.size_bytes for layout in self.layouts)
        return pack, receive, external, internal

    def buffer_bytes(self, buffer: Buffer) -> int:
        """Size of one buffer: that of its fullest round."""
        return self.buffer_sizes[buffer.value]

    @property
    def peers(self) -> tuple[str, ...]:
        """Everybody this worker writes to, reads from or raises flags at, each once."""
        names: list[str] = []
        for step in self.instructions:
            match step:
                case Write(peer=peer) | Exchange(peer=peer):
                    names.append(peer)
                case Release(sources=sources):
                    names.extend(sources)
                case _:
                    pass
        names += [each.peer for each in self.direct_steps]
        return tuple(dict.fromkeys(names))

    @property
    def direct_steps(self) -> tuple[Offer | Fetch, ...]:
        """Direct moves from this worker and to it."""
        return (*self.offers, *self.fetches)

    @property
    def direct_bytes(self) -> int:
        """Payload bytes that are read from this worker or by it."""
        return sum(each.bytes for each in self.direct_steps)

    @property
    def mapped_bytes(self) -> int:
        """Of the direct bytes, those that come out of memory that readers have mapped."""
        return sum(each.mapped_bytes for each in self.direct_steps)

    @property
    def receives(self) -> bool:
        """Whether anything comes to this worker."""
        return self.release is not None or bool(self.fetches)

    @property
    def release(self) -> Release | None:
        """The release of this program; None for a worker that receives nothing."""
        return next((step for step in self.instructions if isinstance(step, Release)), None)

    def bytes_sent(self, stage: Stage) -> int:
        """Payload bytes this worker sends in one stage of one update, what is read from it included."""
        total = sum(offer.bytes for offer in self.offers if offer.stage is stage)
        for step in self.instructions:
            if isinstance(step, (Write, Exchange)) and step.stage is stage:
                total += sum(int(self.descriptors[table].rows[:, 2].sum()) for table in step.tables)
        return total

    @property
    def table_bytes(self) -> int:
        """Memory that the tables of all rounds take."""
        arrays = [self.pack.rows, self.assemble.rows, *(table.rows for table in self.descriptors), *self.fetch_rows]
        return sum(array.nbytes for array in arrays)

    def digest(self) -> str:
        """Hex digest; equal programs have equal digests."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        from transfer_exec.program_bytes import plain_program

        return hashlib.blake2b(plain_program(self), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """Serialize; ``from_bytes`` gives an equal program."""
        from transfer_exec.program_bytes import encode_program

        return encode_program(self)

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Read ``to_bytes``' output; safe on untrusted bytes: no row leaves its tensor or its buffer.

        Raises
        ------
        ProgramError
            If the bytes are truncated, altered, of another version, or a row leaves a tensor or buffer.
        """
        from transfer_exec.program_bytes import decode_program

        return decode_program(data)
