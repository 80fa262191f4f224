"""What users pass to both adapters, checked and brought into one form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from adapters.failures import UsageError

__all__ = [
    "JsonValue",
    "check_seconds",
    "check_trace",
    "check_whole",
    "decode_metadata",
    "encode_metadata",
    "engine_name",
    "names_of",
]

JsonValue: TypeAlias = "bool | int | float | str | bytes | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What metadata may consist of; tuples arrive as lists."""

MAX_NAME_CHARACTERS = 128
MAX_SECONDS = 1e6
MAX_METADATA_BYTES = 64 << 10
MAX_METADATA_DEPTH = 64


def engine_name(given: str | int) -> str:
    """An engine's short name: ``"a"`` for ``"a"`` and for ``"engine/a"``.

    Raises
    ------
    UsageError
        If it is no name, empty or long, has a slash, or cannot be written in UTF-8.
    """
    name = str(given).removeprefix("engine/") if isinstance(given, (str, int)) else ""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or "/" in name or any("\ud800" <= one <= "\udfff" for one in name):
        raise UsageError(f"engine name {given!r}: expected a short name without slashes, such as 'a' or '0'")
    return name


def names_of(argument: str, given: Iterable[str | int] | str | int | None) -> list[str]:
    """What users pass where several names are meant: one name, several, or None for none.

    Raises
    ------
    UsageError
        If it is something else.
    """
    names: list[object] = []
    if isinstance(given, Iterable) and not isinstance(given, str):
        names = list(given)
    elif given is not None:
        names = [given]
    if not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in names):
        raise UsageError(f"{argument} is {given!r}; expected names")
    return [str(name) for name in names]


def check_whole(argument: str, value: int, *, least: int, most: int) -> int:
    """A whole number within bounds.

    Raises
    ------
    UsageError
        If it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{argument} is {value!r}; expected an integer of at least {least} and at most {most}")
    return value


def check_seconds(argument: str, value: float, *, zero: bool = False) -> float:
    """A time, above zero unless ``zero`` is allowed.

    Raises
    ------
    UsageError
        If it is none, or longer than anybody waits.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (value > 0 or (zero and value == 0)) or value > MAX_SECONDS:
        bound = "of at least zero" if zero else "above zero"
        raise UsageError(f"{argument} is {value!r}; expected seconds {bound}, at most {MAX_SECONDS:g}")
    return value


def check_trace(path: str | Path) -> None:
    """Refuse a path to which no trace can be written.

    Raises
    ------
    UsageError
        If it is a folder, or in none, or not to be written.
    """
    where = Path(path)
    if where.is_dir() or not where.parent.is_dir():
        raise UsageError(f"trace is {str(path)!r}; expected a file in a folder that exists")
    if not os.access(where if where.exists() else where.parent, os.W_OK):
        raise UsageError(f"trace is {str(path)!r}, which this process may not write")


def encode_metadata(metadata: JsonValue) -> bytes:
    """Metadata in msgpack.

    Raises
    ------
    UsageError
        If it does not consist of plain values, or is too large or too deep, so that no receiver could read it.
    """
    try:
        data = msgspec.msgpack.encode(metadata)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"metadata cannot travel: {error}; expected None, numbers, text, lists and dicts") from error
    if len(data) > MAX_METADATA_BYTES:
        raise UsageError(f"metadata takes {len(data):,} bytes; at most {MAX_METADATA_BYTES:,} can travel")
    decode_metadata(data)
    return data


def decode_metadata(data: bytes) -> JsonValue:
    """Read ``encode_metadata``'s output.

    Raises
    ------
    UsageError
        If it is none: keys that are no plain values, or lists and dicts nested too deep.
    """
    try:
        value: JsonValue = msgspec.msgpack.decode(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"metadata cannot be read where it arrives: {error}; expected plain values") from error
    level: list[object] = [value]
    for _ in range(MAX_METADATA_DEPTH):
        level = [inner for outer in level if isinstance(outer, (list, dict)) for inner in _inside(outer)]
        if not level:
            return value
    raise UsageError(
        f"metadata has lists or dicts nested more than {MAX_METADATA_DEPTH} deep; expected a flatter value"
    )


def _inside(outer: list[object] | dict[object, object]) -> Iterable[object]:
    return outer.values() if isinstance(outer, dict) else outer
