"""What a demo worker does for each command, as a trainer rank or as a rollout rank.

Every method is one step of the demo on one rank; ranks of a group get the same command at the same time, so the
collectives inside meet. The adapters are used as any user would use them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from adapters.checkpoint import Checkpoint
from adapters.cli import demo_model
from adapters.cli.bit_compare import compare_bits, count_changed
from adapters.cli.demo_cluster import BUFFER_BYTES, ENGINES, demo_topology
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
    Measured,
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
    WorkerSetup,
    WriteCheckpoint,
    Written,
)
from adapters.receiver import ReceiverAdapter
from adapters.receiver import Update as ReceivedUpdate
from adapters.rendezvous import SharedFolder
from adapters.rollouts import transformers_tp
from adapters.sender import SenderAdapter
from adapters.trainers import fsdp
from transfer_exec.report import TransferReport

__all__ = ["make_role"]

_POLL_PAUSE_S = 0.002


def make_role(setup: WorkerSetup) -> TrainerRole | RolloutRole:
    """The role named in the setup."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return TrainerRole(setup) if setup.worker.startswith("trainer/") else RolloutRole(setup)


class TrainerRole:
    """One FSDP2 rank: trains, sends, saves."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._model: PreTrainedModel
        self._optimizer: torch.optim.Optimizer
        self._sender: SenderAdapter

    def answer(self, command: Command) -> Reply:
        """Do one command."""
        start = time.perf_counter()
        match command:
            case Start():
                return Ready()
            case WriteCheckpoint(folder):
                return self._write(Path(folder), start)
            case Build(folder):
                return self._build(Path(folder), start)
            case Connect(folder):
                return self._connect(Path(folder), start)
            case Train(step):
                return self._train(step, start)
            case Send(version):
                return self._send(version, start)
            case Save(folder):
                return self._save(Path(folder), start)
            case Close():
                return self._close()
        raise ValueError(f"{self._setup.worker}: a trainer has no answer to {type(command).__name__}")

    def _write(self, folder: Path, start: float) -> Written:
        demo_model.write_random(folder, self._setup.layers)
        space = Checkpoint.open(folder).space
        return Written(len(space), space.total_elements, space.total_bytes, time.perf_counter() - start)

    def _build(self, folder: Path, start: float) -> Built:
        _join_group(self._setup)
        self._model = demo_model.load_trainer(folder, self._setup.group_size)
        self._optimizer = demo_model.make_optimizer(self._model)
        return _built(fsdp.local_tensors(self._model), start)

    def _train(self, step: int, start: float) -> Trained:
        before = {name: tensor.clone() for name, tensor in fsdp.local_tensors(self._model).items()}
        loss = demo_model.train_step(self._model, self._optimizer, seed=step * 1000 + self._setup.rank)
        after = fsdp.local_tensors(self._model)
        return Trained(
            loss=loss,
            changed_elements=count_changed(before, after),
            elements=sum(tensor.numel() for tensor in after.values()),
            seconds=time.perf_counter() - start,
        )

    def _connect(self, folder: Path, start: float) -> Connected:
        model = self._model
        self._sender = SenderAdapter(
            fsdp.fsdp_load_weights(model),
            lambda: fsdp.local_tensors(model),
            folder,
            rank=self._setup.rank,
            world_size=self._setup.group_size,
            rendezvous=_rendezvous(self._setup),
            deadline_s=self._setup.deadline_s,
        )
        report = self._sender.connect(ENGINES, topology=demo_topology(), buffer_bytes=BUFFER_BYTES)
        return Connected(report, time.perf_counter() - start)

    def _send(self, version: int, start: float) -> Sent:
        pending = self._sender.send_weights(version)
        returned_s = time.perf_counter() - start
        report = pending.result(self._setup.deadline_s)
        return Sent(
            sent_bytes={worker: report.bytes_sent(worker) for worker in report.workers},
            received_bytes={worker: report.bytes_received(worker) for worker in report.workers},
            measured=_measured(report),
            returned_s=returned_s,
            seconds=time.perf_counter() - start,
        )

    def _save(self, folder: Path, start: float) -> Saved:
        demo_model.save_trainer(self._model, folder, rank=self._setup.rank)
        return Saved(time.perf_counter() - start)

    def _close(self) -> Closed:
        self._sender.close()
        distributed.destroy_process_group()
        return Closed()


class RolloutRole:
    """One tensor-parallel rank of an engine: polls, proves, dumps."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._model: PreTrainedModel
        self._receiver: ReceiverAdapter

    def answer(self, command: Command) -> Reply:
        """Do one command."""
        start = time.perf_counter()
        match command:
            case Start():
                return Ready()
            case Build(folder):
                return self._build(Path(folder), start)
            case Connect(folder):
                return self._connect(Path(folder), start)
            case Update(version):
                return self._update(version, start)
            case Prove(folder, spoil):
                return self._prove(Path(folder), spoil, start)
            case Dump(folder):
                return self._dump(Path(folder))
            case Close():
                return self._close()
        raise ValueError(f"{self._setup.worker}: a rollout has no answer to {type(command).__name__}")

    def _build(self, folder: Path, start: float) -> Built:
        _join_group(self._setup)
        self._model = demo_model.load_rollout(folder, self._setup.group_size)
        return _built(transformers_tp.local_tensors(self._model), start)

    def _connect(self, folder: Path, start: float) -> Connected:
        model = self._model
        self._receiver = ReceiverAdapter(
            transformers_tp.tp_load_weights(model),
            lambda: transformers_tp.local_tensors(model),
            folder,
            engine=self._setup.group.removeprefix("engine/"),
            rank=self._setup.rank,
            world_size=self._setup.group_size,
            rendezvous=_rendezvous(self._setup),
            deadline_s=self._setup.deadline_s,
        )
        self._poll_until(lambda update: self._receiver.connected, "connect")
        return Connected(None, time.perf_counter() - start)

    def _update(self, version: int, start: float) -> Received:
        update = self._poll_until(lambda update: update is not None, f"version {version}")
        assert update is not None
        return Received(update.version, time.perf_counter() - start)

    def _prove(self, folder: Path, spoil: bool, start: float) -> Proved:
        live = transformers_tp.local_tensors(self._model)
        if spoil:
            _flip_one_bit(live)
        loaded = demo_model.load_rollout(folder, self._setup.group_size)
        differences = compare_bits(live, transformers_tp.local_tensors(loaded))
        logits = demo_model.prompt_logits(self._model)
        differences += compare_bits(
            {"logits of the prompt": logits}, {"logits of the prompt": demo_model.prompt_logits(loaded)}
        )
        return Proved(
            tensors=len(live),
            bytes=sum(tensor.nbytes for tensor in live.values()),
            logits=logits.numel(),
            differences=differences,
            seconds=time.perf_counter() - start,
        )

    def _dump(self, folder: Path) -> Dumped:
        stem = f"engine-{self._setup.group.removeprefix('engine/')}-{self._setup.rank}"
        live = transformers_tp.local_tensors(self._model)
        # One file holds no memory twice: aliases are written as copies.
        save_file({name: tensor.clone().contiguous() for name, tensor in live.items()}, folder / f"{stem}.safetensors")
        source_map = self._receiver.source_map
        assert source_map is not None
        (folder / f"{stem}.map").write_bytes(source_map.to_bytes())
        return Dumped((f"{stem}.safetensors", f"{stem}.map"))

    def _close(self) -> Closed:
        self._receiver.close()
        distributed.destroy_process_group()
        return Closed()

    def _poll_until(self, done: Callable[[ReceivedUpdate | None], bool], what: str) -> ReceivedUpdate | None:
        # Where an engine would poll once per step, between two batches.
        stop_at = time.monotonic() + self._setup.deadline_s
        while not done(update := self._receiver.poll_requests()):
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{self._setup.worker}: no {what} within {self._setup.deadline_s:g} s of polling")
            time.sleep(_POLL_PAUSE_S)
        return update


