"""Mooncake's transfer engine with everything native behind a wall: handles that cannot be stale, waits that end.

The engine (`mooncake.engine.TransferEngine`) crashes on an unknown batch, reports a batch as done when its first
descriptor is, blocks for a minute on a peer that listens and says nothing, and runs TCP whatever it was asked for.
So every descriptor is a batch of its own, ids never leave this file, peers are asked over a socket of ours before the
engine may open them, and the engine's own answer to that question says which transport it runs.

::

    engine = MooncakeEngine("trainer/0", "10.0.0.2", protocol="tcp", devices="", deadline_s=10)
    engine.register(memory)                                  # peers may write there
    about = describe("engine/0/0", "10.0.0.3", 15123, deadline_s=5)        # SegmentInfo(protocol="tcp", buffers={...})
    post = engine.post_write("10.0.0.3:15123", source, target, length)
    engine.poll(post)                                        # PENDING, DONE or FAILED
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar, cast

import msgspec
import numpy as np

from transfer_exec.errors import TransportError
from transfer_exec.transport.base import Memory

_T = TypeVar("_T")

INSTALL = (
    "install mooncake-transfer-engine (hosts with CUDA) or mooncake-transfer-engine-non-cuda (hosts without), and the "
    "system's libibverbs1, libnuma1 and libcurl4"
)
"""What to do where the engine cannot be imported."""

_METADATA_REQUEST = b'\x01{"name":""}'
_LARGEST_ANSWER_BYTES = 128 << 20
_POLL_S = 100e-6
_SETTINGS_LOCK = threading.Lock()


class PostState(Enum):
    """Where a posted descriptor is."""

    PENDING = 0
    DONE = 1
    FAILED = 2


class _Segment(msgspec.Struct):
    """What an engine answers when it is asked for its metadata; other fields are ignored."""

    protocol: str
    buffers: list[_Buffer]


class _Buffer(msgspec.Struct):
    addr: int
    length: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What an engine says of itself.

    Attributes
    ----------
    protocol
        The transport that it runs, ``"tcp"`` or ``"rdma"``.
    buffers
        Address and bytes of all memory registered with it.
    """

    protocol: str
    buffers: frozenset[tuple[int, int]]


