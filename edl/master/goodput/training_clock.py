"""When which commit was made, measured in time of training, so that a rollback can be priced.

The clock stands still while no world trains, and goes back with the job when that returns to an earlier commit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MOST_MARKS = 16
"""Number of marks and of stretches that are kept. Of more, every second one goes: returns to old commits are priced
less exactly."""


@dataclass(frozen=True, slots=True)
class CommitTime:
    """A commit, and the time at which it was made, in nanoseconds of training."""

    commit: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """From this time on, in nanoseconds of training, this many slots trained."""

    from_ns: int
    slots: int


@dataclass(frozen=True, slots=True)
class TrainingClock:
    """Commits of the job's present line, and the sizes of the worlds that made them; both ascend."""

    clock_ns: int = 0
    marks: tuple[CommitTime, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    step_ns: int = 0
    """Duration of a step, as last reported; 0: unknown."""

    def advance(self, duration_ns: int) -> TrainingClock:
        """The world has trained for so long."""
        return dataclasses.replace(self, clock_ns=self.clock_ns + duration_ns)

    def begin(self, commit: int, slots: int) -> TrainingClock:
        """A world of this many slots begins to train from a commit."""
        stretches = tuple(one for one in self.stretches if one.from_ns < self.clock_ns)
        marks = tuple(one for one in self.marks if one.commit < commit)
        return dataclasses.replace(
            self,
            marks=_thinned((*marks, CommitTime(commit, self.clock_ns))),
            stretches=_thinned((*stretches, Stretch(self.clock_ns, slots))),
        )

    def mark(self, commit: int, age_ns: int, step_ns: int = 0) -> TrainingClock:
        """A commit was made ``age_ns`` of training ago. Of several reports about one commit the first counts."""
        training = dataclasses.replace(self, step_ns=step_ns or self.step_ns)
        last = self.marks[-1] if self.marks else CommitTime(-1, 0)
        if commit <= last.commit:
            return training
        new = CommitTime(commit, max(self.clock_ns - age_ns, last.at_ns))
        return dataclasses.replace(training, marks=_thinned((*self.marks, new)))

    def made_ns(self, commit: int) -> int:
        """Time at which this commit was made; now if that is unknown."""
        before = [one for one in self.marks if one.commit <= commit]
        after = [one for one in self.marks if one.commit > commit]
        if not before:
            return after[0].at_ns if after else self.clock_ns
        base = before[-1]
        if base.commit == commit:
            return base.at_ns
        if after:
            share = (after[0].at_ns - base.at_ns) * (commit - base.commit)
            return base.at_ns + share // (after[0].commit - base.commit)
        if not self.step_ns:
            return self.clock_ns
        return min(self.clock_ns, base.at_ns + (commit - base.commit) * self.step_ns)

    def roll_back(self, commit: int) -> tuple[TrainingClock, int]:
        """The job returns to a commit. Also returns the slot-nanoseconds of training since then."""
        back_ns = self.made_ns(commit)
        ends = [*(one.from_ns for one in self.stretches[1:]), self.clock_ns]
        spent = sum(
            max(0, end_ns - max(one.from_ns, back_ns)) * one.slots
            for one, end_ns in zip(self.stretches, ends, strict=False)
        )
        stretches = tuple(one for one in self.stretches if one.from_ns < back_ns)
        marks = tuple(one for one in self.marks if one.commit <= commit)
        return dataclasses.replace(self, clock_ns=back_ns, stretches=stretches, marks=marks), spent


NO_TRAINING = TrainingClock()


def _thinned(found: tuple[T, ...]) -> tuple[T, ...]:
    return found if len(found) <= MOST_MARKS else (*found[:-1:2], found[-1])
