"""A plan as bytes: compact, versioned, checked, and harmless when they come from a stranger.

In an envelope (``layout_algebra.sealed_bytes``) lies one msgpack array. Workers are numbered as in ``Plan.workers``;
routes, runs and hops are integer tables kept as differences from row to row, which the likeness of neighbouring routes
makes small. ``plan_digest`` hashes what is inside the envelope, so it does not depend on the compressor.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import LayoutError
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import Budget, Packed, pack_table, seal, unpack_table, unseal
from layout_algebra.space import MAX_ELEMENTS
from transfer_exec.errors import PlanBytesError, PlanError

if TYPE_CHECKING:
    from transfer_exec.plan import Plan

_MAGIC = b"TLPLAN\x00\x02"
MAX_BYTES = 1 << 31
"""Largest unpacked size that ``decode_plan`` accepts."""
MAX_NUMBERS = 1 << 28
"""Most integers, over all tables, that ``decode_plan`` accepts."""
MAX_STRETCHES = 1 << 27
"""Most stretches of consecutive ids, over all runs, that ``decode_plan`` accepts."""

_ANY_ROUNDS = 64
"""A plan may have so many, however little it moves."""


class _Plan(msgspec.Struct, array_like=True, frozen=True):
    space_digest: str
    holders: tuple[str, ...]
    needers: tuple[str, ...]
    nodes: tuple[int, ...]
    clusters: tuple[int, ...]
    groups: Packed | None
    rounds: int
    buffer_bytes: int
    lower_bound_s: float
    bound_link: str
    optimum_s: float
    load_s: float
    routes: Packed
    runs: Packed
    hops: Packed


def encode_plan(plan: Plan) -> bytes:
    """Serialize a plan."""
    return seal(_MAGIC, _plain(plan))


def plan_digest(plan: Plan) -> str:
    """Hex digest of a plan's content."""
    return hashlib.blake2b(_MAGIC + _plain(plan), digest_size=16).hexdigest()


def decode_plan(data: bytes) -> Plan:
    """Read ``encode_plan``'s output.

    Raises
    ------
    PlanBytesError
        For anything that ``encode_plan`` of this version did not write, and for a plan that breaks a law.
    """
    try:
        plain = unseal(data, _MAGIC, what="a plan", limit=MAX_BYTES, error=LayoutError)
        return _rebuild(msgspec.msgpack.decode(plain, type=_Plan))
    except PlanBytesError:
        raise
    except PlanError as error:
        raise PlanBytesError(f"plan breaks a law: {error}") from error
    except (LayoutError, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise PlanBytesError(f"no plan: {error}") from error


def _plain(plan: Plan) -> bytes:
    number = {worker: position for position, worker in enumerate(plan.workers)}
    routes = [(len(r.runs), r.item_bytes, number[r.holder], len(r.hops)) for r in plan.routes]
    runs = [r.runs.runs for r in plan.routes]
    return msgspec.msgpack.encode(
        _Plan(
            plan.space_digest,
            plan.holders,
            plan.needers,
            plan.nodes,
            plan.clusters,
            None if plan.groups is None else pack_table(np.stack([plan.groups.starts, plan.groups.rounds], axis=1)),
            plan.rounds,
            plan.buffer_bytes,
            plan.lower_bound_s,
            plan.bound_link,
            plan.optimum_s,
            plan.load_s,
            pack_table(np.array(routes, dtype=np.int64).reshape(-1, 4)),
            pack_table(np.concatenate(runs) if runs else np.empty((0, 4), dtype=np.int64)),
            pack_table(np.stack([plan.hops.stage, plan.hops.source, plan.hops.target], axis=1)),
        )
    )


def _rebuild(packed: _Plan) -> Plan:
    from transfer_exec.plan import Hop, Plan, Route, Stage
    from transfer_exec.schedule import Groups

    workers = packed.holders + packed.needers
    budget = Budget(MAX_NUMBERS)
    routes, runs, hops = (
        _unpack(table, columns, budget) for table, columns in ((packed.routes, 4), (packed.runs, 4), (packed.hops, 3))
    )
    _check_rows(routes, runs, hops, len(workers))
    groups = None if packed.groups is None else Groups(*_unpack(packed.groups, 2, budget).T)
    stages = list(Stage)
    steps = [Hop(stages[stage], workers[source], workers[target]) for stage, source, target in hops.tolist()]
    rows: list[Route] = []
    run_at = hop_at = 0
    for run_count, item_bytes, holder, hop_count in routes.tolist():
        mine = runs[run_at : run_at + run_count]
        table = RunTable.from_runs(mine)
        if not np.array_equal(table.runs, mine):
            raise PlanBytesError(f"route {len(rows)}: its runs are not in normal form")
        rows.append(Route(table, item_bytes, workers[holder], tuple(steps[hop_at : hop_at + hop_count])))
        run_at += run_count
        hop_at += hop_count
    elements = sum(row.runs.elements for row in rows)
    if packed.rounds > max(_ANY_ROUNDS, elements):
        raise PlanBytesError(f"{packed.rounds:,} rounds for {elements:,} elements to be moved")
    return Plan(
        space_digest=packed.space_digest,
        holders=packed.holders,
        needers=packed.needers,
        nodes=packed.nodes,
        routes=tuple(rows),
        rounds=packed.rounds,
        buffer_bytes=packed.buffer_bytes,
        lower_bound_s=packed.lower_bound_s,
        bound_link=packed.bound_link,
        optimum_s=packed.optimum_s,
        load_s=packed.load_s,
        clusters=packed.clusters,
        groups=groups,
    )


def _check_rows(routes: IdArray, runs: IdArray, hops: IdArray, workers: int) -> None:
    """Everything that must hold before a table is used as sizes or indices."""
    counts = routes[:, [0, 3]]
    if len(routes) and (int(counts.min()) < 0 or int(counts.max()) > max(len(runs), len(hops))):
        raise PlanBytesError("a route counts runs or hops that are not there")
    if int(routes[:, 0].sum()) != len(runs) or int(routes[:, 3].sum()) != len(hops):
        raise PlanBytesError("the routes' runs and hops do not add up to the tables")
    numbers = np.concatenate([routes[:, 2], hops[:, 1], hops[:, 2]])
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= workers):
        raise PlanBytesError(f"a worker's number is outside 0:{workers}")
    if len(hops) and (int(hops[:, 0].min()) < 0 or int(hops[:, 0].max()) > 2):
        raise PlanBytesError("a hop has no stage")
    if not len(runs):
        return
    if int(runs.min()) < 0 or int(runs[:, 1:].min()) < 1 or int(runs.max()) > MAX_ELEMENTS:
        raise PlanBytesError(f"a run has a number outside 1..{MAX_ELEMENTS}")
    # Float arithmetic cannot wrap; ids stay far below where it is inexact enough to matter.
    last = runs[:, 0] + runs[:, 1] + (runs[:, 3] - 1).astype(np.float64) * runs[:, 2]
    if float(last.max()) > MAX_ELEMENTS + 1 or float(runs[:, 3].astype(np.float64).sum()) > MAX_STRETCHES:
        raise PlanBytesError(f"runs reach past {MAX_ELEMENTS} or have more than {MAX_STRETCHES} stretches")


def _unpack(packed: Packed, columns: int, budget: Budget) -> IdArray:
    if packed.columns != columns:
        raise PlanBytesError(f"a table has {packed.columns} columns, expected {columns}")
    return unpack_table(packed, budget, LayoutError)
