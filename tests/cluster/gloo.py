"""The usual way, as a baseline: trainers gather every tensor on rank 0, which broadcasts it; rollouts load it.

Over torch.distributed with gloo, tensor by tensor in the checkpoint's order, as weight updates are commonly written.
Rank k of the job is node k, trainers first.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.cluster.model import Rollout, Trainer

_TIMEOUT = timedelta(seconds=100)


class _Gloo:
    def __init__(self, node: int) -> None:
        self._node = node

    def join(self, master: str, port: int, trainers: int, world_size: int) -> None:
        """Make the groups; collective."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group(
            "gloo", init_method=f"tcp://{master}:{port}", rank=self._node, world_size=world_size, timeout=_TIMEOUT
        )
        self._trainers = dist.new_group(list(range(trainers)), timeout=_TIMEOUT)
        self._audience = dist.new_group([0, *range(trainers, world_size)], timeout=_TIMEOUT)
        self._ranks = trainers

    def part(self) -> None:
        """Leave the groups."""
        dist.destroy_process_group()


class GlooTrainer(_Gloo):
    """A trainer rank's part."""

    def __init__(self, model: Trainer, node: int) -> None:
        super().__init__(node)
        self._model = model

    def update(self, start_at: float) -> tuple[float, float]:
        """Send all weights; when it began and ended, CLOCK_MONOTONIC."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        began = time.monotonic()
        for part in self._model.live.values():
            mine = part.reshape(-1).view(torch.uint8)
            rows = [torch.empty_like(mine) for _ in range(self._ranks)] if self._node == 0 else None
            dist.gather(mine, rows, dst=0, group=self._trainers)
            if rows is not None:
                dist.broadcast(torch.cat(rows), src=0, group=self._audience)
        return began, time.monotonic()


class GlooRollout(_Gloo):
    """A rollout's part."""

    def __init__(self, model: Rollout, node: int) -> None:
        super().__init__(node)
        self._model = model

    def update(self, start_at: float) -> tuple[float, float]:
        """Receive all weights and load them; when it began and ended, CLOCK_MONOTONIC."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        began = time.monotonic()
        for name, shape in self._model.tensors.items():
            whole = torch.empty(shape, dtype=torch.bfloat16)
            dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0, group=self._audience)
            self._model.load_weights([(name, whole)])
        return began, time.monotonic()
