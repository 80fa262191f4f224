"""A worker's parent: looked up, called, greeted, and called again when it is lost.

Runs on the worker's control thread and never waits. What it finds at an address must have the key, and be the process
that the record named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from adapters.events import log_event
from adapters.failures import AuthenticationError, Failure, LostWorkerError, RendezvousError, UsageError
from adapters.greeting import LIBRARY
from adapters.handler import Handler
from adapters.messages import (
    PROTOCOL,
    Bye,
    Hello,
    MalformedMessageError,
    Member,
    Ping,
    Refused,
    ToParent,
    Welcome,
    decode,
)
from adapters.rendezvous import Record, Rendezvous
from adapters.sockets import Context, Uplink
from transfer_exec.errors import DeadlineError

__all__ = ["Parent", "is_served"]

_LOOK_UP_EVERY_S = 0.1
_REFUSED_FOR_S = 5.0
_ANSWERS_WITHIN_S = 2.0
_LOOK_AGAIN_MS = 20
_ROUND_MESSAGES = 256


class Parent:
    """The connection to whoever leads this worker.

    Parameters
    ----------
    context
        Where sockets are made.
    name
        What to look up.
    rendezvous
        Where.
    member
        Says who this worker is.
    handler
        Learns what happens.

    Attributes
    ----------
    dropped
        Messages that were none, or came before a welcome.
    trouble
        Why the parent has not been reached yet, where that is known.
    """

    def __init__(
        self, context: Context, name: str, rendezvous: Rendezvous, member: Callable[[], Member], handler: Handler
    ) -> None:
        self.uplink = Uplink(context)
        self._name = name
        self._rendezvous = rendezvous
        self._member = member
        self._worker = member().worker
        self._handler = handler
        self._next_try = 0.0
        self._refused_since = 0.0
        self._refused = False
        self._silence = ""
        self.dropped = 0
        self.trouble = ""

    def work(self) -> None:
        """Read what has come, notice what broke, and try again when it is time."""
        uplink = self.uplink
        if self._refused:
            return
        if not uplink.sockets:
            if time.monotonic() >= self._next_try:
                self._next_try = time.monotonic() + _LOOK_UP_EVERY_S
                self._call()
            return
        for _ in range(_ROUND_MESSAGES):
            data = uplink.receive()
            if data is None:
                break
            self._read(data)
            if not uplink.sockets:
                return
        broke = uplink.disconnected()
        if uplink.joined and broke:
            self._lose()
        elif not uplink.joined and (uplink.refused or time.monotonic() >= uplink.give_up_at):
            self._give_up()

    def send(self, message: ToParent) -> None:
        """Send to the parent; lost if there is none at the moment."""
        if self.uplink.joined:
            self.uplink.send(message)

    def close(self) -> None:
        """Say goodbye and close the connection."""
        self.send(Bye())
        self.uplink.close()

    def _call(self) -> None:
        me = self._member()
        try:
            record = Record.decode(self._rendezvous.lookup(self._name, 0.0))
            self._silence = f"{self._name} does not answer at {record.address}"
            if record.is_loopback and record.host not in ("", me.host):
                self._silence += (
                    f", which is of {record.host} alone and out of reach of {me.worker} on {me.host}; give its "
                    "rendezvous host=, the address at which the others reach it"
                )
            key = self._rendezvous.key or record.key
            if not key:
                raise RendezvousError(
                    f"the record of {self._name} has no key, and this worker was given none; pass key="
                )
            self.uplink.call(record.address, key)
        except DeadlineError:
            return
        except (RendezvousError, UsageError) as error:
            self._note_trouble(str(error))
            return
        self.uplink.send(Hello(record.incarnation, PROTOCOL, me, LIBRARY))

    def _give_up(self) -> None:
        """End an attempt. A key that all workers were given does not change, so a refusal that lasts is final."""
        refused = self.uplink.refused
        self.uplink.close()
        if not refused:
            self._refused_since = 0.0
            self._note_trouble(self._silence)
            return
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        self._note_trouble(
            f"{self._name} breaks off the handshake: it has another key, or what listens there is no worker of this "
            "job; give all workers the same key"
        )
        if self._rendezvous.key and now - self._refused_since >= _REFUSED_FOR_S:
            self._refused = True
            failure = Failure(AuthenticationError.__name__, self._worker, self.trouble)
            self._handler.parent_lost(failure, final=True)

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            log_event("unreached", self._worker, level=logging.WARNING, parent=self._name, why=trouble)

    def _read(self, data: bytes) -> None:
        try:
            message = decode(data, from_child=False)
        except MalformedMessageError:
            self.dropped += 1
            return
        match message:
            case Welcome(txn=txn) if not self.uplink.joined:
                self.uplink.joined = True
                self._refused_since, self.trouble = 0.0, ""
                log_event("reached", self._worker, parent=self._name)
                self._handler.parent_joined(txn)
            case Refused(failure=failure, final=final) if not self.uplink.joined:
                self.uplink.close()
                self._refused = final
                if final:
                    self._handler.parent_lost(failure, final=True)
            case Refused():
                self._lose()
            case Welcome():
                self.dropped += 1
            case Ping():
                pass
            case _ if self.uplink.joined:
                self._handler.from_parent(message)  # type: ignore[arg-type]
            case _:
                self.dropped += 1

    def _lose(self) -> None:
        self.uplink.close()
        self._next_try = time.monotonic() + _LOOK_UP_EVERY_S
        failure = Failure(LostWorkerError.__name__, self._worker, f"{self._name}: its connection closed")
        log_event("parent_lost", self._worker, level=logging.WARNING, parent=self._name)
        self._handler.parent_lost(failure, final=False)


def is_served(context: Context, record: Record, key: str, me: Member) -> bool:
    """Whether the process that wrote a record still listens; what died or is frozen does not answer.

    Waits for an answer, two seconds at most, so it is no work for a control thread.
    """
    uplink = Uplink(context)
    try:
        uplink.call(record.address, key)
        uplink.send(Hello(record.incarnation, PROTOCOL, me, LIBRARY))
        stop_at = time.monotonic() + _ANSWERS_WITHIN_S
        while time.monotonic() < stop_at and not (uplink.refused or uplink.unreachable):
            uplink.sockets[0].poll(_LOOK_AGAIN_MS)
            data = uplink.receive()
            if data is not None:
                answer = decode(data, from_child=False)
                return isinstance(answer, Welcome) or (isinstance(answer, Refused) and answer.final)
            uplink.disconnected()
    except (RendezvousError, UsageError, MalformedMessageError):
        return False
    finally:
        uplink.close()
    return False
