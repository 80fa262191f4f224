"""What a user gives for one worker: its tensors, their loader, hooks, and how it takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from adapters.probe_live import Parameters
from adapters.probing import LoadWeights
from layout_algebra.space import CheckpointSpace

__all__ = ["Hook", "Worker"]

Hook: TypeAlias = Callable[[], object]
"""Of an engine: called before or after an update, without arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """What the user gave for one worker.

    Attributes
    ----------
    name
        Its name in plans.
    load_weights, parameters, space
        As for ``probe``.
    receives
        Whether it is a rollout.
    staging
        Whether its bytes pass through copies in host memory.
    before_update, after_update
        A rollout's hooks.
    deadline_s
        Of every single wait of a transfer.
    address
        Says at which address peers reach this machine, if the job's workers are on so many machines.
    cards
        Which RDMA cards it uses, as `transfer_exec.transport.devices` spells it.
    """

    name: str
    load_weights: LoadWeights
    parameters: Parameters
    space: CheckpointSpace
    receives: bool
    staging: bool
    before_update: Hook | None
    after_update: Hook | None
    deadline_s: float
    address: Callable[[int], str]
    cards: str = ""
