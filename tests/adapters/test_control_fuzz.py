"""A hundred thousand malformed messages from callers without the key, and as many from callers that have it.

Whatever they say, the worker goes on: nothing it knows changes, nothing is answered, and neither memory nor files nor
threads grow. Without the key every message is a handshake of its own, since the first wrong byte ends a connection.
"""

from __future__ import annotations

import gc
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from adapters import duty_messages as duties
from adapters import messages
from adapters.job_key import listener_pair, new_key
from adapters.messages import MalformedMessageError, Member, encode
from adapters.promise import Promise
from adapters.rendezvous import Record, SharedFolder
from adapters.station import Station
from tests.adapters.crew import wait_for
from tests.adapters.strangers import stranger
from tests.adapters.test_messages import DOWN, UP

MESSAGES = 100_000
BATCH = 50
MOST_GROWTH_BYTES = 24 << 20
WARM_UP = 3_000


class Job:
    """A sender of three ranks, one of whom is missing, and an engine."""

    def __init__(self, folder: Path) -> None:
        meeting = SharedFolder(folder)
        self.stations = [
            Station(group, rank, size, meeting, transport="auto", deadline_s=60.0, version=lambda: None)
            for group, rank, size in (("trainer", 0, 3), ("trainer", 1, 3), ("engine/a", 0, 2))
        ]
        self.root, self.engine = self.stations[0], self.stations[2]
        for station in self.stations:
            station.wait_joined()
        wait_for(lambda: "engine/a" in self.known()["rosters"])  # type: ignore[operator]
        self.record = Record.decode(meeting.lookup("sender", 1.0))
        self._process = psutil.Process()

    def known(self) -> dict[str, object]:
        """Everything that a message could change."""
        steps, out = self.root.conductor._steps, {}  # type: ignore[union-attr]
        for station in self.stations:
            lead, session = station._lead, station.session
            out[station.worker] = (
                None if lead is None else (dict(lead._members), lead._txn, lead._step, dict(lead._results)),
                (session.txn, session.counter, dict(session._ends), list(session._mail), session._broken),
            )
        return {**out, "rosters": dict(steps.rosters), "calls": dict(steps.calls), "gone": set(steps.gone)}

    def used(self) -> tuple[int, int, int]:
        gc.collect()
        return self._process.num_fds(), threading.active_count(), self._process.memory_info().rss

    def close(self) -> None:
        for station in reversed(self.stations):
            station.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def check_unmoved(job: Job, attack: Callable[[int], None]) -> None:
    """Let an attacker warm up, then send a hundred thousand; nothing may have changed or grown."""
    known = job.known()
    attack(WARM_UP)
    files, threads, memory = job.used()
    attack(MESSAGES)
    assert job.known() == known
    wait_for(lambda: job.used()[:2] == (files, threads))
    assert job.used()[2] - memory < MOST_GROWTH_BYTES
    for station in job.stations:
        station.check()


def greeting(made: random.Random, mechanism: bytes) -> bytes:
    """How a connection begins (https://rfc.zeromq.org/spec/23): signature, version, mechanism, role."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([made.randrange(2)]) + bytes(31)


def wrong_handshake(made: random.Random) -> bytes:
    """What a caller without the key may begin with; none of it is a right handshake."""
    noise = made.randbytes(made.randrange(70, 255))  # enough that nothing is waited for
    match made.randrange(6):
        case 0:  # nothing that has a signature
            return noise[0:1].replace(b"\xff", b"\0") + noise
        case 1:  # a caller that does not want to prove anything
            return greeting(made, b"NULL") + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + noise
        case 2:  # a hello of the right size
            return greeting(made, b"CURVE") + b"\x04\xc8\x05HELLO" + made.randbytes(194)
        case 3:  # any command, or none
            return greeting(made, b"CURVE") + bytes([made.choice((0, 4, 1, 5)), len(noise)]) + noise
        case 4:  # a message that says that it is huge
            return greeting(made, b"CURVE") + b"\x06" + made.getrandbits(62).to_bytes(8, "big") + noise
        case _:  # another mechanism
            return greeting(made, made.randbytes(20)) + noise


@pytest.mark.slow
def test_handshakes_without_the_key(job: Job) -> None:
    made = random.Random(1)
    port = int(job.record.address.rpartition(":")[2])

    def attack(count: int) -> None:
        for _ in range(count // BATCH):
            calling = [socket.create_connection(("127.0.0.1", port)) for _ in range(BATCH)]
            for one in calling:
                one.sendall(wrong_handshake(made))
            for one in calling:
                one.settimeout(4.0)
                try:
                    while one.recv(4096):  # until the worker hangs up, which it does at once
                        pass
                except ConnectionError:
                    pass
                except TimeoutError:
                    raise AssertionError("the worker keeps a connection that said something wrong") from None
                finally:
                    one.close()

    check_unmoved(job, attack)
    assert job.root.dropped == 0


def test_messages_sent_with_another_key(job: Job) -> None:
    """Sockets of the right kind: what they queue is never read."""
    known = job.known()
    for key in ("", new_key()):
        with stranger(job.record, key) as caller:
            for message in [*UP, *DOWN] * 20:
                caller.send(encode(message))
            assert caller.poll(300) == 0
    assert job.known() == known
    assert job.root.dropped == 0


def changed(made: random.Random, data: bytes) -> bytes:
    """A message with some bytes replaced, cut or added."""
    out = bytearray(data)
    for _ in range(made.randint(1, 4)):
        out[made.randrange(len(out))] = made.randrange(256)
    if made.random() < 0.3:
        del out[made.randrange(len(out)) :]
    return bytes(out) + made.randbytes(made.choice((0, 0, 5)))


def other_values(made: random.Random, value: object) -> object:
    """A message's plain values with some of them replaced by others that make no sense."""
    if made.random() < 0.2:
        odd = (-1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 700, b"\xff", None, [], {})
        return made.choice(odd)
    match value:
        case dict():
            return {key: other_values(made, each) for key, each in value.items() if made.random() < 0.95}
        case list():
            return [other_values(made, each) for each in value]
        case _:
            return value


