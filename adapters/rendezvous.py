"""How workers find each other: a name is published with an address, and looked up under a deadline.

Three names are ever used: ``sender`` (trainer rank 0) and ``engine/<name>`` (rank 0 of that engine). A record is a
hint and no proof: it carries the incarnation of the worker that wrote it, and the first message over the connection
names that incarnation, so a record that an earlier job left behind leads nowhere and is looked up again.

Nobody is heard without a key (`adapters.job_key`). In a folder every listener makes a key of its own, and its record,
a file that only the job's user can read, carries it. Meeting places that strangers may read hold addresses only, and
every worker is given the job's key beforehand.

>>> rendezvous = SharedFolder("/shared/run-17", job="run-17")                      # doctest: +SKIP
>>> rendezvous = Addresses({"sender": "tcp://10.0.0.1:4242", ...}, key=key)        # doctest: +SKIP
>>> rendezvous.publish("sender", Record("tcp://127.0.0.1:4242", "f3a1").encode())  # doctest: +SKIP
>>> rendezvous.lookup("sender", 5.0)                                               # doctest: +SKIP
'{"address":"tcp://127.0.0.1:4242","incarnation":"f3a1","host":"","key":""}'
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from adapters.failures import RendezvousError, UsageError
from adapters.job_key import check_key, read_private, write_private
from transfer_exec.errors import DeadlineError

__all__ = ["Addresses", "Record", "Rendezvous", "SharedFolder", "address_towards", "as_rendezvous", "listening_host"]

SENDER = "sender"
"""The name under which trainer rank 0 publishes its address."""

_LOOK_AGAIN_S = 0.02


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker listens.

    Attributes
    ----------
    address
        A ZeroMQ endpoint, ``"tcp://10.0.0.1:41231"``.
    incarnation
        Random name of the process that listens; empty where it is not known beforehand.
    host
        Identity of its machine; empty where it is not known.
    key
        The listener's key, where only this job's user can read the record; otherwise empty.
    """

    address: str
    incarnation: str = ""
    host: str = ""
    key: str = ""

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(value: str) -> Record:
        """Read ``encode``'s output; RendezvousError for anything else."""
        try:
            record = msgspec.json.decode(value, type=Record)
        except msgspec.MsgspecError as error:
            # Not its text: there may be a key in it.
            raise RendezvousError(f"{len(value)} characters are no record of an address: {error}") from error
        if not record.address.startswith("tcp://"):
            raise RendezvousError(f"address {record.address!r}: expected tcp://host:port")
        if record.key:
            check_key(record.key)
        return record

    @property
    def is_loopback(self) -> bool:
        """Whether only workers of the same machine reach the address."""
        host = self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return host == "localhost" or _is_loopback(host)


@runtime_checkable
class Rendezvous(Protocol):
    """What an adapter needs of a meeting place; values are short lines of text."""

    @property
    def key(self) -> str:
        """The key that all workers were given; empty if records carry the listeners' own, and strangers see none."""
        ...

    def listen_address(self, name: str) -> str:
        """Where the worker of that name must listen: ``tcp://host:port``, port 0 for any free one."""
        ...

    def publish(self, name: str, value: str) -> None:
        """Make a value visible under a name, replacing an older one."""
        ...

    def withdraw(self, name: str, value: str) -> None:
        """Take a value back, unless another one has replaced it."""
        ...

    def lookup(self, name: str, deadline_s: float) -> str:
        """The newest value of a name; DeadlineError if none is there within so many seconds."""
        ...


