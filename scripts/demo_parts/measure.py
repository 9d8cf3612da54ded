"""What the step logs of a training say about its recoveries.

A training script that is given `--step-log DIR` appends one JSON line per finished step to a file of its own in DIR
(see `examples/03-elastic-torch/train.py`). Everything here is arithmetic on those lines: no clock, no processes. Times
are seconds of the host's monotonic clock, so all logs must come from one host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank has finished one step."""

    t_s: float
    rank: int
    world: int
    """Number of ranks at that moment."""
    step: int
    """Global steps done, this one included: counted from 1."""
    round: int
    """Grows whenever a new world is formed."""
    pid: int
    node: int
    """Rank of the node in its world."""
    loss: float


def parse_line(line: str) -> StepRecord | None:
    """A line of a step log; None for one that was torn by the death of its writer."""
    try:
        data = json.loads(line)
        return StepRecord(
            t_s=float(data["t"]),
            rank=int(data["rank"]),
            world=int(data["world"]),
            step=int(data["step"]),
            round=int(data["round"]),
            pid=int(data["pid"]),
            node=int(data["node"]),
            loss=float(data["loss"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


class StepLogs:
    """Follows all step logs in a directory, which need not exist yet.

    `records` holds what was read so far, in the order in which it was found; `torn` counts unreadable lines.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self.records: list[StepRecord] = []
        self.torn = 0

    def poll(self) -> list[StepRecord]:
        """Read what is new since the last call, add it to `records` and return it."""
        new: list[StepRecord] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            for line in self._new_lines(path):
                record = parse_line(line)
                if record is None:
                    self.torn += 1
                else:
                    new.append(record)
        self.records += new
        return new

    def _new_lines(self, path: Path) -> list[str]:
        """Complete lines only: the end of a line that is being written waits for the next call."""
        start = self._read_bytes.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read_bytes[path] = start + len(complete)
        return complete.decode(errors="replace").splitlines()


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The first moment at which all ranks of one world have finished a step."""

    t_s: float
    round: int
    world: int
    first_step: int
    """The lowest step that this world has done; where it went on."""


def first_whole_steps(records: Iterable[StepRecord]) -> list[WholeStep]:
    """For each round in which every rank has finished a step: when that was so. In order of rounds."""
    rounds: dict[int, list[StepRecord]] = {}
    for record in records:
        rounds.setdefault(record.round, []).append(record)
    whole: list[WholeStep] = []
    for number, members in sorted(rounds.items()):
        first: dict[int, float] = {}
        for record in members:
            first[record.rank] = min(record.t_s, first.get(record.rank, record.t_s))
        world = max(record.world for record in members)
        if set(first) == set(range(world)):
            start = min(record.step for record in members)
            whole.append(WholeStep(max(first.values()), number, world, start))
    return whole


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a training came through one happening: a kill, or a node that joined."""

    seconds: float
    """From the happening until all ranks of the next world had finished a step."""
    standstill_s: float
    """From the last step of the world before to the first step that all ranks of the next one had finished."""
    redone: int
    """Global steps that had been done before and were done again."""
    world_before: int
    world_after: int
    round: int
    """Round of the world after."""


def recovery(records: Iterable[StepRecord], happened_s: float, least_world: int = 1) -> Recovery | None:
    """What followed a happening at `happened_s`, or None as long as not all ranks of a later world have stepped.

    Only a round later than the one at `happened_s` counts: a step of the old world that was under way may still be
    finished by some after a kill. `least_world`: pass over worlds with fewer ranks than this; a newcomer has not
    arrived before the world has grown. Raises `ValueError` when nothing had been trained before the happening.
    """
    known = list(records)
    before = [record for record in known if record.t_s <= happened_s]
    if not before:
        raise ValueError(f"no step was finished before {happened_s:.3f} s")
    last = max(before, key=lambda record: (record.round, record.t_s))
    for next_world in first_whole_steps(known):
        if next_world.round > last.round and next_world.world >= least_world and next_world.t_s > happened_s:
            break
    else:
        return None
    earlier = [record for record in known if record.round < next_world.round]
    return Recovery(
        seconds=next_world.t_s - happened_s,
        standstill_s=max(0.0, next_world.t_s - max(record.t_s for record in earlier)),
        redone=max(0, max(record.step for record in earlier) - next_world.first_step + 1),
        world_before=last.world,
        world_after=next_world.world,
        round=next_world.round,
    )


def missing_steps(records: Iterable[StepRecord], total: int) -> list[int]:
    """Steps of 1..total that no rank has finished; empty when training skipped nothing.

    One rank is enough: another may have been killed between finishing a step and saying so.
    """
    done = {record.step for record in records}
    return [step for step in range(1, total + 1) if step not in done]
