"""Programs meet live memory: gather rows become rows of addresses.

A gather row counts a tensor's elements in row-major order, whatever its strides. Where the memory is one even line
(contiguous, a column, reversed, broadcast) that order is a matter of one multiplication; where it is not (a
transposed or cut view), a row is split wherever it leaves an axis of the memory. Tensors are numpy arrays or torch
tensors, on the CPU or on a device that the worker uses; torch is never imported here.

Everything that could go wrong with memory is refused here by parameter name, before a byte moves.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.runs import expand_ranges
from transfer_exec.errors import ProgramError
from transfer_exec.gather import Column, GatherTable, fold_rows
from transfer_exec.kernels.base import RowColumn
from transfer_exec.program import FetchColumn, Program, ProgramTensor
from transfer_exec.transport.shared_files import FilePlace, SharedRanges
from transfer_exec.transport.stretches import Stretches

_TORCH_NAMES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.uint16": "U16",
    "torch.int16": "I16",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.uint32": "U32",
    "torch.int32": "I32",
    "torch.float32": "F32",
    "torch.uint64": "U64",
    "torch.int64": "I64",
    "torch.float64": "F64",
    "torch.complex64": "C64",
}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Where a tensor's elements are.

    Attributes
    ----------
    address
        Of the element at index 0.
    axes
        ``(extent, byte stride)`` per axis, outermost first, with axes that continue each other fused and those of
        extent 1 dropped; never empty.
    keeps
        The object that owns the memory.
    """

    address: int
    axes: tuple[tuple[int, int], ...]
    keeps: object


def live_tensors(
    program: Program,
    memory: Mapping[str, object],
    staged: Mapping[str, object] | None = None,
    devices: Collection[str] = (),
) -> tuple[LiveTensor, ...]:
    """Find every tensor of a program, and refuse what does not fit.

    Parameters
    ----------
    program
        What is to be moved.
    memory
        A numpy array or torch tensor per parameter; others are ignored. numpy lacks BF16 and the 8-bit floats:
        unsigned integers of the same width stand for them. A map may read a tensor as another dtype of its width,
        where a loader took over bits (an integer tensor that holds the checkpoint's floats, or the other way round).
    staged
        Memory of the staged checkpoint tensors, which may have a parameter's name.
    devices
        Where torch tensors may be beside the host, as torch spells it.

    Returns
    -------
    tuple
        One for each of ``program.tensors``.

    Raises
    ------
    ProgramError
        Naming parameter, expected and got: a tensor that is missing or no tensor, of another shape or dtype, on
        another device, not aligned, and, where it is written, read-only or overlapping itself.
    """
    written = set(program.assemble.rows[:, Column.TENSOR].tolist())
    written |= {position for rows in program.fetch_rows for position in rows[:, FetchColumn.TENSOR].tolist()}
    out = []
    for position, tensor in enumerate(program.tensors):
        given = (staged or {}) if tensor.staged else memory
        if tensor.name not in given:
            raise ProgramError(
                f"{tensor.name} on {program.worker}: no memory was given; expected {tensor.dtype} {tensor.shape}"
            )
        out.append(locate(program.worker, tensor, given[tensor.name], devices, writes=position in written))
    return tuple(out)


def stretches_of(program: Program, tensors: Sequence[LiveTensor]) -> Stretches:
    """The memory of every tensor, for direct moves; of none that takes part in none.

    Raises
    ------
    ProgramError
        If a tensor that is read or written directly is not contiguous, or one that peers map is in no shared memory.
    """
    direct = {position for rows in program.fetch_rows for position in rows[:, FetchColumn.TENSOR].tolist()}
    direct |= set(program.lent)
    addresses, sizes = np.zeros((2, len(tensors)), dtype=np.int64)
    ranges = SharedRanges.of_this_process() if program.mapped else SharedRanges(())
    files: dict[int, FilePlace] = {}
    for position in sorted(direct):
        tensor, live = program.tensors[position], tensors[position]
        width = dtype_of(tensor.dtype).item_bytes
        if tensor.elements and live.axes != _fuse_axes((tensor.elements,), (width,), width):
            raise ProgramError(
                f"{tensor.name} on {program.worker}: has extents and byte strides {live.axes}; expected contiguous "
                "memory, which its elements go straight to or from; connect again"
            )
        addresses[position], sizes[position] = live.address, tensor.bytes
        if position in program.mapped:
            place = ranges.place(live.address, tensor.bytes)
            if place is None:
                raise ProgramError(
                    f"{tensor.name} on {program.worker}: is not in shared memory, which peers were to map; it was when "
                    "the plan was compiled, so connect again"
                )
            files[position] = place
    return Stretches(addresses, sizes, files)


