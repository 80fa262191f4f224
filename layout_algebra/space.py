"""The checkpoint as one line of numbered elements.

Tensors stand in natural name order (``experts.2`` before ``experts.10``) and every element gets one
id, row-major, from 1 on; 0 means "from no checkpoint element". A tensor is a half-open id range.

>>> space = CheckpointSpace([TensorSpec("b", (2, 3), "BF16"), TensorSpec("a", (4,), "F32")])
>>> space.element_id("b", 0), space.locate(7), space.total_elements
(5, ('b', 2), 10)

Two spaces with the same tensors are equal and have the same digest, in whatever order they were given.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index

import numpy as np

from layout_algebra.dtypes import Dtype, IdArray, dtype_of
from layout_algebra.errors import SpaceError

MAX_ELEMENTS = 2**50
"""Bound on the elements of a space: products of moduli and sums of products stay inside int64."""

_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one checkpoint tensor.

    Parameters
    ----------
    name
        Any non-empty string.
    shape
        Extents, all >= 0; ``()`` is a scalar.
    dtype
        Safetensors spelling.

    Raises
    ------
    SpaceError
        If the name is empty or an extent is negative or no integer.
    UnsupportedDtypeError
        If the dtype is unknown.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpaceError(f"tensor name {self.name!r}: expected a non-empty string")
        try:
            shape = tuple(int(extent) for extent in self.shape)
            whole = all(int(extent) == extent for extent in self.shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise SpaceError(f"{self.name}: shape {self.shape!r} is not a tuple of integers") from error
        if not whole or any(extent < 0 for extent in shape):
            raise SpaceError(f"{self.name}: shape {self.shape!r} has an extent that is negative or no integer")
        object.__setattr__(self, "shape", shape)
        dtype_of(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 if any extent is 0."""
        return math.prod(self.shape)

    @property
    def element_type(self) -> Dtype:
        """The dtype's row in the table of dtypes."""
        return dtype_of(self.dtype)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which runs of digits compare as numbers; ties fall back to the text itself."""
    parts = (part for part in _DIGITS.split(name) if part)
    return (*(_digits_key(part) if part[0] in "0123456789" else (1, 0, part) for part in parts), (-1, 0, name))


def _digits_key(digits: str) -> tuple[int, int, str]:
    """Numbers of any length in order, without converting them: longer is larger, then text decides."""
    significant = digits.lstrip("0")
    return (0, len(significant), significant)


def _whole(number: int, what: str) -> int:
    try:
        return index(number)
    except TypeError as error:
        raise SpaceError(f"{what} {number!r} is no integer") from error


class CheckpointSpace:
    """All tensors of a checkpoint, numbered.

    Parameters
    ----------
    specs
        The tensors, in any order; names must differ.

    Raises
    ------
    SpaceError
        If a name repeats, the elements number ``2**50`` or more, or something is no ``TensorSpec``.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        specs = tuple(specs)
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise SpaceError(f"{spec!r}: expected a TensorSpec(name, shape, dtype)")
        ordered = tuple(sorted(specs, key=lambda spec: natural_key(spec.name)))
        for left, right in pairwise(ordered):
            if left.name == right.name:
                raise SpaceError(f"{left.name}: named twice, with shapes {left.shape} and {right.shape}")
        total = sum(spec.elements for spec in ordered)
        if total >= MAX_ELEMENTS:
            raise SpaceError(
                f"checkpoint has {total:,} elements; at most 2**50 - 1 = {MAX_ELEMENTS - 1:,} can be numbered"
            )
        self._specs = ordered
        self._index = {spec.name: position for position, spec in enumerate(ordered)}
        starts = np.ones(len(ordered) + 1, dtype=np.int64)
        starts[1:] += np.cumsum([spec.elements for spec in ordered], dtype=np.int64)
        starts.setflags(write=False)
        self._starts = starts

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in natural name order."""
        return self._specs

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names in natural order."""
        return tuple(spec.name for spec in self._specs)

    @property
    def starts(self) -> IdArray:
        """First id of every tensor, then the first id past the end: shape ``(len(specs) + 1,)``, read-only."""
        return self._starts

    @property
    def total_elements(self) -> int:
        """N: ids run over ``1..N``."""
        return int(self._starts[-1]) - 1

    @property
    def total_bytes(self) -> int:
        """Bytes of one copy of the checkpoint."""
        return sum(spec.elements * spec.element_type.bits for spec in self._specs) // 8

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointSpace) and self._specs == other._specs

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"CheckpointSpace({len(self._specs):,} tensors, {self.total_elements:,} elements)"

    def spec(self, name: str) -> TensorSpec:
        """The tensor of that name; SpaceError if there is none."""
        return self._specs[self.position(name)]

    def position(self, name: str) -> int:
        """Position of a tensor in natural order; SpaceError if there is none of that name."""
        found = self._index.get(name)
        if found is None:
            raise SpaceError(f"{name}: no such tensor in a checkpoint of {len(self._specs)} tensors")
        return found

    def id_range(self, name: str) -> tuple[int, int]:
        """Half-open range of ids of one tensor."""
        position = self.position(name)
        return int(self._starts[position]), int(self._starts[position + 1])

    def element_id(self, name: str, flat_index: int) -> int:
        """Id of the element at a row-major flat index of a tensor.

        Raises
        ------
        SpaceError
            If the tensor is unknown, or the index is outside it or no integer.
        """
        start, stop = self.id_range(name)
        if not 0 <= _whole(flat_index, f"{name}: flat index") < stop - start:
            raise SpaceError(f"{name}: flat index {flat_index} is outside 0:{stop - start}")
        return start + int(flat_index)

    def locate(self, element_id: int) -> tuple[str, int]:
        """Tensor name and flat index of an id.

        Raises
        ------
        SpaceError
            If the id is outside ``1..N`` or no integer.
        """
        if not 1 <= _whole(element_id, "element id") <= self.total_elements:
            raise SpaceError(f"element id {element_id} is outside 1..{self.total_elements}")
        position = int(np.searchsorted(self._starts, element_id, side="right")) - 1
        return self._specs[position].name, int(element_id - self._starts[position])

    def describe_ids(self, start: int, stop: int) -> str:
        """A half-open id range as a person reads it: ``name[first:last]`` of the tensor it begins in."""
        name, first = self.locate(start)
        inside = min(stop - start, self.spec(name).elements - first)
        rest = stop - start - inside
        return f"{name}[{first}:{first + inside}]" + (f" and {rest} elements after it" if rest else "")

    @cached_property
    def item_bits(self) -> IdArray:
        """Element width in bits of every tensor, in order; shape ``(len(specs),)``."""
        return np.array([spec.element_type.bits for spec in self._specs], dtype=np.int64)

    @cached_property
    def dtype_numbers(self) -> tuple[dict[str, int], IdArray]:
        """The dtypes that occur, numbered, and the number of every tensor's, in order; shape ``(len(specs),)``."""
        number: dict[str, int] = {}
        of_tensor = [number.setdefault(spec.dtype, len(number)) for spec in self._specs]
        return number, np.array(of_tensor, dtype=np.int64)

    def digest(self) -> str:
        """Hex digest of names, shapes and dtypes; equal spaces have equal digests."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        for spec in self._specs:
            name = spec.name.encode("utf-8", "surrogatepass")
            state.update(f"{len(name)}:".encode() + name + f"{spec.shape}{spec.dtype};".encode())
        return state.hexdigest()
