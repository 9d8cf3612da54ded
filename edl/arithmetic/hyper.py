"""Batch sizes, gradient accumulation and LR factors from a policy and the world size. Pure, and the same on all
workers.

A *step* is what lies between two commits. Its samples are split over the workers, and each worker's part into
micro-batches that it processes one after another. All workers take the same number of micro-batches, so that their
collectives match. Where the parts are uneven, some micro-batches are smaller, or empty padding. The gradient of a
micro-batch's mean loss is weighted by its share of the step's samples, so the sum is the gradient of the mean over the
whole step, however it was split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from edl.arithmetic.plan import split
from edl.config import HyperPolicy, LrRule
from edl.errors import StateError
from edl.wire.records import NO_SETTINGS, Settings

# --- what the Master prescribes --------------------------------------------------------------------------------------


def settle(policy: HyperPolicy, before: Settings, workers: int, commit: int, was: int = 0) -> Settings:
    """The settings from ``commit`` on, in a world of ``workers`` workers.

    ``before``: the settings until then, with ``was`` workers; 0 workers if unknown, as in a job that was started again
    from its checkpoints. Returns ``before`` itself when nothing changes; otherwise the settings' number increases. A
    new factor is ramped up over ``policy.warmup`` commits from the value reached so far; if the previous value is
    unknown, it applies at once.
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
        number=before.number + 1,
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
    return after


def lr_rule(rule: LrRule | str, reference: int, size: int) -> float:
    """The factor by which the learning rate follows the size; 1 for rules that only the workers can evaluate."""
    match LrRule(rule):
        case LrRule.LINEAR:
            return size / reference
        case LrRule.SQRT:
            return math.sqrt(size / reference)
        case LrRule.NONE | LrRule.ADASCALE | LrRule.USER:
            return 1.0


def factor_at(settings: Settings, commit: int) -> float:
    """The prescribed LR factor of the step after this commit, ramp included."""
    passed = commit - settings.ramp_begin
    if not settings.ramp_steps or passed >= settings.ramp_steps:
        return settings.factor
    way = max(0, passed) / settings.ramp_steps
    return settings.ramp_from + (settings.factor - settings.ramp_from) * way


def _left_of_ramp(settings: Settings, commit: int) -> int:
    return max(0, settings.ramp_steps - max(0, commit - settings.ramp_begin))


def _means(settings: Settings) -> Settings:
    """A copy without number and ramp, for comparing what two settings prescribe."""
    return replace(settings, number=0, ramp_from=0.0, ramp_begin=0, ramp_steps=0)


def _same_course(before: Settings, commit: int) -> bool:
    """Whether the earlier ramp can be kept. It cannot if this world begins at a commit before the ramp's."""
    return not before.ramp_steps or commit >= before.ramp_begin


# --- what the workers make of it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the workers of one world divide the samples of each step."""

    global_batch: int
    """Samples per step over all workers."""
    local: tuple[int, ...]
    """Samples per step for each rank; they add up to ``global_batch``."""
    micros: int
    """Micro-batches per step and worker, padding included."""
    micro_batch: int
    """Samples in the largest micro-batch."""
    logical_ranks: int = 0

    def sizes(self, rank: int) -> tuple[int, ...]:
        """The number of samples in each micro-batch of a rank; 0 for padding."""
        if not self.logical_ranks:
            return split(self.local[rank], self.micros)
        each = self._micros_of_one
        one = split(self.global_batch // self.logical_ranks, each)
        sizes = one * len(self._logical(rank))
        return sizes + (0,) * (self.micros - len(sizes))

    def logical(self, rank: int) -> tuple[int, ...]:
        """The logical rank of each micro-batch of a rank; -1 for padding, and where there are no logical ranks."""
        each = self._micros_of_one
        ranks = tuple(one for one in self._logical(rank) for _ in range(each))
        return ranks + (-1,) * (self.micros - len(ranks))

    def offset(self, rank: int) -> int:
        """The number of samples of a step that belong to lower ranks."""
        return sum(self.local[:rank])

    @property
    def _micros_of_one(self) -> int:
        """Micro-batches per logical rank and step; 1 without logical ranks."""
        return self.micros // math.ceil(self.logical_ranks / len(self.local)) if self.logical_ranks else 1

    def _logical(self, rank: int) -> range:
        """The logical ranks on a rank: consecutive, and on any two ranks their numbers differ by at most one."""
        counts = split(self.logical_ranks, len(self.local))
        first = sum(counts[:rank])
        return range(first, first + counts[rank])


def step_plan(settings: Settings, batch_size: int, workers: int) -> StepPlan:
    """The plan for a world of ``workers`` workers; ``batch_size`` is the script's own batch size, 0 if unknown.

    Raises ``StateError`` when the settings, the batch size and the number of workers do not fit together.
    """
    if workers < 1:
        raise StateError(f"a world of {workers} workers has no steps")
    if batch_size < 0:
        raise StateError(f"batch_size={batch_size}: it must be at least 1")
    most = settings.local_batch or batch_size
    parts = settings.logical_ranks or workers
    if parts < workers:
        raise StateError(
            f"--logical-ranks={parts} cannot be placed on {workers} workers: each needs one. "
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
    """The settings as variables for scripts that do not use edl. All names are always present, since a worker's
    environment is updated in place; the value is empty where nothing is prescribed. The LR factor is the one after the
    ramp, because such scripts do not count commits."""
    batches: dict[str, int | str]
    try:
        plan = step_plan(settings, 0, workers)
    except StateError:  # the script's own batch size applies
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
    """The settings that ``environment`` wrote; ``NO_SETTINGS`` where it wrote none."""

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
    """The settings as a short text for the job's history and status."""
    parts = []
    if settings.global_batch:
        parts.append(f"global batch {settings.global_batch}")
    if settings.local_batch:
        parts.append(f"local batch {settings.local_batch}")
    if settings.logical_ranks:
        parts.append(f"{settings.logical_ranks} logical ranks")
    measured = " times the workers' own factor" if settings.lr in ("adascale", "user") else ""
    rule = "no rule" if settings.lr == "none" else settings.lr
    parts.append(f"LR factor {settings.factor:.6g}{measured} ({rule})")
    if settings.ramp_steps:
        last = settings.ramp_begin + settings.ramp_steps
        parts[-1] += f", from {settings.ramp_from:.6g} until commit {last}"
    return ", ".join(parts)
