"""Formulas of layouts: held-out ranks, proofs against counting, readable lines, strangers' bytes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.blocks import concatenate, declare, stack, whole
from layout_algebra.errors import FormulaError, LayoutError
from layout_algebra.formulas import DEGREE, RANK, formula_of, show, tokens_of, value_of
from layout_algebra.map_bytes import MAX_BYTES
from layout_algebra.name_bytes import join_name
from layout_algebra.runs import RunTable
from layout_algebra.sealed_bytes import seal, unseal
from layout_algebra.shardings import column_parallel, expert_stack, gate_up
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from layout_algebra.symbolic import SymbolicMap, fit
from layout_algebra.symbolic_bytes import MAGIC
from tests.layout_algebra.families import FamilyCase, cases
from tests.layout_algebra.kimi_k2 import checkpoint, rollout_rank

CASES = {case.name: case for case in cases()}


def all_ranks(case: FamilyCase, *without: int) -> dict[tuple[int, int], SourceMap]:
    return {(r, d): case.at(r, d) for d in case.degrees if d not in without for r in range(d)}


@pytest.mark.parametrize("name", CASES)
def test_a_degree_that_was_not_seen_is_foretold(name: str) -> None:
    """The law: instantiate(fit(samples)) equals the declared, canonical map of every held-out rank, by digest."""
    case = CASES[name]
    for unseen in case.degrees:
        if unseen in case.showing or unseen == 1:
            continue
        family = fit(all_ranks(case, unseen))
        for rank in range(unseen):
            assert family.instantiate(rank, unseen).digest() == case.at(rank, unseen).digest(), (rank, unseen)


@settings(max_examples=60)
@given(st.sampled_from(sorted(CASES)), st.randoms(use_true_random=False))
def test_a_few_ranks_foretell_the_others(name: str, chance: random.Random) -> None:
    """First, last and some ranks of most degrees: every rank of every degree is right, those not seen included."""
    case = CASES[name]
    spared = [degree for degree in case.degrees if degree not in case.showing and degree > 1]
    unseen = chance.choice(spared)
    points = {
        (rank, degree)
        for degree in case.degrees
        if degree != unseen
        for rank in {0, degree // 2, degree - 1, chance.randrange(degree)}
    }
    family = fit({point: case.at(*point) for point in points})
    for degree in case.degrees:
        rank = chance.randrange(degree)
        assert family.instantiate(rank, degree).digest() == case.at(rank, degree).digest(), (rank, degree, points)


@pytest.mark.parametrize("name", CASES)
def test_formulas_travel(name: str) -> None:
    case = CASES[name]
    family = fit(all_ranks(case))
    again = SymbolicMap.from_bytes(family.to_bytes())
    assert again.same_as(family)
    rank, degree = case.degrees[-1] - 1, case.degrees[-1]
    assert again.instantiate(rank, degree).digest() == case.at(rank, degree).digest()
    assert [again.explain(p) for p in again.parameters] == [family.explain(p) for p in family.parameters]


@pytest.mark.parametrize("name", CASES)
def test_flat_starts_and_strides_say_the_same_elements(name: str) -> None:
    """Walking a copy by its flat formulas gives the ids of the rank's map."""
    case = CASES[name]
    family = fit(all_ranks(case))
    rank, degree = case.degrees[-1] - 1, case.degrees[-1]

    def at(formulas: tuple[sympy.Expr, ...]) -> list[int]:
        return [int(value_of(formula, rank, degree)) for formula in formulas]

    found = family.instantiate(rank, degree)
    for parameter, entry in family.parameters.items():
        ids = found.ids(parameter).reshape(-1)
        for copy in entry.copies:
            steps = [step for step in copy.source_strides if step is not None]
            if copy.moving or len(steps) < len(copy.axes):
                continue
            source, target = at((copy.source_start, copy.target_start(entry.shape)))
            tensor = join_name(copy.template, at(copy.numbers))
            places = np.indices(at(copy.extents)).reshape(len(copy.axes), -1).T
            flat = target + places @ np.array(at(copy.target_strides(entry.shape)), dtype=np.int64)
            expected = source + places @ np.array(at(tuple(steps)), dtype=np.int64)
            assert ids[flat].tolist() == (expected + case.space.element_id(tensor, 0)).tolist(), parameter


