"""GPU kernels compiled ahead of time, without a GPU: the code, and what it takes of a multiprocessor."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel


def compile_ahead(
    kernel: object, signature: Mapping[str, str], constants: Mapping[str, int], *, warps: int, capability: int
) -> CompiledKernel:
    """A kernel's code for a GPU of some capability, 90 or 100."""
    return triton.compile(
        ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants)),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )


def usage(made: CompiledKernel, folder: Path, record_property: pytest.RecordProperty) -> tuple[int, int]:
    """Registers a thread and bytes spilled, both of which the test's report keeps."""
    code = folder / "kernel.cubin"
    code.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", code], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    record_property("registers", registers)
    record_property("spilled_bytes", stack + local)
    return registers, stack + local
