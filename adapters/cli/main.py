"""The `transload` command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

__all__ = ["app", "main"]

# What `plan` and `simulate` both take.
_DeploymentFile = Annotated[Path | None, typer.Argument(help="A deployment file.")]
_SavedMaps = Annotated[Path | None, typer.Option(help="A folder of saved maps instead, <worker>.map.")]
_TopologyFile = Annotated[Path | None, typer.Option(help="A topology file; with --maps, or instead of FILE's own.")]
_Buffer = Annotated[int | None, typer.Option(min=1, help="Bytes of a worker's buffer in each round.")]
_Depth = Annotated[int | None, typer.Option(min=1, help="Rounds under way at once.")]
_RoundOverhead = Annotated[float | None, typer.Option(min=0.0, help="Seconds that a round costs a worker.")]

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
    case: Annotated[str | None, typer.Argument(help="Which case of it; all of them when left out.")] = None,
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
            alone = name is not None
            result = run_benchmark(each, folder, case=case) if alone else run_benchmark_apart(each, folder)
            print_results([result], as_json=as_json)
            good = good and result.ok
    except BenchError as error:
        _fail(str(error))
    if check and not good:
        raise typer.Exit(1)


@app.command()
def soak(
    trials: Annotated[int, typer.Option(min=1, help="How many workers to kill, freeze or cut off.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the first trial; a trial's own makes it again.")] = 0,
    mode: Annotated[str | None, typer.Option(help="Only plain, ss, rs or ss+rs (staging).")] = None,
    fault: Annotated[str | None, typer.Option(help="Only kill, freeze or cut.")] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="No fault: so many updates in a row; does anything grow?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Fault trials of a source checkout: count hangs, wrong bytes, failed survivors and recoveries; all must be 0.

    A worker of a job of six is killed, frozen or cut off at a random moment of an update. Exits with status 1 if
    anything went wrong.
    """
    from adapters.cli.soak import SoakError, run_trials, run_updates

    try:
        if updates is not None:
            ok = run_updates(updates, mode=mode, as_json=as_json).ok
        else:
            ok = run_trials(trials, seed=seed, mode=mode, fault=fault, as_json=as_json).ok
    except SoakError as error:
        _fail(str(error))
    if not ok:
        raise typer.Exit(1)


@app.command()
def plan(
    file: _DeploymentFile = None,
    maps: _SavedMaps = None,
    topology: _TopologyFile = None,
    buffer: _Buffer = None,
    depth: _Depth = None,
    round_overhead: _RoundOverhead = None,
    programs: Annotated[
        int | None, typer.Option(min=1, help="Compile about this many programs; all of 512 workers, 4 beyond.")
    ] = None,
    keep_together: Annotated[
        str | None, typer.Option(help="What stays in one round: tensor, or so many rows of every matrix.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Plan an update without hardware: loads against the bound, rounds, sizes of programs, time and memory."""
    from adapters.cli.plan_commands import PlanCommandError, run_plan

    try:
        run_plan(
            file,
            maps=maps,
            topology=topology,
            buffer_bytes=buffer,
            depth=depth,
            round_overhead_s=round_overhead,
            sample=programs,
            keep_together=keep_together,
            as_json=as_json,
        )
    except PlanCommandError as error:
        _fail(str(error))


@app.command()
def simulate(
    file: _DeploymentFile = None,
    maps: _SavedMaps = None,
    topology: _TopologyFile = None,
    buffer: _Buffer = None,
    depth: _Depth = None,
    round_overhead: _RoundOverhead = None,
    compare: Annotated[bool, typer.Option("--compare", help="Simulate other systems' ways too.")] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of FILE to try, section.key=1,2,4; several are walked together. One row each."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Simulate an update: end to end, stall, the link that binds, against the bound and against other ways."""
    from adapters.cli.plan_commands import PlanCommandError, run_simulate

    try:
        run_simulate(
            file,
            maps=maps,
            topology=topology,
            buffer_bytes=buffer,
            depth=depth,
            round_overhead_s=round_overhead,
            compare=compare,
            vary=vary or (),
            as_json=as_json,
        )
    except PlanCommandError as error:
        _fail(str(error))


@app.command()
def inspect(
    sources: Annotated[list[Path], typer.Argument(help="A checkpoint folder, or saved maps: rank 0, rank 1, ...")],
    layout: Annotated[Path | None, typer.Option(help="A layout file: what each rank keeps of the checkpoint.")] = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="A rule without a file, '*.o_proj.weight=row'; again for more.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which rank of a declared layout to show.")] = 0,
    degree: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a declared layout; by default the file's.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every tensor and parameter, alike ones too.")] = False,
    parameter: Annotated[str | None, typer.Option(help="List only parameters that match this pattern.")] = None,
    formulas: Annotated[bool, typer.Option(help="Also print each parameter as formulas in the rank.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show a checkpoint, a declared layout of it, or saved maps: tensors, copies, coverage, duplicates, formulas."""
    from adapters.cli.inspect import InspectError, run_inspect

    try:
        run_inspect(
            sources,
            layout=layout,
            cuts=cut or [],
            rank=rank,
            degree=degree,
            each=every,
            only=parameter,
            formulas=formulas,
            as_json=as_json,
        )
    except InspectError as error:
        _fail(str(error))


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A saved map.")],
    right: Annotated[Path, typer.Argument(help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare two saved maps: parameter, range, what each says. Exits with status 1 if they differ."""
    from adapters.cli.inspect import InspectError, run_diff

    try:
        same = run_diff(left, right, as_json=as_json)
    except InspectError as error:
        _fail(str(error))
    if not same:
        raise typer.Exit(1)


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
