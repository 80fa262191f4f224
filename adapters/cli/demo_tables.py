"""A demo's result as tables for a person: discovered, planned, timed, proven."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from adapters.cli.demo_cluster import demo_topology
from adapters.cli.demo_result import DemoResult, LiveSize, ModelSize, UpdateResult
from adapters.connect_report import ConnectReport

__all__ = ["print_result"]


def print_result(result: DemoResult, console: Console) -> None:
    """Print all tables and the verdict."""
    console.print(_model_line(result.model))
    console.print(_discovered(result.live, result.connect))
    console.print(_planned(result.connect))
    console.print(_timed(result.seconds))
    console.print(_proven(result.updates))
    if result.dump is not None:
        console.print(f"Written to {result.dump}: checkpoint/, engine-<e>-<r>.safetensors, engine-<e>-<r>.map")
    if result.verified:
        console.print("[bold green]Verified[/]: every bit of every rollout equals what its own loader makes of the")
        console.print("checkpoint that the trainers saved, and so do the logits of a fixed prompt.")
    else:
        console.print("[bold red]Not verified[/]: the differences are named on standard error.")


def _model_line(model: ModelSize) -> str:
    return (
        f"Qwen3-MoE, {model.layers} layers: {model.checkpoint_tensors} checkpoint tensors, "
        f"{model.elements:,} bfloat16 parameters, {_bytes(model.bytes)}"
    )


def _discovered(live: tuple[LiveSize, ...], report: ConnectReport) -> Table:
    unused = ", ".join(f"{side} {len(names)}" for side, names in report.unused.items())
    table = _table(
        "Discovered by running each worker's own load_weights",
        "worker",
        "tensors",
        "memory",
        "empty shards",
        "slice copies",
        "copied",
        "empty",
        "opaque",
        caption="copied, empty, opaque: elements of the worker's memory that are copies of checkpoint elements, that "
        f"no load writes (buffers), that are computed. Of {report.tensors} checkpoint tensors unused: {unused}",
    )
    for size in live:
        found = report.worker(size.worker)
        table.add_row(
            size.worker,
            f"{size.tensors}",
            _bytes(size.bytes),
            f"{size.empty_shards}",
            f"{found.slice_copies}",
            f"{found.copied_elements:,}",
            f"{found.empty_elements:,}",
            f"{found.opaque_elements:,}",
        )
    return table


def _planned(report: ConnectReport) -> Table:
    topology = demo_topology()
    stages = tuple(stage.stage for stage in report.workers[0].stages)
    table = _table(
        "Planned: bytes of one update by worker and stage",
        "worker",
        "node",
        *(f"sends, {stage}" for stage in stages),
        *(f"gets, {stage}" for stage in stages),
        caption=f"{report.rounds} rounds of at most {_bytes(report.buffer_bytes)} a worker, over {report.transport}. "
        f"On the links assumed: bound {_ms(report.lower_bound_s)} ({report.bound_link}), optimum "
        f"{_ms(report.optimum_s)}, this plan {_ms(report.planned_s)}. Plan {report.plan_digest[:16]}",
    )
    for each in report.workers:
        table.add_row(
            each.worker,
            f"{topology.node_of(each.worker)}",
            *(_bytes(stage.sent) for stage in each.stages),
            *(_bytes(stage.received) for stage in each.stages),
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
        "Proven against a checkpoint saved from the trainers",
        "update",
        "loss",
        "weights changed",
        "trainers sent",
        "model",
        "rollouts received",
        "rollouts need",
        "bits compared",
        "logits compared",
        "proof",
    )
    for each in updates:
        table.add_row(
            f"{each.version}",
            f"{each.loss:.3f}",
            f"{each.changed_elements:,}",
            f"{each.bytes_sent_by_trainers:,}",
            f"{each.model_bytes:,}",
            " + ".join(f"{rollout.bytes_received:,}" for rollout in each.rollouts),
            " + ".join(f"{rollout.bytes_needed:,}" for rollout in each.rollouts),
            f"{8 * each.bytes_compared:,} in {each.tensors_compared} tensors",
            f"{each.logits_compared:,}",
            "[green]equal[/]" if each.verified else f"[red]{len(each.differences)} differences[/]",
        )
    return table


def _table(title: str, first: str, *others: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _bytes(number: int) -> str:
    return f"{number / 2**20:.2f} MiB" if number >= 1 << 20 else f"{number / 2**10:.1f} KiB" if number else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
