"""Errors of the adapters, and how an error of one worker is raised on another.

::

    TransferError (transfer_exec)
    +-- AdapterError
        +-- UsageError          arguments that cannot be honoured; also a ValueError
        +-- CheckpointError     a folder that is no checkpoint; names the file
        +-- RendezvousError     a peer that cannot be found, or a record that is none
        +-- AuthenticationError a peer that has another key
        +-- DisagreementError   ranks of one side called different things; names both
        +-- VersionError        a version that is not newer than a receiver's
        +-- CoverageError       the two sides do not speak of the same tensors
        +-- StaleError          storage replaced, or memory released, since connect; nothing was written
        +-- LostWorkerError     a peer's process or connection is gone
        +-- TornError           an in-place update began and did not finish
        +-- VerificationError   bytes landed that differ from the bytes that were sent
        +-- HookError           a user's hook or loader raised on some worker
        +-- ClosedError         the adapter was closed
        +-- RemoteError         an error whose class this side does not know

A `Failure` carries an error over the wire: the name of its class, the worker it happened on, and its message. The
receiving side raises the class of that name from a fixed table; nothing is unpickled.

>>> failure = failure_of(VersionError("version 3 is not newer than 3"), "engine/a/0")
>>> error_of(failure)
VersionError('engine/a/0: version 3 is not newer than 3')
"""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import NoReturn, TypeAlias

import msgspec

from layout_algebra import errors as layout_errors
from layout_algebra.errors import LayoutError, ProbeError
from transfer_exec import errors as transfer_errors
from transfer_exec.errors import TransferError

MAX_TEXT_CHARACTERS = 8_000
"""Longer messages are cut before they travel."""

_CARRIED = "carried_failure"


class AdapterError(TransferError):
    """Root of the errors of the adapters."""


class UsageError(AdapterError, ValueError):
    """An argument that cannot be honoured; the message says what to pass instead."""


class CheckpointError(AdapterError):
    """A folder that is no checkpoint, or a file of it that cannot be read."""


class RendezvousError(AdapterError):
    """A peer that cannot be found, or a record that is none."""


class AuthenticationError(AdapterError):
    """A peer that has another key than this worker, or none."""


class DisagreementError(AdapterError):
    """Ranks of one side called different things; the message names the ranks and both calls."""


class VersionError(AdapterError):
    """A version that is not newer than what a receiver has."""


class CoverageError(AdapterError):
    """The two sides do not speak of the same checkpoint tensors."""


class StaleError(AdapterError):
    """Memory that changed since connect; nothing was written."""


class LostWorkerError(AdapterError):
    """A peer's process or connection is gone."""


class TornError(AdapterError):
    """An in-place update began and did not finish: do not generate until a full update succeeds."""


class VerificationError(AdapterError):
    """Bytes landed that differ from the bytes that were sent."""


class HookError(AdapterError):
    """A user's hook or loader raised."""


class ClosedError(AdapterError):
    """The adapter was closed."""


class RemoteError(AdapterError):
    """An error of another worker whose class this side does not know."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error that travels.

    Attributes
    ----------
    kind
        Name of the error's class.
    worker
        Where it happened, ``"engine/a/0"``.
    text
        Its message.
    echo
        It only says that another rank of the group failed, whose own failure says why.
    """

    kind: str
    worker: str
    text: str
    echo: bool = False

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}" if self.worker else self.text


def failure_of(error: BaseException, worker: str) -> Failure:
    """Put an error of this worker into a form that travels. A failure that already travelled keeps its origin."""
    carried = vars(error).get(_CARRIED)
    if isinstance(carried, Failure):
        return carried
    known = type(error).__name__ in _CLASSES
    text = str(error) if known else f"{type(error).__name__}: {error}".removesuffix(": ")
    if not known and error.__cause__ is not None:
        text += f" (caused by {type(error.__cause__).__name__}: {error.__cause__})"
    # Discovery fails on all ranks where it fails on one; the others say so, and have no cause of their own.
    echo = isinstance(error, ProbeError) and error.__cause__ is None and "another rank" in text
    return Failure(type(error).__name__, worker, text[:MAX_TEXT_CHARACTERS], echo)


def error_of(failure: Failure) -> TransferError | LayoutError:
    """The error that a failure stands for, its class taken from a fixed table."""
    error = _CLASSES.get(failure.kind, RemoteError)(str(failure))
    vars(error)[_CARRIED] = failure
    return error


def raise_failure(failure: Failure) -> NoReturn:
    """Raise the error that a failure stands for."""
    raise error_of(failure)


_Known: TypeAlias = type[TransferError] | type[LayoutError]


def _classes_of(module: ModuleType) -> dict[str, _Known]:
    roots = (TransferError, LayoutError)
    return {n: kind for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, roots)}


_CLASSES: MappingProxyType[str, _Known] = MappingProxyType(
    {
        **_classes_of(layout_errors),
        **_classes_of(transfer_errors),
        **{kind.__name__: kind for kind in AdapterError.__subclasses__()},
    }
)
