"""Every control message, as typed structs in msgpack; what is not one of them is dropped.

Three kinds of speakers: the *conductor* (a thread of trainer rank 0) runs connects and updates; the *lead* of a group
(rank 0 of the trainers, or of an engine) relays to its *ranks* and gathers what they answer.

::

    rank -> lead          Call (a trainer called connect or send_weights), Answer, AnswerStop, AgreeValue
    lead -> rank          Ask (one duty), ProposeStop, Committed, Agreed, Cancel, End
    lead -> conductor     Roster, Call, Gathered
    conductor -> lead     Stop (agree on a poll), Relay (duties for the ranks), Cancel, End

A transaction is one connect or one update. Its steps count up; answers to an older step or transaction are ignored.
Bulky payloads (maps, programs, plans) are bytes inside the messages that carry them; all other messages are small.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from adapters.failures import Failure
from adapters.promise import Promise, Propose

__all__ = ["MAX_MESSAGE_BYTES", "MAX_SMALL_MESSAGE_BYTES", "MalformedMessageError", "Message", "decode", "encode"]

MAX_MESSAGE_BYTES = 1 << 30
"""No message is larger; the socket itself refuses more."""

MAX_SMALL_MESSAGE_BYTES = 1 << 20
"""Limit of the messages that carry neither maps nor programs."""


LEFT = -1
"""Step number in the answer of a rank that leaves a transaction between or inside its duties."""


class MalformedMessageError(Exception):
    """Bytes that are no message; they are dropped and counted, and never reach a user."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every part of a message."""


class _Tagged(_Struct, frozen=True, tag=True):
    """Settings of everything that stands in a union."""


# Joining


class Member(_Struct, frozen=True):
    """One rank of a group.

    Attributes
    ----------
    worker
        Its name in plans, ``"trainer/0"``, ``"engine/a/1"``.
    rank, world_size
        In its group.
    incarnation
        Random name of this process' adapter.
    host
        Identity of the machine; workers of one host form a node.
    transport
        The transport it asks for, or ``"auto"``.
    version
        What it holds; None before its first update.
    """

    worker: str
    rank: int
    world_size: int
    incarnation: str
    host: str
    transport: str
    version: int | None


class Hello(_Tagged, frozen=True):
    """The first message over a connection.

    Attributes
    ----------
    target
        Incarnation that the speaker looked up; empty where addresses were given without one.
    protocol
        Version of these messages.
    """

    target: str
    protocol: int
    member: Member


class Welcome(_Tagged, frozen=True):
    """The answer to a Hello that was accepted."""

    incarnation: str


class Refused(_Tagged, frozen=True):
    """The answer to a Hello that was not; a final one is an error, any other leads to another look-up."""

    failure: Failure
    final: bool


class Bye(_Tagged, frozen=True):
    """The last message over a connection."""


class Ping(_Tagged, frozen=True):
    """Sent so that a connection that is gone is noticed."""


# What trainers call


class ConnectIntent(_Tagged, frozen=True):
    """Arguments of connect that all trainer ranks must share."""

    engines: tuple[str, ...]
    buffer_bytes: int
    allow_partial: tuple[str, ...]
    transport: str
    verify: str
    cast: bool
    topology: str


class SendIntent(_Tagged, frozen=True):
    """Arguments of send_weights that all trainer ranks must share."""

    version: int


Intent: TypeAlias = ConnectIntent | SendIntent


class Call(_Tagged, frozen=True):
    """A trainer rank called an adapter method and waits.

    Attributes
    ----------
    after
        The newest transaction it knew; a call is void once a later one has ended.
    failure
        What keeps this rank from taking part; then nobody begins.
    metadata
        The caller's metadata in msgpack; that of rank 0 travels.
    """

    worker: str
    after: int
    intent: Intent
    metadata: bytes
    failure: Failure | None


# Duties and their results


class Probe(_Tagged, frozen=True):
    """Discover what ``load_weights`` does; everybody in the group begins at about the same time."""


class Stay(_Tagged, frozen=True):
    """Nothing to do but to have stopped: say so."""


class GiveMap(_Tagged, frozen=True):
    """Send the source map of this digest itself; the others' are known already."""

    digest: str


class Cell(_Struct, frozen=True):
    """Ids to digest after an update: a number that all workers share, and int64 runs of four columns."""

    number: int
    runs: bytes


class Bind(_Tagged, frozen=True):
    """Take part in a plan: bind a program to memory, allocate and register.

    Attributes
    ----------
    program
        This worker's ``transfer_exec.program.Program`` in bytes; it names plan and map by digest.
    transport
        Which transport to make.
    cells
        What to digest in every update; empty without verification.
    """

    program: bytes
    transport: str
    cells: tuple[Cell, ...]


class Attach(_Tagged, frozen=True):
    """Make peers writable: endpoint bytes by worker."""

    endpoints: dict[str, bytes]


class Prepare(_Tagged, frozen=True):
    """Check that this version can be written, and run the before-update hook."""

    version: int
    metadata: bytes


class Transfer(_Tagged, frozen=True):
    """Move the bytes."""

    version: int


class Install(_Tagged, frozen=True):
    """All bytes have landed and were compared: load opaque parameters and run the after-update hook."""

    version: int


class Assess(_Tagged, frozen=True):
    """The update has failed: say whether anything was written."""


class Publish(_Tagged, frozen=True):
    """Every rank of the engine has installed it: this is the version now, and computing may go on."""

    version: int


