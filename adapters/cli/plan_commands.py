"""`transload plan` and `transload simulate`: read, compute, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adapters.cli.plan_report import PlanReport, SimulationReport, report_plan, report_simulation
from adapters.cli.plan_source import Source, load_source
from adapters.cli.plan_sweep import SweepReport, run_sweep, sweep_points, sweep_table
from adapters.deployments import DeploymentError, UpdateSettings
from layout_algebra.errors import LayoutError
from transfer_exec.errors import TransferError
from transfer_exec.plan import Plan
from transfer_exec.planner import make_plan
from transfer_exec.together import Unit

__all__ = ["PlanCommandError", "run_plan", "run_simulate"]


class PlanCommandError(RuntimeError):
    """What was asked cannot be done; the message is for a person."""


def run_plan(
    file: Path | None,
    *,
    maps: Path | None,
    topology: Path | None,
    buffer_bytes: int | None,
    depth: int | None,
    round_overhead_s: float | None,
    sample: int | None,
    keep_together: str | None,
    as_json: bool,
) -> None:
    """Plan, compile all programs, print.

    Raises
    ------
    PlanCommandError
        With the file and the place in it.
    """
    try:
        source = load_source(file, maps=maps, topology=topology)
        settings = _settings(source, buffer_bytes, depth, round_overhead_s)
        _, report = report_plan(source, settings, sample=sample, keep_together=_unit(keep_together))
    except (DeploymentError, TransferError, LayoutError) as error:
        raise PlanCommandError(f"transload plan: {error}") from error
    _print(report, as_json=as_json)


def run_simulate(
    file: Path | None,
    *,
    maps: Path | None,
    topology: Path | None,
    buffer_bytes: int | None,
    depth: int | None,
    round_overhead_s: float | None,
    compare: bool,
    vary: Sequence[str],
    as_json: bool,
) -> None:
    """Plan, simulate the plan and with `compare` the baselines, print; with `vary` point by point.

    Raises
    ------
    PlanCommandError
        With the file and the place in it.
    """

    def make(source: Source) -> tuple[UpdateSettings, Plan]:
        settings = _settings(source, buffer_bytes, depth, round_overhead_s)
        return settings, make_plan(
            source.correspondence,
            source.topology,
            buffer_bytes=settings.buffer_bytes,
            round_overhead_s=settings.round_overhead_s,
            depth=settings.depth,
        )

    report: SimulationReport | SweepReport
    try:
        if vary:
            if file is None or topology is not None:
                raise DeploymentError("--vary changes numbers of a deployment file; give one, and no --topology")
            report = run_sweep(file, sweep_points(vary), make, compare=compare)
        else:
            source = load_source(file, maps=maps, topology=topology)
            settings, plan = make(source)
            report = report_simulation(source, plan, settings, compare=compare)
    except (DeploymentError, TransferError, LayoutError) as error:
        raise PlanCommandError(f"transload simulate: {error}") from error
    _print(report, as_json=as_json)


def _settings(
    source: Source, buffer_bytes: int | None, depth: int | None, round_overhead_s: float | None
) -> UpdateSettings:
    given = source.update
    return UpdateSettings(
        given.buffer_bytes if buffer_bytes is None else buffer_bytes,
        given.depth if depth is None else depth,
        given.round_overhead_s if round_overhead_s is None else round_overhead_s,
    )


def _unit(text: str | None) -> Unit | None:
    if text is None:
        return None
    if text == "tensor":
        return "tensor"
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise DeploymentError(f"--keep-together {text}: expected tensor, or a number of rows above zero")
    return int(text)


def _print(report: PlanReport | SimulationReport | SweepReport, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return
    match report:
        case PlanReport():
            made = _plan_table(report)
        case SimulationReport():
            made = _simulation_table(report)
        case _:
            made = sweep_table(report)
    Console(highlight=False, emoji=False, width=max(110, Console().width)).print(made)


def _plan_table(report: PlanReport) -> Table:
    table = Table(title=escape(report.name), box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    rows = {
        "model": f"{report.model_bytes / 1e9:,.1f} GB",
        "workers": f"{report.trainers} trainers, {report.rollouts} rollouts, {report.distinct_maps} distinct maps",
        "plan": f"{report.demand_classes} demand classes, {report.routes} routes, {report.rounds} rounds of at most "
        f"{report.buffer_bytes / 2**20:,.0f} MiB a worker",
        "bound": f"{report.bound_s * 1e3:,.2f} ms, {report.bound_link}",
        "largest link load": f"{report.load_s * 1e3:,.2f} ms, {report.link_load_over_bound:.4f} of the bound, "
        f"{report.load_s / (report.optimum_s or 1.0):.4f} of the program's optimum",
        "trainers send": f"{report.trainer_copies_sent:.4f} copies",
        "a node receives": f"at most {report.node_ingress_over_need:.4f} of what it needs",
        "messages": f"{report.messages:,} a round, no worker has more than {report.peers_max} peers",
        "fullest round": f"{report.round_load_over_average:.4f} of an average round's largest link load",
        "programs": f"{report.programs} of {report.trainers + report.rollouts} compiled, "
        f"largest {report.program_bytes_max / 2**10:,.0f} KiB, together {report.program_bytes_sum / 2**20:,.1f} MiB",
        "seconds": f"maps {report.map_seconds:.2f}, correspondence {report.correspond_seconds:.2f}, "
        f"plan {report.plan_seconds:.2f}, programs {report.program_seconds:.2f}",
        "peak memory": f"{report.peak_rss_bytes / 2**30:.2f} GiB",
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def _simulation_table(report: SimulationReport) -> Table:
    table = Table(
        title=escape(f"{report.name}, simulated"),
        caption=f"Bound {report.bound_s * 1e3:,.2f} ms. Depth {report.depth}, "
        f"{report.round_overhead_s * 1e3:g} ms a round. Nothing here was measured.",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("rounds", "end to end\nms", "over\nbound", "stall\nms", "over\nbound"):
        table.add_column(name, justify="right")
    table.add_column("binding link", no_wrap=True)
    for name, line in (("plan", report), *report.baselines.items()):
        table.add_row(
            name,
            f"{line.rounds}",
            f"{line.end_to_end_s * 1e3:,.1f}",
            f"{line.end_to_end_over_bound:.3f}",
            f"{line.stall_s * 1e3:,.1f}",
            f"{line.stall_over_bound:.3f}",
            escape(line.binding_link),
        )
    return table
