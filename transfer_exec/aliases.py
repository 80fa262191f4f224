"""Parameters that share memory: bytes that are written must be copies of one checkpoint element by all their names.

A tied head and its embedding are one tensor under two names, which is fine while both are loaded from one checkpoint
tensor. Where maps say that they hold different elements, the last write would win and nobody would hear of it. The same
is true of a rollout's parameter in a trainer's memory. What trainers share among themselves is only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.runs import expand_ranges
from layout_algebra.source_map import SourceMap
from transfer_exec.binding import LiveTensor
from transfer_exec.errors import ProgramError
from transfer_exec.program import Program, ProgramTensor

_WIDEST_BYTES = 16


class Member(NamedTuple):
    """A worker in this process.

    Attributes
    ----------
    program, tensors
        What it moves, and where that is, from `transfer_exec.binding.live_tensors`.
    source_map
        What is in it.
    writes
        Whether an update writes its parameters, or reads them.
    """

    program: Program
    tensors: Sequence[LiveTensor]
    source_map: SourceMap
    writes: bool


class _Held(NamedTuple):
    """A parameter of a member."""

    member: Member
    tensor: ProgramTensor
    live: LiveTensor

    @property
    def reach(self) -> tuple[int, int]:
        """Its first byte, and the one after its last."""
        ends = [(extent - 1) * step for extent, step in self.live.axes]
        first = self.live.address + sum(min(end, 0) for end in ends)
        last = self.live.address + sum(max(end, 0) for end in ends)
        return first, last + dtype_of(self.tensor.dtype).item_bytes


def check_aliases(members: Sequence[Member]) -> None:
    """Refuse memory that is to be written and in which two parameters' maps contradict each other.

    It costs next to nothing for parameters that share no stretch of memory, else some 50 bytes for each of theirs.

    Raises
    ------
    ProgramError
        Naming both parameters and what each of them holds at their first common byte.
    """
    group: list[_Held] = []
    stop = 0
    for held in sorted(_parameters(members), key=lambda held: held.reach):
        if held.reach[0] >= stop:
            _check_group(group)
            group = []
        group.append(held)
        stop = max(stop, held.reach[1])
    _check_group(group)


def _parameters(members: Sequence[Member]) -> Iterator[_Held]:
    for member in members:
        for tensor, live in zip(member.program.tensors, member.tensors, strict=True):
            if tensor.elements and not tensor.staged:
                yield _Held(member, tensor, live)


def _check_group(group: Sequence[_Held]) -> None:
    """Compare parameters that lie in one stretch of memory, byte by byte."""
    distinct: dict[tuple[object, ...], _Held] = {}
    for held in sorted(group, key=lambda held: not held.member.writes):
        copies = held.member.source_map[held.tensor.name].copies.rows.tobytes()
        distinct.setdefault((held.live.address, held.live.axes, held.tensor.dtype, copies), held)
    parameters = list(distinct.values())
    if len(parameters) < 2 or not parameters[0].member.writes:
        return
    places, owners, meanings = (
        np.concatenate(column) for column in zip(*map(_bytes_of, range(len(parameters)), parameters), strict=True)
    )
    order = np.lexsort((owners, places))
    places, owners, meanings = places[order], owners[order], meanings[order]
    head = np.searchsorted(places, places)  # the first of all that is there; it is written if anything is
    written = np.array([held.member.writes for held in parameters])[owners[head]]
    clash = np.flatnonzero(written & (meanings != meanings[head]))
    if len(clash):
        one, other = (_said(parameters[owners[at]], int(meanings[at])) for at in (head[clash[0]], clash[0]))
        raise ProgramError(
            f"{one} and {other} in the same memory, where one would be lost; give both the same source, or memory of "
            "their own"
        )


def _bytes_of(number: int, held: _Held) -> tuple[IdArray, IdArray, IdArray]:
    """Every byte that is a copy: its address, the parameter's number, and what it is a byte of."""
    width = dtype_of(held.tensor.dtype).item_bytes
    ids = held.member.source_map.ids(held.tensor.name).reshape(-1)
    address = np.array([held.live.address], dtype=np.int64)
    for extent, step in held.live.axes:
        address = (address[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    address, ids = address[ids > 0], ids[ids > 0]
    nth = expand_ranges(np.zeros(len(ids), dtype=np.int64), np.full(len(ids), width))
    meaning = (np.repeat(ids, width) * _WIDEST_BYTES + nth) * (_WIDEST_BYTES + 1) + width
    return np.repeat(address, width) + nth, np.full(len(meaning), number), meaning


def _said(held: _Held, meaning: int) -> str:
    name, index = held.member.source_map.space.locate(meaning // (_WIDEST_BYTES + 1) // _WIDEST_BYTES)
    return f"{held.tensor.name} on {held.member.program.worker} holds {name}.{index}"
