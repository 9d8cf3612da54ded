"""Converts tensors to the bytes of a snapshot and back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from edl.errors import StateError
from edl.torch.cuda import CudaRuntime
from edl.torch.device_copies import DeviceCopies, Move
from edl.torch.digest import digest, finite
from edl.worker import tree
from edl.worker.framework import ArrayInfo

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Names of types in safetensors and torch. Older versions of torch lack some."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in _NAMES.items() if hasattr(torch, own)}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}

_ORDINARY = (torch.Tensor, torch.nn.Parameter)

PART_BYTES = 8 << 20
"""Larger arrays are copied in parts by several threads."""
ALONE_BYTES = 4 << 20
"""If all arrays together are smaller than this, the calling thread copies them alone."""
MOST_THREADS = 8
"""More threads do not increase memory bandwidth."""
SHORT_BYTES = 16 << 10
"""A shorter copy takes less time than starting it on another thread."""

# Unlike ctypes.memmove this keeps the GIL: other threads might be slow to return it.
_move_locked: Any = ctypes.PyDLL(None).memmove
_move_locked.argtypes, _move_locked.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p

Part = Move | tuple[torch.Tensor, torch.Tensor]
"""One copy: of bytes, or of a tensor into another one of the same shape and type."""

tree.know("torch.Size", torch.Size, list, torch.Size)
tree.know("torch.dtype", torch.dtype, lambda kind: str(kind).removeprefix("torch."), lambda name: _dtype(name))


class TorchArrays:
    """The array port of ``edl.worker`` (``Arrays``) for torch."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._forked_from = 0
        self._lock = threading.Lock()
        self.device_copies = DeviceCopies(CudaRuntime(), self._copy_on_cpu)

    def is_array(self, value: object) -> bool:
        """Whether the value is a tensor or a numpy array."""
        return isinstance(value, torch.Tensor) or _is_numpy(value)

    def info(self, value: Any) -> ArrayInfo:
        """Type, shape and size. Raises ``StateError`` for values without dense bytes, and for types that safetensors
        lacks."""
        tensor = _tensor(value)
        return _info(tensor.dtype, tensor.shape)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Copy each array into its buffer on several threads; from CUDA on a separate stream."""
        here: list[Part] = []
        there: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        made = []  # keeps converted tensors alive until all is copied
        addressof, from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
        for value, buffer in zip(values, buffers, strict=True):
            tensor = value if type(value) in _ORDINARY else _converted(value)
            size = buffer.nbytes
            if tensor.nbytes != size:
                raise ValueError(f"a tensor of {tensor.nbytes} bytes and a buffer of {size}")
            if not size:
                continue
            if not tensor.is_cpu:
                if tensor.is_cuda:
                    there.setdefault(tensor.device, []).append((addressof(from_buffer(buffer)), tensor))
                    continue
                tensor = tensor.cpu()
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                here.append((tensor, _shaped(_bytes_over(buffer), tensor.dtype, tensor.shape)))
            elif size < SHORT_BYTES:
                _move_locked(addressof(from_buffer(buffer)), tensor.data_ptr(), size)
            else:
                here.append((addressof(from_buffer(buffer)), tensor.data_ptr(), size))
            if tensor is not value:
                made.append(tensor)
        self._copy_on_cpu(here)
        for device, pairs in there.items():
            self.device_copies.copy_out(device, pairs)
        del made

    def view(self, info: ArrayInfo, data: memoryview) -> torch.Tensor:
        """A CPU tensor over these bytes. Raises ``StateError`` for a type that this torch does not have."""
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise StateError(f"the snapshot holds {info.dtype} values, which torch {torch.__version__} does not have")
        if not info.size:
            return torch.empty(info.shape, dtype=dtype, device="cpu")
        return _shaped(_bytes_over(data), dtype, info.shape)

    def copy(self, value: Any) -> Any:
        """A separate copy of the same kind on the same device."""
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return value.copy()

    def digest(self, values: Sequence[Any]) -> int:
        """A 64-bit hash of all bytes; see ``edl.torch.digest``."""
        return digest(values)

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """For each array whether it contains neither NaN nor infinity."""
        return finite(values)

    # --- copying -------------------------------------------------------------------------------------------------

    def _copy_on_cpu(self, whole: Sequence[Part]) -> None:
        workers = _processors()
        if workers == 1 or sum(map(_size, whole)) < ALONE_BYTES:
            _copy_all(whole)
            return
        # Each thread takes the next batch when it has finished one; the calling thread works too.
        left = iter([part for one in whole for part in _parts(one)])
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    batch = _batch(left)
                if not batch:
                    return
                _copy_all(batch)

        others = [self._pool(workers - 1).submit(work) for _ in range(workers - 1)]
        work()
        for other in others:
            other.result()

    def _pool(self, workers: int) -> ThreadPoolExecutor:
        """Created on first use, since no thread may exist before the fork server forks."""
        with self._lock:
            if self._threads is None or self._forked_from != os.getpid():
                self._threads = ThreadPoolExecutor(workers, thread_name_prefix="edl-copy")
                self._forked_from = os.getpid()
            return self._threads


@functools.lru_cache(maxsize=1 << 16)
def _info(dtype: torch.dtype, shape: torch.Size) -> ArrayInfo:
    name = _NAME_OF.get(dtype)
    if name is None:
        raise StateError(f"a tensor of {dtype} cannot be kept: the safetensors format has no such type")
    return ArrayInfo(name, tuple(shape), shape.numel() * dtype.itemsize)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"the snapshot holds the type {name!r}, which torch {torch.__version__} does not have")
    return found


def _is_numpy(value: object) -> bool:
    """Checks by name, so that numpy is not imported for scripts that do not use it."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _tensor(value: Any) -> torch.Tensor:
    if type(value) not in _ORDINARY:
        return _converted(value)
    if value.layout is not torch.strided:
        raise StateError(f"a tensor of layout {value.layout} cannot be kept: make it dense")
    if value.is_meta:
        raise StateError("a tensor on the meta device has no data to keep")
    return value  # type: ignore[no-any-return]


