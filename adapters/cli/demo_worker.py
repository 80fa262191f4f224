"""One process of the demo: reads commands, answers each, ends when its input closes.

Run as `python -m adapters.cli.demo_worker SETUP`, SETUP being a `WorkerSetup` in JSON. Standard output carries replies
only, so whatever else a library prints goes to standard error.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from typing import IO, Protocol

import msgspec

from adapters.cli.demo_cluster import COMPILER
from adapters.cli.demo_messages import Close, Closed, Command, Failed, Reply, WorkerSetup

__all__ = ["main"]

_PARENT_GONE = 3


class Role(Protocol):
    """What a worker does for each command."""

    def answer(self, command: Command) -> Reply:
        """Do one command."""
        ...


def main() -> None:
    """Serve commands until `Close`."""
    setup = msgspec.json.decode(sys.argv[1], type=WorkerSetup)
    replies = _take_standard_output()
    commands: queue.Queue[Command] = queue.Queue()
    closing = threading.Event()
    reader = threading.Thread(target=_read_commands, args=(commands, closing), name="commands", daemon=True)
    reader.start()

    role = _make_role(setup)
    while True:
        command = commands.get()
        if isinstance(command, Close):
            closing.set()
        try:
            reply: Reply = role.answer(command)
        except Exception as error:  # noqa: BLE001 - the parent decides; it gets the message and the traceback
            reply = Failed(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
        if isinstance(reply, Closed):
            reader.join()  # stay until all have answered: a worker that leaves early looks like one that died
            sys.stderr.flush()
            os._exit(0)  # all is closed, and taking torch and transformers down takes a second of every process


def _make_role(setup: WorkerSetup) -> Role:
    # Imported here, so that a parent that goes away during these seconds of imports still ends this process.
    if setup.worker == COMPILER:
        from adapters.cli.demo_compiler import CompilerRole

        return CompilerRole()
    from adapters.cli.demo_roles import make_role

    return make_role(setup)


def _take_standard_output() -> IO[bytes]:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def _read_commands(commands: queue.Queue[Command], closing: threading.Event) -> None:
    decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
    for line in sys.stdin.buffer:
        commands.put(decoder.decode(line))
    if not closing.is_set():
        # The parent is gone, however it went. Collectives may block the main thread for good: leave from here.
        os._exit(_PARENT_GONE)


if __name__ == "__main__":
    main()
