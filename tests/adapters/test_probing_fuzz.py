"""Twenty thousand random loaders against the element-wise truth: what each does to ids, it does to the map.

A worker has hundreds of parameters, each filled by a loader of its own out of slices, transposes, reshapes,
interleavings, gathers, repeats and paddings, through conversions and views. The truth about one comes from running the
same steps on ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from adapters.torch_bits import bit_dtype, dtype_name, torch_dtype
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.fakes import Live, Worker, noisy

Weights = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOADERS = 550
WORKERS = 38
COMPUTING = 6
PALETTES = (
    ("BF16", "F32", "F16"),
    ("BF16", "F32", "I32", "I64"),
    ("F8_E4M3", "F32", "BF16"),
    ("F8_E4M3", "U8", "F32"),
    ("F64", "F32", "I16", "U16"),
    ("BF16",),
    ("I8", "F16", "I32"),
    ("F8_E5M2", "BF16", "F64"),
)
CONVERTED = {
    "BF16": ("F32", "F64"),
    "F16": ("F32", "F64"),
    "F32": ("F64", "BF16", "F16"),
    "F64": ("F32", "BF16"),
    "F8_E4M3": ("BF16", "F16", "F32"),
    "F8_E5M2": ("BF16", "F16", "F32"),
    "I8": ("I32", "I64", "F32", "I16"),
    "U8": ("I32", "F32", "BF16", "U16"),
    "I16": ("I32", "F32", "BF16"),
    "U16": ("I64", "F32"),
    "I32": ("I64", "F32", "F64"),
    "I64": ("I32", "F32", "F64"),
}
"""Where every code of a palette with that dtype is exact."""
VIEWED = {
    "BF16": ("I16", "U16"),
    "F16": ("I16",),
    "F32": ("I32", "U32"),
    "F64": ("I64",),
    "F8_E4M3": ("U8", "I8"),
    "F8_E5M2": ("U8",),
    "U8": ("I8", "F8_E4M3", "F8_E8M0"),
    "I8": ("U8",),
    "I16": ("BF16", "F16", "U16"),
    "U16": ("I16", "BF16"),
    "I32": ("F32", "U32"),
    "I64": ("F64", "U64"),
}


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


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one checkpoint tensor, rearranged, at a place of a flat parameter."""

    source: str
    moves: tuple[Step, ...]
    place: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for move in self.moves:
            tensor = move(tensor)
        return tensor.reshape(-1)


@dataclass(frozen=True, slots=True)
class Loader:
    """What fills one parameter: parts in order, by value or by bits; one element may come from elsewhere."""

    parts: tuple[Part, ...]
    by_bits: bool
    fill: float | None
    moved: tuple[int, str, int] | None = None

    def fill_ids(self, flat: torch.Tensor, ids: Weights) -> None:
        """The truth."""
        for part in self.parts:
            found = part.of(ids[part.source])
            flat[part.place : part.place + found.numel()] = found
        if self.moved is not None:
            at, source, element = self.moved
            flat[at] = ids[source].reshape(-1)[element]

    def run(self, target: torch.Tensor, weights: Weights) -> None:
        """The black box."""
        flat = bits_of_flat(target)
        if self.fill is not None:
            flat[...] = bits_of_flat(torch.full((1,), self.fill, dtype=torch.float64).to(target.dtype))
        for part in self.parts:
            found = part.of(weights[part.source].view(bit_dtype(weights[part.source].element_size())))
            flat[part.place : part.place + found.numel()] = self._shown(found, part.source, weights, target)
        if self.moved is not None:
            at, source, element = self.moved
            found = weights[source].view(bit_dtype(weights[source].element_size())).reshape(-1)[element : element + 1]
            flat[at] = self._shown(found, source, weights, target)[0]
        target.view(flat.dtype).copy_(flat.reshape(target.shape))

    def _shown(self, bits: torch.Tensor, source: str, weights: Weights, target: torch.Tensor) -> torch.Tensor:
        dtype = weights[source].dtype
        return bits if self.by_bits or dtype == target.dtype else bits_of_flat(bits.view(dtype).to(target.dtype))


def bits_of_flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(bit_dtype(tensor.element_size())).reshape(-1).clone()


