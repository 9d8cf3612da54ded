"""How tensors become the bytes of a snapshot and return."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from edl.errors import StateError
from edl.worker.framework import ArrayInfo

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""safetensors' names of types, and torch's. Older versions of torch lack some."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in _NAMES.items() if hasattr(torch, own)}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}

PART_BYTES = 8 << 20
"""Larger arrays are copied in parts, so that several threads share them."""
ALONE_BYTES = 4 << 20
"""Less than this altogether is copied by the caller's thread alone."""
MOST_THREADS = 8
"""More do not make memory any faster."""
STAGE_BYTES = 32 << 20
"""Page-locked memory for copies from an accelerator; there are two."""


class TorchArrays:
    """``edl.worker.framework.Arrays`` for torch."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._forked_from = 0
        self._stages: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def is_array(self, value: object) -> bool:
        """Whether this is a tensor or a numpy array."""
        return isinstance(value, torch.Tensor) or _is_numpy(value)

    def info(self, value: Any) -> ArrayInfo:
        """Raises ``StateError`` for what has no dense bytes, or whose type safetensors has no name for."""
        tensor = _tensor(value)
        name = _NAME_OF.get(tensor.dtype)
        if name is None:
            raise StateError(f"a tensor of {tensor.dtype} cannot be kept: the safetensors format has no such type")
        return ArrayInfo(name, tuple(tensor.shape), tensor.numel() * tensor.element_size())

    def copy_out(self, values: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        """Copy each into its buffer: page-locked and over a stream of its own from CUDA, on several threads."""
        here: list[tuple[torch.Tensor, torch.Tensor]] = []
        there: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, buffer in zip(values, buffers, strict=True):
            tensor = _tensor(value)
            if not tensor.numel():
                continue
            if tensor.is_cuda:
                there.append((tensor, _bytes_over(buffer)))
            elif tensor.device.type == "cpu":
                here.append((tensor, _shaped(_bytes_over(buffer), tensor.dtype, tensor.shape)))
            else:
                here.append((tensor.cpu(), _shaped(_bytes_over(buffer), tensor.dtype, tensor.shape)))
        for_device = _by_device(there)
        for pairs in for_device:
            self._copy_from_cuda(pairs)
        self._copy_on_cpu(here)

    def view(self, info: ArrayInfo, data: memoryview) -> torch.Tensor:
        """A CPU tensor over these bytes. Raises ``StateError`` for a type this torch does not have."""
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise StateError(f"the snapshot holds {info.dtype} values, which torch {torch.__version__} does not have")
        if not info.size:
            return torch.empty(info.shape, dtype=dtype)
        return _shaped(_bytes_over(data), dtype, info.shape)

    def copy(self, value: Any) -> Any:
        """An array of its own, of the same kind, on the same device."""
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return value.copy()

    # --- copying -------------------------------------------------------------------------------------------------

    def _copy_on_cpu(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Source and target of equal shape and type."""
        total = sum(source.numel() * source.element_size() for source, _ in pairs)
        workers = _processors()
        if total < ALONE_BYTES or workers == 1:
            _copy_all(pairs)
            return
        parts = [part for pair in pairs for part in _parts(*pair)]
        # Each thread takes the next part when it is through with one; the caller's thread works too.
        left = iter(parts)
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
        """Made when first needed: nothing may have threads before the nursery forks."""
        with self._lock:
            if self._threads is None or self._forked_from != os.getpid():
                self._threads = ThreadPoolExecutor(workers, thread_name_prefix="edl-copy")
                self._forked_from = os.getpid()
            return self._threads

    def _copy_from_cuda(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill one page-locked stage from the device while the other one is emptied into the buffers."""
        device = pairs[0][0].device
        if not self._stages:
            self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        emptied: Callable[[], None] | None = None
        with torch.cuda.stream(stream):
            for number, filled in enumerate(_stagings(pairs)):
                stage = self._stages[number % 2]
                offset = 0
                for source, _ in filled:
                    stage[offset : offset + source.numel()].copy_(source, non_blocking=True)
                    offset += source.numel()
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
                if emptied is not None:
                    emptied()  # the stage before, while this one is being filled
                emptied = self._emptying(done, stage, [target for _, target in filled])
            if emptied is not None:
                emptied()

    def _emptying(self, done: Any, stage: torch.Tensor, targets: list[torch.Tensor]) -> Callable[[], None]:
        def empty() -> None:
            done.synchronize()
            offset, pairs = 0, []
            for target in targets:
                pairs.append((stage[offset : offset + target.numel()], target))
                offset += target.numel()
            self._copy_on_cpu(pairs)

        return empty


def _is_numpy(value: object) -> bool:
    """Without importing numpy for those who do not use it."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of arrays that may not be written to: it is only read here
                return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise StateError(f"a numpy array of {value.dtype} cannot be kept: {error}") from error
    if hasattr(value, "_local_tensor") and hasattr(value, "placements"):
        raise StateError("the state holds sharded tensors (DTensor): use State(sharded=True)")
    if value.layout != torch.strided or value.is_quantized:
        raise StateError(f"a tensor of layout {value.layout} or quantized type {value.dtype} cannot be kept")
    if value.is_meta:
        raise StateError("a tensor on the meta device has no data to keep")
    return value.detach()


def _bytes_over(buffer: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of buffers that may not be written to: the reader is told
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _shaped(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return data.view(dtype).view(tuple(shape))


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for source, target in pairs:
            target.copy_(source)


def _parts(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = source.numel() * source.element_size()
    if size <= PART_BYTES:
        return [(source, target)]
    if source.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    elif source.dim() == 0 or source.shape[0] == 1:
        return [(source, target)]
    rows = max(1, source.shape[0] * PART_BYTES // size)
    return list(zip(torch.split(source, rows), torch.split(target, rows), strict=True))


def _batch(parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The next parts, together about as long as a large one: small ones are not worth asking for singly."""
    batch, size = [], 0
    for source, target in parts:
        batch.append((source, target))
        size += source.numel() * source.element_size()
        if size >= PART_BYTES:
            break
    return batch


def _by_device(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    found: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for source, target in pairs:
        found.setdefault(source.device, []).append((source, target))
    return list(found.values())


def _stagings(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> Iterable[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Pieces of bytes, source on the device and target in the buffer, grouped so that each group fits a stage."""
    group: list[tuple[torch.Tensor, torch.Tensor]] = []
    room = STAGE_BYTES
    for source, target in pairs:
        flat = source.contiguous().view(-1).view(torch.uint8)
        start = 0
        while start < flat.numel():
            length = min(room, flat.numel() - start)
            group.append((flat[start : start + length], target[start : start + length]))
            start += length
            room -= length
            if not room:
                yield group
                group, room = [], STAGE_BYTES
    if group:
        yield group


def _processors() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)
