"""Who may go on: averages of a step in sync mode, and how far ahead a trainer may be in async mode.

Pure, one a pserver. In sync mode, and in async mode with a staleness bound, each trainer pushes each step to *every*
pserver that its chart gives buckets to, if need be without any keys: a step of which nothing is heard is one that is
waited for. The shell answers a push with the step that its ``Apply`` has; a trainer goes on from the highest one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from edl.job_records import Mode, Training
from ps.protocol.messages import Member


@dataclass(frozen=True, slots=True)
class Apply:
    """These pushes are applied now, as one, their gradients times ``scale``."""

    step: int
    tags: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Stale:
    """These come from trainers that are gone: refused."""

    tags: tuple[int, ...]


Verdict = Apply | Stale


class May(enum.Enum):
    """Whether a trainer's pull is served."""

    GO = "go"
    WAIT = "wait"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class _Waiting:
    trainer: int
    step: int


class StepBarrier:
    """What of the trainers' pushes is applied when. ``tag``: the shell's number for a push that has come here."""

    def __init__(self, training: Training | None = None) -> None:
        self._training = training or Training()
        self._members: dict[int, Member] = {}
        self._revoked: frozenset[int] = frozenset()
        self._waiting: dict[int, _Waiting] = {}
        self._reached: dict[int, int] = {}
        """Highest step heard of, by trainer."""
        self._scales: dict[int, float] = {}
        """Of the newest steps applied here."""
        self.step = -1
        """The highest step applied here."""
        self.epoch = 0

    def orders(
        self, epoch: int, members: Sequence[Member], revoked: Sequence[int], training: Training | None = None
    ) -> tuple[Verdict, ...]:
        """The membership of the newest orders."""
        self.epoch, self._revoked = epoch, frozenset(revoked)
        self._training = training or self._training
        known, self._members = self._members, {member.number: member for member in members}
        slowest = min((self._at(one) for one in known if one in self._members), default=-1)
        for one in self._members:
            if one not in known:  # it begins where the others are here
                self._reached[one] = max(self._reached.get(one, -1), slowest if self._asynchronous else -1)
        self._reached = {one: step for one, step in self._reached.items() if one not in self._revoked}
        gone = tuple(tag for tag, waiting in self._waiting.items() if waiting.trainer in self._revoked)
        for tag in gone:
            del self._waiting[tag]
        refused: tuple[Verdict, ...] = (Stale(gone),) if gone else ()
        return (*refused, *self._applied())

    def reset(self) -> tuple[Verdict, ...]:
        """A new history: nothing of what was said before counts."""
        gone = tuple(self._waiting)
        self._waiting, self._reached, self._scales, self.step = {}, {}, {}, -1
        return (Stale(gone),) if gone else ()

    def push(self, trainer: int, step: int, tag: int, complete: bool = False) -> tuple[Verdict, ...]:
        """A push, or a part of one, has come. ``complete``: another pserver has applied this step, so that everybody
        has pushed it; who has heard of this pserver later than that will not push it here."""
        if trainer in self._revoked:
            return (Stale((tag,)),)
        before = self._reached.get(trainer, -1)
        if self._asynchronous:
            self._reached[trainer] = step = max(before, step)
            self.step = max(self.step, step)
            return (Apply(step, (tag,), 1.0),)
        if step <= self.step and before >= step:  # a part that had to find its bucket, after the rest of its step
            return (Apply(step, (tag,), self._scales.get(step, 1.0 / max(len(self._members), 1))),)
        if complete and step > self.step:
            self._reached[trainer] = max(before, step)
            return (Apply(step, (tag,), 1.0 / max(len(self._members), 1)), *self._applied())
        step = max(step, self.step + 1)  # a newcomer counts in the step that is open
        self._reached[trainer] = max(before, step)
        self._waiting[tag] = _Waiting(trainer, step)
        return self._applied()

    def withdraw(self, tag: int) -> None:
        """Whoever pushed this does not wait for it any more, and will push it again."""
        waiting = self._waiting.pop(tag, None)
        if waiting is not None and waiting not in self._waiting.values():
            self._reached[waiting.trainer] = waiting.step - 1

    def may_pull(self, trainer: int, step: int) -> May:
        """Whether a trainer may have the rows for this step. Ask again whenever anything has come."""
        if trainer in self._revoked:
            return May.STALE
        bound = self._training.staleness
        if self._training.mode is not Mode.ASYNC or not bound:
            return May.GO
        self._reached[trainer] = max(self._reached.get(trainer, -1), step)
        slowest = min((self._at(one) for one in self._members if one != trainer), default=step)
        return May.GO if step - slowest <= bound else May.WAIT

    def waits_for(self, step: int) -> tuple[Member, ...]:
        """The members who hold this step up, for whoever asks why."""
        if self._training.mode is Mode.SYNC:
            return tuple(one for one in self._members.values() if one.step <= step > self._reached.get(one.number, -1))
        bound = self._training.staleness
        return tuple(one for one in self._members.values() if step - self._at(one.number) > bound)

    @property
    def _asynchronous(self) -> bool:
        return self._training.mode is not Mode.SYNC

    def _at(self, trainer: int) -> int:
        return max(self._reached.get(trainer, -1), self._members[trainer].step)

    def _applied(self) -> tuple[Verdict, ...]:
        """Steps that nobody has to be waited for any more, in their order."""
        verdicts: list[Verdict] = []
        steps = sorted({one.step for one in self._waiting.values() if one.trainer in self._members})
        for step in steps:
            if self._training.mode is Mode.SYNC and self.waits_for(step):
                break
            tags = {
                tag: one.trainer
                for tag, one in self._waiting.items()
                if one.step == step and one.trainer in self._members
            }
            scale = self._scales.get(step, 1.0 / len(set(tags.values())))
            for tag in tags:
                del self._waiting[tag]
            self.step = max(self.step, step)
            self._scales[step] = scale
            self._scales.pop(min(self._scales) if len(self._scales) > 8 else -1, None)
            verdicts.append(Apply(step, tuple(tags), scale))
        return tuple(verdicts)
