"""Bytes that go straight from parameter to parameter: what connect decides and reports, and what failures do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch

from adapters.connect_report import ConnectReport
from adapters.failures import VerificationError
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import Crew, Outcome, wait_for
from tests.adapters.toy import Holding, Pairs, same_bits
from transfer_exec.errors import TransportError
from transfer_exec.report import TransferReport
from transfer_exec.transport.reading import Batch, Sums
from transfer_exec.transport.shared_memory import SharedMemoryTransport

SHAPES = {"long": (64, 64), "turned": (64, 64), "short": (8,)}
SPACE = CheckpointSpace([TensorSpec(name, shape, "F32") for name, shape in SHAPES.items()])
LONG_BYTES = 64 * 64 * 4


def holding(*, turn: bool, parts: Mapping[str, slice] | None = None, scattered: bool = False) -> Holding:
    """All tensors, or some rows of them; turned means transposed, scattered every second column of wider memory."""
    rows = parts or {}

    def load(live: dict[str, torch.Tensor], pairs: Pairs) -> None:
        for name, tensor in pairs:
            mine = tensor[rows.get(name, slice(None))]
            live[name].copy_(mine.t() if turn and name == "turned" else mine)

    tensors = {}
    for name, shape in SHAPES.items():
        kept = torch.zeros(shape)[rows.get(name, slice(None))]
        made = torch.zeros(*kept.shape[:-1], 2 * kept.shape[-1])[..., ::2] if scattered else torch.zeros(kept.shape)
        tensors[name] = made.t() if turn and name == "turned" else made
    return Holding(tensors, load)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of a version."""
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def connect(crew: Crew) -> ConnectReport:
    report = crew.connect()[0]
    assert isinstance(report, ConnectReport)
    return report


def send(crew: Crew, version: int) -> list[Outcome[TransferReport]]:
    """Fill the trainers and send; every trainer's outcome."""
    for each in crew.holdings:
        each.load_weights(weights(version).items())
    return crew.trainers(lambda sender, rank: sender.send_weights(version).result())


def sent_directly(crew: Crew, version: int) -> int:
    """Send a version, check what landed, and say how much went directly."""
    outcomes = send(crew, version)
    for one in crew.rollouts.values():
        other = one.holding.fresh()
        other.load_weights(weights(version).items())
        assert same_bits(one.holding.tensors, other.tensors)
    report = outcomes[0].value
    assert report is not None, outcomes[0].error
    return report.workers["engine/a/0"].direct_bytes


@pytest.mark.parametrize("scattered", [False, True])
def test_what_lies_alike_goes_directly_and_the_report_says_so(tmp_path: Path, scattered: bool) -> None:
    halves = {"long": slice(0, 32), "turned": slice(0, 32)}
    trainers = [holding(turn=False, parts=halves), holding(turn=False, parts={n: slice(32, 64) for n in halves})]
    rollout = holding(turn=True, scattered=scattered)
    with Crew(tmp_path, trainers, {"a": [rollout]}, checkpoint=SPACE) as crew:
        report = connect(crew)
        assert report.unreadable == ""
        assert report.worker("engine/a/0").direct_bytes == (0 if scattered else LONG_BYTES)
        assert sum(report.worker(f"trainer/{k}").direct_bytes for k in (0, 1)) == (0 if scattered else LONG_BYTES)
        assert ("of them directly" in str(report)) is not scattered
        for version in (1, 2):
            assert sent_directly(crew, version) == (0 if scattered else LONG_BYTES)


def test_where_memory_may_not_be_read_everything_goes_in_rounds_and_connect_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "transfer_exec.transport.shared_memory.why_not_process"
    monkeypatch.setattr(refused, lambda pid, address: "Operation not permitted")
    trainer, rollout = holding(turn=False), holding(turn=True)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=SPACE) as crew:
        report = connect(crew)
        assert (
            "trainer/0: its memory cannot be read with process_vm_readv: Operation not permitted" in report.unreadable
        )
        assert "nothing is read directly: engine/a/0: trainer/0: its memory" in str(report)
        assert {one.direct_bytes for one in report.workers} == {0}
        assert sent_directly(crew, 1) == 0
        monkeypatch.undo()
        assert connect(crew).worker("engine/a/0").direct_bytes == LONG_BYTES, "a later connect looks again"


