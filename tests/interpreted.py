"""Run kernels as plain Python, so that a test's failure does not depend on a compiler and coverage sees their lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

PREFIXES = ("layout_algebra",)


MODES = ("jitted", "interpreted")


@contextmanager
def kernels_run(mode: str) -> Iterator[None]:
    """Inside, kernels run compiled (``"jitted"``), or as the functions they were compiled from (``"interpreted"``)."""
    if mode == "jitted":
        yield
        return
    # Every compiled function's original takes its place in every module that names it.
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] not in PREFIXES:
                continue
            for name, value in list(vars(module).items()):
                original = getattr(value, "py_func", None)
                if original is not None:
                    patch.setattr(module, name, original)
        yield
