"""The demo's steps, each asked of all workers that take part and gathered into values.

A step is one phase of the progress display. Trainers and rollouts are asked together wherever they wait for each
other, so that a worker that dies is noticed at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from adapters.cli.crew import Crew, CrewError
from adapters.cli.demo_messages import (
    Build,
    Built,
    Close,
    Closed,
    Command,
    Connect,
    Connected,
    Dump,
    Dumped,
    Prove,
    Proved,
    Ready,
    Received,
    Reply,
    Save,
    Saved,
    Send,
    Sent,
    Start,
    Train,
    Trained,
    Update,
    WriteCheckpoint,
    Written,
)
from adapters.cli.demo_result import LiveSize, ModelSize, RolloutBytes, UpdateResult, byte_differences
from adapters.cli.phases import Phases
from adapters.connect_report import ConnectReport

__all__ = ["DemoSteps"]

ReplyT = TypeVar("ReplyT")


class DemoSteps:
    """All workers of one demo, asked step by step.

    Parameters
    ----------
    crew
        The worker processes, named as in plans.
    phases
        Where each step is shown and timed.
    folder
        The demo's own; checkpoints are made in it.
    deadline_s
        For every step.
    """

    def __init__(self, crew: Crew[Command, Reply], phases: Phases, folder: Path, *, deadline_s: float) -> None:
        self._crew = crew
        self._phases = phases
        self._initial = folder / "initial"
        self._saved = folder / "saved"
        self._deadline_s = deadline_s
        self._everybody = tuple(crew.process_ids)
        self._trainers = tuple(worker for worker in self._everybody if worker.startswith("trainer/"))
        self._rollouts = tuple(worker for worker in self._everybody if worker.startswith("engine/"))
        self._workers = self._trainers + self._rollouts
        self._needed: dict[str, int] = {}

    def write_checkpoint(self, layers: int) -> ModelSize:
        """Wait for all imports and the kernels, then let one trainer write the random model's folder."""
        self._ask("start processes, compile kernels", dict.fromkeys(self._everybody, Start()), Ready)
        first = self._trainers[0]
        written = self._ask("write a random checkpoint", {first: WriteCheckpoint(str(self._initial))}, Written)[first]
        return ModelSize(layers, written.tensors, written.elements, written.bytes)

    def load_and_connect(self) -> tuple[tuple[LiveSize, ...], ConnectReport]:
        """Every worker loads the folder, probes its loader and gets its part of one plan."""
        built = self._ask("load it on both sides", dict.fromkeys(self._workers, Build(str(self._initial))), Built)
        found = self._ask("connect", dict.fromkeys(self._workers, Connect(str(self._initial))), Connected)
        report = found[self._trainers[0]].report
        if report is None:
            raise CrewError(f"{self._trainers[0]}: expected a report of connect, got none")
        self._needed = {worker: report.worker(worker).needed_bytes for worker in self._rollouts}
        return tuple(LiveSize(w, one.tensors, one.bytes, one.empty_shards) for w, one in built.items()), report

    def update(self, version: int, model_bytes: int, *, spoil: bool) -> UpdateResult:
        """One optimizer step, one update, and its proof from a checkpoint that the trainers save.

        With `spoil` the last rollout flips one bit of its weights before the proof.
        """
        trained = self._ask(f"update {version}: train", dict.fromkeys(self._trainers, Train(version)), Trained)
        commands: dict[str, Command] = dict.fromkeys(self._trainers, Send(version))
        commands.update(dict.fromkeys(self._rollouts, Update(version)))
        moved = self._ask(f"update {version}: transfer", commands, (Sent, Received))
        shutil.rmtree(self._saved, ignore_errors=True)
        self._ask(f"update {version}: trainers save", dict.fromkeys(self._trainers, Save(str(self._saved))), Saved)
        proofs = {worker: Prove(str(self._saved), spoil and worker == self._rollouts[-1]) for worker in self._rollouts}
        proved = self._ask(f"update {version}: prove", proofs, Proved)

        told = moved[self._trainers[0]]
        if not isinstance(told, Sent):
            raise CrewError(f"{self._trainers[0]}: expected a report of the update, got {type(told).__name__}")
        sent = {worker: told.sent_bytes[worker] for worker in self._trainers}
        rollouts = tuple(RolloutBytes(w, told.received_bytes[w], self._needed[w]) for w in self._rollouts)
        differences = [f"{worker}: {line}" for worker, proof in proved.items() for line in proof.differences]
        differences += byte_differences(model_bytes, sum(sent.values()), rollouts)
        seconds = self._phases.seconds
        return UpdateResult(
            version=version,
            loss=sum(reply.loss for reply in trained.values()) / len(trained),
            changed_elements=sum(reply.changed_elements for reply in trained.values()),
            bytes_sent_by_trainers=sum(sent.values()),
            model_bytes=model_bytes,
            trainers=sent,
            rollouts=rollouts,
            tensors_compared=sum(proof.tensors for proof in proved.values()),
            bytes_compared=sum(proof.bytes for proof in proved.values()),
            logits_compared=sum(proof.logits for proof in proved.values()),
            differences=tuple(differences),
            measured=told.measured,
            seconds={
                name: seconds[f"update {version}: {name}"] for name in ("train", "transfer", "trainers save", "prove")
            },
        )

    def dump(self, folder: Path) -> None:
        """Write what anyone needs to check the last proof: saved checkpoint, live tensors, source maps.

        Files of an earlier dump in the same folder are replaced.
        """
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        for old in [*folder.glob("engine-*-*.safetensors"), *folder.glob("engine-*-*.map")]:
            old.unlink()
        shutil.copytree(self._saved, folder / "checkpoint")
        self._ask("dump", dict.fromkeys(self._rollouts, Dump(str(folder.resolve()))), Dumped)

    def close(self) -> None:
        """Let every worker close its adapter and leave."""
        with self._phases.phase("close", answers=len(self._everybody)) as advance:
            self._replies(dict.fromkeys(self._everybody, Close()), Closed, advance)
            self._crew.wait_for_exit(deadline_s=self._deadline_s)

    def _ask(
        self, phase: str, commands: Mapping[str, Command], expected: type[ReplyT] | tuple[type[ReplyT], ...]
    ) -> dict[str, ReplyT]:
        with self._phases.phase(phase, answers=len(commands)) as advance:
            return self._replies(commands, expected, advance)

    def _replies(
        self,
        commands: Mapping[str, Command],
        expected: type[ReplyT] | tuple[type[ReplyT], ...],
        advance: Callable[[], None],
    ) -> dict[str, ReplyT]:
        replies = self._crew.ask(commands, deadline_s=self._deadline_s, on_reply=lambda worker, reply: advance())
        good: dict[str, ReplyT] = {}
        for worker, reply in replies.items():
            if not isinstance(reply, expected):
                raise CrewError(
                    f"{worker}: got {type(reply).__name__} as the answer to {type(commands[worker]).__name__}"
                )
            good[worker] = reply
        return good
