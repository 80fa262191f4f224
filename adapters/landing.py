"""Digests of what lands directly, taken right after it landed, while it is in the cache.

What a rollout copies straight out of trainers' parameters comes in batches (`transfer_exec.fetching`). Every batch is
digested by the thread that copied it, from the memory that it was copied to; what comes in rounds, and what is there
already, is digested when everything has landed:

::

    landing = Landing.of(proof, executor.program, executor.batches, memory, executor.staged)      # once per plan
    landed  = landing.begin()                                                                     # in every update
    executor.run(version, landed=landed.add)
    landed.digests(memory, executor.staged)       # what proof.digests(memory, executor.staged) would find

A digest is a sum over elements, so it may be taken in parts: every element is in exactly one, and a batch has a place
of its own for its part. So a batch that is told twice counts once, and one that was never told is an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapters.failures import VerificationError
from adapters.verification import Proof
from layout_algebra._digest_kernels import digest_strips
from layout_algebra.dtypes import IdArray, dtype_of
from layout_algebra.fingerprint import FingerprintPart, FingerprintPlan, Memory
from transfer_exec.program import FetchColumn, Program

__all__ = ["DIGESTED_BYTES", "Landed", "Landing"]

DIGESTED_BYTES = 512 << 10
"""What was read of this size is found in the cache by whoever digests it next; less is not worth a call."""

_Batch = tuple[str, int]
"""Whom it is read from, and its number."""


class _Table(NamedTuple):
    """What one batch adds: for each width of elements, memory and the strips in it; and to which sums."""

    strips: tuple[tuple[npt.NDArray[np.unsignedinteger], IdArray], ...]
    sums: slice


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """A proof divided into what each batch brings and the rest.

    Attributes
    ----------
    rest
        Of what no batch brings.
    tables
        What is digested when a batch has landed.
    classes
        Of all batches' sums, one after the other, which class each is of.
    keeps
        The arrays whose memory the tables mean.
    """

    rest: Proof
    tables: Mapping[_Batch, _Table]
    classes: IdArray
    keeps: tuple[npt.NDArray[np.generic], ...]

    @staticmethod
    def of(
        proof: Proof, program: Program, batches: Mapping[str, Sequence[IdArray]], memory: Memory, staged: Memory
    ) -> Landing:
        """Divide a proof.

        Parameters
        ----------
        proof
            Of the worker.
        program, batches
            Of its executor.
        memory, staged
            What the executor is bound to, as `Proof.digests` takes them; contiguous where batches land.
        """
        keys = [(peer, number) for peer, each in batches.items() for number in range(len(each))]
        rows = np.concatenate(
            [np.empty((0, len(FetchColumn)), dtype=np.int64), *(r for e in batches.values() for r in e)]
        )
        batch = np.repeat(np.arange(len(keys)), [len(part) for each in batches.values() for part in each])
        found: dict[int, list[tuple[int, IdArray]]] = {}
        rests: list[FingerprintPlan] = []
        targets: list[npt.NDArray[np.generic]] = []
        for plan, arrays, of_staged in ((proof.plan, memory, False), (proof.staged, staged, True)):
            parts, rest = plan.by_place(_places(program, rows, batch, of_staged=of_staged))
            rests.append(rest)
            for number, pieces in parts.items():
                for piece in pieces:
                    targets.append(arrays[piece.parameter])
                    found.setdefault(number, []).append(_by_address(piece, targets[-1]))
        whole = _whole_memory(targets)
        tables: dict[_Batch, _Table] = {}
        classes: list[IdArray] = [np.empty(0, dtype=np.int64)]
        begin = 0
        for number, strips in sorted(found.items()):
            mine = np.unique(np.concatenate([rows[:, 4] for _, rows in strips]))
            tables[keys[number]] = _Table(_together(strips, mine, whole), slice(begin, begin + len(mine)))
            classes.append(mine)
            begin += len(mine)
        return Landing(proof.only(*rests), tables, np.concatenate(classes), tuple(targets))

    def begin(self) -> Landed:
        """For one update."""
        return Landed(self)


class Landed:
    """The digests of one update, as it lands.

    Parameters
    ----------
    landing
        What lands.
    """

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._sums = np.zeros(len(landing.classes), dtype=np.uint64)
        self._left = set(landing.tables)

    @property
    def rest(self) -> Proof:
        """Of what `digests` has still to look at."""
        return self._landing.rest

    def add(self, peer: str, number: int) -> None:
        """Digest a batch that is in memory; on any thread."""
        table = self._landing.tables.get((peer, number))
        if table is not None:
            mine = self._sums[table.sums]
            mine[:] = 0
            for memory, rows in table.strips:
                digest_strips(memory, rows, mine)
            self._left.discard((peer, number))

    def digests(self, memory: Memory, staged: Memory) -> dict[int, int]:
        """Digest the rest, when all has landed; every class by its number. Memory as `Proof.digests` takes it.

        Raises
        ------
        VerificationError
            If a batch was never added.
        """
        if self._left:
            peer, number = min(self._left)
            raise VerificationError(
                f"{len(self._left)} of {len(self._landing.tables)} batches were not digested when they landed, the "
                f"first of them batch {number} of {peer}; the new version is not to be used"
            )
        total = self.rest.sums(memory, staged)
        np.add.at(total, self._landing.classes, self._sums)
        return self.rest.by_number(total)


def _places(program: Program, rows: IdArray, batch: IdArray, *, of_staged: bool) -> dict[str, IdArray]:
    """Which elements of which tensors lie in which batch, as `FingerprintPlan.by_place` takes them."""
    out: dict[str, IdArray] = {}
    for position in np.unique(rows[:, FetchColumn.TENSOR]).tolist():
        tensor = program.tensors[position]
        if tensor.staged == of_staged:
            mine = rows[:, FetchColumn.TENSOR] == position
            begin, size = rows[mine, FetchColumn.OFFSET], rows[mine, FetchColumn.BYTES]
            places = np.stack([begin, begin + size, batch[mine]], axis=1)
            places[:, :2] //= dtype_of(tensor.dtype).item_bytes
            out[tensor.name] = places[np.argsort(places[:, 0])]
    return out


def _by_address(part: FingerprintPart, array: npt.NDArray[np.generic]) -> tuple[int, IdArray]:
    """The width of a part's elements, and its strips with addresses in place of indices."""
    assert array.flags.c_contiguous, "what is read into is contiguous, or the executor has refused it"
    item_bytes, rows = dtype_of(part.wire).item_bytes, part.rows.copy()
    rows[:, 2] = array.ctypes.data + rows[:, 2] * item_bytes
    return item_bytes, rows


