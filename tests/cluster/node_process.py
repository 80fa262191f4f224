"""A process on a node that makes one object and calls its methods as the parent says.

It enters the node's network namespace first; the pipe to its parent is a Unix socket, which no such namespace hides.
It answers ``(method, arguments)`` with ``("fine", value)`` or ``("error", text)``. The first message is
``("module:Class", arguments)``; a method may be one of an attribute, ``"sockets.run"``.
"""

from __future__ import annotations

import ctypes
import importlib
import operator
import os
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def main(pipe: Connection, namespace: str) -> None:
    """Serve until the parent hangs up."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A frozen process would not see the end of its pipe.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    if namespace:
        _enter(libc, Path(namespace))
    made: object = None
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if ":" in what:
                module, _, name = what.partition(":")
                made = getattr(importlib.import_module(module), name)(*arguments)
                pipe.send(("fine", None))
            else:
                pipe.send(("fine", operator.attrgetter(what)(made)(*arguments)))
        except Exception:  # noqa: BLE001 - the parent raises it
            pipe.send(("error", traceback.format_exc()))


def _enter(libc: ctypes.CDLL, namespace: Path) -> None:
    with namespace.open("rb") as opened:
        if libc.setns(opened.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"{namespace}: cannot be entered: {os.strerror(error)}")
