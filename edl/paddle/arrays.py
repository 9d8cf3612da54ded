"""Converts Paddle's tensors to bytes and back."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle

from edl.errors import StateError
from edl.paddle.digest import digest, finite
from edl.wire.snapshot import ELEMENT_BYTES
from edl.worker.framework import ArrayInfo

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_KINDS = {name: kind for kind, name in _NAMES.items()}
_AS_NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
"""The numpy types that hold the bits of types unknown to numpy."""
_SLICE_BYTES = 4 << 20
_THREADS = 4
_SHORT_BYTES = 16 << 10
"""A shorter copy takes less time than starting it on another thread."""

# Unlike ctypes.memmove this keeps the GIL: other threads might be slow to return it.
_move_locked: Any = ctypes.PyDLL(None).memmove
_move_locked.argtypes, _move_locked.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p

_pool: tuple[int, ThreadPoolExecutor] | None = None


@functools.cache
def _only_cpu() -> bool:
    """Whether this Paddle supports no other device. Querying a tensor's place takes longer than a short copy."""
    others: list[Any] = [paddle.is_compiled_with_cuda(), paddle.is_compiled_with_xpu()]
    others.extend(paddle.device.get_all_custom_device_type() or ())
    return not any(others)


def _is_on_cpu(tensor: Any) -> bool:
    return _only_cpu() or bool(tensor.place.is_cpu_place())


def kind(tensor: Any) -> str:
    """The type's name, such as ``float32`` or ``bfloat16``."""
    return str(tensor.dtype).rpartition(".")[2]


def check_fit(place: Any, value: Any, where: str) -> None:
    """Raise ``ValueError`` if a saved value cannot be copied into this tensor: Paddle's assertion would not name it."""
    if list(place.shape) != list(value.shape):
        raise ValueError(f"{where}: saved as {list(value.shape)}, now {list(place.shape)}")
    if kind(place) != kind(value):
        raise ValueError(
            f"{where}: saved as {kind(value)}, now {kind(place)}: build it as {kind(value)}, or convert what "
            "edl.paddle.load_checkpoint returns"
        )


def memory(tensor: Any) -> Any:
    """A numpy array over a tensor's own memory; None for a tensor that is not on the CPU or not contiguous.

    It uses the address, because DLPack refuses parameters, and bfloat16, which numpy does not have. It must not outlive
    the tensor.
    """
    if not _is_on_cpu(tensor) or not tensor.is_contiguous():
        return None
    shape = tuple(tensor.shape)
    name = kind(tensor)
    dtype = np.dtype(_AS_NUMPY.get(name, name))
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), dtype).reshape(shape)


def fill(tensor: Any, values: Any) -> None:
    """Copy values of the same shape into a tensor; bfloat16 is passed as uint16."""
    target = memory(tensor)
    if target is not None:
        np.copyto(target, values)
        return
    with paddle.no_grad():
        source = from_memory(np.ascontiguousarray(values), kind(tensor))
        paddle.assign(source if tensor.place.is_cpu_place() else source.to(tensor.place), output=tensor)


def from_memory(array: Any, name: Any) -> Any:
    """A tensor of this type over a numpy array's memory, which it keeps alive."""
    if not array.size:
        return paddle.empty(list(array.shape), dtype=name)
    if name == "bfloat16":
        array = array.view(np.int16)  # Paddle cannot reinterpret unsigned types
    try:
        tensor = paddle.from_dlpack(array)
    except BufferError:  # numpy before 2.1 does not export read-only arrays
        tensor = paddle.Tensor(array, zero_copy=True)
    return tensor if kind(tensor) == name else tensor.view(name)


@functools.lru_cache(maxsize=1 << 16)
def _info(dtype: Any, shape: tuple[int, ...]) -> ArrayInfo:
    """Type, shape and size for a type of Paddle or numpy. Raises ``StateError`` for an unsupported type."""
    name = str(dtype).rpartition(".")[2]
    if name not in _NAMES:
        raise StateError(f"an array of {name} cannot be kept")
    return ArrayInfo(_NAMES[name], shape, math.prod(shape) * ELEMENT_BYTES[_NAMES[name]])


