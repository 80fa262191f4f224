"""Parameters that share memory: whatever bytes two of them have in common must be copies of one checkpoint element.

A tied head and its embedding are one tensor under two names, which is fine while both are loaded from one checkpoint
tensor. Where maps say that they hold different elements, the last write would win and nobody would hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.runs import expand_ranges
from layout_algebra.source_map import SourceMap
from transfer_exec.binding import LiveTensor
from transfer_exec.errors import ProgramError
from transfer_exec.program import Program

_WIDEST_BYTES = 16


def check_aliases(program: Program, tensors: Sequence[LiveTensor], source_map: SourceMap) -> None:
    """Refuse memory in which two parameters' maps contradict each other.

    Parameters
    ----------
    program, tensors
        What is to be written, and where it is, from `transfer_exec.binding.live_tensors`.
    source_map
        The worker's; costs nothing for parameters that share no memory, else some 50 bytes a shared byte.

    Raises
    ------
    ProgramError
        Naming both parameters and the checkpoint element that each of them has at their first common byte.
    """
    group: list[int] = []
    reach = 0
    for start, stop, position in sorted(_spans(program, tensors)):
        if start >= reach:
            _check_group(program, tensors, source_map, group)
            group = []
        group.append(position)
        reach = max(reach, stop)
    _check_group(program, tensors, source_map, group)


def _spans(program: Program, tensors: Sequence[LiveTensor]) -> Iterator[tuple[int, int, int]]:
    """First byte, the one after the last, and position of every parameter."""
    for position, (tensor, live) in enumerate(zip(program.tensors, tensors, strict=True)):
        reaches = [(extent - 1) * step for extent, step in live.axes]
        first = live.address + sum(min(reach, 0) for reach in reaches)
        last = live.address + sum(max(reach, 0) for reach in reaches)
        if tensor.elements and not tensor.staged:
            yield first, last + dtype_of(tensor.dtype).item_bytes, position


def _check_group(
    program: Program, tensors: Sequence[LiveTensor], source_map: SourceMap, positions: Sequence[int]
) -> None:
    """Compare parameters that lie in one stretch of memory, byte by byte."""
    distinct: dict[tuple[object, ...], int] = {}
    for position in positions:
        of, live = program.tensors[position], tensors[position]
        copies = source_map[of.name].copies.rows.tobytes()
        distinct.setdefault((live.address, live.axes, of.dtype, copies), position)
    if len(distinct) < 2:
        return  # one parameter, by however many names
    parts = [_bytes_of(program, tensors, source_map, position) for position in distinct.values()]
    places, owners, meanings = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((owners, places))
    places, owners, meanings = places[order], owners[order], meanings[order]
    clash = np.flatnonzero((places[1:] == places[:-1]) & (meanings[1:] != meanings[:-1]))
    if len(clash):
        told = [
            f"{program.tensors[owners[at]].name} holds {_named(source_map, int(meanings[at]))}"
            for at in (clash[0], clash[0] + 1)
        ]
        raise ProgramError(
            f"{program.worker}: {' and '.join(told)} in the same memory, so one of them would be lost; "
            "give both the same source, or memory of their own"
        )


def _bytes_of(
    program: Program, tensors: Sequence[LiveTensor], source_map: SourceMap, position: int
) -> tuple[IdArray, IdArray, IdArray]:
    """Every byte that is a copy: its address, the parameter, and what it is a byte of."""
    tensor, live = program.tensors[position], tensors[position]
    width = dtype_of(tensor.dtype).item_bytes
    ids = source_map.ids(tensor.name).reshape(-1)
    address = np.array([live.address], dtype=np.int64)
    for extent, step in live.axes:
        address = (address[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    address, ids = address[ids > 0], ids[ids > 0]
    number = expand_ranges(np.zeros(len(ids), dtype=np.int64), np.full(len(ids), width))
    meaning = (np.repeat(ids, width) * _WIDEST_BYTES + number) * (_WIDEST_BYTES + 1) + width
    return np.repeat(address, width) + number, np.full(len(meaning), position), meaning


def _named(source_map: SourceMap, meaning: int) -> str:
    name, index = source_map.space.locate(meaning // (_WIDEST_BYTES + 1) // _WIDEST_BYTES)
    return f"{name}.{index}"
