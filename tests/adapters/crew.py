"""All workers of a job as threads of one process, for tests of what adapters do when something is wrong.

Trainers are called side by side; every rollout polls in a loop of its own until the crew leaves.

    with Crew(folder, trainers=[...], engines={"a": [...]}) as crew:
        reports = crew.trainers(lambda sender, rank: sender.connect(["a"]))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, TypeVar

import numpy as np

from adapters.planning import make_connection, topology_of_hosts
from adapters.probing import probe
from adapters.receiver import ReceiverAdapter, Update
from adapters.sender import SenderAdapter
from adapters.torch_bits import bits_view
from adapters.verification import cells_of, plan_proof
from layout_algebra.space import CheckpointSpace
from tests.adapters.toy import SPACE, Holding, rollout, trainer
from transfer_exec.in_process import run_in_process
from transfer_exec.transport.reading import Batch, Strips
from transfer_exec.transport.stretches import MAPPED

T = TypeVar("T")

DEADLINE_S = 60.0
_POLL_PAUSE_S = 0.001


@cache
def compile_kernels() -> None:
    """Compile what connect and send run, outside of any deadline; after the first time it is read from disk."""
    held, needed = trainer(0, 1), rollout(0, 1)
    maps = {"trainer/0": probe(held.load_weights, held.tensors, SPACE)}
    maps["engine/a/0"] = probe(needed.load_weights, needed.tensors, SPACE)
    hosts = dict.fromkeys(maps, "host")
    made = make_connection(
        {"trainer/0": maps["trainer/0"]},
        {"engine/a/0": maps["engine/a/0"]},
        topology_of_hosts(hosts),
        buffer_bytes=4096,
    )
    run_in_process(made.plan, maps, {"trainer/0": held.tensors, "engine/a/0": needed.tensors})
    proof = plan_proof(maps["trainer/0"], cells_of(made.correspondence, "trainer/0"))
    proof.digests({name: bits_view(tensor) for name, tensor in held.tensors.items()})
    for item_bytes in (2, 4):
        for source in (0, MAPPED):
            Batch.of(np.array([[0, source, 0, 8]]), Strips.of(np.array([[0, 8, 1, item_bytes, 0]]))).compile()


class Outcome(Generic[T]):
    """What a call on one worker returned or raised."""

    def __init__(self, value: T | None, error: Exception | None) -> None:
        self.value = value
        self.error = error


class Rollout:
    """A rollout that polls on a thread of its own."""

    def __init__(self, adapter: ReceiverAdapter, holding: Holding) -> None:
        self.adapter = adapter
        self.holding = holding
        self.updates: list[Update] = []
        self.errors: list[Exception] = []
        self.hold = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._leave.is_set():
            if not self.hold.is_set():
                try:
                    update = self.adapter.poll_requests()
                    if update is not None:
                        self.updates.append(update)
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    self.errors.append(error)
            time.sleep(_POLL_PAUSE_S)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()
        self.adapter.close()


class Crew:
    """Trainers and rollouts of one job."""

    def __init__(
        self,
        folder: Path,
        trainers: Sequence[Holding],
        engines: Mapping[str, Sequence[Holding]],
        *,
        checkpoint: Path | CheckpointSpace = SPACE,
        deadline_s: float = DEADLINE_S,
        hooks: Mapping[str, Callable[[], object]] | None = None,
        verify: str = "digest",
        cast: bool = False,
        transport: str = "auto",
        staging: Collection[str] = (),
        activation: Literal["engine", "fleet"] = "engine",
    ) -> None:
        """``staging`` names engines that stage, and ``"trainer"`` where trainers do."""
        compile_kernels()
        self._transport, self._staging = transport, staging
        self._folder, self._checkpoint, self._deadline_s = folder, checkpoint, deadline_s
        self.holdings = list(trainers)
        self.senders = [
            SenderAdapter(
                holding.load_weights,
                holding.parameters,
                checkpoint,
                rank=rank,
                world_size=len(trainers),
                rendezvous=folder,
                verify=verify,
                cast=cast,
                transport=transport,
                staging="trainer" in staging,
                activation=activation,
                deadline_s=deadline_s,
            )
            for rank, holding in enumerate(trainers)
        ]
        self.rollouts: dict[str, Rollout] = {}
        for engine, holdings in engines.items():
            self.start_engine(engine, holdings, **(hooks or {}))

    def start_engine(self, engine: str, holdings: Sequence[Holding], **hooks: Callable[[], object]) -> None:
        for rank, holding in enumerate(holdings):
            self.start_rank(engine, rank, holding, len(holdings), **hooks)

    def start_rank(
        self, engine: str, rank: int, holding: Holding, world_size: int, **hooks: Callable[[], object]
    ) -> None:
        adapter = ReceiverAdapter(
            holding.load_weights,
            holding.parameters,
            self._checkpoint,
            engine=engine,
            rank=rank,
            world_size=world_size,
            rendezvous=self._folder,
            transport=self._transport,
            staging=engine in self._staging,
            deadline_s=self._deadline_s,
            **hooks,  # type: ignore[arg-type]
        )
        self.rollouts[f"{engine}/{rank}"] = Rollout(adapter, holding)

    def trainers(self, call: Callable[[SenderAdapter, int], T]) -> list[Outcome[T]]:
        """Call something on every trainer at the same time."""

        def one(rank: int) -> Outcome[T]:
            try:
                return Outcome(call(self.senders[rank], rank), None)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return Outcome(None, error)

        with ThreadPoolExecutor(len(self.senders)) as pool:
            return list(pool.map(one, range(len(self.senders))))

    def connect(self, **options: object) -> list[object]:
        """Connect all engines; raises what the trainers raised."""
        names = list(dict.fromkeys(name.rpartition("/")[0] for name in self.rollouts))
        return _values(self.trainers(lambda sender, rank: sender.connect(names, **options)))  # type: ignore[arg-type]

    def send(self, version: int) -> list[object]:
        """Fill the trainers with a version's weights and send it; raises what the trainers raised."""
        for holding in self.holdings:
            holding.fill(version)
        reports = _values(self.trainers(lambda sender, rank: sender.send_weights(version).result()))
        for one in self.rollouts.values():
            wait_for(lambda one=one: bool(one.updates) and one.updates[-1].version == version)  # type: ignore[misc]
        return reports

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.rollouts.values():
            one.leave()
        for sender in self.senders:
            sender.close()


def wait_for(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for something that is about to be true."""
    stop_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < stop_at, "it did not become true"
        time.sleep(0.005)


def _values(outcomes: Sequence[Outcome[T]]) -> list[object]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]
