"""The children of a worker: who is welcomed, who is lost, and whose messages are passed on.

Runs on the control thread of a group's rank 0 and never waits. A caller must have the key to be heard at all, and must
say `Hello` first; one connection speaks for one worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from adapters.failures import Failure, LostWorkerError, RendezvousError, UsageError
from adapters.greeting import read_greeting, why_not
from adapters.handler import Handler
from adapters.messages import (
    Bye,
    Hello,
    MalformedMessageError,
    Member,
    Ping,
    Refused,
    ToChild,
    Welcome,
    decode,
)
from adapters.sockets import Child, Context, Hub

__all__ = ["Children"]

_PING_EVERY_S = 0.5
_ROUND_MESSAGES = 256


class Children:
    """Connections from the ranks, or the engines, that a worker leads.

    Parameters
    ----------
    context, key
        Where sockets are made, and the key that callers must have.
    member
        Says who this worker is.
    handler
        Learns what happens.

    Attributes
    ----------
    dropped
        Messages that were none, or came from a caller that was not welcomed.
    """

    def __init__(self, context: Context, key: str, member: Callable[[], Member], handler: Handler) -> None:
        self.hub = Hub(context, key)
        self._member = member
        self._worker = member().worker
        self._handler = handler
        self._next_ping = 0.0
        self.dropped = 0

    def work(self) -> None:
        """Read what has come, up to a number of messages, so that the thread gets to its other work."""
        self.hub.guard()
        if time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + _PING_EVERY_S
            for worker in list(self.hub.children):
                self.send(worker, Ping())
        for _ in range(_ROUND_MESSAGES):
            frames = self.hub.receive()
            if frames is None:
                return
            self._read(frames)

    def send(self, worker: str, message: ToChild) -> None:
        """Send to a child; if it cannot be reached, the handler learns that it is lost."""
        child = self.hub.children.get(worker)
        reason = "" if child is None else self.hub.send(child.identity, message)
        if reason:
            self._lose(worker, reason)

    def _lose(self, worker: str, reason: str) -> None:
        identity = self.hub.children.pop(worker).identity
        del self.hub.speakers[identity]
        # It may be alive, if a greeting of an older attempt has just taken its place; then it must call again.
        self.hub.send(identity, Refused(Failure(LostWorkerError.__name__, self._worker, reason), final=False))
        self._handler.child_lost(worker, reason)

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.dropped += 1
            return
        identity, data = frames
        speaker = self.hub.speakers.get(identity)
        try:
            message = decode(data, from_child=True)
        except MalformedMessageError:
            self.dropped += 1
            greeting = None if speaker else read_greeting(data)
            if greeting is not None:
                self._refuse(identity, why_not(greeting, self._worker))
            return
        match message:
            case Hello() if speaker is None:
                self._greet(identity, message)
            case Hello():
                self.dropped += 1  # one connection, one worker
            case _ if speaker is None:
                self.dropped += 1
            case Bye():
                self._lose(speaker, "it was closed")
            case _:
                self._handler.from_child(speaker, message)  # type: ignore[arg-type]

    def _refuse(self, identity: bytes, text: str) -> None:
        if text:
            self.hub.send(identity, Refused(Failure(UsageError.__name__, self._worker, text), final=True))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        hub, mine, member = self.hub, self._member(), hello.member
        if hello.target not in ("", mine.incarnation):
            failure = Failure(RendezvousError.__name__, self._worker, "the record looked up was another process's")
            hub.send(identity, Refused(failure, final=False))
            return
        if wrong := why_not(hello, self._worker):
            self._refuse(identity, wrong)
            return
        known = hub.children.get(member.worker)
        if known is not None:
            # A ping finds out whether the older connection is still alive.
            reason = hub.send(known.identity, Ping()) or "it joined again"
            if known.incarnation != member.incarnation and reason == "it joined again":
                text = f"two workers call themselves {member.worker}; give every rank of a group its own number"
                self._refuse(identity, text)
                return
            self._lose(member.worker, reason)
        refusal = self._handler.admit(member)
        if refusal is not None:
            hub.send(identity, Refused(refusal, final=True))
            return
        hub.children[member.worker] = Child(identity, member.incarnation)
        hub.speakers[identity] = member.worker
        self.send(member.worker, Welcome(mine.incarnation, self._handler.newest()))
