"""The `transload` command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Entry point of the `transload` command."""
    app()


def _print_version(value: bool) -> None:
    if value:
        try:
            version = importlib.metadata.version("transload")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed, run from source)"
        print(f"transload {version}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Moves new RL weights from trainers to rollout engines, in any layout, once, with proof."""


@app.command()
def demo(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model, about four million bytes each.")] = 4,
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps, each followed by an update.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option(help="After the last update write the trainers' checkpoint, live tensors and source maps here."),
    ] = None,
    spoil: Annotated[
        bool, typer.Option(help="Flip one bit of one rollout before the last proof, to see the proof fail.")
    ] = False,
) -> None:
    """Real weights from four FSDP2 trainers to two tensor-parallel engines, with proof.

    Starts eight real processes on this machine and exits with status 1 if a single bit is wrong.
    """
    missing = [name for name in ("torch", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"transload demo: {', '.join(missing)} not installed; install it with: pip install 'transload[demo]'")
    from adapters.cli.demo import run_demo

    raise typer.Exit(run_demo(layers=layers, updates=updates, as_json=as_json, dump=dump, spoil=spoil))


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; all of them when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each benchmark.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 when a row misses its bar.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the benchmarks are; by default in this checkout.")] = None,
) -> None:
    """Run benchmarks of a source checkout: each row is a value against a floor taken in the same run."""
    from adapters.cli.bench import BenchError, find_benchmarks, print_results, run_benchmark, run_benchmark_apart

    try:
        if list_names:
            print("\n".join(find_benchmarks(folder)))
            return
        good = True
        for each in [name] if name is not None else list(find_benchmarks(folder)):
            result = run_benchmark(each, folder) if name is not None else run_benchmark_apart(each, folder)
            print_results([result], as_json=as_json)
            good = good and result.ok
    except BenchError as error:
        _fail(str(error))
    if check and not good:
        raise typer.Exit(1)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
