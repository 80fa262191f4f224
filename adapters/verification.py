"""Proof that bytes landed: digests per demand class, compared across layouts without moving a weight.

All holders and all needers of a demand class have the very same ids, so their digests of it must be one number,
whatever their layouts (`layout_algebra.fingerprint`). Trainers digest before the first byte of an update leaves, so
what they do afterwards cannot change it; rollouts digest what has landed: what is copied straight into parameters as it
lands, in the cache, and the rest when all has landed. A digest is a sum, so it may be taken in parts:

::

    strips, rest = proof.divide(program)                                  # once per plan
    sums = proof.zeros(); Executor(..., strips=strips).run(version, sums=sums)
    rest.digests(memory, staged, sums)                                    # what proof.digests(memory, staged) finds

What arrived for a parameter that is computed is digested where it is staged. A rollout cannot prove a class that it
holds in a narrower dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from adapters.duty_messages import Cell
from adapters.failures import VerificationError
from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import Correspondence
from layout_algebra.dtypes import IdArray, dtype_of, holds_every_value
from layout_algebra.fingerprint import FingerprintPlan, Memory, plan_fingerprints
from layout_algebra.runs import RunTable
from layout_algebra.signal_safe import ThreadPool
from layout_algebra.source_map import SourceMap
from transfer_exec.program import FetchColumn, Program, StripColumn

__all__ = ["Digests", "Proof", "cells_of", "check_digests", "check_holders", "plan_proof"]

Digests = Mapping[str, Mapping[int, int]]
"""Worker -> number of a demand class -> digest."""


def cells_of(correspondence: Correspondence, worker: str) -> tuple[Cell, ...]:
    """The demand classes that a worker holds or needs, in a form that travels."""
    return tuple(
        Cell(number, group.runs.runs.tobytes())
        for number, group in enumerate(correspondence.classes)
        if worker in group.holders or worker in group.needers
    )


class DeviceSums(Protocol):
    """Digests of all classes over memory that it knows."""

    def sums(self) -> npt.NDArray[np.uint64]:
        """One a class; the sums of several add up."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """The demand classes that a worker's own memory can prove, found once and digested in every update.

    Attributes
    ----------
    numbers
        Of the classes.
    plan
        Where their elements are in parameters in host memory, or that are converted.
    staged
        Where those are that no parameter copies: in checkpoint tensors that arrive whole.
    shares
        Both in shares of equal work, a thread each, and whether a share is of what is staged.
    beside
        Digests of the parameters that are on GPUs, taken there.
    threads
        How many digest side by side, if there is enough to do.
    """

    numbers: tuple[int, ...]
    plan: FingerprintPlan
    staged: FingerprintPlan
    shares: tuple[tuple[FingerprintPlan, bool], ...]
    beside: tuple[DeviceSums, ...] = ()
    threads: int = 1

    def zeros(self) -> npt.NDArray[np.uint64]:
        """Sums of nothing, one a class."""
        return np.zeros(len(self.numbers), dtype=np.uint64)

    def digests(
        self, memory: Memory, staged: Memory = MappingProxyType({}), landed: npt.NDArray[np.uint64] | None = None
    ) -> dict[int, int]:
        """Digest every class by its number; reads all memory that they live in once.

        Parameters
        ----------
        memory, staged
            Parameters, and checkpoint tensors that are there whole.
        landed
            What was digested already of what `divide` has left out of this.
        """

        def sums(share: tuple[FingerprintPlan, bool]) -> npt.NDArray[np.uint64]:
            plan, of_staged = share
            return plan.sums(staged if of_staged else memory)

        total = self.zeros() if landed is None else landed
        if len(self.shares) > 1:
            with ThreadPool(len(self.shares), "digests") as pool:
                found = list(pool.map(sums, self.shares))
        else:
            found = [sums(share) for share in self.shares]
        total = np.stack([total, *(each.sums() for each in self.beside), *found]).sum(axis=0, dtype=np.uint64)
        return dict(zip(self.numbers, total.tolist(), strict=True))

    def divide(self, program: Program) -> tuple[IdArray, Proof]:
        """What a program fetches straight into place, as `Executor` takes it, and the proof of all the rest."""
        strips, rests = [np.empty((0, len(StripColumn)), dtype=np.int64)], []
        fetched = _fetched(program)
        for plan, of_staged in ((self.plan, False), (self.staged, True)):
            mine = {program.tensors[at].name: at for at in fetched if program.tensors[at].staged == of_staged}
            inside, rest = plan.split({name: fetched[at] for name, at in mine.items()})
            rests.append(rest)
            for part in inside:
                first, length, index, _, number = part.rows.T
                width = np.full_like(first, dtype_of(part.wire).item_bytes)
                tensor = np.full_like(first, mine[part.parameter])
                strips.append(np.stack([tensor, index * width, length * width, first, width, number], axis=1))
        plan, staged = rests
        shares = _shares(plan, staged, self.threads)
        return np.concatenate(strips), replace(self, plan=plan, staged=staged, shares=shares)


def plan_proof(
    source_map: SourceMap,
    cells: Sequence[Cell],
    *,
    staged: Collection[str] = (),
    threads: int = 1,
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Proof:
    """Find which of some classes a worker can prove, and where they are.

    Parameters
    ----------
    source_map
        What the parameters copy.
    cells
        The classes.
    staged
        Checkpoint tensors that are there whole, beside the parameters.
    threads
        How many digest side by side, if there is enough to do.
    tensors
        The parameters; those on GPUs are digested where they are, as far as they are contiguous and of the checkpoint's
        dtype, and must stay there.

    Raises
    ------
    LayoutError
        If a cell's bytes are no runs.
    """
    held, narrow = source_map.held(), _narrow_ids(source_map)
    whole_tensors = declare(source_map.space, {name: whole(source_map.space, name) for name in staged})
    arrived = whole_tensors.held()
    copied, computed = {}, {}
    for cell in cells:
        runs = RunTable.from_runs(np.frombuffer(cell.runs, dtype=np.int64).reshape(-1, 4))
        rest = runs.subtract(held)
        if not rest.subtract(arrived) and not runs.intersect(narrow):
            copied[cell.number], computed[cell.number] = runs.intersect(held), rest
    plan = plan_fingerprints(source_map, list(copied.values()))
    plan, on_devices = _by_device(plan, tensors)
    arrived_plan = plan_fingerprints(whole_tensors, list(computed.values()))
    return Proof(tuple(copied), plan, arrived_plan, _shares(plan, arrived_plan, threads), on_devices, threads)


def _shares(plan: FingerprintPlan, staged: FingerprintPlan, threads: int) -> tuple[tuple[FingerprintPlan, bool], ...]:
    """As `Proof` has them."""
    found = [(each, of_staged) for one, of_staged in ((plan, False), (staged, True)) for each in one.shares(threads)]
    return tuple(share for share in found if share[0].parts)


def _fetched(program: Program) -> dict[int, IdArray]:
    """By position of a tensor, which of its elements are fetched, as `FingerprintPlan.split` takes them."""
    rows = np.concatenate([np.empty((0, len(FetchColumn)), dtype=np.int64), *program.fetch_rows])
    rows = rows[np.lexsort((rows[:, FetchColumn.OFFSET], rows[:, FetchColumn.TENSOR]))]
    positions, begins = np.unique(rows[:, FetchColumn.TENSOR], return_index=True)
    places = np.stack([rows[:, FetchColumn.OFFSET], rows[:, FetchColumn.OFFSET] + rows[:, FetchColumn.BYTES]], axis=1)
    return {
        at: places[begin:stop] // dtype_of(program.tensors[at].dtype).item_bytes
        for at, begin, stop in zip(positions.tolist(), begins, np.append(begins, len(rows))[1:], strict=True)
    }


def _by_device(
    plan: FingerprintPlan, tensors: Mapping[str, torch.Tensor]
) -> tuple[FingerprintPlan, tuple[DeviceSums, ...]]:
    """The part of a plan that is for the processor, and the rest of it for every GPU."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor.device.type == "cuda"}
    if not devices:
        return plan, ()
    from transfer_exec.kernels.triton_digest import DeviceDigest, device_parts  # Triton may be missing elsewhere

    here, others = device_parts(plan, {name: tensors[name] for name in devices})
    groups = {device: [part for part in here if devices[part.parameter] == device] for device in devices.values()}
    found = [DeviceDigest(replace(plan, parts=tuple(parts)), tensors) for parts in groups.values() if parts]
    return replace(plan, parts=others), tuple(found)


