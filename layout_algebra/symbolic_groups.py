"""Pieces of one parameter from one template of tensors, and the ways to see them as families of boxes.

Tensors whose names differ in a number may be one family that walks along the number (a stack of experts) or a family
each (a flat parameter of many tensors); a tensor may be seen by its axes or flat. The likelier way comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from layout_algebra.boxes import Piece, box_of, merged
from layout_algebra.name_bytes import Template
from layout_algebra.symbolic_boxes import Family

RelativePiece = tuple[tuple[int, ...], int, int, tuple[tuple[int, int, int], ...]]
"""The moving numbers of a piece's tensor, its offset there, its target start, its axes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of one parameter from tensors of one template, without what differs from layer to layer."""

    shape: tuple[int, ...]
    extents: tuple[int | None, ...]
    bases: tuple[int, ...]
    pieces: tuple[tuple[RelativePiece, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupNames:
    """What a group's tensors are called: the first one's numbers and which of them move."""

    template: Template
    first: tuple[int, ...]
    moving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to see (part of) a group: tensors apart or as one with numbers for coordinates; by axes or flat."""

    group: int
    fixed: tuple[int, ...] | None
    family: Family


def ways(number: int, group: Group, *, flat_first: bool) -> Iterator[list[Candidate]]:
    """Ways to see a group, likelier ones first.

    Parameters
    ----------
    number
        The group's own number, for the candidates.
    flat_first
        Whether the parameter has one axis, in which parts of a matrix seldom begin and end with its rows.
    """
    flat = (math.prod(group.shape),)
    views = [group.shape] if len(group.shape) == 1 else [group.shape, flat]
    if not group.shape:
        views = [flat]
    for view in reversed(views) if flat_first else views:
        family = _family(group, view, None)
        if family is not None:
            yield [Candidate(number, None, family)]
    if not group.extents:
        return
    apart = sorted({piece[0] for listed in group.pieces for piece in listed})
    for view in reversed(views) if flat_first else views:
        families = [_family(group, view, numbers) for numbers in apart]
        found = [
            Candidate(number, numbers, family)
            for numbers, family in zip(apart, families, strict=True)
            if family is not None
        ]
        if len(found) == len(apart):
            yield found


def _family(group: Group, view: tuple[int, ...], only: tuple[int, ...] | None) -> Family | None:
    """A group's boxes, of all its tensors or of one; None if some piece is no box."""
    samples = []
    for listed in group.pieces:
        boxes = []
        for numbers, offset, start, axes in listed:
            if only is None or numbers == only:
                box = box_of(Piece(0, offset, start, axes), view, numbers if only is None else ())
                if box is None:
                    return None
                boxes.append(box)
        samples.append(merged(boxes))
    extents = (*group.extents, *view) if only is None else view
    bases = (*group.bases, *(None for _ in view)) if only is None else tuple(None for _ in view)
    return Family(extents, bases, tuple(samples))
