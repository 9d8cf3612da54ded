"""Commits and checkpoints within a simulated history: which training counted, and what saving cost.

The Master's decisions do not depend on when checkpoints are written, so one history serves every interval. All times
are integers, in nanoseconds. Time only moves from one use to another: the sum stays what the Master has counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.errors import SettingError
from edl.master.goodput.slot_times import NS
from edl.master.goodput.slot_use import SlotUse
from edl.simulate.history import RestoredFrom, SimulatedHistory, TrainingSpell, slowness


@dataclass(frozen=True, slots=True)
class SavingRules:
    """How often the job commits and writes checkpoints, and what that costs. Intervals count training time without
    these costs, at the usual pace."""

    step_s: float = 1.0
    commit_steps: int = 1
    """Steps from one commit in memory to the next; 0: none, only checkpoints."""
    commit_s: float = 0.0
    """Seconds for which a commit blocks training."""
    checkpoint_s: float = 1800.0
    """Seconds of training from one checkpoint to the next; 0: none is written."""
    blocks_s: float = 0.0
    """Seconds for which a checkpoint blocks training."""
    write_s: float = 60.0
    """Seconds until a checkpoint is complete, in the background. None begins before the last one is."""
    checkpoint_bytes: int = 0
    """Size of a checkpoint."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--step", self.step_s, 1e-6),
            ("--commit-blocks", self.commit_s, 0.0),
            ("--checkpoint-every", self.checkpoint_s, 0.0),
            ("--checkpoint-blocks", self.blocks_s, 0.0),
            ("--checkpoint-write", self.write_s, 0.0),
        ):
            if not least <= value < math.inf:
                raise SettingError(name, f"{value:g}", f"must be {least:g} s or more")
        if self.commit_steps < 0:
            raise SettingError("--commit-every", self.commit_steps, "must be 0 or more", "0: no commits in memory")
        if self.checkpoint_s and self.checkpoint_s < self.step_s:
            raise SettingError("--checkpoint-every", f"{self.checkpoint_s:g}", f"a step takes {self.step_s:g} s")


@dataclass(frozen=True, slots=True)
class SimulatedAccount:
    """What the slots did, in slot-nanoseconds of the Master's slots, with what saving changes about it."""

    duration_ns: int
    nodes: int
    amounts: Mapping[SlotUse, int]
    repair_ns: int
    slowed_ns: int
    """Part of ``useful``: what stragglers made longer."""
    stalled_ns: int
    """Part of ``redone``: waiting for a lost member until the Master knew. The Master's accounts count it so, too."""
    lost_steps: int
    """Steps of the job that were made and then repeated."""
    rollbacks: Mapping[RestoredFrom, int] = field(default_factory=dict)
    checkpoints: int = 0
    skipped: int = 0
    """Checkpoints that were not begun, because the one before was not complete."""
    writing_ns: int = 0
    """Time during which a checkpoint was being written."""

    @property
    def total_ns(self) -> int:
        """All slot time of the cluster: that of the job, and of nodes under repair."""
        return sum(self.amounts.values()) + self.repair_ns

    @property
    def goodput(self) -> float:
        """Share of the job's slot time that is useful, as ``edl status`` shows it."""
        whole = sum(self.amounts.values())
        return self.amounts.get(SlotUse.USEFUL, 0) / whole if whole else 0.0

    @property
    def running(self) -> float:
        """Share of the time of slots with a place in a world during which these made steps, or saved."""
        busy = sum(self.amounts.values()) - self.amounts.get(SlotUse.IDLE, 0)
        made = (SlotUse.USEFUL, SlotUse.REDONE, SlotUse.COMMIT)
        return (sum(self.amounts.get(use, 0) for use in made) - self.stalled_ns) / busy if busy else 0.0

    @property
    def effective(self) -> float:
        """Share of the same time that is useful."""
        busy = sum(self.amounts.values()) - self.amounts.get(SlotUse.IDLE, 0)
        return self.amounts.get(SlotUse.USEFUL, 0) / busy if busy else 0.0

    @property
    def of_cluster(self) -> float:
        """Share of all slot time of the cluster, repairs included, that is useful at the usual pace."""
        useful = self.amounts.get(SlotUse.USEFUL, 0) - self.slowed_ns
        return useful / self.total_ns if self.total_ns else 0.0


