"""Meeting places: what they hold, who may read it, and at which interface a worker listens."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from adapters.failures import RendezvousError, UsageError
from adapters.job_key import caller_pair, check_key, job_key, listener_pair, new_key
from adapters.rendezvous import Addresses, Record, Rendezvous, SharedFolder, address_towards, as_rendezvous
from adapters.torch_store import TorchStore
from transfer_exec.errors import DeadlineError

KEY = "0123456789abcdef" * 4


def test_shared_folders(tmp_path: Path) -> None:
    first, other = SharedFolder(tmp_path, job="one"), SharedFolder(tmp_path, job="two")
    first.publish("engine/a b", "x")
    assert SharedFolder(tmp_path, job="one").lookup("engine/a b", 0.0) == "x"
    with pytest.raises(DeadlineError, match=r"nobody published engine/a b .* within 0 s"):
        other.lookup("engine/a b", 0.0)
    with pytest.raises(DeadlineError):
        first.lookup("engine/a-b", 0.0)
    first.publish("engine/a b", "y")
    first.withdraw("engine/a b", "x")  # another one's by now
    assert first.lookup("engine/a b", 0.0) == "y"
    first.withdraw("engine/a b", "y")
    assert list(tmp_path.iterdir()) == []


def test_a_lookup_waits_for_the_record(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    threading.Timer(0.1, lambda: folder.publish("sender", "late")).start()
    assert folder.lookup("sender", 5.0) == "late"


def test_what_is_no_rendezvous(tmp_path: Path) -> None:
    assert isinstance(as_rendezvous(str(tmp_path)), SharedFolder)
    with pytest.raises(UsageError, match="rendezvous is a dict"):
        as_rendezvous({})  # type: ignore[arg-type]
    for address in ("127.0.0.1:4", "tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://127.0.0.1"):
        with pytest.raises(UsageError, match="expected tcp://host:port with a fixed port"):
            Addresses({"sender": address}, key=new_key())
    with pytest.raises(RendezvousError, match="engine/a: no address given; known are sender"):
        Addresses({"sender": "tcp://127.0.0.1:4"}, key=new_key()).lookup("engine/a", 1.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RendezvousError, match="cannot be made a meeting place"):
        SharedFolder(tmp_path / "file" / "below")
    for value in ("", "{}", '{"address": 5}', '{"address": "http://x"}', "\0"):
        with pytest.raises(RendezvousError):
            Record.decode(value)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_records_are_the_user_s_own_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = SharedFolder(tmp_path / "meeting")
        folder.publish("sender", "x")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "meeting") == 0o700
    assert [mode_of(path) for path in (tmp_path / "meeting").iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_record_that_others_can_read_is_not_believed(tmp_path: Path, mode: int) -> None:
    folder = SharedFolder(tmp_path)
    folder.publish("sender", "x")
    next(tmp_path.iterdir()).chmod(mode)
    with pytest.raises(RendezvousError, match=f"with mode 0{mode:o}; a file with a key must be this user's"):
        folder.lookup("sender", 0.0)
    # With a key that all workers were given, nothing in the folder is secret.
    assert SharedFolder(tmp_path, key=KEY).lookup("sender", 0.0) == "x"


def test_a_record_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SharedFolder(tmp_path)
    folder.publish("sender", "x")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(RendezvousError, match=f"belongs to user {me}"):
        folder.lookup("sender", 0.0)


def test_a_record_that_is_a_link_or_a_folder_is_an_error(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    folder.publish("sender", "x")
    record = next(tmp_path.iterdir())
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="record cannot be read"):
        folder.lookup("sender", 0.0)
    record.unlink()
    record.mkdir()
    with pytest.raises(RendezvousError):
        folder.lookup("sender", 0.0)


def test_a_key_file_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "key"
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(job_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert check_key(found[0]) == found[0]
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_key_files_that_are_not_private_or_no_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    job_key(path)
    path.chmod(0o644)
    with pytest.raises(RendezvousError, match="mode 0644"):
        job_key(path)
    path.write_text("too short")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="expected 64 hexadecimal digits"):
        job_key(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RendezvousError, match="no key can be kept there"):
        job_key(tmp_path / "file" / "key")


def test_what_is_no_key_is_not_shown(tmp_path: Path) -> None:
    for wrong in ("", "secret" * 3, KEY.upper(), KEY + "0", KEY[:-1] + "g"):
        with pytest.raises(UsageError) as caught:
            Addresses({"sender": "tcp://10.0.0.1:4"}, key=wrong)
        assert not wrong or wrong not in str(caught.value)
    with pytest.raises(RendezvousError) as failed:
        Record.decode('{"address": "tcp://127.0.0.1:5", "key": "' + KEY + '", "more": 1}')
    assert KEY not in str(failed.value)


def test_both_pairs_follow_from_the_key_and_differ() -> None:
    other = new_key()
    pairs = [listener_pair(KEY), caller_pair(KEY), listener_pair(other), caller_pair(other)]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 8
    assert listener_pair(KEY) == pairs[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "[::]", ""])
def test_no_worker_listens_at_every_interface(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="means every interface"):
        SharedFolder(tmp_path, host=host)
    with pytest.raises(UsageError):
        Addresses({"sender": f"tcp://{host}:4242"}, key=KEY)


def test_where_a_worker_listens(tmp_path: Path) -> None:
    assert SharedFolder(tmp_path).listen_address("sender") == "tcp://127.0.0.1:0"
    assert SharedFolder(tmp_path, host="10.1.2.3").listen_address("sender") == "tcp://10.1.2.3:0"
    assert SharedFolder(tmp_path, host="fd00::1").listen_address("sender") == "tcp://[fd00::1]:0"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(RendezvousError, match="pass host="):
        address_towards("no such host.invalid", 9)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.0.1:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("tcp://10.0.0.1:5", False),
        ("tcp://node-7:5", False),
    ],
)
def test_addresses_that_only_one_machine_reaches(address: str, loopback: bool) -> None:
    assert Record(address).is_loopback == loopback


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_tcp_store_holds_addresses_and_nothing_else(store: TCPStore) -> None:
    first, other = TorchStore(store, key=KEY, job="one"), TorchStore(store, key=KEY, job="two")
    assert first.listen_address("sender") == "tcp://127.0.0.1:0"
    assert isinstance(as_rendezvous(first), Rendezvous)
    value = Record("tcp://127.0.0.1:4", "f00d", "host").encode()
    first.publish("engine/a b", value)
    assert TorchStore(store, key=KEY, job="one").lookup("engine/a b", 0.0) == value
    assert KEY not in value
    with pytest.raises(DeadlineError, match=r"nobody published engine/a b in the store within 0 s"):
        other.lookup("engine/a b", 0.0)
    first.publish("engine/a b", "later")
    first.withdraw("engine/a b", value)  # another one's by now
    assert first.lookup("engine/a b", 0.0) == "later"
    first.withdraw("engine/a b", "later")
    with pytest.raises(DeadlineError):
        first.lookup("engine/a b", 0.0)


def test_a_lookup_in_a_store_waits(store: TCPStore) -> None:
    meeting = TorchStore(store, key=KEY)
    threading.Timer(0.2, lambda: TorchStore(store, key=KEY).publish("sender", "late")).start()
    assert meeting.lookup("sender", 5.0) == "late"


def test_stores_that_do_not_tell_an_interface() -> None:
    with pytest.raises(UsageError, match="a HashStore does not tell which interface peers need; pass host="):
        TorchStore(HashStore(), key=KEY)
    meeting = TorchStore(HashStore(), key=KEY, host="127.0.0.1")
    meeting.publish("sender", "x")
    assert meeting.lookup("sender", 0.0) == "x"
    with pytest.raises(UsageError, match="store is a dict"):
        TorchStore({}, key=KEY)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="hexadecimal"):
        TorchStore(HashStore(), key="guess", host="127.0.0.1")
