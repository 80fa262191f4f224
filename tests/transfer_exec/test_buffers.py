"""Memory: any strides bind, everything unfit is refused by name, and buffers are as large as the plan says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.binding import live_tensors, split_lines
from transfer_exec.buffers import open_buffers
from transfer_exec.compiler import compile_program
from transfer_exec.errors import ProgramError
from transfer_exec.plan import Hop, Plan, Route, Stage
from transfer_exec.program import Program
from transfer_exec.regions import Buffer
from transfer_exec.transport.base import Transport
from transfer_exec.transport.loopback import LoopbackNetwork
from transfer_exec.transport.shared_memory import SharedMemoryTransport

SPACE = CheckpointSpace([TensorSpec("w", (4, 6), "F32")])


def program_of(worker: str, *, dtype: str = "F32") -> Program:
    """One trainer t with all of w, one rollout e that needs it."""
    source_map = SourceMap.from_ids(SPACE, {"w": np.arange(1, 25).reshape(4, 6)}, {"w": dtype})
    route = Route(source_map.held(), 4, "t", (Hop(Stage.RECEIVE, "t", "e"),))
    plan = Plan(SPACE.digest(), ("t",), ("e",), (0, 1), (route,), 5, 64, 1.0, "t", 1.0, 1.0)
    return compile_program(plan, worker, source_map)


def refuse(match: str, given: object, *, worker: str = "e", dtype: str = "F32") -> None:
    with pytest.raises(ProgramError, match=match):
        live_tensors(program_of(worker, dtype=dtype), {"w": given})


@pytest.mark.parametrize("seed", range(60))
def test_lines_through_memory_of_any_axes(seed: int) -> None:
    """Every element of every line is in one piece, at the address that numpy's own indexing gives."""
    rng = np.random.default_rng(seed)
    axes = [(int(extent), int(rng.integers(-50, 50))) for extent in rng.integers(2, 7, rng.integers(1, 4))]
    total = int(np.prod([extent for extent, _ in axes]))
    offsets = np.zeros([extent for extent, _ in axes], dtype=np.int64)
    for axis, (extent, stride) in enumerate(axes):
        offsets += (np.arange(extent) * stride).reshape([-1 if k == axis else 1 for k in range(len(axes))])
    lines = []
    for _ in range(6):
        length = int(rng.integers(1, total + 1))
        step = int(rng.choice([-8, -3, -2, -1, 1, 2, 3, 4, 5, 6, 12]))
        length = min(length, (total - 1) // abs(step) + 1)
        low = int(rng.integers(0, total - (length - 1) * abs(step)))
        lines.append((low if step > 0 else low - (length - 1) * step, step, length))
    pieces = split_lines(np.array(lines, dtype=np.int64), axes)
    got = [dict[int, int]() for _ in lines]
    for line, rank, length, offset, step in pieces.tolist():
        assert length > 0
        for k in range(length):
            assert rank + k not in got[line]
            got[line][rank + k] = offset + k * step
    for found, (start, step, length) in zip(got, lines, strict=True):
        expected = offsets.reshape(-1)[start + step * np.arange(length)]
        assert [found[k] for k in range(length)] == expected.tolist()


def test_axes_that_continue_each_other_are_one() -> None:
    program = program_of("t")
    whole = np.zeros((4, 6), dtype=np.float32)
    for memory, axes in (
        (whole, ((24, 4),)),
        (np.zeros((6, 4), dtype=np.float32).T, ((4, 4), (6, 16))),
        (np.zeros((4, 12), dtype=np.float32)[:, ::2], ((24, 8),)),
        (whole[::-1, ::-1], ((24, -4),)),
        (np.zeros((4, 9), dtype=np.float32)[:, 1:7], ((4, 36), (6, 4))),
        (np.broadcast_to(np.float32(1), (4, 6)), ((24, 0),)),
        (torch.zeros(4, 6), ((24, 4),)),
        (torch.zeros(6, 4).T, ((4, 4), (6, 16))),
        (torch.zeros(1).expand(4, 6), ((24, 0),)),
    ):
        (tensor,) = live_tensors(program, {"w": memory})
        assert tensor.axes == axes
        assert tensor.keeps is memory


def test_torch_storage_offsets_count() -> None:
    base = torch.zeros(4, 9)
    (tensor,) = live_tensors(program_of("e"), {"w": base[:, 2:8]})
    assert tensor.address == base.data_ptr() + 8


# refusals: parameter, expected, got


def test_memory_that_is_missing_or_no_tensor() -> None:
    with pytest.raises(ProgramError, match=r"w on e: no memory was given; expected F32 \(4, 6\)"):
        live_tensors(program_of("e"), {})
    refuse("w on e: got list; expected a numpy array or a torch tensor", [1.0])


def test_shapes_and_dtypes_that_differ_from_the_map() -> None:
    refuse(r"w on e: has shape \(6, 4\), its map has \(4, 6\)", np.zeros((6, 4), dtype=np.float32))
    refuse(r"w on e: has shape \(24,\), its map has \(4, 6\)", torch.zeros(24))
    refuse("w on e: numpy memory is float64, its map has F32; expected float32", np.zeros((4, 6)))
    refuse("w on e: numpy memory is int32, its map has F32", np.zeros((4, 6), dtype=np.int32))
    refuse("w on e: numpy memory is float16, its map has BF16", np.zeros((4, 6), dtype=np.float16), dtype="BF16")
    refuse("w on e: is torch.bfloat16, its map has F32", torch.zeros(4, 6, dtype=torch.bfloat16))
    refuse("w on e: is torch.float16, its map has BF16", torch.zeros(4, 6, dtype=torch.float16), dtype="BF16")
    refuse("foreign byte order", np.zeros((4, 6), dtype=">u4"))
    for good in (np.zeros((4, 6), dtype=np.uint16), torch.zeros(4, 6, dtype=torch.bfloat16)):
        live_tensors(program_of("e", dtype="BF16"), {"w": good})
    live_tensors(program_of("e"), {"w": np.zeros((4, 6), dtype=np.uint32)})


def test_memory_that_cannot_be_written() -> None:
    frozen = np.zeros((4, 6), dtype=np.float32)
    frozen.setflags(write=False)
    refuse("w on e: numpy memory is read-only", frozen)
    live_tensors(program_of("t"), {"w": frozen})
    refuse(r"overlaps itself.*expanded from", np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (4, 6), (0, 4)))
    refuse("overlaps itself", torch.zeros(1, 6).expand(4, 6))
    refuse("overlaps itself", torch.zeros(24).as_strided((4, 6), (1, 2)))
    live_tensors(program_of("t"), {"w": torch.zeros(1, 6).expand(4, 6)})