def account(history: SimulatedHistory, rules: SavingRules) -> SimulatedAccount:
    """Split what the Master counted as training into what counted, what was repeated, and what saving took."""
    work = _Work(history, rules)
    before: TrainingSpell | None = None
    for spell in history.spells:
        if before is not None:
            work.restore(spell.restored, before)
        work.train(spell)
        before = spell
    amounts = {**history.uses}
    amounts[SlotUse.COMMIT] = amounts.get(SlotUse.COMMIT, 0) + work.commit_ns
    amounts[SlotUse.REDONE] = work.redone_ns
    amounts[SlotUse.USEFUL] = history.training_ns - work.commit_ns - work.redone_ns
    return SimulatedAccount(
        history.duration_ns,
        history.nodes,
        amounts,
        history.repair_ns,
        sum(one.slowed_ns for one in work.pieces),
        work.stalled_ns,
        work.lost_work_ns // work.step_ns,
        work.rollbacks,
        work.checkpoints,
        work.skipped,
        work.writing_ns,
    )


@dataclass(slots=True)
class _CountedTraining:
    """Training of one world that still counts."""

    work_ns: int
    """Duration at the usual pace."""
    slots_ns: int
    slowed_ns: int


@dataclass(slots=True)
class _Write:
    """A checkpoint on its way."""

    work_ns: int
    done_ns: int


