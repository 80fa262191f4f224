"""A small transformer's checkpoint, and who holds what of it: row-cut trainers, whole and fused rollouts.

Values are a function of version, tensor and place, so everybody can say what a version's bits must be without asking.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

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


class Rollout:
    """Everything, with q, k and v in one matrix, and gate and up in another."""

    _PARTS = ("q", "k", "v"), ("gate", "up")

    def __init__(self, tensors: Shapes) -> None:
        self.tensors = tensors
        self._places: dict[str, tuple[str, int]] = {}
        self.live: dict[str, torch.Tensor] = {}
        for name, shape in tensors.items():
            layer, _, part = name.partition(".")
            fused = next((parts for parts in self._PARTS if part in parts), None)
            if fused is None:
                self._places[name] = (name, 0)
                self.live[name] = torch.zeros(shape, dtype=torch.bfloat16)
            else:
                whole = f"{layer}.{''.join(fused)}"
                self._places[name] = (whole, fused.index(part) * shape[0])
                self.live[whole] = torch.zeros(len(fused) * shape[0], *shape[1:], dtype=torch.bfloat16)

    def load_weights(self, pairs: Pairs) -> None:
        """Put every tensor where it belongs."""
        for name, tensor in pairs:
            where, row = self._places[name]
            self.live[where][row : row + tensor.shape[0]].copy_(tensor)

    def holds(self, version: int) -> bool:
        """Whether every bit is the version's."""
        for name, shape in self.tensors.items():
            where, row = self._places[name]
            got = self.live[where][row : row + shape[0]]
            if not torch.equal(got.view(torch.int16), truth(name, shape, version).view(torch.int16)):
                return False
        return True
