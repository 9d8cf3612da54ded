"""When a trainer of others commits: before each step, when all work of the step before is done."""

from __future__ import annotations

from typing import Any, Protocol

from edl.errors import StateError
from edl.worker.state import BaseState


class Numbers(Protocol):
    """The random number generators of a worker: either framework's ``RandomState``."""

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators to these states."""


class StepBoundary:
    """The boundaries of one training. ``numbers`` is part of the state that is committed."""

    def __init__(self, numbers: Numbers, save_every: int) -> None:
        """``save_every``: after every so many steps and the last one also write the commit to the checkpoint
        directory; 0: never."""
        self._numbers = numbers
        self._save_every = save_every
        self._at_start: dict[str, Any] | None = None
        self.committed = 0
        """Steps up to the last commit."""

    @property
    def preparing(self) -> bool:
        """Whether this world has not reached its first boundary."""
        return self._at_start is not None

    def enter(self, committed: int) -> None:
        """A world begins after so many steps, with the state restored."""
        self._at_start, self.committed = self._numbers.state_dict(), committed

    def first(self) -> bool:
        """Whether this is the first boundary of the world, at which nothing is committed: the trainer has prepared
        everything and begins. What was drawn for the preparation is forgotten, because not every run prepares here."""
        if self._at_start is None:
            return False
        self._numbers.load_state_dict(self._at_start)
        self._at_start = None
        return True

    def due(self, step: int) -> bool:
        """Whether steps were made since the last commit."""
        return step > self.committed

    def commit(self, state: BaseState, step: int) -> None:
        """Commit after so many steps."""
        self.committed = step
        if self._save_every and step % self._save_every == 0:
            state.save()
        else:
            state.commit()

    def finish(self, state: BaseState) -> None:
        """Commit after the last step. With ``save_every`` it is written, too: else the job would repeat its last steps
        if it is started again."""
        if self._save_every:
            state.save()
        else:
            state.commit()


def check_options(what: str, *, global_batch: int, copy_every: int, save_every: int) -> None:
    """Raise ``StateError`` for a value that is too small. ``what`` is named in it."""
    least = {"global_batch": (global_batch, 0), "copy_every": (copy_every, 1), "save_every": (save_every, 0)}
    for name, (value, limit) in least.items():
        if value < limit:
            raise StateError(f"{what}({name}={value}): it must be at least {limit}")
