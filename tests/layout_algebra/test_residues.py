"""Codes, moduli and the joining of residues."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layout_algebra.errors import ProbeError, SpaceError, UnsupportedDtypeError
from layout_algebra.residues import (
    FLOAT_CODES,
    MAX_PRODUCT,
    MIN_PASSES,
    Codebook,
    Pass,
    choose_codebook,
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


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "BOOL", "U8"])
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
        plan_passes(Codebook("tiny", 0, 0, ("BF16",)), 2**60)


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


@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "F8_E4M3", "F8_E8M0", "BOOL", "F64", "F4"])
def test_other_checkpoints_are_refused_by_name(dtype: str) -> None:
    space = CheckpointSpace([TensorSpec("a", (2,), "BF16"), TensorSpec("layer.scale", (2,), dtype)])
    with pytest.raises(UnsupportedDtypeError, match=rf"layer\.scale: dtype {dtype}"):
        choose_codebook(space)


@pytest.mark.parametrize("moduli", [(), (15, 9, 7), (2**31 - 1, 2**61 - 1)])
def test_moduli_that_cannot_name_numbers_are_refused(moduli: tuple[int, ...]) -> None:
    with pytest.raises(ProbeError, match="coprime"):
        product_of([Pass(modulus, 1) for modulus in moduli])
