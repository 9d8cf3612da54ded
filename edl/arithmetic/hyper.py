"""Batches, accumulation and LR factors from a policy and the size of the world. Pure, and the same for everybody.

A *step* is what lies between two commits. Its samples are split over the workers, a worker's part into micro-batches
that it takes one after the other; all workers take the same number of them, so that their collectives meet. Where the
parts are uneven some micro-batches are smaller, or empty stand-ins. The gradient of a micro-batch's mean loss counts by
its share of the step's samples, so the sum is the gradient of the mean over the whole step, however it was split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from edl.arithmetic.plan import split
from edl.config import HyperPolicy, LrRule
from edl.errors import StateError
from edl.wire.messages import NO_SETTINGS, Settings

# --- what the Master prescribes --------------------------------------------------------------------------------------


def settle(policy: HyperPolicy, before: Settings, workers: int, commit: int, was: int = 0) -> Settings:
    """What holds from ``commit`` on in a world of so many workers.

    ``before``: what held until then, with ``was`` workers; 0 workers if nothing is known of it, as in a job that was
    started again from its checkpoints. ``before`` itself is returned when nothing changes; else the number rises.
    A factor that changes does so over ``policy.warmup`` commits, from the value that it had come to; one that is not
    known to change, holds at once.
    """
    if not policy.prescribes and not before.number:
        return NO_SETTINGS
    size = policy.global_batch or policy.logical_ranks or workers
    reference = policy.reference or size
    factor = policy.scale * lr_rule(policy.rule, reference, size)
    reached, ramp_steps = factor, 0
    if was or commit == 0:
        reached = factor_at(before, commit)
        ramp_steps = policy.warmup if factor != before.factor else _left_of_ramp(before, commit)
    after = Settings(
        number=before.number,
        global_batch=policy.global_batch,
        local_batch=policy.local_batch,
        logical_ranks=policy.logical_ranks,
        lr=policy.rule.value,
        reference=reference,
        size=size,
        scale=policy.scale,
        factor=factor,
        ramp_from=reached if ramp_steps else factor,
        ramp_begin=commit,
        ramp_steps=ramp_steps,
    )
    if workers == was and _means(after) == _means(before) and _same_course(before, commit):
        return before
    return replace(after, number=before.number + 1)


def lr_rule(rule: LrRule | str, reference: int, size: int) -> float:
    """Factor by which the LR follows the size; 1 for rules that only the workers can work out."""
    match LrRule(rule):
        case LrRule.LINEAR:
            return size / reference
        case LrRule.SQRT:
            return math.sqrt(size / reference)
        case LrRule.NONE | LrRule.ADASCALE | LrRule.USER:
            return 1.0


def factor_at(settings: Settings, commit: int) -> float:
    """LR factor of the step after this commit, as far as the Master prescribes it."""
    passed = commit - settings.ramp_begin
    if not settings.ramp_steps or passed >= settings.ramp_steps:
        return settings.factor
    way = max(0, passed) / settings.ramp_steps
    return settings.ramp_from + (settings.factor - settings.ramp_from) * way


def _left_of_ramp(settings: Settings, commit: int) -> int:
    return max(0, settings.ramp_steps - max(0, commit - settings.ramp_begin))


def _means(settings: Settings) -> Settings:
    """The same, without what only says since when and how far."""
    return replace(settings, number=0, ramp_from=0.0, ramp_begin=0, ramp_steps=0)


def _same_course(before: Settings, commit: int) -> bool:
    """Whether the ramp of earlier settings needs no new beginning: a world may begin before the commit of theirs."""
    return not before.ramp_steps or commit >= before.ramp_begin


# --- what the workers make of it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the samples of each step are taken by the workers of one world."""

    global_batch: int
    """Samples of a step over all workers."""
    local: tuple[int, ...]
    """Samples of a step of each rank; they add up to ``global_batch``."""
    micros: int
    """Micro-batches that every worker takes in a step, stand-ins included."""
    micro_batch: int
    """Samples of the largest of them."""
    logical_ranks: int = 0

    def sizes(self, rank: int) -> tuple[int, ...]:
        """Samples of each micro-batch of a rank; 0 for a stand-in."""
        if not self.logical_ranks:
            return split(self.local[rank], self.micros)
        each = self._micros_of_one
        one = split(self.global_batch // self.logical_ranks, each)
        sizes = one * len(self._logical(rank))
        return sizes + (0,) * (self.micros - len(sizes))

    def logical(self, rank: int) -> tuple[int, ...]:
        """Logical rank of each micro-batch of a rank; -1 for a stand-in, and where there are none."""
        each = self._micros_of_one
        ranks = tuple(one for one in self._logical(rank) for _ in range(each))
        return ranks + (-1,) * (self.micros - len(ranks))

    def offset(self, rank: int) -> int:
        """Samples of the step that belong to lower ranks."""
        return sum(self.local[:rank])

    @property
    def _micros_of_one(self) -> int:
        """Micro-batches of one logical rank."""
        return self.micros // math.ceil(self.logical_ranks / len(self.local)) if self.logical_ranks else 1

    def _logical(self, rank: int) -> range:
        """Logical ranks that live on a rank: neighbours, and never more than one less than on another rank."""
        counts = split(self.logical_ranks, len(self.local))
        first = sum(counts[:rank])
        return range(first, first + counts[rank])


def step_plan(settings: Settings, batch_size: int, workers: int) -> StepPlan:
    """The plan for a world of so many workers whose script has this batch size of its own (0: not known).

    Raises ``StateError`` when there is none.
    """
    if workers < 1:
        raise StateError(f"a world of {workers} workers has no steps")
    if batch_size < 0:
        raise StateError(f"batch_size={batch_size}: it must be at least 1")
    most = settings.local_batch or batch_size
    parts = settings.logical_ranks or workers
    if parts < workers:
        raise StateError(
            f"--logical-ranks={parts} cannot live on {workers} workers: each needs one. "
            f"Use at most {parts} workers, or more logical ranks"
        )
    total = settings.global_batch or most * parts
    if not total:
        raise StateError("the batch size is not known: give it here, or prescribe --global-batch or --local-batch")
    if settings.logical_ranks:
        return _logical_plan(total, most, settings.logical_ranks, workers)
    local = split(total, workers)
    most = min(most, local[0]) or local[0]
    micros = math.ceil(local[0] / most)
    return StepPlan(total, local, micros, math.ceil(local[0] / micros))


def _logical_plan(total: int, most: int, logical_ranks: int, workers: int) -> StepPlan:
    if total % logical_ranks:
        raise StateError(f"a step of {total} samples cannot be split evenly over {logical_ranks} logical ranks")
    one = total // logical_ranks
    each = math.ceil(one / (min(most, one) or one))
    counts = split(logical_ranks, workers)
    return StepPlan(
        total, tuple(count * one for count in counts), counts[0] * each, math.ceil(one / each), logical_ranks
    )


# --- in the environment ----------------------------------------------------------------------------------------------

NUMBER, GLOBAL_BATCH, LOCAL_BATCH, MICRO_BATCH, ACCUMULATION, LR_FACTOR, LOGICAL_RANKS = (
    "EDL_SETTINGS",
    "EDL_GLOBAL_BATCH",
    "EDL_LOCAL_BATCH",
    "EDL_MICRO_BATCH",
    "EDL_ACCUMULATION",
    "EDL_LR_FACTOR",
    "EDL_LOGICAL_RANKS",
)


def environment(settings: Settings, workers: int, rank: int) -> dict[str, str]:
    """What scripts read that know nothing of edl. Always all names, since a worker's environment changes in place;
    empty where nothing is prescribed. The LR factor is the one after the ramp: such scripts count no commits."""
    batches: dict[str, int | str]
    try:
        plan = step_plan(settings, 0, workers)
    except StateError:  # the script's own batch size decides
        batches = {GLOBAL_BATCH: settings.global_batch, LOCAL_BATCH: "", MICRO_BATCH: "", ACCUMULATION: 1}
    else:
        batches = {
            GLOBAL_BATCH: plan.global_batch,
            LOCAL_BATCH: plan.local[rank],
            MICRO_BATCH: plan.micro_batch if settings.local_batch else "",
            ACCUMULATION: plan.micros,
        }
    batches[GLOBAL_BATCH] = batches[GLOBAL_BATCH] or ""
    others = {NUMBER: settings.number, LOGICAL_RANKS: settings.logical_ranks or "", LR_FACTOR: settings.factor}
    return {name: str(value) for name, value in {**batches, **others}.items()}


def from_environment(variables: Mapping[str, str]) -> Settings:
    """The settings as far as ``environment`` tells them; ``NO_SETTINGS`` where nobody has set them."""

    def number(name: str) -> int:
        text = variables.get(name, "")
        return int(text) if text.isdecimal() else 0

    if not number(NUMBER):
        return NO_SETTINGS
    try:
        factor = float(variables.get(LR_FACTOR, "1"))
    except ValueError:
        factor = 1.0
    return Settings(
        number=number(NUMBER),
        global_batch=number(GLOBAL_BATCH),
        local_batch=number(MICRO_BATCH),
        logical_ranks=number(LOGICAL_RANKS),
        factor=factor,
        ramp_from=factor,
    )


def describe(settings: Settings) -> str:
    """In words, for the job's history and its status."""
    parts = []
    if settings.global_batch:
        parts.append(f"global batch {settings.global_batch}")
    if settings.local_batch:
        parts.append(f"local batch {settings.local_batch}")
    if settings.logical_ranks:
        parts.append(f"{settings.logical_ranks} logical ranks")
    measured = " times what the workers work out" if settings.lr in ("adascale", "user") else ""
    parts.append(f"LR factor {settings.factor:.6g}{measured} ({settings.lr})")
    if settings.ramp_steps:
        last = settings.ramp_begin + settings.ramp_steps
        parts[-1] += f", from {settings.ramp_from:.6g} until commit {last}"
    return ", ".join(parts)
