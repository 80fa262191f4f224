"""Posts, sockets and rendezvous: who is welcomed, who is lost, and what strangers can do, which is nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from adapters import duty_messages as duties
from adapters import messages
from adapters.control import Post
from adapters.failures import ClosedError, Failure, RendezvousError
from adapters.job_key import caller_pair, listener_pair, new_key
from adapters.messages import Agreed, AgreeValue, Answer, Hello, Member, ToChild, ToParent, encode
from adapters.rendezvous import Addresses, Record, Rendezvous, SharedFolder
from tests.adapters.crew import wait_for
from tests.adapters.strangers import stranger


class Notes:
    """A handler that writes everything down."""

    def __init__(self) -> None:
        self.children: list[tuple[str, ToParent]] = []
        self.parent: list[ToChild] = []
        self.admitted: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.parents = 0
        self.txns: list[int] = []
        self.parent_failures: list[tuple[Failure, bool]] = []
        self.refuse: Failure | None = None
        self.broke: Failure | None = None

    def admit(self, member: Member) -> Failure | None:
        if self.refuse is None:
            self.admitted.append(member.worker)
        return self.refuse

    def newest(self) -> int:
        return 7

    def from_child(self, worker: str, message: ToParent) -> None:
        self.children.append((worker, message))

    def child_lost(self, worker: str, reason: str) -> None:
        self.lost.append((worker, reason))

    def from_parent(self, message: ToChild) -> None:
        self.parent.append(message)

    def parent_joined(self, txn: int) -> None:
        self.parents += 1
        self.txns.append(txn)

    def parent_lost(self, failure: Failure, *, final: bool) -> None:
        self.parent_failures.append((failure, final))

    def broken(self, failure: Failure) -> None:
        self.broke = failure

    def tick(self) -> None:
        pass


def member(worker: str, incarnation: str = "1") -> Member:
    return Member(worker, int(worker.rpartition("/")[2]), 4, incarnation, "host", "auto", None)


class Posts:
    """Posts that are closed at the end, whatever happens."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._made: list[Post] = []

    def root(self, incarnation: str = "1") -> tuple[Post, Notes]:
        return self._make(member("trainer/0", incarnation), listens_as="sender", parent=None)

    def child(self, rank: int, incarnation: str = "1") -> tuple[Post, Notes]:
        return self._make(member(f"trainer/{rank}", incarnation), listens_as=None, parent="sender")

    def _make(self, who: Member, *, listens_as: str | None, parent: str | None) -> tuple[Post, Notes]:
        notes = Notes()
        post = Post(lambda: who, self._rendezvous, notes, listens_as=listens_as, parent=parent)
        self._made.append(post)
        post.start()
        return post, notes

    def close(self) -> None:
        for post in self._made:
            post.close()


@pytest.fixture
def posts(tmp_path: Path) -> Iterator[Posts]:
    made = Posts(SharedFolder(tmp_path))
    yield made
    made.close()


def test_messages_go_both_ways_in_order(posts: Posts) -> None:
    root, above = posts.root()
    child, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    assert below.txns == [7]
    for number in range(200):
        child.to_parent(AgreeValue(1, number, 0))
        root.to_child("trainer/1", Agreed(1, number, 0))
    wait_for(lambda: len(above.children) == len(below.parent) == 200)
    assert above.children == [("trainer/1", AgreeValue(1, number, 0)) for number in range(200)]
    assert below.parent == [Agreed(1, number, 0) for number in range(200)]


def test_large_messages_pass(posts: Posts) -> None:
    _, above = posts.root()
    child, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    data = random.Random(1).randbytes(20_000_000)
    child.to_parent(Answer(1, 1, duties.MapGiven(data), None))
    wait_for(lambda: len(above.children) == 1)
    assert above.children[0][1] == Answer(1, 1, duties.MapGiven(data), None)


def test_children_may_come_before_their_parent(posts: Posts) -> None:
    _, below = posts.child(1)
    time.sleep(0.3)
    assert below.parents == 0
    posts.root()
    wait_for(lambda: below.parents == 1)


def test_a_child_that_closes_is_lost_at_once(posts: Posts) -> None:
    _, above = posts.root()
    child, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    child.close()
    wait_for(lambda: above.lost == [("trainer/1", "it was closed")], within_s=2)


def test_a_parent_that_closes_is_lost_and_its_successor_is_found(posts: Posts) -> None:
    root, _ = posts.root("first")
    _, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    root.close()
    wait_for(lambda: len(below.parent_failures) == 1, within_s=3)
    assert not below.parent_failures[0][1]
    assert "closed" in below.parent_failures[0][0].text
    posts.root("second")
    wait_for(lambda: below.parents == 2)