class SharedFolder:
    """A folder that all workers can read and write.

    Parameters
    ----------
    folder
        Made if it does not exist.
    job
        Records of another job are not believed, though they lie in the same folder.
    host
        The address that this worker's peers reach it at; it listens there only. The default serves one machine.
    key
        Given to all workers, it stays out of the folder; by default records hold listeners' keys, and are files that
        nobody but this user may read.
    """

    def __init__(self, folder: str | Path, *, job: str = "", host: str = "127.0.0.1", key: str = "") -> None:
        self._folder = Path(folder)
        self._job = job
        self._host = listening_host(host)
        self._key = check_key(key) if key else ""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RendezvousError(f"{folder}: cannot be made a meeting place: {error}") from error

    @property
    def key(self) -> str:
        """The key that was given, if any."""
        return self._key

    def listen_address(self, name: str) -> str:
        """Any free port of the host."""
        return f"tcp://{self._host}:0"

    def publish(self, name: str, value: str) -> None:
        """Write the record beside its place and move it there, so that nobody reads half of it."""
        path = self._path(name)
        passing = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            write_private(passing, value)
            os.replace(passing, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                passing.unlink()
            raise RendezvousError(f"{path}: record of {name} cannot be written: {error}") from error

    def withdraw(self, name: str, value: str) -> None:
        """Remove the record if it is still this one."""
        with contextlib.suppress(OSError):
            if self._path(name).read_text() == value:
                self._path(name).unlink()

    def lookup(self, name: str, deadline_s: float) -> str:
        """Wait for the record to be there; RendezvousError if others could have written or read it."""
        path = self._path(name)
        stop_at = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return self._read(path)
            if time.monotonic() >= stop_at:
                raise DeadlineError(f"rendezvous: nobody published {name} in {self._folder} within {deadline_s:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def _read(self, path: Path) -> str:
        try:
            return path.read_text() if self._key else read_private(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise RendezvousError(f"{path}: record cannot be read: {error}") from error

    def _path(self, name: str) -> Path:
        # Engine names are the user's: the digest keeps two names apart that look alike as file names.
        digest = hashlib.blake2b(f"{self._job}\0{name}".encode(), digest_size=8).hexdigest()
        plain = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:60]
        return self._folder / f"{plain}.{digest}.json"


class Addresses:
    """Addresses that are known beforehand.

    Parameters
    ----------
    addresses
        Name -> ``tcp://host:port`` with a port that is not 0, for ``"sender"`` and every ``"engine/<name>"``. The
        worker of a name listens at exactly that address.
    key
        The job's key, the same for all workers, from `adapters.job_key`.
    """

    def __init__(self, addresses: Mapping[str, str], *, key: str) -> None:
        for name, address in addresses.items():
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            if not address.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise UsageError(f"address of {name} is {address!r}; expected tcp://host:port with a fixed port")
            listening_host(host)
        self._addresses = dict(addresses)
        self._key = check_key(key)

    @property
    def key(self) -> str:
        """The key that was given."""
        return self._key

    def listen_address(self, name: str) -> str:
        """The address given for the name."""
        return self._address(name)

    def publish(self, name: str, value: str) -> None:
        """Nothing to do: everybody knows the address."""
        self._address(name)

    def withdraw(self, name: str, value: str) -> None:
        """Nothing to do."""

    def lookup(self, name: str, deadline_s: float) -> str:
        """The address given for the name."""
        return Record(self._address(name)).encode()

    def _address(self, name: str) -> str:
        found = self._addresses.get(name)
        if found is None:
            raise RendezvousError(f"{name}: no address given; known are {', '.join(sorted(self._addresses))}")
        return found


def listening_host(host: str) -> str:
    """The host, if it names one interface.

    Raises
    ------
    UsageError
        For a wildcard: peers need an address that leads here, and other networks need not be listened to.
    """
    bare = host.strip("[]")
    if bare in ("", "*", "0.0.0.0", "::", "0"):
        raise UsageError(f"host {host!r} means every interface; name the address at which this worker's peers reach it")
    return f"[{bare}]" if ":" in bare else bare


def address_towards(host: str, port: int) -> str:
    """The address, without brackets, of this machine's interface that leads to another host; nothing is sent for it.

    Raises
    ------
    RendezvousError
        If no interface leads there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(target)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"no way to {host}: {error}; pass host=, this worker's own address") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def as_rendezvous(given: Rendezvous | str | Path) -> Rendezvous:
    """Take what users pass: a path is a shared folder on one machine."""
    if isinstance(given, (str, Path)):
        return SharedFolder(given)
    if not isinstance(given, Rendezvous):
        raise UsageError(
            f"rendezvous is a {type(given).__name__}; expected a folder, SharedFolder, Addresses or TorchStore"
        )
    return given
