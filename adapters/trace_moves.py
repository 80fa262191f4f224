"""Moving what tensors hold: from view to view, converted or changed on the way, or listed where strides are irregular.

>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> moves = Moves(CheckpointSpace([TensorSpec("w", (4, 2), "F32")]))
>>> weight, out = moves.checkpoint_tensor("w"), moves.blank(torch.empty(2, 4, device="meta"), "a test")
>>> moves.transfer(out, weight.t())
>>> [(piece.grid.axes, piece.width) for piece in moves.followed(out).content.pieces]
[(((2, 16, 1), (4, 4, 2)), 4)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from adapters.torch_bits import dtype_name, torch_dtype
from adapters.trace_content import Content, Partial
from adapters.trace_lattice import Axes, Grid, Irregular, nested
from adapters.trace_memory import Memories, View, shaped
from adapters.trace_pieces import CONSTANT, INITIAL, Labels, Piece, Table, relabelled, sources_of
from layout_algebra.errors import TracingError
from layout_algebra.space import CheckpointSpace

Change: TypeAlias = Callable[[int, frozenset[int]], int]
"""From a label, and the tensors its elements come from, to the label after an operation."""


class Moves:
    """The tensors of one trace and what they hold."""

    def __init__(self, space: CheckpointSpace) -> None:
        self.labels = Labels(space)
        self.memories = Memories(self.labels)

    def checkpoint_tensor(self, name: str) -> torch.Tensor:
        """A tensor that stands for one of the checkpoint."""
        spec = self.labels.space.spec(name)
        content = Content.of_tensor(self.labels, name)
        whole = self.memories.new(content, spec.elements * spec.element_type.item_bytes)
        return shaped(whole, torch_dtype(spec.dtype), spec.shape, row_major(spec.shape))

    def blank(self, like: torch.Tensor, what: str) -> torch.Tensor:
        """A new followed tensor of constants with the shape, strides and dtype of another."""
        steps = sum((extent - 1) * step for extent, step in zip(like.shape, like.stride(), strict=True))
        nbytes = (steps + 1) * like.element_size() if like.numel() else 0
        whole = self.memories.new(Content(self.labels, f"a tensor of shape {tuple(like.shape)} from {what}"), nbytes)
        return shaped(whole, like.dtype, like.shape, like.stride())

    def view(self, tensor: torch.Tensor) -> View | None:
        """What a tensor's elements are, or None for one that holds no more than constants."""
        return self.memories.view(tensor)

    def followed(self, tensor: torch.Tensor) -> View:
        """A tensor's view, followed from now on if it was not yet."""
        found = self.view(tensor)
        if found is None:
            found = self.memories.adopt(tensor, f"a tensor of shape {tuple(tensor.shape)}")
        return found

    def behind(self, view: View, *, as_seen: bool = True) -> tuple[frozenset[int], tuple[int, ...], bool]:
        """The checkpoint tensors and the operations behind some elements, and whether any is no constant.

        A reinterpretation of bits by the view itself counts as an operation, unless ``as_seen`` is False.
        """
        name = dtype_name(view.dtype, of=view.content.name)
        tensors: set[int] = set()
        steps: set[int] = set()
        changing = False
        for piece in self._among(view):
            for label, found in sources_of(self.labels, piece).items():
                tensors |= found
                steps.update(self.labels.seen_as(label, name) if as_seen else (self.labels.last_step(label),))
                changing |= label != CONSTANT
        return frozenset(tensors), tuple(sorted(steps)), changing

    def transfer(self, target: torch.Tensor | View, source: torch.Tensor | View, change: Change | None = None) -> None:
        """Let the elements of ``target`` hold those of ``source``, of one shape, converted or changed on the way."""
        if isinstance(source, torch.Tensor):
            found = self.view(source)
            if found is None:
                self.fill(target, CONSTANT)
                return
            source = found
        if isinstance(target, torch.Tensor):
            target = self.followed(target)
        if not target.elements:
            return
        read_as = dtype_name(source.dtype)
        if change is None and target.dtype != source.dtype:
            to = dtype_name(target.dtype)

            def change(label: int, tensors: frozenset[int]) -> int:
                return self.labels.cast(label, read_as, to, tensors)

        try:
            pieces = self._moved(target, source, changed=change is not None)
        except Partial:
            tensors, steps, _ = self.behind(source, as_seen=False)
            self.fill(target, self.labels.computed(steps, f"view({read_as})", tensors))
            return
        if change is not None:
            pieces = [replace(relabelled(self.labels, piece, change), width=target.width) for piece in pieces]
        self._put(target, pieces)

    def fill(self, target: torch.Tensor | View, label: int) -> None:
        """Let all elements of ``target`` have one label."""
        if isinstance(target, torch.Tensor):
            if label == CONSTANT and self.view(target) is None:
                return
            target = self.followed(target)
        if target.elements:
            axes = _axes(target, (0,) * len(target.shape))
            self._put(target, [Piece(grid, target.width, label) for grid in nested(target.start, 0, axes)])

    def listed(self, tensor: torch.Tensor, to: torch.dtype) -> Table:
        """A tensor's ids and labels in row-major order, after conversion to a dtype.

        Raises
        ------
        TracingError
            If there are too many, or elements are put together from bytes.
        """
        view = self.view(tensor)
        if view is None:
            return Table(np.zeros(tensor.numel(), np.int64), np.zeros(tensor.numel(), np.int32))
        try:
            table = view.content.listed(view.places(), view.width)
        except Partial as error:
            raise TracingError(
                f"{view.content.name}: bytes inside elements are moved one by one; expected whole elements. Probe this "
                "loader instead"
            ) from error
        if view.dtype == to or not len(table.ids):
            return table
        read_as, name = dtype_name(view.dtype), dtype_name(to)
        whole = Piece(Grid(0, 0, ((len(table.ids), 1, 1),)), 1, CONSTANT, table)
        cast = relabelled(self.labels, whole, lambda one, tensors: self.labels.cast(one, read_as, name, tensors))
        assert cast.table is not None
        return cast.table

    def put_list(self, target: torch.Tensor | View, table: Table) -> None:
        """Let the elements of ``target`` be those of a table, in row-major order."""
        if isinstance(target, torch.Tensor):
            target = self.followed(target)
        if target.elements:
            grids = nested(target.start, 0, _axes(target, row_major(target.shape)))
            self._put(target, [Piece(grid, target.width, CONSTANT, table) for grid in grids])

    def _among(self, view: View) -> list[Piece]:
        """All pieces among some elements; more than those where their grid is irregular."""
        with suppress(Irregular, Partial):
            found = []
            for grid in nested(view.start, 0, _axes(view, (0,) * len(view.shape))):
                found += view.content.read(grid, view.width, CONSTANT, whole=True)
            return found
        reach = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True))
        near = view.content.around(Grid(view.start, 0, ((reach + 1, 1, 0),)), 1)
        rest = [] if view.content.default == CONSTANT else [Piece(Grid(0, 0, ()), 1, INITIAL)]
        return [*near, *rest]

    def _moved(self, target: View, source: View, *, changed: bool) -> list[Piece]:
        """The pieces of ``source`` at the places of ``target``: whole elements, and all of them, if they change."""
        steps = tuple(zip(target.shape, source.strides, target.strides, strict=True))
        fallback = None if changed else target.content.default
        try:
            pieces = []
            for grid in nested(source.start, target.start, steps):
                pieces += source.content.read(grid, source.width, fallback, whole=changed)
            return pieces
        except Irregular:
            table = source.content.listed(source.places(), source.width)
            grids = nested(target.start, 0, _axes(target, row_major(target.shape)))
            return [Piece(grid, source.width, CONSTANT, table) for grid in grids]

    def _put(self, target: View, pieces: Sequence[Piece]) -> None:
        if any(stride == 0 and extent > 1 for extent, stride in zip(target.shape, target.strides, strict=True)):
            raise RuntimeError("unsupported operation: several elements of the written-to tensor share one place")
        name = target.content.name
        grids = nested(target.start, 0, _axes(target, (0,) * len(target.shape)))
        if len(grids) != 1:
            raise TracingError(
                f"{name}: written through strides {target.strides} that interleave; expected each axis to stride over "
                "all inside it. Probe this loader instead"
            )
        try:
            target.content.write(grids[0], target.width, pieces)
        except Partial as error:
            raise TracingError(
                f"{name}: bytes inside elements are written; expected whole elements. Probe this loader instead"
            ) from error


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _axes(view: View, numbers: Sequence[int]) -> Axes:
    return tuple(zip(view.shape, view.strides, numbers, strict=True))