def _whole_memory(arrays: Sequence[npt.NDArray[np.generic]]) -> dict[int, npt.NDArray[np.unsignedinteger]]:
    """By width of elements all memory from the first array to the last as one, so that a batch of many is one call.

    What lies between them is not looked at.
    """
    out = {}
    for item_bytes in {array.itemsize for array in arrays}:
        some = [array for array in arrays if array.itemsize == item_bytes]
        begin = min(array.ctypes.data for array in some)
        size = max(array.ctypes.data + array.nbytes for array in some) - begin
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
        out[item_bytes] = raw[: size - size % item_bytes].view(f"u{item_bytes}")
    return out


def _together(
    parts: Sequence[tuple[int, IdArray]], classes: IdArray, whole: Mapping[int, npt.NDArray[np.unsignedinteger]]
) -> tuple[tuple[npt.NDArray[np.unsignedinteger], IdArray], ...]:
    """Strips by width, their addresses as indices and their classes as positions among some."""
    out = []
    for item_bytes in sorted({width for width, _ in parts}):
        memory = whole[item_bytes]
        rows = np.concatenate([rows for width, rows in parts if width == item_bytes])
        rows[:, 2] = (rows[:, 2] - memory.ctypes.data) // item_bytes
        rows[:, 4] = np.searchsorted(classes, rows[:, 4])
        out.append((memory, rows))
    return tuple(out)
