"""A demo's result as tables for a person: discovered, planned, timed, proven. They fit a terminal of 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from adapters.cli.demo_cluster import demo_topology
from adapters.cli.demo_result import DemoResult, LiveSize, UpdateResult
from adapters.connect_report import ConnectReport

__all__ = ["print_result"]


def print_result(result: DemoResult, console: Console) -> None:
    """Print all tables and the verdict."""
    model = result.model
    console.print(
        f"Qwen3-MoE, {model.layers} layers: {model.checkpoint_tensors} checkpoint tensors, "
        f"{model.elements:,} bfloat16 parameters, {model.bytes:,} bytes"
    )
    console.print(_discovered(result.live, result.connect))
    console.print(_planned(result.connect))
    console.print(_timed(result.seconds))
    console.print(_proven(result.updates))
    if result.dump is not None:
        console.print(f"In {result.dump}: checkpoint/, engine-<e>-<r>.safetensors and engine-<e>-<r>.map")
    if result.verified:
        console.print(
            "[bold green]Verified[/]: every bit of every rollout equals what its own loader makes of the checkpoint "
            "that the trainers saved, and so do the logits of a fixed prompt."
        )
    else:
        console.print("[bold red]Not verified[/]: the differences are named on standard error.")


def _discovered(live: tuple[LiveSize, ...], report: ConnectReport) -> Table:
    unused = ", ".join(f"{side} {len(names)}" for side, names in report.unused.items())
    table = _table(
        "Discovered, by running each worker's own load_weights",
        "worker",
        "tensors",
        "MiB",
        "empty\nshards",
        "slice\ncopies",
        "elements\ncopied",
        "\nempty",
        "\nopaque",
        caption="Copied from checkpoint elements, left alone by every load (buffers), or computed. "
        f"Of {report.tensors} checkpoint tensors unused: {unused}.",
    )
    for size in live:
        found = report.worker(size.worker)
        table.add_row(
            size.worker,
            f"{size.tensors}",
            _mib(size.bytes),
            f"{size.empty_shards}",
            f"{found.slice_copies}",
            f"{found.copied_elements:,}",
            f"{found.empty_elements:,}",
            f"{found.opaque_elements:,}",
        )
    return table


def _planned(report: ConnectReport) -> Table:
    stages = tuple(stage.stage for stage in report.workers[0].stages)
    table = _table(
        "Planned, in MiB of one update by worker and stage",
        "worker",
        *(f"{'sends' if stage == stages[0] else ''}\n{stage}" for stage in stages),
        *(f"{'gets' if stage == stages[0] else ''}\n{stage}" for stage in stages),
        caption=f"Nodes: {' | '.join(' '.join(node.workers) for node in demo_topology().nodes)}.\n"
        f"{report.rounds} rounds of at most {report.buffer_bytes:,} bytes a worker, over {report.transport}; plan "
        f"{report.plan_digest[:16]}. On links of 12.5 GB/s: bound {_ms(report.lower_bound_s)} ({report.bound_link}), "
        f"optimum {_ms(report.optimum_s)}, this plan {_ms(report.planned_s)}.",
    )
    for each in report.workers:
        table.add_row(
            each.worker,
            *(_mib(stage.sent) for stage in each.stages),
            *(_mib(stage.received) for stage in each.stages),
        )
    return table


def _timed(seconds: dict[str, float]) -> Table:
    table = _table("Time of each phase", "phase", "seconds")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}")
    table.add_section()
    table.add_row("all", f"{sum(seconds.values()):.2f}")
    return table


def _proven(updates: tuple[UpdateResult, ...]) -> Table:
    table = _table(
        "Proven, against a checkpoint that the trainers saved", "", *(f"update {one.version}" for one in updates)
    )
    table.add_row("loss before the step", *(f"{one.loss:.4f}" for one in updates))
    table.add_row("weights that the step changed", *(f"{one.changed_elements:,}" for one in updates))
    table.add_row("bytes of the model", *(f"{one.model_bytes:,}" for one in updates))
    table.add_row("bytes sent by all trainers", *(f"{one.bytes_sent_by_trainers:,}" for one in updates))
    for place in range(len(updates[0].rollouts)):
        both = [one.rollouts[place] for one in updates]
        table.add_row(f"bytes {both[0].worker} needs", *(f"{one.bytes_needed:,}" for one in both))
        table.add_row(f"bytes {both[0].worker} received", *(f"{one.bytes_received:,}" for one in both))
    table.add_row("publication, seconds", *(f"{one.measured.publication_s:.3f}" for one in updates))
    table.add_row("rollouts paused, seconds", *(f"{one.measured.rollout_pause_s:.3f}" for one in updates))
    table.add_row("rollout bits compared", *(f"{8 * one.bytes_compared:,}" for one in updates))
    table.add_row("logits compared", *(f"{one.logits_compared:,}" for one in updates))
    table.add_row(
        "proof", *("[green]equal[/]" if one.verified else f"[red]{len(one.differences)} wrong[/]" for one in updates)
    )
    return table


def _table(title: str, first: str, *others: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _mib(number: int) -> str:
    return f"{number / 2**20:.3f}" if number else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
