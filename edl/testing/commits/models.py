"""Models whose content reveals any step that was ever computed wrongly."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from edl.wire.local import Seat
from edl.worker.framework import Accelerator, ArrayInfo, Arrays, Framework
from edl.worker.state import BaseState

_PRIME = 2_147_483_647


class FrameworkModel(Protocol):
    """A model with its optimizer, in one framework. Everything is computed synchronously on the host."""

    def gradient(self, step: int, rank: int) -> Any:
        """The gradient of one rank in this step."""
        ...

    def combine(self, gradients: Sequence[Any]) -> Any:
        """Combine the gradients of all ranks, always in the same order."""
        ...

    def apply(self, gradient: Any) -> None:
        """Apply a gradient, as an optimizer step."""
        ...

    def content(self) -> bytes:
        """The bytes of all values that must be exact."""
        ...

    def state(self, framework: Framework, **values: Any) -> BaseState:
        """Create a ``State`` with this model and these values."""
        ...


def step(model: FrameworkModel, number: int, world_size: int) -> None:
    """One correct step, computed without a device."""
    model.apply(model.combine([model.gradient(number, rank) for rank in range(world_size)]))


class PlainTensor:
    """A tensor of 64-bit integers without a framework."""

    def __init__(self, values: Sequence[int]) -> None:
        self.data = array("q", values)


class PlainArrays:
    """Implements ``edl.worker.framework.Arrays`` for ``PlainTensor``."""

    def is_array(self, value: object) -> bool:
        """Whether this is a ``PlainTensor``."""
        return isinstance(value, PlainTensor)

    def info(self, value: Any) -> ArrayInfo:
        """Describe a tensor: a vector of 64-bit integers."""
        return ArrayInfo("I64", (len(value.data),), len(value.data) * value.data.itemsize)

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Copy the tensors one after another."""
        for value, buffer in zip(values, buffers, strict=True):
            buffer[:] = value.data.tobytes()

    def view(self, info: ArrayInfo, data: memoryview) -> PlainTensor:
        """A copy of the data, which the interface allows."""
        found = PlainTensor(())
        found.data.frombytes(bytes(data))
        return found

    def copy(self, value: Any) -> PlainTensor:
        """A new tensor with the same values."""
        return PlainTensor(value.data)

    def digest(self, values: Sequence[Any]) -> int:
        """A 32-bit hash of the values."""
        return zlib.crc32(b"".join(value.data.tobytes() for value in values))

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """True for every tensor: integers are finite."""
        return [True] * len(values)


class PlainFramework:
    """``edl.worker.framework.Framework`` without groups; ``AsynchronousFramework`` provides them."""

    name = "plain"
    accelerator: Accelerator | None = None

    def __init__(self) -> None:
        self.arrays: Arrays = PlainArrays()

    def why_not_in_process(self) -> str:
        """Empty: workers can rejoin in process."""
        return ""

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        """Nothing to do: there is no device."""
        return ""

    def synchronize(self) -> None:
        """Nothing to wait for: there is no device."""

    def prepare(self, seat: Seat) -> Any:
        """Not supported: there are no groups."""
        raise NotImplementedError

    def connect(self, group: Any, seat: Seat) -> None:
        """Not supported: there are no groups."""
        raise NotImplementedError

    def lost_peers(self, error: BaseException) -> bool:
        """False: without groups no peers are lost."""
        return False

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is Python's ``MemoryError``."""
        return isinstance(error, MemoryError)

    def exchange(self, data: bytes) -> list[bytes]:
        """Not supported: there are no groups."""
        raise NotImplementedError

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Not supported: there are no groups."""
        raise NotImplementedError


class PlainModel:
    """A model whose weights mix all gradients so far."""

    def __init__(self) -> None:
        self.weights = PlainTensor(range(8))

    def gradient(self, step: int, rank: int) -> list[int]:
        """Numbers that differ for every step, rank and weight."""
        return [(1 + step) * (7 + rank) * (place + 3) for place in range(len(self.weights.data))]

    def combine(self, gradients: Sequence[Any]) -> list[int]:
        """The sum of the gradients."""
        return [sum(parts) for parts in zip(*gradients, strict=True)]

    def apply(self, gradient: Any) -> None:
        """Mix the gradient into the weights."""
        data = self.weights.data
        for place, part in enumerate(gradient):
            data[place] = (data[place] * 31 + part) % _PRIME

    def content(self) -> bytes:
        """The bytes of the weights."""
        return self.weights.data.tobytes()

    def state_dict(self) -> dict[str, Any]:
        """The weights, for ``State``."""
        return {"weights": self.weights}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Restore the weights, for ``State``."""
        self.weights.data[:] = plain["weights"].data

    def state(self, framework: Framework, **values: Any) -> BaseState:
        """Create a ``BaseState`` with this model and these values."""
        return BaseState(framework, {"model": self, **values})
