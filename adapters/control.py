"""One worker's control sockets, and the one thread that reads and writes them.

Every worker has a parent: an engine's ranks talk to the engine's rank 0, trainer ranks and the engines' rank 0 to
trainer rank 0. A `Post` looks its parent up, says `Hello`, keeps the connection, and hands what arrives to a `Handler`
on its thread; if it leads a group, it also listens. Whatever other threads want to say is queued.

::

    trainer/0  <-- trainer/1, trainer/2, ...
               <-- engine/a/0  <-- engine/a/1, ...
               <-- engine/b/0  <-- engine/b/1, ...

A message that is none, or comes from somebody who was not welcomed, is dropped and counted. A peer whose process ends
is noticed at the next ping, a frozen one when ZeroMQ's own heartbeats stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from adapters.failures import ClosedError, Failure, RendezvousError, UsageError, failure_of
from adapters.messages import (
    PROTOCOL,
    Bye,
    Hello,
    MalformedMessageError,
    Member,
    Ping,
    Refused,
    ToChild,
    ToParent,
    Welcome,
    decode,
)
from adapters.rendezvous import Record, Rendezvous
from adapters.sockets import Child, Hub, Uplink
from transfer_exec.errors import DeadlineError

__all__ = ["Handler", "Post"]

_TICK_S = 0.1
_PING_EVERY_S = 0.5
_LOOK_UP_EVERY_S = 0.1
_ROUND_MESSAGES = 256

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a post tells its owner; every method runs on the post's thread and must not wait."""

    def admit(self, member: Member) -> Failure | None:
        """A worker wants to be a child; why it may not, or None."""
        ...

    def from_child(self, worker: str, message: ToParent) -> None:
        """A welcomed child spoke."""
        ...

    def child_lost(self, worker: str, reason: str) -> None:
        """A welcomed child is gone."""
        ...

    def from_parent(self, message: ToChild) -> None:
        """The parent spoke."""
        ...

    def parent_joined(self) -> None:
        """The parent said welcome."""
        ...

    def parent_lost(self, failure: Failure, *, final: bool) -> None:
        """The parent is gone, or will not have this worker; a final failure is not tried again."""
        ...

    def broken(self, failure: Failure) -> None:
        """The thread ended by an error of its own."""
        ...

    def tick(self) -> None:
        """Some time has passed."""
        ...