def held_by(case: FamilyCase, maps: dict[int, SourceMap]) -> dict[str, list[Counter[int]]]:
    """Dumb: for every tensor and flat index how often each rank holds it."""
    found = {spec.name: [Counter[int]() for _ in range(spec.elements)] for spec in case.space.specs}
    for rank, held in maps.items():
        for parameter in held.parameters:
            for element in held.ids(parameter).ravel().tolist():
                if element > 0:
                    tensor, flat = case.space.locate(element)
                    found[tensor][flat][rank] += 1
    return found


@pytest.mark.parametrize("name", CASES)
def test_proofs_agree_with_counting_elements(name: str) -> None:
    case = CASES[name]
    family = fit(all_ranks(case))
    touched = sorted(
        {family.space.locate(int(i))[0] for p in family.parameters for i in case.at(0, 1).ids(p).ravel() if i}
    )
    for degree in case.degrees:
        held = held_by(case, {rank: case.at(rank, degree) for rank in range(degree)})
        exact = all(sum(counter.values()) == 1 for name in touched for counter in held[name])
        proof = family.prove(degree, tensors=touched)
        assert proof.holds == exact
        assert proof.kind == "counted"
        for fault in proof.faults:
            for flat in range(fault.start, fault.stop):
                assert tuple(sorted(held[fault.tensor][flat].elements())) == fault.ranks
        some = family.prove(degree, tensors=touched, replicas=True)
        assert some.holds == all(counter for name in touched for counter in held[name])
    for_all = family.prove(tensors=touched, replicas=case.replicated)
    assert for_all.holds is True
    assert for_all.kind == "symbolic"
    assert for_all.degree is None
    missing = sorted(set(case.space.names) - set(touched))
    if missing:
        proof = family.prove(replicas=True)
        assert proof.holds is False
        assert {fault.tensor for fault in proof.faults} <= set(missing)
        assert all(fault.missing for fault in proof.faults)


def test_replicas_are_refuted_unless_allowed_and_can_be_counted() -> None:
    family = fit(all_ranks(CASES["fused qkv"]))
    proof = family.prove()
    assert proof.holds is False
    assert proof.degree == 8
    assert str(proof.faults[0]) == "k[0:4, :] is held by 2 ranks (0, 1) of 8, expected 1"
    assert family.prove(replicas=("k", "v")).holds
    assert family.prove(replicas=("[kv]",)).holds
    assert family.prove(4).holds
    assert family.prove(16, replicas={"k": 4, "v": 4}).holds
    assert family.prove(16, replicas={"k": 2, "v": 4}).holds is False
    with pytest.raises(FormulaError, match="no tensor"):
        family.prove(replicas=("w*",))


def changed(family: SymbolicMap, parameter: str, number: int, **changes: object) -> SymbolicMap:
    entry = family[parameter]
    copies = list(entry.copies)
    copies[number] = dataclasses.replace(copies[number], **changes)  # type: ignore[arg-type]
    entry = dataclasses.replace(entry, copies=tuple(copies))
    return SymbolicMap(family.space, family.degree, {**family.parameters, parameter: entry})


def test_a_wrong_family_is_shown_with_what_is_missing_and_what_is_doubled() -> None:
    """Every rank but the first begins one row early: the seam is doubled and the last row is gone."""
    family = fit(all_ranks(CASES["column"]))
    w = family["w"].copies[0]
    early = changed(family, "w", 0, at=(sympy.Max(0, w.at[0] - 1), w.at[1]))
    assert [str(fault) for fault in early.prove(2).faults] == [
        "w[23:24, :] is held by 2 ranks (0, 1) of 2, expected 1",
        "w[47:48, :] is held by no rank of 2, expected 1",
    ]
    proof = early.prove()
    assert proof.holds is False
    assert proof.kind == "symbolic"
    assert proof.degree == 2
    assert {(fault.tensor, fault.start, fault.stop, fault.ranks) for fault in proof.faults} == {
        ("w", 23 * 6, 24 * 6, (0, 1)),
        ("w", 47 * 6, 48 * 6, ()),
    }
    assert "start(r+1) == start(r) + count(r)" in proof.steps[0]


