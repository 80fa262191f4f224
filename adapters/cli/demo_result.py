"""What a demo run found, as `transload demo --json` prints it.

`verified` is the conjunction of every update's proof; a proof is a list of differences that must be empty. A
difference is a tensor whose bits are wrong, logits that are wrong, or bytes that crossed more or less often than once.
"""

from __future__ import annotations

import msgspec

from adapters.cli.demo_messages import Measured
from adapters.connect_report import ConnectReport

__all__ = ["DemoResult", "LiveSize", "ModelSize", "RolloutBytes", "UpdateResult", "byte_differences"]


class ModelSize(msgspec.Struct, frozen=True):
    """The checkpoint: one copy of the model."""

    layers: int
    checkpoint_tensors: int
    elements: int
    bytes: int


class LiveSize(msgspec.Struct, frozen=True):
    """What one worker holds before anything is discovered: tensors, their bytes, and shards without elements."""

    worker: str
    tensors: int
    bytes: int
    empty_shards: int


class RolloutBytes(msgspec.Struct, frozen=True):
    """One rollout rank in one update: payload bytes counted on arrival, and bytes of the elements its map names."""

    worker: str
    bytes_received: int
    bytes_needed: int


class UpdateResult(msgspec.Struct, frozen=True):
    """One optimizer step, the update after it, and its proof.

    Attributes
    ----------
    loss
        Before the step, averaged over the trainers.
    changed_elements
        Weights whose bits the step changed.
    bytes_sent_by_trainers, trainers
        All together, and each; `model_bytes` is one copy of the model.
    rollouts
        What each received and what it needs.
    tensors_compared, bytes_compared, logits_compared
        Over all rollout ranks.
    differences
        Empty when everything is proven.
    measured
        The library's own measures of the transfer.
    seconds
        Wall time of the steps.
    """

    version: int
    loss: float
    changed_elements: int
    bytes_sent_by_trainers: int
    model_bytes: int
    trainers: dict[str, int]
    rollouts: tuple[RolloutBytes, ...]
    tensors_compared: int
    bytes_compared: int
    logits_compared: int
    differences: tuple[str, ...]
    measured: Measured
    seconds: dict[str, float]

    @property
    def verified(self) -> bool:
        """Nothing differs."""
        return not self.differences


class DemoResult(msgspec.Struct, frozen=True):
    """A whole run.

    `connect` is the library's own report: what was discovered on every worker, and the plan. `seconds` is wall time by
    phase, `dump` the folder that was written, if any.
    """

    verified: bool
    model: ModelSize
    live: tuple[LiveSize, ...]
    connect: ConnectReport
    updates: tuple[UpdateResult, ...]
    seconds: dict[str, float]
    dump: str | None


def byte_differences(model_bytes: int, sent_by_trainers: int, rollouts: tuple[RolloutBytes, ...]) -> list[str]:
    """One line for every law of "each byte once" that the counted bytes break."""
    differences = []
    if sent_by_trainers != model_bytes:
        differences.append(f"trainers: expected to send {model_bytes} bytes, the model once; sent {sent_by_trainers}")
    differences += [
        f"{each.worker}: expected to receive the {each.bytes_needed} bytes it needs, received {each.bytes_received}"
        for each in rollouts
        if each.bytes_received != each.bytes_needed
    ]
    return differences
