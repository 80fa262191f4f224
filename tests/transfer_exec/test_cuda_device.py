"""The CUDA device without one: its kernels interpreted, and everything it asks of the runtime noted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_it_asks_the_runtime_as_the_right_device_and_copies_what_it_is_told() -> None:
    script = Path(__file__).resolve().parent / "cuda_interpreted.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "ok\n"
