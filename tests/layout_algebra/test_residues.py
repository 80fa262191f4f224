"""Codes, moduli and the joining of residues."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.torch_bits import bits_view
from layout_algebra.errors import ProbeError, SpaceError, UnsupportedDtypeError
from layout_algebra.residues import (
    FLOAT_CODES,
    MAX_PRODUCT,
    MIN_PASSES,
    Codebook,
    Pass,
    choose_codebook,
    decoding_of,
    holds_codes,
    join,
    plan_passes,
    product_of,
)
from layout_algebra.space import MAX_ELEMENTS, CheckpointSpace, TensorSpec
from tests.oracle import bits_of_value, code_values

FLOATS = ("BF16", "F16", "F32", "F64")


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_are_distinct_positive_and_exact(dtype: str) -> None:
    values = code_values()
    assert len(set(values)) == FLOAT_CODES.count == 1920
    assert all(value > 0 and math.isfinite(value) for value in values)
    assert FLOAT_CODES.bits(dtype).tolist() == [bits_of_value(value, dtype) for value in values]
    assert FLOAT_CODES.bits(dtype, 5).tolist() == [bits_of_value(value, dtype) for value in values[:5]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_are_read_off_the_bits(dtype: str) -> None:
    decoding = FLOAT_CODES.decoding(dtype)
    assert decoding is not None
    bits = FLOAT_CODES.bits(dtype).astype(np.uint64)
    assert bits.astype(decoding.storage).itemsize == decoding.storage.itemsize
    assert ((bits >> np.uint64(decoding.shift)) - np.uint64(decoding.base)).tolist() == list(range(1920))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I32", "BOOL", "U8", "F8_E8M0", "C64"])
def test_dtypes_without_room_hold_no_codes(dtype: str) -> None:
    assert FLOAT_CODES.decoding(dtype) is None
    with pytest.raises(UnsupportedDtypeError, match=dtype):
        FLOAT_CODES.bits(dtype)


def check_plan(total: int) -> None:
    passes = plan_passes(FLOAT_CODES, total)
    moduli = [one.modulus for one in passes]
    assert len(passes) >= MIN_PASSES
    assert all(modulus % 2 and 1 < modulus <= FLOAT_CODES.count for modulus in moduli)
    assert all(math.gcd(a, b) == 1 for a, b in itertools.combinations(moduli, 2))
    assert 2 * total < math.prod(moduli) == product_of(passes) < MAX_PRODUCT
    assert len(passes) == MIN_PASSES or math.prod(moduli[:-1]) <= 2 * total, "no pass is idle"
    for one in passes:
        assert math.gcd(one.multiplier, one.modulus) == 1
        assert one.multiplier * one.inverse % one.modulus == 1
        assert sorted(one.order().tolist()) == list(range(one.modulus))
    assert passes[0].order().tolist() == list(range(moduli[0])), "ascending"
    assert passes[1].order().tolist() == [0, *range(moduli[1] - 1, 0, -1)], "descending"
    assert abs(passes[2].multiplier / moduli[2] - 0.38) < 0.01, "scrambled"


@given(st.integers(0, MAX_ELEMENTS - 1))
def test_plan_laws(total: int) -> None:
    check_plan(total)


def test_plan_laws_at_every_magnitude() -> None:
    for bit in range(51):
        for total in (2**bit - 1, 2**bit, 2**bit + 1):
            check_plan(min(total, MAX_ELEMENTS - 1))


def test_a_trillion_elements_take_four_passes() -> None:
    assert len(plan_passes(FLOAT_CODES, 10**12)) == 4
    assert len(plan_passes(FLOAT_CODES, 3 * 10**9)) == 3


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(SpaceError, match="float codes cannot number"):
        plan_passes(FLOAT_CODES, 2**60)
    with pytest.raises(SpaceError, match="tiny codes"):
        plan_passes(Codebook("tiny", (1.0, 2.0, 3.0, 4.0, 5.0)), 100)


@given(st.lists(st.integers(0, MAX_ELEMENTS - 1), min_size=1, max_size=20), st.integers(0, 4))
@example([0, 1, MAX_ELEMENTS - 1], 0)
def test_residues_name_the_id(ids: list[int], order: int) -> None:
    passes = plan_passes(FLOAT_CODES, MAX_ELEMENTS - 1)
    passes = passes[order:] + passes[:order]
    numbers = np.array(ids, dtype=np.int64)
    assert join([numbers % one.modulus for one in passes], passes).tolist() == ids


def test_every_tuple_of_residues_names_one_number() -> None:
    passes = [Pass(5, 1), Pass(9, 8), Pass(7, 3)]
    tuples = list(itertools.product(*(range(one.modulus) for one in passes)))
    columns = [np.array(column, dtype=np.uint16) for column in zip(*tuples, strict=True)]
    joined = join(columns, passes)
    assert sorted(joined.tolist()) == list(range(5 * 9 * 7))
    assert [tuple(number % one.modulus for one in passes) for number in joined.tolist()] == tuples


@pytest.mark.parametrize("dtype", FLOATS)
def test_tables_feed_the_code_of_every_id(dtype: str) -> None:
    codes = FLOAT_CODES.bits(dtype)
    for one in plan_passes(FLOAT_CODES, 10**6):
        ids = np.random.default_rng(0).integers(1, 10**6, 300)
        fed = FLOAT_CODES.table(dtype, one)[ids % one.modulus]
        assert np.array_equal(fed, codes[one.multiplier * ids % one.modulus])


def test_a_codebook_is_chosen_by_the_checkpoint() -> None:
    floats = [TensorSpec("a", (2,), "BF16"), TensorSpec("b", (2,), "F32"), TensorSpec("c", (3,), "F16")]
    assert choose_codebook(CheckpointSpace(floats)) is FLOAT_CODES
    assert choose_codebook(CheckpointSpace([])) is FLOAT_CODES
    nothing = TensorSpec("empty", (0, 4), "I64")
    assert choose_codebook(CheckpointSpace([*floats, nothing])) is FLOAT_CODES


NUMBERS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@pytest.mark.parametrize(
    ("dtypes", "count"),
    [
        ("BF16 F32 F64", 1920),
        ("I16", 1024),
        ("BF16 I32", 1024),
        ("F16 F32 U16 I64 U64", 1024),
        ("F8_E4M3", 126),
        ("F8_E4M3 F32 BF16", 126),
        ("F8_E5M2 F16", 123),
        ("U8 BF16", 255),
        ("I8", 127),
        ("I8 U8 F32 I32", 127),
        ("F8_E4M3 I8", 39),
        ("F8_E4M3 U8 I64", 47),
        ("F8_E4M3 I64", 54),
        ("F8_E4M3 F8_E5M2", 67),
        ("F8_E5M2 I8 BF16", 23),
    ],
)
def test_codes_of_every_mixture_are_exact_and_read_back(dtypes: str, count: int) -> None:
    """Against torch's own conversions; also in dtypes that a parameter may have."""
    used = dtypes.split()
    codebook = choose_codebook(CheckpointSpace(TensorSpec(f"t{k}", (2,), dtype) for k, dtype in enumerate(used)))
    assert codebook.count == count == len(set(codebook.values))
    assert list(codebook.values) == sorted(codebook.values)
    assert codebook.values[0] > 0
    values = torch.tensor(codebook.values, dtype=torch.float64)
    held = []
    for dtype, known in NUMBERS.items():
        there = values.to(known)
        exact = bool((there.to(torch.float64) == values).all())
        assert codebook.is_exact_in(dtype) == exact, dtype
        decoding = codebook.decoding(dtype)
        assert (decoding is not None) == exact
        if decoding is None:
            continue
        held.append(dtype)
        bits = bits_view(there)
        assert codebook.bits(dtype).tolist() == bits.tolist()
        assert decoding.read(bits).tolist() == list(range(count))
        if decoding.storage.itemsize <= 2:
            every = np.arange(1 << 8 * decoding.storage.itemsize).astype(decoding.storage)
            others = every[~np.isin(every, bits)]
        else:
            turned = np.bitwise_or(bits, decoding.storage.type(1 << 31))
            others = np.concatenate([bits + 1, bits - 1, turned, [0, (1 << 32) - 1]])
            others = others[~np.isin(others, bits)].astype(decoding.storage)
        assert (decoding.read(others) >= count).all(), "what is no code is read as one"
    assert set(used) <= set(held)
    plan_passes(codebook, 10**7)


