"""The one way this package compiles: a typed numba decorator.

Kernels keep their Python signature for the type checker, cache their machine code beside the source, and release
the GIL, so that callers can run them on threads of their own. ``parallel=True`` is not used: a child forked after
an OpenMP region dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function over arrays and numbers at its first call; the original stays at ``.py_func``."""
    return cast("Callable[_P, _R]", numba.njit(cache=True, nogil=True)(function))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a small function that is put into every kernel that calls it; in large kernels that takes long."""
    return cast("Callable[_P, _R]", numba.njit(cache=True, nogil=True, forceinline=True)(function))
