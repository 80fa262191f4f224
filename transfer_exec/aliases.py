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
from transfer_exec.memory_box import MemoryBox
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
    """A parameter of a member, and where it is."""

    box: MemoryBox
    member: Member
    tensor: ProgramTensor
    live: LiveTensor

    def same_as(self, other: _Held) -> bool:
        """Whether both are one view with one map."""
        view, there = ((one.live.address, one.live.axes, one.tensor.dtype) for one in (self, other))
        copies, theirs = (one.member.source_map[one.tensor.name].copies.rows for one in (self, other))
        return view == there and np.array_equal(copies, theirs)


def check_aliases(members: Sequence[Member]) -> None:
    """Refuse memory that is to be written and in which two parameters' maps contradict each other.

    Parameters that share no byte cost next to nothing, others some 30 bytes for each byte of theirs.

    Raises
    ------
    ProgramError
        Naming both parameters and what each of them holds at their first common byte.
    """
    near: list[_Held] = []
    for held in sorted(_parameters(members), key=lambda held: held.box):
        near = [one for one in near if one.box.stop > held.box.start]
        for one in near:
            if (one.member.writes or held.member.writes) and not one.box.apart(held.box) and not one.same_as(held):
                _compare(one, held)
        near.append(held)


def _parameters(members: Sequence[Member]) -> Iterator[_Held]:
    for member in members:
        for tensor, live in zip(member.program.tensors, member.tensors, strict=True):
            if tensor.elements and not tensor.staged:
                extents, steps = zip(*live.axes, strict=True)
                box = MemoryBox.of(live.address, extents, steps, dtype_of(tensor.dtype).item_bytes)
                yield _Held(box, member, tensor, live)


def _compare(one: _Held, other: _Held) -> None:
    """Refuse two parameters of which some byte is to be two things."""
    (places, meanings), (there, theirs) = _bytes_of(one), _bytes_of(other)
    _, at, of = np.intersect1d(places, there, return_indices=True)
    clash = np.flatnonzero(meanings[at] != theirs[of])
    if len(clash):
        said = _said(one, int(meanings[at[clash[0]]])), _said(other, int(theirs[of[clash[0]]]))
        raise ProgramError(
            f"{said[0]} and {said[1]} in the same memory, where one would be lost; give both the same source, or "
            "memory of their own"
        )


def _bytes_of(held: _Held) -> tuple[IdArray, IdArray]:
    """Every byte that is a copy: its address, and what it is a byte of."""
    width = held.box.item
    ids = held.member.source_map.ids(held.tensor.name).reshape(-1)
    address = np.array([held.live.address], dtype=np.int64)
    for extent, step in held.live.axes:
        address = (address[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    address, ids = address[ids > 0], ids[ids > 0]
    nth = expand_ranges(np.zeros(len(ids), dtype=np.int64), np.full(len(ids), width))
    meaning = (np.repeat(ids, width) * _WIDEST_BYTES + nth) * (_WIDEST_BYTES + 1) + width
    return np.repeat(address, width) + nth, meaning


def _said(held: _Held, meaning: int) -> str:
    name, index = held.member.source_map.space.locate(meaning // (_WIDEST_BYTES + 1) // _WIDEST_BYTES)
    return f"{held.tensor.name} on {held.member.program.worker} holds {name}.{index}"
