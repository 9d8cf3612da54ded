"""Reads the step logs that workers write (``scripts/step_writer.py``) and combines them into worlds.

All times are ``time.monotonic()`` of this host in seconds, comparable between its processes.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """One completed training step of one rank. ``step`` counts from 1 over the whole job, ``t`` is in seconds.
    ``loss``: of this rank's samples, where the script writes it."""

    t: float
    rank: int
    world: int
    step: int
    pid: int
    node: int
    restart: int
    formed: int
    loss: float | None = None


@dataclass(slots=True)
class World:
    """All steps of one formed world, by rank.

    ``formed`` is chosen by rank 0 and broadcast to all ranks: its monotonic clock in nanoseconds when the group was
    ready. Two workers with the same value are certainly in the same group.
    """

    formed: int
    size: int
    steps: dict[int, list[Step]] = field(default_factory=dict)

    @property
    def formed_s(self) -> float:
        return self.formed / 1e9

    def every_rank(self, count: int) -> bool:
        """Whether each rank has completed at least ``count`` steps."""
        return len(self.steps) == self.size and all(len(done) >= count for done in self.steps.values())

    @property
    def first_s(self) -> float:
        """When the last of its ranks completed its first step."""
        return max(done[0].t for done in self.steps.values())

    @property
    def last_s(self) -> float:
        """When its last step so far was completed by any rank."""
        return max(done[-1].t for done in self.steps.values())

    @property
    def first_step(self) -> int:
        return min(done[0].step for done in self.steps.values())

    @property
    def last_step(self) -> int:
        return max(done[-1].step for done in self.steps.values())

    def nodes(self) -> set[int]:
        return {done[-1].node for done in self.steps.values()}

    def pids(self, node: int) -> list[int]:
        """Pids of the workers of a simulated node, by rank."""
        return [done[-1].pid for _, done in sorted(self.steps.items()) if done[-1].node == node]

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Seconds between consecutive steps of the same rank, where the later step is in ``[begin_s, end_s)``."""
        return [
            after.t - before.t
            for done in self.steps.values()
            for before, after in itertools.pairwise(done)
            if begin_s <= after.t < end_s
        ]

    def silence(self, moment_s: float) -> float:
        """The longest time that a rank has been without a step at a given time, for gaps that had not ended by then."""
        before = [[step.t for step in done if step.t < moment_s] for done in self.steps.values()]
        return max(moment_s - times[-1] if times else 0.0 for times in before)


class StepReader:
    """Follows all step logs of a folder. ``poll`` reads new lines; ``worlds`` contains everything read so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self.worlds: dict[int, World] = {}
        self.pids: set[int] = set()
        self.pids_by_node: dict[int, set[int]] = {}

    def poll(self) -> None:
        """Read complete new lines of all files."""
        for path in self._folder.glob("*.jsonl"):
            done = self._read_bytes.get(path, 0)
            with path.open("rb") as stream:
                stream.seek(done)
                data = stream.read()
            complete = data.rfind(b"\n") + 1
            self._read_bytes[path] = done + complete
            for line in data[:complete].splitlines():
                self._take(json.loads(line))

    def _take(self, data: dict[str, object]) -> None:
        kind = data.pop("kind")
        self.pids.add(int(str(data["pid"])))
        self.pids_by_node.setdefault(int(str(data["node"])), set()).add(int(str(data["pid"])))
        if kind != "step":
            return
        step = Step(**data)  # type: ignore[arg-type]
        world = self.worlds.setdefault(step.formed, World(step.formed, step.world))
        world.steps.setdefault(step.rank, []).append(step)

    def newest(self) -> World | None:
        """The world that was formed last, among those with a completed step."""
        return self.worlds[max(self.worlds)] if self.worlds else None

    def formed_after(self, moment_s: float, size: int, least: int = 0) -> World | None:
        """The first world of ``size`` ranks (or of ``least`` to ``size``) formed after a given time in which every rank
        has completed a step."""
        for world in self.whole():
            if world.formed_s > moment_s and (least or size) <= world.size <= size:
                return world
        return None

    def whole(self) -> list[World]:
        """All worlds in which every rank has completed a step, in the order in which they were formed."""
        return [self.worlds[formed] for formed in sorted(self.worlds) if self.worlds[formed].every_rank(1)]


def pause(old: World, new: World) -> float:
    """From the last step in one world to the first in the next: the longest such gap of a process that was in both. If
    there is none, from the last step of any rank to the first step of the last rank."""
    last = {done[-1].pid: done[-1].t for done in old.steps.values()}
    gaps = [done[0].t - last[done[0].pid] for done in new.steps.values() if done[0].pid in last]
    return max(gaps, default=new.first_s - old.last_s)


def longest_gap(worlds: Iterable[World], pids: set[int], begin_s: float, end_s: float) -> float:
    """The longest time between two steps of one of these processes, in whatever worlds, where the later step is in
    ``[begin_s, end_s]``; 0 when there is none."""
    times: dict[int, list[float]] = {}
    for world in worlds:
        for step in itertools.chain.from_iterable(world.steps.values()):
            if step.pid in pids:
                times.setdefault(step.pid, []).append(step.t)
    gaps = [b - a for one in times.values() for a, b in itertools.pairwise(sorted(one)) if begin_s <= b <= end_s]
    return max(gaps, default=0.0)


def redone(old: World, new: World) -> int:
    """Number of steps that a rank had completed in the old world and that are repeated in the new one."""
    return max(0, old.last_step - new.first_step + 1)


def median_gap(world: World, begin_s: float, end_s: float) -> float:
    """Median seconds per step in a window; 0 when there is none."""
    gaps = world.gaps(begin_s, end_s)
    return statistics.median(gaps) if gaps else 0.0
