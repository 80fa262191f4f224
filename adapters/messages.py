"""Every control message, as typed structs in msgpack; what is not one of them is dropped.

Three kinds of speakers: the *conductor* (a thread of trainer rank 0) runs connects and updates; the *lead* of a group
(rank 0 of the trainers, or of an engine) relays to its *ranks* and gathers what they answer.

::

    rank -> lead          Call (a trainer called connect or send_weights), Answer, AnswerStop, AgreeValue
    lead -> rank          Ask (one duty), ProposeStop, Committed, Agreed, Note, Cancel, End
    lead -> conductor     Roster, Call, Gathered
    conductor -> lead     Begin (for which calls; to the trainers' only, in its own process), Stop (agree on a poll),
                          Relay (duties for the ranks), Note (what others do), Cancel, End

A transaction is one connect or one update. Its steps count up; answers to an older step or transaction are ignored.
Bulky payloads (maps, programs, plans) are bytes inside the messages that carry them; all other messages are small.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from adapters.duty_messages import (
    Count,
    Duty,
    Install,
    Name,
    Prepare,
    Publish,
    Result,
    Seconds,
    Struct,
    Tagged,
    Transfer,
)
from adapters.failures import Failure
from adapters.promise import Promise, Propose

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_SMALL_MESSAGE_BYTES",
    "MalformedMessageError",
    "Message",
    "decode",
    "encode",
    "phase_of",
]

MAX_MESSAGE_BYTES = 1 << 30
"""No message is larger; the socket itself refuses more."""

MAX_RANKS = 1 << 20
"""Of one group."""

MAX_SMALL_MESSAGE_BYTES = 1 << 20
"""Limit of the messages that carry neither maps nor programs."""


Duties: TypeAlias = Annotated[tuple[Duty | None, ...], msgspec.Meta(min_length=1)]
"""One for all ranks, or one each in rank order; a rank without one takes no part."""

Words: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
"""A few, for people."""

LEFT = -1
"""Step number in the answer of a rank that leaves a transaction between or inside its duties."""


class MalformedMessageError(Exception):
    """Bytes that are no message; they are dropped and counted, and never reach a user."""


# Joining


class Member(Struct, frozen=True):
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

    worker: Name
    rank: Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    incarnation: Name
    host: str
    transport: str
    version: Count | None


class Hello(Tagged, frozen=True):
    """The first message over a connection.

    Attributes
    ----------
    target
        Incarnation that the speaker looked up; empty where addresses were given without one.
    protocol, library
        Versions of these messages, and of this library; the latter may be unknown.
    """

    target: str
    protocol: int
    member: Member
    library: str = ""


class Welcome(Tagged, frozen=True):
    """The answer to a Hello that was accepted.

    Attributes
    ----------
    txn
        The newest transaction of the group that the speaker leads: who joins takes no part in it, nor in older ones.
    """

    incarnation: str
    txn: Count = 0


class Refused(Tagged, frozen=True):
    """The answer to a Hello that was not; a final one is an error, any other leads to another look-up."""

    failure: Failure
    final: bool


class Bye(Tagged, frozen=True):
    """The last message over a connection."""


class Ping(Tagged, frozen=True):
    """Sent so that a connection that is gone is noticed."""


# What trainers call


class ConnectIntent(Tagged, frozen=True):
    """Arguments of connect that all trainer ranks must share."""

    engines: tuple[str, ...]
    buffer_bytes: int
    allow_partial: tuple[str, ...]
    transport: str
    verify: str
    cast: bool
    topology: str
    staging: bool = False
    activation: Literal["engine", "fleet"] = "engine"


class SendIntent(Tagged, frozen=True):
    """Arguments of send_weights that all trainer ranks must share."""

    version: Count
    trace: bool = False


Intent: TypeAlias = ConnectIntent | SendIntent


class Call(Tagged, frozen=True):
    """A trainer rank called an adapter method and waits, or with a failure takes that call back.

    Attributes
    ----------
    number
        Of this rank's calls, from one.
    after
        The newest transaction it knew; a call is void once a later one has ended, unless that was for an earlier call
        of this rank.
    failure
        What keeps this rank from taking part; then nobody begins.
    metadata
        The caller's metadata in msgpack; that of rank 0 travels.
    """

    worker: Name
    number: Count
    after: Count
    intent: Intent
    metadata: bytes
    failure: Failure | None


# Between a lead and its ranks


class Ask(Tagged, frozen=True):
    """One duty for one rank; the next message comes within ``patience_s``, or the lead is gone.

    ``of`` says what the transaction is, in this message as in others: ``"connect"``, ``"version 7"``; ``call`` which of
    a trainer's calls it is for.
    """

    txn: Count
    step: Count
    patience_s: Seconds
    duty: Duty
    of: Words = ""
    call: Count = 0


class Answer(Tagged, frozen=True):
    """A duty's result, or why there is none; with step `LEFT`, why the rank takes no further part."""

    txn: Count
    step: int
    result: Result | None
    failure: Failure | None