def test_an_element_that_one_rank_holds_twice_is_shown() -> None:
    space = CheckpointSpace([TensorSpec("w", (4, 2), "BF16")])
    w = whole(space, "w")
    maps = {(r, d): declare(space, {"p": w.shard(0, r, d), "tied": w.shard(0, r, d)}) for d in (1, 2) for r in range(d)}
    proof = fit(maps).prove()
    assert proof.holds is False
    assert str(proof.faults[0]) == "w[:, :] is held by 2 ranks (0, 0) of 1, expected 1"
    assert fit(maps).prove(replicas=True).holds


def test_what_cannot_be_argued_is_counted_or_left_open() -> None:
    """Rank r holds row r squared modulo 5, and row 0 of a second tensor on rank 0: no parts that meet."""
    space = CheckpointSpace([TensorSpec("w", (4, 2), "BF16")])
    maps = {(r, 4): declare(space, {"p": whole(space, "w").take(0, r ^ 1, (r ^ 1) + 1)}) for r in range(4)}
    with pytest.raises(FormulaError, match=r"p: .*no formula in rank and degree"):
        fit(maps)
    family = fit(all_ranks(CASES["column"]))
    w = family["w"].copies[0]
    odd = changed(family, "w", 0, at=(sympy.Min(48, sympy.Max(w.at[0], 48 * RANK / DEGREE)), w.at[1]))
    proof = odd.prove()
    assert proof.holds in (True, None)


@pytest.mark.parametrize(
    ("name", "parameter", "degree", "lines"),
    [
        ("fused qkv", "qkv", 8, [
            "qkv[0:8, :] = q[8*r : 8*(r+1), :]",
            "qkv[8:12, :] = k[4*floor(r/2) : 4*floor(r/2)+4, :]",
            "qkv[12:16, :] = v[4*floor(r/2) : 4*floor(r/2)+4, :]"]),
        ("fused qkv", "qkv", None, [
            "qkv[0 : 64/d, :] = q[64*r/d : 64*(r+1)/d, :]",
            "qkv[64/d : max(4,16/d)+64/d, :] = k[4*floor(4*r/d) : 4*floor(4*r/d)+max(4,16/d), :]",
            "qkv[max(4,16/d)+64/d : 2*max(4,16/d)+64/d, :] = v[4*floor(4*r/d) : 4*floor(4*r/d)+max(4,16/d), :]"]),
        ("transposed", "w", 2, ["w[:, :] = w[:, 24*r : 24*(r+1)].T"]),
        ("middle axis of three, turned", "w", 2, ["w[:, :, :] = w[:, 2*r : 2*(r+1), :].transpose(2, 0, 1)"]),
        ("experts", "layers.1.w13", 4, [
            "layers.1.w13[e, 0:6, :] = layers.1.experts.{3*r+e}.gate_proj[:, :] for e in 0:3",
            "layers.1.w13[e, 6:12, :] = layers.1.experts.{3*r+e}.up_proj[:, :] for e in 0:3"]),
        ("experts under tensor parallel", "layers.0.w13", 2, [
            "layers.0.w13[e, 0:3, :] = layers.0.experts.{e}.gate_proj[3*r : 3*(r+1), :] for e in 0:12",
            "layers.0.w13[e, 3:6, :] = layers.0.experts.{e}.up_proj[3*r : 3*(r+1), :] for e in 0:12"]),
        ("grouped qkv", "qkv", 2, [
            "qkv[24*i+j, :] = q[32*r+16*i+j, :] for i in 0:2 for j in 0:16",
            "qkv[16+24*i+j, :] = k[8*r+4*i+j, :] for i in 0:2 for j in 0:4",
            "qkv[20+24*i+j, :] = v[8*r+4*i+j, :] for i in 0:2 for j in 0:4"]),
        ("fsdp2", "t", None, ["t[:, :] = t[min(7,c*r) : min(7,c*(r+1)), :], c = ceil(7/d)"]),
        ("padded vocabulary", "embed", 2, ["embed[0 : n, :] = embed[min(10,8*r) : min(10,8*(r+1)), :]"]),
        ("fsdp1", "flat", None, [
            "flat[0 : n] = a.flat[min(12,c*r) : min(12,c*(r+1))], c = ceil(36/d)",
            "flat[max(0,12-c*r) : n+max(0,12-c*r)] = b[min(5,max(0,c*r-12)) : min(5,max(0,c*(r+1)-12))], "
            "c = ceil(36/d)",
            "flat[max(0,17-c*r) : n+max(0,17-c*r)] = c.flat[min(12,max(0,c*r-17)) : min(12,max(0,c*(r+1)-17))], "
            "c = ceil(36/d)",
            "flat[max(0,29-c*r) : n+max(0,29-c*r)] = d[min(7,max(0,c*r-29)) : min(7,max(0,c*(r+1)-29))], "
            "c = ceil(36/d)"]),
        ("round robin rows", "w", 3, ["w[i, :] = w[r+3*i, :] for i in 0:ceil(-r/3)+16"]),
    ],
)  # fmt: skip
def test_a_person_reads_it_at_a_glance(name: str, parameter: str, degree: int | None, lines: list[str]) -> None:
    assert fit(all_ranks(CASES[name])).explain(parameter, degree).splitlines() == lines


