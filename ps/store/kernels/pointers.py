"""C-like access to memory by address in compiled functions: no bounds checks, negative indices or array headers."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as typed_intrinsic

from ps.store.kernels import ready

_folder = ready.folder()
if _folder is not None:
    _config: Any = numba.config
    _config.CACHE_DIR = str(_folder)
intrinsic: Any = typed_intrinsic  # called without the typing context, which its annotations do not cover
F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str = "", **options: Any) -> Callable[[F], F]:
    """``numba.njit`` with the settings of all kernels: no GIL, C division, cached on disk if possible.

    With a signature, the function is compiled or loaded from the cache at once.
    """

    def compile_it(function: F) -> F:
        settings = {"nogil": True, "error_model": "numpy", **options}
        arguments = (signature,) if signature else ()
        njit: Any = numba.njit
        try:
            made: F = njit(*arguments, cache=True, **settings)(function)
        except RuntimeError:  # no writable cache directory: compiled in each process
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
shorts = _pointer(types.uint16)
octets = _pointer(types.uint8)


def _prefetching(write: int) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            flags = [ir.Constant(number, write), ir.Constant(number, 3), ir.Constant(number, 1)]
            builder.call(function, [builder.inttoptr(arguments[0], pointer), *flags])
            return context.get_dummy_value()

        return types.void(types.int64), make

    return prefetch


soon_read = _prefetching(0)
soon_written = _prefetching(1)
LINE = 64
"""Size of a cache line in bytes."""


@compiled(forceinline=True)
def soon_all_read(address, size):
    """Prefetch all cache lines of a range for reading."""
    for line in range(address & -LINE, address + size, LINE):
        soon_read(line)


@compiled(forceinline=True)
def soon_all_written(address, size):
    """Prefetch all cache lines of a range for writing."""
    for line in range(address & -LINE, address + size, LINE):
        soon_written(line)


BLOCK = 16
"""Numbers processed as one vector. Explicit, because the compiler does not vectorise loops over possibly overlapping
memory."""
_VECTOR = ir.VectorType(ir.FloatType(), BLOCK)


def _load(builder: Any, address: Any) -> Any:
    found = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    found.align = 4
    return found


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer())).align = 4


def _spread(builder: Any, number: Any) -> Any:
    undefined, zero = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    one = builder.insert_element(undefined, number, zero)
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK))


@intrinsic
def copy_block(typing_context: Any, source: Any, target: Any) -> Any:
    """``target = source`` for one block."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, _load(builder, arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), make


@intrinsic
def add_block(typing_context: Any, source: Any, target: Any) -> Any:
    """``target += source`` for one block."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total = builder.fadd(_load(builder, arguments[1]), _load(builder, arguments[0]))
        _store(builder, total, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), make


@intrinsic
def adagrad_block(typing_context: Any, weights: Any, totals: Any, grads: Any, lr: Any, eps: Any) -> Any:
    """``totals += grads ** 2; weights -= lr * grads / (sqrt(totals) + eps)`` for one block."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, total, grad = (_load(builder, address) for address in arguments[:3])
        lr, eps = (_spread(builder, number) for number in arguments[3:])
        total = builder.fadd(total, builder.fmul(grad, grad))
        _store(builder, total, arguments[1])
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        root = builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{BLOCK}f32"), [total])
        moved = builder.fdiv(builder.fmul(lr, grad), builder.fadd(root, eps))
        _store(builder, builder.fsub(weight, moved), arguments[0])
        return context.get_dummy_value()

    numbers = (types.int64,) * 3 + (types.float32,) * 2
    return types.void(*numbers), make


@compiled(forceinline=True)
def copy(source, target, dim):
    """``target = source`` for ``dim`` floats."""
    end = 4 * (dim & -BLOCK)
    for begin in range(0, end, 4 * BLOCK):
        copy_block(source + begin, target + begin)
    given, taken = floats(source + end), floats(target + end)
    for j in range(dim & (BLOCK - 1)):
        taken[j] = given[j]


@compiled(forceinline=True)
def add(source, target, dim):
    """``target += source`` for ``dim`` floats."""
    end = 4 * (dim & -BLOCK)
    for begin in range(0, end, 4 * BLOCK):
        add_block(source + begin, target + begin)
    given, total = floats(source + end), floats(target + end)
    for j in range(dim & (BLOCK - 1)):
        total[j] += given[j]
