# numba types these functions, not mypy:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, call-arg"
"""A hint to the processor that a cache line will be read soon: nothing interpreted, one instruction compiled.

Processors fetch ahead by themselves, but not past the end of a page: a kernel that streams through memory touches the
page after the next one, one line of it, while it still reads this one.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

PAGE_BYTES = 4096
"""How much of memory one hint is good for; pages may be larger, then most hints do nothing."""

AHEAD_BYTES = 2 * PAGE_BYTES


def prefetch(address: int) -> None:
    """The cache line of an address, which may be any number, will be read soon."""


def prefetch_line(builder, address):
    """Put the hint into a function that is being built."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = builder.inttoptr(address, cgutils.voidptr_t)
    builder.call(function, [place, number(0), number(3), number(1)])


@intrinsic
def _prefetch(typing_context, address):
    def build(context, builder, signature, arguments):
        prefetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


@overload(prefetch)
def _compiled_prefetch(address):
    return lambda address: _prefetch(address)
