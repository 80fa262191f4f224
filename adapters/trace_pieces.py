"""What may be said of a traced value: copied from the checkpoint, computed from it, or nothing of it.

>>> from layout_algebra.space import TensorSpec
>>> labels = Labels(CheckpointSpace([TensorSpec("w", (2,), "F32")]))
>>> exact = labels.number(Copied("F32", "F32", "F32"))
>>> rounded = labels.cast(exact, "F32", "BF16", frozenset([0]))
>>> widened = labels.cast(rounded, "BF16", "F32", frozenset([0]))
>>> labels[rounded].holds("BF16"), labels[widened].holds("F32"), labels.chain([labels.last_step(widened)])
(True, False, ('to(BF16)', 'to(F32)'))

A value rounded once is still a copy for a parameter of that dtype; rounded and widened again it is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from adapters.trace_lattice import Grid
from layout_algebra.dtypes import IdArray, conversion_is_defined, holds_every_value
from layout_algebra.space import CheckpointSpace

CONSTANT = 0
INITIAL = 1

_EXACT = {
    "I8": ("I16", "I32", "I64", "F16", "BF16", "F32", "F64"),
    "U8": ("U16", "U32", "U64", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"),
    "I16": ("I32", "I64", "F32", "F64"),
    "U16": ("U32", "U64", "I32", "I64", "F32", "F64"),
    "I32": ("I64", "F64"),
    "U32": ("U64", "I64", "F64"),
    "F8_E4M3": ("F16", "BF16", "F32", "F64"),
    "F8_E5M2": ("F16", "BF16", "F32", "F64"),
}


@dataclass(frozen=True, slots=True)
class Copied:
    """Elements of one checkpoint dtype, rounded at most once.

    Attributes
    ----------
    source
        Dtype of the checkpoint tensor.
    rounded
        Dtype the values were rounded to; ``source`` while they are exact.
    bits
        Dtype that the bits in memory encode.
    step
        Last conversion, see ``Labels.steps``; -1 for none.
    """

    source: str
    rounded: str
    bits: str
    step: int = -1

    def holds(self, dtype: str) -> bool:
        """Whether memory read as ``dtype`` is the checkpoint's value converted to it once."""
        return self.bits == dtype and self.rounded in (self.source, dtype)


@dataclass(frozen=True, slots=True)
class Computed:
    """Values that are no copies: the last operation, and the positions of the checkpoint tensors they come from."""

    step: int
    depends_on: frozenset[int]


@dataclass(frozen=True, slots=True)
class Untouched:
    """Nothing of the checkpoint: a constant, or what was in a live tensor before."""

    what: str


Label = Copied | Computed | Untouched


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Plain lists: an id (0 where none) and a label for every element."""

    ids: IdArray
    labels: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements of ``width`` bytes at the places of a grid; its numbers are ids, or indices of ``table``."""

    grid: Grid
    width: int
    label: int
    table: Table | None = None


class Labels:
    """All labels of one trace by number, and the operations behind them, each kept once."""

    def __init__(self, space: CheckpointSpace) -> None:
        self.space = space
        self._values: list[Label] = []
        self._numbers: dict[Label, int] = {}
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self._step_numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        assert self.number(Untouched("constant")) == CONSTANT
        assert self.number(Untouched("initial")) == INITIAL

    def __getitem__(self, number: int) -> Label:
        return self._values[number]

    def number(self, label: Label) -> int:
        """The number of a label."""
        found = self._numbers.setdefault(label, len(self._values))
        if found == len(self._values):
            self._values.append(label)
        return found

    def step(self, text: str, after: Iterable[int]) -> int:
        """The number of an operation that follows others."""
        key = (text, tuple(sorted({one for one in after if one >= 0})))
        found = self._step_numbers.setdefault(key, len(self.steps))
        if found == len(self.steps):
            self.steps.append(key)
        return found

    def chain(self, last: Iterable[int]) -> tuple[str, ...]:
        """The texts of some operations and of all that led to them, in order."""
        reached: set[int] = set()
        waiting = [one for one in last if one >= 0]
        while waiting:
            one = waiting.pop()
            if one not in reached:
                reached.add(one)
                waiting += self.steps[one][1]
        return tuple(self.steps[one][0] for one in sorted(reached))

    def last_step(self, number: int) -> int:
        """The last operation of a label, -1 for none."""
        label = self[number]
        return -1 if isinstance(label, Untouched) else label.step

    def cast(self, number: int, read_as: str, to: str, depends_on: frozenset[int]) -> int:
        """The label after a conversion from ``read_as`` to ``to`` of values that depend on some tensors."""
        label = self[number]
        if isinstance(label, Untouched):
            return number
        if isinstance(label, Copied) and label.bits == read_as:
            step = self.step(f"to({to})", (label.step,))
            if _holds_exactly(to, label.rounded):
                return self.number(replace(label, bits=to, step=step))
            if label.rounded == label.source and conversion_is_defined(label.source, to):
                return self.number(replace(label, rounded=to, bits=to, step=step))
        return self.computed(self.seen_as(number, read_as), f"to({to})", depends_on)

    def seen_as(self, number: int, read_as: str) -> Iterable[int]:
        """The operations behind a value, a reinterpretation of its bits included."""
        label = self[number]
        if isinstance(label, Copied) and label.bits != read_as:
            return (self.step(f"view({read_as})", (label.step,)),)
        return () if isinstance(label, Untouched) else (label.step,)

    def computed(self, after: Iterable[int], text: str, depends_on: frozenset[int]) -> int:
        """The label of an operation's result."""
        return self.number(Computed(self.step(text, after), depends_on))


def _holds_exactly(holder: str, value: str) -> bool:
    return holds_every_value(holder, value) or holder in _EXACT.get(value, ())


def sources_of(labels: Labels, piece: Piece) -> dict[int, frozenset[int]]:
    """For every label in a piece the positions of the checkpoint tensors that its elements come from."""
    starts = labels.space.starts
    if piece.table is None:
        label = labels[piece.label]
        if isinstance(label, Copied):
            return {piece.label: frozenset((int(np.searchsorted(starts, piece.grid.other, "right")) - 1,))}
        return {piece.label: label.depends_on if isinstance(label, Computed) else frozenset()}
    index = piece.grid.pairs()[1]
    ids, numbers = piece.table.ids[index], piece.table.labels[index]
    found = {}
    for number in np.unique(numbers).tolist():
        label = labels[number]
        if isinstance(label, Copied):
            positions = np.unique(np.searchsorted(starts, ids[numbers == number], "right") - 1)
            found[number] = frozenset(positions.tolist())
        else:
            found[number] = label.depends_on if isinstance(label, Computed) else frozenset()
    return found


def relabelled(labels: Labels, piece: Piece, change: Callable[[int, frozenset[int]], int]) -> Piece:
    """A piece whose labels became others: ``change`` gets a label and the tensors its elements come from."""
    became = {number: change(number, tensors) for number, tensors in sources_of(labels, piece).items()}
    if piece.table is None:
        return replace(piece, label=became[piece.label])
    lookup = np.arange(max(became) + 1 if became else 1, dtype=np.int32)
    lookup[list(became)] = list(became.values())
    index = piece.grid.pairs()[1]
    numbers = piece.table.labels.copy()
    numbers[index] = lookup[numbers[index]]
    return replace(piece, table=Table(piece.table.ids, numbers))