def scattered_names(memory: Mapping[str, object]) -> frozenset[str]:
    """Names of what is no contiguous numpy array or torch tensor in host memory: what nothing can read directly."""
    torch = sys.modules.get("torch")
    out = set()
    for name, given in memory.items():
        if isinstance(given, np.ndarray):
            good = given.flags.c_contiguous
        elif torch is not None and isinstance(given, torch.Tensor):
            good = given.device.type == "cpu" and given.layout == torch.strided and given.is_contiguous()
        else:
            good = False
        if not good:
            out.add(name)
    return frozenset(out)


def shared_names(memory: Mapping[str, object]) -> frozenset[str]:
    """Names of what is contiguous in host memory and lies in a file that other processes can open and map."""
    ranges, scattered, torch = SharedRanges.of_this_process(), scattered_names(memory), sys.modules.get("torch")
    out = set()
    for name, given in memory.items():
        address, size = 0, 0
        if name in scattered:
            continue
        if isinstance(given, np.ndarray):
            address, size = given.ctypes.data, given.nbytes
        elif torch is not None and isinstance(given, torch.Tensor):
            address, size = given.data_ptr(), given.numel() * given.element_size()
        if ranges.place(address, size) is not None:
            out.add(name)
    return frozenset(out)


def bind(
    table: GatherTable, tensors: Sequence[LiveTensor], buffer_addresses: IdArray, *, packing: bool
) -> list[IdArray]:
    """Turn gather rows into rows of addresses.

    Parameters
    ----------
    table
        Rows over ``tensors``.
    tensors
        From `live_tensors`.
    buffer_addresses
        Of the four buffers' slots, shape ``(4, depth)``; round k uses slot ``k % depth``.
    packing
        Tensors are the source; otherwise they are the target.

    Returns
    -------
    list
        Of every round, its rows in order of tensors' addresses: int64, shape ``(n, 9)``, columns as in `RowColumn`.
    """
    rounds = np.repeat(np.arange(len(table.bounds) - 1), np.diff(table.bounds))
    even = np.array([len(tensor.axes) == 1 for tensor in tensors], dtype=bool)
    is_even = even[table.rows[:, Column.TENSOR]]
    parts = [(rounds[is_even], _even_rows(table.rows[is_even], tensors))]
    for position in np.flatnonzero(~even).tolist():
        mine = table.rows[:, Column.TENSOR] == position
        parts.append(_uneven_rows(rounds[mine], table.rows[mine], tensors[position]))
    rounds = np.concatenate([number for number, _ in parts])
    rows = np.concatenate([part for _, part in parts])
    order = np.lexsort((rows[:, Column.INDEX], rounds))
    rounds, rows = rounds[order], rows[order]
    out = np.empty((len(rows), len(RowColumn)), dtype=np.int64)
    tensor_side = (Column.INDEX, Column.INDEX_STRIDE, Column.INDEX_STEP)
    buffer_side = (Column.OFFSET, Column.OFFSET_STRIDE, Column.OFFSET_STEP)
    source, target = (tensor_side, buffer_side) if packing else (buffer_side, tensor_side)
    out[:, RowColumn.SOURCE : RowColumn.TARGET] = rows[:, source]
    out[:, RowColumn.TARGET : RowColumn.LENGTH] = rows[:, target]
    begins = buffer_addresses[rows[:, Column.BUFFER], rounds % buffer_addresses.shape[1]]
    out[:, RowColumn.TARGET if packing else RowColumn.SOURCE] += begins
    out[:, [RowColumn.LENGTH, RowColumn.COUNT, RowColumn.CODE]] = rows[:, [Column.LENGTH, Column.COUNT, Column.CODE]]
    return np.split(out, np.searchsorted(rounds, np.arange(1, len(table.bounds) - 1)))


