"""The GPU backend: one Triton launch moves a whole round, whatever its rows look like.

`prepare` turns the rows of a round into tiles of about equal work and puts both tables on the device, once per plan;
`Job.run` is one launch of one program per tile. Tiles are cut by what the rows allow:

::

    LINE    part of one long run that is contiguous on both sides, in words as wide as its alignment
    LINES   several such runs of one row
    SMALL   several rows of one run of a few words
    CROSS   a transpose: the source is contiguous along one axis, the target along the other
    ANY     whatever else

The same file runs on the CPU under Triton's interpreter, which is how it is tested where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from layout_algebra.dtypes import IdArray
from layout_algebra.runs import expand_ranges
from transfer_exec.conversions import COPY_WIDTHS, SOURCE_BYTES, TARGET_BYTES
from transfer_exec.kernels._triton_kernels import ALIGNED, ANY, CODES, CROSS, LINE, LINES, SMALL, move_tiles
from transfer_exec.kernels.base import RowColumn

LINE_WORDS = 1024
SMALL_ROWS = 32
SMALL_WORDS = 32
SIDE = 32
WARPS = 4

_COPIES = len(COPY_WIDTHS)
_LENGTH, _COUNT = 6, 7
_MOST_PROGRAMS = 1 << 30


class TritonKernels:
    """Kernels that run on a GPU's stream.

    Parameters
    ----------
    device
        Where the memory is that rows address: ``"cuda:0"``. ``"cpu"`` works under Triton's interpreter only.
    stream
        Where jobs run; by default on whatever stream is current when they do.
    """

    def __init__(self, device: str | torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = torch.device(device)
        self._stream = stream

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "triton"

    def prepare(self, rows: IdArray, *, packing: bool) -> TritonJob:
        """Make ready to copy every element of every row; see `Kernels.prepare`. Both ways are one here."""
        table, tiles = tiles_of(rows)
        rows_there, tiles_there = (torch.from_numpy(each).to(self._device) for each in (table, tiles))
        return TritonJob(rows_there, tiles_there, self._stream)


@dataclass(frozen=True, slots=True, eq=False)
class TritonJob:
    """A round's rows and tiles on the device.

    Attributes
    ----------
    rows
        int64, shape ``(n, 8)``: source, its stride and step, target, its stride and step, length, count; bytes, but for
        length (words or elements) and count.
    tiles
        int64, shape ``(m, 4)``: row, first run (of a SMALL tile the number of rows), first word, kind and code.
    stream
        Where it runs; None for the stream that is current.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    stream: torch.cuda.Stream | None = None

    def launch(self) -> None:
        """Put the copies on the job's stream, or the current one, and return."""
        with torch.cuda.stream(self.stream):  # nothing is done for None
            self._launch()

    def run(self) -> None:
        """Copy every element of every row, and return when all are written."""
        self.launch()
        if self.rows.device.type == "cuda":
            (self.stream or torch.cuda.current_stream(self.rows.device)).synchronize()

    def _launch(self) -> None:
        for first in range(0, len(self.tiles), _MOST_PROGRAMS):
            grid = (min(len(self.tiles) - first, _MOST_PROGRAMS),)
            move_tiles[grid](
                self.rows,
                self.tiles,
                first,
                LINE_WORDS=LINE_WORDS,
                SMALL_ROWS=SMALL_ROWS,
                SMALL_WORDS=SMALL_WORDS,
                SIDE=SIDE,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )


def tiles_of(rows: IdArray) -> tuple[IdArray, IdArray]:
    """Rows made regular, and the tiles that cover them.

    Parameters
    ----------
    rows
        int64, shape ``(n, 9)``, columns as in `RowColumn`.

    Returns
    -------
    tuple
        The tables of `TritonJob`.
    """
    rows = _square(_face_targets(rows[(rows[:, RowColumn.LENGTH] > 0) & (rows[:, RowColumn.COUNT] > 0)]))
    table, code = rows[:, : RowColumn.CODE].copy(), rows[:, RowColumn.CODE].copy()
    contiguous, copies = _contiguous(rows), code < _COPIES
    kind = np.full(len(table), ANY.value, dtype=np.int64)
    kind[copies & (table[:, 2] == SOURCE_BYTES[code]) & (table[:, 4] == TARGET_BYTES[code])] = CROSS.value
    whole = copies & contiguous
    code[whole] = _widen_words(table, whole, SOURCE_BYTES[code])
    kind[contiguous] = np.where(table[contiguous, _LENGTH] >= LINE_WORDS, LINE.value, LINES.value)
    kind[whole & (table[:, _COUNT] == 1) & (table[:, _LENGTH] <= SMALL_WORDS)] = SMALL.value
    order = np.argsort(kind * CODES.value + code, kind="stable")
    table, kind, code = table[order], kind[order], code[order]
    tiles = np.concatenate([_small_tiles(kind, code), _line_tiles(table, kind), _other_tiles(table, kind)])
    tiles[:, 3] = kind[tiles[:, 0]] * CODES.value + code[tiles[:, 0]]
    aligned = (tiles[:, 3] == LINE.value * CODES.value + 3) & _multiples_of_16(table)[tiles[:, 0]]
    tiles[aligned, 3] += ALIGNED.value - 3
    return table, tiles


