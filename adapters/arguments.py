"""What users pass to both adapters, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from adapters.failures import UsageError

__all__ = ["JsonValue", "decode_metadata", "encode_metadata", "engine_name"]

JsonValue: TypeAlias = "bool | int | float | str | bytes | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What metadata may consist of; tuples arrive as lists."""

MAX_METADATA_BYTES = 64 << 10
MAX_METADATA_DEPTH = 64


def engine_name(given: str | int) -> str:
    """An engine's short name: ``"a"`` for ``"a"`` and for ``"engine/a"``.

    Raises
    ------
    UsageError
        If it is empty or has a slash.
    """
    name = str(given).removeprefix("engine/")
    if not name or "/" in name:
        raise UsageError(f"engine name {given!r}: expected a short name without slashes, such as 'a' or '0'")
    return name


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
