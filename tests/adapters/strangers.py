"""Callers that do not keep to the rules: with the job's key, with another one, or with none."""

from __future__ import annotations

import zmq

from adapters.job_key import caller_pair, listener_pair
from adapters.rendezvous import Record


class stranger:
    """A socket of our own that is connected to a worker; with ``key=""`` it does not even encrypt."""

    def __init__(self, record: Record, key: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.sndhwm = 0
        used = record.key if key is None else key
        if used:
            self._socket.curve_serverkey = listener_pair(used).public
            self._socket.curve_publickey, self._socket.curve_secretkey = caller_pair(used)
        self._socket.connect(record.address)

    def __enter__(self) -> zmq.Socket[bytes]:
        return self._socket

    def __exit__(self, *error: object) -> None:
        self._socket.close(0)
        self._context.term()