def _join_group(setup: WorkerSetup) -> None:
    meeting = Path(setup.folder) / f"{setup.group.replace('/', '-')}.store"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=setup.rank,
        world_size=setup.group_size,
        timeout=timedelta(seconds=setup.deadline_s),
    )


def _rendezvous(setup: WorkerSetup) -> SharedFolder:
    return SharedFolder(Path(setup.folder) / "rendezvous", job="demo")


def _built(live: Mapping[str, torch.Tensor], start: float) -> Built:
    return Built(
        tensors=len(live),
        bytes=sum(tensor.nbytes for tensor in live.values()),
        empty_shards=sum(tensor.numel() == 0 for tensor in live.values()),
        seconds=time.perf_counter() - start,
    )


def _measured(report: TransferReport) -> Measured:
    measures = report.measures
    assert report.transfer_s is not None
    assert measures is not None
    return Measured(
        transport=report.transport,
        rounds=report.rounds,
        transfer_s=report.transfer_s,
        ewtt_s=measures.ewtt_s,
        agst_s=measures.agst_s,
        rollout_pause_s=measures.rollout_pause_s,
        publication_s=measures.publication_s,
    )


def _flip_one_bit(live: Mapping[str, torch.Tensor]) -> None:
    name = next(name for name, tensor in live.items() if name.endswith("down_proj"))
    live[name].view(torch.int16).view(-1)[0] ^= 1
