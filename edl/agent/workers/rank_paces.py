"""The windows of this node's workers, as the Master gets them: what each worker reports, and what only the agent sees,
because a stopped worker cannot report it.

The agent looks at the workers' processes a few times a second. The pauses between two looks vary, so that workers which
are stopped and continued at regular times are not always seen in the same phase.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping

from edl.agent.workers.hang import Watched
from edl.ports import RunState
from edl.types import Round
from edl.wire.local import StepTimes
from edl.wire.rank_pace import RankPace

SHORTEST_S, LONGEST_S = 0.15, 0.35
"""Bounds of the pause between two looks."""


@dataclasses.dataclass(slots=True)
class _Seen:
    """What was seen of one process since its last window."""

    pid: int
    began_s: float
    starved_s: float
    """What the kernel had counted at the beginning."""
    now_s: float
    starved_now_s: float
    looks: int = 0
    stopped: int = 0


class RunShares:
    """The share of time in which each worker's process did not run. No clock, no I/O."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, slot: int, pid: int, state: RunState, now_s: float) -> None:
        """Note the state of a slot's process."""
        seen = self._seen.get(slot)
        if seen is None or seen.pid != pid:
            self._seen[slot] = _Seen(pid, now_s, state.starved_s, now_s, state.starved_s, 1, int(state.stopped))
            return
        seen.now_s, seen.starved_now_s = now_s, state.starved_s
        seen.looks += 1
        seen.stopped += state.stopped

    def keep(self, slots: Collection[int]) -> None:
        """Forget all other slots."""
        for slot in self._seen.keys() - set(slots):
            del self._seen[slot]

    def take(self, slot: int) -> tuple[float, float]:
        """The share of looks at which a slot's process was stopped, and the share of time in which it had no CPU, since
        the last call."""
        seen = self._seen.get(slot)
        if seen is None or not seen.looks:
            return 0.0, 0.0
        took_s = seen.now_s - seen.began_s
        starved = (seen.starved_now_s - seen.starved_s) / took_s if took_s > 0 else 0.0
        stopped = seen.stopped / seen.looks
        self._seen[slot] = _Seen(seen.pid, seen.now_s, seen.starved_now_s, seen.now_s, seen.starved_now_s)
        return stopped, min(1.0, max(0.0, starved))


class RankPaces:
    """The windows of one node's workers. ``times``: the newest report of each slot; what is taken is removed."""

    def __init__(self, times: MutableMapping[int, StepTimes]) -> None:
        self._times = times
        self.shares = RunShares()

    def take(self, round: Round, slots: Collection[int]) -> tuple[RankPace, ...]:
        """The windows of this round that have ended since the last call. ``slots``: of the workers, by local rank."""
        found = []
        for slot in slots:
            times = self._times.pop(slot, None)
            if times is not None and times.round == round:
                found.append(_pace(slot, times, *self.shares.take(slot)))
        return tuple(found)


def _pace(slot: int, times: StepTimes, stopped: float, starved: float) -> RankPace:
    return RankPace(
        slot,
        times.step_s,
        times.slowest_s,
        times.peers_share,
        times.commit_share,
        times.data_share,
        stopped,
        starved,
        times.idle_share,
        times.samples,
    )


def _pause_s(number: int) -> float:
    """The pause before a look: without a pattern, and yet the same in each run."""
    drawn = int.from_bytes(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=4).digest(), "big") / 2**32
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * drawn


async def watch(
    shares: RunShares,
    workers: Callable[[], Mapping[int, Watched]],
    states: Callable[[Collection[int]], Mapping[int, RunState]],
    now_s: Callable[[], float],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Look at the processes until cancelled. ``workers`` is by slot."""
    for number in itertools.count():
        await pause(_pause_s(number))
        pids = {slot: worker.pid for slot, worker in workers().items()}
        shares.keep(pids)
        seen = states(tuple(pids.values()))
        for slot, pid in pids.items():
            if pid in seen:
                shares.look(slot, pid, seen[pid], now_s())
