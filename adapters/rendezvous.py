"""How workers find each other: a name is published with an address, and looked up under a deadline.

Three names are ever used: ``sender`` (trainer rank 0) and ``engine/<name>`` (rank 0 of that engine). A record is a
hint and no proof: it carries the incarnation of the worker that wrote it, and the first message over the connection
names that incarnation, so a record that an earlier job left behind leads nowhere and is looked up again.

>>> rendezvous = SharedFolder("/shared/run-17", job="run-17")                      # doctest: +SKIP
>>> rendezvous.publish("sender", Record("tcp://127.0.0.1:4242", "f3a1").encode())  # doctest: +SKIP
>>> rendezvous.lookup("sender", 5.0)                                               # doctest: +SKIP
'{"address":"tcp://127.0.0.1:4242","incarnation":"f3a1"}'
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from adapters.failures import RendezvousError, UsageError
from transfer_exec.errors import DeadlineError

__all__ = ["Addresses", "Record", "Rendezvous", "SharedFolder", "as_rendezvous"]

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
    """

    address: str
    incarnation: str = ""

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(value: str) -> Record:
        """Read ``encode``'s output; RendezvousError for anything else."""
        try:
            record = msgspec.json.decode(value, type=Record)
        except msgspec.MsgspecError as error:
            raise RendezvousError(f"{value[:200]!r} is no record of an address: {error}") from error
        if not record.address.startswith(("tcp://", "ipc://")):
            raise RendezvousError(f"address {record.address!r}: expected tcp://host:port")
        return record


@runtime_checkable
class Rendezvous(Protocol):
    """What an adapter needs of a meeting place; values are short lines of text."""

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
    """

    def __init__(self, folder: str | Path, *, job: str = "", host: str = "127.0.0.1") -> None:
        self._folder = Path(folder)
        self._job = job
        self._host = host
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RendezvousError(f"{folder}: cannot be made a meeting place: {error}") from error

    def listen_address(self, name: str) -> str:
        """Any free port of the host."""
        return f"tcp://{self._host}:0"

    def publish(self, name: str, value: str) -> None:
        """Write the record beside its place and move it there, so that nobody reads half of it."""
        path = self._path(name)
        passing = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            passing.write_text(value)
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
        """Wait for the record to be there."""
        path = self._path(name)
        stop_at = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return path.read_text()
            if time.monotonic() >= stop_at:
                raise DeadlineError(f"rendezvous: nobody published {name} in {self._folder} within {deadline_s:g} s")
            time.sleep(_LOOK_AGAIN_S)

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
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        for name, address in addresses.items():
            if not address.startswith("tcp://") or address.endswith((":0", ":*")) or ":" not in address[6:]:
                raise UsageError(f"address of {name} is {address!r}; expected tcp://host:port with a fixed port")
        self._addresses = dict(addresses)

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


def as_rendezvous(given: Rendezvous | str | Path) -> Rendezvous:
    """Take what users pass: a path is a shared folder on one machine."""
    if isinstance(given, (str, Path)):
        return SharedFolder(given)
    if not isinstance(given, Rendezvous):
        raise UsageError(f"rendezvous is a {type(given).__name__}; expected a folder, SharedFolder or Addresses")
    return given
