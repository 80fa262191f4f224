"""What one worker holds: for every parameter element the checkpoint element it is a copy of.

>>> import numpy as np
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("b", (6,), "F32")])
>>> held = SourceMap.from_ids(space, {"p": np.array([[1, 2, 3, 0], [4, 5, 6, 0]])})
>>> [str(copy) for copy in held.slice_copies("p")], held.coverage().empty_elements
(['0+(2:4,3:1) <- 1+(2:3,3:1)'], 2)

Three things can be true of an element: it is a *copy* of one id, it is *empty* (the loader leaves it, or
always writes one constant), or it is *opaque* (written, but not as a copy).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.errors import MapError
from layout_algebra.map_bytes import MapRow, decode_map, encode_map
from layout_algebra.recover import canonical_of_ids
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable, SliceCopy
from layout_algebra.space import CheckpointSpace, natural_key
from layout_algebra.strips import StripTable

OPAQUE = -1
EMPTY = 0


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMap:
    """One parameter's part of a source map.

    Attributes
    ----------
    shape, dtype
        Of the live tensor; dtype in safetensors spelling.
    copies
        In canonical form, targets disjoint.
    opaque
        Flat indices of opaque elements.
    depends_on
        Checkpoint tensors that the opaque elements are computed from, in natural order.
    written_twice
        Flat indices that more than one load wrote when the map was found; the map tells what the last one wrote. A
        remark on the loader, not part of the layout: digests and serialized maps leave it out.
    """

    shape: tuple[int, ...]
    dtype: str
    copies: CopyTable
    opaque: RunTable
    depends_on: tuple[str, ...] = ()
    written_twice: RunTable = field(default_factory=RunTable.empty)

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a worker's parameters, and of the checkpoint, a map explains.

    Attributes
    ----------
    copied_elements, empty_elements, opaque_elements
        Counts over all parameters; they add up to the parameters' sizes.
    unused_tensors
        Checkpoint tensors that no element copies and no opaque parameter depends on, in natural order.
    """

    copied_elements: int
    empty_elements: int
    opaque_elements: int
    unused_tensors: tuple[str, ...]


