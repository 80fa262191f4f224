"""Correspondences as bytes: they come back equal, and strangers' bytes do no harm."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.blocks import declare
from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.correspondence_bytes import MAGIC
from layout_algebra.errors import CorrespondenceBytesError, CorrespondenceError, LayoutError
from layout_algebra.map_bytes import MAX_BYTES
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import seal, unseal
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from tests.layout_algebra.kimi_k2 import checkpoint, rollout_rank

SPACE = CheckpointSpace(
    [TensorSpec("a", (3, 2), "BF16"), TensorSpec("e", (0, 2), "F64"), TensorSpec("f", (4,), "F32"),
     TensorSpec("g", (5,), "BF16")]
)  # fmt: skip
WIDTH = {i: 4 if SPACE.locate(i)[0] == "f" else 2 for i in range(1, SPACE.total_elements + 1)}
sides = st.lists(st.sets(st.integers(1, SPACE.total_elements)), max_size=4)


def map_of(ids: set[int]) -> SourceMap:
    halves = {name: [i for i in sorted(ids) if (WIDTH[i] == 4) == (name == "f")] for name in "hf"}
    return SourceMap.from_ids(
        SPACE, {name: np.array(half, dtype=np.int64) for name, half in halves.items()}, {"h": "BF16", "f": "F32"}
    )


def sample() -> Correspondence:
    held = {"trainer/0": map_of(set(range(1, 9))), "trainer/1": map_of(set(range(5, 14)))}
    needed = {"engine/0/0": map_of({1, 3, 5, 8, 9, 10}), "engine/0/1": map_of({1, 3, 5, 11, 15})}
    return correspond(held, needed)


def plain_of(data: bytes) -> bytes:
    return unseal(data, MAGIC, what="a correspondence", limit=MAX_BYTES, error=CorrespondenceBytesError)


def content(found: Correspondence) -> object:
    classes = [(g.holders, g.needers, g.runs.runs.tolist(), g.item_bytes) for g in found.classes]
    return found.space.digest(), found.holders, found.needers, classes


@given(sides, sides)
def test_correspondences_come_back_equal(held: list[set[int]], needed: list[set[int]]) -> None:
    found = correspond(
        {f"trainer/{rank}": map_of(ids) for rank, ids in enumerate(held)},
        {f"engine/0/{rank}": map_of(ids) for rank, ids in enumerate(needed)},
    )
    again = Correspondence.from_bytes(found.to_bytes())
    assert content(again) == content(found)
    assert again.digest() == found.digest()


@given(sides, sides)
def test_digests_are_equal_exactly_when_contents_are(left: list[set[int]], right: list[set[int]]) -> None:
    holder = {"trainer/0": map_of(set(range(1, 12)))}
    a, b = (
        correspond(holder, {f"engine/0/{rank}": map_of(ids) for rank, ids in enumerate(side)}) for side in (left, right)
    )
    assert (a.digest() == b.digest()) == (content(a) == content(b))


def test_many_ranks_of_a_large_model_are_small() -> None:
    layers = 4
    space = checkpoint(layers, 32)
    rollouts = [declare(space, rollout_rank(space, rank=r, degree=8, layers=layers, experts=32)) for r in range(8)]
    found = correspond(
        {f"trainer/{k}": rollouts[k % 8] for k in range(64)},
        {f"engine/{k // 8}/{k % 8}": rollouts[k % 8] for k in range(64)},
    )
    data = found.to_bytes()
    assert len(data) < 6_000
    assert content(Correspondence.from_bytes(data)) == content(found)


def test_well_formed_lies_are_refused() -> None:
    """The structure is right and the digest too; the contents contradict each other."""
    honest = plain_of(sample().to_bytes())
    assert content(Correspondence.from_bytes(seal(MAGIC, honest))) == content(sample())

    def refused(path: list[int], value: object) -> None:
        lie = msgspec.msgpack.decode(honest)
        inner = lie
        for step in path[:-1]:
            inner = inner[step]
        assert inner[path[-1]] != value
        inner[path[-1]] = value
        with pytest.raises(CorrespondenceBytesError):
            Correspondence.from_bytes(seal(MAGIC, msgspec.msgpack.encode(lie)))

    for path in ([0], [1], [2], [3], [4], [5], [1, 0], [2, 1]):
        for value in (None, 7, b"", [[]], [1, 1, b"\x00"], [1, 4, b"\x00\x00\x00\x00"], [2**50, 1, b"\x00"]):
            refused(path, value)
    other = msgspec.msgpack.decode(plain_of(sample().to_bytes()))
    refused([1], other[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f.holders, f.needers, (f.classes[0], f.classes[0])), "same workers and width"),
        (lambda f: (f.holders, f.needers, f.classes[::-1]), "ascending"),
        (lambda f: (f.holders, f.holders, ()), "holder and as a needer"),
        (lambda f: (("w", "w"), f.needers, ()), "named twice"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], needers=()),)), "nobody needs"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], holders=f.holders[::-1]),)), "not in order"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], item_bytes=8),)), "another width"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], runs=RunTable.from_ids([6, 7])),)), "another width"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], runs=RunTable.from_ids([15, 16])),)), "reach past"),
        (lambda f: (f.holders, f.needers, (_with(f.classes[0], runs=RunTable.empty()),)), "empty or not in normal"),
        (
            lambda f: (
                f.holders,
                f.needers,
                (_with(f.classes[0], runs=RunTable(np.array([[3, 1, 1, 1], [1, 1, 1, 1]]))),),
            ),
            "not in normal form",
        ),
        (
            lambda f: (f.holders, f.needers, (f.classes[0], _with(f.classes[1], runs=f.classes[0].runs))),
            "in two classes|same workers",
        ),
    ],
)
def test_contradictions_are_named(change: object, words: str) -> None:
    found = sample()
    holders, needers, classes = change(found)  # type: ignore[operator]
    lie = Correspondence(SPACE, holders, needers, classes)
    with pytest.raises(CorrespondenceBytesError, match=words):
        Correspondence.from_bytes(lie.to_bytes())


def _with(group: object, **changes: object) -> object:
    return dataclasses.replace(group, **changes)  # type: ignore[type-var]


def test_mutated_bytes_raise_only_our_errors() -> None:
    rng = np.random.default_rng(2)
    data = sample().to_bytes()
    plain = plain_of(data)
    survived = 0
    for trial in range(2_000):
        target = bytearray(data if trial % 2 else plain)
        for _ in range(rng.integers(1, 4)):
            where = int(rng.integers(len(target)))
            if rng.integers(3):
                target[where] ^= 1 << int(rng.integers(8))
            else:
                target[where : where + int(rng.integers(3))] = rng.integers(0, 256, 2, dtype=np.uint8).tobytes()
        began = time.monotonic()
        try:
            found = Correspondence.from_bytes(bytes(target) if trial % 2 else seal(MAGIC, bytes(target)))
        except LayoutError:
            pass
        else:
            survived += 1
            assert content(Correspondence.from_bytes(found.to_bytes())) == content(found)
        assert time.monotonic() - began < 10
    assert 0 < survived < 600


def test_what_could_not_be_read_back_is_not_written() -> None:
    space = CheckpointSpace([TensorSpec("w", (2**28,), "BF16")])
    whole = SourceMap.from_ids(SPACE, {})
    found = correspond({"trainer/0": whole}, {"engine/0/0": whole})
    group = _with(
        sample().classes[0], runs=RunTable(np.array([[1, 1, 2, 2**26]])), holders=("trainer/0",), needers=("e",)
    )
    with pytest.raises(CorrespondenceError, match="can be read back"):
        Correspondence(space, found.holders, ("e",), (group,)).to_bytes()  # type: ignore[arg-type]