def _contiguous(rows: IdArray) -> np.ndarray:
    """Rows whose runs are contiguous on both sides."""
    code = rows[:, RowColumn.CODE]
    whole: np.ndarray = (rows[:, 1] == SOURCE_BYTES[code]) & (rows[:, 4] == TARGET_BYTES[code])
    return whole


def _face_targets(rows: IdArray) -> IdArray:
    """Let the inner axis be the one along which targets are contiguous, or the only one."""
    width = TARGET_BYTES[rows[:, RowColumn.CODE]]
    along, across = np.abs(rows[:, 4]) == width, np.abs(rows[:, 5]) == width
    turn = (rows[:, _COUNT] > 1) & ((~along & across) | (rows[:, _LENGTH] == 1))
    return np.where(turn[:, None], rows[:, [0, 2, 1, 3, 5, 4, _COUNT, _LENGTH, RowColumn.CODE]], rows)


def _square(rows: IdArray) -> IdArray:
    """Join runs that follow each other, and give single runs with gaps a second axis, which squares need."""
    code, length = rows[:, RowColumn.CODE], rows[:, _LENGTH].copy()
    whole = _contiguous(rows)
    joined = whole & (rows[:, 2] == length * SOURCE_BYTES[code]) & (rows[:, 5] == length * TARGET_BYTES[code])
    rows[joined, _LENGTH] *= rows[joined, _COUNT]
    rows[joined, _COUNT] = 1
    folds = ~whole & (rows[:, _COUNT] == 1) & (length > SIDE)
    rest = rows[folds].copy()
    rows[folds, _COUNT], rows[folds, _LENGTH] = length[folds] // SIDE, SIDE
    rows[folds, 2], rows[folds, 5] = rows[folds, 1] * SIDE, rows[folds, 4] * SIDE
    done = length[folds] // SIDE * SIDE
    rest[:, 0] += done * rest[:, 1]
    rest[:, 3] += done * rest[:, 4]
    rest[:, _LENGTH] -= done
    return np.concatenate([rows, rest[rest[:, _LENGTH] > 0]])


def _widen_words(table: IdArray, which: np.ndarray, width: IdArray) -> IdArray:
    """Count lengths in the widest words that fit; their code."""
    length = table[which, _LENGTH] * width[which]
    facts = length | table[which, 0] | table[which, 3]
    steps = table[which, 2] | table[which, 5]
    facts |= np.where(table[which, _COUNT] > 1, steps, 0) | 8
    word = facts & -facts
    table[which, _LENGTH] = length // word
    table[which, 1] = table[which, 4] = word
    code: IdArray = np.searchsorted(np.array(COPY_WIDTHS), word).astype(np.int64)
    return code


def _multiples_of_16(table: IdArray) -> np.ndarray:
    facts = table[:, 0] | table[:, 3] | np.where(table[:, _COUNT] > 1, table[:, 2] | table[:, 5], 0)
    even: np.ndarray = facts % 16 == 0
    return even


def _small_tiles(kind: IdArray, code: IdArray) -> IdArray:
    """Up to SMALL_ROWS neighbours of one code share a tile."""
    small = np.flatnonzero(kind == SMALL.value)
    firsts, many = [], []
    for one in np.unique(code[small]).tolist():
        members = small[code[small] == one]
        starts = members[::SMALL_ROWS]
        firsts.append(starts)
        many.append(np.minimum(members[-1] + 1 - starts, SMALL_ROWS))
    return _tiles(firsts, many, [np.zeros(len(each), dtype=np.int64) for each in firsts])


def _line_tiles(table: IdArray, kind: IdArray) -> IdArray:
    """LINE: one stretch of one run a tile; LINES: as many whole runs as fit."""
    line, lines = np.flatnonzero(kind == LINE.value), np.flatnonzero(kind == LINES.value)
    stretches = -(-table[line, _LENGTH] // LINE_WORDS)
    row, nth = _repeat(line, stretches * table[line, _COUNT])
    per_run = np.repeat(stretches, stretches * table[line, _COUNT])
    fit = LINE_WORDS // table[lines, _LENGTH]
    group, number = _repeat(lines, -(-table[lines, _COUNT] // fit))
    runs = number * (LINE_WORDS // table[group, _LENGTH])
    return _tiles([row, group], [nth // per_run, runs], [nth % per_run * LINE_WORDS, np.zeros_like(runs)])


def _other_tiles(table: IdArray, kind: IdArray) -> IdArray:
    """CROSS and ANY: squares."""
    chosen = np.flatnonzero((kind == CROSS.value) | (kind == ANY.value))
    wide = -(-table[chosen, _LENGTH] // SIDE)
    number = wide * -(-table[chosen, _COUNT] // SIDE)
    row, nth = _repeat(chosen, number)
    across = np.repeat(wide, number)
    return _tiles([row], [nth // across * SIDE], [nth % across * SIDE])


def _repeat(rows: IdArray, counts: IdArray) -> tuple[IdArray, IdArray]:
    """Every row as often as its count says, and how often before."""
    return np.repeat(rows, counts), expand_ranges(np.zeros(len(rows), dtype=np.int64), counts)


def _tiles(rows: list[IdArray], runs: list[IdArray], words: list[IdArray]) -> IdArray:
    columns = [np.concatenate([np.empty(0, dtype=np.int64), *each]) for each in (rows, runs, words)]
    return np.stack([*columns, np.zeros_like(columns[0])], axis=1)
