"""Every example in the package's docstrings gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import layout_algebra

MODULES = sorted(each.name for each in pkgutil.iter_modules(layout_algebra.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"layout_algebra.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_front_doors_have_examples() -> None:
    for name in ("symbolic", "map_bytes", "correspondence_bytes", "map_diff", "shardings", "source_map"):
        assert doctest.testmod(importlib.import_module(f"layout_algebra.{name}")).attempted > 2
