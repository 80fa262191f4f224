"""Control messages: whatever is not one of them is refused by one error and nothing else."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import duty_messages as duties
from adapters import messages
from adapters.failures import Failure, RemoteError, VersionError, error_of, failure_of
from adapters.messages import MalformedMessageError, decode, encode
from adapters.promise import Promise, Propose
from layout_algebra.errors import LoaderRaisedError
from transfer_exec.errors import DeadlineError, UnheldError

MEMBER = messages.Member("engine/a/1", 1, 2, "f00d", "host", "auto", None)
FAILURE = Failure("UnheldError", "trainer/0", "no trainer holds w")

UP = [
    messages.Hello("f3", 1, MEMBER),
    messages.Bye(),
    messages.Call("trainer/1", 3, 4, messages.SendIntent(7), b"\x80", None),
    messages.Call(
        "trainer/1", 3, 4, messages.ConnectIntent(("a",), 5, ("w",), "auto", "digest", False, ""), b"", FAILURE
    ),
    messages.Answer(9, 2, duties.Probed("d1", 0.5), None),
    messages.Answer(9, 2, duties.MapGiven(b"\0\1"), None),
    messages.Answer(9, 2, duties.Prepared({1: 2**64 - 1}, False, 0.1), None),
    messages.Answer(9, -1, None, FAILURE),
    messages.AnswerStop(9, Promise(3, True, 17), None),
    messages.AgreeValue(9, 1, -4),
    messages.Roster("engine/a", 2, (MEMBER,)),
    messages.Gathered("engine/a", 9, 2, (duties.Done(0.1), None), None),
]
DOWN = [
    messages.Welcome("f3", 7),
    messages.Refused(FAILURE, True),
    messages.Ping(),
    messages.Ask(9, 2, 65.0, duties.Bind(b"program", "shared_memory", (duties.Cell(3, b"runs"),), machines=2)),
    messages.Ask(9, 2, 65.0, duties.Attach({"engine/a/0": b"endpoint"})),
    messages.ProposeStop(9, Propose(3, 18), 30.0),
    messages.Committed(9, 3, 65.0),
    messages.Agreed(9, 1, 4),
    messages.Note(9, "probe, connect: engine/a", 1, 3, 65.0),
    messages.Cancel(9, FAILURE),
    messages.End(9, None, b"report"),
    messages.Stop(9, 60.0),
    messages.Relay(9, 2, 60.0, (duties.Transfer(5), duties.Stay())),
]


@pytest.mark.parametrize("message", UP, ids=lambda m: type(m).__name__)
def test_children_s_messages_come_back_equal(message: messages.ToParent) -> None:
    assert decode(encode(message), from_child=True) == message
    with pytest.raises(MalformedMessageError):
        decode(encode(message), from_child=False)


@pytest.mark.parametrize("message", DOWN, ids=lambda m: type(m).__name__)
def test_parents_messages_come_back_equal(message: messages.ToChild) -> None:
    assert decode(encode(message), from_child=False) == message
    with pytest.raises(MalformedMessageError):
        decode(encode(message), from_child=True)


def _refused_or_read(data: bytes, *, from_child: bool) -> None:
    try:
        decode(data, from_child=from_child)
    except MalformedMessageError:
        return


@settings(max_examples=500)
@given(data=st.binary(max_size=300), from_child=st.booleans())
def test_noise_is_refused(data: bytes, from_child: bool) -> None:
    _refused_or_read(data, from_child=from_child)


def test_changed_and_cut_messages_are_refused_or_read() -> None:
    made = random.Random(1)
    originals = [(encode(m), True) for m in UP] + [(encode(m), False) for m in DOWN]
    for _ in range(20_000):
        data, from_child = made.choice(originals)
        changed = bytearray(data)
        for _ in range(made.randint(1, 3)):
            changed[made.randrange(len(changed))] = made.randrange(256)
        _refused_or_read(bytes(changed[: made.randint(0, len(changed))]), from_child=from_child)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Ping", "more": 1}),
        msgspec.msgpack.encode({"type": "Agreed", "txn": "9", "number": 1, "value": 2}),
        msgspec.msgpack.encode({"type": "Agreed", "txn": 9, "number": 1}),
        b"\x81" * 50_000,
        b"\x91" * 50_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_wrong_shapes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(data, from_child=False)


def test_small_messages_must_be_small() -> None:
    long = "x" * (messages.MAX_SMALL_MESSAGE_BYTES + 1)
    with pytest.raises(MalformedMessageError, match="Welcome"):
        decode(encode(messages.Welcome(long)), from_child=False)
    assert decode(encode(messages.End(1, None, long.encode())), from_child=False)


def test_numpy_digests_travel_as_plain_numbers() -> None:
    digests = dict(enumerate(np.array([1, 2**64 - 1], dtype=np.uint64).tolist()))
    answer = messages.Answer(1, 1, duties.Prepared(digests, False, 0.0), None)
    assert decode(encode(answer), from_child=True) == answer


def test_failures_keep_class_origin_and_text() -> None:
    for error in (UnheldError("no w"), LoaderRaisedError("boom"), DeadlineError("late"), VersionError("old")):
        failure = failure_of(error, "engine/a/1")
        again = error_of(failure)
        assert type(again) is type(error)
        assert str(again) == f"engine/a/1: {error}"
        # A failure that is passed on says where it began, once.
        assert failure_of(again, "trainer/0") == failure


def test_failures_of_unknown_classes_are_remote_errors() -> None:
    failure = failure_of(ZeroDivisionError("by zero"), "engine/a/1")
    again = error_of(failure)
    assert type(again) is RemoteError
    assert str(again) == "engine/a/1: ZeroDivisionError: by zero"


def test_long_failures_are_cut() -> None:
    assert len(failure_of(ValueError("x" * 10**6), "w").text) < 10_000
