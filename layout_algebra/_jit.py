"""``@kernel``: numba compilation with the settings that every loop here shares, and types that survive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile a function of arrays and numbers on first use; it releases the GIL and is cached on disk.

    The plain Python function stays reachable as ``.py_func``, so that tests run both.
    """
    return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