def _converted(value: Any) -> torch.Tensor:
    """Convert a value other than a plain tensor. Raises ``StateError`` when that would lose information."""
    if not isinstance(value, torch.Tensor):
        try:
            with _of_read_only(not value.flags.writeable):
                return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise StateError(f"a numpy array of {value.dtype} cannot be kept: {error}") from error
    if hasattr(value, "_local_tensor") and hasattr(value, "placements"):
        raise StateError(
            "a sharded tensor (DTensor) cannot be kept as a value: keep it in an object with state_dict() of a "
            "State(build=…) or State(sharded=True)"
        )
    if torch.nn.parameter.is_lazy(value):
        raise StateError("a parameter that has not been initialized cannot be kept: call the lazy module once before")
    if isinstance(value, torch.nn.Parameter) and type(value).__torch_dispatch__ is _NO_DISPATCH:
        return _tensor(value.detach())
    kind = type(value)
    raise StateError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be kept: it would come back as a plain tensor; keep what "
        "it is made of"
    )


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


@contextlib.contextmanager
def _of_read_only(read_only: bool) -> Iterator[None]:
    """Suppress torch's warning about read-only memory, which is only read here."""
    if not read_only:
        yield
        return
    with warnings.catch_warnings():  # only when needed: it costs more than many copies
        warnings.simplefilter("ignore")
        yield


def _bytes_over(buffer: memoryview) -> torch.Tensor:
    with _of_read_only(buffer.readonly):
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _shaped(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return data.view(dtype).view(tuple(shape))


def _size(part: Part) -> int:
    return part[2] if len(part) == 3 else part[0].nbytes


def _copy_all(parts: Iterable[Part]) -> None:
    with torch.no_grad():
        for part in parts:
            if len(part) == 2:
                part[1].copy_(part[0])
            else:
                ctypes.memmove(*part)


def _parts(whole: Part) -> list[Part]:
    if _size(whole) <= PART_BYTES:
        return [whole]
    if len(whole) == 3:
        to, begin, size = whole
        return [(to + at, begin + at, min(PART_BYTES, size - at)) for at in range(0, size, PART_BYTES)]
    source, target = whole
    if source.dim() == 0 or source.shape[0] == 1:
        return [whole]
    rows = max(1, source.shape[0] * PART_BYTES // source.nbytes)
    return list(zip(torch.split(source, rows), torch.split(target, rows), strict=True))


def _batch(parts: Iterable[Part]) -> list[Part]:
    """The next parts, together at least as large as one full part: taking small ones one by one would cost more."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += _size(part)
        if size >= PART_BYTES:
            break
    return batch


def _processors() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)
