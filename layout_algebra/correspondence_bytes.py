"""A correspondence as bytes: compact, versioned, checked, and harmless when they come from a stranger.

The checkpoint travels as in a map; workers as names by template; classes as counts, worker numbers and runs, all of
them integer tables. Reading checks every number, that runs are in normal form, that no id is in two classes, and that
no two classes have the same workers and width, so that what is read is a correspondence that ``correspond`` could make.

>>> from layout_algebra.correspondence import correspond
>>> from layout_algebra.source_map import SourceMap
>>> from layout_algebra.space import CheckpointSpace, TensorSpec
>>> space = CheckpointSpace([TensorSpec("w", (6,), "F32")])
>>> whole = SourceMap.from_ids(space, {"w": np.arange(1, 7)})
>>> found = correspond({"trainer/0": whole}, {f"engine/{k}/0": whole for k in range(100)})
>>> data = encode_correspondence(found)
>>> len(data) < 300, decode_correspondence(data).needers == found.needers
(True, True)
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from layout_algebra.dtypes import IdArray
from layout_algebra.errors import CorrespondenceBytesError, CorrespondenceError, LayoutError
from layout_algebra.map_bytes import MAX_BYTES, MAX_VALUES, PackedSpace, pack_space, unpack_space
from layout_algebra.name_bytes import PackedNames, decode_names, encode_names
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import (
    Budget,
    Packed,
    pack_column,
    pack_table,
    seal,
    unpack_column,
    unpack_table,
    unseal,
)
from layout_algebra.space import CheckpointSpace, natural_key

if TYPE_CHECKING:
    from layout_algebra.correspondence import Correspondence, DemandClass

MAGIC = b"TLCORR\x00\x01"
MAX_STRETCHES = 1 << 25
"""Most stretches of consecutive ids, over all classes, that ``decode_correspondence`` accepts."""
MAX_CLASSES = 1 << 20


class _Correspondence(msgspec.Struct, array_like=True, frozen=True):
    space: PackedSpace
    holders: PackedNames
    needers: PackedNames
    heads: Packed
    members: Packed
    runs: Packed


def encode_correspondence(found: Correspondence) -> bytes:
    """Serialize a correspondence.

    Raises
    ------
    CorrespondenceError
        If it is larger than ``decode_correspondence`` reads.
    """
    packed = _packed(found)
    plain = msgspec.msgpack.encode(packed)
    stretches = sum(int(group.runs.runs[:, 3].sum()) for group in found.classes)
    tables = (packed.heads, packed.members, packed.runs, *packed.holders.numbers, *packed.needers.numbers)
    tables += (packed.space.spec_of, *packed.space.names.numbers)
    values = sum(table.values for table in tables)
    too_many = values > MAX_VALUES or stretches > MAX_STRETCHES or len(found.classes) > MAX_CLASSES
    if len(plain) > MAX_BYTES or too_many:
        raise CorrespondenceError(
            f"correspondence of {len(found.classes)} classes has {stretches:,} stretches in {len(plain):,} bytes; "
            f"at most {MAX_STRETCHES:,} stretches in {MAX_BYTES:,} bytes can be read back"
        )
    return seal(MAGIC, plain)


def correspondence_digest(found: Correspondence) -> str:
    """Hex digest of a correspondence's content, whatever the compressor."""
    return hashlib.blake2b(MAGIC + msgspec.msgpack.encode(_packed(found)), digest_size=16).hexdigest()


def decode_correspondence(data: bytes) -> Correspondence:
    """Read ``encode_correspondence``'s output.

    Raises
    ------
    CorrespondenceBytesError
        For anything that ``encode_correspondence`` of this version did not write, or that contradicts itself.
    """
    plain = unseal(data, MAGIC, what="a correspondence", limit=MAX_BYTES, error=CorrespondenceBytesError)
    try:
        return _rebuild(msgspec.msgpack.decode(plain, type=_Correspondence))
    except CorrespondenceBytesError:
        raise
    except (msgspec.MsgspecError, LayoutError, ValueError, OverflowError) as error:
        raise CorrespondenceBytesError(f"correspondence does not decode: {error}") from error


def _packed(found: Correspondence) -> _Correspondence:
    holder = {worker: number for number, worker in enumerate(found.holders)}
    needer = {worker: number for number, worker in enumerate(found.needers)}
    heads = [(len(g.holders), len(g.needers), len(g.runs), g.item_bytes) for g in found.classes]
    members: list[int] = []
    for group in found.classes:
        members += [holder[worker] for worker in group.holders]
        members += [needer[worker] for worker in group.needers]
    runs = [np.empty((0, 4), dtype=np.int64), *(group.runs.runs for group in found.classes)]
    return _Correspondence(
        pack_space(found.space),
        encode_names(found.holders)[0],
        encode_names(found.needers)[0],
        pack_table(np.array(heads, dtype=np.int64).reshape(-1, 4)),
        pack_column(np.array(members, dtype=np.int64)),
        pack_table(np.concatenate(runs)),
    )


