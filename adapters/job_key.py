"""The secret that lets a worker speak: who has a job's key is a worker of the job, and nobody else is heard.

A key is 64 hexadecimal digits. Both CURVE pairs of a connection, the listener's and the caller's, follow from it, so a
caller that knows it proves so to the listener and the listener to the caller, and everything between them is
encrypted. A key never travels: workers get it from their launcher, or from a file that only their user can read.

>>> key = new_key()
>>> len(key), listener_pair(key) == listener_pair(key), listener_pair(key) == caller_pair(key)
(64, True, False)
>>> job_key("/shared/run-17/key")               # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from adapters.failures import RendezvousError, UsageError

__all__ = ["Pair", "caller_pair", "check_key", "job_key", "listener_pair", "new_key", "read_private", "write_private"]

_DIGITS = 64
_LONGEST_FILE_BYTES = 64 << 10
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Pair(NamedTuple):
    """A CURVE key pair in ZeroMQ's spelling."""

    public: bytes
    secret: bytes


def new_key() -> str:
    """A key nobody else has."""
    return secrets.token_hex(_DIGITS // 2)


def check_key(key: str) -> str:
    """The key, if it is one.

    Raises
    ------
    UsageError
        If it is not 64 hexadecimal digits; the message does not show it.
    """
    if len(key) != _DIGITS or any(digit not in "0123456789abcdef" for digit in key):
        raise UsageError(
            f"key: expected {_DIGITS} hexadecimal digits in lower case, got {len(key)} characters; make one with "
            "adapters.job_key.new_key() or job_key(file)"
        )
    return key


def job_key(path: str | Path) -> str:
    """The key in a file, which is made, with a new key, by whichever worker comes first.

    Raises
    ------
    RendezvousError
        If the file cannot be read or made, belongs to another user, or can be read by others.
    """
    path = Path(path)
    passing = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            write_private(passing, new_key())
            try:
                # Unlike a rename, a link never replaces the key that another worker made in the meantime.
                os.link(passing, path)
            except FileExistsError:
                pass
            finally:
                passing.unlink()
        return check_key(read_private(path).strip())
    except OSError as error:
        raise RendezvousError(f"{path}: no key can be kept there: {error}") from error


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def read_private(path: Path) -> str:
    """Read a file that holds a secret.

    Raises
    ------
    RendezvousError
        If it belongs to another user, or others may read or write it.
    FileNotFoundError
        If it is not there.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            raise RendezvousError(
                f"{path}: belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; a file with a "
                f"key must be this user's ({os.geteuid()}) and 0600. Where folders have no such permissions, pass key="
            )
        return file.read(_LONGEST_FILE_BYTES)


def listener_pair(key: str) -> Pair:
    """Pair of whoever listens."""
    return _pair(key, b"listener")


def caller_pair(key: str) -> Pair:
    """Pair of whoever connects."""
    return _pair(key, b"caller")


def _pair(key: str, role: bytes) -> Pair:
    secret = z85.encode(hashlib.blake2b(bytes.fromhex(check_key(key)), digest_size=32, person=role).digest())
    return Pair(zmq.curve_public(secret), secret)
