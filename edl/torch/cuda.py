"""``DeviceRuntime`` for CUDA, and a wait for a device: calls only, no decisions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from edl.torch.device_copies import as_bytes

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices of this process."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""
_HIGH = -1
"""Priority of the stream for copies. torch has a pool of streams for each priority; other users, such as NCCL's process
groups, take theirs from the other one, so that no copy queues behind a message that has not come."""


def wait_for(device: torch.device) -> None:
    """Block until a CUDA device has done what its current stream was given. Calls for other devices return when they
    are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """The driver's ``cuThreadExchangeStreamCaptureMode``; None if it cannot be found."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return None


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Within the context this thread may page-lock memory while another one captures a CUDA graph. By default such a
    call would fail, and make the capture fail as well."""
    exchange, mode = _exchange_capture_mode(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)):  # which stores the mode so far
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class CudaRuntime:
    """``DeviceRuntime`` on a real device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        """One for each device: torch's allocator keeps the memory that is freed in a stream for that stream."""

    def lock(self, device: torch.device, address: int, size: int) -> str:
        """``cudaHostRegister``; returns CUDA's error. Without the device a thread would create a context on the first
        one."""
        try:
            with beside_captures(), torch.cuda.device(device):
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                error = runtime.cudaHostRegister(address, size, _PORTABLE)
                return "" if error == runtime.cudaError.success else str(runtime.cudaGetErrorString(error))
        except (AssertionError, AttributeError, RuntimeError) as failure:  # a build of torch without these calls
            return f"{type(failure).__name__}: {failure}"

    def unlock(self, device: torch.device, address: int) -> None:
        """``cudaHostUnregister``. An error, as of a broken device, changes nothing: the memory is unmapped next."""
        with contextlib.suppress(RuntimeError), beside_captures(), torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)

    def stage(self, size: int) -> torch.Tensor:
        """New page-locked memory of ``size`` bytes, from torch's pool."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    @contextlib.contextmanager
    def stream(self, device: torch.device) -> Iterator[CudaStream]:
        """The device's stream for copies, which continue after all work of the current one."""
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device, priority=_HIGH)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(stream):
            yield CudaStream(stream)


class CudaStream:
    """``DeviceStream``: torch's functions use the stream of the surrounding context."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def dense(self, source: torch.Tensor) -> torch.Tensor:
        """Conjugation and negation, which torch leaves undone until they are needed, are done here."""
        return as_bytes(source.detach().resolve_conj().resolve_neg().contiguous())

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pieces of one type are made dense and concatenated in C++: Python takes 5 µs for each."""
        if len({piece.dtype for piece in pieces}) == 1 and not any(one.is_conj() or one.is_neg() for one in pieces):
            flatten: Any = torch._C._nn.flatten_dense_tensors
            return as_bytes(flatten(list(pieces)))
        return torch.cat([self.dense(piece) for piece in pieces])

    def upload(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``cudaMemcpyAsync`` to the device."""
        return source.to(device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``cudaMemcpyAsync`` in either direction."""
        target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        """An event after all copies so far (``cudaEventRecord``)."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
