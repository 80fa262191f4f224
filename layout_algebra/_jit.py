"""The one way this package compiles: a typed numba decorator.

Kernels keep their Python signature for the type checker, cache their machine code beside the source, and release
the GIL, so that callers can run them on threads of their own. ``parallel=True`` is not used: a child forked after
an OpenMP region dies.

Numba takes machine code from its cache while the kernel's own file is unchanged, although code of kernels in other
files has been compiled into it. Here a kernel's stamp covers the files of all kernels and functions that its module
imports; functions, because numba lets them stand for instructions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import numba
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

_P = ParamSpec("_P")
_R = TypeVar("_R")


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function over arrays and numbers at its first call; the original stays at ``.py_func``."""
    return cast("Callable[_P, _R]", _stamped(numba.njit(cache=True, nogil=True)(function)))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a small function that is put into every kernel that calls it; in large kernels that takes long."""
    return cast("Callable[_P, _R]", _stamped(numba.njit(cache=True, nogil=True, forceinline=True)(function)))


def _stamped(compiled: object) -> object:
    """Make the cached machine code of a kernel depend on every file that kernels in reach come from."""
    if not isinstance(compiled, Dispatcher):
        return compiled  # numba is switched off
    function = compiled.py_func
    others = [value for value in function.__globals__.values() if isinstance(value, Dispatcher)]
    imported = [_index_of(other) for other in others if other.py_func.__module__ != function.__module__]
    plain = {value.__code__.co_filename for value in function.__globals__.values() if isinstance(value, FunctionType)}
    if imported or plain:
        index = _index_of(compiled)
        stamps = "".join(sorted([repr(other._source_stamp) for other in imported] + [_stamp(path) for path in plain]))
        index._source_stamp = (index._source_stamp, hashlib.sha256(stamps.encode()).hexdigest())
    return compiled


def _stamp(path: str) -> str:
    """What changes with a file; functions that were made elsewhere than in one never change."""
    found = Path(path)
    return f"{path} {found.stat().st_mtime_ns} {found.stat().st_size}" if found.is_file() else path


def _index_of(compiled: Dispatcher[Callable[..., object]]) -> IndexDataCacheFile:
    """Numba has no public name for it; the attribute has been there since its cache has."""
    index: IndexDataCacheFile = compiled._cache._cache_file  # type: ignore[attr-defined]
    return index
