"""`transload inspect` and `transload diff`: read checkpoints, layouts and maps, print what they say.

::

    transload inspect Qwen3-8B                                          # tensors, sizes, dtypes
    transload inspect Qwen3-8B --layout layout.toml --rank 3            # and what rank 3 keeps, with formulas
    transload inspect Qwen3-8B --cut '*.o_proj.weight=row' --degree 8
    transload inspect engine-0-0.map engine-0-1.map                     # saved maps: rank 0 and rank 1
    transload diff before.map after.map                                 # status 1 if they differ

Nothing here needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adapters.checkpoint import Checkpoint
from adapters.cli.inspect_report import (
    CheckpointReport,
    InspectReport,
    MapReport,
    report_checkpoint,
    report_family,
    report_maps,
)
from adapters.cli.layout_rules import rules_of_options, rules_of_toml
from adapters.deployments import named
from adapters.failures import CheckpointError
from layout_algebra.errors import LayoutError
from layout_algebra.map_diff import Difference, differences
from layout_algebra.source_map import SourceMap

_ALL_RANKS = 8
"""Up to how many ranks of a declared layout are all made; of more, some."""
_PAGE_WIDTH = 160

__all__ = ["InspectError", "read_map", "run_diff", "run_inspect"]


class InspectError(RuntimeError):
    """What was asked cannot be shown; the message names the file."""


def run_inspect(
    sources: Sequence[Path],
    *,
    layout: Path | None = None,
    cuts: Sequence[str] = (),
    rank: int = 0,
    degree: int | None = None,
    each: bool = False,
    only: str | None = None,
    formulas: bool = True,
    as_json: bool = False,
) -> None:
    """Print a checkpoint, a declared layout of it, or saved maps.

    Raises
    ------
    InspectError
        With the file and what is wrong with it.
    """
    try:
        report = _report(
            sources, layout=layout, cuts=cuts, rank=rank, degree=degree, each=each, only=only, formulas=formulas
        )
    except (LayoutError, CheckpointError) as error:
        raise InspectError(f"transload inspect: {error}") from error
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return
    console = _console()
    for table in _tables(report):
        console.print(table)


def run_diff(left: Path, right: Path, *, as_json: bool = False) -> bool:
    """Print what two maps do not agree on; whether they agree.

    Raises
    ------
    InspectError
        If a file is no map.
    """
    try:
        found = differences(read_map(left), read_map(right))
    except LayoutError as error:
        raise InspectError(f"transload diff: {error}") from error
    if as_json:
        said = {"left": named(left), "right": named(right), "same": not found, "differences": found}
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
    elif found:
        _console().print(_diff_table(left, right, found))
    else:
        print(f"{left} and {right} say the same")
    return not found


def read_map(path: Path) -> SourceMap:
    """A saved map; InspectError if there is none."""
    try:
        return SourceMap.from_bytes(path.read_bytes())
    except OSError as error:
        why = error.strerror or error
        raise InspectError(f"{path}: {why}; expected a map as SourceMap.to_bytes writes it") from error
    except LayoutError as error:
        raise InspectError(f"{path}: {error}") from error


def _report(
    sources: Sequence[Path],
    *,
    layout: Path | None,
    cuts: Sequence[str],
    rank: int,
    degree: int | None,
    each: bool,
    only: str | None,
    formulas: bool,
) -> InspectReport:
    if not sources:
        raise InspectError("transload inspect: give a checkpoint folder, or saved maps")
    folders = [path for path in sources if path.is_dir()]
    if folders and len(sources) > 1:
        raise InspectError(f"transload inspect: {folders[0]} is a folder; give one checkpoint, or saved maps")
    if not folders:
        if layout is not None or cuts:
            raise InspectError(f"transload inspect: {sources[0]} is no folder; a layout is declared of a checkpoint")
        return _of_maps({named(path): read_map(path) for path in sources}, each=each, only=only, formulas=formulas)
    space = Checkpoint.open(sources[0]).space
    report = InspectReport(report_checkpoint(space, each=each))
    if layout is None and not cuts:
        return report
    if layout is not None and cuts:
        raise InspectError("transload inspect: give --layout or --cut, not both")
    rules = rules_of_toml(layout) if layout is not None else rules_of_options(cuts, degree or 1)
    of = degree or rules.degree
    declared = rules.declare(space, rank, of)
    ranks = range(of) if of <= _ALL_RANKS else sorted({0, 1, 2, of // 2, of - 1, rank})
    family = {(each_rank, of): rules.declare(space, each_rank, of) for each_rank in ranks}
    maps = report_maps({f"rank {rank} of {of}": declared}, each=each, only=only)
    return report_family(msgspec.structs.replace(report, maps=maps), family, each=each, only=only, formulas=formulas)


def _of_maps(maps: dict[str, SourceMap], *, each: bool, only: str | None, formulas: bool) -> InspectReport:
    names = list(maps)
    for name in names[1:]:
        if maps[name].space != maps[names[0]].space:
            raise InspectError(f"transload inspect: {names[0]} and {name} are of different checkpoints")
    report = InspectReport(report_checkpoint(maps[names[0]].space, each=each), report_maps(maps, each=each, only=only))
    family = {(rank, len(names)): maps[name] for rank, name in enumerate(names)}
    return report_family(report, family, each=each, only=only, formulas=formulas)


def _tables(report: InspectReport) -> list[Table | str]:
    out: list[Table | str] = [_checkpoint_table(report.checkpoint)] if not report.maps else []
    for each in report.maps:
        out += [_summary_table(report.checkpoint, each), _parameter_table(each)]
        if each.duplicates:
            out.append(_duplicate_table(each))
    if report.maps:
        out.append(_together_table(report))
    if report.formulas or report.note:
        out.append(_formula_text(report))
    return out


def _console() -> Console:
    """The terminal, or a page wide enough for names where there is none."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, emoji=False, soft_wrap=True, width=_PAGE_WIDTH)


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE, title_justify="left", show_header=bool(columns))
    for column in columns:
        table.add_column(escape(column), justify="right" if column in right else "left", overflow="fold")
    return table