Duty: TypeAlias = Probe | Stay | GiveMap | Bind | Attach | Prepare | Transfer | Install | Assess | Publish


class Probed(_Tagged, frozen=True):
    """What a probe found; the map follows on request."""

    map_digest: str
    seconds: float


class MapGiven(_Tagged, frozen=True):
    """A source map's bytes."""

    data: bytes


class Bound(_Tagged, frozen=True):
    """A worker's endpoint."""

    endpoint: bytes
    seconds: float


class Done(_Tagged, frozen=True):
    """A duty without a result."""

    seconds: float


class Prepared(_Tagged, frozen=True):
    """A worker can begin.

    Attributes
    ----------
    digests
        Cell number -> digest of what will be packed (trainers).
    moved
        Its memory was released and mapped again, so it must be bound anew before a byte moves.
    verify_s
        Seconds the digests took.
    """

    digests: dict[int, int]
    moved: bool
    verify_s: float


class Transferred(_Tagged, frozen=True):
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
    verify_s: float
    stall: tuple[float, float] | None


class Assessed(_Tagged, frozen=True):
    """Whether this rank's parameters were written by an update that failed."""

    wrote: bool


class Published(_Tagged, frozen=True):
    """A rollout is at the new version.

    Attributes
    ----------
    stall
        From its stop at the agreed poll until it goes on; CLOCK_MONOTONIC.
    """

    stall: tuple[float, float]


Result: TypeAlias = Probed | MapGiven | Bound | Done | Prepared | Transferred | Assessed | Published


# Between a lead and its ranks


class Ask(_Tagged, frozen=True):
    """One duty for one rank; the next message comes within ``patience_s``, or the lead is gone."""

    txn: int
    step: int
    patience_s: float
    duty: Duty


class Answer(_Tagged, frozen=True):
    """A duty's result, or why there is none; with step `LEFT`, why the rank takes no further part."""

    txn: int
    step: int
    result: Result | None
    failure: Failure | None


class ProposeStop(_Tagged, frozen=True):
    """A proposal, on behalf of a transaction."""

    txn: int
    proposal: Propose


class AnswerStop(_Tagged, frozen=True):
    """A rank's answer to a proposal, or why it cannot stop at all."""

    txn: int
    promise: Promise | None
    failure: Failure | None


class Committed(_Tagged, frozen=True):
    """Every rank has promised to stop."""

    txn: int
    ballot: int
    patience_s: float


class AgreeValue(_Tagged, frozen=True):
    """A rank's value in the n-th agreement of a transaction."""

    txn: int
    number: int
    value: int


class Cancel(_Tagged, frozen=True):
    """Stop moving bytes: the transaction has failed elsewhere. Its End follows."""

    txn: int
    failure: Failure


class Agreed(_Tagged, frozen=True):
    """The largest value of all ranks."""

    txn: int
    number: int
    value: int


class End(_Tagged, frozen=True):
    """A transaction is over.

    Attributes
    ----------
    failure
        Why it failed; None when it succeeded.
    outcome
        For trainers, the connect or transfer report in msgpack. Empty otherwise.
    torn
        Some rank of the engine was written in part: none of them may go on generating.
    """

    txn: int
    failure: Failure | None
    outcome: bytes = b""
    torn: bool = False


# Between a lead and the conductor


class Stop(_Tagged, frozen=True):
    """Bring all ranks of an engine to the same poll."""

    txn: int
    deadline_s: float


class Relay(_Tagged, frozen=True):
    """Duties for the ranks: one for all, or one each in rank order."""

    txn: int
    step: int
    deadline_s: float
    duties: tuple[Duty, ...]


class Roster(_Tagged, frozen=True):
    """Who has joined a group; sent whenever that changes."""

    group: str
    world_size: int
    members: tuple[Member, ...]


class Gathered(_Tagged, frozen=True):
    """Every rank's answer to a step in rank order, or the first failure. Step 0 is a Stop."""

    group: str
    txn: int
    step: int
    results: tuple[Result | None, ...]
    failure: Failure | None


ToParent: TypeAlias = Hello | Bye | Call | Answer | AnswerStop | AgreeValue | Roster | Gathered
ToChild: TypeAlias = Welcome | Refused | Ping | Ask | ProposeStop | Committed | Agreed | Cancel | End | Stop | Relay
Message: TypeAlias = ToParent | ToChild
FromRank: TypeAlias = Call | Answer | AnswerStop | AgreeValue
ToRank: TypeAlias = Ask | ProposeStop | Committed | Agreed | Cancel | End
FromLead: TypeAlias = Roster | Call | Gathered
ToLead: TypeAlias = Stop | Relay | Cancel | End

PROTOCOL = 1
_BULKY = (Answer, Ask, Relay, Gathered, End)


def encode(message: Message) -> bytes:
    """A message as msgpack.

    Raises
    ------
    ValueError
        If it is larger than any receiver accepts.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def decode(data: bytes, *, from_child: bool) -> Message:
    """Read a message that a child sent to its parent, or a parent to its child.

    Raises
    ------
    MalformedMessageError
        If the bytes are no message of that direction, or too many.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        message = _FROM_CHILD.decode(data) if from_child else _FROM_PARENT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedMessageError(str(error)) from error
    if len(data) > MAX_SMALL_MESSAGE_BYTES and not isinstance(message, _BULKY):
        raise MalformedMessageError(f"{type(message).__name__} of {len(data)} bytes")
    return message


_FROM_CHILD: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_FROM_PARENT: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
