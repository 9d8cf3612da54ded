"""The contract between a machine and its shell.

A *machine* is pure: ``step(state, event, now_s)`` returns a ``Decision``. It reads no clock, opens nothing, draws
nothing at random, and keeps nothing between two steps but what it returns. Times are seconds on the shell's monotonic
clock.

Its *shell* owns the sockets, files, processes and timers. For each event, one at a time, it

1. steps: hands the machine the event and the time;
2. persists: writes what changed of the state to the store. When that fails, nothing of step 3 happens;
3. sends: runs the effects, in order.

So nobody ever hears of a decision that a crash could undo. An effect that fails comes back as an event. The earliest
``WakeAt`` of a decision counts, and the next decision replaces it: a machine that still waits for something asks again
at each step. (Services of the Master are the exception: there a wake-up stands until its tick.) A ``Tick`` may come
early or late; machines look at ``now_s``, not at why they were woken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State")
Effect = TypeVar("Effect")


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a time asked for by ``WakeAt`` has come."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Effect: send a ``Tick`` at this time."""

    at_s: float


@dataclass(frozen=True)
class Decision(Generic[State, Effect]):
    """What one step leads to. ``reason`` says why, for people and for tests."""

    state: State
    effects: tuple[Effect, ...]
    reason: str
