"""What operators ask about, one line each, in the log `transload`.

A line is the event's name and ``key=value`` pairs, so it can be grepped and split at blanks; values that have blanks
are in JSON's quotes. Handlers that collect structures find the same in the record's ``transload``.

::

    plan worker=trainer/0 version=- trainers=4 engines=2 rounds=12 bytes=1048576 seconds=0.31 digest=5c1d0a...
    activated worker=engine/a/0 version=7 seconds=0.12
    torn worker=engine/b/1 version=7 why="engine/b/0: lost during transfer, version 7: its connection closed"

Every event names a worker and a version ("-" where none is meant). Events of every step are of level DEBUG; what goes
on well in a connect or update is INFO, what somebody must look at WARNING.
"""

from __future__ import annotations

import json
import logging
from typing import TypeAlias

__all__ = ["Value", "log_event"]

Value: TypeAlias = str | int | float | None

_log = logging.getLogger("transload")


def log_event(event: str, worker: str, version: int | None = None, *, level: int = logging.INFO, **what: Value) -> None:
    """Write one event.

    Parameters
    ----------
    event
        Its name.
    worker, version
        Whom and which version it is about.
    level
        As in `logging`.
    what
        All else that is known of it.
    """
    if _log.isEnabledFor(level):
        fields: dict[str, Value] = {"worker": worker, "version": version, **what}
        text = " ".join(f"{key}={_shown(value)}" for key, value in fields.items())
        _log.log(level, "%s %s", event, text, extra={"transload": {"event": event, **fields}}, stacklevel=2)


def _shown(value: Value) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if any(letter.isspace() or letter in '"=' for letter in text) else text
