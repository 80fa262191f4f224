"""What a rank is asked to do, and what comes of it: the payload of `Ask` and `Answer`.

::

    Probe -> Probed        GiveMap -> MapGiven     Bind -> Bound          Attach, Stay -> Done
    Prepare -> Prepared    Transfer -> Transferred    Install -> Installed    Publish -> Published    Assess -> Assessed
    Stage, Ready -> Done
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

__all__ = [
    "Assess",
    "Assessed",
    "Attach",
    "Bind",
    "Bound",
    "Cell",
    "Count",
    "Done",
    "Duty",
    "GiveMap",
    "Install",
    "Installed",
    "MapGiven",
    "Name",
    "Prepare",
    "Prepared",
    "Probe",
    "Probed",
    "Publish",
    "Published",
    "Ready",
    "Result",
    "Seconds",
    "Stage",
    "Stay",
    "Struct",
    "Tagged",
    "Transfer",
    "Transferred",
]


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A number that can be counted up and still travels."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
"""Of a worker, a group or a process."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A length of time that can be waited for; no NaN, no infinity."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every part of a message."""


class Tagged(Struct, frozen=True, tag=True):
    """Settings of everything that stands in a union."""


class Probe(Tagged, frozen=True):
    """Discover what ``load_weights`` does; everybody in the group begins at about the same time."""


class Stay(Tagged, frozen=True):
    """Nothing to do but to have stopped: say so."""


class GiveMap(Tagged, frozen=True):
    """Send the source map of this digest itself; the others' are known already."""

    digest: str


class Cell(Struct, frozen=True):
    """Ids to digest after an update: a number that all workers share, and int64 runs of four columns."""

    number: int
    runs: bytes


class Bind(Tagged, frozen=True):
    """Take part in a plan: bind a program to memory, allocate and register.

    Attributes
    ----------
    program
        This worker's ``transfer_exec.program.Program`` in bytes; it names plan and map by digest.
    transport
        Which transport to make.
    cells
        What to digest in every update; empty without verification.
    source_map
        The worker's map in bytes, where it is to keep some of what it was found to need; empty where it is that.
    machines
        How many the job's workers are on.
    own_load
        Whether a rollout compares every update with its own loader's work, bit by bit.
    """

    program: bytes
    transport: str
    cells: tuple[Cell, ...]
    source_map: bytes = b""
    machines: Count = 1
    own_load: bool = False


class Attach(Tagged, frozen=True):
    """Make peers writable: endpoint bytes by worker."""

    endpoints: dict[str, bytes]


class Stage(Tagged, frozen=True):
    """To a trainer that stages: copy the weights into host memory; the caller goes on after it."""

    version: Count


class Prepare(Tagged, frozen=True):
    """Check that this version can be written, and run the before-update hook, which who stages leaves to `Ready`."""

    version: Count
    metadata: bytes


class Transfer(Tagged, frozen=True):
    """Move the bytes; keep a span of everything that is done if it is to be traced."""

    version: Count
    trace: bool = False


class Ready(Tagged, frozen=True):
    """To a rollout that stages, stopped by now: check the storage to install into, and run the before-update hook."""

    version: Count


class Install(Tagged, frozen=True):
    """All bytes have landed and were compared: copy staged ones, load opaque parameters, run the after-update hook."""

    version: Count


class Assess(Tagged, frozen=True):
    """The update has failed: say whether anything was written."""


class Publish(Tagged, frozen=True):
    """Every rank of the engine has installed it: this is the version now, and computing may go on."""

    version: Count


Duty: TypeAlias = (
    Probe | Stay | GiveMap | Bind | Attach | Stage | Prepare | Transfer | Ready | Install | Assess | Publish
)


class Probed(Tagged, frozen=True):
    """What a probe found; the map follows on request.

    Attributes
    ----------
    map_digest, seconds
        Of the map, and how long it took.
    staging
        Whether bytes land in host memory of this worker, beside its parameters.
    scattered
        Parameters that are not contiguous in host memory, so that their bytes cannot go straight from one to another.
    shared
        Of a trainer, parameters in shared memory that rollouts may map.
    """

    map_digest: str
    seconds: Seconds
    staging: bool = False
    scattered: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


class MapGiven(Tagged, frozen=True):
    """A source map's bytes."""

    data: bytes


class Bound(Tagged, frozen=True):
    """A worker's endpoint, and where it is reached, in words (`Transport.place`)."""

    endpoint: bytes
    seconds: Seconds
    place: str = ""


class Done(Tagged, frozen=True):
    """A duty without a result."""

    seconds: Seconds


class Prepared(Tagged, frozen=True):
    """A worker can begin.

    Attributes
    ----------
    digests
        Cell number -> digest of what will be packed (trainers).
    moved
        Its memory was released and mapped again, so it must be bound anew before a byte moves.
    verify_s, verify_from
        Seconds the digests took, and when they began; CLOCK_MONOTONIC.
    """

    digests: dict[int, int]
    moved: bool
    verify_s: Seconds
    verify_from: Seconds = 0.0


class Transferred(Tagged, frozen=True):
    """A worker sent and received everything that concerns it.

    Attributes
    ----------
    report
        A ``transfer_exec.report.WorkerReport`` in msgpack.
    digests
        Cell number -> digest of what has landed (rollouts).
    verify_s
        Seconds the digests took.
    stall
        A trainer's: from its call of send_weights until it can go on; CLOCK_MONOTONIC.
    """

    report: bytes
    digests: dict[int, int]
    verify_s: Seconds
    stall: tuple[float, float] | None


class Installed(Tagged, frozen=True):
    """A rollout has everything in place.

    Attributes
    ----------
    verify_s, verify_from
        Seconds that the comparison with its own load took, and when it began; CLOCK_MONOTONIC.
    """

    verify_s: Seconds = 0.0
    verify_from: Seconds = 0.0


class Assessed(Tagged, frozen=True):
    """Whether this rank's parameters were written by an update that failed."""

    wrote: bool


class Published(Tagged, frozen=True):
    """A rollout is at the new version.

    Attributes
    ----------
    stall
        From its stop at the agreed poll until it goes on; CLOCK_MONOTONIC.
    """

    stall: tuple[float, float]


Result: TypeAlias = Probed | MapGiven | Bound | Done | Prepared | Transferred | Installed | Assessed | Published
