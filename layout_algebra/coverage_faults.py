"""Which ranges of a checkpoint are held too rarely or too often.

>>> from layout_algebra.space import TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (4, 6), "BF16"), TensorSpec("z", (2,), "BF16")])
>>> def rows(start: int, stop: int) -> Holding:
...     return Holding.of_runs(np.array([[1 + 6 * start, 6 * (stop - start), 1, 1]]))
>>> for fault in Expectation(space, None, False).faults([rows(0, 2), rows(1, 3)], degree=2):
...     print(fault)
w[1:2, :] is held by 2 ranks (0, 1) of 2, expected 1
w[3:4, :] is held by no rank of 2, expected 1
z[:] is held by no rank of 2, expected 1
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layout_algebra.cells import cut_cells
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import FormulaError
from layout_algebra.runs import expand_runs
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace

MOST_FAULTS = 16
_STRETCHES = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """A range of one tensor that is not held as often as it should be.

    Attributes
    ----------
    tensor
        Its name.
    start, stop
        Flat indices, half-open.
    index
        The same range as numpy indexes it.
    degree
        At which it shows.
    ranks
        Who holds it, a rank twice if two of its elements do; empty if it is missing.
    expected
        How often it should be held; -1 for at least once.
    """

    tensor: str
    start: int
    stop: int
    index: str
    degree: int
    ranks: tuple[int, ...]
    expected: int

    @property
    def missing(self) -> bool:
        """Whether nobody holds it."""
        return not self.ranks

    def __str__(self) -> str:
        holders = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        many = f"{len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''} ({holders})"
        expected = "at least 1" if self.expected < 0 else str(self.expected)
        who = many if self.ranks else "no rank"
        return f"{self.tensor}{self.index} is held by {who} of {self.degree}, expected {expected}"


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What one rank holds.

    Attributes
    ----------
    runs
        Ids as runs (start, length, stride, count), shape ``(n, 4)``.
    elements
        Parameter elements; more than the ids if some id is held twice.
    spans
        Ids as half-open intervals, once for every element that holds them; shape ``(m, 2)``. Made when asked for.
    """

    runs: IdArray
    elements: int
    source: SourceMap | None = None

    @staticmethod
    def of_map(source_map: SourceMap) -> Holding:
        """A map's copies."""
        elements = sum(int(source_map[name].copies.elements.sum()) for name in source_map.parameters)
        return Holding(source_map.held_runs, elements, source_map)

    @staticmethod
    def of_runs(runs: IdArray) -> Holding:
        """Runs, each id of each held once."""
        return Holding(runs, int((runs[:, 1] * runs[:, 3]).sum()))

    def spans(self) -> IdArray:
        """Ids as intervals, with repetition."""
        if self.source is None:
            return expand_runs(self.runs)
        strips = self.source.strips.rows
        return np.stack([strips[:, 0], strips[:, 0] + strips[:, 1]], axis=1)


