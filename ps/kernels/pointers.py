"""Memory by address inside compiled functions, as C would have it: no bounds, no wrapped indices, no array headers."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str = "", **options: Any) -> Callable[[F], F]:
    """``numba.njit`` as all kernels want it: without the GIL, division as in C, kept on disk where that is possible.

    With a signature it is compiled, or loaded from disk, at once.
    """

    def compile_it(function: F) -> F:
        settings = {"nogil": True, "error_model": "numpy", **options}
        arguments = (signature,) if signature else ()
        njit: Any = numba.njit
        try:
            made: F = njit(*arguments, cache=True, **settings)(function)
        except RuntimeError:  # no folder can be written to; compiled anew in each process
            made = njit(*arguments, **settings)(function)
        return made

    return compile_it


def _pointer(of: Any) -> Any:
    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(of)(types.int64), make

    return at


floats = _pointer(types.float32)
doubles = _pointer(types.float64)
longs = _pointer(types.int64)
words = _pointer(types.uint32)
integers = _pointer(types.int32)
octets = _pointer(types.uint8)


def _prefetching(write: int) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            told = [ir.Constant(number, write), ir.Constant(number, 3), ir.Constant(number, 1)]
            builder.call(function, [builder.inttoptr(arguments[0], pointer), *told])
            return context.get_dummy_value()

        return types.void(types.int64), make

    return prefetch


soon_read = _prefetching(0)
soon_written = _prefetching(1)

BLOCK = 16
"""Numbers that are worked on at a time."""


@compiled(forceinline=True)
def _copying(source, target, count):
    given, taken = floats(source), floats(target)
    for j in range(count):
        taken[j] = given[j]


@compiled(forceinline=True)
def copy(source, target, dim):
    """``target = source``, in blocks of a length that the compiler knows: it makes straight vector code of them."""
    for begin in range(0, 4 * (dim & -BLOCK), 4 * BLOCK):
        _copying(source + begin, target + begin, BLOCK)
    if dim & (BLOCK - 1):
        begin = 4 * (dim & -BLOCK)
        _copying(source + begin, target + begin, dim & (BLOCK - 1))


@compiled(forceinline=True)
def _adding(source, target, count):
    given, total = floats(source), floats(target)
    for j in range(count):
        total[j] += given[j]


@compiled(forceinline=True)
def add(source, target, dim):
    """``target += source``."""
    for begin in range(0, 4 * (dim & -BLOCK), 4 * BLOCK):
        _adding(source + begin, target + begin, BLOCK)
    if dim & (BLOCK - 1):
        begin = 4 * (dim & -BLOCK)
        _adding(source + begin, target + begin, dim & (BLOCK - 1))
