"""`transload bench`: find the benchmarks of a source checkout, run them, print rows.

Every benchmark runs in a process of its own when several are asked for, so that none inherits another's memory.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from rich.console import Console
from rich.table import Table

from adapters.cli.benchmark import BenchResult, Machine, Row, this_machine

__all__ = ["BenchError", "bench_table", "find_benchmarks", "run_benchmark", "run_benchmark_apart"]


class BenchError(RuntimeError):
    """There is no such benchmark, no checkout, or the benchmark did not give rows."""


def find_benchmarks(folder: Path | None = None) -> dict[str, Path]:
    """Benchmark name -> file, in name order.

    Parameters
    ----------
    folder
        By default `tests/benchmarks` of the checkout that this package is imported from.

    Raises
    ------
    BenchError
        The folder does not exist, as in an installation from a wheel.
    """
    if folder is None:
        folder = Path(__file__).resolve().parents[2] / "tests" / "benchmarks"
    if not folder.is_dir():
        raise BenchError(
            f"benchmarks: expected the folder {folder}, which is not there; they belong to the source checkout and are "
            "not installed: clone the repository and install it with `pip install -e '.[torch,test]'`"
        )
    return {
        path.stem: path
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith(("_", "test_")) and path.stem != "conftest"
    }


def run_benchmark(name: str, folder: Path | None = None, *, case: str | None = None) -> BenchResult:
    """Run one benchmark in this process.

    Parameters
    ----------
    name, folder
        Which, and where.
    case
        Only this case: a name in the benchmark's `cases()`, or the beginning of the names of some of its rows.

    Raises
    ------
    BenchError
        No such benchmark or case, or its `rows()` gave something else than a list of `Row`.
    """
    path = _known(name, folder)
    machine = this_machine()
    module = _import_file(name, path)
    if not callable(getattr(module, "rows", None)):
        raise BenchError(f"benchmark {name}: expected a function rows() in {path}, got none")
    apart = module.cases() if callable(getattr(module, "cases", None)) else {}
    rows = apart[case]() if case in apart else module.rows()
    if case is not None and case not in apart:
        known = [row.case for row in rows]
        rows = [row for row in rows if row.case.startswith(case)]
        if not rows:
            raise BenchError(f"benchmark {name}: no case begins with {case!r}; there are {', '.join([*apart, *known])}")
    if not (isinstance(rows, list) and rows and all(isinstance(row, Row) for row in rows)):
        raise BenchError(f"benchmark {name}: expected rows() to return a non-empty list of Row, got {rows!r}")
    return BenchResult(name=name, rows=tuple(rows), machine=machine)


def run_benchmark_apart(name: str, folder: Path | None = None) -> BenchResult:
    """`run_benchmark` in a fresh process; its error output passes through."""
    _known(name, folder)
    command = [sys.executable, "-m", "adapters.cli.main", "bench", name, "--json"]
    if folder is not None:
        command += ["--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise BenchError(f"benchmark {name}: its process ended with exit status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=BenchResult)


def bench_table(result: BenchResult) -> Table:
    """The rows as a table; the caption is the machine."""
    table = Table(title=f"benchmark {result.name}", caption=_caption(result.machine))
    table.add_column("case")
    for title in ("value", "floor", "ratio", "bar"):
        table.add_column(title, justify="right")
    table.add_column("ok")
    for row in result.rows:
        table.add_row(
            row.case,
            f"{row.value:.4g} {row.unit}",
            f"{row.floor:.4g} {row.unit}",
            f"{row.ratio:.2f}",
            "-" if row.bar is None else f"{row.bar:g}",
            "[green]yes[/]" if row.ok else "[red]no[/]",
        )
    return table


def print_results(results: Sequence[BenchResult], *, as_json: bool) -> None:
    """Every result: one JSON object a line, or a table."""
    console = Console()
    for result in results:
        if as_json:
            print(msgspec.json.encode(result).decode(), flush=True)
        else:
            console.print(bench_table(result))


def _known(name: str, folder: Path | None) -> Path:
    known = find_benchmarks(folder)
    if name not in known:
        raise BenchError(f"benchmark {name}: there is none of that name; there are {', '.join(known) or 'none'}")
    return known[name]


def _import_file(name: str, path: Path) -> ModuleType:
    # Benchmarks import their neighbours as tests do, from the root of the checkout.
    sys.path.insert(0, str(path.parents[2]))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _caption(machine: Machine) -> str:
    return (
        f"{machine.cpu}, {machine.cores} cores, load {machine.load_1min:.1f}, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, Python {machine.python}, "
        + ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    )
