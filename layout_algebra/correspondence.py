"""Who holds what somebody needs: the maps of all workers, intersected.

Two ids belong to one *demand class* when the same workers hold them, the same workers need them and their
elements are equally wide. A model of a trillion parameters on 512 GPUs has a few hundred classes, and a plan is
made of classes, so its cost grows with distinct layouts and not with ranks or tensors.

>>> import numpy as np
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (6,), "F32")])
>>> whole = SourceMap.from_ids(space, {"w": np.arange(1, 7)})
>>> half = SourceMap.from_ids(space, {"w": np.arange(3, 7)})
>>> for group in correspond({"t": whole}, {"a": whole, "b": half}).classes:
...     print(group.holders, group.needers, group.runs.ids().tolist())
('t',) ('a',) [1, 2]
('t',) ('a', 'b') [3, 4, 5, 6]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.cells import cut_cells
from layout_algebra.correspondence_bytes import (
    correspondence_digest,
    decode_correspondence,
    encode_correspondence,
)
from layout_algebra.dtypes import IdArray, conversion_is_defined, holds_every_value
from layout_algebra.errors import CorrespondenceError
from layout_algebra.runs import RunTable, expand_ranges, expand_runs
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, natural_key

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class DemandClass:
    """Ids with the same holders, the same needers and one element width.

    Attributes
    ----------
    holders, needers
        Worker names in natural order; no holders means that nobody can serve the class.
    runs
        The ids.
    item_bytes
        Bytes of one element on the wire: the checkpoint's own width.
    """

    holders: tuple[str, ...]
    needers: tuple[str, ...]
    runs: RunTable
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of one copy of the class."""
        return self.runs.elements * self.item_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Correspondence:
    """Everything a planner must know about layouts.

    Attributes
    ----------
    space
        The checkpoint that all maps speak of.
    holders, needers
        All workers of either side in natural order, those without any id included.
    classes
        Demand classes of the needed ids, ascending by first id; disjoint.
    """

    space: CheckpointSpace
    holders: tuple[str, ...]
    needers: tuple[str, ...]
    classes: tuple[DemandClass, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes of one copy of everything that somebody needs."""
        return sum(group.bytes for group in self.classes)

    def unheld(self) -> tuple[DemandClass, ...]:
        """Classes that nobody holds."""
        return tuple(group for group in self.classes if not group.holders)

    def to_bytes(self) -> bytes:
        """Serialize, checkpoint included; ``from_bytes`` gives an equal correspondence.

        Raises
        ------
        CorrespondenceError
            If it is larger than ``from_bytes`` reads.
        """
        return encode_correspondence(self)

    @staticmethod
    def from_bytes(data: bytes) -> Correspondence:
        """Read ``to_bytes``' output; safe on untrusted bytes.

        Raises
        ------
        CorrespondenceBytesError
            If the bytes are truncated, altered, of another version, or contradict themselves.
        """
        return decode_correspondence(data)

    def digest(self) -> str:
        """Hex digest; equal correspondences of one checkpoint have equal digests."""
        return correspondence_digest(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """One distinct set of ids, as runs, and the workers of one side that share it."""

    runs: IdArray
    workers: tuple[str, ...]


def correspond(
    holders: Mapping[str, SourceMap], needers: Mapping[str, SourceMap], *, cast: bool = False
) -> Correspondence:
    """Intersect the maps of all workers.

    Parameters
    ----------
    holders
        Map per worker that has the weights (trainers).
    needers
        Map per worker that must get them (rollouts). A worker name may stand on one side only.
    cast
        Accept holders whose elements are wider than the checkpoint's; they are rounded to nearest even when sent.

    Returns
    -------
    Correspondence
        Independent of the order of the mappings.

    Raises
    ------
    CorrespondenceError
        If something is no map under a worker's name, the maps speak of different checkpoints, a name stands on both
        sides, a holder is narrower than the checkpoint (or wider, without ``cast``), or a needer's dtype has no defined
        conversion.
    """
    for worker, source_map in [*holders.items(), *needers.items()]:
        if not isinstance(worker, str) or not isinstance(source_map, SourceMap):
            raise CorrespondenceError(
                f"{worker!r}: {type(source_map).__name__}; expected the worker's name and its SourceMap"
            )
    both = sorted(set(holders) & set(needers), key=natural_key)
    if both:
        raise CorrespondenceError(f"{both[0]}: named as a holder and as a needer; give each side its own worker names")
    space = _common_space({**holders, **needers})
    for worker, source_map in _distinct(holders):
        _check_holder(worker, source_map, cast=cast)
    for worker, source_map in _distinct(needers):
        _check_needer(worker, source_map)
    held = _layouts(_ordered(holders), needed=False)
    needed = _layouts(_ordered(needers), needed=True)
    return Correspondence(
        space=space,
        holders=tuple(worker for worker, _ in _ordered(holders)),
        needers=tuple(worker for worker, _ in _ordered(needers)),
        classes=tuple(_classes(space, held, needed)),
    )


def _ordered(maps: Mapping[str, SourceMap]) -> list[tuple[str, SourceMap]]:
    return [(worker, maps[worker]) for worker in sorted(maps, key=natural_key)]


def _distinct(maps: Mapping[str, SourceMap]) -> list[tuple[str, SourceMap]]:
    """The first worker of each map object: replicas that share one are looked at once."""
    first: dict[int, tuple[str, SourceMap]] = {}
    for worker, source_map in _ordered(maps):
        first.setdefault(id(source_map), (worker, source_map))
    return list(first.values())


def _common_space(maps: Mapping[str, SourceMap]) -> CheckpointSpace:
    ordered = _ordered(maps)
    if not ordered:
        return CheckpointSpace([])
    first_worker, first = ordered[0]
    for worker, source_map in ordered[1:]:
        if source_map.space is first.space or source_map.space == first.space:
            continue
        mine = {spec.name: spec for spec in first.space.specs}
        theirs = {spec.name: spec for spec in source_map.space.specs}
        only_mine, only_theirs = sorted(mine.keys() - theirs), sorted(theirs.keys() - mine)
        differing = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        changed = [f"{n} {mine[n].shape} {mine[n].dtype} / {theirs[n].shape} {theirs[n].dtype}" for n in differing]
        detail = (
            f"only {first_worker}: {_listed(only_mine)}; only {worker}: {_listed(only_theirs)}; "
            f"other shape or dtype: {_listed(changed)}"
        )
        raise CorrespondenceError(
            f"{first_worker} and {worker} were probed on different checkpoints ({detail}); "
            "give every adapter the same checkpoint folder"
        )
    return first.space


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none"
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _dtype_pairs(source_map: SourceMap) -> list[tuple[str, str, str]]:
    """Every (parameter, its dtype, checkpoint tensor) whose dtypes differ."""
    space, parameters = source_map.space, source_map.parameters
    number, of_tensor = space.dtype_numbers
    of_parameter = np.array([number.get(source_map.dtype(name), -1) for name in parameters], dtype=np.int64)
    changes = np.concatenate([[0], np.cumsum(np.diff(of_tensor) != 0)])
    runs, owner = source_map.runs_by_parameter
    first, last = _tensors_of(space, runs[:, 0], runs[:, 0] + runs[:, 2] * (runs[:, 3] - 1) + runs[:, 1])
    alike = (changes[first] == changes[last]) & (of_tensor[first] == of_parameter[owner])
    out = set()
    for position in np.flatnonzero(~alike).tolist():
        spans = expand_runs(runs[position : position + 1])
        first, last = _tensors_of(space, spans[:, 0], spans[:, 1])
        name = parameters[owner[position]]
        specs = [space.specs[tensor] for tensor in np.unique(expand_ranges(first, last - first + 1)).tolist()]
        own = source_map.dtype(name)
        out |= {(name, own, spec.name) for spec in specs if spec.elements and spec.dtype != own}
    return sorted(out)


def _tensors_of(space: CheckpointSpace, starts: IdArray, stops: IdArray) -> tuple[IdArray, IdArray]:
    """First and last tensor, by position, of half-open id ranges."""
    first = np.searchsorted(space.starts, starts, side="right") - 1
    return first, np.searchsorted(space.starts, stops - 1, side="right") - 1


def _check_holder(worker: str, source_map: SourceMap, *, cast: bool) -> None:
    for parameter, dtype, tensor in _dtype_pairs(source_map):
        wire = source_map.space.spec(tensor).dtype
        if not holds_every_value(dtype, wire):
            raise CorrespondenceError(
                f"{parameter} on {worker} holds {tensor} as {dtype}, which cannot hold every {wire} value; "
                f"keep it in {wire} or wider on the trainer"
            )
        if not cast:
            raise CorrespondenceError(
                f"{parameter} on {worker} holds {tensor} as {dtype}, the checkpoint has {wire}; "
                f"pass cast=True to round to nearest even when sending"
            )


def _check_needer(worker: str, source_map: SourceMap) -> None:
    for parameter, dtype, tensor in _dtype_pairs(source_map):
        wire = source_map.space.spec(tensor).dtype
        if not conversion_is_defined(wire, dtype):
            raise CorrespondenceError(
                f"{parameter} on {worker} is {dtype} and copies {tensor}, which is {wire}; no conversion is defined"
            )


def _layouts(workers: Sequence[tuple[str, SourceMap]], *, needed: bool) -> list[_Layout]:
    """Group workers of one side that have the very same ids, so that each set is intersected once."""
    groups: dict[bytes, tuple[IdArray, list[str]]] = {}
    keys: dict[int, bytes] = {}
    for worker, source_map in workers:
        runs = source_map.needed_runs if needed else source_map.held_runs
        key = keys.setdefault(id(source_map), runs[np.lexsort(runs.T)].tobytes())
        if len(runs):
            groups.setdefault(key, (runs, []))[1].append(worker)
    return [_Layout(runs, tuple(members)) for runs, members in groups.values()]


def _classes(space: CheckpointSpace, held: list[_Layout], needed: list[_Layout]) -> list[DemandClass]:
    """The cells that somebody needs, with the names of those who hold and need them."""
    out = []
    for cell in cut_cells(space, [layout.runs for layout in (*held, *needed)]):
        mine, theirs = cell.covered_by[: len(held)], cell.covered_by[len(held) :]
        if theirs.any():
            runs = RunTable.from_runs(cell.runs)
            out.append(DemandClass(_workers(held, mine), _workers(needed, theirs), runs, cell.item_bits // 8))
    return out


def _workers(layouts: list[_Layout], inside: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    names = [worker for layout, yes in zip(layouts, inside, strict=True) if yes for worker in layout.workers]
    return tuple(sorted(names, key=natural_key))
