"""What a traced memory holds: pieces of checkpoint elements, constants and computed values at places in bytes.

A ``Content`` says of every byte of one storage where its value comes from. Pieces are affine (``trace_lattice``), so a
tensor of any size costs a few of them; what is too irregular for pieces becomes a ``Table`` of plain ids.

>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> labels = Labels(CheckpointSpace([TensorSpec("w", (2, 3), "F32")]))
>>> source = Content.of_tensor(labels, "w")
>>> held = Content(labels, "p")
>>> transposed = Grid(0, 0, ((2, 12, 4), (3, 4, 8)))                    # from bytes of w to bytes of p
>>> held.write(Grid(0, 0, ((24, 1, 1),)), 1, source.read(transposed, 4, CONSTANT))
>>> [(piece.grid, piece.width) for piece in held.pieces]
[(Grid(start=0, other=1, axes=((3, 8, 1), (2, 4, 3))), 4)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np
import numpy.typing as npt

from adapters.trace_lattice import Axis, Grid, Irregular, meet, minus, nested
from adapters.trace_pieces import CONSTANT, Copied, Labels, Piece, Table, sources_of
from layout_algebra.dtypes import IdArray
from layout_algebra.errors import TracingError

MOST_LISTED = 1 << 26
"""Most elements that are ever listed one by one, 12 bytes each, where pieces would be too irregular."""


class Partial(Exception):
    """Bytes inside an element, or an element put together from bytes; callers call the result computed."""


class Content:
    """What one memory holds.

    Parameters
    ----------
    labels
        Of the trace.
    name
        What it is, for messages.
    default
        Label of every byte in no piece.
    """

    def __init__(self, labels: Labels, name: str, default: int = CONSTANT) -> None:
        self.labels = labels
        self.name = name
        self.default = default
        self.pieces: list[Piece] = []
        self._bounds = np.empty((8, 2), dtype=np.int64)

    @staticmethod
    def of_tensor(labels: Labels, name: str) -> Content:
        """A checkpoint tensor, contiguous from byte 0 on."""
        spec = labels.space.spec(name)
        content = Content(labels, f"checkpoint tensor {name}")
        if spec.elements:
            width = spec.element_type.item_bytes
            label = labels.number(Copied(spec.dtype, spec.dtype, spec.dtype))
            first = labels.space.id_range(name)[0]
            content._add([Piece(nested(0, first, ((spec.elements, width, 1),))[0], width, label)])
        return content

    def read(self, relation: Grid, width: int, fallback: int | None, *, whole: bool = False) -> list[Piece]:
        """What elements at some places hold, as pieces at the relation's numbers.

        Parameters
        ----------
        relation
            From places here to other places, such as bytes of another memory; nested.
        width
            Bytes of one element.
        fallback
            Label of elements that need no piece; None where all do.
        whole
            Whether an element must be one here; else its bytes may be taken apart, and the relation's numbers must
            be bytes too.

        Raises
        ------
        Irregular
            If strides do not divide each other; ``listed`` can still tell.
        Partial
            If an element here would be cut.
        """
        found: list[Piece] = []
        seen: list[tuple[Grid, int]] = []
        for piece in self._near(relation, width):
            mine, theirs, wide = _fitted(piece, relation, width, self.labels, whole=whole)
            inside = _linear(mine, theirs, wide)
            for grid in meet(mine, theirs) if inside is None else inside:
                found += [Piece(one, wide, piece.label, piece.table) for one in nested(*grid)]
                seen.append((theirs, wide))
        covered = sum(piece.grid.elements * piece.width for piece in found) == relation.elements * width
        if self.default != fallback and not covered:
            finest = min([width, *(wide for _, wide in seen)])
            rest = [_expanded(relation, width, finest, finest) if finest < width else relation]
            for grid, wide in seen:
                taken = _expanded(grid, wide, finest, 0)
                rest = [part for one in rest for part in minus(one, taken)]
            found += [
                Piece(one, finest, self.default)
                for part in rest
                for one in nested(part.other, 0, tuple((n, back, 0) for n, _, back in part.axes))
            ]
        return found

    def touched(self, relation: Grid, width: int, read_as: str) -> list[Piece]:
        """``read`` for numbers that count elements: one that is put together from bytes is computed.

        Raises
        ------
        Irregular
            If strides do not divide each other.
        """
        found: list[Piece] = []
        for piece in self._near(relation, width):
            try:
                mine, theirs, _ = _fitted(piece, relation, width, self.labels, whole=True)
            except Partial:
                finest = gcd(piece.width, width)
                mine, theirs = _expanded(relation, width, finest, 0), _expanded(piece.grid, piece.width, finest, 0)
                label = self._put_together(piece, read_as)
                for one, _, axes in meet(mine, theirs):
                    counted = tuple((extent, step, 0) for extent, step, _ in axes if step)
                    found += [Piece(grid, 1, label) for grid in nested(one, 0, counted)]
                continue
            inside = _linear(mine, theirs, width)
            for grid in meet(mine, theirs) if inside is None else inside:
                found += [Piece(part, 1, piece.label, piece.table) for part in nested(*grid)]
        return found

    def listed(self, where: IdArray, width: int) -> Table:
        """Ids and labels of elements at some places, in the order of the places.

        Raises
        ------
        TracingError
            If they lie too far apart, or there are more than ``MOST_LISTED``.
        Partial
            If an element here would be cut.
        """
        first = int(where.min()) if len(where) else 0
        count = (int(where.max()) - first) // width + 1 if len(where) else 0
        if max(count, len(where)) > MOST_LISTED:
            raise TracingError(
                f"{self.name}: {max(count, len(where)):,} elements are laid out too irregularly to follow; at "
                f"most {MOST_LISTED:,} are listed one by one. Probe this loader instead"
            )
        ids = np.zeros(count, dtype=np.int64)
        labels = np.full(count, self.default, dtype=np.int32)
        span = Grid(first, 0, ((count, width, 1),))
        for piece in self._near(span, width) if count else ():
            _, theirs, _ = _fitted(piece, span, width, self.labels, whole=True)
            if (theirs.start - first) % width or any(step % width for _, step, _ in theirs.axes):
                raise Partial
            for grid in meet(span, theirs):
                _fill(ids, labels, replace(piece, grid=grid), self.labels)
        if np.any((where - first) % width):
            raise Partial
        index = (where - first) // width
        return Table(ids[index], labels[index])

    def write(self, places: Grid, width: int, pieces: Sequence[Piece]) -> None:
        """Put pieces at some places; whatever was there is gone.

        Parameters
        ----------
        places
            All places written, nested; its numbers have no meaning here.
        width
            Bytes of one element there.
        pieces
            What is known of them now; the rest holds the default.
        """
        reach = places.last + width
        touched = self._near_rows(places.start, reach)
        if len(touched):
            kept: list[Piece] = []
            try:
                for row in touched.tolist():
                    piece = self.pieces[row]
                    low, high = self._bounds[row]
                    if not (_is_solid(places, width) and places.start <= low and high <= reach):
                        kept += self._without(piece, places, width)
            except Irregular:
                self._write_listed(places, width, pieces)
                return
            self._drop(touched)
            self._add(kept)
        self._add(pieces)

    def around(self, places: Grid, width: int) -> list[Piece]:
        """All pieces that reach between the first and the last of some places."""
        return self._near(places, width)

    def _write_listed(self, places: Grid, width: int, pieces: Sequence[Piece]) -> None:
        """``write`` for irregular grids: everything between the first and the last place becomes one table."""
        count = (places.last - places.start) // width + 1
        span = Grid(places.start, 0, ((count, width, 1),))
        table = self.listed(span.pairs()[0], width)
        where = (places.pairs()[0] - places.start) // width
        table.ids[where] = 0
        table.labels[where] = self.default
        for piece in pieces:
            if piece.width != width:
                raise Partial
            axes: tuple[Axis, ...] = tuple((n, step // width, other) for n, step, other in piece.grid.axes)
            moved = Grid((piece.grid.start - places.start) // width, piece.grid.other, axes)
            _fill(table.ids, table.labels, replace(piece, grid=moved), self.labels)
        touched = self._near_rows(places.start, places.last + width)
        kept = [part for row in touched.tolist() for part in self._without(self.pieces[row], span, width)]
        self._drop(touched)
        self._add([*kept, Piece(span, width, CONSTANT, table)])

    def _put_together(self, piece: Piece, read_as: str) -> int:
        """The label of elements of another width made of a piece's bytes."""
        behind = sources_of(self.labels, piece)
        steps = {self.labels.last_step(number) for number in behind}
        tensors: frozenset[int] = frozenset().union(*behind.values())
        return self.labels.computed(steps, f"view({read_as})", tensors)

    def _without(self, piece: Piece, places: Grid, width: int) -> list[Piece]:
        """A piece without some places."""
        if piece.width == width:
            return [replace(piece, grid=grid) for grid in minus(piece.grid, places)]
        if piece.width < width:
            finer = _expanded(places, width, piece.width, 0)
            return [replace(piece, grid=grid) for grid in minus(piece.grid, finer)]
        if piece.table is None and not isinstance(self.labels[piece.label], Copied):
            finer = _expanded(piece.grid, piece.width, width, 0)
            return [replace(piece, grid=grid, width=width) for grid in minus(finer, places)]
        wider = _folded(places, width, piece.width, bytes_too=False)
        if wider is None:
            raise Partial
        return [replace(piece, grid=grid) for grid in minus(piece.grid, wider)]

    def _near_rows(self, low: int, high: int) -> IdArray:
        bounds = self._bounds[: len(self.pieces)]
        return np.flatnonzero((bounds[:, 0] < high) & (bounds[:, 1] > low))

    def _near(self, places: Grid, width: int) -> list[Piece]:
        return [self.pieces[row] for row in self._near_rows(places.start, places.last + width).tolist()]

    def _drop(self, rows: IdArray) -> None:
        gone = set(rows.tolist())
        kept = np.ones(len(self.pieces), dtype=bool)
        kept[rows] = False
        self._bounds = np.concatenate([self._bounds[: len(kept)][kept], np.empty((8, 2), dtype=np.int64)])
        self.pieces = [piece for row, piece in enumerate(self.pieces) if row not in gone]

    def _add(self, pieces: Sequence[Piece]) -> None:
        pieces = [one for one in pieces if one.table is not None or one.label != self.default]
        count = len(self.pieces)
        if count + len(pieces) > len(self._bounds):
            grown = np.empty((2 * (count + len(pieces)), 2), dtype=np.int64)
            grown[:count] = self._bounds[:count]
            self._bounds = grown
        for row, piece in enumerate(pieces, count):
            self._bounds[row] = piece.grid.start, piece.grid.last + piece.width
        self.pieces += pieces


