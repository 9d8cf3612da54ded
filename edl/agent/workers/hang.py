"""Finding workers that live and get nowhere.

What counts as progress:

- A worker that has been seen to commit (``edl.State``) has to commit again: whatever else it does is not looked at.
  Where workers commit, those that do not (another slot of a replicated state) are not looked at either.
- Where no worker commits, one of them has to use the processor, to write to its standard output or error, or to read
  or write files. All of them must be quiet for a hang, because one may work while the others wait for it.

So no script is taken for hanging that computes in silence, and two hangs are not found in plain scripts: one that waits
by spinning (NCCL does, and a CUDA synchronisation) and one that goes on to write log lines. The frameworks' own limits
for collectives end the first kind.

A round has ``START`` times as long before its first commit, and for its plain scripts to come up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from edl.agent.machine.events import Event, Report
from edl.agent.machine.state import AgentPhase, AgentState
from edl.config import Timeouts
from edl.ports import Activity
from edl.types import Round
from edl.wire.messages import Hanging

START = 5
"""How many times ``--hang-timeout`` the beginning of a round may take: loading data and state, compiling."""
LOOKS = 10
"""Looks within ``--hang-timeout``."""
SHORTEST_LOOK_S = 0.2
LONGEST_LOOK_S = 10.0
CPU_SHARE = 0.01
"""Of one core. Less than that is used by threads that only watch, as NCCL's and those of trackers do; a worker of torch
that waits in a collective of gloo uses 0.002 to 0.004."""
CPU_GRAIN_S = 0.05
"""The kernel counts in hundredths of a second: so much may come together by chance."""
IO_BYTES_PER_S = 100_000
"""Less than that is used by trackers that look at the system."""
LATE = 3
"""Looks so many times as far apart as meant say nothing: this launcher itself was held up."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker's process and how much it has written."""

    pid: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One worker at one moment."""

    pid: int
    commit: int | None
    """Newest commit, None if it has not been seen to make any."""
    output_bytes: int = 0
    used: Activity | None = None
    """None if nobody can tell."""


@dataclass(slots=True)
class _Trail:
    """What is known of one worker in this round."""

    last: Sample
    at_s: float
    """When it last got on."""
    committed: bool = False
    """In this round."""
    cpu_s: float = 0.0
    """Processor time used since then."""


class HangWatch:
    """The judgement: samples in, a verdict out. No clock, no IO."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._limit_s = timeouts.hang_s
        self._boundary_s = timeouts.boundary_s
        self.interval_s = min(max(timeouts.hang_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        """How far apart looks are meant to be."""
        self._round = Round(0)
        self._began_s = 0.0
        self._hold = 0
        self._looked_s: float | None = None
        self._trails: dict[int, _Trail] = {}

    def excuse(self) -> None:
        """Something else is going on, for which there are other rules: what has been seen is void."""
        self._looked_s = None

    def look(self, round: Round, samples: Mapping[int, Sample], now_s: float, hold: int = 0) -> str:
        """Take the workers of this round, by local rank, as they are now; returns what hangs and how, or nothing.

        ``hold``: number of the agreement on a step boundary under way, at which workers may have to wait.
        """
        if round != self._round:
            self._round, self._began_s = round, now_s
            self._trails.clear()
        elapsed_s = now_s - self._looked_s if self._looked_s is not None else float("inf")
        void = elapsed_s > LATE * self.interval_s or hold != self._hold
        self._looked_s, self._hold = now_s, hold
        for rank in self._trails.keys() - samples.keys():
            del self._trails[rank]
        for rank, sample in samples.items():
            self._follow(rank, sample, now_s, elapsed_s, void)
        return self._verdict(now_s)

    def _follow(self, rank: int, sample: Sample, now_s: float, elapsed_s: float, void: bool) -> None:
        trail = self._trails.get(rank)
        if trail is None or trail.last.pid != sample.pid:
            self._trails[rank] = _Trail(sample, now_s)
            return
        committed = sample.commit != trail.last.commit
        trail.committed |= committed and sample.commit is not None
        alive = sample.commit is None and _is_active(trail, sample, now_s, elapsed_s)
        if committed or alive or void:
            trail.at_s, trail.cpu_s = now_s, 0.0
        trail.last = sample

    def _verdict(self, now_s: float) -> str:
        committing = {rank: trail for rank, trail in self._trails.items() if trail.last.commit is not None}
        for first in (False, True):
            late = {rank: t for rank, t in committing.items() if t.committed is not first}
            limit_s = self._patience_s(START if first else 1)
            stuck = sorted(rank for rank, trail in late.items() if now_s - trail.at_s >= limit_s)
            if stuck:
                waited_s = now_s - max(late[rank].at_s for rank in stuck)
                what = "no commit() since the round began," if first else "no commit()"
                return f"{_names(stuck)}: {what} for {waited_s:.0f} s"
        if committing or not self._trails or now_s - self._began_s < self._patience_s(START):
            return ""
        quiet_s = now_s - max(trail.at_s for trail in self._trails.values())
        if quiet_s < self._patience_s(1):
            return ""
        ranks = _names(sorted(self._trails))
        return f"{ranks}: no CPU time used, nothing written and no file read for {quiet_s:.0f} s"

    def _patience_s(self, times: int) -> float:
        return times * self._limit_s + (self._boundary_s if self._hold else 0.0)


def _is_active(trail: _Trail, now: Sample, now_s: float, elapsed_s: float) -> bool:
    """Whether a worker has done anything worth mentioning since the last look, or bit by bit since it last did."""
    before = trail.last
    if now.output_bytes != before.output_bytes or before.used is None or now.used is None:
        return True  # where nobody can tell, nobody is accused
    if now.used.io_bytes - before.used.io_bytes >= IO_BYTES_PER_S * elapsed_s:
        return True
    cpu_s = max(0.0, now.used.cpu_s - before.used.cpu_s)
    trail.cpu_s += cpu_s
    return _is_work(cpu_s, elapsed_s) or _is_work(trail.cpu_s, now_s - trail.at_s)


def _is_work(cpu_s: float, within_s: float) -> bool:
    return cpu_s >= CPU_GRAIN_S + CPU_SHARE * within_s


def _names(ranks: Collection[int]) -> str:
    return f"local rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


async def watch(
    judge: HangWatch,
    state: Callable[[], AgentState],
    workers: Callable[[], Mapping[int, Watched]],
    progress: Mapping[int, int],
    activity: Callable[[Collection[int]], Mapping[int, Activity]],
    now_s: Callable[[], float],
    post: Callable[[Event], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Look at the workers for ever and report those that hang. ``workers`` and ``progress`` are by slot. ``activity``
    blocks and is called in a thread.

    A verdict is repeated with each look until the round ends: the Master may not have been in reach.
    """
    while True:
        await pause(judge.interval_s)
        if _excused(state()):
            judge.excuse()
            continue
        pids = {slot: worker.pid for slot, worker in workers().items()}
        used = await asyncio.to_thread(activity, tuple(pids.values()))
        now = state()  # time has passed
        if _excused(now):
            judge.excuse()
            continue
        ranks = {worker.slot: worker.local_rank for worker in now.in_world}
        samples = {
            ranks[slot]: Sample(worker.pid, progress.get(slot), worker.output_bytes, used.get(worker.pid))
            for slot, worker in workers().items()
            if slot in ranks
        }
        what = judge.look(now.running_round, samples, now_s(), now.hold)
        if what:
            post(Report(Hanging(now.running_round, what)))


def _excused(state: AgentState) -> bool:
    """No world runs here, or it is known why it does not get on: a worker is frozen, or has just been killed."""
    odd = any(worker.frozen_since_s is not None or worker.condemned for worker in state.in_world)
    return state.phase is not AgentPhase.RUNNING or odd or not state.in_world
