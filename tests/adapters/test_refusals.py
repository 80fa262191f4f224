"""What somebody may get wrong is a named error that says what to do, within seconds and not at a deadline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from adapters import greeting, messages
from adapters.failures import AuthenticationError, RendezvousError, UsageError, VersionError
from adapters.job_key import new_key
from adapters.messages import Hello, Member, Refused, encode
from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import Addresses, Record, Rendezvous, SharedFolder
from adapters.sender import SenderAdapter
from layout_algebra.errors import CorrespondenceError
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.adapters.crew import Crew, wait_for
from tests.adapters.strangers import stranger
from tests.adapters.toy import SHAPES, SPACE, Holding, rollout, trainer

SOON_S = 15.0


@contextmanager
def quickly() -> Iterator[None]:
    """Long before any deadline, which is a minute or more here."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


@contextmanager
def sender(
    place: Rendezvous | Path, *, rank: int = 0, world_size: int = 1, held: Holding | None = None
) -> Iterator[SenderAdapter]:
    holding = held or trainer(rank, world_size)
    made = SenderAdapter(
        holding.load_weights, holding.parameters, SPACE, rank=rank, world_size=world_size, rendezvous=place
    )
    try:
        yield made
    finally:
        made.close()


@contextmanager
def receiver(
    place: Rendezvous | Path, *, engine: str = "a", rank: int = 0, world_size: int = 1, space: CheckpointSpace = SPACE
) -> Iterator[ReceiverAdapter]:
    holding = rollout(rank, world_size)
    made = ReceiverAdapter(
        holding.load_weights,
        holding.parameters,
        space,
        engine=engine,
        rank=rank,
        world_size=world_size,
        rendezvous=place,
    )
    try:
        yield made
    finally:
        made.close()


def polls(adapter: ReceiverAdapter) -> Callable[[], bool]:
    """A condition that never holds: it is waited for until the adapter raises."""

    def poll() -> bool:
        adapter.poll_requests()
        return False

    return poll


def test_a_second_sender_is_told_who_serves_the_engines(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        with sender(tmp_path) as second, quickly():
            for call in (lambda: second.connect(["a"]), lambda: second.send_weights(1)):
                with pytest.raises(
                    UsageError, match=r"another trainer/0 serves it, at tcp://.* on \S+.*close that one"
                ):
                    call()
        # The first one is where engines find it, and goes on; the second one took nothing away with it.
        crew.send(1)
        crew.start_engine("b", [rollout(0, 1)])
        crew.connect()
        crew.send(2)


def test_a_sender_takes_the_place_of_one_that_is_closed_or_dead(tmp_path: Path) -> None:
    with sender(tmp_path):
        pass
    address = "tcp://127.0.0.1:1"
    SharedFolder(tmp_path).publish("sender", Record(address, "dead", "here", new_key()).encode())
    with quickly(), sender(tmp_path), receiver(tmp_path) as one:
        found = Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))
        assert found.address != address
        wait_for(lambda: one._station._joined)


