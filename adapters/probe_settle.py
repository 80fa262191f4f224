"""From claims that stood verification to one parameter's map.

A parameter has claims by every reading of its bits. An element is a copy if it stood as one in some reading, empty if
it is a constant in all of them, else opaque. A parameter whose copies all took over the bits of one checkpoint dtype (a
view of the checkpoint's tensor) is given that dtype: its bits are the checkpoint's, to be read as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from adapters._probe_kernels import mark_rows, mask_intervals
from adapters.probe_verify import Claims, interval_rows
from layout_algebra.canonical import canonical_table
from layout_algebra.dtypes import IdArray, conversion_is_defined
from layout_algebra.recover import without
from layout_algebra.runs import RunTable, expand_ranges, expand_runs
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, natural_key

FEWEST_IDS = 32
"""Beside what a reading had to give up, its pieces of fewer distinct ids are opaque too: they may agree by chance."""

Mask = npt.NDArray[np.uint8]
"""One bit an element."""


def settle(claims: Sequence[Claims], space: CheckpointSpace) -> ParameterMap:
    """One parameter's map: copies that agreed, opaque elements, and nothing said of the rest.

    Parameters
    ----------
    claims
        One for each reading, verified.
    space
        The checkpoint.
    """
    masks = [one.opaque_elements() for one in claims]
    explained = next((one for one, mask in zip(claims, masks, strict=True) if mask is None), None)
    if explained is not None:  # What other readings make of it does not matter.
        claims, masks = [explained], [None]
    first = claims[0]
    tables = [CopyTable(one.copies.rows[one.standing]) for one in claims]
    dtype, tables, lost = _one_dtype(claims, tables, space)
    if len(claims) == 1 and masks[0] is None and not lost:
        rest = tables[0] if len(tables[0]) == len(first.copies) else canonical_table(tables[0], first.shape)
        return ParameterMap(first.shape, dtype, rest, RunTable.empty())
    opaque = np.zeros((first.elements + 7) // 8, dtype=np.uint8)
    covered = np.zeros_like(opaque)
    for table in lost:
        mark_rows(opaque, table.rows.copy())
    for number, (table, mask) in enumerate(zip(tables, masks, strict=True)):
        kept = table
        if mask is not None or lost:
            few = distinct_ids(table) < FEWEST_IDS
            kept = CopyTable(table.rows[~few])
            mark_rows(opaque, table.rows[few])
        if mask is not None:
            opaque |= mask
        if number and len(kept) and covered.any():
            kept = without(kept, mask_intervals(covered, first.elements), first.shape)
        mark_rows(covered, kept.rows.copy())
        tables[number] = kept
    opaque &= ~covered
    runs = RunTable.from_intervals(mask_intervals(opaque, first.elements))
    return ParameterMap(first.shape, dtype, canonical_table(CopyTable.concatenate(tables), first.shape), runs)


def tensors_refuted(claims: Sequence[Claims], space: CheckpointSpace) -> set[str]:
    """Checkpoint tensors that long pieces seemed to copy in the code passes, and did not in verification.

    What picks one of several tensors may not change its mind any more when dependencies are looked for.
    """
    out: set[str] = set()
    for one in claims:
        refuted = CopyTable(one.copies.rows[~one.standing])
        long = CopyTable(refuted.rows[distinct_ids(refuted) >= FEWEST_IDS])
        out.update(space.specs[position].name for position in np.unique(_tensors_read(space, long)[1]).tolist())
    return out


def leave_to_loader(found: SourceMap) -> SourceMap:
    """A needer's map without copies that no transfer converts: those become opaque, for the worker's loader to do.

    A transfer copies bits and converts between floats of 16 bits and more; a loader may convert integers and 8-bit
    floats too. The result depends on the checkpoint tensors of those copies.
    """
    space = found.space
    numbers, of_tensor = space.dtype_numbers
    out: dict[str, ParameterMap] = {}
    for name in found.parameters:
        entry = out[name] = found[name]
        undefined = [number for dtype, number in numbers.items() if not conversion_is_defined(dtype, entry.dtype)]
        if not undefined or not len(entry.copies):
            continue
        owner, tensor = _tensors_read(space, entry.copies)
        odd = np.isin(of_tensor[tensor], undefined)
        if not odd.any():
            continue
        left = np.isin(np.arange(len(entry.copies)), owner[odd])
        mask = np.zeros((entry.elements + 7) // 8, dtype=np.uint8)
        mark_rows(mask, entry.copies.rows[left])
        mark_rows(mask, interval_rows(entry.opaque.intervals))
        names = {*entry.depends_on, *(space.specs[position].name for position in np.unique(tensor[odd]).tolist())}
        out[name] = replace(
            entry,
            copies=canonical_table(CopyTable(entry.copies.rows[~left]), entry.shape),
            opaque=RunTable.from_intervals(mask_intervals(mask, entry.elements)),
            depends_on=tuple(sorted(names, key=natural_key)),
        )
    return SourceMap(space, out)


def _one_dtype(
    claims: Sequence[Claims], tables: list[CopyTable], space: CheckpointSpace
) -> tuple[str, list[CopyTable], list[CopyTable]]:
    """The dtype in which a parameter's copies are to be read, the copies that fit it, and those that do not."""
    own = claims[0].dtype
    if all(one.reading is None or one.reading.by_bits <= {own} for one in claims):
        return own, tables, []
    numbers = space.dtype_numbers[0]
    touched = [_touched(space, table) for table in tables]
    every = np.logical_or.reduce([one.any(axis=0) for one in touched])
    used = {dtype for dtype, number in numbers.items() if every[number]}
    standing = [one.reading.by_bits for one, table in zip(claims, tables, strict=True) if one.reading and len(table)]
    if len(used) == 1 and all(used <= by_bits for by_bits in standing):
        return used.pop(), tables, []
    kept, lost = [], []
    for one, table, dtypes in zip(claims, tables, touched, strict=True):
        by_value = set() if one.reading is None else one.reading.by_value | {own}
        odd = dtypes[:, [number for dtype, number in numbers.items() if dtype not in by_value]].any(axis=1)
        kept.append(CopyTable(table.rows[~odd]))
        if odd.any():
            lost.append(CopyTable(table.rows[odd]))
    return own, kept, lost


