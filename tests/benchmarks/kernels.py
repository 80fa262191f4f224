"""Packing and assembling pieces in random order, against a memcpy of as many bytes; both on all cores.

    pack 4KiB        pieces of 4 KiB from random places of a tensor to one place after another of a buffer
    assemble 4KiB    the way back
    pack transpose 2B     matrices of 2-byte elements, transposed on the way; in random order
    pack 4KiB F32 to BF16    converted on the way; its memcpy moves as many bytes as are read and written here

Memory is faulted in before, and kernel and memcpy run in turns over the same arrays. A ratio of 2 is half of memcpy's
speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from adapters.cli.benchmark import Row, interleaved_medians
from layout_algebra.dtypes import IdArray
from transfer_exec.conversions import SOURCE_BYTES, TARGET_BYTES, code_of
from transfer_exec.kernels.base import Job
from transfer_exec.kernels.cpu import CpuKernels

TOTAL_BYTES = 1 << 28
MATRIX_SIDE = 1024
PIECES = {"64KiB": (1 << 16, 1.0), "4KiB": (1 << 12, 0.6), "256B": (256, 0.6), "64B": (64, 0.5)}
"""Bytes of a piece, and the least good speed in memcpys."""
TRANSPOSE_BAR = 0.4
CASTS = (("pack", "F32", "BF16"), ("assemble", "F32", "F16"), ("assemble", "BF16", "F32"))


def rows() -> list[Row]:
    """The benchmark's rows."""
    source, target = aligned(TOTAL_BYTES), aligned(TOTAL_BYTES)
    source[:] = np.random.default_rng(1).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
    target[:] = 1
    cores = len(os.sched_getaffinity(0))
    kernels = CpuKernels(threads=cores)
    out = []
    with ThreadPoolExecutor(cores) as pool:

        def measure(case: str, job: Job, size: int, bar: float) -> None:
            value, floor = interleaved_medians(job.run, memcpy(pool, cores, source, target, size), repeats=7)
            out.append(Row.against_floor(case, value=value, unit="s", floor=floor, bar=1 / bar))

        for way in ("pack", "assemble"):
            for name, (size, bar) in PIECES.items():
                job = kernels.prepare(pieces(way, source, target, size, code=0), packing=way == "pack")
                measure(f"{way} {name}", job, TOTAL_BYTES, bar)
            for item in (1, 2, 4, 8):
                job = kernels.prepare(transposes(way, source, target, item), packing=way == "pack")
                measure(f"{way} transpose {item}B", job, TOTAL_BYTES, TRANSPOSE_BAR)
        for way, wide, narrow in CASTS:
            size, bar = PIECES["4KiB"]
            code = code_of(wide, narrow)
            table = pieces(way, source, target, size, code)
            moved = int((table[:, 6] * (SOURCE_BYTES[code] + TARGET_BYTES[code])).sum()) // 2
            measure(f"{way} 4KiB {wide} to {narrow}", kernels.prepare(table, packing=way == "pack"), moved, bar)
    return out


def aligned(size: int) -> np.ndarray:
    """Bytes that begin at a cache line, as torch's and the transports' do."""
    raw = np.empty(size + 64, dtype=np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size]


def pieces(way: str, source: np.ndarray, target: np.ndarray, size: int, code: int) -> IdArray:
    """Rows of one piece each: random places of the tensor, consecutive ones of the buffer.

    ``size`` is the bytes of a piece on its wider side.
    """
    from_bytes, to_bytes = int(SOURCE_BYTES[code]), int(TARGET_BYTES[code])
    length = size // max(from_bytes, to_bytes)
    count = TOTAL_BYTES // size
    order = np.random.default_rng(2).permutation(count)
    line = np.arange(count)
    table = np.zeros((count, 9), dtype=np.int64)
    table[:, 0] = source.ctypes.data + (order if way == "pack" else line) * length * from_bytes
    table[:, 1] = from_bytes
    table[:, 3] = target.ctypes.data + (line if way == "pack" else order) * length * to_bytes
    table[:, 4] = to_bytes
    table[:, 6:] = length, 1, code
    return table


def transposes(way: str, source: np.ndarray, target: np.ndarray, item: int) -> IdArray:
    """Rows of a matrix each."""
    pitch = MATRIX_SIDE * item
    table = pieces(way, source, target, pitch * MATRIX_SIDE, code=0)
    table[:, 1:3] = item, pitch
    table[:, 4:6] = pitch, item
    table[:, 6:] = MATRIX_SIDE, MATRIX_SIDE, item.bit_length() - 1
    return table


def memcpy(
    pool: ThreadPoolExecutor, cores: int, source: np.ndarray, target: np.ndarray, size: int
) -> Callable[[], None]:
    """A copy of the first bytes of an array, each core its share."""
    edges = [size * core // cores for core in range(cores + 1)]

    def copy(core: int) -> None:
        np.copyto(target[edges[core] : edges[core + 1]], source[edges[core] : edges[core + 1]])

    def run() -> None:
        list(pool.map(copy, range(cores)))

    return run
