"""Everything that workers do works wherever they meet: in a folder, by addresses, and in a store of torch's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from adapters.failures import LostWorkerError, RendezvousError, UsageError
from adapters.job_key import new_key
from adapters.rendezvous import Addresses, Rendezvous, SharedFolder
from adapters.sender import SenderAdapter
from adapters.torch_store import TorchStore
from tests.adapters.crew import Crew, wait_for
from tests.adapters.toy import SPACE, rollout, same_bits, trainer

NAMES = ("sender", "engine/a", "engine/b")


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def folder(path: Path) -> tuple[Rendezvous, Callable[[], object]]:
    return SharedFolder(path), lambda: os.listdir(path)


def addresses(path: Path) -> tuple[Rendezvous, Callable[[], object]]:
    return Addresses({name: f"tcp://127.0.0.1:{free_port()}" for name in NAMES}, key=new_key()), list


def store(path: Path) -> tuple[Rendezvous, Callable[[], object]]:
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return TorchStore(made, key=new_key()), lambda: [name for name in NAMES if made.check([f"transload//{name}"])]


@pytest.mark.parametrize("kind", [folder, addresses, store], ids=lambda kind: kind.__name__)
def test_a_job_s_whole_life(tmp_path: Path, kind: Callable[[Path], tuple[Rendezvous, Callable[[], object]]]) -> None:
    place, left = kind(tmp_path)
    with Crew(place, [trainer(r, 2) for r in range(2)], {"a": [rollout(r, 2) for r in range(2)]}) as crew:  # type: ignore[arg-type]
        crew.connect()
        crew.send(1)
        # An engine joins late, leaves, and comes back under its name.
        crew.start_engine("b", [rollout(0, 1)])
        crew.trainers(lambda sender, rank: sender.connect(["b"]))
        crew.send(2)
        crew.rollouts.pop("b/0").leave()
        conductor = crew.senders[0]._station.conductor
        assert conductor is not None
        wait_for(lambda: "engine/b" not in conductor._steps.rosters or not conductor._steps._inbox.empty())
        crew.send(3)
        crew.start_engine("b", [rollout(0, 1)])
        crew.trainers(lambda sender, rank: sender.connect(["b"]))
        crew.send(4)
        assert crew.rollouts["b/0"].adapter.ready
        # Somebody else in the same place is told at once.
        with pytest.raises((UsageError, RendezvousError), match=r"taken|in use"):
            _second_sender(place)
        # The trainers are started again: engines find the new ones by themselves.
        for sender in crew.senders:
            sender.close()
        crew.senders = [
            SenderAdapter(
                held.load_weights, held.parameters, SPACE, rank=rank, world_size=2, rendezvous=place, deadline_s=60.0
            )
            for rank, held in enumerate(crew.holdings)
        ]
        crew.connect()
        crew.send(5)
        for one in crew.rollouts.values():
            assert same_bits(one.holding.tensors, one.holding.expected(5))
        # A trainer that is gone alone holds something.
        crew.senders[1].close()
        with pytest.raises(LostWorkerError, match="trainer/1 is gone"):
            wait_for(lambda: bool(crew.senders[0].send_weights(6).result() and False))
    assert left() == []


def _second_sender(place: Rendezvous) -> None:
    held = trainer(0, 1)
    made = SenderAdapter(held.load_weights, held.parameters, SPACE, rank=0, world_size=1, rendezvous=place)
    try:
        made.connect(["a"])
    finally:
        made.close()
