"""Decides when a worker may pass a step boundary: its side of the agreement on where all workers stop. Pure logic.

Callers hold a lock: ``hold`` is called by a side thread, ``arrive`` by the training thread.
"""

from __future__ import annotations

import enum

from edl.errors import StateError
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS, Settings


class RoundOver(BaseException):
    """Unwinds ``train`` when its round is over. Not an ``Exception``, so that scripts do not swallow it."""


class BoundaryAction(enum.Enum):
    """The actions of a worker at a step boundary."""

    WAIT = "wait"
    """Other workers may be ahead: ask again after the next message."""
    PASS = "pass"  # noqa: S105 - no password
    SAVE = "save"
    """Pass, and have the commit written."""
    SWITCH = "switch"
    """Commit and park."""
    KILL = "kill"
    """Commit, have it written, and park."""
    STOP = "stop"
    """Commit and park, independently of the other workers."""
    SET = "set"
    """Pass; new settings apply from here on."""
    OVER = "over"
    """The round is over: park without a commit."""


class StepBoundaries:
    """The step boundaries of successive rounds.

    Each worker reports the boundary that it has passed and holds at the next; the target is the highest reported number
    plus one. So no worker has passed the target when it is set, and every worker can reach it.
    """

    def __init__(self) -> None:
        self.passed = 0
        """Commit number of the last boundary passed."""
        self.leaving = ""
        """Why this worker parks at or before its next boundary, once that is settled; else empty."""
        self.target = 0
        """Commit number of the agreed boundary; 0 for none."""
        self.left = False
        """Whether the worker was ordered at a boundary to park."""
        self.settings = NO_SETTINGS
        """Settings of the step after ``passed``."""
        self._due: list[tuple[int, Settings]] = []
        """Settings that apply from future commits on, in order."""
        self._saves: list[int] = []
        """Commits to come that are to be written."""
        self._late = ""
        self._begun = 0
        self._missed = 0
        self._hold = 0
        self._purpose = Purpose.SAVE
        self._over = True
        self._stopping = False

    def begin(self, commit: int, settings: Settings = NO_SETTINGS) -> None:
        """Begin a round from this commit with these settings."""
        self.passed = self._begun = commit
        self.settings, self._due, self._saves, self._late = settings, [], [], ""
        self._missed = 0
        self._over = self.left = False
        self._forget()

    def hold(self, hold: int) -> int:
        """Hold at the next boundary; returns the last one passed. A later hold replaces an earlier one."""
        self._forget()
        self._hold = hold
        return self.passed

    def set_target(self, hold: int, commit: int, purpose: Purpose, reason: str) -> bool:
        """Continue to this commit and act there. Returns False if it belongs to another hold or is too late.

        All workers write a commit that is to be saved, so a later hold does not cancel it.
        """
        if hold != self._hold or not hold:
            return False
        if commit <= self.passed:
            self._forget()
            return False
        self.target, self._purpose = commit, purpose
        if purpose is Purpose.SAVE:
            self._saves.append(commit)
        elif not self._stopping:
            self.leaving = reason or purpose.value
        return True

    def set_settings(self, hold: int, commit: int, settings: Settings) -> None:
        """Apply settings from this commit on. All workers must apply them, so later requests do not cancel them, and
        repeated messages are harmless."""
        known = self._due[-1][1] if self._due else self.settings
        if self._over or settings.number <= known.number:
            pass
        elif commit <= self.passed:
            self._late = f"settings {settings.number} apply from commit {commit} on, but {self.passed} is passed"
        else:
            self._due.append((commit, settings))
        self.release(hold)

    def release(self, hold: int) -> bool:
        """Cancel a hold. Returns False if it is another hold."""
        if hold != self._hold:
            return False
        self._forget()
        return True

    def end(self) -> None:
        """End the round: further holds and arrivals are answered with ``OVER``."""
        self._missed = self.missed
        self._over = True
        self._forget()

    def stop(self, reason: str) -> None:
        """Park at the next boundary, independently of the other workers."""
        self._stopping = True
        self.leaving = reason or "ordered to stop"

    def arrive(self, commit: int) -> BoundaryAction:
        """The training thread has arrived at this boundary. Any answer but ``WAIT`` lets it pass (or leave).

        Raises ``StateError`` when this worker can no longer be in step with the others.
        """
        if self._late and not self._over:
            raise StateError(f"the order did not reach this worker in time: {self._late}")
        turn = self._look(commit)
        if turn not in (BoundaryAction.PASS, BoundaryAction.SAVE):
            return turn
        before = self.settings
        while self._due and commit >= self._due[0][0]:
            self.settings = self._due.pop(0)[1]
        return BoundaryAction.SET if turn is BoundaryAction.PASS and self.settings is not before else turn

    def _look(self, commit: int) -> BoundaryAction:
        if self._over:
            self.left = True
            return BoundaryAction.OVER
        if self._stopping:
            return self._leave(commit, BoundaryAction.STOP)
        if self._hold and not self.target:
            return BoundaryAction.WAIT
        if self._hold and commit >= self.target:
            if self._purpose is not Purpose.SAVE:
                written = self._purpose is Purpose.KILL or self._is_saved(commit)
                return self._leave(commit, BoundaryAction.KILL if written else BoundaryAction.SWITCH)
            self._forget()
        self.passed = commit
        return BoundaryAction.SAVE if self._is_saved(commit) else BoundaryAction.PASS

    def _is_saved(self, commit: int) -> bool:
        """Whether a commit up to this one is to be written; such commits are done with then."""
        due = [one for one in self._saves if one <= commit]
        del self._saves[: len(due)]
        return bool(due)

    @property
    def held(self) -> bool:
        """Whether the stop commit is being agreed on with the other workers, or has been sent to them."""
        return bool(self._hold) and not self._over

    @property
    def missed(self) -> int:
        """Boundaries that the others had passed when the target was set, if this worker has passed none."""
        if self.passed != self._begun or not self.target:
            return self._missed
        return self.target - 1 - self.passed

    def _leave(self, commit: int, turn: BoundaryAction) -> BoundaryAction:
        self.passed = commit
        # From here on every boundary answers this, in case the script swallows the unwinding.
        self._over = self.left = True
        self._hold = self.target = 0
        return turn

    def _forget(self) -> None:
        self._hold = self.target = 0
        if not self._stopping:
            self.leaving = ""
