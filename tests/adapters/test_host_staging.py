"""Copies in host memory: every element that a map copies, and no other, whatever the tensors' strides."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.host_staging import HostCopies
from adapters.torch_bits import bits_view, torch_dtype
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import ProgramError
from transfer_exec.transport.shared_files import SharedRanges


def live_view(made: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of random bits: contiguous, transposed, cut out of a larger one, or every other element of one."""
    order = made.permutation(len(shape)).tolist()
    cuts = made.integers(0, 3, len(shape)).tolist()
    steps = made.integers(1, 3, len(shape)).tolist()
    item = torch_dtype(dtype).itemsize
    whole = [shape[axis] * steps[axis] + cuts[axis] for axis in order]
    memory = torch.from_numpy(made.integers(0, 256, (int(np.prod(whole)) * item,), dtype=np.uint8))
    base = memory.view(torch_dtype(dtype)).reshape(whole)
    view = base.permute(np.argsort(order).tolist())
    for axis, (size, cut, step) in enumerate(zip(shape, cuts, steps, strict=True)):
        view = view.narrow(axis, cut, size * step)[(slice(None),) * axis + (slice(None, None, step),)]
    return view


def random_map(made: np.random.Generator, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> SourceMap:
    """Every parameter whole, in part, transposed, or not fed at all, from a checkpoint tensor of its own dtype."""
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    space = CheckpointSpace([TensorSpec(f"c.{name}", (2 * size + 1,), dtypes[name]) for name, size in sizes.items()])
    ids = {}
    for name, shape in shapes.items():
        kind = made.integers(0, 5)
        mine = space.id_range(f"c.{name}")[0] + np.arange(sizes[name], dtype=np.int64).reshape(shape)
        if kind == 1:
            mine = mine.reshape(-1)[::-1].reshape(shape)
        if kind == 2:
            mine = mine.reshape(shape[::-1]).transpose()
        if kind == 3:
            mine = np.where(made.random(shape) < 0.7, mine, made.integers(-1, 1, shape))
        ids[name] = mine * (kind != 4)
        if kind == 3 and len(shape) == 2:
            ids[name][made.integers(0, shape[0]) :] = 0
    return SourceMap.from_ids(space, ids, dtypes)


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32), threads=st.integers(1, 2))
def test_every_element_that_is_copied_and_no_other(seed: int, threads: int) -> None:
    made = np.random.default_rng(seed)
    shapes = {f"p{k}": tuple(made.integers(1, 9, made.integers(0, 4)).tolist()) for k in range(4)}
    dtypes = {name: str(made.choice(["BF16", "F32", "F8_E4M3", "I64"])) for name in shapes}
    found = random_map(made, shapes, dtypes)
    live = {name: live_view(made, shape, dtypes[name]) for name, shape in shapes.items()}
    before = {name: np.array(bits_view(tensor)) for name, tensor in live.items()}

    inwards = HostCopies("trainer/0", live, found, outwards=False, threads=threads)
    inwards.copy(live)
    for name, tensor in inwards.tensors.items():
        assert np.array_equal(bits_view(tensor), before[name])

    outwards = HostCopies("engine/a/0", live, found, outwards=True, threads=threads)
    assert set(outwards.tensors) == {name for name in shapes if (found.ids(name) > 0).any()}
    for tensor in outwards.tensors.values():
        bits = bits_view(tensor)
        bits[...] = made.integers(0, 256, bits.shape, dtype=np.uint8)
    outwards.copy(live)
    for name, tensor in live.items():
        copied = found.ids(name) > 0
        landed = bits_view(outwards.tensors[name]) if name in outwards.tensors else before[name]
        assert np.array_equal(bits_view(tensor), np.where(copied, landed, before[name])), name


def one_map(shape: tuple[int, ...]) -> SourceMap:
    space = CheckpointSpace([TensorSpec("w", shape, "BF16")])
    return SourceMap.from_ids(space, {"w": np.arange(1, int(np.prod(shape)) + 1).reshape(shape)})


def test_memory_around_a_view_is_not_touched() -> None:
    whole = torch.full((6, 8), 7.0, dtype=torch.bfloat16)
    live = {"w": whole[1:5, 2:6]}
    copies = HostCopies("engine/a/0", live, one_map((4, 4)), outwards=True)
    copies.tensors["w"].fill_(1)
    copies.copy(live)
    assert whole.sum() == 7 * (48 - 16) + 16


def test_a_transposed_tensor_is_kept_in_the_order_of_its_memory() -> None:
    live = {"w": torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4).t()}
    copies = HostCopies("trainer/0", live, one_map((4, 3)), outwards=False)
    assert copies.tensors["w"].stride() == live["w"].stride()
    copies.copy(live)
    assert torch.equal(copies.tensors["w"], live["w"])


