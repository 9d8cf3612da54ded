"""Detects workers that live but make no progress.

Progress means:

- A worker that has committed before (``edl.State``) must commit again; nothing else counts. Where workers commit, those
  that do not (another slot of a replicated state) are not watched.
- Where no worker commits, at least one of them must show a sign of life: use the CPU, write to stdout or stderr, read
  or write files, or complete a collective. A hang requires that none does, because one may work while the others wait
  for it.

A worker whose collectives are all those that it waited for at the last check waits by spinning, as NCCL does: the CPU
time that it uses is no sign of life. Workers that keep writing log lines do not hang.

The limit is ``--hang-timeout``, or learnt (``edl.agent.workers.hang_limit``). It is ``START`` times as long before a
round's first commit, and for plain scripts to start up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edl.agent.workers.hang_limit import LearntLimit, LimitLearner
from edl.config import Timeouts
from edl.ports import Activity
from edl.types import Round

START = 5
"""Factor on the limit for the start of a round: loading data and state, compiling."""
LOOKS = 10
"""Number of checks within the limit."""
SHORTEST_LOOK_S = 0.2
LONGEST_LOOK_S = 10.0
CPU_SHARE = 0.01
"""Share of one core below which a worker counts as idle. Monitoring threads, such as NCCL's or those of experiment
trackers, use less; a torch worker that waits in a gloo collective uses 0.002 to 0.004."""
CPU_GRAIN_S = 0.05
"""The kernel counts CPU time in hundredths of a second: this much may add up by chance."""
IO_BYTES_PER_S = 100_000
"""Rate below which I/O does not count; experiment trackers that sample the system stay below it."""
LATE = 3
"""A check delayed by this factor is void: this launcher itself was held up."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker's process and its output so far."""

    pid: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One worker at one moment."""

    pid: int
    commit: int | None
    """Newest commit; None if it has made none so far."""
    output_bytes: int = 0
    used: Activity | None = None
    """None if unknown."""
    waiting: str = ""
    """Identifies the collectives that it waits for; empty if it waits for none, or if that is unknown."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Workers of this node make no progress."""

    what: str
    """Who and how, for people."""
    for_s: float
    """Seconds without progress."""
    local_ranks: tuple[int, ...]
    limit_s: float
    learnt: LearntLimit | None = None
    """What the limit is learnt from; None: it is given."""
    lifeless: bool = True
    """No worker of the node has shown a sign of life for ``limit_s``."""
    waiting: bool = False
    """All workers of the node wait for collectives, so what their devices do is no sign of life either."""


@dataclass(slots=True)
class _Trail:
    """The progress of one worker in this round."""

    last: Sample
    at_s: float
    """Time of its last progress."""
    life_s: float
    """Time of its last sign of life."""
    committed: bool = False
    """It has committed in this round."""
    whole: bool = True
    """All checks since its last progress are valid, so that the pause can be learnt from."""
    cpu_s: float = 0.0
    """CPU seconds used since its last sign of life."""