def test_a_sender_takes_the_place_of_one_that_does_not_answer(tmp_path: Path) -> None:
    """A frozen process: the system takes the connection, and nobody says anything."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
        SharedFolder(tmp_path).publish("sender", Record(address, "frozen", "here", new_key()).encode())
        with quickly(), sender(tmp_path):
            assert Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0)).address != address


def test_an_engine_s_name_that_is_taken(tmp_path: Path) -> None:
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        taken = r"place of engine/a is taken: another engine/a/0 serves it.*job="
        with receiver(tmp_path) as other, quickly(), pytest.raises(UsageError, match=taken):
            other.poll_requests()
        crew.send(1)


def test_an_engine_s_name_that_another_job_has_is_no_matter_under_a_job_of_its_own(tmp_path: Path) -> None:
    with receiver(SharedFolder(tmp_path, job="one")) as one, receiver(SharedFolder(tmp_path, job="two")) as two:
        assert one.poll_requests() is None
        assert two.poll_requests() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_two_trainers_of_one_rank(tmp_path: Path, rank: int) -> None:
    with Crew(tmp_path, [trainer(r, 2) for r in range(2)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        taken = rf"trainer/{rank}.*(close that one|its own number)"
        with sender(tmp_path, rank=rank, world_size=2) as twin, quickly(), pytest.raises(UsageError, match=taken):
            twin.connect(["a"])
        crew.send(1)


def test_trainers_that_disagree_about_their_number(tmp_path: Path) -> None:
    words = "trainer/1 says world_size=3, trainer/0 says 2; give all ranks"
    with sender(tmp_path, world_size=2), sender(tmp_path, rank=1, world_size=3) as other, quickly():
        with pytest.raises(UsageError, match=words):
            other.connect(["a"])
        with pytest.raises(UsageError, match=words):
            other.send_weights(1)


def test_checkpoints_that_differ_are_told_by_their_first_tensors(tmp_path: Path) -> None:
    specs = [TensorSpec(n, shape, "F32" if n == "layer.0.b" else "BF16") for n, shape in SHAPES.items()]
    other = CheckpointSpace([*specs, TensorSpec("x", (1,), "BF16")])
    with Crew(tmp_path, [trainer(0, 1)], {}) as crew, receiver(tmp_path, space=other) as one:
        leave = threading.Event()

        def poll() -> None:
            while not leave.is_set():
                one.poll_requests()

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            with pytest.raises(CorrespondenceError) as caught:
                crew.senders[0].connect(["a"])
        finally:
            leave.set()
            thread.join()
    text = str(caught.value)
    assert "engine/a/0 and trainer/0 were probed on different checkpoints" in text
    assert "only engine/a/0: x; only trainer/0: none" in text
    assert "layer.0.b (8,) F32 / (8,) BF16" in text
    assert "same checkpoint folder" in text


MEMBER = Member("engine/a/0", 0, 1, "f00d", "host", "auto", None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Hello("", messages.PROTOCOL, MEMBER, "99.1"), "a caller runs 99.1"),
        (Hello("", messages.PROTOCOL + 1, MEMBER, greeting.LIBRARY), f"speaks protocol {messages.PROTOCOL + 1}"),
        ({"type": "Hello", "protocol": 7, "who": "a stranger of the future", "library": "3.0"}, "speaks protocol 7"),
        ({"type": "Hello", "protocol": 0, "target": "", "member": {"worker": "engine/a/0"}}, "another version"),
    ],
    ids=["library", "protocol", "later hello", "earlier hello"],
)
def test_other_versions_are_told(tmp_path: Path, said: object, words: str) -> None:
    with sender(tmp_path), stranger(Record.decode(SharedFolder(tmp_path).lookup("sender", 1.0))) as caller:
        caller.send(encode(said) if isinstance(said, Hello) else msgspec.msgpack.encode(said))
        assert caller.poll(5000)
        answer = messages.decode(caller.recv(), from_child=False)
    assert isinstance(answer, Refused)
    assert answer.final
    assert words in answer.failure.text
    assert "install one version" in answer.failure.text


def test_a_worker_of_another_version_hears_it_at_its_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.parent.LIBRARY", "0.0.1")
    words = r"a caller runs 0\.0\.1 .*install one version"
    with sender(tmp_path), receiver(tmp_path) as other, quickly(), pytest.raises(UsageError, match=words):
        wait_for(polls(other))


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def test_another_key(tmp_path: Path) -> None:
    known = {"sender": f"tcp://127.0.0.1:{free_port()}", "engine/a": f"tcp://127.0.0.1:{free_port()}"}
    mine, theirs = Addresses(known, key=new_key()), Addresses(known, key=new_key())
    words = r"sender .*another key.*give all workers the same key"
    with sender(mine), receiver(theirs) as other, quickly(), pytest.raises(AuthenticationError, match=words):
        wait_for(polls(other))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, quickly():
        known = {"sender": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        words = r"sender: cannot listen at tcp://127\.0\.0\.1:\d+: .*port 0"
        with pytest.raises(RendezvousError, match=words), sender(Addresses(known, key=new_key())):
            pass


def test_a_version_that_goes_back_after_the_trainers_were_started_again(tmp_path: Path) -> None:
    """The engine knows what it has; a sender that has forgotten is refused, and nothing is written."""
    with Crew(tmp_path, [trainer(0, 1)], {"a": [rollout(0, 1)]}) as crew:
        crew.connect()
        crew.send(7)
        crew.senders[0].close()
        with sender(tmp_path, held=crew.holdings[0]) as again:
            again.connect(["a"])
            with quickly(), pytest.raises(VersionError, match="version 7 is not newer than 7, which engine/a has"):
                again.send_weights(7)
            assert again.send_weights(8).result().version == 8


FORKS = """
import os, sys
from pathlib import Path
from adapters.sender import SenderAdapter
from tests.adapters.toy import SPACE, trainer
held = trainer(0, 1)
made = SenderAdapter(held.load_weights, held.parameters, SPACE, rank=0, world_size=1, rendezvous=Path(sys.argv[1]))
child = os.fork()
if child == 0:
    for call in (lambda: made.connect(["a"]), lambda: made.send_weights(1)):
        try:
            call()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    made.close()  # says nothing and takes nothing from the parent
    os._exit(0)
os.waitpid(child, 0)
print("record", len(list(Path(sys.argv[1]).glob("sender.*"))), flush=True)
made.close()
"""


def test_a_forked_child_says_which_process_may_call(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path / "meeting")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=os.getcwd())
    lines = said.stdout.splitlines()
    assert said.returncode == 0, said.stderr
    assert [line.partition(" ")[0] for line in lines] == ["UsageError", "UsageError", "record"], said.stdout
    assert all("used in its forked child" in line and "make the adapter in the process" in line for line in lines[:2])
    assert lines[2] == "record 1"