class _Work:
    """Position of the training, in nanoseconds of training at the usual pace, and where it can return to."""

    def __init__(self, history: SimulatedHistory, rules: SavingRules) -> None:
        self.step_ns = round(rules.step_s * NS)
        self._rules, self._slow = rules, history.slow_storage
        self._cycle_ns = rules.commit_steps * self.step_ns
        self._commit_ns = round(rules.commit_s * NS) if self._cycle_ns else 0
        self._every_ns = round(rules.checkpoint_s / rules.step_s) * self.step_ns
        self._blocks_ns = round(rules.blocks_s * NS)
        self.pieces: list[_CountedTraining] = []
        self.at_ns = 0
        self._memory_ns = 0
        self._next_save_ns = self._every_ns or None
        self._writes: list[_Write] = [_Write(0, 0)]
        self.commit_ns = self.redone_ns = self.stalled_ns = self.lost_work_ns = 0
        self.checkpoints = self.skipped = self.writing_ns = 0
        self.rollbacks: dict[RestoredFrom, int] = dict.fromkeys(RestoredFrom, 0)

    def restore(self, source: RestoredFrom, before: TrainingSpell) -> None:
        """Return to where the next world begins. ``before``: the spell that has ended."""
        if before.planned and source is RestoredFrom.MEMORY:
            return
        self.rollbacks[source] += 1
        there = {RestoredFrom.MEMORY: self._memory_ns, RestoredFrom.SCRATCH: 0}
        complete = [one.work_ns for one in self._writes if one.done_ns <= before.halted_ns]
        self._return_to(min(self.at_ns, there.get(source, max(complete, default=0))))

    def _return_to(self, work_ns: int) -> None:
        lost = self.at_ns - work_ns
        self.lost_work_ns += lost
        while lost and self.pieces:
            last = self.pieces[-1]
            part = min(lost, last.work_ns)
            slots_ns = last.slots_ns if part == last.work_ns else last.slots_ns * part // last.work_ns
            slowed_ns = last.slowed_ns if part == last.work_ns else last.slowed_ns * part // last.work_ns
            self.redone_ns += slots_ns
            last.work_ns -= part
            last.slots_ns -= slots_ns
            last.slowed_ns -= slowed_ns
            lost -= part
            if not last.work_ns:
                self.pieces.pop()
        self.at_ns = work_ns
        self._memory_ns = min(self._memory_ns, work_ns)
        self._writes = [one for one in self._writes if one.work_ns <= work_ns] or [_Write(0, 0)]
        if self._every_ns:
            self._next_save_ns = max(self._writes[-1].work_ns + self._every_ns, work_ns + self.step_ns)

    def train(self, spell: TrainingSpell) -> None:
        """Take in a spell of training."""
        cuts = [at for at, _ in spell.paces if spell.begin_ns < at < spell.halted_ns]
        begins, ends = [spell.begin_ns, *cuts], [*cuts, spell.halted_ns]
        for begin_ns, end_ns in zip(begins, ends, strict=True):
            pace = next((factor for at, factor in reversed(spell.paces) if at <= begin_ns), 1.0)
            self._train(begin_ns, end_ns, spell.slots, pace)
        if spell.planned:
            self._memory_ns = self.at_ns
        stalled_ns = (spell.end_ns - spell.halted_ns) * spell.slots - spell.spoilt_ns
        self.stalled_ns += stalled_ns
        self.redone_ns += stalled_ns

    def _train(self, now_ns: int, end_ns: int, slots: int, pace: float) -> None:
        while now_ns < end_ns:
            used_ns = self._advance(end_ns - now_ns, slots, pace)
            now_ns += used_ns
            if self._next_save_ns is not None and self.at_ns >= self._next_save_ns:
                now_ns += self._save(now_ns, end_ns, slots)

    def _advance(self, left_ns: int, slots: int, pace: float) -> int:
        """Train until the next checkpoint is due, or for ``left_ns``; returns the time that it took."""
        due = self._next_save_ns - self.at_ns if self._next_save_ns is not None else None
        cycle, commit = self._cycle_ns, self._commit_ns
        used = 0
        if cycle and commit:
            # Whole cycles of training and a commit, then a part of one.
            first = min(cycle - self.at_ns % cycle, due) if due is not None else cycle - self.at_ns % cycle
            used += self._step(min(left_ns, _longer(first, pace)), first, slots, pace)
            if used < _longer(first, pace):
                return used
            if self.at_ns % cycle == 0:
                used += self._block(min(commit, left_ns - used), slots)
            whole = (left_ns - used) // (_longer(cycle, pace) + commit)
            whole = whole if due is None else min(whole, max(0, due - first) // cycle)
            if whole > 0 and self.at_ns % cycle == 0:
                self._step(whole * _longer(cycle, pace), whole * cycle, slots, pace)
                self._block(whole * commit, slots)
                used += whole * (_longer(cycle, pace) + commit)
            return used
        most = _longer(due, pace) if due is not None else left_ns
        took = min(left_ns, most)
        work = due if due is not None and took == most else int(took / pace)
        return self._step(took, work, slots, pace)

    def _step(self, took_ns: int, work_ns: int, slots: int, pace: float) -> int:
        """Train for ``took_ns``, for at most ``work_ns`` of work."""
        work_ns = min(work_ns, int(took_ns / pace)) if took_ns < _longer(work_ns, pace) else work_ns
        self.at_ns += work_ns
        self.pieces.append(_CountedTraining(work_ns, took_ns * slots, max(0, took_ns - work_ns) * slots))
        if self._cycle_ns:
            self._memory_ns = max(self._memory_ns, self.at_ns - self.at_ns % self._cycle_ns)
        return took_ns

    def _block(self, took_ns: int, slots: int) -> int:
        self.commit_ns += took_ns * slots
        return took_ns

    def _save(self, now_ns: int, end_ns: int, slots: int) -> int:
        """A checkpoint is due; returns the time for which it blocks training."""
        self._next_save_ns = (self._next_save_ns or 0) + self._every_ns
        if self._writes and self._writes[-1].done_ns > now_ns:
            self.skipped += 1
            return 0
        blocked_ns = min(self._blocks_ns, end_ns - now_ns)
        begun_ns = now_ns + blocked_ns
        self._block(blocked_ns, slots)
        if blocked_ns == self._blocks_ns:
            write_ns = round(self._rules.write_s * NS * slowness(self._slow, now_ns))
            self._writes = [self._writes[-1], _Write(self.at_ns, begun_ns + write_ns)]
            self.checkpoints += 1
            self.writing_ns += self._blocks_ns + write_ns
            self._memory_ns = self.at_ns
        return blocked_ns


def _longer(work_ns: int, pace: float) -> int:
    """Time that work takes at a pace."""
    return work_ns if pace == 1.0 else math.ceil(work_ns * pace)