class PaddleArrays:
    """The array port of ``edl.worker`` (``Arrays``) for Paddle."""

    def is_array(self, value: object) -> bool:
        """Whether the value is a tensor or a numpy array."""
        return isinstance(value, paddle.Tensor | np.ndarray)

    def info(self, value: Any) -> ArrayInfo:
        """Type, shape and size. Raises ``StateError`` for unsupported types, and for sparse and distributed tensors."""
        dtype, shape = value.dtype, tuple(value.shape)
        if isinstance(value, paddle.Tensor):
            if value.is_selected_rows() or value.is_sparse():
                raise StateError(
                    f"a sparse tensor of {kind(value)} {list(shape)} cannot be kept: convert it to a dense one"
                )
            if value.is_dist():
                raise StateError(f"a distributed tensor of {kind(value)} {list(shape)} cannot be kept")
            if not value._is_initialized() and 0 not in shape:
                raise StateError(f"a tensor of {kind(value)} {list(shape)} without memory cannot be kept")
        return _info(dtype, shape)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Copy each array into its buffer, in slices on several threads."""
        made = []  # keeps converted arrays alive until all is copied
        copies: list[tuple[int, int, int]] = []
        addressof, from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
        for value, buffer in zip(values, buffers, strict=True):
            size = buffer.nbytes
            if not size:
                continue
            target = addressof(from_buffer(buffer))
            if isinstance(value, paddle.Tensor) and _is_on_cpu(value) and value.is_contiguous():
                source = value.data_ptr()  # size as from info(); querying it again takes longer than the copy
            else:
                made.append(_dense(value))
                if made[-1].nbytes != size:
                    raise ValueError(f"an array of {made[-1].nbytes} bytes and a buffer of {size}")
                source = made[-1].ctypes.data
            if size < _SHORT_BYTES:
                _move_locked(target, source, size)
            else:
                copies += _slices(target, source, size)
        threads = min(_THREADS, len(os.sched_getaffinity(0)))
        if len(copies) < 2 or threads == 1:
            _copy(copies)
        else:
            shares = [copies[first::threads] for first in range(threads)]
            list(_threads(threads).map(_copy, shares))
        del made

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        """A tensor over these bytes."""
        name: Any = _KINDS[info.dtype]
        if not info.size:
            return paddle.empty(list(info.shape), dtype=name)
        array = np.frombuffer(data, _AS_NUMPY.get(name, name)).reshape(info.shape)
        return from_memory(array, name)

    def copy(self, value: Any) -> Any:
        """A separate copy of the array."""
        return value.copy() if isinstance(value, np.ndarray) else value.detach().clone()

    def digest(self, values: Sequence[Any]) -> int:
        """A 64-bit hash of all bytes; see ``edl.paddle.digest``."""
        return digest([_dense(value) for value in values])

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """For each array whether it contains neither NaN nor infinity."""
        return finite(values)


def _dense(value: Any) -> Any:
    """The values as a dense array in the host's memory."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    found = memory(value)
    if found is None:
        return np.ascontiguousarray(value.detach().contiguous().numpy())
    return found


def _slices(target: int, source: int, size: int) -> list[tuple[int, int, int]]:
    return [(target + at, source + at, min(_SLICE_BYTES, size - at)) for at in range(0, size, _SLICE_BYTES)]


def _copy(copies: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size in copies:
        ctypes.memmove(target, source, size)  # releases the GIL


def _threads(count: int) -> ThreadPoolExecutor:
    """Created on first use, and again in a forked child, which does not inherit the threads."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = (os.getpid(), ThreadPoolExecutor(count, thread_name_prefix="edl-copy"))
    return _pool[1]
