"""`transload simulate FILE --vary ...`: one deployment with some of its numbers changed, point by point.

::

    transload simulate docs/deployments/qwen3-30b-a3b.toml --compare \\
        --vary rollout.engines=1,2,4 --vary rollout.nodes=1,2,4

The lists are walked together: the first point has the first value of each. A single value holds for every point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.markup import escape
from rich.table import Table

from adapters.cli.plan_report import SimulationReport, load_over_bound, network_copies, report_simulation
from adapters.cli.plan_source import Source, load_source
from adapters.deployments import DeploymentError, UpdateSettings
from transfer_exec.plan import Plan

__all__ = ["SweepPoint", "SweepReport", "run_sweep", "sweep_points", "sweep_table"]

_KEY = re.compile(r"(trainer|rollout|cluster|update)\.\w+")


class SweepPoint(msgspec.Struct, frozen=True):
    """One point.

    Attributes
    ----------
    changes
        What differs from the file.
    link_load_over_bound, trainer_copies_sent, node_ingress_over_need
        As `PlanReport`.
    simulation
        As without a sweep.
    speedups
        Each baseline's end to end over the plan's, if they are compared.
    """

    changes: dict[str, int | float]
    link_load_over_bound: float
    trainer_copies_sent: float
    node_ingress_over_need: float
    simulation: SimulationReport
    speedups: dict[str, float]


class SweepReport(msgspec.Struct, frozen=True):
    """What `transload simulate FILE --vary ... --json` prints; everything is simulated, nothing measured."""

    name: str
    points: list[SweepPoint]


def sweep_points(options: Sequence[str]) -> list[dict[str, int | float]]:
    """The changes of every point, from ``KEY=VALUE,VALUE,...`` each.

    Raises
    ------
    DeploymentError
        If an option has another form, a key is given twice, or lists have different lengths.
    """
    lists: dict[str, list[int | float]] = {}
    for option in options:
        key, _, values = option.partition("=")
        if not _KEY.fullmatch(key):
            raise DeploymentError(f"--vary {option}: expected section.key=value,value with a section of numbers")
        if key in lists:
            raise DeploymentError(f"--vary {option}: {key} is varied twice")
        lists[key] = [_number(option, text) for text in values.split(",")]
    points = max(len(values) for values in lists.values())
    if any(len(values) not in (1, points) for values in lists.values()):
        counts = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise DeploymentError(f"--vary: lists of one length are walked together; {counts}")
    return [{key: values[n % len(values)] for key, values in lists.items()} for n in range(points)]


def _number(option: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise DeploymentError(f"--vary {option}: {text!r} is no number")


def run_sweep(
    file: Path,
    points: Sequence[dict[str, int | float]],
    make: Callable[[Source], tuple[UpdateSettings, Plan]],
    *,
    compare: bool,
) -> SweepReport:
    """Plan, with `make`, and simulate every point.

    Raises
    ------
    DeploymentError, TransferError, LayoutError
        As for one deployment; the message names the point.
    """
    out = []
    name = ""
    for changes in points:
        source = load_source(file, maps=None, topology=None, changes=changes)
        name = source.name
        settings, plan = make(source)
        simulation = report_simulation(source, plan, settings, compare=compare)
        ours = simulation.end_to_end_s
        copies, ingress = network_copies(plan, source)
        out.append(
            SweepPoint(
                changes=changes,
                link_load_over_bound=load_over_bound(plan),
                trainer_copies_sent=copies,
                node_ingress_over_need=ingress,
                simulation=simulation,
                speedups={key: each.end_to_end_s / ours if ours else 1.0 for key, each in simulation.baselines.items()},
            )
        )
    return SweepReport(name, out)


def sweep_table(report: SweepReport) -> Table:
    """One row a point."""
    table = Table(
        title=escape(f"{report.name}, simulated"),
        caption="The last columns are how much longer the baselines take. Nothing here was measured.",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    keys = list(report.points[0].changes)
    baselines = list(report.points[0].speedups)
    headers = [key.replace(".", "\n") for key in keys] + [
        "bound\nms",
        "load over\nbound",
        "end to\nend ms",
        "over\nbound",
    ]
    for header in (*headers, *(name.replace(" ", "\n") for name in baselines)):
        table.add_column(header, justify="right")
    for point in report.points:
        line = point.simulation
        table.add_row(
            *(f"{point.changes[key]:g}" for key in keys),
            f"{line.bound_s * 1e3:,.1f}",
            f"{point.link_load_over_bound:.4f}",
            f"{line.end_to_end_s * 1e3:,.1f}",
            f"{line.end_to_end_over_bound:.3f}",
            *(f"{point.speedups[key]:.2f}x" for key in baselines),
        )
    return table
