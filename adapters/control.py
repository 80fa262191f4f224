"""One worker's control sockets, and the one thread that reads and writes them.

Every worker has a parent: an engine's ranks talk to the engine's rank 0, trainer ranks and the engines' rank 0 to
trainer rank 0. A `Post` looks its parent up, says `Hello`, keeps the connection, and hands what arrives to a `Handler`
on its thread; if it leads a group, it also listens. Whatever other threads want to say is queued.

::

    trainer/0  <-- trainer/1, trainer/2, ...
               <-- engine/a/0  <-- engine/a/1, ...
               <-- engine/b/0  <-- engine/b/1, ...

A caller without the job's key is turned away before it can say anything. A message that is none, or comes from somebody
who was not welcomed, is dropped and counted. A peer whose process ends
is noticed at the next ping, a frozen one when ZeroMQ's own heartbeats stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

import zmq

from adapters.children import Children
from adapters.events import log_event
from adapters.failures import ClosedError, RendezvousError, UsageError, failure_of
from adapters.handler import Handler
from adapters.job_key import new_key
from adapters.messages import Member, ToChild, ToParent
from adapters.parent import Parent, is_served
from adapters.rendezvous import Record, Rendezvous
from transfer_exec.errors import DeadlineError

__all__ = ["Post"]

_TICK_S = 0.1


class Post:
    """The sockets of one worker.

    Parameters
    ----------
    member
        Says who this worker is, when it joins.
    rendezvous
        Where workers find each other.
    handler
        Learns what happens, on the control thread.
    listens_as
        The name to publish, if this worker leads a group.
    parent
        The name to look up, unless this worker is the root.

    Raises
    ------
    RendezvousError
        If it cannot listen, or cannot publish where.
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
        self._listens_as = listens_as
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._children: Children | None = None
        self._parent: Parent | None = None
        self._record = ""
        self._taken = False
        self._queue: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._closing = False
        try:
            if listens_as is not None:
                self._listen(listens_as)
        except BaseException:
            # Also of an interrupt: the caller gets nothing to close, and a record would lead others here.
            self._release()
            raise
        if parent is not None and not self._taken:
            self._parent = Parent(self._context, parent, rendezvous, member, handler)
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

    @property
    def dropped(self) -> int:
        """Messages that were none, or came from a caller that was not welcomed."""
        return sum(side.dropped for side in (self._children, self._parent) if side is not None)

    @property
    def turned_away(self) -> int:
        """Callers that did not have the key."""
        return 0 if self._children is None else self._children.hub.turned_away

    @property
    def trouble(self) -> str:
        """Why the parent has not been reached yet, where that is known."""
        return "" if self._parent is None else self._parent.trouble

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
        except Exception as error:  # noqa: BLE001 - a thread's error must reach its owner, whatever it is
            log_event("broken", self._worker, level=logging.ERROR, why=repr(error))
            self._handler.broken(failure_of(error, self._worker))
        finally:
            with contextlib.suppress(Exception):
                # What was said before close is still said: a child must not take a success for a loss.
                self._drain()
            self._release()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in.fileno(), zmq.POLLIN)
        for waiting in (
            *(() if self._parent is None else self._parent.uplink.sockets),
            *(() if self._children is None else self._children.hub.sockets),
        ):
            poller.register(waiting, zmq.POLLIN)
        poller.poll(int(_TICK_S * 1000))

    def _work(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass
        self._drain()
        if self._children is not None:
            self._children.work()
        if self._parent is not None:
            self._parent.work()
        self._handler.tick()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _send_up(self, message: ToParent) -> None:
        if self._parent is not None:
            self._parent.send(message)

    def _send_down(self, worker: str, message: ToChild) -> None:
        if self._children is not None:
            self._children.send(worker, message)

    def _listen(self, name: str) -> None:
        address = self._rendezvous.listen_address(name)
        given, me = self._rendezvous.key, self._member()
        served = self._served_by_another(name, me)
        if served:
            # The one that is there goes on undisturbed; whatever this worker is asked to do says why it cannot.
            self._taken = True
            self._handler.broken(failure_of(UsageError(served), ""))
            return
        key = given or new_key()
        self._children = Children(self._context, key, self._member, self._handler)
        bound = self._children.hub.bind(address, name)
        self._record = Record(bound, me.incarnation, me.host, "" if given else key).encode()
        self._rendezvous.publish(name, self._record)

    def _served_by_another(self, name: str, me: Member) -> str:
        """Who listens under this name already, and what to do about it; empty if nobody does."""
        with contextlib.suppress(DeadlineError, RendezvousError, UsageError):
            record = Record.decode(self._rendezvous.lookup(name, 0.0))
            key = self._rendezvous.key or record.key
            if record.incarnation and key and is_served(self._context, record, key, me):
                return (
                    f"{me.worker}: the place of {name} is taken: another {me.worker} serves it, at {record.address} on "
                    f"{record.host}; close that one first, or give every job a meeting place or a job= of its own"
                )
        return ""

    def _release(self) -> None:
        if self._listens_as is not None and self._record:
            with contextlib.suppress(Exception):
                self._rendezvous.withdraw(self._listens_as, self._record)
        if self._parent is not None:
            with contextlib.suppress(Exception):
                self._parent.close()
        if self._children is not None:
            self._children.hub.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