class ProposeStop(Tagged, frozen=True):
    """A proposal, on behalf of a transaction."""

    txn: Count
    proposal: Propose
    patience_s: Seconds
    of: Words = ""


class AnswerStop(Tagged, frozen=True):
    """A rank's answer to a proposal, or why it cannot stop at all."""

    txn: Count
    promise: Promise | None
    failure: Failure | None


class Committed(Tagged, frozen=True):
    """Every rank has stopped."""

    txn: Count
    ballot: Count
    patience_s: Seconds


class AgreeValue(Tagged, frozen=True):
    """A rank's value in the n-th agreement of a transaction."""

    txn: Count
    number: Count
    value: int


class Cancel(Tagged, frozen=True):
    """Stop moving bytes: the transaction has failed elsewhere. Its End follows."""

    txn: Count
    failure: Failure


class Note(Tagged, frozen=True):
    """What those who wait in a transaction wait for, so that they can say so and are patient.

    Attributes
    ----------
    what
        A phase, and perhaps who is done with it: ``"stop"``, ``"probe: engine/a"``.
    done, total
        How many groups are done with it, and of how many.
    patience_s
        The next message comes within so many seconds, or the conductor is gone.
    """

    txn: Count
    what: Words
    done: Count
    total: Count
    patience_s: Seconds


class Agreed(Tagged, frozen=True):
    """The largest value of all ranks."""

    txn: Count
    number: Count
    value: int


class End(Tagged, frozen=True):
    """A transaction is over.

    Attributes
    ----------
    failure
        Why it failed; None when it succeeded.
    outcome
        For trainers, the connect or transfer report in msgpack. Empty otherwise.
    torn
        Some rank of the engine was written in part: none of them may go on generating.
    call
        Which of a trainer's calls it was for; zero if for none, and then whatever the rank called before it is over.
    """

    txn: Count
    failure: Failure | None
    outcome: bytes = b""
    torn: bool = False
    call: Count = 0


# Between a lead and the conductor


class Begin(Struct, frozen=True):
    """A transaction begins, for these calls of trainers by number."""

    txn: Count
    calls: dict[str, int]


class Stop(Tagged, frozen=True):
    """Bring all ranks of an engine to the same poll."""

    txn: Count
    deadline_s: Seconds
    of: Words = ""


class Relay(Tagged, frozen=True):
    """Duties for the ranks: one for all, or one each in rank order."""

    txn: Count
    step: Count
    deadline_s: Seconds
    duties: Duties
    of: Words = ""


class Roster(Tagged, frozen=True):
    """Who has joined a group, in rank order; sent whenever that changes."""

    group: Name
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        ranks = [member.rank for member in self.members]
        if ranks != sorted(set(ranks)) or any(rank >= self.world_size for rank in ranks):
            raise ValueError("ranks are not those of a group")
        if any(m.worker != f"{self.group}/{m.rank}" or m.world_size != self.world_size for m in self.members):
            raise ValueError("members are not of the group")


class Gathered(Tagged, frozen=True):
    """Every rank's answer to a step in rank order, or the first failure. Step 0 is a Stop."""

    group: Name
    txn: Count
    step: Count
    results: tuple[Result | None, ...]
    failure: Failure | None


ToParent: TypeAlias = Hello | Bye | Call | Answer | AnswerStop | AgreeValue | Roster | Gathered
ToChild: TypeAlias = (
    Welcome | Refused | Ping | Ask | ProposeStop | Committed | Agreed | Note | Cancel | End | Stop | Relay
)
Message: TypeAlias = ToParent | ToChild
FromRank: TypeAlias = Call | Answer | AnswerStop | AgreeValue
ToRank: TypeAlias = Ask | ProposeStop | Committed | Agreed | Note | Cancel | End
FromLead: TypeAlias = Roster | Call | Gathered
ToLead: TypeAlias = Begin | Stop | Relay | Note | Cancel | End

PROTOCOL = 3
"""Grows with every release that changes a message; `Hello` and `Refused` stay readable across versions."""

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


def phase_of(duty: Duty | None, of: str = "") -> str:
    """What a duty is called in errors, logs and progress; without one, ranks are agreeing on a poll.

    >>> phase_of(Prepare(7, b"")), phase_of(None, "connect")
    ('prepare, version 7', 'agreeing on a poll, connect')
    """
    if isinstance(duty, (Prepare, Transfer, Install, Publish)):
        of = f"version {duty.version}"
    name = "agreeing on a poll" if duty is None else type(duty).__name__.lower()
    return f"{name}, {of}" if of else name


_FROM_CHILD: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_FROM_PARENT: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