class Expectation:
    """How often every tensor should be held.

    Parameters
    ----------
    tensors
        Names or glob patterns of the tensors that count; all if None.
    replicas
        Tensors that may be held more than once; a mapping says exactly how often.

    Raises
    ------
    FormulaError
        If a pattern matches no tensor.
    """

    def __init__(
        self,
        space: CheckpointSpace,
        tensors: Collection[str] | None,
        replicas: bool | Collection[str] | Mapping[str, int],
    ) -> None:
        self.space = space
        self.times = np.ones(len(space), dtype=np.int64)
        """For every tensor: 0 if it does not count, -1 for at least once, else exactly so often."""
        if tensors is not None:
            self.times[:] = 0
            for pattern in tensors:
                self.times[_matching(space, pattern)] = 1
        if isinstance(replicas, bool):
            self.times[(self.times == 1) & replicas] = -1
            return
        for pattern in replicas:
            places = _matching(space, pattern)
            often = replicas[pattern] if isinstance(replicas, Mapping) else -1
            self.times[places] = np.where(self.times[places] != 0, often, 0)

    def wrong(self, held: int) -> npt.NDArray[np.bool_]:
        """For every tensor whether being held so often is wrong."""
        bad: npt.NDArray[np.bool_] = (self.times != 0) & (self.times != held) & ~((self.times == -1) & (held > 0))
        return bad

    def faults(self, holdings: Sequence[Holding], *, degree: int, most: int = MOST_FAULTS) -> tuple[Fault, ...]:
        """Ranges that are wrong when rank k holds ``holdings[k]``, by tensor, at most ``most``."""
        total = self.space.total_elements
        if not total:
            return ()
        everything = np.array([[1, total, total, 1]], dtype=np.int64)
        cells = cut_cells(self.space, [everything, *(each.runs for each in holdings)])
        sizes = np.array([int((cell.runs[:, 1] * cell.runs[:, 3]).sum()) for cell in cells], dtype=np.int64)
        covers = np.stack([cell.covered_by[1:] for cell in cells])
        distinct = sizes @ covers
        twice = [k for k, each in enumerate(holdings) if int(distinct[k]) != each.elements]
        stretches: list[tuple[int, int, tuple[int, ...]]] = []
        if twice:
            stretches = list(self._repeated(holdings))
        else:
            for cell, cover in zip(cells, covers, strict=True):
                ranks = tuple(np.flatnonzero(cover).tolist())
                stretches += [(start, stop, ranks) for start, stop in self._wrong_spans(cell.runs, len(ranks))]
        faults = [fault for start, stop, ranks in stretches for fault in self._of_tensors(start, stop, ranks, degree)]
        return tuple(sorted(faults, key=lambda fault: (self.space.position(fault.tensor), fault.start))[:most])

    def _wrong_spans(self, runs: IdArray, held: int) -> Iterator[tuple[int, int]]:
        """Stretches of a cell's runs that touch a tensor for which that is wrong."""
        wrong = self.wrong(held)
        if not wrong.any():
            return
        before = np.concatenate([[0], np.cumsum(wrong)])
        starts, ends = runs[:, 0], runs[:, 0] + runs[:, 2] * (runs[:, 3] - 1) + runs[:, 1] - 1
        first = np.searchsorted(self.space.starts, starts, side="right") - 1
        last = np.searchsorted(self.space.starts, ends, side="right") - 1
        touched = runs[before[last + 1] > before[first]]
        for run in touched[np.argsort(touched[:, 0], kind="stable")][:_STRETCHES]:
            few = run.copy()
            few[3] = min(int(few[3]), _STRETCHES)
            yield from expand_runs(few[None]).tolist()

    def _repeated(self, holdings: Sequence[Holding]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Stretches with one set of holders, listed span by span, because some rank holds an id twice."""
        spans = [each.spans() for each in holdings]
        owner = np.repeat(np.arange(len(spans)), [len(each) for each in spans])
        table = np.concatenate([np.empty((0, 2), dtype=np.int64), *spans])
        edges = np.unique(np.concatenate([table.reshape(-1), self.space.starts]))
        depth = np.zeros(len(edges), dtype=np.int64)
        np.add.at(depth, np.searchsorted(edges, table[:, 0]), 1)
        np.add.at(depth, np.searchsorted(edges, table[:, 1]), -1)
        held = np.cumsum(depth)[:-1]
        tensor = np.searchsorted(self.space.starts, edges[:-1], side="right") - 1
        times = self.times[tensor]
        bad = (times != 0) & (times != held) & ~((times == -1) & (held > 0))
        for place in np.flatnonzero(bad)[:_STRETCHES].tolist():
            start, stop = int(edges[place]), int(edges[place + 1])
            inside = (table[:, 0] <= start) & (table[:, 1] >= stop)
            yield start, stop, tuple(sorted(owner[inside].tolist()))

    def _of_tensors(self, start: int, stop: int, ranks: tuple[int, ...], degree: int) -> Iterator[Fault]:
        """A stretch as one fault a tensor, of those for which it is one."""
        wrong = self.wrong(len(ranks))
        while start < stop:
            tensor = int(np.searchsorted(self.space.starts, start, side="right")) - 1
            begin, end = int(self.space.starts[tensor]), int(self.space.starts[tensor + 1])
            last = min(stop, end)
            if wrong[tensor]:
                spec = self.space.specs[tensor]
                index = index_text(spec.shape, start - begin, last - begin)
                yield Fault(spec.name, start - begin, last - begin, index, degree, ranks, int(self.times[tensor]))
            start = last


def _matching(space: CheckpointSpace, pattern: str) -> list[int]:
    if pattern in space:
        return [space.position(pattern)]
    found = [place for place, name in enumerate(space.names) if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise FormulaError(f"{pattern}: no tensor of the checkpoint has that name or matches it")
    return found


def index_text(shape: Sequence[int], start: int, stop: int) -> str:
    """A flat range of a tensor as numpy indexes it.

    >>> index_text((4, 6), 12, 24), index_text((4, 6), 13, 15), index_text((4, 6), 5, 9), index_text((), 0, 1)
    ('[2:4, :]', '[2, 1:3]', '.flat[5:9]', '')
    """
    if not shape:
        return ""
    flat = f".flat[{start}:{stop}]"
    parts: list[str] = []
    for axis, extent in enumerate(shape):
        after = math.prod(shape[axis + 1 :])
        first, last = start // after, (stop - 1) // after
        if start % after == 0 and stop % after == 0:
            whole = first == 0 and last + 1 == extent
            rest = [":"] * (len(shape) - axis - 1)
            return f"[{', '.join([*parts, ':' if whole else f'{first}:{last + 1}', *rest])}]"
        if first != last:
            break
        parts.append(str(first))
        start, stop = start - first * after, stop - first * after
    return flat
