"""Random loaders that only move elements, and random loaders that compute: the probe against the element-wise truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, ids_by_running, noisy

Weights = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]

LOADERS = 300
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_shape(random: np.random.Generator) -> tuple[int, ...]:
    """Zero to five axes, at most about a thousand elements, now and then an empty one."""
    axes = int(random.integers(0, 6))
    shape = [int(extent) for extent in random.integers(1, 7 if axes > 3 else 14, axes)]
    if axes and random.random() < 0.05:
        shape[int(random.integers(axes))] = 0
    while np.prod(shape, dtype=int) > 1000:
        shape[int(np.argmax(shape))] //= 2
    return tuple(shape)


def random_moves(random: np.random.Generator, value: torch.Tensor, steps: int) -> list[Step]:
    """Steps that rearrange a tensor of this shape: slices, transposes, reshapes, flips, rolls, repeats, gathers."""
    out: list[Step] = []
    for _ in range(steps):
        kind = int(random.integers(9))
        axis = int(random.integers(value.ndim)) if value.ndim else 0
        extent = value.shape[axis] if value.ndim else 1
        step: Step
        if kind == 0 or not value.ndim or not value.numel():
            step = torch.Tensor.flatten
        elif kind == 1:
            first, last = sorted(int(edge) for edge in random.integers(0, extent + 1, 2))
            step = lambda t, a=axis, f=first, n=last - first: t.narrow(a, f, n)  # noqa: E731
        elif kind == 2:
            order = random.permutation(value.ndim).tolist()
            step = lambda t, o=order: t.permute(o)  # noqa: E731
        elif kind == 3:
            step = lambda t, a=axis: t.flip(a)  # noqa: E731
        elif kind == 4:
            turns = int(random.integers(1, 4))
            step = lambda t, a=axis, n=turns: t.roll(n, a)  # noqa: E731
        elif kind == 5:
            divisors = [d for d in range(1, extent + 1) if extent % d == 0]
            part = int(random.choice(divisors))
            step = lambda t, a=axis, p=part: t.unflatten(a, (-1, p)).transpose(a, a + 1).flatten(a, a + 1)  # noqa: E731
        elif kind == 6 and value.numel() < 500:
            step = lambda t, a=axis: torch.cat([t, t], a)  # noqa: E731
        elif kind == 7:
            chosen = torch.from_numpy(random.integers(0, extent, int(random.integers(1, extent + 1))))
            step = lambda t, a=axis, c=chosen: t.index_select(a, c)  # noqa: E731
        else:
            stride = int(random.integers(1, 4))
            step = lambda t, a=axis, s=stride: t.transpose(0, a)[::s].transpose(0, a)  # noqa: E731
        value = step(value)
        out.append(step)
    return out


def random_mover(random: np.random.Generator) -> tuple[Worker, CheckpointSpace]:
    """A checkpoint, and a worker whose loader places rearranged tensors into slices of its parameters."""
    names = [f"t{number}" for number in range(int(random.integers(1, 6)))]
    space = CheckpointSpace(TensorSpec(name, random_shape(random), str(random.choice(list(TORCH)))) for name in names)
    live: Live = {}
    chains: dict[str, list[tuple[str, list[Step], int]]] = {}
    for number in range(int(random.integers(1, 4))):
        parts, place = [], int(random.integers(0, 3))
        for _ in range(int(random.integers(1, 4))):
            source = str(random.choice(names))
            value = torch.zeros(space.spec(source).shape)
            moves = random_moves(random, value, int(random.integers(0, 5)))
            for move in moves:
                value = move(value)
            parts.append((source, moves, place))
            place += value.numel() + int(random.integers(0, 3))
        chains[f"p{number}"] = parts
        dtype = list(TORCH.values())[int(random.integers(3))]
        kept = noisy(max(place, 1), dtype, seed=int(random.integers(1 << 30)))
        if random.random() < 0.3:
            kept = noisy((max(place, 1), 2), dtype)[:, 1]
        elif place and random.random() < 0.5:
            divisors = [d for d in range(1, place + 1) if place % d == 0]
            kept = kept.reshape(int(random.choice(divisors)), -1)
        live[f"p{number}"] = kept

    def body(live: Live, weights: Weights) -> None:
        for name, parts in chains.items():
            flat = live[name].flatten()
            for source, moves, place in parts:
                value = weights[source]
                for move in moves:
                    value = move(value)
                flat[place : place + value.numel()] = value.reshape(-1).to(flat.dtype)
            live[name].copy_(flat.reshape(live[name].shape))

    return Worker(live, body), space


@pytest.mark.parametrize("seed", range(LOADERS // 10))
def test_random_movers(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(10):
        worker, space = random_mover(random)
        truth = ids_by_running(worker, space)
        if not any((ids > 0).any() for ids in truth.values()):
            continue
        found = worker.probe(space)
        plain = SourceMap.from_ids(space, truth, {name: found.dtype(name) for name in truth})
        for name, ids in truth.items():
            assert (found.ids(name) == ids).all(), name
            assert found.slice_copies(name) == plain.slice_copies(name), "not in canonical form"


@pytest.mark.parametrize("seed", range(LOADERS // 10))
def test_random_computers_beside_movers(seed: int) -> None:
    """Some elements are computed from two sources: they are never copies, and nobody else becomes a wrong one."""
    random = np.random.default_rng(1000 + seed)
    computers: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        torch.maximum,
        lambda x, y: x.abs(),
        lambda x, y: x.clamp(-2, 2),
        lambda x, y: torch.where(x.abs() < y.abs(), x, y),
        lambda x, y: x + y,
        lambda x, y: x * 0.5,
        lambda x, y: x.relu(),
        lambda x, y: x.to(torch.float8_e4m3fn).to(x.dtype),
    ]
    for _ in range(5):
        moved, space = random_mover(random)
        extra = int(random.integers(1, 200))
        sources = [TensorSpec(f"z{side}", (extra,), "F32") for side in "ab"]
        space = CheckpointSpace([*space.specs, *sources])
        compute = computers[int(random.integers(len(computers)))]
        count = int(random.integers(1, extra + 1))
        where = torch.from_numpy(random.permutation(extra)[:count])

        def body(
            live: Live,
            weights: Weights,
            moved: Worker = moved,
            compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = compute,
            where: torch.Tensor = where,
        ) -> None:
            moved.body(live, weights)
            live["z"].copy_(weights["za"])
            live["z"][where] = compute(weights["za"], weights["zb"]).to(live["z"].dtype)[where]

        worker = Worker({**moved.live, "z": noisy(extra)}, body)
        truth = ids_by_running(moved, space)
        found = worker.probe(space)
        for name, ids in truth.items():
            assert (found.ids(name) == ids).all(), name
        z = found.ids("z")
        own = np.arange(extra) + space.element_id("za", 0)
        computed = np.zeros(extra, dtype=bool)
        computed[where.numpy()] = True
        assert (z[computed] <= 0).all(), "a computed element is called a copy"
        assert ((z == own) | (z == -1))[~computed].all(), "a copied element is called something else"
