"""Rounds that keep a tensor, or rows of blocks, in one piece.

By default every route is cut into equal parts, wherever that falls. Where a whole tensor, or whole quantization blocks,
must be there before any of it is of use, ``make_plan`` gets a unit: then ids are cut into groups, and each group gets
a round, the largest first, where it raises the fullest of the buffers that it passes least. Rounds are as equal as the
groups allow.

>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec("a", (4, 3), "F32"), TensorSpec("b", (5,), "F32")])
>>> group_starts(space, "tensor").tolist(), group_starts(space, 2).tolist()
([1, 13], [1, 7, 13])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import sparse

from layout_algebra.dtypes import IdArray
from layout_algebra.space import CheckpointSpace
from transfer_exec.errors import BudgetError, PlanError
from transfer_exec.plan import Route
from transfer_exec.schedule import Groups, cut_by_groups

Unit = Literal["tensor"] | int
"""What stays in one round: every tensor, or so many rows of every matrix (the last two axes of a tensor)."""

_EQUAL = 1e-6
"""How much the average of the buffers counts beside the fullest one."""


def group_starts(space: CheckpointSpace, unit: Unit) -> IdArray:
    """First id of every group, ascending. Tensors of fewer than two axes are one group.

    Raises
    ------
    PlanError
        If the unit is neither "tensor" nor a number of rows.
    """
    if unit != "tensor" and (isinstance(unit, bool) or not isinstance(unit, int) or unit < 1):
        raise PlanError(f"keep_together is {unit!r}; expected 'tensor' or a number of rows of at least 1")
    starts = [np.empty(0, dtype=np.int64)]
    for spec, start in zip(space.specs, space.starts.tolist(), strict=False):
        if not spec.elements:
            continue
        if unit == "tensor" or len(spec.shape) < 2:
            starts.append(np.array([start], dtype=np.int64))
            continue
        rows, width = spec.shape[-2:]
        matrices = np.arange(math.prod(spec.shape[:-2]), dtype=np.int64) * rows * width
        bands = np.arange(0, rows, unit, dtype=np.int64) * width
        starts.append((start + matrices[:, None] + bands[None, :]).reshape(-1))
    return np.concatenate(starts)


def group_rounds(
    routes: Sequence[Route], space: CheckpointSpace, unit: Unit, buffer_bytes: int, *, at_least: int = 1
) -> tuple[Groups, int]:
    """Groups with their rounds, and the number of rounds: the smallest of those tried in which everything fits.

    Raises
    ------
    BudgetError
        If one group does not fit into a buffer; names its tensor, the worker and the bytes.
    """
    starts = group_starts(space, unit)
    if not routes:
        return Groups(starts, np.zeros(len(starts), dtype=np.int64)), 1
    names, use = _use(routes, starts)
    if int(use.data.max()) > buffer_bytes:
        raise _too_large(names, use, space, starts, buffer_bytes)
    totals = np.zeros(len(names), dtype=np.int64)
    np.add.at(totals, use.indices, use.data)
    carrying = np.flatnonzero(np.diff(use.indptr))
    largest = np.maximum.reduceat(use.data, use.indptr[carrying])
    order = carrying[np.argsort(-largest, kind="stable")]
    rounds = max(min(at_least, len(carrying)), -(-int(totals.max()) // buffer_bytes))
    while True:
        rounds = min(rounds, len(carrying))
        found = _deal(use, totals, order, rounds, buffer_bytes)
        if found is not None:
            return Groups(starts, found), rounds
        rounds += max(1, rounds // 16)


def _use(routes: Sequence[Route], starts: IdArray) -> tuple[list[str], sparse.csc_matrix]:
    """Bytes that every group puts into every buffer; buffers that the same routes pass count once."""
    passing: dict[tuple[str, int], list[int]] = {}
    for index, route in enumerate(routes):
        passing.setdefault((route.holder, -1), []).append(index)
        for hop in route.hops:
            passing.setdefault((hop.target, hop.stage.value), []).append(index)
    distinct: dict[tuple[int, ...], str] = {}
    for (worker, _), members in passing.items():
        distinct.setdefault(tuple(members), worker)
    passes = _matrix(
        [(row, route, routes[route].item_bytes) for row, members in enumerate(distinct) for route in members],
        (len(distinct), len(routes)),
    )
    cuts = [cut_by_groups(route.runs.intervals, starts) for route in routes]
    owner = np.repeat(np.arange(len(routes)), [len(group) for group, _, _ in cuts])
    carried = sparse.csr_matrix(  # type: ignore[no-untyped-call]
        (np.concatenate([count for _, _, count in cuts]), (owner, np.concatenate([group for group, _, _ in cuts]))),
        shape=(len(routes), len(starts)),
    )
    return list(distinct.values()), (passes @ carried).tocsc()


def _matrix(entries: Sequence[tuple[int, int, int]], shape: tuple[int, int]) -> sparse.csr_matrix:
    rows, columns, values = np.array(entries, dtype=np.int64).T
    return sparse.csr_matrix((values, (rows, columns)), shape=shape)  # type: ignore[no-untyped-call]


def _deal(use: sparse.csc_matrix, totals: IdArray, order: IdArray, rounds: int, buffer_bytes: int) -> IdArray | None:
    """A round for every group, or None if one finds no room.

    Of groups that fill the same buffers alike, equally many consecutive ones go to every round; the rest, a quarter or
    more, level out what others left: each goes where it raises the fullest of its buffers least.
    """
    loads = np.zeros((len(totals), rounds), dtype=np.int64)
    out = np.zeros(use.shape[1], dtype=np.int64)
    share = 1.0 / np.maximum(totals, 1)
    for members in _alike(use, order):
        entries = slice(use.indptr[members[0]], use.indptr[members[0] + 1])
        buffers, added = use.indices[entries], use.data[entries][:, None]
        each = len(members) // rounds * 3 // 4
        if each and int((loads[buffers] + each * added).max()) <= buffer_bytes:
            out[members[: each * rounds]] = np.repeat(np.arange(rounds), each)
            loads[buffers] += each * added
            members = members[each * rounds :]
        for group in members:
            after = loads[buffers] + added
            filled = after * share[buffers][:, None]
            cost = filled.max(axis=0) + _EQUAL * filled.mean(axis=0)
            cost[after.max(axis=0) > buffer_bytes] = np.inf
            chosen = int(cost.argmin())
            if cost[chosen] == np.inf:
                return None
            loads[buffers, chosen] += added[:, 0]
            out[group] = chosen
    return out


def _alike(use: sparse.csc_matrix, order: IdArray) -> list[list[int]]:
    """Groups that put the same bytes into the same buffers, in the order in which they first come."""
    found: dict[tuple[bytes, bytes], list[int]] = {}
    for group in order.tolist():
        entries = slice(use.indptr[group], use.indptr[group + 1])
        found.setdefault((use.indices[entries].tobytes(), use.data[entries].tobytes()), []).append(group)
    return list(found.values())


def _too_large(
    names: Sequence[str], use: sparse.csc_matrix, space: CheckpointSpace, starts: IdArray, buffer_bytes: int
) -> BudgetError:
    entry = int(use.data.argmax())
    group = int(np.searchsorted(use.indptr, entry, side="right")) - 1
    start = int(starts[group])
    stop = int(starts[group + 1]) if group + 1 < len(starts) else space.total_elements + 1
    worker, count = names[int(use.indices[entry])], int(use.data[entry])
    return BudgetError(
        f"buffer_bytes is {buffer_bytes}, and {space.describe_ids(start, stop)}, kept together, puts {count} bytes "
        f"into one buffer of {worker}; give a buffer of at least {count} bytes, or keep fewer rows together"
    )
