"""Declared boxes that contradict each other are named; empty shards change nothing, whatever offset they claim."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from layout_algebra.blocks import declare, whole
from layout_algebra.correspondence import correspond
from layout_algebra.errors import CorrespondenceError, MapError
from layout_algebra.shardings import fsdp2
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from layout_algebra.symbolic import fit

SEVEN = CheckpointSpace([TensorSpec("w", (7, 4), "BF16")])
FIVE = CheckpointSpace([TensorSpec("w", (5, 2), "BF16"), TensorSpec("e", (0, 4), "BF16")])


def boxes(ranges: list[tuple[int, int]]) -> dict[tuple[int, int], SourceMap]:
    """Ranks that say which rows of seven they keep."""
    w = whole(SEVEN, "w")
    return {(rank, len(ranges)): declare(SEVEN, {"w": w.take(0, *rows)}) for rank, rows in enumerate(ranges)}


def test_offsets_by_floor_division_overlap_and_are_named() -> None:
    """Ceil-sized chunks of 7 rows over 3 ranks, at offsets rank * 7 // 3."""
    wrong = fit(boxes([(0, 3), (2, 5), (4, 7)]))
    assert [str(fault) for fault in wrong.prove(3).faults] == [
        "w[2:3, :] is held by 2 ranks (0, 1) of 3, expected 1",
        "w[4:5, :] is held by 2 ranks (1, 2) of 3, expected 1",
    ]
    assert wrong.prove(3, replicas=["w"]).holds, "unless replicas are declared"
    right = fit(boxes([(0, 3), (3, 6), (6, 7)]))
    assert right.prove(3).holds
    assert right.instantiate(2, 3).same_as(declare(SEVEN, {"w": fsdp2(whole(SEVEN, "w"), rank=2, degree=3)}))


def test_a_gap_between_boxes_is_named_and_not_served() -> None:
    gap = boxes([(0, 3), (4, 7)])
    assert [str(fault) for fault in fit(gap).prove(2).faults] == ["w[3:4, :] is held by no rank of 2, expected 1"]
    needs = declare(SEVEN, {"w": whole(SEVEN, "w")})
    found = correspond({f"trainer/{rank}": held for (rank, _), held in gap.items()}, {"engine/0/0": needs})
    unheld = [entry.runs.ids().tolist() for entry in found.classes if not entry.holders]
    assert unheld == [[13, 14, 15, 16]], "row 3, which a plan refuses by name"


@pytest.mark.parametrize("offset", [0, 4, 5, 6])
def test_an_empty_shard_may_claim_any_offset(offset: int) -> None:
    w = whole(FIVE, "w")
    held = {f"trainer/{rank}": declare(FIVE, {"w": fsdp2(w, rank=rank, degree=4)}) for rank in range(3)}
    held["trainer/3"] = declare(FIVE, {"w": w.take(0, offset, offset)})
    assert held["trainer/3"].shape("w") == (0, 2)
    assert held["trainer/3"].same_as(declare(FIVE, {"w": fsdp2(w, rank=3, degree=4)}))
    found = correspond(held, {"engine/0/0": declare(FIVE, {"w": w, "e": whole(FIVE, "e")})})
    owners = sorted(holder for entry in found.classes for holder in entry.holders)
    assert owners == ["trainer/0", "trainer/1", "trainer/2"]
    assert sum(entry.runs.elements for entry in found.classes) == 10


def test_boxes_past_the_tensor_are_what_numpy_makes_of_them() -> None:
    ids = whole(SEVEN, "w").ids()
    for start, stop in ((6, 8), (5, 3), (-1, 2), (-2, 7)):
        assert np.array_equal(whole(SEVEN, "w").take(0, start, stop).ids(), ids[start:stop])
    with pytest.raises(MapError, match="no part 2 of 2 equal parts"):
        whole(FIVE, "w").shard(1, 2, 2)


def test_a_tensor_without_elements_needs_no_source() -> None:
    held = declare(FIVE, {"w": whole(FIVE, "w")})
    assert held.coverage().unused_tensors == ()
    both = declare(FIVE, {"w": whole(FIVE, "w"), "e": whole(FIVE, "e")})
    assert both.ids("e").shape == (0, 4)
    assert SourceMap.from_bytes(both.to_bytes()).same_as(both)
    assert correspond({"trainer/0": held}, {"engine/0/0": both}).classes[0].runs.elements == 10


def test_maps_of_different_checkpoints_do_not_meet() -> None:
    other = CheckpointSpace([TensorSpec("w", (7, 5), "BF16")])
    with pytest.raises(CorrespondenceError, match="checkpoint"):
        correspond(
            {"trainer/0": declare(SEVEN, {"w": whole(SEVEN, "w")})},
            {"engine/0/0": declare(other, {"w": whole(other, "w")})},
        )


def test_the_algebra_works_where_torch_cannot_be_imported() -> None:
    """Shardings (torch's and jax's by shape and mesh), formulas, proofs, correspondence, bytes, digests."""
    script = textwrap.dedent(
        """
        import sys
        for name in ("torch", "jax", "zmq", "transformers"):
            sys.modules[name] = None
        import numpy as np
        from layout_algebra import CheckpointSpace, SourceMap, TensorSpec, correspond, fingerprint
        from layout_algebra.blocks import declare, whole
        from layout_algebra.shardings import column_parallel, dtensor, jax_sharding
        from layout_algebra.symbolic import fit

        class Shard:
            dim = 0
            def is_shard(self, dim=None): return dim in (None, 0)
            def is_replicate(self): return False
            def is_partial(self, reduce_op=None): return False

        class Named:
            def devices_indices_map(self, shape):
                return {0: (slice(0, 2), slice(None)), 1: (slice(2, 4), slice(None))}

        space = CheckpointSpace([TensorSpec("w", (4, 2), "BF16")])
        w = whole(space, "w")
        def plain(rank, degree):
            return declare(space, {"w": column_parallel(w, rank=rank, degree=degree)})
        for rank in (0, 1):
            mine = dtensor(w, mesh_shape=(2,), placements=(Shard(),), coordinate=(rank,))
            theirs = jax_sharding(w, sharding=Named(), device=rank)
            assert declare(space, {"w": mine}).same_as(plain(rank, 2))
            assert declare(space, {"w": theirs}).same_as(plain(rank, 2))
        family = fit({(r, d): plain(r, d) for d in (1, 2, 4) for r in range(d)})
        assert family.prove().holds
        found = correspond({"trainer/0": plain(0, 1)}, {f"engine/0/{r}": plain(r, 2) for r in range(2)})
        assert sum(entry.runs.elements for entry in found.classes) == 8
        assert SourceMap.from_bytes(plain(1, 2).to_bytes()).same_as(plain(1, 2))
        assert "w" in fingerprint(plain(0, 1), {"w": np.zeros((4, 2), np.uint16)})
        print(family.explain("w"))
        """
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "w[:, :] = w[4*r/d : 4*(r+1)/d, :]"


def test_ids_that_contradict_the_checkpoint_are_refused() -> None:
    for ids, message in (
        (np.array([29]), "expected -1..28"),
        (np.array([-2]), "expected -1..28"),
        (np.array([0.5]), "integers"),
    ):
        with pytest.raises(MapError, match=message):
            SourceMap.from_ids(SEVEN, {"p": ids})