def check_holders(correspondence: Correspondence, digests: Digests) -> None:
    """Refuse to send replicas that differ from each other.

    Raises
    ------
    VerificationError
        Naming the workers and the first tensor they differ in.
    """
    for number, group in enumerate(correspondence.classes):
        values = {w: digests[w][number] for w in group.holders if number in digests.get(w, {})}
        if len(set(values.values())) > 1:
            first, other = _two_that_differ(values)
            raise VerificationError(
                f"{first} and {other} both hold {_describe(correspondence, number)}, and their bits differ; which of "
                "them is right cannot be told. Make replicas equal, or pass verify='off'"
            )


def check_digests(correspondence: Correspondence, sent: Digests, landed: Digests) -> None:
    """Compare what rollouts have with what trainers sent.

    Raises
    ------
    VerificationError
        Naming every worker that differs and the tensors of the first difference.
    """
    for number, group in enumerate(correspondence.classes):
        right = next((sent[w][number] for w in group.holders if number in sent.get(w, {})), None)
        wrong = [w for w in group.needers if landed.get(w, {}).get(number, right) != right]
        if right is not None and wrong:
            raise VerificationError(
                f"{', '.join(wrong)}: the bits of {_describe(correspondence, number)} differ from those that "
                f"{group.holders[0]} sent; the new version is not to be used"
            )


def _describe(correspondence: Correspondence, number: int) -> str:
    start, stop = correspondence.classes[number].runs.intervals[0].tolist()
    count = correspondence.classes[number].runs.elements
    rest = "" if count == stop - start else f" or another of the {count:,} elements that go the same way"
    return correspondence.space.describe_ids(start, stop) + rest


def _two_that_differ(values: Mapping[str, int]) -> tuple[str, str]:
    first, right = next(iter(values.items()))
    return first, next(worker for worker, value in values.items() if value != right)


def _narrow_ids(source_map: SourceMap) -> RunTable:
    """Ids that some parameter holds in a dtype that cannot hold every value of the checkpoint's."""
    specs = source_map.space.specs
    found = []
    for wire in sorted({spec.dtype for spec in specs}):
        ranges = RunTable.from_intervals([source_map.space.id_range(s.name) for s in specs if s.dtype == wire])
        rows = source_map.strips.within(ranges.intervals)[0].rows
        narrow = [not holds_every_value(source_map.dtype(name), wire) for name in source_map.parameters]
        rows = rows[np.array(narrow, dtype=bool)[rows[:, 2]]]
        found.append(np.stack([rows[:, 0], rows[:, 0] + rows[:, 1]], axis=1))
    return RunTable.from_intervals(np.concatenate([np.empty((0, 2), dtype=np.int64), *found]))
