"""`transload demo`: real weights from four FSDP2 trainers to two tensor-parallel engines, proven bit by bit.

The parent only conducts: it starts the workers, says the steps in order, gathers numbers and always ends every
process. Weights never pass through it.

::

    start -> checkpoint -> load -> connect -> (train -> transfer -> save -> prove) x updates -> dump -> close

The proof does not use the transfer: trainers gather and save their state with torch and transformers, every engine
loads that folder into a second model with its own loader, and all bits, and the logits of a prompt, must be equal.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from adapters.cli.crew import Crew, CrewError
from adapters.cli.demo_cluster import worker_setups
from adapters.cli.demo_messages import Command, Reply, decode_reply, failure_of
from adapters.cli.demo_result import DemoResult
from adapters.cli.demo_steps import DemoSteps
from adapters.cli.demo_tables import print_result
from adapters.cli.phases import Phases

__all__ = ["run_demo"]

_DEADLINE_S = 300.0

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # gloo on the host, whatever this machine has
}


def run_demo(*, layers: int, updates: int, as_json: bool, dump: Path | None, spoil: bool) -> int:
    """Run the demo and print what it found.

    Returns
    -------
    The exit status: 0 when every update is proven, 1 when a proof fails, 2 when a worker failed, 130 when interrupted.
    """
    messages = Console(stderr=True)
    try:
        with _termination_interrupts(), tempfile.TemporaryDirectory(prefix="transload-demo-") as folder:
            result = _conduct(Path(folder), layers=layers, updates=updates, dump=dump, spoil=spoil, messages=messages)
    except CrewError as error:
        messages.print(f"transload demo: {error}", style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        messages.print("transload demo: interrupted; all workers were ended", style="yellow")
        return 130
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print_result(result, Console())
    for update in result.updates:
        for difference in update.differences:
            print(f"update {update.version}: {difference}", file=sys.stderr)
    return 0 if result.verified else 1


def _conduct(
    folder: Path, *, layers: int, updates: int, dump: Path | None, spoil: bool, messages: Console
) -> DemoResult:
    (folder / "logs").mkdir()
    with (
        Phases(messages) as phases,
        Crew[Command, Reply](
            "adapters.cli.demo_worker",
            worker_setups(folder, layers, deadline_s=_DEADLINE_S),
            decode=decode_reply,
            failure=failure_of,
            log_folder=folder / "logs",
            environment=_ENVIRONMENT,
        ) as crew,
    ):
        steps = DemoSteps(crew, phases, folder, deadline_s=_DEADLINE_S)
        model = steps.write_checkpoint(layers)
        live, connect = steps.load_and_connect()
        results = [
            steps.update(version, model.bytes, spoil=spoil and version == updates) for version in range(1, updates + 1)
        ]
        if dump is not None:
            steps.dump(dump)
        steps.close()
    return DemoResult(
        verified=all(result.verified for result in results),
        model=model,
        live=live,
        connect=connect,
        updates=tuple(results),
        seconds=phases.seconds,
        dump=None if dump is None else str(dump),
    )


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    # A termination request must end the workers as Ctrl-C does, not leave them to notice a lost parent.
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
