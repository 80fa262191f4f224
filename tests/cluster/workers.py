"""Workers of a real job, one a process and node: a trainer with a sender, a rollout that polls for updates."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from adapters.receiver import ReceiverAdapter, Update
from adapters.rendezvous import SharedFolder
from adapters.sender import SenderAdapter
from tests.cluster.gloo import GlooRollout, GlooTrainer
from tests.cluster.model import Rollout, Shapes, Trainer, space_of
from tests.cluster.plain_sockets import PlainSockets
from transfer_exec.report import TransferReport
from transfer_exec.topology import Topology

_POLL_S = 0.001


class TrainerNode:
    """A trainer rank; rank k lives on node k."""

    def __init__(
        self, node: int, address: str, tensors: Shapes, world_size: int, folder: str, transport: str, verify: str
    ) -> None:
        torch.set_num_threads(1)
        self.sockets = PlainSockets(node, address)
        self.model = Trainer(tensors, node, world_size)
        self.gloo = GlooTrainer(self.model, node)
        self._sender = SenderAdapter(
            self.model.load_weights,
            self.model.live,
            space_of(tensors),
            rank=node,
            world_size=world_size,
            rendezvous=SharedFolder(Path(folder), host=address),
            transport=transport,
            verify=verify,
        )

    def connect(self, engines: list[str], topology: Topology, buffer_bytes: int) -> tuple[str, int, float]:
        """Connect; the transport, the rounds and the bound of the plan."""
        report = self._sender.connect(engines, topology=topology, buffer_bytes=buffer_bytes)
        return report.transport, report.rounds, report.lower_bound_s

    def fill(self, version: int) -> None:
        """Hold a version's values."""
        self.model.fill(version)

    def send(self, version: int, start_at: float) -> TransferReport:
        """Send at a time that all trainers are given."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        return self._sender.send_weights(version).result(timeout_s=100.0)

    def leave(self) -> None:
        """Let go."""
        self._sender.close()


class RolloutNode:
    """An engine of one rank, that polls on a thread of its own."""

    def __init__(self, node: int, address: str, tensors: Shapes, engine: str, folder: str, transport: str) -> None:
        torch.set_num_threads(1)
        self.sockets = PlainSockets(node, address)
        self.model = Rollout(tensors)
        self.gloo = GlooRollout(self.model, node)
        self._receiver = ReceiverAdapter(
            self.model.load_weights,
            self.model.live,
            space_of(tensors),
            engine=engine,
            rank=0,
            world_size=1,
            rendezvous=SharedFolder(Path(folder), host=address),
            transport=transport,
        )
        self._poller = Poller(self._receiver, self.model)

    def holds(self, version: int, within_s: float = 30.0) -> bool:
        """Whether it has the version, and every bit of it."""
        return self._poller.holds(version, within_s)

    def leave(self) -> None:
        """Let go."""
        self._poller.leave()


class Poller:
    """Polls a receiver on a thread of its own, as an engine between its steps.

    Parameters
    ----------
    receiver
        Of one rank.
    model
        What it updates.
    """

    def __init__(self, receiver: ReceiverAdapter, model: Rollout) -> None:
        self._receiver, self._model = receiver, model
        self._updates: list[Update] = []
        self._errors: list[Exception] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def holds(self, version: int, within_s: float) -> bool:
        """Whether the rank has the version in time, and every bit of it; raises what a poll raised."""
        stop_at = time.monotonic() + within_s
        while not self._errors and not (self._updates and self._updates[-1].version == version):
            if time.monotonic() > stop_at:
                return False
            time.sleep(_POLL_S)
        if self._errors:
            raise self._errors[0]
        return self._receiver.ready and self._model.holds(version)

    def leave(self) -> None:
        """Let go."""
        self._leaving.set()
        self._thread.join()
        self._receiver.close()

    def _poll(self) -> None:
        while not self._leaving.is_set():
            try:
                update = self._receiver.poll_requests()
            except Exception as error:  # noqa: BLE001 - `holds` raises it
                self._errors.append(error)
                return
            if update is not None:
                self._updates.append(update)
            time.sleep(_POLL_S)
