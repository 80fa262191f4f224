"""What a checkpoint holds and what maps make of it, in numbers and lines: computed here, printed by `inspect`.

Tensors and parameters whose names differ in numbers alone, and are otherwise alike, are one row:
`model.layers.{1..60}.mlp.experts.{0..383}.up_proj.weight`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from layout_algebra.cells import cut_cells
from layout_algebra.coverage_faults import Expectation, Fault, Holding, index_text
from layout_algebra.dtypes import dtype_of
from layout_algebra.errors import FormulaError
from layout_algebra.name_bytes import split_name
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from layout_algebra.symbolic import SymbolicMap, fit

__all__ = [
    "CheckpointReport",
    "DuplicateRow",
    "InspectReport",
    "MapReport",
    "ParameterRow",
    "TensorRow",
    "pattern_of",
    "report_checkpoint",
    "report_family",
    "report_maps",
]

MOST_LISTED = 64
_MOST_FAULTS = 4096
_MOST_STRIPS = 1 << 24


class TensorRow(msgspec.Struct, frozen=True):
    """Alike tensors of a checkpoint: how many, the shape and dtype of each, bytes of all."""

    name: str
    tensors: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class CheckpointReport(msgspec.Struct, frozen=True):
    """A checkpoint."""

    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    rows: tuple[TensorRow, ...]


class ParameterRow(msgspec.Struct, frozen=True):
    """Alike parameters of a map; copies of each, elements of all."""

    name: str
    parameters: int
    shape: tuple[int, ...]
    dtype: str
    copies: int
    copied: int
    empty: int
    opaque: int
    depends_on: tuple[str, ...]


class DuplicateRow(msgspec.Struct, frozen=True):
    """A range of a checkpoint tensor that several elements of one map hold, and in which parameters."""

    range: str
    held_by: tuple[str, ...]


class MapReport(msgspec.Struct, frozen=True):
    """One map.

    Attributes
    ----------
    copied, empty, opaque
        Parameter elements.
    held, held_share
        Distinct checkpoint elements that some parameter copies, and their share of the checkpoint.
    duplicated
        Copied elements beyond the distinct ones.
    unused
        Checkpoint tensors of which nothing is used, as patterns.
    """

    name: str
    digest: str
    parameters: int
    bytes: int
    copied: int
    empty: int
    opaque: int
    held: int
    held_share: float
    duplicated: int
    unused: tuple[str, ...]
    empty_parameters: tuple[str, ...]
    opaque_parameters: tuple[str, ...]
    duplicates: tuple[DuplicateRow, ...]
    rows: tuple[ParameterRow, ...]


class InspectReport(msgspec.Struct, frozen=True):
    """Everything `transload inspect --json` prints.

    Attributes
    ----------
    missing
        Ranges that no rank holds, alike ones as one: of the maps given, or of all ranks of a declared layout.
    repeated
        Ranges that several ranks hold, or one rank twice, and which.
    formulas
        Lines by parameter (the first of alike ones).
    note
        What `r` is in the formulas, or why there are none.
    """

    checkpoint: CheckpointReport
    maps: tuple[MapReport, ...] = ()
    missing: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    formulas: dict[str, str] = {}
    note: str = ""


def pattern_of(names: Sequence[str]) -> str:
    """Names of one template as a person writes them; a number that differs is a range, or `..` where it has gaps.

    >>> pattern_of(["layers.1.w", "layers.2.w", "layers.3.w"]), pattern_of(["e.0.w", "e.7.w"]), pattern_of(["w"])
    ('layers.{1..3}.w', 'e.{0,7}.w', 'w')
    """
    parts = [split_name(name) for name in names]
    template, text = parts[0][0], parts[0][0][0]
    for place, after in enumerate(template[1:]):
        numbers = sorted({found[place] for _, found in parts})
        first, last = numbers[0], numbers[-1]
        if first == last:
            shown = str(first)
        elif len(numbers) == last - first + 1:
            shown = f"{{{first}..{last}}}"
        else:
            shown = f"{{{','.join(map(str, numbers))}}}" if len(numbers) < 5 else f"{{{first},..,{last}}}"
        text += shown + after
    return text


def _grouped(names: Iterable[str], kinds: Mapping[str, object], *, each: bool) -> list[list[str]]:
    """Names of one template and kind together, in order of their first."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(name if each else (split_name(name)[0], kinds[name]), []).append(name)
    return list(groups.values())


def patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Names by template."""
    listed = list(names)
    return tuple(pattern_of(group) for group in _grouped(listed, dict.fromkeys(listed), each=False))


def report_checkpoint(space: CheckpointSpace, *, each: bool = False) -> CheckpointReport:
    """Tensors, sizes and dtypes; `each` lists every tensor by itself."""
    kinds = {spec.name: (spec.shape, spec.dtype) for spec in space.specs}
    rows: list[TensorRow] = []
    dtypes: dict[str, int] = {}
    for group in _grouped(space.names, kinds, each=each):
        spec = space.spec(group[0])
        size = spec.elements * spec.element_type.bits // 8 * len(group)
        rows.append(TensorRow(pattern_of(group), len(group), spec.shape, spec.dtype, size))
        dtypes[spec.dtype] = dtypes.get(spec.dtype, 0) + size
    return CheckpointReport(len(space), space.total_elements, space.total_bytes, dtypes, tuple(rows))


def report_maps(maps: Mapping[str, SourceMap], *, each: bool = False, only: str | None = None) -> tuple[MapReport, ...]:
    """Every map by its name.

    Parameters
    ----------
    each
        List every parameter by itself.
    only
        Glob pattern of the parameters to list.
    """
    return tuple(_report_map(name, source_map, each=each, only=only) for name, source_map in maps.items())


def report_family(
    report: InspectReport,
    maps: Mapping[tuple[int, int], SourceMap],
    *,
    each: bool = False,
    only: str | None = None,
    formulas: bool = True,
) -> InspectReport:
    """Add what all ranks together hold, and formulas: of the family, or of the first map alone if there are none.

    Parameters
    ----------
    maps
        Of one checkpoint, by rank and degree; of one degree. Not all of its ranks need be there.
    """
    degree = next(iter(maps))[1]
    family, why = _family(maps)
    if len(maps) == degree:
        space = next(iter(maps.values())).space
        holdings = [Holding.of_map(maps[rank, degree]) for rank in range(degree)]
        missing = Expectation(space, None, True).faults(holdings, degree=degree, most=_MOST_FAULTS)
        faults = Expectation(space, None, False).faults(holdings, degree=degree, most=_MOST_FAULTS)
        repeated = [fault for fault in faults if fault.ranks]
    elif family is not None:
        missing = family.prove(replicas=True).faults
        repeated = [fault for fault in family.prove().faults if fault.ranks]
    else:
        missing, repeated = (), []
        why += f"; what {degree} ranks together hold was not counted from {len(maps)} of them"
    note = why or (f"r is a rank of {degree}" if degree > 1 else "")
    if family is None and degree > 1:
        first = next(iter(maps.values()))
        family, _ = _family({(0, 1): first})
        note = f"of the first rank alone, since for all: {why}"
    return msgspec.structs.replace(
        report,
        missing=_alike(missing),
        repeated=_alike(repeated),
        formulas=_lines(family, each=each, only=only) if family is not None and formulas else {},
        note=note if formulas else "",
    )


def _alike(faults: Sequence[Fault]) -> tuple[str, ...]:
    """Faults that differ in the tensor's numbers alone as one line: tensors, range, ranks."""
    groups: dict[tuple[object, str, tuple[int, ...]], list[str]] = {}
    for fault in faults:
        groups.setdefault((split_name(fault.tensor)[0], fault.index, fault.ranks), []).append(fault.tensor)
    lines = []
    for (_, index, ranks), tensors in groups.items():
        who = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        lines.append(pattern_of(tensors) + index + (f" on ranks {who}" if ranks else ""))
    return tuple(lines[:MOST_LISTED])


