"""The bench command: rows follow from value, floor and bar; wrong benchmarks and missing checkouts are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from adapters.cli.bench import BenchError, find_benchmarks, run_benchmark
from adapters.cli.benchmark import BenchResult, Row, interleaved_medians
from adapters.cli.main import app

GOOD = """
from adapters.cli.benchmark import Row

def rows():
    return [
        Row.against_floor("fast", value=2.0, unit="s", floor=1.0, bar=3.0),
        Row.against_floor("slow", value=9.0, unit="s", floor=1.0, bar=3.0),
        Row.against_floor("free", value=9.0, unit="s", floor=1.0),
    ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    benchmarks = tmp_path / "tests" / "benchmarks"
    benchmarks.mkdir(parents=True)
    (benchmarks / "good.py").write_text(GOOD)
    (benchmarks / "nothing.py").write_text("def rows():\n    return []\n")
    (benchmarks / "silent.py").write_text("")
    (benchmarks / "_helper.py").write_text("raise RuntimeError\n")
    (benchmarks / "__init__.py").write_text("")
    return benchmarks


def test_a_row_is_judged_by_its_ratio() -> None:
    assert Row.against_floor("x", value=6.0, unit="s", floor=2.0, bar=3.0) == Row("x", 6.0, "s", 2.0, 3.0, 3.0, True)
    assert not Row.against_floor("x", value=6.1, unit="s", floor=2.0, bar=3.0).ok
    assert Row.against_floor("x", value=6.1, unit="s", floor=2.0).ok
    with pytest.raises(ValueError, match="expected a positive floor, got 0"):
        Row.against_floor("x", value=1.0, unit="s", floor=0.0)


def test_medians_are_taken_in_turns() -> None:
    order: list[str] = []
    interleaved_medians(lambda: order.append("subject"), lambda: order.append("floor"), repeats=5)
    assert order == ["subject", "floor"] * 6
    with pytest.raises(ValueError, match="at least 5"):
        interleaved_medians(lambda: None, lambda: None, repeats=4)


def test_benchmarks_are_found_by_file(folder: Path) -> None:
    assert list(find_benchmarks(folder)) == ["good", "nothing", "silent"]


def test_json_is_one_object_and_check_judges(folder: Path) -> None:
    runner = CliRunner()
    plain = runner.invoke(app, ["bench", "good", "--json", "--folder", str(folder)])
    assert plain.exit_code == 0
    printed = json.loads(plain.stdout)
    assert set(printed) == {"name", "rows", "machine"}
    assert printed["name"] == "good"
    assert [set(row) for row in printed["rows"]] == [{"case", "value", "unit", "floor", "ratio", "bar", "ok"}] * 3
    assert [row["ok"] for row in printed["rows"]] == [True, False, True]
    assert printed["machine"]["cores"] >= 1
    assert printed["machine"]["memory_bytes"] > 1 << 28
    assert runner.invoke(app, ["bench", "good", "--json", "--check", "--folder", str(folder)]).exit_code == 1
    assert "9" in runner.invoke(app, ["bench", "good", "--folder", str(folder)]).stdout


CASED = """
from adapters.cli.benchmark import Row

def cases():
    return {"one": lambda: [Row.against_floor("one", value=1.0, unit="s", floor=1.0)]}

def rows():
    return [*cases()["one"](), Row.against_floor("two 5", value=2.0, unit="s", floor=1.0)]
"""


def test_one_case_of_a_benchmark(folder: Path) -> None:
    (folder / "cased.py").write_text(CASED)
    for case in ("one", "two", "two 5"):
        done = CliRunner().invoke(app, ["bench", "cased", case, "--json", "--folder", str(folder)])
        assert [row["case"][:3] for row in json.loads(done.stdout)["rows"]] == [case[:3]]
    with pytest.raises(BenchError, match="no case begins with 'three'; there are one, one, two 5"):
        run_benchmark("cased", folder, case="three")
    assert len(run_benchmark("cased", folder).rows) == 2


@pytest.mark.processes
def test_without_a_name_each_runs_in_a_process_of_its_own(folder: Path) -> None:
    (folder / "nothing.py").unlink()
    (folder / "silent.py").write_text(GOOD)
    done = subprocess.run(
        [sys.executable, "-m", "adapters.cli.main", "bench", "--json", "--folder", str(folder)],
        capture_output=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=100,
    )
    results = [msgspec.json.decode(line, type=BenchResult) for line in done.stdout.splitlines()]
    assert [result.name for result in results] == ["good", "silent"]


def test_wrong_benchmarks_are_named(folder: Path) -> None:
    with pytest.raises(BenchError, match="there is none of that name; there are good, nothing, silent"):
        run_benchmark("best", folder)
    with pytest.raises(BenchError, match=r"benchmark nothing: expected rows\(\) to return a non-empty list"):
        run_benchmark("nothing", folder)
    with pytest.raises(BenchError, match=r"benchmark silent: expected a function rows\(\)"):
        run_benchmark("silent", folder)


def test_a_missing_checkout_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "site-packages" / "tests" / "benchmarks"
    outcome = CliRunner().invoke(app, ["bench", "--list", "--folder", str(missing)])
    assert outcome.exit_code == 2
    assert "belong to the source checkout" in outcome.stderr


def test_the_version_is_printed() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("transload ")