def malformed(made: random.Random) -> list[bytes]:
    """Frames that a child might send, and that are no message."""
    originals = [encode(message) for message in UP]
    while True:
        match made.randrange(6):
            case 0:
                frame = made.randbytes(made.randrange(120))
            case 1 | 2:
                frame = changed(made, made.choice(originals))
            case 3:
                frame = msgspec.msgpack.encode(other_values(made, msgspec.msgpack.decode(made.choice(originals))))
            case 4:  # what only a parent may say
                frame = encode(made.choice(DOWN))
            case _:  # deep, or promising more than there is
                frame = made.choice(
                    (b"\x91" * 5_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81" * 3_000)
                )
        try:
            messages.decode(frame, from_child=True)
        except MalformedMessageError:
            return [frame]
        if made.random() < 0.2:
            return [frame, b""]  # well formed, but in more frames than one


def out_of_place() -> list[messages.ToParent]:
    """Messages that are well formed, of a rank that nobody has asked anything, about itself and others."""
    other = Member("engine/a/0", 0, 2, "f00d", "host", "auto", 9)
    return [
        messages.Hello("", messages.PROTOCOL, other),
        messages.Call("trainer/1", 1, 0, messages.SendIntent(7), b"\x80", None),
        messages.Answer(9, 2, duties.Done(0.5), None),
        messages.Answer(0, 0, None, None),
        messages.Answer(0, -1, None, messages.Failure("KeyError", "trainer/0", "x")),
        messages.AnswerStop(0, Promise(3, True, 17), None),
        messages.AgreeValue(7, 1, -4),
        messages.Roster("engine/a", 2, (other,)),
        messages.Gathered("engine/a", 9, 2, (duties.Done(0.1), None), None),
        messages.Gathered("trainer", 0, 0, (), messages.Failure("KeyError", "trainer/0", "x")),
    ]


def flood(job: Job, caller: zmq.Socket[bytes], made: random.Random) -> Callable[[int], None]:
    def attack(count: int) -> None:
        for _ in range(count // 1000):
            before = job.root.dropped
            for _ in range(1000):
                caller.send_multipart(malformed(made))
            wait_for(lambda before=before: job.root.dropped == before + 1000)  # type: ignore[misc]

    return attack


def test_messages_of_a_caller_that_has_the_key_and_says_no_hello(job: Job) -> None:
    with stranger(job.record) as caller:
        for message in out_of_place()[1:]:
            caller.send(encode(message))
        wait_for(lambda: job.root.dropped == len(out_of_place()) - 1)
        check_unmoved(job, flood(job, caller, random.Random(2)))
        # Nothing is answered but what looks like the hello of another version, which is sent away.
        while caller.poll(50):
            answer = messages.decode(caller.recv(), from_child=False)
            assert isinstance(answer, messages.Refused)
            assert answer.final
            assert "install one version" in answer.failure.text


def test_messages_of_a_member(job: Job) -> None:
    member = Member("trainer/2", 2, 3, "f00d", "host", "auto", None)
    with stranger(job.record) as caller:
        caller.send(encode(messages.Hello(job.record.incarnation, messages.PROTOCOL, member)))
        wait_for(lambda: len(job.known()["rosters"]["trainer"].members) == 3)  # type: ignore[index]
        before = job.known()
        for message in out_of_place():
            caller.send(encode(message))
        wait_for(lambda: job.root.dropped == 1)  # the second hello; the others are heard, and mean nothing now
        check_unmoved(job, flood(job, caller, random.Random(3)))
        assert job.known() == before


def test_messages_of_a_parent(job: Job, tmp_path: Path) -> None:
    """A socket that listens with the key, as a parent would: the rank that called it goes on as well."""
    made, key, context = random.Random(4), new_key(), zmq.Context()
    listener = context.socket(zmq.ROUTER)
    listener.linger, listener.sndhwm, listener.curve_server = 0, 0, True

    listener.curve_secretkey = listener_pair(key).secret
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    meeting = SharedFolder(tmp_path / "other")
    meeting.publish("sender", Record(f"tcp://127.0.0.1:{port}", "f00d", "", key).encode())
    rank = Station("trainer", 1, 2, meeting, transport="auto", deadline_s=60.0, version=lambda: None)
    try:
        identity, _ = listener.recv_multipart()
        listener.send_multipart([identity, encode(messages.Welcome("f00d"))])
        rank.wait_joined()
        originals = [encode(message) for message in DOWN]
        sent = 0
        while sent < 20_000:
            frame = changed(made, made.choice(originals))
            try:
                messages.decode(frame, from_child=False)
            except MalformedMessageError:
                listener.send_multipart([identity, frame])
                sent += 1
        wait_for(lambda: rank.dropped == sent)
        rank.check()
        assert (rank.session.txn, rank.session.counter) == (0, 0)
    finally:
        rank.close()
        listener.close()
        context.term()
