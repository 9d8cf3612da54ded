"""Threads waiting at the step barrier. The pushes of one step are applied together, on the thread of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.job_records import Training
from edl.threads import Threads
from ps.hashing import buckets_of
from ps.protocol.messages import TrainerMember
from ps.rows import TablePush, TrainerPush
from ps.server.step_barrier import Apply, PullDecision, Stale, StepBarrier, Verdict
from ps.spec import BUCKETS
from ps.store.push_plan import PartlyApplied


class BarrierTimeout(Exception):
    """The wait for other trainers has timed out. ``names``: the trainers waited for."""

    def __init__(self, names: str) -> None:
        self.names = names
        super().__init__(names)


class Revoked(Exception):
    """The Master considers this trainer lost."""


@dataclass(slots=True)
class _PushBatch:
    """Pushes that are applied together."""

    step: int
    scale: float
    tags: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Waiter:
    push: TrainerPush
    batch: _PushBatch | None = None
    """Set if this waiter's thread must apply the batch."""
    taken: bool = False
    stale: bool = False
    done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class Applied:
    """The result of ``apply``, and the step as counted by the step barrier."""

    step: int
    result: Any = field(default=None)


ApplyPushes = Callable[[Sequence[TrainerPush], int, float], Any]
"""Applies the pushes of one step with a scale."""