def test_names_with_one_memory_have_one_copy() -> None:
    tied = torch.zeros(4, 4, dtype=torch.bfloat16)
    space = CheckpointSpace([TensorSpec("w", (4, 4), "BF16")])
    ids = np.arange(1, 17).reshape(4, 4)
    found = SourceMap.from_ids(space, {"embed": ids, "head": ids})
    live = {"embed": tied, "head": tied}
    copies = HostCopies("engine/a/0", live, found, outwards=True)
    assert copies.tensors["embed"].data_ptr() == copies.tensors["head"].data_ptr()
    assert copies.bytes == 64
    copies.tensors["head"].fill_(3)
    copies.copy(live)
    assert set(tied.flatten().tolist()) == {3}


def test_a_trainers_arena_is_in_a_file_that_nobody_can_shrink() -> None:
    live = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    trainers, rollouts = (HostCopies("a", live, one_map((4, 4)), outwards=outwards) for outwards in (False, True))
    ranges = SharedRanges.of_this_process()
    place = ranges.place(trainers.tensors["w"].data_ptr(), 32)
    assert place is not None
    with pytest.raises(PermissionError):
        os.truncate(place.path, 0)
    assert ranges.place(rollouts.tensors["w"].data_ptr(), 32) is None, "nobody maps a rollout's"


def test_an_arena_is_taken_over_only_if_it_fits() -> None:
    live = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    first = HostCopies("trainer/0", live, one_map((4, 4)), outwards=False)
    again = HostCopies("trainer/0", live, one_map((4, 4)), outwards=False, arena=first.arena)
    assert again.arena.data_ptr() == first.arena.data_ptr()
    larger = {"w": torch.zeros(8, 8, dtype=torch.bfloat16)}
    other = HostCopies("trainer/0", larger, one_map((8, 8)), outwards=False, arena=first.arena)
    assert other.bytes == 128


def test_after_attach_the_new_memory_is_used() -> None:
    live = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    copies = HostCopies("engine/a/0", live, one_map((4, 4)), outwards=True)
    copies.tensors["w"].fill_(5)
    moved = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    copies.attach(moved)
    copies.copy(moved)
    assert (live["w"].sum(), moved["w"].sum()) == (0, 80)


def test_a_worker_without_anything() -> None:
    copies = HostCopies(
        "trainer/1", {}, SourceMap.from_ids(CheckpointSpace([TensorSpec("w", (2,), "F32")]), {}), outwards=False
    )
    copies.copy({})
    assert (copies.bytes, copies.tensors) == (0, {})


def test_what_does_not_fit_is_refused_by_name() -> None:
    expanded = {"w": torch.zeros(1, 4, dtype=torch.bfloat16).expand(4, 4)}
    with pytest.raises(ProgramError, match=r"w on engine/a/0: .* overlaps itself"):
        HostCopies("engine/a/0", expanded, one_map((4, 4)), outwards=True)
    HostCopies("trainer/0", expanded, one_map((4, 4)), outwards=False).copy(expanded)
    with pytest.raises(ProgramError, match=r"w on engine/a/0: is torch.float32"):
        HostCopies("engine/a/0", {"w": torch.zeros(4, 4)}, one_map((4, 4)), outwards=True)
    with pytest.raises(ProgramError, match=r"w on engine/a/0: has shape \(16,\)"):
        HostCopies("engine/a/0", {"w": torch.zeros(16, dtype=torch.bfloat16)}, one_map((4, 4)), outwards=True)
    with pytest.raises(ProgramError, match=r"w on engine/a/0: has shape"):
        HostCopies("engine/a/0", {"w": torch.zeros(4, 5, dtype=torch.bfloat16)}, one_map((4, 4)), outwards=True)


class OnDevice(HostCopies):
    """Treats every tensor as a GPU's: all copies go through torch."""

    def copy(self, live: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        for place in self._places:
            self._copy_device(place, live[place.name])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_way_of_devices_copies_the_same(seed: int) -> None:
    made = np.random.default_rng(seed)
    shapes = {f"p{k}": tuple(made.integers(1, 7, made.integers(1, 4)).tolist()) for k in range(3)}
    dtypes = {name: str(made.choice(["BF16", "F32", "F8_E4M3"])) for name in shapes}
    found = random_map(made, shapes, dtypes)
    live = {name: live_view(made, shape, dtypes[name]) for name, shape in shapes.items()}
    twin = {name: torch.from_numpy(np.array(bits_view(t))).view(torch_dtype(dtypes[name])) for name, t in live.items()}
    for outwards in (False, True):
        plain = HostCopies("engine/a/0", live, found, outwards=outwards)
        device = OnDevice("engine/a/0", twin, found, outwards=outwards)
        for copies in (plain, device):
            copies.arena.fill_(9)
        plain.copy(live)
        device.copy(twin)
        for name in shapes:
            assert np.array_equal(bits_view(live[name]), bits_view(twin[name])), (name, outwards)
            if name in plain.tensors:
                assert np.array_equal(bits_view(plain.tensors[name]), bits_view(device.tensors[name]))
