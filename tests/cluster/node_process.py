"""A process on a node that makes one object and calls its methods as the parent says.

Run as ``python -m tests.cluster.node_process SOCKET NUMBER``: it connects to a Unix socket, which no namespace of the
network hides, says its number, and answers ``(method, arguments)`` with ``("fine", value)`` or ``("error", text)``.
The first message is ``("module:Class", arguments)``; a method may be one of an attribute, ``"sockets.run"``.
"""

from __future__ import annotations

import importlib
import operator
import sys
import traceback
from multiprocessing.connection import Client


def main(address: str, number: int) -> None:
    """Serve until the parent hangs up."""
    with Client(address, family="AF_UNIX") as pipe:
        pipe.send(number)
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
