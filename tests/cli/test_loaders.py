"""The FSDP2 and tensor-parallel loaders over real gloo ranks; the checks are in `loader_ranks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"),
    [("fsdp", 4), ("masters", 2), ("transformers", 2), ("transformers", 4)],
    ids=["fsdp2", "float32-masters", "tp2", "tp2-fsdp2"],
)
def test_loader_on_real_ranks(case: str, size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/cli/loader_ranks.py"), case, str(rank), str(size), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [output.splitlines()[-1:] for output in outputs] == [["good"]] * size, "\n".join(outputs)