def _bytes(count: int) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _checkpoint_table(report: CheckpointReport) -> Table:
    table = _table(
        f"{report.tensors:,} tensors, {report.elements:,} elements, {_bytes(report.bytes)}",
        *("tensor", "number", "shape", "dtype", "bytes"),
        right=("number", "bytes"),
    )
    for row in report.rows:
        table.add_row(escape(row.name), f"{row.tensors:,}", _shape(row.shape), row.dtype, _bytes(row.bytes))
    table.caption = ", ".join(f"{dtype} {_bytes(count)}" for dtype, count in report.dtypes.items())
    return table


def _summary_table(checkpoint: CheckpointReport, report: MapReport) -> Table:
    table = Table(title=escape(report.name), box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    total = max(1, report.copied + report.empty + report.opaque)
    rows = {
        "parameters": f"{report.parameters:,}, {_bytes(report.bytes)}, digest {report.digest}",
        "elements": f"{report.copied:,} copied ({report.copied / total:.2%}), {report.empty:,} empty, "
        f"{report.opaque:,} opaque",
        "of the checkpoint": f"{report.held:,} of {checkpoint.elements:,} elements ({report.held_share:.2%})",
        "held twice or more": f"{report.duplicated:,} elements beyond the first",
        "unused tensors": ", ".join(report.unused) or "none",
        "empty parameters": ", ".join(report.empty_parameters) or "none",
        "opaque parameters": ", ".join(report.opaque_parameters) or "none",
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def _parameter_table(report: MapReport) -> Table:
    numbers = ("number", "copies", "copied", "empty", "opaque")
    computed = any(row.depends_on for row in report.rows)
    table = _table(
        "", "parameter", "number", "shape", "dtype", *numbers[1:], *["computed from"] * computed, right=numbers
    )
    for row in report.rows:
        counts = (f"{count:,}" for count in (row.copies, row.copied, row.empty, row.opaque))
        name, depends = escape(row.name), [escape(", ".join(row.depends_on))] * computed
        table.add_row(name, f"{row.parameters:,}", _shape(row.shape), row.dtype, *counts, *depends)
    return table


def _duplicate_table(report: MapReport) -> Table:
    table = _table("held by several elements", "range", "in")
    for row in report.duplicates:
        table.add_row(escape(row.range), escape(", ".join(row.held_by)))
    return table


def _together_table(report: InspectReport) -> Table:
    table = Table(title="all ranks together", box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("held by none", escape("\n".join(report.missing) or "nothing"))
    table.add_row("held by several", escape("\n".join(report.repeated) or "nothing"))
    return table


def _formula_text(report: InspectReport) -> str:
    heads = ["formulas" + (f" ({report.note})" if report.note else "")]
    return escape(
        "\n".join([*heads, *(f"  {line}" for text in report.formulas.values() for line in text.splitlines())])
    )


def _diff_table(left: Path, right: Path, found: Sequence[Difference]) -> Table:
    title = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    table = _table(title, "parameter", "range", "what", named(left), named(right))
    for each in found:
        table.add_row(*(escape(text) for text in (each.parameter, each.where, each.kind, each.left, each.right)))
    return table
