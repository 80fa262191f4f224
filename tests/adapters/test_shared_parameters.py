"""Trainers whose parameters are in shared memory, in their own processes: mapped, bit for bit, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.connect_report import ConnectReport
from adapters.receiver import ReceiverAdapter
from adapters.sender import SenderAdapter
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import Crew, Rollout, compile_kernels, wait_for
from tests.adapters.toy import Holding, Pairs, same_bits

pytestmark = pytest.mark.processes

SHAPES = {"columns": (64, 1024), "views.a": (3000,), "views.b": (40, 50), "private": (64, 64), "tiny": (8,)}
SPACE = CheckpointSpace([TensorSpec(name, shape, "F32") for name, shape in SHAPES.items()])
SHARED = ("columns", "views.a", "views.b")
SHARED_BYTES = 4 * (64 * 1024 + 3000 + 40 * 50)
READ_BYTES = 4 * 64 * 64
DEADLINE_S = 60.0
_FIXED = 0x10


def weights(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of a version."""
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def in_shared_memory(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """A tensor of so many elements that other processes can map: torch's ways, or a memory file."""
    if how == "memory file":
        fd = os.memfd_create("weights")
        os.ftruncate(fd, tensor.nbytes)
        shared = torch.from_numpy(np.frombuffer(mmap.mmap(fd, tensor.nbytes), dtype=np.float32))
        os.close(fd)
        return shared
    choose: Callable[[str], None] = torch.multiprocessing.set_sharing_strategy
    choose(how)
    share: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.share_memory_
    return share(tensor)


def trainer(how: str) -> Holding:
    """All tensors: one shared by itself, two as views at odd places of one shared storage, two private."""
    flat = in_shared_memory(torch.zeros(6000), how)
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    tensors["columns"] = in_shared_memory(torch.zeros(64 * 1024), how).view(64, 1024)
    tensors["views.a"] = flat[3:3003]
    tensors["views.b"] = flat[3501:5501].view(40, 50)
    return Holding(tensors, load)


def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
    for name, tensor in pairs:
        live[name].copy_(tensor)


def rollout() -> Holding:
    """The columns in two halves, one behind the other: runs of 2 KiB; everything else as it is."""

    def halves(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            live[name].copy_(torch.stack([tensor[:, :512], tensor[:, 512:]]) if name == "columns" else tensor)

    shapes: Mapping[str, tuple[int, ...]] = {**SHAPES, "columns": (2, 64, 512)}
    return Holding({name: torch.zeros(shape) for name, shape in shapes.items()}, halves)


def holds(holding: Holding, version: int) -> bool:
    other = holding.fresh()
    other.load_weights(weights(version).items())
    return same_bits(holding.tensors, other.tensors)


def train(pipe: Connection, folder: Path, how: str) -> None:
    """A trainer in a process: connects, sends, moves its parameters, dies."""
    holding = trainer(how)
    sender = SenderAdapter(
        holding.load_weights, holding.parameters, SPACE, rank=0, world_size=1, rendezvous=folder, deadline_s=DEADLINE_S
    )
    while True:
        what, version = pipe.recv()
        try:
            match what:
                case "connect":
                    pipe.send(sender.connect(["a"]).to_json())
                case "send":
                    holding.load_weights(weights(version).items())
                    report = sender.send_weights(version).result()
                    pipe.send((report.workers["engine/a/0"].direct_bytes, report.workers["engine/a/0"].mapped_bytes))
                case "move":
                    holding.tensors["columns"] = in_shared_memory(torch.zeros(64 * 1024), how).view(64, 1024)
                    pipe.send("moved")
                case "leave":
                    sender.close()
                    return
        except Exception as error:  # noqa: BLE001 - the test looks at it
            pipe.send((type(error).__name__, str(error)))


def mapped_files() -> dict[str, int]:
    """How often this process has mapped which shared file."""
    gc.collect()
    found: dict[str, int] = {}
    for fields in (line.split() for line in Path("/proc/self/maps").read_text().splitlines()):
        if fields[1][3] == "s" and fields[4] != "0":
            found[f"{fields[3]}/{fields[4]}"] = found.get(f"{fields[3]}/{fields[4]}", 0) + 1
    return found


class Other:
    """The trainer's process."""

    def __init__(self, folder: Path, how: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=train, args=(theirs, folder, how), daemon=True)
        self.process.start()

    def ask(self, what: str, version: int = 0) -> object:
        self.tell(what, version)
        assert self._pipe.poll(120), f"no answer to {what}"
        return self._pipe.recv()

    def tell(self, what: str, version: int = 0) -> None:
        self._pipe.send((what, version))

    def die(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


@contextmanager
def job(folder: Path, how: str) -> Iterator[tuple[Other, Rollout]]:
    """A trainer in its process, and a rollout in this one, which polls."""
    compile_kernels()
    holding = rollout()
    other = Other(folder, how)
    receiver = ReceiverAdapter(
        holding.load_weights,
        holding.parameters,
        SPACE,
        engine="a",
        rank=0,
        world_size=1,
        rendezvous=folder,
        deadline_s=DEADLINE_S,
    )
    one = Rollout(receiver, holding)
    try:
        yield other, one
    finally:
        one.leave()
        other.die()


@pytest.mark.parametrize("how", ["file_descriptor", "file_system", "memory file"])
def test_shared_parameters_are_mapped_and_private_ones_read(tmp_path: Path, how: str) -> None:
    before = mapped_files()
    with job(tmp_path, how) as (other, one):
        for version in (1, 3):
            report = json.loads(str(other.ask("connect")))
            assert report["unmappable"] == report["unreadable"] == ""
            for each in report["workers"]:
                assert (each["direct_bytes"], each["mapped_bytes"]) == (SHARED_BYTES + READ_BYTES, SHARED_BYTES)
            for number in (version, version + 1):
                assert other.ask("send", number) == (SHARED_BYTES + READ_BYTES, SHARED_BYTES)
                assert holds(one.holding, number)
        connected = mapped_files()
        assert len(connected.keys() - before.keys()) >= 2
        other.ask("connect")
        assert len(mapped_files()) == len(connected), "mappings of the connect before are gone"
        other.tell("leave")
        other.process.join(30)
    assert mapped_files() == before
    assert not one.errors


def test_a_parameter_that_moved_is_refused_until_connect(tmp_path: Path) -> None:
    with job(tmp_path, "file_system") as (other, one):
        other.ask("connect")
        other.ask("send", 1)
        other.ask("move")
        refused = str(other.ask("send", 2))
        assert "StaleError" in refused
        assert "columns on trainer/0: parameter storage replaced since connect" in refused
        assert holds(one.holding, 1)
        other.ask("connect")
        assert other.ask("send", 3) == (SHARED_BYTES + READ_BYTES, SHARED_BYTES)
        assert holds(one.holding, 3)


def test_a_trainer_that_dies_while_it_is_copied_from_leaves_the_engine_torn(tmp_path: Path) -> None:
    """Its memory is there as long as it is mapped, but it says no more that it was not given back."""
    before = mapped_files()
    with job(tmp_path, "file_descriptor") as (other, one):
        other.ask("connect")
        other.ask("send", 1)
        kernels = one.adapter._duties._kernels
        before_run = kernels.before_run

        def die_first() -> None:
            other.die()
            before_run()

        kernels.before_run = die_first  # type: ignore[method-assign]
        other.tell("send", 2)
        wait_for(lambda: one.adapter.state.name == "TORN")
        assert not one.updates or one.updates[-1].version == 1
        assert one.errors
    assert mapped_files() == before


def test_where_a_file_cannot_be_opened_its_parameters_are_read_and_connect_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> np.ndarray:
        raise PermissionError(13, "Permission denied", "/proc/7/fd/8")

    held, needed = trainer("file_descriptor"), rollout()
    # Runs of 2 KiB are not read, so the columns go in rounds.
    read = SHARED_BYTES + READ_BYTES - 4 * 64 * 1024
    with Crew(tmp_path, [held], {"a": [needed]}, checkpoint=SPACE) as crew:
        with monkeypatch.context() as patch:
            patch.setattr("transfer_exec.transport.shared_files._map", refuse)
            report = connect(crew)
        assert "trainer/0: its shared memory cannot be mapped: [Errno 13] Permission denied" in report.unmappable
        assert "nothing is mapped: engine/a/0: trainer/0: its shared memory" in str(report)
        assert [(each.direct_bytes, each.mapped_bytes) for each in report.workers] == [(read, 0)] * 2
        send(crew, 1)
        assert holds(needed, 1)
        report = connect(crew)
        assert report.workers[0].mapped_bytes == SHARED_BYTES, "a later connect looks again"
        assert f"{SHARED_BYTES:,} mapped" in str(report)
        send(crew, 2)
        assert holds(needed, 2)


def test_copies_of_a_trainer_that_stages_are_in_shared_memory(tmp_path: Path) -> None:
    """Whatever its parameters are in; its caller trains on meanwhile."""
    held, needed = Holding({name: torch.zeros(shape) for name, shape in SHAPES.items()}, load), rollout()
    before = mapped_files()
    with Crew(tmp_path, [held], {"a": [needed]}, checkpoint=SPACE, staging={"trainer"}) as crew:
        for version in (1, 2):
            report = connect(crew)
            whole = SHARED_BYTES + READ_BYTES
            assert [(each.direct_bytes, each.mapped_bytes) for each in report.workers] == [(whole, whole)] * 2
            held.load_weights(weights(version).items())
            (pending,) = crew.trainers(lambda sender, rank, version=version: sender.send_weights(version))  # type: ignore[misc]
            for tensor in held.tensors.values():
                tensor.fill_(-1)
            assert pending.value is not None
            pending.value.result()
            assert holds(needed, version)
    assert mapped_files() == before


@pytest.mark.parametrize("mappable", [True, False])
def test_where_nobody_may_read_shared_parameters_are_still_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappable: bool
) -> None:
    """As on systems that let no process trace another one."""

    def refuse(*_: object) -> list[np.ndarray]:
        raise OSError("no file")

    monkeypatch.setattr("transfer_exec.transport.shared_memory.why_not_process", lambda pid, address: "not permitted")
    if not mappable:
        monkeypatch.setattr("transfer_exec.transport.shared_memory.map_places", refuse)
    held, needed = trainer("file_descriptor"), rollout()
    with Crew(tmp_path, [held], {"a": [needed]}, checkpoint=SPACE) as crew:
        report = connect(crew)
        expected = SHARED_BYTES if mappable else 0
        assert [(each.direct_bytes, each.mapped_bytes) for each in report.workers] == [(expected, expected)] * 2
        assert "nothing is read directly" in str(report)
        assert ("nothing is mapped" in str(report)) is not mappable
        send(crew, 1)
        assert holds(needed, 1)


def test_another_file_at_the_same_address_is_refused(tmp_path: Path) -> None:
    """Nothing else tells: address, shape, strides and dtype are what they were."""
    file = tmp_path / "weights"
    size = 4 * 64 * 1024

    def mapping(address: int) -> int:
        """The file's pages, at an address that has others."""
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        fd = os.open(file, os.O_RDWR)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), rights, mmap.MAP_SHARED | _FIXED, fd, 0)
        os.close(fd)
        return int(found)

    file.write_bytes(bytes(size))
    held, needed = trainer("file_descriptor"), rollout()
    held.tensors["columns"] = torch.from_file(str(file), shared=True, size=64 * 1024).view(64, 1024)
    address = held.tensors["columns"].data_ptr()
    with Crew(tmp_path / "meeting", [held], {"a": [needed]}, checkpoint=SPACE) as crew:
        crew.connect()
        send(crew, 1)
        file.unlink()
        file.write_bytes(bytes(size))
        assert mapping(address) == address
        (outcome,) = crew.trainers(lambda sender, rank: sender.send_weights(2).result())
        assert "columns on trainer/0: parameter storage replaced since connect (file was" in str(outcome.error)
        assert holds(needed, 1)
        crew.connect()
        send(crew, 3)
        assert holds(needed, 3)


def connect(crew: Crew) -> ConnectReport:
    (report,) = crew.connect()
    assert isinstance(report, ConnectReport)
    return report


def send(crew: Crew, version: int) -> None:
    for each in crew.holdings:
        each.load_weights(weights(version).items())
    for outcome in crew.trainers(lambda sender, rank: sender.send_weights(version).result()):
        assert outcome.error is None
