"""The demo's ninth process: it compiles the kernels while the other eight import torch and transformers."""

from __future__ import annotations

from adapters.cli.demo_messages import Close, Closed, Command, Ready, Reply, Start
from adapters.cli.warm_up import compile_kernels

__all__ = ["CompilerRole"]


class CompilerRole:
    """Answers `Start` when every kernel is in numba's cache."""

    def answer(self, command: Command) -> Reply:
        """Do one command."""
        match command:
            case Start():
                compile_kernels()
                return Ready()
            case Close():
                return Closed()
        raise ValueError(f"the compiler has no answer to {type(command).__name__}")
