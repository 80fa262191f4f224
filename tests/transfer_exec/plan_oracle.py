"""Plans checked the slow way: every move replayed id by id with plain sets, knowing nothing of how plans are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layout_algebra.correspondence import Correspondence, correspond
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace
from transfer_exec.plan import Plan, Stage
from transfer_exec.topology import Topology

Ids = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class Case:
    """Who holds and who needs which ids of a checkpoint."""

    space: CheckpointSpace
    held: Ids
    needed: Ids

    def correspondence(self, *, shuffled: bool = False) -> Correspondence:
        turn = reversed if shuffled else iter
        return correspond(
            {worker: map_of(self.space, self.held[worker]) for worker in turn(list(self.held))},
            {worker: map_of(self.space, self.needed[worker]) for worker in turn(list(self.needed))},
        )


def map_of(space: CheckpointSpace, ids: frozenset[int]) -> SourceMap:
    """One flat parameter per checkpoint tensor, ids descending."""
    per_tensor: dict[str, list[int]] = {name: [] for name in space.names}
    for i in sorted(ids, reverse=True):
        per_tensor[space.locate(i)[0]].append(i)
    return SourceMap.from_ids(
        space,
        {name: np.array(mine, dtype=np.int64) for name, mine in per_tensor.items()},
        {name: space.spec(name).dtype for name in space.names},
    )


def item_bytes(space: CheckpointSpace, i: int) -> int:
    return space.spec(space.locate(i)[0]).element_type.bits // 8


def crossings_needed(case: Case, node_of: Mapping[str, int], cluster_of: Mapping[str, str], i: int) -> int:
    """The fewest links between clusters that an id can cross, if trainers send one copy."""
    held_at = {node_of[worker] for worker, ids in case.held.items() if i in ids}
    lacking = {cluster_of[w] for w, ids in case.needed.items() if i in ids and node_of[w] not in held_at}
    holding = {cluster_of[worker] for worker, ids in case.held.items() if i in ids}
    return len(lacking) - bool(lacking & holding)


def replay(plan: Plan, case: Case, topology: Topology, buffer_bytes: int) -> dict[str, int]:
    """Run a plan over sets of ids and assert every law; returns the bytes that crossed the network per worker sent."""
    held, needed = case.held, case.needed
    node_of = {worker: topology.node_of(worker) for worker in plan.workers}
    cluster_of = {worker: topology.nodes[node].cluster for worker, node in node_of.items()}
    crossed: Counter[int] = Counter()
    crossed_into: Counter[tuple[str, int]] = Counter()
    wire_copies: Counter[int] = Counter()
    entered: Counter[tuple[int, int]] = Counter()
    got: dict[str, Counter[int]] = {worker: Counter() for worker in needed}
    sent_bytes: Counter[str] = Counter()
    previous = (-1, -1)
    by_round: dict[int, list[object]] = {}
    for move in plan.moves():
        order = (move.round, move.stage.value)
        assert order >= previous, "moves come by round and stage"
        previous = order
        by_round.setdefault(move.round, []).append(move)
        assert move.runs, "no empty moves"
    assert set(by_round) <= set(range(plan.rounds))
    for moves in by_round.values():
        arrived: dict[tuple[str, int], set[int]] = {}
        let_in: dict[str, set[int]] = {}
        received: Counter[tuple[str, Stage]] = Counter()
        packed: dict[str, set[int]] = {}
        for move in moves:
            ids = move.runs.ids().tolist()
            assert {item_bytes(case.space, i) for i in ids} == {move.item_bytes}
            source, target, stage = move.source, move.target, move.stage
            size = len(ids) * move.item_bytes
            assert move.bytes == size
            received[target, stage] += size
            inside = node_of[source] == node_of[target]
            assert target in needed
            if source in held:
                assert stage is not Stage.EXTERNAL, "trainers take no part in the exchange between rollouts"
                assert set(ids) <= held[source], "only what is held is packed"
                packed.setdefault(source, set()).update(ids)
            else:
                assert stage is not Stage.RECEIVE, "only trainers send in the receive stage"
                have: set[int] = set()
                for earlier in range(stage.value):
                    have |= arrived.get((source, earlier), set())
                if stage is Stage.EXTERNAL and cluster_of[source] == cluster_of[target]:
                    have |= let_in.get(source, set())  # a gateway forwards in its cluster what it got in this stage
                assert set(ids) <= have, "a rollout passes on what it got earlier in this round"
            assert inside == (stage is Stage.INTERNAL), "internal moves stay inside a node, others leave it"
            arrived.setdefault((target, stage.value), set()).update(ids)
            if cluster_of[source] != cluster_of[target]:
                let_in.setdefault(target, set()).update(ids)
                crossed.update(ids)
                crossed_into.update((cluster_of[target], i) for i in ids)
            for i in ids:
                got[target][i] += 1
                if stage is Stage.RECEIVE:
                    wire_copies[i] += 1
                if stage is not Stage.INTERNAL:
                    entered[node_of[target], i] += 1
                else:
                    assert i in needed[target], "inside a node nobody gets what it does not need"
            if not inside:
                sent_bytes[source] += size
        for (worker, stage), count in received.items():
            assert count <= buffer_bytes, f"{worker} receives {count} bytes in one {stage.name} stage"
        for worker, ids_packed in packed.items():
            assert sum(item_bytes(case.space, i) for i in ids_packed) <= buffer_bytes, f"{worker} packs too much"
    for worker, ids in needed.items():
        assert ids <= set(got[worker]), f"{worker} lacks {sorted(ids - set(got[worker]))}"
        assert max(got[worker].values(), default=0) <= 1, f"{worker} gets an id twice"
    holding = {(node_of[worker], i) for worker, ids in held.items() for i in ids}
    needing = {(node_of[worker], i) for worker, ids in needed.items() for i in ids}
    assert entered == Counter(needing - holding), "each node gets exactly what it needs and lacks, once"
    assert wire_copies == Counter({i for _, i in needing - holding}), "trainers send one copy over the network"
    assert max(crossed_into.values(), default=0) <= 1, "a cluster gets an id from others once"
    total = range(1, case.space.total_elements + 1)
    fewest = Counter({i: crossings_needed(case, node_of, cluster_of, i) for i in total})
    assert crossed == +fewest, "no link between clusters is crossed that need not be"
    return dict(sent_bytes)
