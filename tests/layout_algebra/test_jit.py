"""The compile decorator: cached machine code follows the files it came from, and off means off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import layout_algebra

INNER = "from layout_algebra._jit import kernel\n\n@kernel\ndef inner(x):\n    return x + {}\n"
MIDDLE = (
    "from layout_algebra._jit import kernel\nfrom inner import inner\n\n@kernel\ndef middle(x):\n    return inner(x)\n"
)
OUTER = """from layout_algebra._jit import kernel
from middle import middle

@kernel
def outer(x):
    return middle(x) * 10

print(outer(1), sum(outer.stats.cache_hits.values()) if hasattr(outer, "stats") else "plain")
"""


def run(folder: Path, **settings: str) -> str:
    path = os.pathsep.join([str(folder), str(Path(layout_algebra.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **settings}
    done = subprocess.run(
        [sys.executable, "outer.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STANDS_IN = """from numba.extending import overload

def one(x):
    return x

@overload(one)
def _compiled(x):
    return lambda x: x + {}
"""
CALLER = """from layout_algebra._jit import kernel
from stands_in import one

@kernel
def outer(x):
    return one(x)

print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def test_a_change_in_what_stands_for_instructions_reaches_kernels(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(CALLER)
    for number, first in ((1, "2 0"), (22, "23 0")):
        (tmp_path / "stands_in.py").write_text(STANDS_IN.format(number))
        assert run(tmp_path) == first
        assert run(tmp_path) == first.replace(" 0", " 1"), "taken from the cache"


def test_a_change_in_a_kernel_reaches_the_kernels_that_call_it(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(INNER.format(1))
    (tmp_path / "middle.py").write_text(MIDDLE)
    (tmp_path / "outer.py").write_text(OUTER)
    assert run(tmp_path) == "20 0"
    assert run(tmp_path) == "20 1", "taken from the cache"
    (tmp_path / "inner.py").write_text(INNER.format(222))
    assert run(tmp_path) == "2230 0", "two files away, compiled anew"
    assert run(tmp_path, NUMBA_DISABLE_JIT="1") == "2230 plain"
