"""What connect found and decided, as one value: printable, and as JSON.

>>> print(report)                                                                  # doctest: +SKIP
connected: 3 layouts of 8 workers over shared_memory, plan 5c1d...
...
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from layout_algebra.source_map import SourceMap
from transfer_exec.plan import Plan, Stage

__all__ = ["ConnectReport", "WorkerSummary", "describe_worker"]

_NAMES_SHOWN = 6


class StageBytes(NamedTuple):
    """Payload bytes of one worker in one stage of an update."""

    stage: str
    sent: int
    received: int


class WorkerSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's part.

    Attributes
    ----------
    worker
        Its name.
    parameters, slice_copies
        Counts of its source map.
    copied_elements, empty_elements, opaque_elements
        Coverage of its parameters.
    opaque, empty
        Parameters with opaque elements, and those that no element of the checkpoint reaches.
    needed_bytes
        Bytes of the checkpoint elements its map names: what a trainer holds, what a rollout needs.
    stages
        Traffic of one update.
    direct_bytes
        Of that, what goes straight from parameter to parameter.
    mapped_bytes
        Of that again, what rollouts copy out of a trainer's shared memory, which they have mapped; the rest is read.
    unreached
        Opaque parameters that depend on no checkpoint tensor, as far as the probe can tell: they keep what they hold.
    """

    worker: str
    parameters: int
    slice_copies: int
    copied_elements: int
    empty_elements: int
    opaque_elements: int
    opaque: tuple[str, ...]
    empty: tuple[str, ...]
    needed_bytes: int
    stages: tuple[StageBytes, ...]
    direct_bytes: int = 0
    mapped_bytes: int = 0
    unreached: tuple[str, ...] = ()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes it sends in one update."""
        return sum(stage.sent for stage in self.stages)

    @property
    def bytes_received(self) -> int:
        """Payload bytes it receives in one update."""
        return sum(stage.received for stage in self.stages)


class ConnectReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One connect.

    Attributes
    ----------
    engines
        All engines that updates reach from now on, in natural order.
    tensors, elements
        Of the checkpoint.
    layouts
        Distinct source maps among all workers.
    unused
        Side (``"trainer"``, ``"engine/a"``) -> checkpoint tensors that none of its workers uses.
    kept
        Parameters that keep old values, as ``allow_partial`` permits.
    plan_digest, transport, buffer_bytes, rounds, verify
        Of the plan, and how it is run.
    lower_bound_s, bound_link, optimum_s, planned_s
        No lawful plan is faster than the first, because of that link; what the planner found possible; and what the
        plan takes at the topology's bandwidths.
    workers
        Everybody's part.
    seconds
        Phase -> how long it took on the slowest worker.
    places
        Worker -> address, interface and cards at which its peers reach it, of a transport between machines.
    lost
        Engines that were left out because they failed, hung or died on the way, and why; a connect that names one
        again takes it in.
    unreadable
        Why nothing is read straight out of a parameter: some worker is not allowed to read a peer's memory.
    unmappable
        Why no parameter is mapped although some are in shared memory: some worker cannot map a peer's.
    """

    engines: tuple[str, ...]
    tensors: int
    elements: int
    layouts: int
    unused: dict[str, tuple[str, ...]]
    kept: tuple[str, ...]
    plan_digest: str
    transport: str
    buffer_bytes: int
    rounds: int
    verify: str
    lower_bound_s: float
    bound_link: str
    optimum_s: float
    planned_s: float
    workers: tuple[WorkerSummary, ...]
    seconds: dict[str, float]
    places: dict[str, str] = {}
    lost: dict[str, str] = {}
    unreadable: str = ""
    unmappable: str = ""

    def worker(self, name: str) -> WorkerSummary:
        """One worker's part; KeyError if it takes none."""
        for one in self.workers:
            if one.worker == name:
                return one
        raise KeyError(f"{name} is not in this report; it has {', '.join(one.worker for one in self.workers)}")

    def to_json(self) -> str:
        """As one JSON object."""
        return msgspec.json.encode(self).decode()

    def to_bytes(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> ConnectReport:
        """Read ``to_bytes``' output."""
        return msgspec.msgpack.decode(data, type=ConnectReport)

    def __str__(self) -> str:
        lines = [
            f"connected: {self.layouts} layouts of {len(self.workers)} workers over {self.transport}, "
            f"plan {self.plan_digest[:12]}",
            f"  checkpoint {self.tensors:,} tensors, {self.elements:,} elements; rounds {self.rounds} "
            f"of at most {self.buffer_bytes:,} bytes",
            f"  bound {self.lower_bound_s:.6f} s ({self.bound_link}), optimum {self.optimum_s:.6f} s, "
            f"planned {self.planned_s:.6f} s",
        ]
        for one in self.workers:
            place = f" at {self.places[one.worker]}" if one.worker in self.places else ""
            lines.append(
                f"  {one.worker}{place}: {one.parameters} parameters, {one.slice_copies:,} slice copies, "
                f"{one.copied_elements:,} copied, {one.empty_elements:,} empty, {one.opaque_elements:,} opaque; "
                f"sends {one.bytes_sent:,} and receives {one.bytes_received:,} bytes"
                f"{f', {one.direct_bytes:,} of them directly' if one.direct_bytes else ''}"
                f"{f' ({one.mapped_bytes:,} mapped)' if one.mapped_bytes else ''}"
            )
        lines += [f"  unused by {side}: {_listed(names)}" for side, names in self.unused.items() if names]
        lines += [
            f"  written by {one.worker}'s loader, but from no tensor: {_listed(one.unreached)}"
            for one in self.workers
            if one.unreached
        ]
        lines += [f"  left out: engine {name}: {why}" for name, why in self.lost.items()]
        if self.unreadable:
            lines.append(f"  nothing is read directly: {self.unreadable}")
        if self.unmappable:
            lines.append(f"  nothing is mapped: {self.unmappable}")
        if self.kept:
            lines.append(f"  keep their old values: {_listed(self.kept)}")
        lines.append("  " + ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items()))
        return "\n".join(lines)


