"""The step barrier: averages a step's gradients in mode sync, and bounds the staleness in mode async.

Pure; one per pserver. In mode sync, and in mode async with a staleness bound, each trainer pushes each step to *every*
pserver that owns a bucket, if necessary without keys, because the barrier waits for trainers that have not pushed. The
shell answers a push with the step of its ``Apply``; a trainer continues from the highest one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from edl.job_records import Mode, Training
from ps.protocol.messages import TrainerMember

SCALES = 8
"""Newest steps whose scales are known, for parts that come after their step."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these pushes now, together, with gradients scaled by ``scale``."""

    step: int
    tags: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class Stale:
    """Refuse these pushes: their trainers are considered lost."""

    tags: tuple[int, ...]


Verdict = Apply | Stale


class PullDecision(enum.Enum):
    """Whether a trainer may have the rows that it pulls."""

    GO = "go"
    WAIT = "wait"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class _WaitingPush:
    trainer: int
    step: int


@dataclass(slots=True)
class _TrainerSteps:
    """How far a trainer has got on this pserver; -1: no push yet."""

    received: int = -1
    """Highest step received. In mode async also pulled for, or started at."""
    applied: int = -1
    """Highest step in which a push of it was applied."""
    starts_at: int = -1
    """The step in which its first push counts, if that was for a step that was over. A repeated one counts there as
    well."""


class StepBarrier:
    """Decides when trainers' pushes are applied. ``tag``: the shell's number for a received push."""

    def __init__(self, training: Training | None = None) -> None:
        self._training = training or Training()
        self._members: dict[int, TrainerMember] = {}
        self._revoked: frozenset[int] = frozenset()
        self._waiting: dict[int, _WaitingPush] = {}
        self._trainers: dict[int, _TrainerSteps] = {}
        self._scales: dict[int, float] = {}
        """Scales of the newest steps applied here."""
        self.step = -1
        """The highest step applied here."""
        self.epoch = 0

    def orders(
        self, epoch: int, members: Sequence[TrainerMember], revoked: Sequence[int], training: Training | None = None
    ) -> tuple[Verdict, ...]:
        """Take over the membership of the newest orders."""
        self.epoch, self._revoked = epoch, frozenset(revoked)
        self._training = training or self._training
        known, self._members = self._members, {member.number: member for member in members}
        slowest = min((self._at(one) for one in known if one in self._members), default=-1)
        for one in self._members:
            if one not in known:  # it starts at the step of the slowest member here
                trainer = self._trainer(one)
                trainer.received = max(trainer.received, slowest if self._asynchronous else -1)
        self._trainers = {one: steps for one, steps in self._trainers.items() if one not in self._revoked}
        for tag, waiting in self._waiting.items():
            if waiting.trainer in self._members and waiting.trainer not in known:
                self._waiting[tag] = _WaitingPush(waiting.trainer, self._open(waiting.trainer, waiting.step))
        gone = tuple(tag for tag, waiting in self._waiting.items() if waiting.trainer in self._revoked)
        for tag in gone:
            del self._waiting[tag]
        refused: tuple[Verdict, ...] = (Stale(gone),) if gone else ()
        return (*refused, *self._applied())

    def reset(self) -> tuple[Verdict, ...]:
        """Start a new history: refuse everything that waits."""
        gone = tuple(self._waiting)
        self._waiting, self._trainers, self._scales, self.step = {}, {}, {}, -1
        return (Stale(gone),) if gone else ()

    def push(self, trainer: int, step: int, tag: int, complete: bool = False) -> tuple[Verdict, ...]:
        """Process a push, or a part of one. ``complete``: another pserver has applied this step, so all trainers have
        pushed it; those that learn of this pserver later will not push it here."""
        if trainer in self._revoked:
            return (Stale((tag,)),)
        known = self._trainer(trainer)
        if self._asynchronous:
            known.received = step = max(known.received, step)
            self.step = max(self.step, step)
            return (Apply(step, (tag,), 1.0),)
        step = max(step, known.starts_at)
        if step <= self.step and known.applied >= step:  # part of a step applied here already; its bucket had moved
            return (Apply(step, (tag,), self._scales.get(step, 1.0 / max(len(self._members), 1))),)
        if complete and step > self.step:
            known.received, known.applied = max(known.received, step), max(known.applied, step)
            return (Apply(step, (tag,), self._scale(step, len(self._members))), *self._applied())
        self._waiting[tag] = _WaitingPush(trainer, self._open(trainer, step))
        return self._applied()

    def withdraw(self, tag: int) -> None:
        """The sender no longer waits for this push and will repeat it."""
        gone = self._waiting.pop(tag, None)
        if gone is not None:
            known = self._trainer(gone.trainer)
            others = (one.step for one in self._waiting.values() if one.trainer == gone.trainer)
            known.received = max(others, default=known.applied)

    def may_pull(self, trainer: int, step: int) -> PullDecision:
        """Decide whether a trainer may have the rows for this step. Ask again after every event."""
        if trainer in self._revoked:
            return PullDecision.STALE
        bound = self._training.staleness
        if self._training.mode is not Mode.ASYNC or not bound:
            return PullDecision.GO
        known = self._trainer(trainer)
        known.received = max(known.received, step)
        slowest = min((self._at(one) for one in self._members if one != trainer), default=step)
        return PullDecision.GO if step - slowest <= bound else PullDecision.WAIT

    def waits_for(self, step: int) -> tuple[TrainerMember, ...]:
        """The members that hold this step up, for messages."""
        if self._training.mode is Mode.SYNC:
            return tuple(one for one in self._members.values() if one.step <= step > self._trainer(one.number).received)
        bound = self._training.staleness
        return tuple(one for one in self._members.values() if step - self._at(one.number) > bound)

    def _open(self, trainer: int, step: int) -> int:
        """The step in which a push counts that has not been applied: a new trainer joins in the open step."""
        known = self._trainer(trainer)
        if step <= self.step:
            known.starts_at = step = self.step + 1
        known.received = max(known.received, step)
        return step

    @property
    def _asynchronous(self) -> bool:
        return self._training.mode is not Mode.SYNC

    def _at(self, trainer: int) -> int:
        return max(self._trainer(trainer).received, self._members[trainer].step)

    def _trainer(self, number: int) -> _TrainerSteps:
        found = self._trainers.get(number)
        if found is None:
            found = self._trainers[number] = _TrainerSteps()
        return found

    def _applied(self) -> tuple[Verdict, ...]:
        """Apply the steps that wait for no trainer any more, in order."""
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
            for tag, number in tags.items():
                del self._waiting[tag]
                known = self._trainer(number)
                known.applied = max(known.applied, step)
            self.step = max(self.step, step)
            verdicts.append(Apply(step, tuple(tags), self._scale(step, len(set(tags.values())))))
        return tuple(verdicts)

    def _scale(self, step: int, trainers: int) -> float:
        """The scale of all pushes of a step; its first ones decide."""
        scale = self._scales.setdefault(step, 1.0 / max(trainers, 1))
        if len(self._scales) > SCALES:
            del self._scales[min(self._scales)]
        return scale