def random_space(random: np.random.Generator, palette: tuple[str, ...]) -> CheckpointSpace:
    return CheckpointSpace(
        TensorSpec(f"t{number}", random_shape(random), str(random.choice(palette))) for number in range(24)
    )


def random_loader(random: np.random.Generator, space: CheckpointSpace) -> tuple[Loader, torch.Tensor]:
    """A loader and the parameter that it fills."""
    first = space.specs[int(random.integers(len(space)))]
    kind = random.random()
    by_bits = kind < 0.15
    choice = VIEWED[first.dtype] if by_bits else CONVERTED[first.dtype] if kind < 0.4 else (first.dtype,)
    dtype = str(random.choice(choice))
    fitting = [spec for spec in space.specs if spec.dtype == first.dtype]
    if not by_bits:
        fitting = [spec for spec in space.specs if spec.dtype == dtype or dtype in CONVERTED[spec.dtype]]
    parts, place = [], int(random.integers(0, 3))
    for number in range(int(random.integers(1, 4))):
        spec = first if number == 0 else fitting[int(random.integers(len(fitting)))]
        value = torch.zeros(spec.shape, dtype=torch.int8)
        moves = random_moves(random, value, int(random.integers(0, 5)))
        part = Part(spec.name, tuple(moves), place)
        parts.append(part)
        place += part.of(value).numel() + int(random.integers(0, 3))
    fill = None if random.random() < 0.7 else float(random.choice([0.0, 1.0, 64.0]))
    target = noisy(max(place, 1), torch_dtype(dtype), seed=int(random.integers(1 << 30)))
    if random.random() < 0.2:
        target = noisy((max(place, 1), 2), torch_dtype(dtype))[:, 1]
    elif place:
        target = target.reshape(random_split(random, place))
    return Loader(tuple(parts), by_bits, fill if dtype != "F8_E8M0" else None), target


