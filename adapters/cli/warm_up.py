"""Compile every kernel once, by a tiny transfer inside one process, so that many processes find them in numba's cache.

Numba compiles a kernel at its first call and keeps the machine code on disk. Eight processes that start together would
each compile all of them; one that runs this first saves the other seven the work. It is a real transfer with real
adapters: one trainer and an engine of two ranks, on threads, with layouts that take every path a model takes: columns
go in rounds, rows are read out of the trainer's memory, and what it shares is mapped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import SharedFolder
from adapters.sender import SenderAdapter
from layout_algebra.space import CheckpointSpace, TensorSpec

__all__ = ["compile_kernels"]

_EXPERTS = 3
_ROWS, _COLUMNS = 64, 96
_ENGINE_RANKS = 2
_DEADLINE_S = 240.0

Pairs = Iterable[tuple[str, torch.Tensor]]


def compile_kernels() -> float:
    """Run the tiny transfer; returns the seconds it took, which are few when the kernels are in the cache."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="transload-warm-up-") as folder, ThreadPoolExecutor(3) as threads:
        trainer = threads.submit(_train, SharedFolder(Path(folder)))
        ranks = [threads.submit(_roll_out, SharedFolder(Path(folder)), rank) for rank in range(_ENGINE_RANKS)]
        for done in [trainer, *ranks]:
            done.result()
    return time.perf_counter() - start


def _space() -> CheckpointSpace:
    names = [f"expert.{expert}.{part}" for expert in range(_EXPERTS) for part in ("up", "down")]
    specs = [TensorSpec(name, (_ROWS, _COLUMNS), "BF16") for name in names]
    whole = [TensorSpec("norm", (_COLUMNS,), "BF16"), TensorSpec("embed", (_ROWS, _COLUMNS), "BF16")]
    return CheckpointSpace([*specs, *whole])


def _stacked(rank: int, ranks: int) -> tuple[Callable[[Pairs], None], dict[str, torch.Tensor]]:
    """A worker that stacks its part of the experts, beside whole tensors and a float32 buffer."""

    def cut(part: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks, dim=0 if part == "up" else 1)[rank]

    held = {part: torch.stack([cut(part, _empty())] * _EXPERTS) for part in ("up", "down")} | {
        "norm": torch.zeros(_COLUMNS, dtype=torch.bfloat16),
        "embed": _empty().share_memory_(),  # type: ignore[no-untyped-call]
        "buffer": torch.ones(8),
    }

    def load_weights(pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name in held:
                held[name].copy_(tensor)
            else:
                _, expert, part = name.split(".")
                held[part][int(expert)].copy_(cut(part, tensor))

    return load_weights, held


def _empty() -> torch.Tensor:
    return torch.zeros(_ROWS, _COLUMNS, dtype=torch.bfloat16)


def _train(rendezvous: SharedFolder) -> None:
    load_weights, held = _stacked(0, 1)
    sender = SenderAdapter(
        load_weights, held, _space(), rank=0, world_size=1, rendezvous=rendezvous, deadline_s=_DEADLINE_S
    )
    try:
        sender.connect(["0"], buffer_bytes=1 << 14)
        sender.send_weights(1).result()
    finally:
        sender.close()


def _roll_out(rendezvous: SharedFolder, rank: int) -> None:
    load_weights, held = _stacked(rank, _ENGINE_RANKS)
    receiver = ReceiverAdapter(
        load_weights,
        held,
        _space(),
        engine="0",
        rank=rank,
        world_size=_ENGINE_RANKS,
        rendezvous=rendezvous,
        deadline_s=_DEADLINE_S,
    )
    try:
        stop_at = time.monotonic() + _DEADLINE_S
        while receiver.poll_requests() is None:
            if time.monotonic() > stop_at:
                raise TimeoutError(f"warm-up: rank {rank} got no update within {_DEADLINE_S:g} s")
            time.sleep(0.001)
    finally:
        receiver.close()