def test_memory_elsewhere_or_unaligned() -> None:
    refuse("w on e: is on meta; this executor moves CPU memory", torch.zeros(4, 6, device="meta"))
    refuse("has layout torch.sparse_coo", torch.zeros(4, 6).to_sparse())
    raw = np.zeros(4 * 6 * 4 + 1, dtype=np.uint8)
    refuse("are no multiples of its 4 bytes", raw[1:].view(np.float32).reshape(4, 6))
    packed = np.zeros((4, 6), dtype=np.dtype([("a", "u1"), ("w", "<f4")]))["w"]
    refuse("are no multiples of its 4 bytes", packed)


# buffers


@pytest.mark.parametrize("make", [LoopbackNetwork().transport, SharedMemoryTransport])
def test_buffers_are_exactly_the_programs(make: type[SharedMemoryTransport]) -> None:
    """5 rounds of 24 elements: 5, 5, 5, 5 and 4; nothing for stages without traffic."""
    transport: Transport = make("e")
    program = program_of("e")
    buffers = open_buffers(program, transport, 3)
    assert {buffer: [slot.nbytes for slot in slots] for buffer, slots in buffers.memory.items()} == {
        Buffer.PACK: [0, 0, 0],
        Buffer.RECEIVE: [20, 20, 20],
        Buffer.EXTERNAL: [0, 0, 0],
        Buffer.INTERNAL: [0, 0, 0],
    }
    assert (buffers.depth, buffers.total_bytes) == (3, 60)
    assert set(buffers.handles) == {Buffer.RECEIVE}
    endpoint = transport.endpoint("plan")
    assert [(region.name, region.size_bytes) for region in endpoint.regions] == [
        ("RECEIVE/0", 20),
        ("RECEIVE/1", 20),
        ("RECEIVE/2", 20),
    ]
    assert endpoint.channels == program.flags == 1
    received = buffers.memory[Buffer.RECEIVE]
    assert buffers.addresses[1].tolist() == [slot.ctypes.data for slot in received]
    assert all(slot.base is received[0].base for slot in received), "one allocation"
    assert not any(address % 64 for address in buffers.addresses[1].tolist())


def test_no_more_slots_than_rounds_and_at_least_one() -> None:
    program = program_of("e")
    assert open_buffers(program, LoopbackNetwork().transport("e"), 9).depth == program.rounds == 5
    for depth in (0, -1, True):
        with pytest.raises(ProgramError, match=r"e: depth is .*; expected at least one round under way"):
            open_buffers(program, LoopbackNetwork().transport("e"), depth)
