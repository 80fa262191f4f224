"""Random clusters and layouts for plans, and the small ones from the field."""

from __future__ import annotations

from itertools import combinations

from hypothesis import strategies as st
from plan_oracle import Case

from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.topology import ClusterLink, Engine, Nic, Node, Topology

DTYPES = ["F32", "BF16", "F64", "F8_E4M3"]


@st.composite
def spaces(draw: st.DrawFn) -> CheckpointSpace:
    """One to four tensors of mixed widths, empty ones among them."""
    sizes = draw(st.lists(st.integers(0, 17), min_size=1, max_size=4).filter(sum))
    return CheckpointSpace(TensorSpec(f"t{n}", (size,), draw(st.sampled_from(DTYPES))) for n, size in enumerate(sizes))


@st.composite
def id_sets(draw: st.DrawFn, total: int) -> frozenset[int]:
    """Stretches, strides, everything, nothing."""
    kind = draw(st.sampled_from(["all", "none", "range", "stride", "any"]))
    if kind == "all":
        return frozenset(range(1, total + 1))
    if kind == "none":
        return frozenset()
    if kind == "any":
        return draw(st.frozensets(st.integers(1, total), max_size=total))
    first, last = sorted((draw(st.integers(1, total)), draw(st.integers(1, total))))
    return frozenset(range(first, last + 1, 1 if kind == "range" else draw(st.integers(2, 4))))


@st.composite
def cases(draw: st.DrawFn, *, trainers: int = 4, engine_sizes: int = 3, engines: int = 3) -> Case:
    """Few distinct layouts, so that replicas are common; everything needed is held by somebody."""
    space = draw(spaces())
    pool = draw(st.lists(id_sets(space.total_elements), min_size=1, max_size=4))
    names = [f"trainer/{rank}" for rank in range(draw(st.integers(1, trainers)))]
    held = {name: draw(st.sampled_from(pool)) for name in names}
    needed = {
        f"engine/{engine}/{rank}": draw(st.sampled_from(pool))
        for engine in range(draw(st.integers(1, engines)))
        for rank in range(draw(st.integers(1, engine_sizes)))
    }
    for i in sorted(frozenset().union(*needed.values()) - frozenset().union(*held.values())):
        owner = draw(st.sampled_from(names)) if len(names) > 1 else names[0]
        held[owner] |= {i}
    return Case(space, held, needed)


@st.composite
def topologies(draw: st.DrawFn, case: Case) -> Topology:
    """Workers anywhere: colocated sides, shared and unequal NICs, nodes of two engines, one to three clusters."""
    workers = [*case.held, *case.needed]
    count = draw(st.integers(1, min(6, len(workers))))
    groups: list[list[str]] = [[] for _ in range(count)]
    apart = draw(st.booleans())
    for worker in workers:
        if apart and count > 1:
            half = count // 2
            groups[draw(st.integers(0, half - 1) if worker in case.held else st.integers(half, count - 1))].append(
                worker
            )
        else:
            groups[draw(st.integers(0, count - 1))].append(worker)
    speeds = st.sampled_from([1.0, 2.0, 3.0, 10.0])
    clusters = draw(st.lists(st.sampled_from(["east", "west", "south"]), min_size=count, max_size=count))
    if draw(st.booleans()):
        clusters = ["main"] * count
    nodes = []
    for number, group in enumerate(groups):
        if draw(st.booleans()):
            nics = tuple(Nic((worker,), draw(speeds), draw(speeds)) for worker in group)
        else:
            nics = (Nic(tuple(group), draw(speeds), draw(speeds)),) if group else ()
        nodes.append(Node(f"n{number}", nics, draw(st.sampled_from([1.0, 20.0, float("inf")])), clusters[number]))
    used = sorted({node.cluster for node in nodes})
    links = [ClusterLink(pair, draw(st.sampled_from([0.1, 1.0, 10.0]))) for pair in combinations(used, 2)]
    names = sorted({worker.rsplit("/", 1)[0] for worker in case.needed})
    engines = [Engine(n, tuple(w for w in case.needed if w.rsplit("/", 1)[0] == n)) for n in names]
    return Topology(nodes, engines, links)
