"""The processes of `transload bench modes`: a trainer or a rollout that joins the job anew for every mode."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import SharedFolder
from adapters.sender import SenderAdapter
from adapters.torch_bits import bits_view
from tests.cluster.model import Rollout, Shapes, Trainer, space_of
from tests.cluster.workers import Poller
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology


class CopyFloor:
    """A plain copy of all of a worker's tensors between them and other memory, on one thread."""

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self._pairs = [(bits_view(tensor), np.zeros_like(bits_view(tensor))) for tensor in live.values()]

    def seconds(self, start_at: float) -> float:
        """Copy once, from a time on that everybody is given; nothing changes, the copy is of what was copied away."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        begun = time.perf_counter()
        for live, away in self._pairs:
            np.copyto(away, live)
        return time.perf_counter() - begun


class ModeTrainer:
    """A trainer rank."""

    def __init__(self, node: int, address: str, tensors: Shapes, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        self._address, self._rank, self._world_size = address, rank, world_size
        self._model = Trainer(tensors, rank, world_size)
        self._floor = CopyFloor(self._model.live)
        self._sender: SenderAdapter

    def join(self, folder: str, transport: str, staging: bool) -> None:
        """Take part in a job."""
        self._sender = SenderAdapter(
            self._model.load_weights,
            self._model.live,
            space_of(self._model.tensors),
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=SharedFolder(Path(folder), host=self._address),
            transport=transport,
            staging=staging,
        )

    def connect(self, engines: list[str], topology: Topology | None, buffer_bytes: int) -> float:
        """Connect; the bound of the plan."""
        return self._sender.connect(engines, topology=topology, buffer_bytes=buffer_bytes).lower_bound_s

    def fill(self, version: int) -> None:
        """Hold a version's values."""
        self._model.fill(version)

    def send(self, version: int, start_at: float) -> TransferReport:
        """Send at a time that all trainers are given, and overwrite the weights as soon as that may be."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        pending = self._sender.send_weights(version)
        for tensor in self._model.live.values():
            tensor.zero_()
        return pending.result(timeout_s=100.0)

    def copy(self, start_at: float) -> float:
        """Seconds of a plain copy of what this rank holds."""
        return self._floor.seconds(start_at)

    def leave(self) -> None:
        """Let go."""
        self._sender.close()


class ModeRollout:
    """A rank of an engine, that polls on a thread of its own."""

    def __init__(self, node: int, address: str, tensors: Shapes, engine: str, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        self._address, self._engine, self._rank, self._world_size = address, engine, rank, world_size
        self._model = Rollout(tensors)
        self._floor = CopyFloor(self._model.live)
        self._poller: Poller

    def join(self, folder: str, transport: str, staging: bool) -> None:
        """Take part in a job."""
        receiver = ReceiverAdapter(
            self._model.load_weights,
            self._model.live,
            space_of(self._model.tensors),
            engine=self._engine,
            rank=self._rank,
            world_size=self._world_size,
            rendezvous=SharedFolder(Path(folder), host=self._address),
            transport=transport,
            staging=staging,
        )
        self._poller = Poller(receiver, self._model)

    def holds(self, version: int, within_s: float = 30.0) -> bool:
        """Whether it has the version, and every bit of it."""
        return self._poller.holds(version, within_s)

    def copy(self, start_at: float) -> float:
        """Seconds of a plain copy of what this rank holds."""
        return self._floor.seconds(start_at)

    def leave(self) -> None:
        """Let go."""
        self._poller.leave()
