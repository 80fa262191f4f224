"""What the demo's parent says to its workers and what they answer: one JSON object a line, as typed structs.

A worker answers every command with exactly one reply, or with `Failed`. Workers are named as in plans: `trainer/2`,
`engine/0/1`. Bytes are payload bytes; `seconds` is the command's own time on that worker.

    {"type":"Train","step":1}  ->  {"type":"Trained","loss":7.62,"changed_elements":...,"seconds":0.41}
"""

from __future__ import annotations

import msgspec

from adapters.connect_report import ConnectReport

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
    "Measured",
    "Prove",
    "Proved",
    "Ready",
    "Received",
    "Reply",
    "Save",
    "Saved",
    "Send",
    "Sent",
    "Start",
    "Train",
    "Trained",
    "Update",
    "WorkerSetup",
    "WriteCheckpoint",
    "Written",
    "decode_reply",
    "failure_of",
]


class WorkerSetup(msgspec.Struct, frozen=True):
    """Who a worker is; given on its command line.

    Attributes
    ----------
    worker
        Its name.
    rank, group_size
        Its place among the trainers, or in its engine.
    folder
        The demo's own temporary folder; rendezvous and process group stores live in it.
    layers
        Of the model.
    deadline_s
        For every wait on a peer.
    """

    worker: str
    rank: int
    group_size: int
    folder: str
    layers: int
    deadline_s: float

    @property
    def group(self) -> str:
        """The process group it joins: "trainer", "engine/0", ..."""
        return self.worker.rpartition("/")[0]


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    """A member of a union."""


class Start(_Tagged, frozen=True):
    """Answer when the imports are done."""


class WriteCheckpoint(_Tagged, frozen=True):
    """Make the random model and save it (one trainer)."""

    folder: str


class Build(_Tagged, frozen=True):
    """Join the process group and load the model from the folder."""

    folder: str


class Connect(_Tagged, frozen=True):
    """Make the adapter: probe the loader on the folder's names, exchange maps, get the plan."""

    folder: str


class Train(_Tagged, frozen=True):
    """One optimizer step (trainers)."""

    step: int


class Send(_Tagged, frozen=True):
    """Send the weights as this version and wait until all engines have them (trainers)."""

    version: int


class Update(_Tagged, frozen=True):
    """Poll until this version is installed (rollouts)."""

    version: int


class Save(_Tagged, frozen=True):
    """Gather the trainers' own state and save it into the folder (trainers)."""

    folder: str


class Prove(_Tagged, frozen=True):
    """Load the folder into a second model and compare every bit with the live one (rollouts).

    With `spoil`, one bit of one live weight of this rank is flipped first.
    """

    folder: str
    spoil: bool


class Dump(_Tagged, frozen=True):
    """Write the live tensors and the source map into the folder (rollouts)."""

    folder: str


class Close(_Tagged, frozen=True):
    """Close the adapter and leave."""


Command = Start | WriteCheckpoint | Build | Connect | Train | Send | Update | Save | Prove | Dump | Close


class Ready(_Tagged, frozen=True):
    """The imports are done."""


class Written(_Tagged, frozen=True):
    """Size of the checkpoint that was written."""

    tensors: int
    elements: int
    bytes: int
    seconds: float


class Built(_Tagged, frozen=True):
    """Live tensors of this worker, and how many of them are empty shards."""

    tensors: int
    bytes: int
    empty_shards: int
    seconds: float


class Connected(_Tagged, frozen=True):
    """What was discovered and planned, from the trainers; None from rollouts."""

    report: ConnectReport | None
    seconds: float


class Trained(_Tagged, frozen=True):
    """`changed_elements` of this rank's `elements` have other bits than before the step."""

    loss: float
    changed_elements: int
    elements: int
    seconds: float


class Measured(msgspec.Struct, frozen=True):
    """The library's own measures of one update, in seconds; see `transfer_exec.report`."""

    transport: str
    rounds: int
    transfer_s: float
    ewtt_s: float
    agst_s: float
    rollout_pause_s: float
    publication_s: float


class Sent(_Tagged, frozen=True):
    """One trainer's report of an update: payload bytes of every worker as counted, by worker name.

    `returned_s` is the time until `send_weights` returned, `seconds` until all engines had confirmed.
    """

    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    measured: Measured
    returned_s: float
    seconds: float


class Received(_Tagged, frozen=True):
    """The version a rollout installed."""

    version: int
    seconds: float


class Saved(_Tagged, frozen=True):
    """The folder holds the trainers' own state."""

    seconds: float


class Proved(_Tagged, frozen=True):
    """`differences` names the tensors that are not bit-equal, and the logits; empty when all are equal."""

    tensors: int
    bytes: int
    logits: int
    differences: tuple[str, ...]
    seconds: float


class Dumped(_Tagged, frozen=True):
    """Names of the files written."""

    files: tuple[str, ...]


class Closed(_Tagged, frozen=True):
    """Nothing of this worker is left to wait for."""


class Failed(_Tagged, frozen=True):
    """The command raised; `error` is class and message, `trace` the traceback."""

    error: str
    trace: str


Reply = Ready | Written | Built | Connected | Trained | Sent | Received | Saved | Proved | Dumped | Closed | Failed


def decode_reply(line: bytes) -> Reply:
    """Read a reply from JSON; raises `msgspec.DecodeError` for anything else."""
    decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
    return decoder.decode(line)


def failure_of(reply: Reply) -> str | None:
    """The error and traceback of a failed command, None for any other reply."""
    return f"{reply.error}\n{reply.trace}" if isinstance(reply, Failed) else None