def _touched(space: CheckpointSpace, table: CopyTable) -> npt.NDArray[np.bool_]:
    """For every copy whether it reads tensors of each dtype; shape ``(copies, dtypes)``."""
    numbers, of_tensor = space.dtype_numbers
    out = np.zeros((len(table), len(numbers)), dtype=np.bool_)
    owner, tensor = _tensors_read(space, table)
    out[owner, of_tensor[tensor]] = True
    return out


def _tensors_read(space: CheckpointSpace, table: CopyTable) -> tuple[IdArray, IdArray]:
    """Pairs of a copy and a tensor that it reads, by position; some of them more than once."""
    if not len(table):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    runs, owner = table.source_runs()
    first, last = _tensors_of(space, runs[:, 0], runs[:, 0] + runs[:, 2] * (runs[:, 3] - 1) + runs[:, 1])
    apart = first != last
    owners, tensors = [owner[~apart]], [first[~apart]]
    spans = expand_runs(runs[apart])
    first, last = _tensors_of(space, spans[:, 0], spans[:, 1])
    owners.append(np.repeat(np.repeat(owner[apart], runs[apart, 3]), last - first + 1))
    tensors.append(expand_ranges(first, last - first + 1))
    return np.concatenate(owners), np.concatenate(tensors)


def _tensors_of(space: CheckpointSpace, starts: IdArray, stops: IdArray) -> tuple[IdArray, IdArray]:
    """First and last tensor, by position, of half-open id ranges."""
    first = np.searchsorted(space.starts, starts, side="right") - 1
    return first, np.searchsorted(space.starts, stops - 1, side="right") - 1


def distinct_ids(table: CopyTable) -> IdArray:
    """How many different ids every piece copies, at most."""
    product = np.prod(np.where(table.source_strides == 0, 1, table.extents), axis=1, dtype=np.int64)
    low, high = table.bounds(of="source")
    out: IdArray = np.minimum(product, high - low + 1)
    return out
