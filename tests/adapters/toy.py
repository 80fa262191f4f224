"""A toy checkpoint and workers that hold parts of it: row-cut trainers, column-cut and whole rollouts.

`Holding` is one worker: live tensors, a loader that fills them, and nothing else. What a worker must hold of given
weights is found by running its loader on them in a fresh copy, so the expected bits never come from our code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from layout_algebra.space import CheckpointSpace, TensorSpec

Pairs = Iterable[tuple[str, torch.Tensor]]

SHAPES = {"embed": (10, 6), "layer.0.w": (8, 6), "layer.1.w": (8, 6), "layer.0.b": (8,), "norm": (6,)}
SPACE = CheckpointSpace([TensorSpec(name, shape, "BF16") for name, shape in SHAPES.items()])


def weights(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of a version: random bits of finite numbers."""
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made).to(torch.bfloat16) for name, shape in SHAPES.items()}


def write_checkpoint(folder: Path) -> Path:
    """The toy checkpoint as a folder with two files and an index."""
    folder.mkdir(parents=True)
    tensors = weights(0)
    parts = {"model-1.safetensors": ["embed", "norm"], "model-2.safetensors": ["layer.0.w", "layer.1.w", "layer.0.b"]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {name: file for file, names in parts.items() for name in names}
    lines = ",".join(f'"{name}":"{file}"' for name, file in index.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata":{{}},"weight_map":{{{lines}}}}}')
    return folder


class Holding:
    """One worker's live tensors and its loader."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], load: Callable[[dict[str, torch.Tensor], Pairs], None]
    ) -> None:
        self.tensors = tensors
        self._load = load
        self.loads = 0

    def load_weights(self, pairs: Pairs) -> None:
        self.loads += 1
        self._load(self.tensors, pairs)

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def fresh(self) -> Holding:
        """Another worker of the same kind, its tensors zeroed."""
        return Holding({name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}, self._load)

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        """What its own loader makes of a version's weights, on top of what it holds now."""
        other = Holding({name: tensor.clone() for name, tensor in self.tensors.items()}, self._load)
        other.load_weights(weights(version).items())
        return other.tensors

    def fill(self, version: int) -> None:
        """Hold a version's weights, in place."""
        self.load_weights(weights(version).items())


def trainer(
    rank: int, world_size: int, *, without: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16
) -> Holding:
    """Rows of every tensor, cut like FSDP: the first ranks have ceil(n / world) rows, the last ones fewer or none."""

    def rows(n: int) -> slice:
        each = -(-n // world_size)
        return slice(min(rank * each, n), min((rank + 1) * each, n))

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name in live:
                live[name].copy_(tensor[rows(tensor.shape[0])])

    shapes = {n: (len(range(*rows(s[0]).indices(s[0]))), *s[1:]) for n, s in SHAPES.items() if n not in without}
    return Holding({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, load)


def rollout(rank: int, world_size: int, *, dtype: torch.dtype = torch.bfloat16) -> Holding:
    """Columns of the matrices, both layers stacked; vectors whole; a padded embedding; a table that no loader fills."""
    wide = 6 // world_size
    mine = slice(rank * wide, (rank + 1) * wide)

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            match name:
                case "embed":
                    live["embed"][:10].copy_(tensor[:, mine])
                case "layer.0.w" | "layer.1.w":
                    live["stack"][int(name[6])].copy_(tensor[:, mine].t())
                case "layer.0.b":
                    live["b"].copy_(tensor)
                case "norm":
                    live["norm"].copy_(tensor)

    tensors = {
        "embed": torch.zeros(12, wide, dtype=dtype),
        "stack": torch.zeros(2, wide, 8, dtype=dtype),
        "b": torch.zeros(8, dtype=dtype),
        "norm": torch.zeros(6, dtype=dtype),
        "table": torch.arange(3.0),
    }
    return Holding(tensors, load)


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two workers hold the same bits."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(_bytes(left[n]), _bytes(right[n])) for n in left
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same bits in other memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