class Post:
    """The sockets of one worker.

    Parameters
    ----------
    member
        Says who this worker is, when it joins.
    rendezvous
        Where workers find each other.
    listens_as
        The name to publish, if this worker leads a group.
    parent
        The name to look up, unless this worker is the root.
    """

    def __init__(
        self,
        member: Callable[[], Member],
        rendezvous: Rendezvous,
        handler: Handler,
        *,
        listens_as: str | None,
        parent: str | None,
    ) -> None:
        self._member = member
        self._worker = member().worker
        self._rendezvous = rendezvous
        self._handler = handler
        self._parent = parent
        self._listens_as = listens_as
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._hub: Hub | None = None
        self._record = ""
        self._uplink = Uplink(self._context)
        self._next_try = 0.0
        self._refused = False
        self._queue: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._closing = False
        self.dropped = 0
        try:
            if listens_as is not None:
                self._listen(listens_as)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name=f"transload {self._worker}", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._thread.start()

    def to_parent(self, message: ToParent) -> None:
        """Queue a message for the parent; lost if there is none at the moment."""
        self.run(lambda: self._send_up(message))

    def to_child(self, worker: str, message: ToChild) -> None:
        """Queue a message for a child; if it cannot be reached, the handler learns that it is lost."""
        self.run(lambda: self._send_down(worker, message))

    def run(self, action: Callable[[], None]) -> None:
        """Queue something for this post's thread, in order with the messages."""
        self._queue.append(action)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def check_process(self) -> None:
        """Refuse to go on in a forked child, which has no copy of the thread, or after close."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._worker}: made in process {self._pid}, used in its forked child {os.getpid()}; "
                "make the adapter in the process that uses it"
            )
        if self._closing:
            raise ClosedError(f"{self._worker}: the adapter was closed")

    def close(self) -> None:
        """Say goodbye, end the thread and close every socket. May be called again."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        if self._thread.ident is None:
            self._release()
            return
        self.run(lambda: None)
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._work()
        except BaseException as error:  # noqa: BLE001 - a thread's error must reach its owner, whatever it is
            _log.error("%s: control thread ended", self._worker, exc_info=error)
            self._handler.broken(failure_of(error, self._worker))
        finally:
            with contextlib.suppress(Exception):
                # What was said before close is still said: a child must not take a success for a loss.
                self._drain()
                self._uplink.send(Bye())
            self._release()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in.fileno(), zmq.POLLIN)
        for waiting in (*self._uplink.sockets, *(() if self._hub is None else (self._hub.socket,))):
            poller.register(waiting, zmq.POLLIN)
        poller.poll(int(_TICK_S * 1000))

    def _work(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass
        self._drain()
        if self._hub is not None:
            self._read_children(self._hub)
        if self._parent is not None and not self._refused:
            self._keep_parent(self._parent)
        self._handler.tick()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _release(self) -> None:
        if self._listens_as is not None and self._record:
            with contextlib.suppress(Exception):
                self._rendezvous.withdraw(self._listens_as, self._record)
        self._uplink.close()
        if self._hub is not None:
            self._hub.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # Children

    def _listen(self, name: str) -> None:
        address = self._rendezvous.listen_address(name)
        hub = Hub(self._context)
        self._hub = hub
        self._record = Record(hub.bind(address, name), self._member().incarnation).encode()
        self._rendezvous.publish(name, self._record)

    def _send_down(self, worker: str, message: ToChild) -> None:
        hub = self._hub
        if hub is None or worker not in hub.children:
            return
        reason = hub.send(hub.children[worker].identity, message)
        if reason:
            self._lose_child(hub, worker, reason)

    def _lose_child(self, hub: Hub, worker: str, reason: str) -> None:
        del hub.speakers[hub.children.pop(worker).identity]
        self._handler.child_lost(worker, reason)

    def _read_children(self, hub: Hub) -> None:
        if time.monotonic() >= hub.next_ping:
            hub.next_ping = time.monotonic() + _PING_EVERY_S
            for worker in list(hub.children):
                self._send_down(worker, Ping())
        for _ in range(_ROUND_MESSAGES):
            frames = hub.receive()
            if frames is None:
                return
            self._read_child(hub, frames)

    def _read_child(self, hub: Hub, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.dropped += 1
            return
        identity, data = frames
        speaker = hub.speakers.get(identity)
        try:
            message = decode(data, from_child=True)
        except MalformedMessageError:
            self.dropped += 1
            return
        match message:
            case Hello():
                self._greet(hub, identity, message)
            case _ if speaker is None:
                self.dropped += 1
            case Bye():
                self._lose_child(hub, speaker, "it was closed")
            case _:
                self._handler.from_child(speaker, message)  # type: ignore[arg-type]

    def _greet(self, hub: Hub, identity: bytes, hello: Hello) -> None:
        mine, member = self._member(), hello.member
        if hello.target not in ("", mine.incarnation):
            failure = Failure(RendezvousError.__name__, self._worker, "the record looked up was another process's")
            hub.send(identity, Refused(failure, final=False))
            return
        if hello.protocol != PROTOCOL:
            text = f"{member.worker} speaks protocol {hello.protocol}, this side {PROTOCOL}; install one version"
            hub.send(identity, Refused(Failure(UsageError.__name__, self._worker, text), final=True))
            return
        known = hub.children.get(member.worker)
        if known is not None:
            # A ping finds out whether the older connection is still alive.
            reason = hub.send(known.identity, Ping()) or "it joined again"
            if known.incarnation != member.incarnation and reason == "it joined again":
                text = f"two workers call themselves {member.worker}; give every rank of a group its own number"
                hub.send(identity, Refused(Failure(UsageError.__name__, self._worker, text), final=True))
                return
            self._lose_child(hub, member.worker, reason)
        refusal = self._handler.admit(member)
        if refusal is not None:
            hub.send(identity, Refused(refusal, final=True))
            return
        hub.children[member.worker] = Child(identity, member.incarnation)
        hub.speakers[identity] = member.worker
        self._send_down(member.worker, Welcome(mine.incarnation))

    # Parent

    def _send_up(self, message: ToParent) -> None:
        if self._uplink.joined:
            self._uplink.send(message)

    def _keep_parent(self, parent: str) -> None:
        uplink = self._uplink
        if not uplink.sockets:
            if time.monotonic() >= self._next_try:
                self._next_try = time.monotonic() + _LOOK_UP_EVERY_S
                self._call_parent(parent)
            return
        for _ in range(_ROUND_MESSAGES):
            data = uplink.receive()
            if data is None:
                break
            self._read_parent(data)
            if not uplink.sockets:
                return
        if uplink.joined and uplink.disconnected():
            self._lose_parent(f"{parent}: its connection closed")
        elif not uplink.joined and time.monotonic() >= uplink.give_up_at:
            uplink.close()

    def _call_parent(self, parent: str) -> None:
        try:
            record = Record.decode(self._rendezvous.lookup(parent, 0.0))
        except (DeadlineError, RendezvousError):
            return
        self._uplink.call(record.address)
        self._uplink.send(Hello(record.incarnation, PROTOCOL, self._member()))

    def _read_parent(self, data: bytes) -> None:
        try:
            message = decode(data, from_child=False)
        except MalformedMessageError:
            self.dropped += 1
            return
        match message:
            case Welcome() if not self._uplink.joined:
                self._uplink.joined = True
                self._handler.parent_joined()
            case Refused(failure=failure, final=final) if not self._uplink.joined:
                self._uplink.close()
                self._refused = final
                if final:
                    self._handler.parent_lost(failure, final=True)
            case Welcome() | Refused():
                self.dropped += 1
            case Ping():
                pass
            case _ if self._uplink.joined:
                self._handler.from_parent(message)  # type: ignore[arg-type]
            case _:
                self.dropped += 1

    def _lose_parent(self, reason: str) -> None:
        self._uplink.close()
        self._next_try = time.monotonic() + _LOOK_UP_EVERY_S
        self._handler.parent_lost(Failure("LostWorkerError", self._worker, reason), final=False)
