"""The wheel: three import packages, ``adapters`` without an __init__, and algebra and planning without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TAKEN = {  # files of the other distribution named `adapters`
    *("composition", "configuration", "context", "head_utils", "heads", "hub_mixin", "interface", "loading", "methods"),
    *("model_mixin", "models", "trainer", "training", "utils", "wrappers"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


def test_adapters_shares_no_file_with_its_namesake(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "adapters/__init__.py" not in names
    tops = {name.split("/")[1].removesuffix(".py") for name in names if name.startswith("adapters/")}
    assert "sender" in tops
    assert "receiver" in tops
    assert not tops & TAKEN
    assert {name.split("/")[0] for name in names if not name.startswith("transload-")} == {
        "layout_algebra",
        "transfer_exec",
        "adapters",
    }


def test_algebra_and_planning_need_no_torch(wheel: Path, tmp_path: Path) -> None:
    """Run from the unpacked wheel, in a process in which importing torch or a transport fails."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = textwrap.dedent(
        """
        import sys
        for name in ("torch", "zmq", "safetensors", "rich", "typer", "transformers"):
            sys.modules[name] = None
        import numpy as np
        import layout_algebra, transfer_exec
        from layout_algebra import CheckpointSpace, SourceMap, TensorSpec, correspond
        from transfer_exec import Topology, make_plan
        space = CheckpointSpace([TensorSpec("w", (4, 2), "BF16")])
        whole = SourceMap.from_ids(space, {"w": np.arange(1, 9).reshape(4, 2)})
        half = SourceMap.from_ids(space, {"w": np.arange(5, 9).reshape(2, 2)})
        cluster = Topology.uniform(
            trainers=1, engines=1, engine_size=2, workers_per_node=2, nic_bytes_per_s=1e9, local_bytes_per_s=1e10
        )
        plan = make_plan(
            correspond({"trainer/0": whole}, {"engine/0/0": whole, "engine/0/1": half}), cluster, buffer_bytes=64
        )
        assert plan.bytes_sent("trainer/0") == 16
        assert layout_algebra.__file__.startswith(sys.argv[1]), layout_algebra.__file__
        print("planned")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "planned"
