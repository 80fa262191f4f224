"""What every version's `Hello` has, so that workers of different versions are told and do not wait in vain.

A caller whose messages are of another version, or that runs another version of this library, is refused by name: it
would compile other programs for the same plan.

>>> why_not(Hello("f3", PROTOCOL, member, LIBRARY), "trainer/0")                    # doctest: +SKIP
''
"""

from __future__ import annotations

import importlib.metadata

import msgspec

from adapters.messages import PROTOCOL, Hello

__all__ = ["LIBRARY", "Greeting", "read_greeting", "why_not"]


class Greeting(msgspec.Struct, frozen=True, tag="Hello"):
    """A `Hello` of any version; what else it has is not looked at."""

    protocol: int
    library: str = ""


def read_greeting(data: bytes) -> Greeting | None:
    """The greeting in a message that this version cannot read; None if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=Greeting)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return None


def why_not(greeting: Hello | Greeting, worker: str) -> str:
    """Why a caller does not fit this worker; empty if it does."""
    if greeting.protocol == PROTOCOL and greeting.library in ("", LIBRARY):
        return ""
    return (
        f"{worker} runs transload {LIBRARY} and speaks protocol {PROTOCOL}; a caller runs "
        f"{greeting.library or 'another version'} and speaks protocol {greeting.protocol}; install one version for all"
    )


def _library() -> str:
    try:
        return importlib.metadata.version("transload")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


LIBRARY = _library()
"""The version that is installed."""
