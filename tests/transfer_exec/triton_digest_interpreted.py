"""Digests of the GPU kernel under Triton's interpreter, against the CPU's; a script of its own, since Triton decides
when it is imported whether it interprets. Prints ``ok`` and the number of digests compared.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from adapters.verification import Proof
from layout_algebra.fingerprint import plan_fingerprints
from layout_algebra.runs import RunTable
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec
from transfer_exec.kernels.triton_digest import DeviceDigest

STORES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def compare(dtype: str, ids: dict[str, np.ndarray], skip: int) -> int:
    """Sums of three sets of ids, of memory that begins ``skip`` elements behind a multiple of 64 bytes."""
    space = CheckpointSpace([TensorSpec("a", (9000,), dtype), TensorSpec("b", (7000,), dtype)])
    source_map = SourceMap.from_ids(space, ids, dict.fromkeys(ids, dtype))
    sets = [RunTable.from_intervals([each]) for each in ((1, 4000), (4000, 9001), (9001, 16001))]
    plan = plan_fingerprints(source_map, sets)
    rng = np.random.default_rng(skip)
    width = STORES[dtype].itemsize
    arrays, tensors = {}, {}
    for name, given in ids.items():
        raw = torch.from_numpy(rng.integers(0, 256, (given.size + skip) * width, dtype=np.uint8))
        tensors[name] = raw.view(STORES[dtype])[skip:].view(given.shape)
        arrays[name] = raw.numpy().view(f"u{width}")[skip:].reshape(given.shape)
    got, want = DeviceDigest(plan, tensors).sums(), plan.sums(arrays)
    assert np.array_equal(got, want), (dtype, list(ids), got, want)
    return len(sets)


def some_here_some_there() -> int:
    """A proof of which one parameter is digested by the kernel and one by the processor."""
    space = CheckpointSpace([TensorSpec("a", (9000,), "BF16")])
    ids = {"p": np.arange(1, 5001), "q": np.arange(5001, 9001)}
    source_map = SourceMap.from_ids(space, ids)
    plan = plan_fingerprints(source_map, [RunTable.from_intervals([each]) for each in ((1, 6000), (6000, 9001))])
    memory = {name: np.arange(each.size, dtype=np.uint16) * 7 for name, each in ids.items()}
    host, there = (replace(plan, parts=tuple(part for part in plan.parts if part.parameter == name)) for name in ids)
    kernel = DeviceDigest(there, {"q": torch.from_numpy(memory["q"].view(np.int16)).view(torch.bfloat16)})
    proof = Proof((3, 8), host, replace(plan, parts=()), ((host, False),), (kernel,))
    assert proof.digests({"p": memory["p"]}) == dict(zip((3, 8), plan.sums(memory).tolist(), strict=True))
    return 2


def main() -> None:
    layouts = {
        "run": np.arange(1, 16001),
        "odd": np.arange(3, 9000),
        "short": np.array([5, 6, 7]),
        "lone": np.array([4097]),
        "backwards": np.arange(9000, 100, -1),
        "columns": np.arange(1, 8001).reshape(80, 100)[:, 13:50],
        "transposed": np.arange(4000, 4600).reshape(20, 30).T,
        "padded": np.pad(np.arange(1, 7), (0, 3)),
    }
    compared = some_here_some_there()
    for dtype in STORES:
        for skip in range(3):
            for name, ids in layouts.items():
                if ids.size < 700 or skip == 1:
                    compared += compare(dtype, {name: ids}, skip)
        compared += compare(dtype, {"x": layouts["short"], "y": layouts["transposed"], "z": np.arange(9001, 12000)}, 0)
    print("ok", compared)


if __name__ == "__main__":
    main()
