"""`transload demo` from outside: exit status, the printed object, a check of the dump that shares nothing with the
proof, and no process left behind however it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open

from layout_algebra.source_map import SourceMap

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
WORKERS = [f"trainer/{rank}" for rank in range(4)] + [f"engine/{e}/{r}" for e in range(2) for r in range(2)]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Run(NamedTuple):
    status: int
    stdout: str
    stderr: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "adapters.cli.main", "demo", *arguments]


def run(*arguments: str) -> Run:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=280)
    return Run(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("dump")
    return run("--layers", "1", "--updates", "2", "--json", "--dump", str(folder)), folder


def test_every_update_is_verified_and_moves_the_model_once(dumped: tuple[Run, Path]) -> None:
    done, _ = dumped
    assert done.status == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["verified"] is True
    assert [update["version"] for update in printed["updates"]] == [1, 2]
    for update in printed["updates"]:
        assert update["differences"] == []
        assert update["bytes_sent_by_trainers"] == update["model_bytes"] == printed["model"]["bytes"]
        assert sum(update["trainers"].values()) == update["bytes_sent_by_trainers"]
        assert [rollout["worker"] for rollout in update["rollouts"]] == WORKERS[4:]
        for rollout in update["rollouts"]:
            assert rollout["bytes_received"] == rollout["bytes_needed"] > 0
        # The step changed most weights, so equality afterwards is no accident.
        assert update["changed_elements"] > 0.5 * printed["model"]["elements"]
        assert update["logits_compared"] > 0
    assert printed["updates"][0]["loss"] != printed["updates"][1]["loss"]
    connect = printed["connect"]
    assert [worker["worker"] for worker in connect["workers"]] == WORKERS
    assert all(worker["opaque_elements"] == 0 for worker in connect["workers"])
    assert all(unused == [] for unused in connect["unused"].values())
    assert connect["rounds"] > 1


def test_the_dump_holds_up_under_a_check_of_its_own(dumped: tuple[Run, Path]) -> None:
    """Every live element equals the checkpoint element that the map names; both by names and numbers of our own."""
    _, folder = dumped
    saved = _tensors(sorted((folder / "checkpoint").glob("*.safetensors")))
    assert "model.layers.0.mlp.experts.17.gate_proj.weight" in saved  # the trainers' checkpoint has per-expert names
    elements = np.concatenate([saved[name].reshape(-1) for name in sorted(saved, key=_natural)])
    printed = json.loads(dumped[0].stdout)
    needed = {each["worker"]: each["bytes_needed"] for each in printed["updates"][-1]["rollouts"]}
    for engine in range(2):
        covered = np.zeros(len(elements) + 1, dtype=bool)
        for rank in range(2):
            live = _tensors([folder / f"engine-{engine}-{rank}.safetensors"])
            source_map = SourceMap.from_bytes((folder / f"engine-{engine}-{rank}.map").read_bytes())
            assert set(source_map.parameters) == set(live)
            wanted = np.zeros_like(covered)
            for name, bits in live.items():
                ids = source_map.ids(name)
                assert ids.shape == bits.shape
                copied = ids > 0
                assert np.array_equal(bits[copied], elements[ids[copied] - 1]), name
                assert copied.all() or "rotary_emb" in name, name
                wanted[ids[copied]] = True
            assert 2 * int(wanted.sum()) == needed[f"engine/{engine}/{rank}"]
            covered |= wanted
        assert covered[1:].all()


def test_the_dump_has_the_layout_that_tensor_parallelism_means(dumped: tuple[Run, Path]) -> None:
    """By hand, without maps: rows, columns and experts where Qwen3-MoE's plan for two ranks puts them."""
    _, folder = dumped
    saved = _tensors(sorted((folder / "checkpoint").glob("*.safetensors")))
    for engine in range(2):
        for rank in range(2):
            live = _tensors([folder / f"engine-{engine}-{rank}.safetensors"])
            half = slice(128 * rank, 128 * (rank + 1))
            attention = "model.layers.0.self_attn"
            assert np.array_equal(live[f"{attention}.q_proj.weight"], saved[f"{attention}.q_proj.weight"][half])
            assert np.array_equal(live[f"{attention}.o_proj.weight"], saved[f"{attention}.o_proj.weight"][:, half])
            assert np.array_equal(live["model.norm.weight"], saved["model.norm.weight"])
            part = slice(64 * rank, 64 * (rank + 1))
            for expert in range(18):
                one = f"model.layers.0.mlp.experts.{expert}"
                gate_up = live["model.layers.0.mlp.experts.gate_up_proj"][expert]
                assert np.array_equal(gate_up[:64], saved[f"{one}.gate_proj.weight"][part])
                assert np.array_equal(gate_up[64:], saved[f"{one}.up_proj.weight"][part])
                down = live["model.layers.0.mlp.experts.down_proj"][expert]
                assert np.array_equal(down, saved[f"{one}.down_proj.weight"][:, part])


def test_a_flipped_bit_fails_the_proof_and_is_named() -> None:
    done = run("--layers", "1", "--updates", "1", "--spoil")
    assert done.status == 1, done.stderr
    assert re.search(
        r"update 1: engine/1/1: model\.layers\.0\.mlp\.experts\.down_proj: 1 of \d+ elements differ, "
        r"first at \(0, 0, 0\)",
        done.stderr,
    )
    assert "Not verified" in done.stdout


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "stderr").open("wb") as stderr:
        parent = subprocess.Popen(command("--layers", "1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
    with parent:
        try:
            yield parent
        finally:
            parent.kill()


def _workers_of(parent: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    stop_at = time.monotonic() + 60
    while time.monotonic() < stop_at:
        found = {}
        for child in psutil.Process(parent.pid).children():
            if "adapters.cli.demo_worker" in child.cmdline():
                found[json.loads(child.cmdline()[-1])["worker"]] = child
        if len(found) == len(WORKERS) + 1:  # and the one that compiles
            return found
        time.sleep(0.1)
    raise AssertionError("the demo did not start its workers")


def _assert_gone(workers: dict[str, psutil.Process]) -> None:
    _, left = psutil.wait_procs(workers.values(), timeout=30)
    assert left == []


def test_a_dead_worker_ends_the_demo_with_its_name(started: subprocess.Popen[bytes], tmp_path: Path) -> None:
    workers = _workers_of(started)
    workers["engine/1/0"].kill()
    assert started.wait(timeout=60) == 2
    _assert_gone(workers)
    assert "engine/1/0: the process ended too early (killed by signal 9)" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize(("number", "wait_for"), [(signal.SIGINT, ""), (signal.SIGTERM, "connect:")])
def test_an_interrupted_demo_leaves_no_process(
    started: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, wait_for: str
) -> None:
    workers = _workers_of(started)
    stop_at = time.monotonic() + 120
    while wait_for not in (tmp_path / "stderr").read_text():
        assert time.monotonic() < stop_at
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(number)
    assert started.wait(timeout=60) == 130
    _assert_gone(workers)


def _tensors(paths: list[Path]) -> dict[str, np.ndarray]:
    """Raw bits by name."""
    found = {}
    for path in paths:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)
                found[name] = tensor.view({2: torch.uint16, 4: torch.uint32}[tensor.element_size()]).numpy()
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