def locate(
    worker: str, tensor: ProgramTensor, given: object, devices: Collection[str] = (), *, writes: bool
) -> LiveTensor:
    """Find one tensor of a worker, which is given as an array or a torch tensor, and refuse it if it does not fit.

    Raises
    ------
    ProgramError
        As `live_tensors`.
    """
    where = f"{tensor.name} on {worker}"
    torch = sys.modules.get("torch")
    if isinstance(given, np.ndarray):
        shape, strides, address = given.shape, given.strides, given.ctypes.data
        _check_numpy(where, tensor, given, writes=writes)
    elif torch is not None and isinstance(given, torch.Tensor):
        _check_torch(where, tensor, given, devices)
        width = given.element_size()
        shape, address = tuple(given.shape), given.data_ptr()
        strides = tuple(stride * width for stride in given.stride())
    else:
        raise ProgramError(f"{where}: got {type(given).__name__}; expected a numpy array or a torch tensor")
    if shape != tensor.shape:
        raise ProgramError(f"{where}: has shape {shape}, its map has {tensor.shape}; discover again and reconnect")
    width = dtype_of(tensor.dtype).item_bytes
    axes = _fuse_axes(shape, strides, width)
    if tensor.elements and (address % width or any(stride % width for _, stride in axes)):
        raise ProgramError(f"{where}: address or strides {strides} are no multiples of its {width} bytes an element")
    if writes and tensor.elements and _may_overlap(axes, width):
        raise ProgramError(
            f"{where}: shape {shape} with byte strides {strides} overlaps itself, so it cannot be written; "
            "give the library the tensor it was expanded from"
        )
    return LiveTensor(address, axes, given)


def _check_numpy(where: str, tensor: ProgramTensor, given: np.ndarray, *, writes: bool) -> None:
    expected = dtype_of(tensor.dtype).storage
    same_bits = expected is not None and given.dtype.itemsize == expected.itemsize and given.dtype.kind in "uV"
    if given.dtype != expected and not same_bits:
        raise ProgramError(
            f"{where}: numpy memory is {given.dtype}, its map has {tensor.dtype}; expected {expected} "
            "or unsigned integers of that width"
        )
    if not given.dtype.isnative:
        raise ProgramError(f"{where}: numpy memory is {given.dtype}, in foreign byte order; expected native order")
    if writes and not given.flags.writeable:
        raise ProgramError(f"{where}: numpy memory is read-only, and an update writes it")


def _check_torch(where: str, tensor: ProgramTensor, given: object, devices: Collection[str]) -> None:
    torch = sys.modules["torch"]
    assert isinstance(given, torch.Tensor)
    if given.device.type != "cpu" and str(given.device) not in devices:
        raise ProgramError(f"{where}: is on {given.device}; this executor moves {', '.join(['CPU', *devices])} memory")
    if given.layout != torch.strided:
        raise ProgramError(f"{where}: has layout {given.layout}; expected a strided tensor")
    dtype = _TORCH_NAMES.get(str(given.dtype))
    if dtype is None or (dtype != tensor.dtype and not _takes_over_bits(dtype, tensor.dtype)):
        raise ProgramError(f"{where}: is {given.dtype}, its map has {tensor.dtype}; discover again and reconnect")


def _takes_over_bits(dtype: str, read_as: str) -> bool:
    """Whether a map may read a tensor as another dtype: one width, and not two formats of floats."""
    one, other = dtype_of(dtype), dtype_of(read_as)
    return one.bits == other.bits and (one.kind, other.kind) != ("float", "float")