def random_split(random: np.random.Generator, size: int) -> tuple[int, ...]:
    """A shape of one to five axes with that many elements."""
    shape = [size]
    for _ in range(int(random.integers(0, 5))):
        divisors = [d for d in range(1, shape[-1] + 1) if shape[-1] % d == 0]
        cut = int(random.choice(divisors))
        shape[-1:] = [cut, shape[-1] // cut]
    return tuple(shape)


def with_one_element_off(
    random: np.random.Generator, space: CheckpointSpace, loader: Loader, target: torch.Tensor
) -> Loader | None:
    """The same loader, except that one element comes from elsewhere; None where there is nothing else."""
    part = loader.parts[0]
    length = part.of(torch.zeros(space.spec(part.source).shape, dtype=torch.int8)).numel()
    elements = space.spec(part.source).elements
    if not length or elements < 2:
        return None
    at, element = part.place + int(random.integers(length)), int(random.integers(elements))
    return Loader(loader.parts, loader.by_bits, loader.fill, (at, part.source, element))


def ids_of(space: CheckpointSpace) -> Weights:
    return {spec.name: torch.arange(*space.id_range(spec.name)).reshape(spec.shape) for spec in space.specs}


@pytest.mark.parametrize("seed", range(WORKERS))
def test_random_movers(seed: int) -> None:
    """Every map is the truth and in canonical form; where one element is off, the map differs there and only there."""
    random = np.random.default_rng(seed)
    space = random_space(random, PALETTES[seed % len(PALETTES)])
    loaders: dict[str, Loader] = {}
    live: Live = {}
    twins: list[tuple[str, str]] = []
    while len(loaders) < LOADERS:
        name = f"p{len(loaders)}"
        loaders[name], live[name] = random_loader(random, space)
        off = with_one_element_off(random, space, loaders[name], live[name]) if random.random() < 0.15 else None
        if off is not None:
            loaders[f"{name}.off"], live[f"{name}.off"] = off, live[name].clone()
            twins.append((name, f"{name}.off"))

    def body(live: Live, weights: Weights) -> None:
        for name, loader in loaders.items():
            loader.run(live[name], weights)

    found = Worker(live, body).probe(space)
    every, truth = ids_of(space), {}
    given_up: list[str] = []
    for name, loader in loaders.items():
        flat = torch.zeros(live[name].numel(), dtype=torch.int64)
        loader.fill_ids(flat, every)
        truth[name] = flat.reshape(live[name].shape).numpy()
        if name in found.opaque:
            # Integers keep their values: one that is a code may continue a lone copy beside it, and takes it along.
            assert not live[name].is_floating_point()
            assert ((found.ids(name) == truth[name]) | (found.ids(name) == -1)).all()
            given_up.append(name)
            continue
        assert np.array_equal(found.ids(name), truth[name]), name
        kept = dtype_name(live[name].dtype)
        source = space.spec(loader.parts[0].source).dtype
        copied = bool((flat > 0).any())
        same_width = torch_dtype(source).itemsize == live[name].element_size()
        views = loader.by_bits or (same_width and not live[name].is_floating_point())
        assert found.dtype(name) == kept or (copied and views), name
    assert len(given_up) <= 1
    some = [name for name in list(truth)[seed % 4 :: 4] if name not in given_up]
    plain = SourceMap.from_ids(space, {n: truth[n] for n in some}, {n: found.dtype(n) for n in some})
    for name in some:
        assert found.slice_copies(name) == plain.slice_copies(name), f"{name} is not in canonical form"
    assert len(twins) > LOADERS // 25
    for name, twin in twins:
        if {name, twin} & set(given_up):
            continue
        differs = np.flatnonzero(found.ids(name).reshape(-1) != found.ids(twin).reshape(-1)).tolist()
        expected = np.flatnonzero(truth[name].reshape(-1) != truth[twin].reshape(-1)).tolist()
        assert differs == expected
        assert len(differs) <= 1


COMPUTERS: tuple[Compute, ...] = (
    torch.maximum,
    lambda x, y: x.abs(),
    lambda x, y: x.clamp(-2, 2),
    lambda x, y: torch.where(x.abs() < y.abs(), x, y),
    lambda x, y: x + y,
    lambda x, y: x * 0.5,
    lambda x, y: x.relu(),
    lambda x, y: x.to(torch.float8_e4m3fn).to(x.dtype),
)


@pytest.mark.parametrize("seed", range(COMPUTING))
def test_random_computers_beside_movers(seed: int) -> None:
    """Some elements are computed from two sources: they are never copies, and nobody else becomes a wrong one."""
    random = np.random.default_rng(1000 + seed)
    plain = random_space(random, PALETTES[seed % 3])
    extra = [TensorSpec(f"z{side}", (200,), "F32") for side in "ab"]
    space = CheckpointSpace([*plain.specs, *extra])
    loaders: dict[str, Loader] = {}
    live: Live = {}
    computed: dict[str, tuple[Compute, torch.Tensor]] = {}
    for number in range(100):
        loaders[f"p{number}"], live[f"p{number}"] = random_loader(random, plain)
        size = int(random.integers(1, 200))
        where = torch.from_numpy(random.permutation(size)[: int(random.integers(1, size + 1))])
        computed[f"z{number}"] = COMPUTERS[number % len(COMPUTERS)], where
        live[f"z{number}"] = noisy(size)

    def body(live: Live, weights: Weights) -> None:
        for name, loader in loaders.items():
            loader.run(live[name], weights)
        for name, (compute, where) in computed.items():
            target = live[name]
            target.copy_(weights["za"][: len(target)])
            target[where] = compute(weights["za"], weights["zb"])[where]

    found = Worker(live, body).probe(space)
    every = ids_of(space)
    for name, loader in loaders.items():
        flat = torch.zeros(live[name].numel(), dtype=torch.int64)
        loader.fill_ids(flat, every)
        assert np.array_equal(found.ids(name).reshape(-1), flat.numpy()), name
    for name, (_, where) in computed.items():
        ids = found.ids(name)
        own = every["za"].numpy()[: len(ids)]
        is_computed = np.zeros(len(ids), dtype=bool)
        is_computed[where.numpy()] = True
        assert (ids[is_computed] <= 0).all(), "a computed element is called a copy"
        assert ((ids == own) | (ids == -1))[~is_computed].all(), "a copied element is called something else"
