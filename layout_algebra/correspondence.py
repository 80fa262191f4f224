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

from layout_algebra.dtypes import IdArray, conversion_is_defined, holds_every_value
from layout_algebra.errors import CorrespondenceError
from layout_algebra.runs import RunTable
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


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """One distinct set of ids and the workers of one side that share it."""

    intervals: IdArray
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
        If the maps speak of different checkpoints, a name stands on both sides, a holder is narrower than the
        checkpoint (or wider, without ``cast``), or a needer's dtype has no defined conversion.
    """
    both = sorted(set(holders) & set(needers), key=natural_key)
    if both:
        raise CorrespondenceError(f"{both[0]}: named as a holder and as a needer; give each side its own worker names")
    space = _common_space({**holders, **needers})
    for worker, source_map in _ordered(holders):
        _check_holder(worker, source_map, cast=cast)
    for worker, source_map in _ordered(needers):
        _check_needer(worker, source_map)
    held = _layouts([(worker, source_map.held()) for worker, source_map in _ordered(holders)])
    needed = _layouts([(worker, source_map.needed()) for worker, source_map in _ordered(needers)])
    return Correspondence(
        space=space,
        holders=tuple(worker for worker, _ in _ordered(holders)),
        needers=tuple(worker for worker, _ in _ordered(needers)),
        classes=tuple(_classes(space, held, needed)),
    )


def _ordered(maps: Mapping[str, SourceMap]) -> list[tuple[str, SourceMap]]:
    return [(worker, maps[worker]) for worker in sorted(maps, key=natural_key)]


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
    space, rows = source_map.space, source_map.strips.rows
    if not len(rows):
        return []
    first = np.searchsorted(space.starts, rows[:, 0], side="right") - 1
    last = np.searchsorted(space.starts, rows[:, 0] + rows[:, 1] - 1, side="right") - 1
    names = source_map.parameters
    out = []
    for parameter, low, high in np.unique(np.stack([rows[:, 2], first, last], axis=1), axis=0).tolist():
        dtype = source_map.dtype(names[parameter])
        out += [
            (names[parameter], dtype, space.specs[position].name)
            for position in range(low, high + 1)
            if space.specs[position].elements and space.specs[position].dtype != dtype
        ]
    return out


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


def _layouts(workers: Sequence[tuple[str, RunTable]]) -> list[_Layout]:
    """Group workers of one side that have the very same ids, so that each set is intersected once."""
    groups: dict[bytes, tuple[IdArray, list[str]]] = {}
    for worker, runs in workers:
        if runs:
            groups.setdefault(runs.runs.tobytes(), (runs.intervals, []))[1].append(worker)
    return [_Layout(intervals, tuple(members)) for intervals, members in groups.values()]


def _classes(space: CheckpointSpace, held: list[_Layout], needed: list[_Layout]) -> list[DemandClass]:
    """Cut the ids at every edge of every layout, label each segment by who covers it, and group equal labels."""
    if not needed:
        return []
    layouts = [*held, *needed]
    width_changes = np.flatnonzero(np.diff(space.item_bits)) + 1
    all_edges = [layout.intervals.reshape(-1) for layout in layouts] + [space.starts[width_changes]]
    edges = np.unique(np.concatenate(all_edges))
    covered_by = np.zeros((len(edges), 2), dtype=np.uint64)
    is_needed = np.zeros(len(edges), dtype=np.int64)
    for number, layout in enumerate(layouts):
        starts = np.searchsorted(edges, layout.intervals[:, 0])
        stops = np.searchsorted(edges, layout.intervals[:, 1])
        mark = _marks(number)
        covered_by[starts] += mark
        covered_by[stops] -= mark
        if number >= len(held):
            is_needed[starts] += 1
            is_needed[stops] -= 1
    label = np.cumsum(covered_by, axis=0, dtype=np.uint64)[:-1]
    segments = np.flatnonzero(np.cumsum(is_needed)[:-1] > 0)
    tensor = np.searchsorted(space.starts, edges[segments], side="right") - 1
    keys = np.empty((len(segments), 3), dtype=np.uint64)
    keys[:, :2] = label[segments]
    keys[:, 2] = space.item_bits[tensor]
    _, first_seen, group_of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    group_of = group_of.reshape(-1)
    order = np.argsort(group_of, kind="stable")
    bounds = np.searchsorted(group_of[order], np.arange(len(first_seen) + 1))
    spans = np.stack([edges[segments], edges[segments + 1]], axis=1)
    samples = edges[segments[first_seen]]
    members = np.stack([_contains(layout.intervals, samples) for layout in layouts])
    out = []
    for group in np.argsort(samples).tolist():
        mine = spans[order[bounds[group] : bounds[group + 1]]]
        inside = members[:, group]
        out.append(
            DemandClass(
                holders=_workers(held, inside[: len(held)]),
                needers=_workers(needed, inside[len(held) :]),
                runs=RunTable.from_intervals(mine),
                item_bytes=int(keys[first_seen[group], 2]) // 8,
            )
        )
    return out


def _workers(layouts: list[_Layout], inside: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    names = [worker for layout, yes in zip(layouts, inside, strict=True) if yes for worker in layout.workers]
    return tuple(sorted(names, key=natural_key))


def _contains(intervals: IdArray, ids: IdArray) -> npt.NDArray[np.bool_]:
    position = np.searchsorted(intervals[:, 0], ids, side="right") - 1
    inside: npt.NDArray[np.bool_] = (position >= 0) & (ids < intervals[np.maximum(position, 0), 1])
    return inside


def _marks(number: int) -> npt.NDArray[np.uint64]:
    """Two fixed 64-bit numbers per layout. A set of layouts is known by its sums mod 2**64: two sets meet with
    probability 2**-128 per pair."""
    state = np.array([2 * number + 1, 2 * number + 2], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