def test_a_direct_read_that_fails_leaves_the_engine_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has run: everything but a few short tensors is direct, and the first read fails."""
    trainer, rollout = holding(turn=False), holding(turn=False)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=SPACE, deadline_s=10.0) as crew:
        connect(crew)

        def fail(*_: object) -> None:
            raise TransportError("process 7: 1 ranges cannot be read: Bad address")

        with monkeypatch.context() as patch:
            patch.setattr(SharedMemoryTransport, "_fetch", fail)
            (outcome,) = send(crew, 1)
        assert "1 ranges cannot be read" in str(outcome.error)
        # The trainer may hear of it first.
        wait_for(lambda: crew.rollouts["a/0"].adapter.state.name == "TORN")
        connect(crew)
        assert sent_directly(crew, 2) == 2 * LONG_BYTES


@pytest.mark.parametrize("staging", [(), ("a",)], ids=["in place", "staged"])
def test_a_read_of_wrong_bytes_is_seen_and_named(
    tmp_path: Path, staging: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit, on its way: nobody but the digests can tell."""
    move = Batch.move

    def spoiling(batch: Batch, pid: int, sums: Sums | None) -> None:
        byte = ctypes.c_uint8.from_address(int(batch.read_digested[0].theirs[0, 0]))
        byte.value ^= 1
        move(batch, pid, sums)
        byte.value ^= 1

    trainer, rollout = holding(turn=False), holding(turn=True)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=SPACE, staging=staging) as crew:
        connect(crew)
        assert sent_directly(crew, 1) > 0
        monkeypatch.setattr(Batch, "move", spoiling)
        (outcome,) = send(crew, 2)
        assert isinstance(outcome.error, VerificationError)
        assert "engine/a/0: the bits of long" in str(outcome.error)


@pytest.mark.parametrize("tie", [lambda t: t, lambda t: t[:32], lambda t: t.view(-1)], ids=["all", "rows", "flat"])
@pytest.mark.parametrize("shared", [False, True], ids=["read", "mapped"])
def test_tied_parameters_are_proven_in_every_update(
    tmp_path: Path, tie: Callable[[torch.Tensor], torch.Tensor], *, shared: bool
) -> None:
    """What is two parameters and one memory comes for both of them and is digested once."""
    trainer, rollout = holding(turn=False), holding(turn=False)
    rollout.tensors["tied"] = tie(rollout.tensors["long"])
    if shared:
        for tensor in trainer.tensors.values():
            tensor.share_memory_()
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=SPACE) as crew:
        connect(crew)
        for version in (1, 2, 3):
            (outcome,) = send(crew, version)
            assert outcome.error is None
            assert torch.equal(rollout.tensors["tied"], tie(weights(version)["long"]))
            assert outcome.value is not None
            assert outcome.value.workers["engine/a/0"].direct_bytes >= 2 * LONG_BYTES
            assert not crew.rollouts["a/0"].adapter._duties._looks_at_rest, "only the first time"


def test_a_first_update_that_digests_other_bytes_than_it_leaves_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying and digesting in one go is itself looked at, by digests of the memory at rest."""
    move = Batch.move

    def spoiling(batch: Batch, pid: int, sums: Sums | None) -> None:
        move(batch, pid, sums)
        ctypes.c_uint8.from_address(int(batch.read_digested[0].mine[0, 0])).value ^= 1

    with Crew(tmp_path, [holding(turn=False)], {"a": [holding(turn=True)]}, checkpoint=SPACE) as crew:
        connect(crew)
        monkeypatch.setattr(Batch, "move", spoiling)
        (outcome,) = send(crew, 1)
        assert isinstance(outcome.error, VerificationError)
        assert "engine/a/0: the bits of long" in str(outcome.error)


def test_without_verification_nothing_is_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("digested")

    trainer, rollout = holding(turn=False), holding(turn=True)
    with Crew(tmp_path, [trainer], {"a": [rollout]}, checkpoint=SPACE, verify="off") as crew:
        monkeypatch.setattr(import_module("layout_algebra.fingerprint"), "digest_strips", refuse)
        connect(crew)
        (outcome,) = send(crew, 1)
        assert outcome.value is not None, outcome.error
        assert outcome.value.workers["engine/a/0"].direct_bytes > 0
