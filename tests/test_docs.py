"""The pages' examples are true, and their links lead somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path) -> None:
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_architecture_names_every_file() -> None:
    """A newcomer finds each module in the tables of the architecture page, and no module that is gone."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"([A-Za-z0-9_/]+\.py)\b", text))
    for package in ("layout_algebra", "transfer_exec", "adapters"):
        for path in (ROOT / package).rglob("*.py"):
            inside = path.relative_to(ROOT / package)
            if path.name.startswith("_") or path.name == "errors.py" or inside.parts[0] == "cli":
                continue
            assert str(inside) in named or str(path.relative_to(ROOT)) in named, path.relative_to(ROOT)
    modules = {
        str(path.relative_to(ROOT / package))
        for package in ("layout_algebra", "transfer_exec", "adapters")
        for path in (ROOT / package).rglob("*.py")
    }
    for name in named:
        assert name in modules or (ROOT / name).exists(), name