def with_opaque(space: CheckpointSpace, rank: int, degree: int) -> SourceMap:
    """Experts' scales, computed from the rank's own experts; a half-opaque vector; a parameter that is never loaded."""
    local = 12 // degree
    names = tuple(f"experts.{e}.scale" for e in range(rank * local, (rank + 1) * local))
    w = whole(space, "w").shard(0, rank, degree)
    half = RunTable.from_intervals([[48 // degree, 96 // degree]])
    return SourceMap(space, {
        "scales": ParameterMap((local, 4), "F32", CopyTable.empty(), RunTable.from_intervals([[0, local * 4]]), names),
        "half": ParameterMap((96 // degree,), "BF16", w.copies(), half, ("w",)),
        "cache": ParameterMap((2, 8), "BF16", CopyTable.empty(), RunTable.empty()),
    })  # fmt: skip


def test_opaque_and_empty_parameters_have_formulas_too() -> None:
    space = CheckpointSpace(
        [TensorSpec("w", (48,), "BF16"), *(TensorSpec(f"experts.{e}.scale", (4,), "F32") for e in range(12))]
    )
    family = fit({(r, d): with_opaque(space, r, d) for d in (1, 2, 4) for r in range(d)})
    for degree in (1, 2, 3, 4, 6):
        for rank in range(degree):
            assert family.instantiate(rank, degree).digest() == with_opaque(space, rank, degree).digest()
    again = SymbolicMap.from_bytes(family.to_bytes())
    assert again.instantiate(5, 6).digest() == with_opaque(space, 5, 6).digest()
    assert family.explain("scales", 4) == "scales is computed from experts.{3*r : 3*(r+1)}.scale"
    assert family.explain("half", 2).splitlines()[1] == "half.flat[24:48] is computed from w"
    assert family.explain("cache") == "cache[0:2, 0:8] is empty"


def test_one_degree_gives_formulas_of_that_degree_alone() -> None:
    case = CASES["fsdp2"]
    family = fit({(r, 4): case.at(r, 4) for r in (0, 1, 3)})
    assert family.instantiate(2, 4).digest() == case.at(2, 4).digest()
    with pytest.raises(FormulaError, match="fitted to degree 4 alone"):
        family.instantiate(0, 2)
    assert family.prove().holds
    assert family.prove(4).holds


def test_refusals_name_parameter_number_and_ranks() -> None:
    case = CASES["fused qkv"]
    space = case.space
    with pytest.raises(FormulaError, match="no maps"):
        fit({})
    with pytest.raises(FormulaError, match="rank 2 of 2: expected a rank in 0:2"):
        fit({(2, 2): case.at(0, 2)})
    q = whole(space, "q")
    with pytest.raises(FormulaError, match=r"b: a parameter on rank 1 of 2 or rank 0 of 2 only"):
        fit({(0, 2): declare(space, {"a": q}), (1, 2): declare(space, {"a": q, "b": q})})
    with pytest.raises(FormulaError, match=r"a: dtype or number of axes differs.*F32\[64, 6\] on rank 1 of 2"):
        fit({(0, 2): declare(space, {"a": q}), (1, 2): declare(space, {"a": q}, {"a": "F32"})})
    other = CheckpointSpace([TensorSpec("q", (4,), "BF16")])
    with pytest.raises(FormulaError, match="rank 1 of 2 has another checkpoint"):
        fit({(0, 2): declare(space, {"a": q}), (1, 2): declare(other, {"a": whole(other, "q")})})
    rows = [3, 40, 7, 22]
    with pytest.raises(
        FormulaError, match=r"a: no formula in rank and degree gives the source .* from q: rank 0 of 4 has 1"
    ):
        fit({(r, 4): declare(space, {"a": q.take(0, row, row + 1)}) for r, row in enumerate(rows)})
    holes = [concatenate([q.take(0, 0, 2), q.take(0, 9, 9 + r * r)]).pad(0, 20) for r in range(4)]
    with pytest.raises(FormulaError, match="a: "):
        fit({(r, 4): declare(space, {"a": hole}) for r, hole in enumerate(holes)})


def test_instantiate_refuses_what_is_no_rank() -> None:
    family = fit(all_ranks(CASES["column"]))
    for rank, degree in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(FormulaError, match="expected a rank"):
            family.instantiate(rank, degree)
    with pytest.raises(FormulaError, match=r"b: extent 0 is 48/d = 48/5 for rank 0 of 5, which is no whole number"):
        family.instantiate(0, 5)


def test_a_shuffled_expert_placement_is_followed_on_every_rank() -> None:
    """Two redundant slots: expert 0 stands on every rank, the others in order."""
    space = CheckpointSpace(TensorSpec(f"e.{e}.w", (2, 3), "BF16") for e in range(9))

    def at(rank: int, degree: int) -> SourceMap:
        local = 8 // degree
        experts = [
            whole(space, "e.0.w"),
            *(whole(space, f"e.{e}.w") for e in range(1 + rank * local, 1 + (rank + 1) * local)),
        ]
        return declare(space, {"w": expert_stack(experts)})

    with pytest.raises(FormulaError, match="w: "):
        fit({(r, d): at(r, d) for d in (1, 2, 4) for r in range(d)})


def test_a_trillion_parameters() -> None:
    """Two layers of Kimi-K2 with all their experts, from four ranks of two degrees to rank 17 of 32."""
    space = checkpoint(2)
    family = fit(
        {
            (r, d): declare(space, rollout_rank(space, rank=r, degree=d, layers=2))
            for r, d in ((0, 8), (3, 8), (0, 16), (9, 16))
        }
    )
    wanted = declare(space, rollout_rank(space, rank=17, degree=32, layers=2))
    assert family.instantiate(17, 32).digest() == wanted.digest()
    replicas = ["*norm*", "*gate.weight", "*e_score*", "*q_a_proj*", "*kv_a_proj*"]
    assert family.prove(replicas=replicas).holds
    assert family.prove(4, replicas=replicas).holds
    assert len(family.to_bytes()) < 6_000
    assert family.explain("model.layers.1.mlp.experts.w13_weight", 32).splitlines()[0] == (
        "model.layers.1.mlp.experts.w13_weight[e, 0:2048, :] = "
        "model.layers.1.mlp.experts.{12*r+e}.gate_proj.weight[:, :] for e in 0:12"
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A random layout: what is done to every tensor, to all of them, and how they are put together."""

    space: CheckpointSpace
    cuts: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    joined: str
    axis: int
    padding: int

    def at(self, rank: int, degree: int) -> SourceMap:
        parts = []
        for name, (cut, axis) in zip(self.space.names, self.cuts, strict=True):
            part = whole(self.space, name)
            if cut == "shard":
                part = part.shard(axis, rank, degree)
            elif cut == "chunk":
                part = part.chunk(axis, rank, degree)
            elif cut == "half":
                part = part.take(axis, 0, part.shape[axis] // 2)
            parts.append(part.transpose(*self.order))
        if self.joined == "concatenated":
            made = {"p": concatenate(parts, self.axis)}
        elif self.joined == "stacked":
            made = {"p": stack(parts)}
        else:
            made = {f"p{k}": part for k, part in enumerate(parts)}
        return declare(self.space, {n: part.pad(0, part.shape[0] + self.padding) for n, part in made.items()})


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Tensors alike, each cut the same way or none, so that they can be put together on every rank."""
    shape = tuple(draw(st.lists(st.sampled_from([5, 6, 12, 24]), min_size=1, max_size=3)))
    count = draw(st.integers(1, 3))
    space = CheckpointSpace(TensorSpec(f"t.{k}", shape, "BF16") for k in range(count))
    axis = draw(st.integers(0, len(shape) - 1))
    kinds = ["chunk", "half", "whole", *(["shard"] if shape[axis] % 12 == 0 else [])]
    cut = (draw(st.sampled_from(kinds)), axis)
    order = tuple(draw(st.permutations(range(len(shape)))))
    joined = draw(st.sampled_from(["apart", "concatenated", "stacked"]))
    return Program(
        space, (cut,) * count, order, joined, draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([0, 3]))
    )


def found_or_refusal(family: SymbolicMap, rank: int, degree: int) -> SourceMap | FormulaError:
    try:
        return family.instantiate(rank, degree)
    except FormulaError as error:
        return error


@settings(max_examples=60)
@given(programs(), st.sampled_from([2, 3, 4]))
def test_random_layouts_are_foretold_or_refused_never_wrong(program: Program, unseen: int) -> None:
    degrees = (1, 2, 3, 4, 6)
    maps = {(rank, degree): program.at(rank, degree) for degree in degrees for rank in range(degree)}
    family = fit({point: held for point, held in maps.items() if point[1] != unseen})
    for (rank, degree), held in maps.items():
        made = found_or_refusal(family, rank, degree)
        if isinstance(made, SourceMap):
            assert made.digest() == held.digest(), (rank, degree)
        else:
            # Degrees that divide evenly do not show that others are rounded up.
            assert degree == unseen
            assert "no whole number" in str(made)


# Formulas themselves.

leaves = st.one_of(
    st.integers(-5, 5).map(sympy.Integer),
    st.sampled_from([RANK, DEGREE, 1 / DEGREE, DEGREE**-2, sympy.Rational(3, 7)]),
)
formulas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        inner.map(sympy.floor),
        inner.map(sympy.ceiling),
        st.tuples(inner, inner).map(lambda pair: sympy.Min(*pair)),
        st.tuples(inner, inner).map(lambda pair: sympy.Max(*pair)),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(formulas, st.integers(0, 6), st.integers(1, 7))
def test_values_equal_sympys_and_formulas_travel(formula: sympy.Expr, rank: int, degree: int) -> None:
    exact = formula.subs({RANK: rank, DEGREE: degree})
    assert sympy.Rational(exact) == sympy.Rational(*value_of(formula, rank, degree).as_integer_ratio())
    try:
        tokens = tokens_of(formula)
        again = formula_of(tokens)
    except FormulaError:
        return
    assert value_of(again, rank, degree) == value_of(formula, rank, degree)
    assert show(formula)


def test_strange_tokens_are_refused() -> None:
    rng = np.random.default_rng(3)
    good = tokens_of(sympy.Min(10, sympy.ceiling(10 / DEGREE) * (RANK + 1)))
    for _ in range(2_000):
        tokens = [int(t) if rng.random() < 0.8 else int(rng.integers(-3, 14)) for t in good]
        del tokens[int(rng.integers(len(tokens))) :: int(rng.integers(3, 9))]
        try:
            formula_of(tokens)
        except FormulaError:
            continue
    deep = [6, *[5, 6] * 40, 2]
    for strange in ([], [99], deep, [0, 2**62], [1, 1, 0], [4, 9, 2], [4, -1, 2], [7, 1, 0, 1], [7, 17], [0, 1, 0, 1]):
        with pytest.raises(FormulaError):
            formula_of(strange)


def test_mutated_bytes_raise_only_our_errors() -> None:
    rng = np.random.default_rng(4)
    data = fit(all_ranks(CASES["experts"])).to_bytes()
    plain = unseal(data, MAGIC, what="a family", limit=MAX_BYTES, error=FormulaError)
    survived = 0
    for trial in range(2_000):
        target = bytearray(plain if trial % 4 else data)
        for _ in range(rng.integers(1, 4)):
            where = int(rng.integers(len(target)))
            if rng.integers(3):
                target[where] ^= 1 << int(rng.integers(8))
            else:
                target[where : where + int(rng.integers(3))] = rng.integers(0, 256, 2, dtype=np.uint8).tobytes()
        try:
            found = SymbolicMap.from_bytes(seal(MAGIC, bytes(target)) if trial % 4 else bytes(target))
            survived += 1
            made = found.instantiate(1, found.degree or 4)
            assert all(
                int(made.ids(p).max(initial=0)) <= found.space.total_elements
                for p in made.parameters
                if made[p].elements < 10**5
            )
            [found.explain(parameter) for parameter in found.parameters]
        except LayoutError:
            continue
    assert survived > 100


def test_well_formed_lies_are_refused() -> None:
    honest = unseal(
        fit(all_ranks(CASES["experts"])).to_bytes(), MAGIC, what="a family", limit=MAX_BYTES, error=FormulaError
    )
    for path in ([0], [1], [2], [3], [4], [5], [6], [6, 0], [6, 0, 0], [6, 0, 1], [6, 0, 2, 0], [6, 0, 2, 0, 0],
                 [6, 0, 2, 0, 2], [6, 0, 2, 0, 5], [6, 0, 2, 0, 7, 0], [7], [8], [8, 0]):  # fmt: skip
        for value in (None, -1, 10**6, b"x", [[]], [10**6], [[1, 9, 1, 9, 1]]):
            lie = msgspec.msgpack.decode(honest)
            inner = lie
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            with pytest.raises(FormulaError):
                SymbolicMap.from_bytes(seal(MAGIC, msgspec.msgpack.encode(lie))).instantiate(0, 4)


def test_uneven_gate_and_up_of_one_fused_fsdp_parameter() -> None:
    """A parameter of two tensors end to end, cut by rows in ceil-sized windows across the seam."""
    space = CheckpointSpace([TensorSpec("gate", (7, 3), "BF16"), TensorSpec("up", (7, 3), "BF16")])
    fused = concatenate([whole(space, "gate"), whole(space, "up")])
    maps = {(r, d): declare(space, {"w": fused.chunk(0, r, d)}) for d in (1, 2, 3, 4, 5) for r in range(d)}
    family = fit({point: held for point, held in maps.items() if point[1] != 4})
    for point, held in maps.items():
        assert family.instantiate(*point).digest() == held.digest()
    assert family.prove().holds


def test_interleaved_rows_of_three_tensors_and_biases() -> None:
    space = CheckpointSpace(TensorSpec(n, (12,) if n == "b" else (12, 2), "BF16") for n in ("gate", "up", "b"))

    def at(rank: int, degree: int) -> SourceMap:
        pair = gate_up(whole(space, "gate"), whole(space, "up"), rank=rank, degree=degree, order="interleaved")
        return declare(space, {"w": pair, "b": column_parallel(whole(space, "b"), rank=rank, degree=degree)})

    family = fit({(r, d): at(r, d) for d in (1, 2, 3) for r in range(d)})
    assert family.instantiate(5, 6).digest() == at(5, 6).digest()
    assert family.prove().holds
