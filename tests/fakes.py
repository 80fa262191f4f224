"""Workers made for tests: live tensors, a loader over them, and what the truth about them is.

``Worker`` runs a body ``load(live, weights)`` as a black-box ``load_weights``. For loaders that only move elements the
truth is found by running the same body once on ids instead of values (``ids_by_running``), element by element and
with no code of the library; other truths are written down.

>>> worker = Worker({"p": torch.zeros(3)}, lambda live, weights: live["p"].copy_(weights["x"].flip(0)))
>>> ids_by_running(worker, space_of(x=("F32", 3)))["p"].tolist()
[3, 2, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from adapters.probing import probe
from adapters.torch_bits import bits_view
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

EMPTY = 0
OPAQUE = -1

Live = dict[str, torch.Tensor]
Body = Callable[[Live, dict[str, torch.Tensor]], object]


class Worker:
    """Live tensors and a loader that fills them.

    Parameters
    ----------
    live
        Tensors by name; the body may replace entries.
    body
        Called with the live tensors and the checkpoint's tensors by name.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], body: Body) -> None:
        self.live: Live = dict(live)
        self.body = body
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The black box."""
        self.loads += 1
        self.body(self.live, dict(weights))

    def probe(self, space: CheckpointSpace) -> SourceMap:
        """Probe through the public surface, and insist that every tensor has its own bits afterwards."""
        with keeps_bits(self.live):
            return probe(self.load_weights, lambda: self.live, space)


def space_of(**tensors: object) -> CheckpointSpace:
    """A checkpoint from ``name=(dtype, *shape)``; a name's ``__`` stands for a dot."""
    specs = []
    for name, given in tensors.items():
        assert isinstance(given, tuple)
        specs.append(TensorSpec(name.replace("__", "."), tuple(given[1:]), given[0]))
    return CheckpointSpace(specs)


def ids(space: CheckpointSpace, text: str) -> list[int]:
    """Expected ids written as in ``"q.0 q.3 EMPTY OPAQUE"``."""
    special = {"EMPTY": EMPTY, "OPAQUE": OPAQUE}
    out = []
    for word in text.split():
        name, _, index = word.rpartition(".")
        out.append(special[word] if word in special else space.element_id(name, int(index)))
    return out


def ids_by_running(worker: Worker, space: CheckpointSpace) -> dict[str, np.ndarray]:
    """The truth about a loader that only moves elements: what it does to ids. Its body must not care for dtypes."""
    blank = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in worker.live.items()}
    weights = {}
    for spec in space.specs:
        start, stop = space.id_range(spec.name)
        weights[spec.name] = torch.arange(start, stop).reshape(spec.shape)
    worker.body(blank, weights)
    return {name: tensor.numpy() for name, tensor in blank.items()}


def checkpoint(space: CheckpointSpace, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random checkpoint of a space of floats."""
    random = torch.Generator().manual_seed(seed)
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return {spec.name: torch.randn(spec.shape, generator=random).to(dtypes[spec.dtype]) for spec in space.specs}


def bits_of(live: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Every tensor's bits."""
    return {name: bits_view(tensor).tobytes() for name, tensor in live.items()}


@contextmanager
def keeps_bits(live: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Fail if any tensor's bits, or those of a tensor it replaced, differ at the end."""
    tensors = dict(live)
    before = bits_of(tensors)
    try:
        yield
    finally:
        after, replaced = bits_of(tensors), bits_of(live)
        assert after == before, [name for name in before if after[name] != before[name]]
        assert replaced == before, [name for name in before if replaced[name] != before[name]]


def noisy(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """A tensor of random bits: NaNs with payloads, infinities, negative zeros and all."""
    size = (shape,) if isinstance(shape, int) else shape
    width = torch.empty(0, dtype=dtype).element_size()
    random = np.random.default_rng(seed)
    count = int(np.prod(size, dtype=np.int64))
    raw = torch.from_numpy(random.integers(0, 256, count * width, dtype=np.uint8))
    if dtype == torch.bool:
        return (raw & 1).to(torch.bool).reshape(size)
    return raw.view(dtype).reshape(size).clone() if count else torch.empty(size, dtype=dtype)