def test_a_record_of_an_earlier_job_leads_nowhere(posts: Posts, tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    folder.publish("sender", Record("tcp://127.0.0.1:9", "long gone").encode())
    _, below = posts.child(1)
    time.sleep(0.5)
    assert below.parents == 0
    posts.root()
    wait_for(lambda: below.parents == 1)


def test_a_record_of_another_process_at_the_same_address_is_refused(posts: Posts, tmp_path: Path) -> None:
    root, above = posts.root("now")
    folder = SharedFolder(tmp_path)
    right = folder.lookup("sender", 1.0)
    folder.publish("sender", Record(Record.decode(right).address, "before").encode())
    _, below = posts.child(1)
    time.sleep(0.5)
    assert (below.parents, above.admitted) == (0, [])
    folder.publish("sender", right)
    wait_for(lambda: below.parents == 1)
    root.close()


def test_a_second_worker_of_one_name_is_refused_for_good(posts: Posts) -> None:
    _, above = posts.root()
    _, below = posts.child(1, "one")
    wait_for(lambda: below.parents == 1)
    _, second = posts.child(1, "two")
    wait_for(lambda: len(second.parent_failures) == 1)
    failure, final = second.parent_failures[0]
    assert final
    assert failure.kind == "UsageError"
    assert "two workers call themselves trainer/1" in failure.text
    time.sleep(0.3)
    assert (above.admitted, above.lost, second.parents) == (["trainer/1"], [], 0)


def test_a_worker_that_came_back_takes_its_old_place(posts: Posts) -> None:
    _, above = posts.root()
    first, below = posts.child(1, "one")
    wait_for(lambda: below.parents == 1)
    first.close()
    _, again = posts.child(1, "two")
    wait_for(lambda: again.parents == 1)
    assert above.admitted == ["trainer/1", "trainer/1"]


def test_a_refusal_says_why(posts: Posts) -> None:
    _, above = posts.root()
    above.refuse = Failure("UsageError", "trainer/0", "you are not one of us")
    _, below = posts.child(1)
    wait_for(lambda: below.parent_failures == [(above.refuse, True)])


def test_another_protocol_is_refused(posts: Posts, tmp_path: Path) -> None:
    posts.root()
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    with stranger(record) as socket:
        socket.send(encode(Hello("1", 99, member("trainer/1"))))
        assert socket.poll(3000)
        answer = messages.decode(socket.recv(), from_child=False)
    assert isinstance(answer, messages.Refused)
    assert answer.final
    assert "protocol 99" in answer.failure.text


def test_noise_is_dropped_and_counted_and_changes_nothing(posts: Posts, tmp_path: Path) -> None:
    root, above = posts.root()
    child, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    made = random.Random(7)
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    threads = threading.active_count()
    good = [
        encode(AgreeValue(1, 1, 1)),
        encode(Answer(1, 1, duties.Done(0.1), None)),
        encode(messages.Roster("engine/a", 4, (member("engine/a/0"),))),
        encode(messages.Bye()),
    ]
    sent = 0
    with stranger(record) as socket:
        for _ in range(5_000):
            match made.randrange(4):
                case 0:
                    frames = [made.randbytes(made.randrange(60))]
                case 1:
                    # Well formed, but from somebody who never said hello.
                    frames = [made.choice(good)]
                case 2:
                    frames = [made.randbytes(3) for _ in range(made.randrange(2, 5))]
                case _:
                    frames = [msgspec.msgpack.encode({"type": "Hello", "member": made.random()})]
            socket.send_multipart(frames)
            sent += 1
        wait_for(lambda: root.dropped >= sent)
    assert root.dropped == sent
    child.to_parent(AgreeValue(1, 5, 5))
    wait_for(lambda: above.children == [("trainer/1", AgreeValue(1, 5, 5))])
    assert (above.admitted, above.lost, above.broke) == (["trainer/1"], [], None)
    assert threading.active_count() == threads


def test_noise_from_a_member_is_dropped_too(posts: Posts, tmp_path: Path) -> None:
    root, above = posts.root()
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    with stranger(record) as socket:
        socket.send(encode(Hello("1", messages.PROTOCOL, member("trainer/2"))))
        wait_for(lambda: above.admitted == ["trainer/2"])
        for _ in range(100):
            socket.send(b"\xc1noise")
        socket.send(encode(Agreed(1, 1, 1)))  # what only a parent may say
        wait_for(lambda: root.dropped == 101)
        assert above.children == []


def test_a_handler_that_fails_is_reported_and_ends_the_thread(posts: Posts) -> None:
    root, above = posts.root()
    root.run(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    wait_for(lambda: above.broke is not None)
    assert above.broke is not None
    assert "division by zero" in above.broke.text


def test_after_close_nothing_is_left(tmp_path: Path) -> None:
    posts = Posts(SharedFolder(tmp_path))
    root, _ = posts.root()
    _, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    posts.close()
    posts.close()
    assert list(tmp_path.iterdir()) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("transload")] == []
    with pytest.raises(ClosedError):
        root.check_process()


def test_callers_without_the_key_are_turned_away_unheard(posts: Posts, tmp_path: Path) -> None:
    root, above = posts.root()
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    hello = encode(Hello("1", messages.PROTOCOL, member("trainer/1")))
    for number, key in enumerate(("", new_key())):
        with stranger(record, key) as socket:
            socket.send(hello)
            wait_for(lambda number=number: root.turned_away > number)  # type: ignore[misc]
            assert socket.poll(200) == 0
    assert (above.admitted, root.dropped) == ([], 0)
    _, below = posts.child(1)
    wait_for(lambda: below.parents == 1)


def test_a_caller_that_only_knows_the_listener_is_turned_away(posts: Posts, tmp_path: Path) -> None:
    """The public half of the listener's pair is no proof."""
    root, above = posts.root()
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey = listener_pair(record.key).public
    socket.curve_publickey, socket.curve_secretkey = caller_pair(new_key())
    socket.connect(record.address)
    socket.send(encode(Hello("1", messages.PROTOCOL, member("trainer/1"))))
    wait_for(lambda: root.turned_away > 0)
    assert (above.admitted, root.dropped) == ([], 0)
    socket.close()
    context.term()


def test_a_listener_without_the_key_learns_nothing(tmp_path: Path) -> None:
    """Somebody took the address of a parent: nobody says hello to it."""
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.linger = 0
    impostor.curve_server = True
    impostor.curve_secretkey = listener_pair(new_key()).secret
    address = f"tcp://127.0.0.1:{impostor.bind_to_random_port('tcp://127.0.0.1')}"
    posts = Posts(Addresses({"sender": address}, key=new_key()))
    try:
        child, below = posts.child(1)
        wait_for(lambda: "breaks off the handshake" in child.trouble)
        wait_for(lambda: len(below.parent_failures) == 1)
        failure, final = below.parent_failures[0]
        assert (failure.kind, final, below.parents) == ("AuthenticationError", True, 0)
        assert "give all workers the same key" in failure.text
        assert impostor.poll(100) == 0
    finally:
        posts.close()
        impostor.close()
        context.term()


def test_a_record_without_a_key_is_no_way_in(posts: Posts, tmp_path: Path) -> None:
    SharedFolder(tmp_path).publish("sender", Record("tcp://127.0.0.1:9").encode())
    child, _ = posts.child(1)
    wait_for(lambda: "the record of sender has no key" in child.trouble)


def test_a_loopback_address_of_another_machine_is_named(posts: Posts, tmp_path: Path) -> None:
    record = Record("tcp://127.0.0.1:9", "1", "another machine", new_key())
    SharedFolder(tmp_path).publish("sender", record.encode())
    child, _ = posts.child(1)
    wait_for(lambda: "give its rendezvous host=" in child.trouble)
    assert "which is of another machine alone and out of reach of trainer/1 on host" in child.trouble


def test_one_connection_speaks_for_one_worker(posts: Posts, tmp_path: Path) -> None:
    root, above = posts.root()
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    with stranger(record) as socket:
        for rank in (2, 3, 2):
            socket.send(encode(Hello("1", messages.PROTOCOL, member(f"trainer/{rank}"))))
        socket.send(encode(AgreeValue(1, 1, 1)))
        wait_for(lambda: len(above.children) == 1)
        socket.send(encode(messages.Bye()))
        wait_for(lambda: len(above.lost) == 1)
    assert (above.admitted, above.children) == (["trainer/2"], [("trainer/2", AgreeValue(1, 1, 1))])
    assert (root.dropped, above.broke) == (2, None)


def test_a_greeting_that_comes_late_does_not_leave_its_worker_outside(posts: Posts, tmp_path: Path) -> None:
    """A frozen parent finds the greetings of several attempts when it wakes, and takes the last it reads."""
    root, above = posts.root()
    child, below = posts.child(1)
    wait_for(lambda: below.parents == 1)
    record = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
    with stranger(record) as socket:
        socket.send(encode(Hello("1", messages.PROTOCOL, member("trainer/1"))))
        wait_for(lambda: len(above.lost) == 1)
    wait_for(lambda: below.parents == 2)
    child.to_parent(AgreeValue(1, 1, 1))
    wait_for(lambda: above.children == [("trainer/1", AgreeValue(1, 1, 1))])
    root.to_child("trainer/1", Agreed(1, 1, 1))
    wait_for(lambda: below.parent == [Agreed(1, 1, 1)])
    assert (above.broke, below.broke) == (None, None)


def test_a_taken_port_is_an_error_that_names_it(posts: Posts, tmp_path: Path) -> None:
    posts.root()
    taken = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0)).address
    with pytest.raises(RendezvousError, match=r"sender: cannot listen at tcp://127.0.0.1:\d+"):
        Posts(Addresses({"sender": taken}, key=new_key())).root()


def test_addresses_that_are_known_beforehand(tmp_path: Path) -> None:
    probe = Posts(SharedFolder(tmp_path))
    probe.root()
    free = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0)).address
    probe.close()
    known = Posts(Addresses({"sender": free}, key=new_key()))
    try:
        known.root()
        _, below = known.child(1)
        wait_for(lambda: below.parents == 1)
    finally:
        known.close()
