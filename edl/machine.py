"""The contract between a machine and its shell.

A *machine* is pure: ``step(state, event, now_s)`` returns a ``Decision``. It reads no clock, does no I/O, uses no
randomness, and keeps nothing between two steps except the state that it returns. Times are seconds on the shell's
monotonic clock.

Its *shell* owns the sockets, files, processes and timers. For each event, one at a time, it

1. steps: passes the event and the time to the machine;
2. persists: writes the changes of the state to the store. If that fails, step 3 is not done;
3. sends: runs the effects, in order.

So a decision that a crash could undo is never visible outside. An effect that fails comes back as an event. The
earliest ``WakeAt`` of a decision counts, and the next decision replaces it: a machine that is still waiting asks again
at each step. (Services of the Master are the exception: their wake-up stays until its tick.) A ``Tick`` may come early
or late; machines look at ``now_s``, not at the reason why they were woken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State")
Effect = TypeVar("Effect")


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a time that was requested by ``WakeAt`` has come."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Effect: send a ``Tick`` at this time."""

    at_s: float


@dataclass(frozen=True)
class Decision(Generic[State, Effect]):
    """The result of one step. ``reason`` explains it, for people and for tests."""

    state: State
    effects: tuple[Effect, ...]
    reason: str
