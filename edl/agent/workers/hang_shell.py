"""Looks at the workers of a node, and reports those that hang: the shell around ``HangWatch``.

With a given limit a hang is reported to the Master, which restarts the round. With a learnt limit nobody has asked for
that, so the first report is an alarm; the Master hears only of a node on which no worker shows a sign of life, and
restarts the round when the same is true of all nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from edl.agent.machine.events import Event, HangLimitChanged, Report, Suspected
from edl.agent.machine.state import AgentPhase, AgentState
from edl.agent.workers import hang_report
from edl.agent.workers.hang import HangVerdict, HangWatch, Sample, Watched
from edl.agent.workers.hang_limit import NEEDED
from edl.ports import Activity
from edl.types import Round
from edl.wire.alarm import Alarm
from edl.wire.collective_wait import CollectiveWait
from edl.wire.messages import Hanging, HangLimit
from edl.wire.node_requests import OutputLine
from edl.wire.records import Failure

STACKS_S = 10.0
"""Time limit in seconds for the stacks and the flight recorders of all workers."""
EVERY = 5
"""Pauses after which the progress of learning is reported again."""
NOTABLE = 0.1
"""Share by which a learnt limit has to change to be reported again."""


class HangSources(Protocol):
    """What the shell looks at."""

    def open(self) -> None:
        """Begin to receive what workers report. Requires a running event loop."""
        ...

    def close(self) -> None:
        """Stop that."""
        ...

    def workers(self) -> Mapping[int, Watched]:
        """The workers that have a process, by slot."""
        ...

    def activity(self, pids: Collection[int]) -> Mapping[int, Activity]:
        """The resources that processes have used so far. Blocks."""
        ...

    def waits(self) -> Mapping[int, CollectiveWait]:
        """The collectives that workers wait for, by pid."""
        ...

    async def stacks(self) -> Collection[OutputLine]:
        """The stacks of all workers."""
        ...

    async def flight_recorders(self, pids: Collection[int]) -> Collection[str]:
        """Let workers write the contents of their flight recorders to files; returns the paths."""
        ...

    def devices_busy(self) -> bool:
        """Whether an accelerator of this node computes. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What was found out when a hang was first seen."""

    round: Round
    workers: tuple[Failure, ...]
    where: str
    """See ``edl.agent.workers.hang_report.summary``."""
    files: tuple[str, ...]
    """Contents of flight recorders."""


class HangDetection:
    """Runs until cancelled. ``progress``: the newest commit of each slot."""

    def __init__(
        self,
        judge: HangWatch,
        sources: HangSources,
        state: Callable[[], AgentState],
        progress: Mapping[int, int],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._judge = judge
        self._sources = sources
        self._state = state
        self._progress = progress
        self._now_s = now_s
        self._post = post
        self._pause = pause
        self._evidence: _Evidence | None = None
        self._suspected = False
        self._sent = HangLimit(0.0, 0)

    async def run(self) -> None:
        """Check the workers again and again."""
        self._sources.open()
        try:
            while True:
                await self._pause(self._judge.interval_s)
                await self._look()
        finally:
            self._sources.close()

    async def _look(self) -> None:
        """One check. A verdict is repeated at each check until the round ends, because the Master may have been
        unreachable."""
        if _excused(self._state()):
            self._judge.excuse()
            self._clear()
            return
        samples = await self._samples()
        now = self._state()  # state may have changed meanwhile
        if _excused(now):
            self._judge.excuse()
            self._clear()
            return
        verdict = self._judge.look(now.running_round, samples, self._now_s(), now.hold)
        if verdict is not None:
            await self._report(now.running_round, verdict)
        else:
            self._clear()
        self._tell_limit()

    async def _samples(self) -> dict[int, Sample]:
        """The workers at this moment, by local rank."""
        pids = [worker.pid for worker in self._sources.workers().values()]
        used = await asyncio.to_thread(self._sources.activity, pids)
        ranks = {worker.slot: worker.local_rank for worker in self._state().in_world}
        waits = self._sources.waits()
        return {
            ranks[slot]: Sample(
                *(worker.pid, self._progress.get(slot), worker.output_bytes, used.get(worker.pid)),
                waits[worker.pid].state if worker.pid in waits else "",
            )
            for slot, worker in self._sources.workers().items()
            if slot in ranks
        }

    async def _report(self, number: Round, verdict: HangVerdict) -> None:
        if self._evidence is None or self._evidence.round != number:
            self._evidence = await self._collect(number, verdict)
            self._judge.absorb(await self._samples(), self._now_s())
        found = self._evidence
        what = verdict.what + (f" ({found.where})" if found.where else "")
        what += f"; flight recorder: {', '.join(found.files)}" if found.files else ""
        if verdict.learnt is None:
            self._post(Report(Hanging(number, what, verdict.for_s, workers=found.workers)))
            return
        dead = verdict.lifeless and (verdict.waiting or not await asyncio.to_thread(self._sources.devices_busy))
        if not self._suspected:
            self._suspected = True
            self._post(Suspected(self._alarm(verdict, found, dead)))
        if dead:
            self._post(Report(Hanging(number, what, verdict.for_s, learnt=True, workers=found.workers)))

    def _alarm(self, verdict: HangVerdict, found: _Evidence, dead: bool) -> Alarm:
        return hang_report.alarm(self._state().info.node, verdict, found.where, found.files, restarts=dead)

    def _clear(self) -> None:
        """The workers make progress, or need not."""
        self._evidence = None
        if self._suspected:
            self._suspected = False
            self._post(Suspected(None))

    def _tell_limit(self) -> None:
        if self._judge.given:
            return
        learnt, sent = self._judge.learnt, self._sent
        changed = abs(learnt.limit_s - sent.limit_s) > NOTABLE * sent.limit_s
        learning = not learnt.limit_s and learnt.pauses >= sent.pauses + EVERY
        if changed or learning:
            self._sent = HangLimit(learnt.limit_s, learnt.pauses, NEEDED)
            self._post(HangLimitChanged(self._sent))

    async def _collect(self, number: Round, verdict: HangVerdict) -> _Evidence:
        """Ask the workers what they do. They may not answer."""
        waits, watched = self._sources.waits(), self._sources.workers()
        pids = [worker.pid for worker in watched.values() if worker.pid in waits]
        try:
            lines, files = await asyncio.wait_for(
                asyncio.gather(self._sources.stacks(), self._sources.flight_recorders(pids)), STACKS_S
            )
        except asyncio.TimeoutError:
            lines, files = (), ()
        stacks = hang_report.stacks_by_rank(lines)
        state = self._state()
        by_rank: dict[int, CollectiveWait] = {}
        failures = []
        for worker in sorted(state.in_world, key=lambda one: one.local_rank):
            pid = watched[worker.slot].pid if worker.slot in watched else 0
            if pid in waits:
                by_rank[worker.rank] = waits[pid]
            if worker.local_rank in verdict.local_ranks[: hang_report.MOST_WORKERS]:
                failures.append(
                    Failure(
                        *(state.info.node, number, worker.rank, worker.local_rank, 0),
                        f"made no progress for {verdict.for_s:.0f} s",
                        hang_report.waits_for(by_rank.get(worker.rank)),
                        stacks.get(worker.rank, ""),
                        slot=worker.slot,
                        host=state.info.host,
                        pid=pid,
                    )
                )
        ranks = [worker.rank for worker in state.in_world]
        return _Evidence(number, tuple(failures), hang_report.summary(sorted(ranks), stacks, by_rank), tuple(files))


def _excused(state: AgentState) -> bool:
    """Whether checks are pointless: no world runs here, or a worker is known to be frozen or has just been killed."""
    odd = any(worker.frozen_since_s is not None or worker.condemned for worker in state.in_world)
    return state.phase is not AgentPhase.RUNNING or odd or not state.in_world