def describe_worker(
    worker: str, source_map: SourceMap, plan: Plan, *, direct_bytes: int = 0, mapped_bytes: int = 0
) -> WorkerSummary:
    """One worker's part of a report."""
    cover = source_map.coverage()
    entries = {name: source_map[name] for name in source_map.parameters}
    return WorkerSummary(
        worker=worker,
        parameters=len(entries),
        slice_copies=sum(len(entry.copies) for entry in entries.values()),
        copied_elements=cover.copied_elements,
        empty_elements=cover.empty_elements,
        opaque_elements=cover.opaque_elements,
        opaque=source_map.opaque,
        empty=tuple(n for n, one in entries.items() if one.elements and not len(one.copies) and not one.opaque),
        needed_bytes=_bytes_of(source_map),
        stages=tuple(
            StageBytes(stage.name.lower(), plan.bytes_sent(worker, stage), plan.bytes_received(worker, stage))
            for stage in Stage
        ),
        direct_bytes=direct_bytes,
        mapped_bytes=mapped_bytes,
        unreached=tuple(name for name in source_map.opaque if not entries[name].depends_on),
    )


def _bytes_of(source_map: SourceMap) -> int:
    """Bytes, in the checkpoint's dtypes, of the elements that a map needs."""
    space, intervals = source_map.space, source_map.needed().intervals
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)])
    # Needed elements below an id: those of whole intervals, and what the last one has past the id taken back.
    position = np.searchsorted(intervals[:, 0], space.starts, side="left")
    stops = np.concatenate([[0], intervals[:, 1]])[position]
    below = before[position] - np.maximum(stops - space.starts, 0) * (position > 0)
    return int((np.diff(below) * space.item_bits).sum()) // 8


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
