"""Detects workers that live but make no progress.

Progress means:

- A worker that has committed before (``edl.State``) must commit again; nothing else counts. Where workers commit, those
  that do not (another slot of a replicated state) are not watched.
- Where no worker commits, at least one of them must use the CPU, write to stdout or stderr, or read or write files. A
  hang requires all of them to be idle, because one may work while the others wait for it.

So a script that computes silently is not taken for hanging. Two kinds of hangs are not detected in plain scripts:
waiting by spinning (as NCCL and CUDA synchronisation do), and workers that keep writing log lines. The frameworks' own
timeouts for collectives end the first kind.

The limit is ``START`` times as long before a round's first commit, and for plain scripts to start up.
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
"""Factor on ``--hang-timeout`` for the start of a round: loading data and state, compiling."""
LOOKS = 10
"""Number of checks within ``--hang-timeout``."""
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


@dataclass(slots=True)
class _Trail:
    """The progress of one worker in this round."""

    last: Sample
    at_s: float
    """Time of its last progress."""
    committed: bool = False
    """It has committed in this round."""
    cpu_s: float = 0.0
    """CPU seconds used since its last progress."""


class HangWatch:
    """The decision: samples in, a verdict out. No clock, no I/O."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._limit_s = timeouts.hang_s
        self._boundary_s = timeouts.boundary_s
        self.interval_s = min(max(timeouts.hang_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        """Intended seconds between two checks."""
        self._round = Round(0)
        self._began_s = 0.0
        self._hold = 0
        self._looked_s: float | None = None
        self._trails: dict[int, _Trail] = {}

    def excuse(self) -> None:
        """Void the last sample because another rule applies at the moment."""
        self._looked_s = None

    def look(self, round: Round, samples: Mapping[int, Sample], now_s: float, hold: int = 0) -> str:
        """Check the workers of this round, by local rank; returns what hangs and how, or "".

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
            limit_s = self._timeout_s(START if first else 1)
            stuck = sorted(rank for rank, trail in late.items() if now_s - trail.at_s >= limit_s)
            if stuck:
                waited_s = now_s - max(late[rank].at_s for rank in stuck)
                what = "no commit() since the round began," if first else "no commit()"
                return f"{_names(stuck)}: {what} for {waited_s:.0f} s"
        if committing or not self._trails or now_s - self._began_s < self._timeout_s(START):
            return ""
        quiet_s = now_s - max(trail.at_s for trail in self._trails.values())
        if quiet_s < self._timeout_s(1):
            return ""
        ranks = _names(sorted(self._trails))
        return f"{ranks}: no CPU time used, nothing written and no file read for {quiet_s:.0f} s"

    def _timeout_s(self, times: int) -> float:
        return times * self._limit_s + (self._boundary_s if self._hold else 0.0)


def _is_active(trail: _Trail, now: Sample, now_s: float, elapsed_s: float) -> bool:
    """Whether a worker has made notable use of CPU or I/O since the last check, or in total since it last did."""
    before = trail.last
    if now.output_bytes != before.output_bytes or before.used is None or now.used is None:
        return True  # unknown counts as active
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
    """Check the workers until cancelled, and report those that hang. ``workers`` and ``progress`` are by slot.
    ``activity`` blocks and is called in a thread.

    A verdict is repeated at each check until the round ends, because the Master may have been unreachable.
    """
    while True:
        await pause(judge.interval_s)
        if _excused(state()):
            judge.excuse()
            continue
        pids = {slot: worker.pid for slot, worker in workers().items()}
        used = await asyncio.to_thread(activity, tuple(pids.values()))
        now = state()  # state may have changed meanwhile
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
    """Whether checks are pointless: no world runs here, or a worker is known to be frozen or has just been killed."""
    odd = any(worker.frozen_since_s is not None or worker.condemned for worker in state.in_world)
    return state.phase is not AgentPhase.RUNNING or odd or not state.in_world
