"""Many names as few templates: ``layers.3.w`` is the template ``layers.{}.w`` with the number 3.

A checkpoint of 70,000 tensors has some 30 templates. Names of one template stand together in natural order, which
makes their numbers regular columns. A digit run is a number if it has no leading zero and at most 15 digits; any
other stays text, so that every name comes back as it was.

>>> split_name("layers.3.experts.12.w")
(('layers.', '.experts.', '.w'), (3, 12))
>>> join_name(*split_name("model-00007.w1"))
'model-00007.w1'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LayoutError
from layout_algebra.sealed_bytes import Budget, Packed, pack_table, unpack_table

MAX_NAMES = 1 << 22
"""Most names that ``decode_names`` accepts."""
MAX_NAME_CHARACTERS = 1 << 28
"""Most characters, over all names, that ``decode_names`` accepts."""

Template = tuple[str, ...]
"""The text before, between and after a name's numbers."""

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")
_LARGEST = 10**15 - 1


class PackedNames(msgspec.Struct, array_like=True, frozen=True):
    """Names by template."""

    templates: tuple[tuple[bytes, ...], ...]
    numbers: tuple[Packed, ...]


def split_name(name: str) -> tuple[Template, tuple[int, ...]]:
    """A name's template and numbers; one piece of text more than numbers."""
    parts = _NUMBER.split(name)
    return tuple(parts[0::2]), tuple(int(digits) for digits in parts[1::2])


def join_name(template: Template, numbers: Sequence[int]) -> str:
    """The name again."""
    return "".join(text + str(number) for text, number in zip(template, numbers, strict=False)) + template[-1]


def encode_names(names: Sequence[str]) -> tuple[PackedNames, IdArray]:
    """Pack names.

    Returns
    -------
    tuple
        The packed names, and the positions in ``names`` in the order in which ``decode_names`` gives them.
    """
    groups: dict[Template, tuple[list[int], list[tuple[int, ...]]]] = {}
    for position, name in enumerate(names):
        template, numbers = split_name(name)
        positions, rows = groups.setdefault(template, ([], []))
        positions.append(position)
        rows.append(numbers)
    packed = PackedNames(
        tuple(tuple(text.encode("utf-8", "surrogatepass") for text in template) for template in groups),
        tuple(
            pack_table(np.array(rows, dtype=np.int64).reshape(len(rows), len(template) - 1))
            for template, (_, rows) in groups.items()
        ),
    )
    order = [position for positions, _ in groups.values() for position in positions]
    return packed, np.array(order, dtype=np.int64)


def decode_names(packed: PackedNames, budget: Budget, error: type[LayoutError]) -> list[str]:
    """The names by template; raises ``error`` if the parts do not agree or the names are too many or too long."""
    if len(packed.templates) != len(packed.numbers):
        raise error(f"{len(packed.templates)} name templates have {len(packed.numbers)} number tables")
    out: list[str] = []
    characters = 0
    for pieces, table in zip(packed.templates, packed.numbers, strict=True):
        if len(pieces) != table.columns + 1:
            raise error(f"a name template of {len(pieces)} pieces has {table.columns} numbers")
        characters += max(table.rows, 0) * (sum(map(len, pieces)) + 15 * table.columns)
        if characters > MAX_NAME_CHARACTERS or len(out) + table.rows > MAX_NAMES:
            raise error(f"more than {MAX_NAMES:,} names, or than {MAX_NAME_CHARACTERS:,} characters of them")
        numbers = unpack_table(table, budget, error)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) > _LARGEST):
            raise error(f"a number in a name is outside 0..{_LARGEST}")
        try:
            template = [piece.decode("utf-8", "surrogatepass") for piece in pieces]
        except UnicodeDecodeError as cause:
            raise error(f"a name template is no text: {cause}") from cause
        if table.columns == 0:
            out += [template[0]] * table.rows
        else:
            form = "%d".join(piece.replace("%", "%%") for piece in template)
            out += [form % tuple(row) for row in numbers.tolist()]
    return out
