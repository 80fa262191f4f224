"""The two kinds of control sockets: one that listens to children, one that calls the parent.

All sockets are made in one function of this file, with their limits, heartbeats and lingering times.

::

    hub = Hub(context); address = hub.bind("tcp://127.0.0.1:0", "engine/a")
    uplink = Uplink(context); uplink.call(address); uplink.send(Hello(...))
    identity, data = hub.receive(); hub.send(identity, Welcome(...))     # "" or why it cannot be reached
"""

from __future__ import annotations

import contextlib
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from adapters.failures import RendezvousError
from adapters.messages import MAX_MESSAGE_BYTES, ToChild, ToParent, encode

__all__ = ["Child", "Hub", "Uplink"]

_HELLO_TIMEOUT_S = 2.0
_HEARTBEAT_MS = 1_000
_FROZEN_AFTER_MS = 10_000
_LINGER_MS = 500
_QUEUE_MESSAGES = 100_000


class Child:
    """A connection that was welcomed."""

    def __init__(self, identity: bytes, incarnation: str) -> None:
        self.identity = identity
        self.incarnation = incarnation


class Hub:
    """The listening socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = _make_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.children: dict[str, Child] = {}
        self.speakers: dict[bytes, str] = {}
        self.next_ping = 0.0

    def bind(self, address: str, name: str) -> str:
        """Listen; the address with the port that was taken."""
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise RendezvousError(f"{name}: cannot listen at {address}: {error}; give a free port or port 0") from error
        return self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def close(self) -> None:
        """Stop listening once what was said has left, or shortly after."""
        self.socket.close(_LINGER_MS)

    def send(self, identity: bytes, message: ToChild) -> str:
        """Send to one connection; why it cannot be reached, or nothing."""
        try:
            self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK, copy=False)
        except ValueError as error:
            return str(error)
        except zmq.Again:
            return "it does not read its messages"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "its connection closed"
        return ""

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None when there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


class Uplink:
    """The socket to the parent, made anew for every attempt."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self.joined = False
        self.give_up_at = 0.0

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll; empty while there is no attempt."""
        return tuple(each for each in (self._socket, self._monitor) if each is not None)

    def call(self, address: str) -> None:
        """Begin an attempt."""
        self._socket = _make_socket(self._context, zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.give_up_at = time.monotonic() + _HELLO_TIMEOUT_S
        self._socket.connect(address)

    def send(self, message: ToParent) -> None:
        """Send if there is a connection; a full queue means that the parent is gone, which the monitor tells."""
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):
                self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self) -> bytes | None:
        """The next message; None when there is none."""
        assert self._socket is not None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames[0] if len(frames) == 1 else b""

    def disconnected(self) -> bool:
        """Whether the connection broke since it was made."""
        assert self._monitor is not None
        broke = False
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                broke = True
        return broke

    def close(self) -> None:
        """End the attempt or the connection."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(_LINGER_MS)
        self._socket = self._monitor = None
        self.joined = False


def _make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """The one place where sockets are made."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    made.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _FROZEN_AFTER_MS)
    return made