@pytest.mark.parametrize("dtype", ["BOOL", "F8_E8M0", "F4", "F6_E2M3", "C64"])
def test_dtypes_without_codes_have_no_say(dtype: str) -> None:
    space = CheckpointSpace([TensorSpec("a", (2,), "BF16"), TensorSpec("layer.scale", (2,), dtype)])
    assert not holds_codes(dtype)
    assert choose_codebook(space) is FLOAT_CODES


def test_a_mixture_with_too_few_numbers_is_refused_by_name() -> None:
    space = CheckpointSpace([TensorSpec("a", (2,), "F8_E5M2"), TensorSpec("b", (2,), "I8")])
    with pytest.raises(SpaceError, match="F8_E5M2 and I8 codes cannot number 1,000,000,000 elements: there are 23"):
        plan_passes(choose_codebook(space), 10**9)


def test_codes_that_span_too_many_patterns_are_refused() -> None:
    with pytest.raises(ProbeError, match="span 65,537 patterns"):
        decoding_of(np.array([1, 1 << 16 | 1], dtype=np.uint32))


@pytest.mark.parametrize("moduli", [(), (15, 9, 7), (2**31 - 1, 2**61 - 1)])
def test_moduli_that_cannot_name_numbers_are_refused(moduli: tuple[int, ...]) -> None:
    with pytest.raises(ProbeError, match="coprime"):
        product_of([Pass(modulus, 1) for modulus in moduli])
