"""What the demo's parent says to its workers and what they answer: one JSON object a line, as typed structs.

A worker answers every command with exactly one reply, or with `Failed`. Numbers are plain ints and floats; ranks are
named as in the plan: `trainer/2`, `engine/0/1`.

    {"type":"Train","step":1}  ->  {"type":"Trained","loss":6.24,...,"seconds":0.41}
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Build",
    "Built",
    "Close",
    "Closed",
    "Command",
    "Connect",
    "Connected",
    "Dump",
    "Dumped",
    "Failed",
    "Prove",
    "Proved",
    "Received",
    "Reply",
    "Save",
    "Saved",
    "Send",
    "Sent",
    "Train",
    "Trained",
    "Update",
    "WorkerSetup",
    "WriteCheckpoint",
    "Written",
]


class WorkerSetup(msgspec.Struct, frozen=True):
    """Who a worker is; given on its command line. `folder` is the demo's own temporary folder."""

    worker: str
    group: str
    rank: int
    group_size: int
    folder: str
    layers: int
    deadline_s: float
    buffer_bytes: int
    engines: tuple[str, ...]
    engine_size: int
    trainers: int


class WriteCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Make the random model and save it, as transformers saves it."""

    folder: str


class Build(msgspec.Struct, frozen=True, tag=True):
    """Join the process group and load the model from the folder."""

    folder: str


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Make the adapter: probe the loader, exchange maps, get the plan."""

    folder: str


class Train(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step (trainers)."""

    step: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send the weights as this version and wait until all engines have them (trainers)."""

    version: int


class Update(msgspec.Struct, frozen=True, tag=True):
    """Poll until this version is installed (rollouts)."""

    version: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Gather the trainers' own state and save it with transformers (trainers)."""

    folder: str


class Prove(msgspec.Struct, frozen=True, tag=True):
    """Load the folder into a second model and compare every bit with the live one (rollouts)."""

    folder: str
    spoil: bool = False


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Write the live tensors and the source map (rollouts)."""

    folder: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the adapter and leave."""


Command = WriteCheckpoint | Build | Connect | Train | Send | Update | Save | Prove | Dump | Close


class Written(msgspec.Struct, frozen=True, tag=True):
    tensors: int
    elements: int
    bytes: int
    seconds: float


class Built(msgspec.Struct, frozen=True, tag=True):
    tensors: int
    bytes: int
    empty_shards: int
    seconds: float


class StageBytes(msgspec.Struct, frozen=True):
    """Bytes of one worker in one stage of a whole update."""

    stage: str
    sent: int
    received: int


class Connected(msgspec.Struct, frozen=True, tag=True):
    """What was discovered on this worker, and its part of the plan."""

    parameters: int
    slice_copies: int
    copied: int
    empty: int
    opaque: int
    unused_tensors: int
    needed_bytes: int
    seconds: float
    stages: tuple[StageBytes, ...]
    rounds: int
    digest: str
    lower_bound_s: float
    optimum_s: float


class Trained(msgspec.Struct, frozen=True, tag=True):
    loss: float
    changed_elements: int
    elements: int
    seconds: float


class Sent(msgspec.Struct, frozen=True, tag=True):
    version: int
    bytes_sent: int
    send_s: float
    seconds: float


class Received(msgspec.Struct, frozen=True, tag=True):
    version: int
    bytes_received: int
    seconds: float


class Saved(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Proved(msgspec.Struct, frozen=True, tag=True):
    """`differences` names the tensors that are not bit-equal; empty when all are."""

    tensors: int
    bytes: int
    differences: tuple[str, ...]
    logits_equal: bool
    logits: int
    seconds: float


class Dumped(msgspec.Struct, frozen=True, tag=True):
    files: tuple[str, ...]


class Closed(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command raised; `error` is the message, `trace` the traceback."""

    error: str
    trace: str


Reply = Written | Built | Connected | Trained | Sent | Received | Saved | Proved | Dumped | Closed | Failed