class StepBarrierShell:
    """The step barrier and the threads that wait at it. Thread-safe."""

    def __init__(self, training: Training | None = None, threads: Threads = SYSTEM_THREADS) -> None:
        self._barrier = StepBarrier(training)
        self._threads = threads
        self._changed = threads.condition()
        self._history = 0
        self._waiters: dict[int, _Waiter] = {}
        self._tags = 0

    def orders(self, epoch: int, members: Sequence[TrainerMember], revoked: Sequence[int], training: Training) -> None:
        """Take over the membership of new orders."""
        with self._changed:
            self._verdicts(self._barrier.orders(epoch, members, revoked, training))
            self._changed.notify_all()

    def reset(self, history: int) -> None:
        """Start a new history. Pushes of another one are refused from now on."""
        with self._changed:
            self._history = history
            self._verdicts(self._barrier.reset())
            self._changed.notify_all()

    def pull(self, trainer: int, step: int, until_s: float) -> None:
        """Wait until the trainer may have the rows for this step. Raises ``BarrierTimeout`` and ``Revoked``."""
        with self._changed:
            while True:
                may = self._barrier.may_pull(trainer, step)
                if may is PullDecision.GO:
                    return
                if may is PullDecision.STALE:
                    raise Revoked
                left_s = until_s - self._threads.now_s()
                if left_s <= 0:
                    raise BarrierTimeout(self._awaited_names(step))
                self._changed.wait(left_s)

    def push(
        self, push: TrainerPush, step: int, apply: ApplyPushes, until_s: float, complete: bool = False,
        trainer: int = 0, history: int = 0,
    ) -> Applied:  # fmt: skip
        """Apply a push when the barrier allows it, possibly on another push's thread.

        ``complete``: see ``StepBarrier.push``. ``trainer``: the sender, if it repeats another trainer's push.
        ``history``: the one that the push belongs to. Raises ``BarrierTimeout``, ``Revoked``, also if this is another
        history by now, and whatever ``apply`` raises.
        """
        with self._changed:
            if history != self._history:
                raise Revoked
            self._tags += 1
            tag = self._tags
            waiter = self._waiters[tag] = _Waiter(push)
            self._verdicts(self._barrier.push(trainer or push.trainer, step, tag, complete))
            self._changed.notify_all()
            try:
                self._await(tag, waiter, step, until_s)
            finally:
                if waiter.batch is None:
                    self._waiters.pop(tag, None)
        if waiter.batch is not None:
            self._apply_batch(waiter.batch, apply)
            with self._changed:
                self._waiters.pop(tag, None)
        if waiter.error is not None:
            raise waiter.error
        return waiter.result  # type: ignore[no-any-return]

    def _await(self, tag: int, waiter: _Waiter, step: int, until_s: float) -> None:
        """Wait until the push has been applied or this thread has to apply it."""
        while not waiter.done and waiter.batch is None:
            if waiter.stale:
                raise Revoked
            left_s = until_s - self._threads.now_s()
            if waiter.taken:
                self._changed.wait()
            elif left_s <= 0:
                self._barrier.withdraw(tag)
                raise BarrierTimeout(self._awaited_names(step))
            else:
                self._changed.wait(left_s)

    def _verdicts(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Stale):
                for tag in verdict.tags:
                    if tag in self._waiters:
                        self._waiters[tag].stale = True
            elif isinstance(verdict, Apply):
                tags = tuple(tag for tag in verdict.tags if tag in self._waiters)
                for tag in tags:
                    self._waiters[tag].taken = True
                if tags:
                    self._waiters[tags[-1]].batch = _PushBatch(verdict.step, verdict.scale, tags)

    def _apply_batch(self, batch: _PushBatch, apply: ApplyPushes) -> None:
        with self._changed:
            waiters = [self._waiters[tag] for tag in batch.tags]
        results: list[Any] = [None] * len(waiters)
        try:
            found = apply(_once_each([waiter.push for waiter in waiters]), batch.step, batch.scale)
            results = [Applied(batch.step, found)] * len(waiters)
            errors: list[BaseException | None] = [None] * len(waiters)
        except Exception as error:  # noqa: BLE001 - re-raised on the threads of the pushes
            if len(waiters) == 1 or isinstance(error, PartlyApplied):
                errors = [error] * len(waiters)
            else:
                results, errors = self._one_by_one(waiters, batch, apply)
        with self._changed:
            for waiter, result, failed in zip(waiters, results, errors, strict=True):
                waiter.result, waiter.error, waiter.done = result, failed, True
            self._changed.notify_all()

    def _one_by_one(
        self, waiters: Sequence[_Waiter], batch: _PushBatch, apply: ApplyPushes
    ) -> tuple[list[Any], list[BaseException | None]]:
        """Apply pushes one by one after they failed together, so that only the culprit gets the error."""
        results: list[Any] = []
        errors: list[BaseException | None] = []
        for waiter in waiters:
            if errors and isinstance(errors[-1], PartlyApplied):
                results.append(None)
                errors.append(errors[-1])
                continue
            try:
                results.append(Applied(batch.step, apply([waiter.push], batch.step, batch.scale)))
                errors.append(None)
            except Exception as error:  # noqa: BLE001 - re-raised on the thread of this push
                results.append(None)
                errors.append(error)
        return results, errors

    def _awaited_names(self, step: int) -> str:
        return ", ".join(member.name for member in self._barrier.waits_for(step)) or "trainers"


def _once_each(pushes: Sequence[TrainerPush]) -> list[TrainerPush]:
    """Drop repetitions: a push may arrive twice over two connections, and in parts. Keys in buckets that an earlier
    part of the same push covers are left out."""
    found: list[TrainerPush] = []
    covered: dict[tuple[int, int], Any] = {}
    for push in pushes:
        name = (push.trainer, push.seq)
        if name not in covered:
            covered[name] = [push]
            found.append(push)
            continue
        mask = np.zeros(BUCKETS, np.bool_)
        for earlier in covered[name]:
            for part in earlier.parts:
                mask[buckets_of(part.keys)] = True
        rest = TrainerPush(
            push.trainer, push.seq, [one for one in (_without(part, mask) for part in push.parts) if one]
        )
        if rest.parts:
            covered[name].append(rest)
            found.append(rest)
    return found


def _without(part: TablePush, mask: Any) -> TablePush | None:
    keep = ~mask[buckets_of(part.keys)]
    return TablePush(part.table, part.keys[keep], part.grads[keep], part.op) if keep.any() else None