class HangWatch:
    """The decision: samples in, a verdict out. No clock, no I/O.

    What it learns of pauses with commits and without is separate: a script that has just begun to commit was active all
    the time before.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._rule = timeouts.hang
        self._boundary_s = timeouts.boundary_s
        self.interval_s = min(max(self._rule.seconds / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        """Intended seconds between two checks."""
        self._commits = LimitLearner(self._rule.seconds)
        self._signs = LimitLearner(self._rule.seconds)
        self._round = Round(0)
        self._began_s = 0.0
        self._hold = 0
        self._looked_s: float | None = None
        self._trails: dict[int, _Trail] = {}
        self._committing = False

    @property
    def given(self) -> bool:
        """Whether the limit is given, not learnt."""
        return not self._rule.auto

    @property
    def learnt(self) -> LearntLimit:
        """What is learnt of the kind of progress that counts for these workers."""
        return (self._commits if self._committing else self._signs).learnt

    def excuse(self) -> None:
        """Void the last sample because another rule applies at the moment."""
        self._looked_s = None

    def absorb(self, samples: Mapping[int, Sample], now_s: float) -> None:
        """Take new samples without judging them: what the workers did since the last check was done for a diagnosis."""
        self._looked_s = now_s
        for rank, sample in samples.items():
            trail = self._trails.get(rank)
            if trail is not None and (trail.last.pid, trail.last.commit) == (sample.pid, sample.commit):
                trail.last = sample

    def look(self, round: Round, samples: Mapping[int, Sample], now_s: float, hold: int = 0) -> HangVerdict | None:
        """Check the workers of this round, by local rank; returns what hangs and how, or None.

        ``hold``: number of the current agreement on a step boundary, at which workers may have to wait.
        """
        if round != self._round:
            self._round, self._began_s = round, now_s
            self._trails.clear()
        elapsed_s = now_s - self._looked_s if self._looked_s is not None else float("inf")
        void = elapsed_s > LATE * self.interval_s or hold != self._hold
        self._looked_s, self._hold = now_s, hold
        for rank in self._trails.keys() - samples.keys():
            del self._trails[rank]
        before_s = max((trail.life_s for trail in self._trails.values()), default=now_s)
        pauses = [self._follow(rank, sample, now_s, elapsed_s, void) for rank, sample in samples.items()]
        self._committing = any(trail.last.commit is not None for trail in self._trails.values())
        if self._committing and max(pauses, default=0.0) > 0:
            self._commits.paused(max(pauses))
        elif not void and any(trail.life_s == now_s for trail in self._trails.values()) and now_s > before_s:
            self._signs.paused(now_s - before_s)
        return self._verdict(now_s)

    def _follow(self, rank: int, sample: Sample, now_s: float, elapsed_s: float, void: bool) -> float:
        """Update one worker's trail; returns the pause that a commit has ended, 0 if there is none to learn from."""
        trail = self._trails.get(rank)
        if trail is None or trail.last.pid != sample.pid:
            self._trails[rank] = _Trail(sample, now_s, now_s)
            return 0.0
        committed = sample.commit != trail.last.commit and sample.commit is not None
        pause_s = 0.0
        if committed and trail.whole and not void:
            if trail.committed:
                pause_s = now_s - trail.at_s
            else:
                self._commits.started(now_s - self._began_s)
        trail.committed |= committed
        alive = _is_active(trail, sample, now_s, elapsed_s)
        if alive or void or committed:
            trail.life_s, trail.cpu_s = now_s, 0.0
        if committed or void or (alive and sample.commit is None):
            trail.at_s = now_s
        trail.whole = not void and (committed or trail.whole)
        trail.last = sample
        return pause_s

    def _verdict(self, now_s: float) -> HangVerdict | None:
        committing = {rank: trail for rank, trail in self._trails.items() if trail.last.commit is not None}
        for first in (False, True):
            late = {rank: t for rank, t in committing.items() if t.committed is not first}
            limit_s = self._limit_s(self._commits, first)
            stuck = sorted(rank for rank, trail in late.items() if now_s - trail.at_s >= limit_s)
            if stuck:
                waited_s = now_s - max(late[rank].at_s for rank in stuck)
                what = "no commit() since the round began," if first else "no commit()"
                return self._hang(f"{_names(stuck)}: {what} for {waited_s:.0f} s", waited_s, stuck, limit_s, now_s)
        if committing or not self._trails or now_s - self._began_s < self._limit_s(self._signs, first=True):
            return None
        quiet_s = now_s - max(trail.at_s for trail in self._trails.values())
        limit_s = self._limit_s(self._signs)
        if quiet_s < limit_s:
            return None
        ranks = sorted(self._trails)
        waits = self._all_wait()
        how = "the same collectives pending" if waits else "no CPU time used"
        what = f"{_names(ranks)}: {how}, nothing written and no file read for {quiet_s:.0f} s"
        return self._hang(what, quiet_s, ranks, limit_s, now_s)

    def _hang(self, what: str, for_s: float, ranks: Collection[int], limit_s: float, now_s: float) -> HangVerdict:
        usual_s = self._limit_s(self._commits if self._committing else self._signs)
        dead = now_s - max(trail.life_s for trail in self._trails.values()) >= min(limit_s, usual_s)
        learnt = self.learnt if self._rule.auto else None
        return HangVerdict(what, for_s, tuple(ranks), limit_s, learnt, dead, self._all_wait())

    def _all_wait(self) -> bool:
        return all(trail.last.waiting for trail in self._trails.values())

    def _limit_s(self, learner: LimitLearner, first: bool = False) -> float:
        """The limit; infinite while it is not known. ``first``: for the first progress in a round."""
        if self._rule.auto:
            limit_s = learner.start_limit_s(START) if first else learner.learnt.limit_s
        else:
            limit_s = self._rule.seconds * (START if first else 1)
        return (limit_s or float("inf")) + (self._boundary_s if self._hold else 0.0)


def _is_active(trail: _Trail, now: Sample, now_s: float, elapsed_s: float) -> bool:
    """Whether a worker has made notable use of CPU or I/O since the last check, or in total since it last did, or has
    completed a collective."""
    before = trail.last
    if now.output_bytes != before.output_bytes or before.used is None or now.used is None:
        return True  # unknown counts as active
    if now.used.io_bytes - before.used.io_bytes >= IO_BYTES_PER_S * elapsed_s:
        return True
    if now.waiting != before.waiting:
        return True
    if now.waiting:
        return False  # it may spin
    cpu_s = max(0.0, now.used.cpu_s - before.used.cpu_s)
    trail.cpu_s += cpu_s
    return _is_work(cpu_s, elapsed_s) or _is_work(trail.cpu_s, now_s - trail.life_s)


def _is_work(cpu_s: float, within_s: float) -> bool:
    return cpu_s >= CPU_GRAIN_S + CPU_SHARE * within_s


def _names(ranks: Collection[int]) -> str:
    return f"local rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