def _rebuild(packed: _Correspondence) -> Correspondence:
    from layout_algebra.correspondence import Correspondence, DemandClass

    budget = Budget(MAX_VALUES)
    space = unpack_space(packed.space, budget, CorrespondenceBytesError)
    holders, needers = (_workers(names, budget) for names in (packed.holders, packed.needers))
    both = set(holders) & set(needers)
    if both:
        raise CorrespondenceBytesError(f"{min(both)}: named as a holder and as a needer")
    heads = unpack_table(packed.heads, budget, CorrespondenceBytesError)
    members = unpack_column(packed.members, budget, CorrespondenceBytesError)
    runs = unpack_table(packed.runs, budget, CorrespondenceBytesError)
    _check_counts(heads, members, runs)
    _check_runs(runs, space)
    classes: list[DemandClass] = []
    member_at = run_at = 0
    for held, needed, count, item_bytes in heads.tolist():
        table = RunTable.from_runs(runs[run_at : run_at + count])
        if not count or not np.array_equal(table.runs, runs[run_at : run_at + count]):
            raise CorrespondenceBytesError(f"class {len(classes)}: its runs are empty or not in normal form")
        mine = _members(holders, members[member_at : member_at + held], "holders")
        theirs = _members(needers, members[member_at + held : member_at + held + needed], "needers")
        if not theirs:
            raise CorrespondenceBytesError(f"class {len(classes)}: nobody needs it")
        classes.append(DemandClass(mine, theirs, table, item_bytes))
        member_at += held + needed
        run_at += count
    _check_classes(classes, space)
    return Correspondence(space, holders, needers, tuple(classes))


def _workers(packed: PackedNames, budget: Budget) -> tuple[str, ...]:
    names = decode_names(packed, budget, CorrespondenceBytesError)
    if len(set(names)) != len(names):
        raise CorrespondenceBytesError("a worker is named twice")
    return tuple(sorted(names, key=natural_key))


def _members(workers: tuple[str, ...], numbers: IdArray, what: str) -> tuple[str, ...]:
    ascending = bool(np.all(np.diff(numbers) > 0))
    if len(numbers) and not (ascending and int(numbers[0]) >= 0 and int(numbers[-1]) < len(workers)):
        raise CorrespondenceBytesError(f"a class's {what} are not in order or not among the {len(workers)} workers")
    return tuple(workers[number] for number in numbers.tolist())


def _check_counts(heads: IdArray, members: IdArray, runs: IdArray) -> None:
    """Counts that add up to the tables, before any of them is used."""
    if heads.shape[1] != 4 or runs.shape[1] != 4:
        raise CorrespondenceBytesError("a table of classes or runs does not have four columns")
    if len(heads) > MAX_CLASSES:
        raise CorrespondenceBytesError(f"{len(heads):,} classes; at most {MAX_CLASSES:,} are read")
    most = max(len(members), len(runs))
    if len(heads) and (int(heads.min()) < 0 or int(heads[:, :3].max()) > most):
        raise CorrespondenceBytesError("a class counts workers or runs that are not there")
    if int(heads[:, :2].sum()) != len(members) or int(heads[:, 2].sum()) != len(runs):
        raise CorrespondenceBytesError("the classes' workers and runs do not add up to the tables")


def _check_runs(runs: IdArray, space: CheckpointSpace) -> None:
    """Bounds of every number and of the stretches they stand for; floats cannot wrap."""
    if not len(runs):
        return
    top = space.total_elements
    if int(runs.min()) < 1 or int(runs.max()) > top:
        raise CorrespondenceBytesError(f"a run has a number outside 1..{top}")
    last = runs[:, 0] + runs[:, 1] + (runs[:, 3] - 1).astype(np.float64) * runs[:, 2]
    if float(last.max()) > top + 1 or float(runs[:, 3].astype(np.float64).sum()) > MAX_STRETCHES:
        raise CorrespondenceBytesError(f"runs reach past {top} or have more than {MAX_STRETCHES} stretches")


def _check_classes(classes: list[DemandClass], space: CheckpointSpace) -> None:
    """Every id in one class of its own width; no two classes alike; ascending by first id."""
    if not classes:
        return
    if len({(group.holders, group.needers, group.item_bytes) for group in classes}) != len(classes):
        raise CorrespondenceBytesError("two classes have the same workers and width")
    firsts = [int(group.runs.runs[0, 0]) for group in classes]
    if firsts != sorted(firsts):
        raise CorrespondenceBytesError("classes are not ascending by first id")
    spans = np.concatenate([group.runs.intervals for group in classes])
    order = np.argsort(spans[:, 0], kind="stable")
    if bool(np.any(spans[order[1:], 0] < spans[order[:-1], 1])):
        raise CorrespondenceBytesError("an id is in two classes")
    widths = np.repeat([group.item_bytes for group in classes], [len(group.runs.intervals) for group in classes])
    # Tensors without elements have a width too, which no id has.
    filled = np.flatnonzero(np.diff(space.starts) > 0)
    changes = np.zeros(len(space), dtype=np.int64)
    changes[filled] = np.concatenate([[0], np.cumsum(np.diff(space.item_bits[filled]) != 0)])
    first = np.searchsorted(space.starts, spans[:, 0], side="right") - 1
    last = np.searchsorted(space.starts, spans[:, 1] - 1, side="right") - 1
    if bool(np.any(changes[first] != changes[last]) or np.any(space.item_bits[first] // 8 != widths)):
        raise CorrespondenceBytesError("a class holds elements of another width than its own")
