"""One rank of a small job, started from a command line: ranks 0 and 1 train, rank 2 is engine a.

::

    python -m tests.adapters.launched_rank RANK addresses KEY sender=tcp://... engine/a=tcp://...
    python -m tests.adapters.launched_rank RANK store KEY HOST PORT
    torchrun --module tests.adapters.launched_rank torchrun KEY_FILE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from torch.distributed import TCPStore

from adapters.job_key import job_key
from adapters.receiver import ReceiverAdapter
from adapters.rendezvous import Addresses, Rendezvous
from adapters.sender import SenderAdapter
from adapters.torch_store import TorchStore
from tests.adapters.toy import SPACE, rollout, same_bits, trainer

TRAINERS = 2
VERSIONS = (1, 2)
DEADLINE_S = 120.0


def meeting_place(arguments: Sequence[str]) -> tuple[int, Rendezvous]:
    """This process' rank, and where it meets the others."""
    match list(arguments):
        case [rank, "addresses", key, *known]:
            return int(rank), Addresses(dict(each.split("=", 1) for each in known), key=key)
        case [rank, "store", key, host, port]:
            return int(rank), TorchStore(TCPStore(host, int(port), is_master=False), key=key)
        case ["torchrun", key_file]:
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            return int(os.environ["RANK"]), TorchStore(store, key=job_key(key_file), job="toy", host="127.0.0.1")
        case other:
            raise SystemExit(f"cannot be launched with {other}")


def train(rank: int, rendezvous: Rendezvous) -> None:
    held = trainer(rank, TRAINERS)
    sender = SenderAdapter(
        held.load_weights,
        held.parameters,
        SPACE,
        rank=rank,
        world_size=TRAINERS,
        rendezvous=rendezvous,
        deadline_s=DEADLINE_S,
    )
    sender.connect(["a"])
    for version in VERSIONS:
        held.fill(version)
        sender.send_weights(version).result()
    sender.close()
    print(f"trainer/{rank}: versions {', '.join(map(str, VERSIONS))}", flush=True)


def serve(rendezvous: Rendezvous) -> None:
    needed = rollout(0, 1)
    receiver = ReceiverAdapter(
        needed.load_weights,
        needed.parameters,
        SPACE,
        engine="a",
        rank=0,
        world_size=1,
        rendezvous=rendezvous,
        deadline_s=DEADLINE_S,
    )
    got: list[int] = []
    while len(got) < len(VERSIONS):
        update = receiver.poll_requests()
        if update is not None:
            assert same_bits(needed.tensors, needed.expected(update.version))
            got.append(update.version)
        time.sleep(0.001)
    receiver.close()
    print(f"engine/a/0: versions {', '.join(map(str, got))}", flush=True)


if __name__ == "__main__":
    rank, rendezvous = meeting_place(sys.argv[1:])
    if rank < TRAINERS:
        train(rank, rendezvous)
    else:
        serve(rendezvous)