class SourceMap:
    """One worker's parameters as slice copies of a checkpoint.

    Parameters
    ----------
    space
        The checkpoint.
    parameters
        A ``ParameterMap`` per name; kept in natural name order, so that order of arrival has no effect.

    Raises
    ------
    MapError
        If a copy leaves its parameter or the checkpoint, two claims meet in one element, or an opaque
        parameter depends on a tensor that is not in the checkpoint.
    """

    def __init__(self, space: CheckpointSpace, parameters: Mapping[str, ParameterMap]) -> None:
        self._space = space
        self._parameters = {name: parameters[name] for name in sorted(parameters, key=natural_key)}
        for name, entry in self._parameters.items():
            _check_parameter(space, name, entry)

    @staticmethod
    def from_ids(
        space: CheckpointSpace,
        ids: Mapping[str, npt.NDArray[np.int64]],
        dtypes: Mapping[str, str] | None = None,
    ) -> SourceMap:
        """Build a map from plain ids.

        Parameters
        ----------
        space
            The checkpoint.
        ids
            For every parameter an integer array of its shape: an id > 0 for a copy, 0 for empty, -1 for opaque.
        dtypes
            Safetensors dtype per parameter; by default that of the checkpoint tensors it copies.

        Raises
        ------
        MapError
            If an id is outside ``-1..N``, an array is no integer array, or a parameter copies tensors of
            several dtypes and ``dtypes`` does not name one.
        """
        if not isinstance(space, CheckpointSpace):
            raise MapError(f"space is a {type(space).__name__}; expected a CheckpointSpace")
        for argument, value in (("ids", ids), ("dtypes", {} if dtypes is None else dtypes)):
            if not isinstance(value, Mapping):
                raise MapError(f"{argument} is a {type(value).__name__}; expected a mapping of parameters' names")
        parameters = {}
        for name, given in ids.items():
            if not isinstance(name, str):
                raise MapError(f"{name!r}: a parameter's name is {type(name).__name__}; expected a string")
            try:
                array = np.asarray(given)
            except ValueError as error:
                raise MapError(f"{name}: ids are no array: {error}") from error
            if array.dtype.kind not in "iu" and array.size:
                raise MapError(f"{name}: ids are {array.dtype}, expected integers")
            if array.size and (int(array.min()) < OPAQUE or int(array.max()) > space.total_elements):
                raise MapError(
                    f"{name}: ids run from {array.min()} to {array.max()}; expected -1..{space.total_elements}"
                )
            array = array.astype(np.int64, copy=False)
            named = None if dtypes is None else dtypes.get(name)
            dtype = named if named is not None else _dtype_of_ids(space, name, array)
            dtype_of(dtype)
            flat = array.reshape(-1)
            copies = canonical_of_ids(array)
            parameters[name] = ParameterMap(
                array.shape, dtype, copies, RunTable.from_ids(np.flatnonzero(flat == OPAQUE))
            )
        return SourceMap(space, parameters)

    @property
    def space(self) -> CheckpointSpace:
        """The checkpoint the ids belong to."""
        return self._space

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameter names in natural order."""
        return tuple(self._parameters)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._parameters

    def __getitem__(self, parameter: str) -> ParameterMap:
        found = self._parameters.get(parameter)
        if found is None:
            raise MapError(f"{parameter}: no such parameter in a map of {len(self._parameters)}")
        return found

    def __repr__(self) -> str:
        cover = self.coverage()
        return (
            f"SourceMap({len(self._parameters)} parameters: {cover.copied_elements:,} copied, "
            f"{cover.empty_elements:,} empty, {cover.opaque_elements:,} opaque)"
        )

    def same_as(self, other: SourceMap) -> bool:
        """Whether both say the same of the same checkpoint."""
        return self.digest() == other.digest()

    def dtype(self, parameter: str) -> str:
        """Safetensors dtype of a parameter."""
        return self[parameter].dtype

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self[parameter].shape

    def ids(self, parameter: str) -> IdArray:
        """The definition: an int64 array of the parameter's shape, id > 0 copy, 0 empty, -1 opaque."""
        entry = self[parameter]
        out = np.zeros(entry.elements, dtype=np.int64)
        out[entry.opaque.ids()] = OPAQUE
        entry.copies.write_ids(out)
        return out.reshape(entry.shape)

    def slice_copies(self, parameter: str) -> tuple[SliceCopy, ...]:
        """A parameter's copies in canonical form, by target."""
        return self[parameter].copies.slice_copies()

    @property
    def opaque(self) -> tuple[str, ...]:
        """Parameters with at least one opaque element."""
        return tuple(name for name, entry in self._parameters.items() if entry.opaque)

    def depends_on(self, parameter: str) -> tuple[str, ...]:
        """Checkpoint tensors an opaque parameter is computed from; empty for any other, or where unknown."""
        return self[parameter].depends_on

    @property
    def written_twice(self) -> tuple[str, ...]:
        """Parameters of which some element was loaded twice while the map was found; see ``ParameterMap``."""
        return tuple(name for name, entry in self._parameters.items() if entry.written_twice)

    def coverage(self) -> Coverage:
        """Elements copied, empty and opaque, and the checkpoint tensors nobody here uses."""
        copied = sum(int(entry.copies.elements.sum()) for entry in self._parameters.values())
        opaque = sum(entry.opaque.elements for entry in self._parameters.values())
        total = sum(entry.elements for entry in self._parameters.values())
        starts = self._space.starts
        touched = self.needed().intervals
        first = np.searchsorted(touched[:, 1], starts[:-1], side="right")
        last = np.searchsorted(touched[:, 0], starts[1:], side="left")
        unused = np.flatnonzero((last <= first) & (starts[1:] > starts[:-1]))
        specs = self._space.specs
        return Coverage(copied, total - copied - opaque, opaque, tuple(specs[position].name for position in unused))

    @cached_property
    def strips(self) -> StripTable:
        """Where every held id lives; parameters are numbered as in ``parameters``."""
        return StripTable.of([entry.copies for entry in self._parameters.values()])

    @cached_property
    def runs_by_parameter(self) -> tuple[IdArray, IdArray]:
        """Ids that some element copies as runs (start, length, stride, count), and the parameter of each run.

        Runs overlap where copies read an id twice; parameters are numbered as in ``parameters``.
        """
        tables = [entry.copies for entry in self._parameters.values()]
        owner = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        runs, row = CopyTable.concatenate(tables).source_runs()
        return runs, owner[row]

    @property
    def held_runs(self) -> IdArray:
        """The runs of ``runs_by_parameter``."""
        return self.runs_by_parameter[0]

    @cached_property
    def needed_runs(self) -> IdArray:
        """``held_runs``, and the tensors that opaque parameters depend on."""
        ranges = [self._space.id_range(name) for name in self.staged_tensors()]
        staged = [[start, stop - start, stop - start, 1] for start, stop in ranges if stop > start]
        return np.concatenate([self.held_runs, np.array(staged, dtype=np.int64).reshape(-1, 4)])

    @cached_property
    def _held(self) -> RunTable:
        return RunTable.from_runs(self.held_runs)

    @cached_property
    def _needed(self) -> RunTable:
        return RunTable.from_runs(self.needed_runs)

    def held(self) -> RunTable:
        """Ids that some element copies."""
        return self._held

    def needed(self) -> RunTable:
        """Ids that are copied, or belong to a tensor that an opaque parameter depends on."""
        return self._needed

    def staged_tensors(self) -> tuple[str, ...]:
        """Checkpoint tensors that opaque parameters depend on, in natural order."""
        names = {name for entry in self._parameters.values() for name in entry.depends_on}
        return tuple(sorted(names, key=natural_key))

    def to_bytes(self) -> bytes:
        """Serialize, checkpoint included; ``from_bytes`` gives an equal map."""
        rows = [MapRow(n, e.shape, e.dtype, e.copies, e.opaque, e.depends_on) for n, e in self._parameters.items()]
        return encode_map(self._space, rows)

    @staticmethod
    def from_bytes(data: bytes) -> SourceMap:
        """Read ``to_bytes``' output; safe on untrusted bytes.

        Raises
        ------
        MapBytesError
            If the bytes are truncated, altered, of another version, or contradict themselves: also if two claims meet
            in one element.
        """
        space, rows = decode_map(data)
        return SourceMap(
            space,
            {row.name: ParameterMap(row.shape, row.dtype, row.copies, row.opaque, row.depends_on) for row in rows},
        )

    def digest(self) -> str:
        """Hex digest; equal maps of one checkpoint have equal digests."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = hashlib.blake2b(self._space.digest().encode(), digest_size=16)
        for name, (shape, dtype, copies, opaque, depends) in ((n, _fields(e)) for n, e in self._parameters.items()):
            state.update(repr((name, shape, dtype, copies.shape, opaque.shape, depends)).encode())
            state.update(copies.tobytes() + opaque.tobytes())
        return state.hexdigest()


def _fields(entry: ParameterMap) -> tuple[tuple[int, ...], str, IdArray, IdArray, tuple[str, ...]]:
    return entry.shape, entry.dtype, entry.copies.rows, entry.opaque.runs, entry.depends_on


def _dtype_of_ids(space: CheckpointSpace, name: str, ids: IdArray) -> str:
    """The one dtype of the tensors that some ids belong to; a parameter that copies nothing takes the first's."""
    if not len(space):
        return "U8"
    copied = ids[ids > 0]
    positions = np.unique(np.searchsorted(space.starts, copied, side="right") - 1)
    dtypes = {space.specs[position].dtype for position in positions}
    if len(dtypes) > 1:
        raise MapError(f"{name}: copies tensors of {', '.join(sorted(dtypes))}; name its own dtype in `dtypes`")
    return dtypes.pop() if dtypes else space.specs[0].dtype


def _check_parameter(space: CheckpointSpace, name: str, entry: ParameterMap) -> None:
    dtype_of(entry.dtype)
    copies, size = entry.copies, entry.elements
    if len(copies):
        if int(copies.extents.min()) < 1:
            raise MapError(f"{name}: a slice copy has an extent below 1")
        low, high = copies.bounds(of="target")
        if int(low.min()) < 0 or int(high.max()) >= size:
            raise MapError(f"{name}: a slice copy writes {low.min()}..{high.max()}, outside 0:{size}")
        low, high = copies.bounds(of="source")
        if int(low.min()) < 1 or int(high.max()) > space.total_elements:
            raise MapError(f"{name}: a slice copy reads ids {low.min()}..{high.max()} of 1..{space.total_elements}")
    if entry.opaque and int(entry.opaque.intervals[-1, 1]) > size:
        raise MapError(f"{name}: opaque elements reach {entry.opaque.intervals[-1, 1]}, outside 0:{size}")
    if int(copies.elements.sum()) + entry.opaque.elements > size:
        raise MapError(f"{name}: copies and opaque elements claim more than its {size} elements")
    for tensor in entry.depends_on:
        if tensor not in space:
            raise MapError(f"{name}: depends on {tensor}, which is not in the checkpoint")
