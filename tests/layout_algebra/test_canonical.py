"""The normal form: same ids, few regular pieces, and one form for one set of ids."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_algebra.canonical import canonical, canonical_table
from layout_algebra.errors import MapError
from layout_algebra.recover import canonical_of_ids, rectangles_of_ids
from layout_algebra.slice_copy import CopyTable, SliceCopy, Strided
from tests.interpreted import MODES, kernels_run
from tests.oracle import ids_of_rows
from tests.strategies import Ids, id_matrices


def form(ids: Ids) -> CopyTable:
    return canonical_of_ids(np.asarray(ids, dtype=np.int64))


def shown(ids: Ids) -> list[str]:
    return [str(copy) for copy in form(ids).slice_copies()]


def as_program(ids: Ids, rng: np.random.Generator) -> list[SliceCopy]:
    """Some slice copies with these ids: runs of random lengths in random order, some of them written backwards."""
    flat = ids.reshape(-1)
    out, index = [], 0
    while index < len(flat):
        if flat[index] <= 0:
            index += 1
            continue
        step = int(flat[index + 1] - flat[index]) if index + 1 < len(flat) else 0
        length, most = 1, int(rng.integers(1, 6))
        while length < most and index + length < len(flat) and flat[index + length] == flat[index] + length * step:
            if flat[index + length] <= 0:
                break
            length += 1
        start, way = (index, 1) if rng.random() < 0.5 else (index + length - 1, -1)
        out.append(SliceCopy(Strided(int(flat[start]), (length,), (way * step,)), Strided(start, (length,), (way,))))
        index += length
    return [out[k] for k in rng.permutation(len(out))]


def check(ids: Ids, seed: int) -> None:
    made = form(ids)
    assert ids_of_rows(made.rows, ids.size).tolist() == np.maximum(ids, 0).reshape(-1).tolist()
    assert len(made) <= len(rectangles_of_ids(ids))
    assert (np.diff(made.target_starts) > 0).all()
    assert made.axes == 1 or (made.extents > 1).any(axis=0).all(), "no axis is idle in every row"
    program = as_program(ids, np.random.default_rng(seed))
    assert canonical(program, ids.shape).rows.tolist() == made.rows.tolist()
    assert canonical(made.slice_copies(), ids.shape).rows.tolist() == made.rows.tolist(), "it is its own normal form"


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60)
@given(id_matrices(), st.integers(0, 99))
def test_normal_form_of_any_program(mode: str, ids: Ids, seed: int) -> None:
    with kernels_run(mode):
        check(ids, seed)


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 1, 3)])
def test_normal_form_on_every_small_matrix(shape: tuple[int, ...]) -> None:
    for seed, listed in enumerate(itertools.product(range(3), repeat=6)):
        check(np.array(listed, dtype=np.int64).reshape(shape), seed)


@pytest.mark.parametrize("shape", [(5,), (2, 2), (4, 1)])
def test_equal_forms_exactly_when_ids_are_equal(shape: tuple[int, ...]) -> None:
    forms: dict[bytes, bytes] = {}
    for listed in itertools.product(range(5), repeat=int(np.prod(shape))):
        ids = np.array(listed, dtype=np.int64).reshape(shape)
        made = form(ids)
        key = str(made.rows.shape).encode() + made.rows.tobytes()
        assert forms.setdefault(key, ids.tobytes()) == ids.tobytes()
    assert len(forms) == 5 ** int(np.prod(shape))


def expert(e: int, rows: int, columns: int, per_expert: int) -> Ids:
    return 1 + e * per_expert + np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)


def test_a_column_shard_stacked_over_experts_is_one_copy() -> None:
    stack = np.stack([expert(e, 4, 6, 1000)[:, 2:4] for e in range(12)])
    assert shown(stack) == ["0+(12:8,4:2,2:1) <- 3+(12:1000,4:6,2:1)"]
    next_to_each_other = np.stack([expert(e, 4, 6, 24)[:, 2:4] for e in range(12)])
    assert shown(next_to_each_other) == ["0+(48:2,2:1) <- 3+(48:6,2:1)"]


def test_known_layouts_print_as_expected() -> None:
    tensor = np.arange(1, 241).reshape(12, 20)
    assert shown(tensor) == ["0+(240:1) <- 1+(240:1)"]
    assert shown(tensor.T) == ["0+(20:12,12:1) <- 1+(20:1,12:20)"]
    assert shown(tensor.reshape(3, 4, 20).transpose(2, 0, 1)) == ["0+(20:12,12:1) <- 1+(20:1,12:20)"]
    assert shown(tensor.reshape(3, 4, 20).transpose(1, 2, 0)) == ["0+(80:3,3:1) <- 1+(80:1,3:80)"]
    assert shown(tensor[::-1, ::-1]) == ["0+(240:1) <- 240+(240:-1)"]
    gate, up = tensor, tensor + 240
    assert shown(np.concatenate([gate, up])) == ["0+(480:1) <- 1+(480:1)"]
    assert shown(np.concatenate([up, gate])) == ["0+(240:1) <- 241+(240:1)", "240+(240:1) <- 1+(240:1)"]
    assert shown(np.stack([gate, up], axis=1)) == ["0+(12:40,2:20,20:1) <- 1+(12:20,2:240,20:1)"]
    assert shown(np.stack([gate, up], axis=2)) == ["0+(240:2,2:1) <- 1+(240:1,2:240)"]
    assert shown(np.pad(tensor, ((0, 4), (0, 0)))) == ["0+(240:1) <- 1+(240:1)"]
    assert shown(np.pad(tensor, ((0, 0), (0, 4)))) == ["0+(12:24,20:1) <- 1+(12:20,20:1)"]
    assert shown(np.array(7)) == ["0+() <- 7+()"]
    assert shown(np.zeros((3, 0), dtype=np.int64)) == []


def test_grouped_qkv_and_gated_experts_have_one_copy_a_part() -> None:
    q, k, v = (expert(0, 4 * n * 8, 16, 0).reshape(4, n * 8, 16) + at for n, at in ((4, 0), (1, 10000), (1, 20000)))
    assert shown(np.concatenate([q, k, v], axis=1)) == [
        "0+(4:768,512:1) <- 1+(4:512,512:1)",
        "512+(4:768,128:1) <- 10001+(4:128,128:1)",
        "640+(4:768,128:1) <- 20001+(4:128,128:1)",
    ]
    halves = [np.concatenate([expert(e, 8, 16, 900)[:4], 300 + expert(e, 8, 16, 900)[:4]]) for e in range(5)]
    assert len(form(np.stack(halves))) == 2
    assert len(form(np.stack(halves).transpose(0, 2, 1))) == 2


def test_rotary_halves_interleaved_are_one_copy() -> None:
    heads = expert(0, 8 * 64, 32, 0).reshape(8, 2, 32, 32)
    assert shown(heads.transpose(0, 2, 1, 3).reshape(-1, 32)) == [
        "0+(8:2048,32:64,2:32,32:1) <- 1+(8:2048,32:32,2:1024,32:1)"
    ]


def test_two_pieces_are_no_repeat() -> None:
    assert len(form(np.stack([expert(0, 2, 3, 0), expert(7, 2, 3, 100)]))) == 2
    assert len(form(np.stack([expert(e, 2, 3, 100) for e in (0, 7, 14)]))) == 1


def test_strides_of_any_sign_and_rows_that_wrap() -> None:
    down = SliceCopy(Strided(5, (4, 3), (10, 1)), Strided(23, (4, 3), (-6, -1)))
    out = np.zeros(24, dtype=np.int64)
    for i, j in itertools.product(range(4), range(3)):
        out[23 - 6 * i - j] = 5 + 10 * i + j
    assert canonical([down], (4, 6)).rows.tolist() == form(out.reshape(4, 6)).rows.tolist()
    wraps = SliceCopy(Strided(1, (3, 4), (4, 1)), Strided(3, (3, 4), (6, 1)))
    out = ids_of_rows(CopyTable.of([wraps]).rows, 24)
    assert canonical([wraps], (4, 6)).rows.tolist() == form(out.reshape(4, 6)).rows.tolist()
    assert canonical([], (4, 6)).rows.shape == (0, 5)


def test_overlap_is_refused() -> None:
    one = SliceCopy(Strided(1, (4,), (1,)), Strided(0, (4,), (1,)))
    with pytest.raises(MapError, match="overlap"):
        canonical([one, one], (4, 2))


@st.composite
def one_copy(draw: st.DrawFn) -> tuple[tuple[int, ...], SliceCopy]:
    """A copy of at most three axes without two elements at one place, in a parameter of up to three axes."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = math.prod(shape)
    units = [1, 2, shape[-1], 2 * shape[-1], math.prod(shape[-2:])]
    extents = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    strides = tuple(draw(st.sampled_from([*units, *(-unit for unit in units)])) for _ in extents)
    steps = tuple(draw(st.integers(-3, 7)) for _ in extents)
    low = sum(min(0, (n - 1) * s) for n, s in zip(extents, strides, strict=True))
    start = draw(st.integers(-low, max(-low, size - 1)))
    piece = SliceCopy(Strided(60, extents, steps), Strided(start, extents, strides))
    return shape, piece


@settings(max_examples=500)
@given(one_copy())
def test_one_copy_has_the_form_of_its_ids(drawn: tuple[tuple[int, ...], SliceCopy]) -> None:
    shape, piece = drawn
    where = piece.target.indices().ravel()
    table = CopyTable.of([piece])
    if int(where.max()) >= math.prod(shape) or len(set(where.tolist())) < len(where):
        with pytest.raises(MapError):
            canonical_table(table, shape)
        return
    ids = np.zeros(math.prod(shape), dtype=np.int64)
    table.write_ids(ids)
    wanted = canonical_of_ids(ids.reshape(shape))
    assert np.array_equal(canonical_table(table, shape).rows, wanted.rows)


def test_no_copies_have_a_form_too() -> None:
    assert len(canonical_table(CopyTable.empty(), (3, 4))) == 0
    assert canonical_table(CopyTable.empty(), (0, 4)).rows.shape == (0, 5)
