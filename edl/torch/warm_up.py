"""What a new worker does on its device before it asks for a place in a world.

The first kernel, matrix product and collective of a process load libraries and code, which takes about a second on a
GPU. Done later, all other workers of the world would wait for that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Protocol


class WarmUpStep(enum.Enum):
    """One call; its value says what it does, for messages."""

    OPEN = "creating the device's context"
    MULTIPLY = "multiplying two matrices"
    REDUCE = "NCCL with itself"


class Calls(Protocol):
    """The calls on a device. Each returns once the device has done it, and raises torch's errors."""

    def open(self) -> None:
        """Have the device create its context for this process, by a first kernel."""
        ...

    def multiply(self) -> None:
        """A small matrix product, forward and backward."""
        ...

    def reduce(self) -> None:
        """A small all-reduce in a world of one, which is gone afterwards."""
        ...


def device_of(local_rank: int, devices: int) -> int:
    """Which device a worker uses. With ``--virtual-local-rank`` it sees only its own."""
    return local_rank if local_rank < devices else 0


def plan(devices: int) -> tuple[WarmUpStep, ...]:
    """What to do with so many devices on which NCCL is used: nothing on the CPU."""
    return (WarmUpStep.OPEN, WarmUpStep.MULTIPLY, WarmUpStep.REDUCE) if devices > 0 else ()


def carry_out(steps: Iterable[WarmUpStep], calls: Calls, enough: Callable[[], bool]) -> str:
    """Do the steps until ``enough()``. Returns why one failed, and leaves out the rest then; empty if none did."""
    call = {WarmUpStep.OPEN: calls.open, WarmUpStep.MULTIPLY: calls.multiply, WarmUpStep.REDUCE: calls.reduce}
    for step in steps:
        if enough():
            break
        try:
            call[step]()
        except Exception as error:  # noqa: BLE001  it fails again, with its own message, where the script needs it
            return f"{step.value} failed: {type(error).__name__}: {error}"
    return ""