def _fuse_axes(shape: Sequence[int], strides: Sequence[int], width: int) -> tuple[tuple[int, int], ...]:
    axes: list[tuple[int, int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if axes and axes[-1][1] == extent * stride:
            axes[-1] = (axes[-1][0] * extent, stride)
        else:
            axes.append((extent, stride))
    return tuple(axes) or ((1, width),)


def _may_overlap(axes: Sequence[tuple[int, int]], width: int) -> bool:
    """Whether two elements may share a byte: false for every view that slicing and transposing can make."""
    reach = width
    for extent, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if extent > 1 and abs(stride) < reach:
            return True
        reach += (extent - 1) * abs(stride)
    return False


def _even_rows(rows: IdArray, tensors: Sequence[LiveTensor]) -> IdArray:
    """Indices become addresses; strides and steps become bytes."""
    out = rows.copy()
    unit = np.array([tensor.axes[0][1] for tensor in tensors], dtype=np.int64)[rows[:, Column.TENSOR]]
    begin = np.array([tensor.address for tensor in tensors], dtype=np.int64)[rows[:, Column.TENSOR]]
    for column in (Column.INDEX, Column.INDEX_STRIDE, Column.INDEX_STEP):
        out[:, column] *= unit
    out[:, Column.INDEX] += begin
    return out


def _uneven_rows(rounds: IdArray, rows: IdArray, tensor: LiveTensor) -> tuple[IdArray, IdArray]:
    """Rows of one axis each, split where they leave an axis of the memory, then folded again."""
    counts = rows[:, Column.COUNT]
    owner = np.repeat(np.arange(len(rows)), counts)
    step = expand_ranges(np.zeros(len(rows), dtype=np.int64), counts)
    index = rows[owner, Column.INDEX] + step * rows[owner, Column.INDEX_STEP]
    offset = rows[owner, Column.OFFSET] + step * rows[owner, Column.OFFSET_STEP]
    lines = np.stack([index, rows[owner, Column.INDEX_STRIDE], rows[owner, Column.LENGTH]], axis=1)
    pieces = split_lines(lines, tensor.axes)
    of = owner[pieces[:, 0]]
    out = rows[of].copy()
    out[:, Column.COUNT] = 1
    out[:, Column.INDEX_STEP] = 0
    out[:, Column.OFFSET_STEP] = 0
    out[:, Column.LENGTH] = pieces[:, 2]
    out[:, Column.OFFSET] = offset[pieces[:, 0]] + pieces[:, 1] * out[:, Column.OFFSET_STRIDE]
    out[:, Column.INDEX] = tensor.address + pieces[:, 3]
    out[:, Column.INDEX_STRIDE] = pieces[:, 4]
    return fold_rows(rounds[of], out)


def split_lines(lines: IdArray, axes: Sequence[tuple[int, int]]) -> IdArray:
    """Cut evenly spaced row-major indices into stretches that are evenly spaced in memory.

    Parameters
    ----------
    lines
        First index, step, length; shape ``(n, 3)``.
    axes
        Extent and byte stride per axis, outermost first.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(m, 5)``: line, rank of the first element in it, length, byte offset of that element, byte
        step. A step of less than the innermost extent gives one piece per innermost row; a multiple of it goes on
        to the axes outside; any other gives single elements.
    """
    start, step, length = lines.T
    number = np.arange(len(lines), dtype=np.int64)
    extent, stride = axes[-1]
    if len(axes) == 1:
        return np.stack([number, np.zeros_like(number), length, start * stride, step * stride], axis=1)
    back = step < 0
    start = np.where(back, start + (length - 1) * step, start)
    step = np.where(length == 1, extent, np.abs(step))
    along = step % extent == 0
    outer = split_lines(np.stack([start // extent, step // extent, length], axis=1)[along], axes[:-1])
    outer[:, 0] = number[along][outer[:, 0]]
    outer[:, 3] += start[outer[:, 0]] % extent * stride
    across = np.flatnonzero(~along)
    first, last = start[across], start[across] + (length[across] - 1) * step[across]
    rows = np.where(step[across] < extent, last // extent - first // extent + 1, length[across])
    line = np.repeat(across, rows)
    nth = expand_ranges(np.zeros(len(across), dtype=np.int64), rows)
    edge = (start[line] // extent + nth) * extent
    single = step[line] > extent
    low = np.where(single, nth, np.maximum(-((start[line] - edge) // step[line]), 0))
    high = np.where(single, nth + 1, np.minimum(-((start[line] - edge - extent) // step[line]), length[line]))
    index = start[line] + low * step[line]
    inner = np.stack([line, low, high - low, _byte_offsets(index, axes), step[line] * stride], axis=1)
    pieces = np.concatenate([outer, inner])
    turned = back[pieces[:, 0]]
    pieces[turned, 1] = length[pieces[turned, 0]] - pieces[turned, 1] - pieces[turned, 2]
    pieces[turned, 3] += (pieces[turned, 2] - 1) * pieces[turned, 4]
    pieces[turned, 4] *= -1
    return pieces


def _byte_offsets(index: IdArray, axes: Sequence[tuple[int, int]]) -> IdArray:
    out = np.zeros_like(index)
    for extent, stride in reversed(axes):
        out += index % extent * stride
        index = index // extent
    return out
