"""Families over meshes of two dimensions: fitted, made again, proved, explained, or refused by name."""

from __future__ import annotations

import pytest

from layout_algebra.blocks import Layout, declare, stack, whole
from layout_algebra.errors import FormulaError
from layout_algebra.shardings import column_parallel, fsdp2, gate_up, row_parallel
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from layout_algebra.symbolic import fit
from layout_algebra.symbolic_map import SymbolicMap

EXPERTS = 16
SPACE = CheckpointSpace(
    [
        TensorSpec("w", (48, 32), "BF16"),
        TensorSpec("v", (48, 32), "BF16"),
        TensorSpec("odd", (10, 4), "BF16"),
        TensorSpec("norm", (48,), "F32"),
        *(TensorSpec(f"experts.{e}.up", (8, 6), "BF16") for e in range(EXPERTS)),
    ]
)
W, V = whole(SPACE, "w"), whole(SPACE, "v")


def rows_and_columns(row: int, rows: int, column: int, columns: int) -> Layout:
    return fsdp2(row_parallel(W, rank=column, degree=columns), rank=row, degree=rows)


def one_axis_twice(row: int, rows: int, column: int, columns: int) -> Layout:
    return column_parallel(column_parallel(W, rank=column, degree=columns), rank=row, degree=rows)


def by_row(row: int, rows: int, column: int, columns: int) -> Layout:
    return column_parallel(W, rank=row, degree=rows)


def by_column(row: int, rows: int, column: int, columns: int) -> Layout:
    return column_parallel(W, rank=column, degree=columns)


def fused(row: int, rows: int, column: int, columns: int) -> Layout:
    return row_parallel(gate_up(W, V, rank=column, degree=columns), rank=row, degree=rows)


def uneven(row: int, rows: int, column: int, columns: int) -> Layout:
    return fsdp2(whole(SPACE, "odd"), rank=row, degree=rows)


def experts(row: int, rows: int, column: int, columns: int) -> Layout:
    local = EXPERTS // rows
    parts = [whole(SPACE, f"experts.{e}.up") for e in range(local * row, local * (row + 1))]
    return stack([column_parallel(part, rank=column, degree=columns) for part in parts])


def experts_by_column(row: int, rows: int, column: int, columns: int) -> Layout:
    local = EXPERTS // columns
    parts = [whole(SPACE, f"experts.{e}.up") for e in range(local * column, local * (column + 1))]
    return stack([row_parallel(part, rank=row, degree=rows) for part in parts])


LAYOUTS = [rows_and_columns, one_axis_twice, by_row, by_column, fused, uneven, experts, experts_by_column]
BY_NAME = {layout.__name__: layout for layout in LAYOUTS}


def sample(name: str, row: int, rows: int, column: int, columns: int) -> SourceMap:
    return declare(SPACE, {"p": BY_NAME[name](row, rows, column, columns), "norm": whole(SPACE, "norm")})


def fitted(name: str, columns: int, all_rows: tuple[int, ...]) -> SymbolicMap:
    return fit(
        {
            ((row, column), (rows, columns)): sample(name, row, rows, column, columns)
            for rows in all_rows
            for row in range(rows)
            for column in range(columns)
        }
    )


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("name", BY_NAME)
def test_other_numbers_of_rows_follow(name: str, columns: int) -> None:
    """The law: the formulas of a few numbers of rows give any others."""
    seen: tuple[int, ...]
    seen, others = ((2, 4), (1, 8)) if name in ("experts", "fused") else ((2, 3), (1, 6))
    if name == "uneven":
        seen = (2, 3, 4)
    family = fitted(name, columns, seen)
    again = SymbolicMap.from_bytes(family.to_bytes())
    for rows in (*seen, *others):
        for row in range(rows):
            for column in range(columns):
                made = again.instantiate(row * columns + column, rows * columns)
                assert made.same_as(sample(name, row, rows, column, columns)), (rows, row, column)


@pytest.mark.parametrize("name", ["rows_and_columns", "fused", "experts", "experts_by_column"])
def test_a_mesh_covers_exactly_once_for_any_number_of_rows(name: str) -> None:
    family = fitted(name, 2, (2, 4) if name in ("experts", "fused") else (2, 3))
    tensors = ["experts.*"] if name.startswith("experts") else ["w", "v"] if name == "fused" else ["w"]
    proof = family.prove(tensors=tensors)
    assert (proof.holds, proof.kind, proof.degree) == (True, "symbolic", None)
    assert " of rows " in proof.steps[-1] or " of rows " in proof.steps[0]
    assert family.prove(tensors=["norm"], replicas=True).holds
    assert family.prove(tensors=["norm"]).holds is False


def test_what_moves_along_one_index_is_held_by_all_ranks_of_the_other() -> None:
    for name in ("by_row", "by_column"):
        family = fitted(name, 2, (2, 3))
        assert family.prove(tensors=["w"]).holds is False
        assert family.prove(tensors=["w"], replicas=True).holds


def test_one_axis_cut_twice_is_counted_for_a_degree() -> None:
    family = fitted("one_axis_twice", 2, (2, 3))
    assert family.prove(6, tensors=["w"]).holds
    assert family.prove(tensors=["w"]).holds is None
    with pytest.raises(FormulaError, match="mesh of 2 columns; expected a degree that is a multiple"):
        family.instantiate(0, 3)


def test_indices_of_a_mesh_are_shown_as_such() -> None:
    assert fitted("rows_and_columns", 2, (2, 3, 4)).explain("p") == (
        "p[:, :] = w[96*floor(r/2)/d : 96*floor(r/2)/d+96/d, 16*(r%2) : 16*((r%2)+1)]"
    )
    assert fitted("experts", 2, (2, 4)).explain("p") == (
        "p[e, :, :] = experts.{32*floor(r/2)/d+e}.up[4*(r%2) : 4*((r%2)+1), :] for e in 0:32/d"
    )
    assert fitted("one_axis_twice", 2, (2, 3)).explain("p") == (
        "p[:, :] = w[24*((r%2)+2*(r//2)/d) : 24*((r%2)+2*(r//2)/d+2/d), :]"
    )


def test_points_that_are_no_mesh_are_refused() -> None:
    one = sample("by_row", 0, 2, 0, 2)
    bad: list[tuple[object, str]] = [
        (((0, 0, 0), (2, 2, 2)), "fit two dimensions at a time"),
        (((2, 0), (2, 2)), "no such rank in a mesh"),
        ((0, (2, 2)), "expected numbers, or pairs"),
    ]
    for point, message in bad:
        with pytest.raises(FormulaError, match=message):
            fit({point: one})  # type: ignore[arg-type]
    with pytest.raises(FormulaError, match="meshes with 2, 4 columns"):
        fit({((0, 0), (2, 2)): one, ((0, 0), (2, 4)): one})
    with pytest.raises(FormulaError, match="meshes with 0, 2 columns"):
        fit({((0, 0), (2, 2)): one, (0, 4): one})  # type: ignore[arg-type]


def test_a_mesh_given_as_plain_ranks_is_told_what_to_do() -> None:
    flat = {(2 * row + column, 4): sample("rows_and_columns", row, 2, column, 2) for row in (0, 1) for column in (0, 1)}
    more = {
        (2 * row + column, 8): sample("rows_and_columns", row, 4, column, 2) for row in range(4) for column in (0, 1)
    }
    with pytest.raises(
        FormulaError, match=r"p: .*If ranks are a mesh of two dimensions, give ranks and degrees as pairs"
    ):
        fit({**flat, **more})
