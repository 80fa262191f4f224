"""A small transformer's checkpoint, and who holds what of it: row-cut trainers, whole and fused rollouts.

Values are a function of version, tensor and place, so everybody can say what a version's bits must be without asking.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from layout_algebra.space import CheckpointSpace, TensorSpec

Pairs = Iterable[tuple[str, torch.Tensor]]
Shapes = Mapping[str, tuple[int, ...]]

_PERIOD = 65_521


def shapes(*, layers: int, hidden: int, wide: int, words: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in bfloat16."""
    out: dict[str, tuple[int, ...]] = {"embed": (words, hidden), "norm": (hidden,)}
    for layer in range(layers):
        out |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        out |= {f"{layer}.gate": (wide, hidden), f"{layer}.up": (wide, hidden), f"{layer}.down": (hidden, wide)}
    return out


def total_bytes(tensors: Shapes) -> int:
    """Of the whole checkpoint."""
    return sum(2 * torch.Size(shape).numel() for shape in tensors.values())


def space_of(tensors: Shapes) -> CheckpointSpace:
    """The checkpoint's element ids."""
    return CheckpointSpace([TensorSpec(name, shape, "BF16") for name, shape in tensors.items()])


def truth(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """A tensor of a version."""
    start = (zlib.crc32(name.encode()) + 40_503 * version) % _PERIOD
    values = (torch.arange(start, start + _PERIOD) * 7919 % _PERIOD).to(torch.int32)
    flat = values.repeat(torch.Size(shape).numel() // _PERIOD + 1)[: torch.Size(shape).numel()]
    # Finite bit patterns of every exponent but the highest.
    return (flat % 0x7F00).to(torch.int16).view(torch.bfloat16).reshape(shape)


class Trainer:
    """Rows of every tensor, cut evenly among the trainers."""

    def __init__(self, tensors: Shapes, rank: int, world_size: int) -> None:
        self.tensors = tensors
        self._rows = {
            name: slice(shape[0] * rank // world_size, shape[0] * (rank + 1) // world_size)
            for name, shape in tensors.items()
        }
        self.live = {
            name: torch.zeros(rows.stop - rows.start, *tensors[name][1:], dtype=torch.bfloat16)
            for name, rows in self._rows.items()
        }

    def load_weights(self, pairs: Pairs) -> None:
        """Keep the own rows."""
        for name, tensor in pairs:
            self.live[name].copy_(tensor[self._rows[name]])

    def fill(self, version: int) -> None:
        """Hold a version's values."""
        self.load_weights((name, truth(name, shape, version)) for name, shape in self.tensors.items())


class _Place(NamedTuple):
    """Where a rank keeps its part of a tensor: rows of a parameter, which part of the tensor."""

    parameter: str
    rows: slice
    part: tuple[slice, ...]


class Rollout:
    """One rank's part of everything, with q, k and v in one matrix, and gate and up in another.

    Matrices that end a block (o and down) are cut into columns, all others into rows.
    """

    _FUSED = ("q", "k", "v"), ("gate", "up")

    def __init__(self, tensors: Shapes, rank: int = 0, world_size: int = 1) -> None:
        self.tensors = tensors
        self._places: dict[str, _Place] = {}
        self.live: dict[str, torch.Tensor] = {}
        for name, shape in tensors.items():
            layer, _, kind = name.partition(".")
            axis = 1 if kind in ("o", "down") else 0
            cut = slice(shape[axis] * rank // world_size, shape[axis] * (rank + 1) // world_size)
            mine = list(shape)
            mine[axis] = cut.stop - cut.start
            fused = next((kinds for kinds in self._FUSED if kind in kinds), (kind,))
            parameter = f"{layer}.{''.join(fused)}" if kind else name
            start = fused.index(kind) * mine[0]
            self._places[name] = _Place(parameter, slice(start, start + mine[0]), (*[slice(None)] * axis, cut))
            self.live[parameter] = torch.zeros(len(fused) * mine[0], *mine[1:], dtype=torch.bfloat16)

    def load_weights(self, pairs: Pairs) -> None:
        """Put every tensor where it belongs."""
        for name, tensor in pairs:
            place = self._places[name]
            self.live[place.parameter][place.rows].copy_(tensor[place.part])

    def fill(self, version: int) -> None:
        """Hold a version's values."""
        self.load_weights((name, truth(name, shape, version)) for name, shape in self.tensors.items())

    def holds(self, version: int) -> bool:
        """Whether every bit is the version's."""
        return all(
            _same_bits(self.live[place.parameter][place.rows], truth(name, self.tensors[name], version)[place.part])
            for name, place in self._places.items()
        )

    def differences(self, other: Rollout) -> list[str]:
        """Parameters of which some bit is another than in a rollout of the same rank."""
        return [name for name, tensor in self.live.items() if not _same_bits(tensor, other.live[name])]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))