class _Native(Protocol):
    """The part of ``TransferEngine`` that is used."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, length: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def transfer_submit_write(self, session: str, source: int, target: int, length: int) -> int: ...
    def batch_transfer_async_read(
        self, session: str, targets: list[int], sources: list[int], lengths: list[int]
    ) -> int: ...
    def transfer_check_status(self, batch: int) -> int: ...


class Post:
    """One posted descriptor. Its id is gone as soon as it has ended, so it cannot be asked for twice."""

    __slots__ = ("_batch", "_state")

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._state = PostState.PENDING if batch else PostState.FAILED

    def poll(self, native: _Native) -> PostState:
        """Ask the engine, unless it has ended already."""
        if self._state is PostState.PENDING:
            status = native.transfer_check_status(self._batch)
            if status:
                self._state = PostState.DONE if status == 1 else PostState.FAILED
                self._batch = 0
        return self._state


class MooncakeEngine:
    """One transfer engine of this process.

    Parameters
    ----------
    worker
        For messages.
    host
        Address at which peers reach this machine.
    protocol
        ``"tcp"`` or ``"rdma"``.
    devices
        RDMA devices by name, separated by commas; empty for all.
    gid
        Which entry of their tables; None leaves it to the engine.
    deadline_s
        Of every call that may block.

    Raises
    ------
    TransportError
        If Mooncake is not installed, does not start, or runs another protocol than asked for.
    """

    def __init__(
        self, worker: str, host: str, *, protocol: str, devices: str, deadline_s: float, gid: int | None = None
    ) -> None:
        self._worker = worker
        self._deadline_s = deadline_s
        self._keeps: list[Memory] = []
        self._stuck = ""
        with _environment(_settings(protocol, gid)):
            native = _load(worker)()
            code = native.initialize(host, "P2PHANDSHAKE", protocol, devices)
            if code:
                raise TransportError(f"{worker}: mooncake did not start on {host} with {protocol} (code {code})")
            self._native: _Native | None = native
            self.session = f"{host}:{native.get_rpc_port()}"
            # It reads the rest of its settings when it first moves bytes.
            probe = np.zeros(16, dtype=np.uint8)
            self.register(probe)
            works = self.read(self.session, probe.ctypes.data, probe[8:])
        if not works:
            raise TransportError(f"{worker}: mooncake started on {host} and cannot reach itself there; is it ours?")
        running = describe(worker, host, native.get_rpc_port(), deadline_s=deadline_s).protocol
        if running != protocol:
            raise TransportError(
                f"{worker}: mooncake was asked for {protocol} and runs {running}; rdma needs a device that "
                "ibv_devices lists, or choose the transport 'mooncake', which is tcp"
            )

    def register(self, memory: Memory) -> None:
        """Let peers read and write memory; TransportError if the engine refuses."""
        code = self._check().register_memory(memory.ctypes.data, memory.nbytes)
        if code:
            raise TransportError(f"{self._worker}: mooncake refused to register {memory.nbytes} bytes (code {code})")
        self._keeps.append(memory)

    def unregister(self, memory: Memory) -> None:
        """Let nobody begin to write there any more; the memory stays alive until the engine is stopped."""
        if self._native is not None and not self._stuck:
            self._native.unregister_memory(memory.ctypes.data)

    def post_write(self, session: str, source: int, target: int, length: int) -> Post:
        """Begin to copy ``length`` bytes to an address of a peer that was opened by `read`."""
        return Post(self._check().transfer_submit_write(session, source, target, length))

    def poll(self, post: Post) -> PostState:
        """Where a post is; never blocks."""
        return post.poll(self._check())

    def read(self, session: str, source: int, target: Memory) -> bool:
        """Read a peer's memory, within the deadline; whether it came. Opens the peer for later writes.

        Raises
        ------
        TransportError
            If the engine hung. It is of no use any more then, for any peer.
        """
        native = self._check()

        def work() -> bool:
            post = Post(native.batch_transfer_async_read(session, [target.ctypes.data], [source], [target.nbytes]))
            while (state := post.poll(native)) is PostState.PENDING:
                time.sleep(_POLL_S)
            return state is PostState.DONE

        done = _within(self._deadline_s, work)
        if done is None:
            # Its thread may still write into the memory of this call, and holds on to the engine.
            self._stuck = f"{session} did not answer within {self._deadline_s:g} s"
            self._check()
        return bool(done)

    def close(self) -> None:
        """Stop the engine, unless it hangs: then it and all memory that it knows live on."""
        self._native = None
        if not self._stuck:
            self._keeps.clear()

    def _check(self) -> _Native:
        if self._stuck:
            raise TransportError(
                f"{self._worker}: mooncake hangs since {self._stuck}, and holds up writes to every other peer; "
                "connect again"
            )
        if self._native is None:
            raise TransportError(f"{self._worker}: mooncake was stopped")
        return self._native


def describe(worker: str, host: str, port: int, *, deadline_s: float) -> SegmentInfo:
    """Ask a worker's engine what it is, over a socket of our own.

    Raises
    ------
    TransportError
        If nobody listens, nobody answers in time, or the answer is no engine's.
    """
    where = f"{worker}: mooncake at {host}:{port}"
    stop_at = time.monotonic() + deadline_s
    try:
        with socket.create_connection((host, port), timeout=deadline_s) as opened:
            opened.sendall(struct.pack("<Q", len(_METADATA_REQUEST)) + _METADATA_REQUEST)
            (size,) = struct.unpack("<Q", _receive(opened, 8, stop_at))
            if not 1 < size <= _LARGEST_ANSWER_BYTES:
                raise TransportError(f"{where}: announced an answer of {size} bytes; expected an engine's metadata")
            answer = _receive(opened, size, stop_at)
    except TimeoutError as error:
        raise TransportError(
            f"{where}: no answer within {deadline_s:g} s; the process is frozen or no engine"
        ) from error
    except OSError as error:
        raise TransportError(f"{where}: cannot be reached: {error}") from error
    try:
        segment = msgspec.json.decode(answer[1:], type=_Segment)
    except msgspec.MsgspecError as error:
        raise TransportError(f"{where}: answered what no engine answers: {error}") from error
    return SegmentInfo(segment.protocol, frozenset((buffer.addr, buffer.length) for buffer in segment.buffers))


def _receive(opened: socket.socket, size: int, stop_at: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        left = stop_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        opened.settimeout(left)
        part = opened.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)


def _settings(protocol: str, gid: int | None) -> dict[str, str | None]:
    # Whoever has set the engine's own variable has chosen.
    chosen = {} if gid is None or "MC_GID_INDEX" in os.environ else {"MC_GID_INDEX": str(gid)}
    return chosen | {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_SLICE_SIZE": "1048576",
        "MC_FORCE_TCP": "1" if protocol == "tcp" else None,
        "MC_TCP_PROTO": None,
    }


def _load(worker: str) -> Callable[[], _Native]:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportError(f"{worker}: the mooncake transport cannot be used: {error}; {INSTALL}") from error
    return cast(Callable[[], _Native], TransferEngine)


@contextmanager
def _environment(settings: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables for as long as the engine reads them, which is its only way to be configured."""
    with _SETTINGS_LOCK:
        before = {name: os.environ.get(name) for name in settings}
        _set(settings)
        try:
            yield
        finally:
            _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _within(deadline_s: float, work: Callable[[], _T]) -> _T | None:
    """What a call returns, or None if it has not returned in time; it then goes on in its thread."""
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return results[0] if results else None