def _family(maps: Mapping[tuple[int, int], SourceMap]) -> tuple[SymbolicMap | None, str]:
    try:
        return fit(maps), ""
    except FormulaError as error:
        return None, str(error)


def _lines(family: SymbolicMap, *, each: bool, only: str | None) -> dict[str, str]:
    """Formulas by parameter, one of alike ones."""
    kinds = {name: (tuple(map(str, entry.shape)), entry.dtype) for name, entry in family.parameters.items()}
    names = [name for name in family.parameters if only is None or fnmatch.fnmatchcase(name, only)]
    return {pattern_of(group): family.explain(group[0]) for group in _grouped(names, kinds, each=each)}


def _report_map(name: str, source_map: SourceMap, *, each: bool, only: str | None) -> MapReport:
    space, cover = source_map.space, source_map.coverage()
    held = sum(int((cell.runs[:, 1] * cell.runs[:, 3]).sum()) for cell in cut_cells(space, [source_map.held_runs]))
    names = source_map.parameters
    size = sum(source_map[p].elements * dtype_of(source_map.dtype(p)).bits for p in names) // 8
    duplicated = cover.copied_elements - held
    listed = [p for p in names if only is None or fnmatch.fnmatchcase(p, only)]
    empty = [p for p in names if not len(source_map[p].copies) and not source_map[p].opaque]
    return MapReport(
        name,
        source_map.digest(),
        len(names),
        size,
        cover.copied_elements,
        cover.empty_elements,
        cover.opaque_elements,
        held,
        held / space.total_elements if space.total_elements else 1.0,
        duplicated,
        patterns(cover.unused_tensors),
        patterns(empty),
        patterns(source_map.opaque),
        _duplicates(source_map) if duplicated else (),
        _rows(source_map, listed, each=each),
    )


def _rows(source_map: SourceMap, names: Sequence[str], *, each: bool) -> tuple[ParameterRow, ...]:
    counts = {}
    for name in names:
        entry = source_map[name]
        copied, opaque = int(entry.copies.elements.sum()), entry.opaque.elements
        counts[name] = (entry.shape, entry.dtype, len(entry.copies), copied, entry.elements - copied - opaque, opaque)
    rows = []
    for group in _grouped(names, counts, each=each):
        shape, dtype, copies, copied, empty, opaque = counts[group[0]]
        depends = patterns({tensor: None for name in group for tensor in source_map.depends_on(name)})
        many = len(group)
        rows.append(
            ParameterRow(
                pattern_of(group), many, shape, dtype, copies, copied * many, empty * many, opaque * many, depends
            )
        )
    return tuple(rows)


def _duplicates(source_map: SourceMap) -> tuple[DuplicateRow, ...]:
    """Ranges that several elements hold, at most 64; empty where listing them would take too long."""
    tables = [source_map[name].copies for name in source_map.parameters]
    strips = sum(
        float((table.elements // np.where(np.abs(table.source_strides) == 1, table.extents, 1).max(axis=1)).sum())
        for table in tables
        if len(table)
    )
    if strips > _MOST_STRIPS:
        return ()
    rows = source_map.strips.rows
    stops = rows[:, 0] + rows[:, 1]
    edges = np.unique(np.concatenate([rows[:, 0], stops, source_map.space.starts]))
    depth = np.zeros(len(edges), dtype=np.int64)
    np.add.at(depth, np.searchsorted(edges, rows[:, 0]), 1)
    np.add.at(depth, np.searchsorted(edges, stops), -1)
    out: list[DuplicateRow] = []
    for place in np.flatnonzero(np.cumsum(depth)[:-1] > 1)[:MOST_LISTED].tolist():
        start, stop = int(edges[place]), int(edges[place + 1])
        owners = rows[(rows[:, 0] <= start) & (stops >= stop), 2].tolist()
        tensor, first = source_map.space.locate(start)
        index = index_text(source_map.space.spec(tensor).shape, first, first + stop - start)
        out.append(DuplicateRow(tensor + index, tuple(source_map.parameters[owner] for owner in owners)))
    return tuple(out)
