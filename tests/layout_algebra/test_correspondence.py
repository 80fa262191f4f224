"""correspond: cells against plain sets; order; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.errors import CorrespondenceError
from layout_algebra.runs import RunTable
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

SPACE = CheckpointSpace([TensorSpec("a", (3, 2), "BF16"), TensorSpec("f", (4,), "F32"), TensorSpec("g", (5,), "BF16")])
WIDTH = {i: 4 if SPACE.locate(i)[0] == "f" else 2 for i in range(1, SPACE.total_elements + 1)}

worker_ids = st.sets(st.integers(1, SPACE.total_elements))
sides = st.lists(worker_ids, min_size=1, max_size=4)


def map_of(ids: set[int]) -> SourceMap:
    """One parameter per dtype, ids descending, so that no layout is the identity."""
    halves = {name: [i for i in sorted(ids, reverse=True) if (WIDTH[i] == 4) == (name == "f")] for name in "hf"}
    return SourceMap.from_ids(
        SPACE, {name: np.array(half, dtype=np.int64) for name, half in halves.items()}, {"h": "BF16", "f": "F32"}
    )


def cells(found: Correspondence) -> dict[int, tuple[tuple[str, ...], tuple[str, ...], int]]:
    out = {}
    for group in found.classes:
        assert group.runs
        for i in group.runs.ids().tolist():
            assert i not in out, "classes are disjoint"
            out[i] = (group.holders, group.needers, group.item_bytes)
    return out


@given(sides, sides)
def test_classes_are_the_maximal_cells(held: list[set[int]], needed: list[set[int]]) -> None:
    holders = {f"trainer/{rank}": ids for rank, ids in enumerate(held)}
    needers = {f"engine/0/{rank}": ids for rank, ids in enumerate(needed)}
    found = correspond({w: map_of(i) for w, i in holders.items()}, {w: map_of(i) for w, i in needers.items()})
    wanted = {
        i: (tuple(w for w in holders if i in holders[w]), tuple(w for w in needers if i in needers[w]), WIDTH[i])
        for i in set().union(*needed)
    }
    assert cells(found) == wanted
    keys = [(group.holders, group.needers, group.item_bytes) for group in found.classes]
    assert len(set(keys)) == len(keys), "equal signatures are one class"
    firsts = [int(group.runs.ids()[0]) for group in found.classes]
    assert firsts == sorted(firsts)
    turned = correspond(
        {w: map_of(holders[w]) for w in reversed(holders)}, {w: map_of(needers[w]) for w in reversed(needers)}
    )
    assert cells(turned) == cells(found)


def test_replicas_merge_and_ranks_are_in_natural_order() -> None:
    """Local names are equal everywhere; identity is the map (case P09)."""
    space = CheckpointSpace(TensorSpec(f"experts.{e}.w", (2, 1), "BF16") for e in range(4))
    parts = [np.arange(1, 5).reshape(2, 2, 1), np.arange(5, 9).reshape(2, 2, 1)]
    ranks = {f"engine/{e}/{r}": SourceMap.from_ids(space, {"experts.w": parts[r]}) for e in range(12) for r in range(2)}
    found = correspond({"trainer/0": SourceMap.from_ids(space, {"w": np.arange(1, 9)})}, ranks)
    assert [group.runs.ids().tolist() for group in found.classes] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found.classes[0].needers == tuple(f"engine/{e}/0" for e in range(12))


def test_ids_an_opaque_parameter_depends_on_are_needed() -> None:
    entry = ParameterMap((2,), "F32", CopyTable.empty(), RunTable.from_ids([0, 1]), ("f",))
    needer = SourceMap(SPACE, {"A": entry})
    found = correspond({"trainer/0": map_of({7, 8, 9})}, {"engine/0/0": needer})
    assert cells(found) == {i: (("trainer/0",) if i < 10 else (), ("engine/0/0",), 4) for i in (7, 8, 9, 10)}
    assert [group.runs.ids().tolist() for group in found.unheld()] == [[10]]


def test_different_checkpoints_are_refused_by_name() -> None:
    other = CheckpointSpace([TensorSpec("a", (2, 3), "BF16"), TensorSpec("h.0", (4,), "F32")])
    with pytest.raises(
        CorrespondenceError, match=r"engine/0/0.*only engine/0/0: f, g; only trainer/0: h.0.*a \(3, 2\)"
    ):
        correspond(
            {"trainer/0": SourceMap.from_ids(other, {"p": np.array([1])})},
            {"engine/0/0": map_of({1})},
        )


def test_a_holder_must_hold_every_bit() -> None:
    space = CheckpointSpace([TensorSpec("w", (2,), "F32"), TensorSpec("h", (2,), "BF16")])
    needer = {"engine/0/0": SourceMap.from_ids(space, {"p": np.array([1, 2, 3])}, {"p": "F32"})}
    narrow = SourceMap.from_ids(space, {"p": np.array([3, 4])}, {"p": "BF16"})
    with pytest.raises(CorrespondenceError, match="p on trainer/0 holds w as BF16, which cannot hold every F32"):
        correspond({"trainer/0": narrow}, needer, cast=True)
    masters = SourceMap.from_ids(space, {"m": np.array([1, 2])}, {"m": "F32"})
    with pytest.raises(CorrespondenceError, match=r"m on trainer/0 holds h as F32, .* cast=True"):
        correspond({"trainer/0": masters}, needer)
    assert correspond({"trainer/0": masters}, needer, cast=True).classes


def test_a_needer_without_a_defined_conversion_is_refused() -> None:
    ids = SourceMap.from_ids(SPACE, {"p": np.array([1, 2])}, {"p": "I32"})
    with pytest.raises(CorrespondenceError, match="p on engine/0/0 is I32 and copies a, which is BF16"):
        correspond({"trainer/0": map_of({1, 2})}, {"engine/0/0": ids})


def test_one_worker_is_on_one_side() -> None:
    with pytest.raises(CorrespondenceError, match="w: named as a holder and as a needer"):
        correspond({"w": map_of({1})}, {"w": map_of({1})})


def test_what_is_no_map_is_refused_by_name() -> None:
    with pytest.raises(CorrespondenceError, match="'engine/0/0': bytes; expected the worker's name and its SourceMap"):
        correspond({"w": map_of({1})}, {"engine/0/0": map_of({1}).to_bytes()})  # type: ignore[dict-item]
    with pytest.raises(CorrespondenceError, match="0: SourceMap; expected"):
        correspond({0: map_of({1})}, {})  # type: ignore[dict-item]


def test_workers_with_nothing_are_kept() -> None:
    found = correspond({"trainer/0": map_of({1}), "trainer/1": map_of(set())}, {"engine/0/0": map_of(set())})
    assert found.holders == ("trainer/0", "trainer/1")
    assert found.needers == ("engine/0/0",)
    assert found.classes == ()
