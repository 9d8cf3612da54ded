"""Records each change of a node's status, the job's phase and an agent's phase while schedules are played."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from edl.agent.machine.turn import AgentTurn as AgentTurn
from edl.master.turn import MasterTurn
from edl.testing.sim.schedules import Schedule, play

Change = tuple[enum.Enum, enum.Enum]
DRAWS: tuple[Callable[[int], Schedule], ...] = (
    Schedule.draw,
    Schedule.resized,
    Schedule.slotted,
    Schedule.independent,
)


@contextlib.contextmanager
def recorded() -> Iterator[Counter[Change]]:
    """Counts changes as they are made, one by one: a decision may make several."""
    seen: Counter[Change] = Counter()
    update, write, set_ = MasterTurn.update, MasterTurn.write, AgentTurn.set

    def note(before: enum.Enum, after: enum.Enum | None) -> None:
        if after is not None and after is not before:
            seen[before, after] += 1

    def updated(self: MasterTurn, entry: Any, **changes: Any) -> Any:
        note(entry.status, changes.get("status"))
        return update(self, entry, **changes)

    def written(self: MasterTurn, **changes: Any) -> None:
        note(self.record.phase, changes.get("phase"))
        write(self, **changes)

    def changed(self: AgentTurn, **changes: Any) -> None:
        note(self.state.phase, changes.get("phase"))
        set_(self, **changes)

    with (
        mock.patch.object(MasterTurn, "update", updated),
        mock.patch.object(MasterTurn, "write", written),
        mock.patch.object(AgentTurn, "set", changed),
    ):
        yield seen


def changes_in(seeds: Iterable[int]) -> Counter[Change]:
    """The changes that these schedules of each kind make."""
    with recorded() as seen:
        for seed in seeds:
            for draw in DRAWS:
                play(draw(seed))
    return seen


if __name__ == "__main__":
    for (before, after), times in sorted(changes_in(range(50)).items(), key=str):
        print(f"{before} -> {after}: {times}")