def _is_solid(places: Grid, width: int) -> bool:
    """Whether a grid covers every byte from its first to its last."""
    return places.elements * width == places.last + width - places.start and all(axis[1] for axis in places.axes)


def _expanded(grid: Grid, width: int, finer: int, other: int) -> Grid:
    """The same bytes as elements of a finer width, whose numbers advance by ``other`` inside an old element."""
    if width == finer:
        return grid
    if width % finer:
        raise Partial
    moving = [axis for axis in grid.axes if axis[1]]
    still = [axis for axis in grid.axes if not axis[1]]
    return Grid(grid.start, grid.other, (*moving, (width // finer, finer, other), *still))


def _folded(grid: Grid, width: int, wider: int, *, bytes_too: bool) -> Grid | None:
    """The same bytes as elements of a wider width, or None; ``bytes_too`` if the numbers are bytes as well."""
    if wider % width:
        return None
    per = wider // width
    for place, (extent, step, other) in enumerate(grid.axes):
        if step == width and (other == width or not bytes_too) and extent % per == 0:
            axes = list(grid.axes)
            axes[place] = (extent // per, wider, other * per)
            return Grid(grid.start, grid.other, tuple(axis for axis in axes if axis[0] > 1))
    return None


def _fitted(piece: Piece, relation: Grid, width: int, labels: Labels, *, whole: bool) -> tuple[Grid, Grid, int]:
    """A relation and a piece's grid as elements of one width, and that width."""
    if piece.width == width:
        return relation, piece.grid, width
    soft = piece.table is None and not isinstance(labels[piece.label], Copied)
    if piece.width > width:
        if soft:
            return relation, _expanded(piece.grid, piece.width, width, 0), width
        wider = None if whole else _folded(relation, width, piece.width, bytes_too=True)
        if wider is None:
            raise Partial
        return wider, piece.grid, piece.width
    if whole:
        wider = _folded(piece.grid, piece.width, width, bytes_too=False) if soft else None
        if wider is None:
            raise Partial
        return relation, wider, width
    return _expanded(relation, width, piece.width, piece.width), piece.grid, piece.width


def _linear(relation: Grid, piece: Grid, width: int) -> list[Grid] | None:
    """``meet`` where the relation is one contiguous run that holds the whole piece: only numbers shift."""
    if len(relation.axes) != 1 or relation.axes[0][1] != width:
        return None
    shift, other = piece.start - relation.start, relation.axes[0][2]
    if shift < 0 or piece.last > relation.last or shift % width or any(step % width for _, step, _ in piece.axes):
        return None
    axes = tuple((extent, step // width * other, number) for extent, step, number in piece.axes)
    return [Grid(relation.other + shift // width * other, piece.other, axes)]


def _fill(ids: IdArray, labels: npt.NDArray[np.int32], piece: Piece, known: Labels) -> None:
    """Write a piece whose places are indices of two lists."""
    where, number = piece.grid.pairs()
    if piece.table is not None:
        ids[where], labels[where] = piece.table.ids[number], piece.table.labels[number]
    else:
        ids[where] = number if isinstance(known[piece.label], Copied) else 0
        labels[where] = piece.label
