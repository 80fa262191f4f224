"""The two kinds of control sockets: one that listens to children, one that calls the parent.

All sockets are made in one function of this file, with their limits, heartbeats and lingering times. Every connection
is CURVE: the listener's `Gate` lets in only callers that have the job's key, and a caller only listens to one that has.

::

    hub = Hub(context, key); address = hub.bind("tcp://127.0.0.1:0", "engine/a")
    uplink = Uplink(context); uplink.call(address, key); uplink.send(Hello(...))
    identity, data = hub.receive(); hub.send(identity, Welcome(...))     # "" or why it cannot be reached
"""

from __future__ import annotations

import contextlib
import time

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from adapters.failures import RendezvousError
from adapters.job_key import caller_pair, listener_pair
from adapters.messages import MAX_MESSAGE_BYTES, ToChild, ToParent, encode

__all__ = ["Child", "Hub", "Uplink"]

_HELLO_TIMEOUT_S = 2.0
_HANDSHAKE_MS = 5_000
_HEARTBEAT_MS = 1_000
_FROZEN_AFTER_MS = 10_000
_LINGER_MS = 500
_QUEUE_MESSAGES = 100_000
_BROKEN = zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Context = zmq.Context[zmq.Socket[bytes]]


class Child:
    """A connection that was welcomed."""

    def __init__(self, identity: bytes, incarnation: str) -> None:
        self.identity = identity
        self.incarnation = incarnation


class Gate:
    """Says which callers may speak, when ZeroMQ asks: those with the key (https://rfc.zeromq.org/spec/27)."""

    def __init__(self, context: Context, key: str) -> None:
        self._welcome = z85.decode(caller_pair(key).public)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer everything that has been asked."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
                may = mechanism == b"CURVE" and credentials == [self._welcome]
                status = (b"200", b"OK") if may else (b"400", b"another key")
                self.socket.send_multipart([version, number, *status, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close(0)


class Hub:
    """The listening socket.

    Attributes
    ----------
    children, speakers
        Welcomed connections by worker, and workers by connection.
    turned_away
        Handshakes that failed: callers without the key, and whatever else finds the port.
    """

    def __init__(self, context: Context, key: str) -> None:
        self._gate = Gate(context, key)
        self.socket = _make_socket(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, listener_pair(key).secret)
        self._monitor = self.socket.get_monitor_socket(_REFUSED)
        self.turned_away = 0
        self.children: dict[str, Child] = {}
        self.speakers: dict[bytes, str] = {}

    def bind(self, address: str, name: str) -> str:
        """Listen; the address with the port that was taken."""
        if "[" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise RendezvousError(f"{name}: cannot listen at {address}: {error}; give a free port or port 0") from error
        return self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll."""
        return self.socket, self._gate.socket, self._monitor

    def guard(self) -> None:
        """Let callers in or turn them away."""
        self._gate.answer()
        self.turned_away += len(_events(self._monitor))

    def close(self) -> None:
        """Stop listening once what was said has left, or shortly after."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(_LINGER_MS)
        self._gate.close()

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
    """The socket to the parent, made anew for every attempt.

    Attributes
    ----------
    joined
        Whether the parent has said welcome.
    refused
        Whether a handshake has failed in this attempt: the other side has another key, or is none of ours.
    unreachable
        Whether nobody listens at the address, as far as is known.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self.joined = False
        self.refused = False
        self.unreachable = False
        self.give_up_at = 0.0

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll; empty while there is no attempt."""
        return tuple(each for each in (self._socket, self._monitor) if each is not None)

    def call(self, address: str, key: str) -> None:
        """Begin an attempt.

        Raises
        ------
        RendezvousError
            If the address is none.
        """
        self._socket = _make_socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, listener_pair(key).public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, caller_pair(key).public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, caller_pair(key).secret)
        if "[" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(_BROKEN | _REFUSED | zmq.EVENT_CONNECT_RETRIED)
        self.refused = self.unreachable = False
        self.give_up_at = time.monotonic() + _HELLO_TIMEOUT_S
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise RendezvousError(f"{address}: cannot be called: {error}") from error

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
        """Whether the connection broke since this was last asked."""
        assert self._monitor is not None
        happened = _events(self._monitor)
        self.refused = self.refused or any(event & _REFUSED for event in happened)
        self.unreachable = self.unreachable or zmq.EVENT_CONNECT_RETRIED in happened
        return any(event & (_BROKEN | _REFUSED) for event in happened)

    def close(self) -> None:
        """End the attempt or the connection; the greeting of an attempt that is over must not arrive later."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(_LINGER_MS if self.joined else 0)
        self._socket = self._monitor = None
        self.joined = False


def _events(monitor: zmq.Socket[bytes]) -> list[int]:
    """What has happened to a socket."""
    happened = []
    with contextlib.suppress(zmq.Again):
        while True:
            happened.append(int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"]))
    return happened


def _make_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    """The one place where sockets are made."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    made.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _FROZEN_AFTER_MS)
    made.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    return made
