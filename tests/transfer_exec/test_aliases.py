"""Parameters that share memory: fine where they hold the same elements, refused by both names where they do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from layout_algebra.correspondence import correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.errors import ProgramError
from transfer_exec.in_process import run_in_process
from transfer_exec.planner import make_plan
from transfer_exec.topology import Topology

SPACE = CheckpointSpace([TensorSpec("embed", (4, 6), "BF16"), TensorSpec("head", (4, 6), "BF16")])
EMBED = np.arange(1, 25).reshape(4, 6)
HEAD = EMBED + 24
TRAINED = {"embed": (EMBED + 100).astype(np.uint16), "head": (HEAD + 100).astype(np.uint16)}

Ids = dict[str, np.ndarray]
Views = Callable[[np.ndarray], dict[str, np.ndarray]]


def run(ids: Ids, memory: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """One update of one rollout from one trainer that holds everything."""
    maps = {
        "trainer/0": SourceMap.from_ids(SPACE, {"embed": EMBED, "head": HEAD}),
        "engine/0/0": SourceMap.from_ids(SPACE, ids, dtypes),
    }
    demand = correspond({"trainer/0": maps["trainer/0"]}, {"engine/0/0": maps["engine/0/0"]})
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    run_in_process(make_plan(demand, topology, buffer_bytes=1000), maps, {"trainer/0": TRAINED, "engine/0/0": memory})


SAME: dict[str, tuple[Ids, Views]] = {
    "one tensor, two names": ({"p": EMBED, "q": EMBED}, lambda base: {"p": base[:4], "q": base[:4]}),
    "turned": ({"p": EMBED, "q": EMBED.T}, lambda base: {"p": base[:4], "q": base[:4].T}),
    "a whole and its parts": (
        {"p": np.concatenate([EMBED, HEAD]), "q": EMBED[1:3], "r": HEAD[:, 2:4], "s": HEAD[2:3, 5]},
        lambda base: {"p": base, "q": base[1:3], "r": base[4:, 2:4], "s": base[6:7, 5]},
    ),
    "reversed": ({"p": EMBED, "q": EMBED[::-1]}, lambda base: {"p": base[:4], "q": base[3::-1]}),
    "one holds nothing there": (
        {"p": EMBED, "q": np.where(np.arange(6) < 3, EMBED, 0)},
        lambda base: {"p": base[:4], "q": base[:4]},
    ),
    "woven, no byte in common": (
        {"p": EMBED[:, :3], "q": HEAD[:, :3]},
        lambda base: {"p": base[:4, 0::2], "q": base[:4, 1::2]},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_elements_in_one_memory(case: str) -> None:
    ids, views = SAME[case]
    base = np.zeros((8, 6), dtype=np.uint16)
    memory = views(base)
    run(ids, memory)
    for name, array in memory.items():
        held = ids[name] > 0
        assert np.array_equal(array[held], (ids[name] + 100)[held]), name


OTHERS: dict[str, tuple[Ids, Views, str]] = {
    "two tensors": (
        {"p": EMBED, "q": HEAD},
        lambda base: {"p": base[:4], "q": base[:4]},
        r"p on engine/0/0 holds embed\.0 and q on engine/0/0 holds head\.0 in the same memory",
    ),
    "one element": (
        {"p": EMBED, "q": np.where(EMBED == 9, 10, EMBED)},
        lambda base: {"p": base[:4], "q": base[:4]},
        r"p on engine/0/0 holds embed\.8 and q on engine/0/0 holds embed\.9",
    ),
    "a row": (
        {"p": EMBED, "q": HEAD},
        lambda base: {"p": base[:4], "q": base[3:7]},
        r"p on engine/0/0 holds embed\.18 and q on engine/0/0 holds head\.0",
    ),
    "a column": (
        {"p": EMBED[:, :1], "q": HEAD[0]},
        lambda base: {"p": base[:4, 4:5], "q": base[2]},
        r"p on engine/0/0 holds embed\.12 and q on engine/0/0 holds head\.4",
    ),
    "not turned": (
        {"p": EMBED[:, :4], "q": EMBED[:, :4]},
        lambda base: {"p": base[:4, :4], "q": base[:4, :4].T},
        r"p on engine/0/0 holds embed\.\d+ and q on engine/0/0 holds embed\.\d+",
    ),
    "a third one": (
        {"p": EMBED, "q": EMBED, "r": HEAD[1, :2]},
        lambda base: {"p": base[:4], "q": base[:4], "r": base[0, 4:]},
        r"p on engine/0/0 holds embed\.4 and r on engine/0/0 holds head\.6",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_different_elements_in_one_memory_are_refused_by_both_names(case: str) -> None:
    ids, views, match = OTHERS[case]
    base = np.zeros((8, 6), dtype=np.uint16)
    with pytest.raises(ProgramError, match=match):
        run(ids, views(base))
    assert not base.any(), "nothing was written"


def test_elements_of_two_widths_in_one_memory_are_refused() -> None:
    base = np.zeros(48, dtype=np.uint16)
    memory = {"p": base[:24].reshape(4, 6), "q": base[:48].view(np.uint32).reshape(4, 6)}
    with pytest.raises(
        ProgramError, match=r"p on engine/0/0 holds embed\.0 and q on engine/0/0 holds embed\.0 in the same memory"
    ):
        run({"p": EMBED, "q": EMBED}, memory, {"p": "BF16", "q": "F32"})
    assert not base.any()


def test_a_rollout_in_a_trainers_memory() -> None:
    """As its trainer holds it: nothing changes. In another layout the trainer would be overwritten while it is read."""
    kept = {name: array.copy() for name, array in TRAINED.items()}
    run({"p": EMBED}, {"p": TRAINED["embed"]})
    with pytest.raises(ProgramError, match=r"embed on trainer/0 holds embed\.0 and p on engine/0/0 holds embed\.5"):
        run({"p": EMBED[:, ::-1]}, {"p": TRAINED["embed"]})
    assert all(np.array_equal(TRAINED[name], kept[name]) for name in kept)


def test_views_without_a_common_byte_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of a large array, as ranks of a test may have them: comparing those would take many times its memory."""
    monkeypatch.setattr("transfer_exec.aliases._compare", lambda one, other: pytest.fail("compared"))
    base = np.zeros((8, 6), dtype=np.uint16)
    run({"p": EMBED[:, :3], "q": HEAD[:, :3]}, {"p": base[:4, :3], "q": base[:4, 3:]})
    run({"p": EMBED[:, :3], "q": HEAD[:, :3]}, {"p": base[:4, ::2], "q": base[:4, 1::2]})
    run({"p": EMBED.T, "q": EMBED.T}, {"p": base[3::-1].T, "q": base[3::-1].T})


def test_trainers_may_hold_two_elements_in_one_memory() -> None:
    """Tied in the trainer, apart in the checkpoint: both names have the one value."""
    space = CheckpointSpace([TensorSpec("embed", (5,), "F32"), TensorSpec("head", (5,), "F32")])
    maps = {
        worker: SourceMap.from_ids(space, {"embed": np.arange(1, 6), "head": np.arange(6, 11)})
        for worker in ("trainer/0", "engine/0/0")
    }
    demand = correspond({"trainer/0": maps["trainer/0"]}, {"engine/0/0": maps["engine/0/0"]})
    topology = Topology.uniform(
        trainers=1, engines=1, engine_size=1, workers_per_node=1, nic_bytes_per_s=1e9, local_bytes_per_s=1e9
    )
    tied = np.arange(5, dtype=np.float32)
    target = {name: np.zeros(5, dtype=np.float32) for name in ("embed", "head")}
    memory = {"trainer/0": {"embed": tied, "head": tied}, "engine/0/0": target}
    run_in_process(make_plan(demand, topology, buffer_bytes=1000), maps, memory)
    assert target["embed"].tolist() == target["head"].tolist() == tied.tolist()
