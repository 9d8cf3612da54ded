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
class TrainingWaits:
    """Slot-nanoseconds of training that were waits."""

    commit_ns: int = 0
    data_ns: int = 0

    def plus(self, other: TrainingWaits, part: int = 1, whole: int = 1) -> TrainingWaits:
        """The sum of these and of a part of others."""
        commit_ns = self.commit_ns + other.commit_ns * part // whole
        return TrainingWaits(commit_ns, self.data_ns + other.data_ns * part // whole)

    def minus(self, other: TrainingWaits) -> TrainingWaits:
        """Those of a time that began when there were ``other``."""
        return TrainingWaits(self.commit_ns - other.commit_ns, self.data_ns - other.data_ns)


NO_WAITS = TrainingWaits()


@dataclass(frozen=True, slots=True)
class CommitTime:
    """A commit, and the time at which it was made, in nanoseconds of training."""

    commit: int
    at_ns: int
    waits: TrainingWaits = NO_WAITS
    """All waits until then."""


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
    waits: TrainingWaits = NO_WAITS
    """All waits until now."""

    def advance(self, duration_ns: int) -> TrainingClock:
        """The world has trained for so long."""
        return dataclasses.replace(self, clock_ns=self.clock_ns + duration_ns)

    def begin(self, commit: int, slots: int) -> TrainingClock:
        """A world of this many slots begins to train from a commit."""
        stretches = tuple(one for one in self.stretches if one.from_ns < self.clock_ns)
        marks = tuple(one for one in self.marks if one.commit < commit)
        return dataclasses.replace(
            self,
            marks=_thinned((*marks, CommitTime(commit, self.clock_ns, self.waits))),
            stretches=_thinned((*stretches, Stretch(self.clock_ns, slots))),
        )

    def mark(self, commit: int, age_ns: int, step_ns: int = 0) -> TrainingClock:
        """A commit was made ``age_ns`` of training ago. Of several reports about one commit the first counts."""
        training = dataclasses.replace(self, step_ns=step_ns or self.step_ns)
        last = self.marks[-1] if self.marks else CommitTime(-1, 0)
        if commit <= last.commit:
            return training
        at_ns = max(self.clock_ns - age_ns, last.at_ns)
        new = CommitTime(commit, at_ns, self.waits_until(at_ns))
        return dataclasses.replace(training, marks=_thinned((*self.marks, new)))

    def wait(self, duration_ns: int, waits: TrainingWaits) -> TrainingClock:
        """These waits were spread over the last ``duration_ns``, or the part of it that the present world has
        trained."""
        since_ns = max(self.clock_ns - duration_ns, self.stretches[-1].from_ns if self.stretches else 0)
        marks = tuple(
            dataclasses.replace(one, waits=one.waits.plus(waits, one.at_ns - since_ns, self.clock_ns - since_ns))
            if one.at_ns > since_ns
            else one
            for one in self.marks
        )
        return dataclasses.replace(self, marks=marks, waits=self.waits.plus(waits))

    def waits_until(self, at_ns: int) -> TrainingWaits:
        """All waits until this time; between two marks they are spread evenly."""
        points = [*self.marks, CommitTime(-1, self.clock_ns, self.waits)]
        before = [one for one in points if one.at_ns <= at_ns]
        after = [one for one in points if one.at_ns > at_ns]
        if not before or not after:
            return before[-1].waits if before else after[0].waits
        base, end = before[-1], after[0]
        return base.waits.plus(end.waits.minus(base.waits), at_ns - base.at_ns, end.at_ns - base.at_ns)

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

    def roll_back(self, commit: int) -> tuple[TrainingClock, int, TrainingWaits]:
        """The job returns to a commit. Also returns the slot-nanoseconds of training since then, and the waits among
        them."""
        back_ns = self.made_ns(commit)
        ends = [*(one.from_ns for one in self.stretches[1:]), self.clock_ns]
        spent = sum(
            max(0, end_ns - max(one.from_ns, back_ns)) * one.slots
            for one, end_ns in zip(self.stretches, ends, strict=False)
        )
        stretches = tuple(one for one in self.stretches if one.from_ns < back_ns)
        marks = tuple(one for one in self.marks if one.commit <= commit)
        waits = self.waits_until(back_ns)
        training = dataclasses.replace(self, clock_ns=back_ns, stretches=stretches, marks=marks, waits=waits)
        return training, spent, self.waits.minus(waits)


NO_TRAINING = TrainingClock()


def _thinned(found: tuple[T, ...]) -> tuple[T, ...]:
    return found if len(found) <= MOST_MARKS else (*found[:-1:2], found[-1])
