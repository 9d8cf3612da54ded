"""Models whose numbers permanently show any step that was computed wrongly."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from edl.wire.local import Seat
from edl.worker.framework import ArrayInfo, Arrays, Framework
from edl.worker.state import BaseState

_PRIME = 2_147_483_647


class FrameworkModel(Protocol):
    """A model with its optimizer in one framework. Everything is computed at once, on the host."""

    def gradient(self, step: int, rank: int) -> Any:
        """One rank's own, of this step."""
        ...

    def combine(self, gradients: Sequence[Any]) -> Any:
        """Combine the gradients of all ranks, averaged or summed, always in the same order."""
        ...

    def apply(self, gradient: Any) -> None:
        """The optimizer's step."""
        ...

    def content(self) -> bytes:
        """All that may not be wrong by a bit."""
        ...

    def state(self, framework: Framework, **values: Any) -> BaseState:
        """A state that keeps it, and these values."""
        ...


def step(trainee: FrameworkModel, number: int, world_size: int) -> None:
    """A whole step, as it should be."""
    trainee.apply(trainee.combine([trainee.gradient(number, rank) for rank in range(world_size)]))


class PlainTensor:
    """The tensor of the plain framework."""

    def __init__(self, values: Sequence[int]) -> None:
        self.data = array("q", values)


class PlainArrays:
    """``edl.worker.framework.Arrays``."""

    def is_array(self, value: object) -> bool:
        """Only its own."""
        return isinstance(value, PlainTensor)

    def info(self, value: Any) -> ArrayInfo:
        """64-bit integers in a row."""
        return ArrayInfo("I64", (len(value.data),), len(value.data) * value.data.itemsize)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """One after the other."""
        for value, buffer in zip(values, buffers, strict=True):
            buffer[:] = value.data.tobytes()

    def view(self, info: ArrayInfo, data: memoryview) -> PlainTensor:
        """A copy: simpler, and allowed."""
        found = PlainTensor(())
        found.data.frombytes(bytes(data))
        return found

    def copy(self, value: Any) -> PlainTensor:
        """Its own."""
        return PlainTensor(value.data)

    def digest(self, values: Sequence[Any]) -> int:
        """Of 32 bits."""
        return zlib.crc32(b"".join(value.data.tobytes() for value in values))

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """Integers are."""
        return [True] * len(values)


class PlainFramework:
    """``edl.worker.framework.Framework``, as far as it is asked for more than groups."""

    name = "plain"

    def __init__(self) -> None:
        self.arrays: Arrays = PlainArrays()

    def why_not_in_process(self) -> str:
        """It can."""
        return ""

    def prepare(self, seat: Seat) -> Any:
        """It has no groups."""
        raise NotImplementedError

    def connect(self, group: Any, seat: Seat) -> None:
        """It has no groups."""
        raise NotImplementedError

    def lost_peers(self, error: BaseException) -> bool:
        """It has no groups."""
        return False

    def out_of_memory(self, error: BaseException) -> bool:
        """Python's own."""
        return isinstance(error, MemoryError)

    def exchange(self, data: bytes) -> list[bytes]:
        """It has no groups."""
        raise NotImplementedError

    def broadcast(self, data: bytes, root: int) -> bytes:
        """It has no groups."""
        raise NotImplementedError


class PlainModel:
    """Weights that mix all gradients so far."""

    def __init__(self) -> None:
        self.weights = PlainTensor(range(8))

    def gradient(self, step: int, rank: int) -> list[int]:
        """See ``FrameworkModel``."""
        return [(1 + step) * (7 + rank) * (place + 3) for place in range(len(self.weights.data))]

    def combine(self, gradients: Sequence[Any]) -> list[int]:
        """See ``FrameworkModel``."""
        return [sum(parts) for parts in zip(*gradients, strict=True)]

    def apply(self, gradient: Any) -> None:
        """See ``FrameworkModel``."""
        data = self.weights.data
        for place, part in enumerate(gradient):
            data[place] = (data[place] * 31 + part) % _PRIME

    def content(self) -> bytes:
        """See ``FrameworkModel``."""
        return self.weights.data.tobytes()

    def state_dict(self) -> dict[str, Any]:
        """For ``State``."""
        return {"weights": self.weights}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """For ``State``."""
        self.weights.data[:] = plain["weights"].data

    def state(self, framework: Framework, **values: Any) -> BaseState:
        """See ``FrameworkModel``."""
        return BaseState(framework, {"model": self, **values})
