"""Who is connected to a worker, and what it has still to post to them: the book that a checked transport keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from layout_algebra.dtypes import IdArray
from transfer_exec.transport.base import Endpoint
from transfer_exec.transport.stretches import Stretches

_Posted = TypeVar("_Posted")

Bases = Mapping[str, tuple[int, ...]]
"""By region of a peer, the address of each of its pieces as the wire here knows it."""


@dataclass(slots=True, eq=False)
class Peer(Generic[_Posted]):
    """A connected peer, the writes to it that have not been posted whole, and how much of it the wire has."""

    endpoint: Endpoint
    bases: Bases
    lent: Stretches | None
    queue: deque[Transfer[_Posted]] = field(default_factory=deque)
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class Transfer(Generic[_Posted]):
    """One ticket, of a write or a read: rows before ``position`` were posted, those of ``under_way`` have not ended.

    A read is ``reading`` from the beginning, and has no rows here.
    """

    peer: Peer[_Posted]
    region: str
    rows: IdArray = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    reading: _Posted | None = None
    position: int = 0
    under_way: list[tuple[_Posted, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
