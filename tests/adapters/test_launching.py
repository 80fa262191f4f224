"""One job started in three ways: plain processes that know addresses, plain processes and torchrun with a store."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from adapters.job_key import job_key, new_key
from tests.adapters.crew import compile_kernels

pytestmark = pytest.mark.processes

WORKER = "tests.adapters.launched_rank"
WORLD = 3
WITHIN_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


def run(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Start some processes, wait for all, and say how each ended."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        return [(process.wait(WITHIN_S), process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def check(outcomes: Sequence[tuple[int, str]], workers: Sequence[str]) -> None:
    """Every worker ended well, and says that it holds both versions."""
    everything = "\n".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [0] * len(outcomes), everything
    for worker in workers:
        assert f"{worker}: versions 1, 2" in everything, everything


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


WORKERS = ("trainer/0", "trainer/1", "engine/a/0")


def plain(arguments: Sequence[str]) -> list[list[str]]:
    return [[sys.executable, "-m", WORKER, str(rank), *arguments] for rank in range(WORLD)]


def by_addresses(folder: Path) -> list[list[str]]:
    known = [f"sender=tcp://127.0.0.1:{free_port()}", f"engine/a=tcp://127.0.0.1:{free_port()}"]
    return plain(["addresses", new_key(), *known])


def by_store(folder: Path) -> list[list[str]]:
    # The tests' own process keeps the store, as a launcher would.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)
    return plain(["store", job_key(folder / "key"), "127.0.0.1", str(store.port)])


STORES: list[TCPStore] = []


@pytest.mark.parametrize("commands", [by_addresses, by_store], ids=lambda made: made.__name__)
def test_plain_processes(commands: Callable[[Path], list[list[str]]], tmp_path: Path) -> None:
    check(run(commands(tmp_path)), WORKERS)


def test_torchrun_with_its_own_store(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    # The key is made by whichever rank comes first; the store only ever sees addresses.
    command = [*launcher, "--module", WORKER, "torchrun", str(tmp_path / "key")]
    check(run([command]), WORKERS)
