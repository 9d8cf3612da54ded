"""Bugs of the kind that comparable programs have shipped, planted one at a time to see the simulator find them.

``python -m tests.sim.planted`` prints after how many schedules each is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from edl.agent.entitlement import Entitlement
from edl.agent.machine import boundaries, rounds
from edl.agent.machine.events import Start
from edl.agent.machine.state import AgentPhase, Worker
from edl.config import NodeRange
from edl.exit_codes import ExitCode
from edl.master import forming, incidents, machine, planning, resizing
from edl.master.restoring import Unusable, choose
from edl.master.state import NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.ports import CreatedAt, Guard
from edl.testing.sim.memory_checkpoints import SimMemory
from edl.testing.sim.node import SimProcesses
from edl.testing.sim.schedules import Schedule, play
from edl.types import Rank
from edl.wire.messages import Leaving, StartRound
from edl.worker.boundary import StepBoundaries
from tests.sim import refusals

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


def joiner_wipes_the_world() -> contextlib.AbstractContextManager[Any]:
    """A node that joins after a world was formed throws it away (DLRover)."""

    def consider(turn: MasterTurn) -> None:
        newcomers = [entry for entry in turn.ready() if turn.member(entry) is None]
        if newcomers:
            forming.stop_world(turn, "somebody joined")
            forming.try_to_form(turn)

    return mock.patch.object(resizing, "consider_size", consider)


def world_above_maximum() -> contextlib.AbstractContextManager[Any]:
    """Whoever is there when the wait ends is taken in (DLRover: 5 joiners with MAX=4)."""

    def fit(bounds: NodeRange, available: int) -> int:
        size = available // bounds.unit * bounds.unit
        return size if size >= bounds.lowest else 0

    return mock.patch.object(NodeRange, "fit", fit)


def trimmed_below_minimum() -> contextlib.AbstractContextManager[Any]:
    """The minimum is compared before the world is cut to the unit (DLRover: MIN=3, unit 2, a world of 2)."""

    def fit(bounds: NodeRange, available: int) -> int:
        return min(available, bounds.maximum) // bounds.unit * bounds.unit if available >= bounds.minimum else 0

    return mock.patch.object(NodeRange, "fit", fit)


def stale_master_address() -> contextlib.AbstractContextManager[Any]:
    """Ranks other than 0 keep the address they got first (torchrun with a shared store)."""
    tell = MasterTurn.tell
    first: dict[tuple[Any, ...], Any] = {}

    def stale_tell(self: MasterTurn, entry: Any, message: Any) -> None:
        if isinstance(message, StartRound) and message.world.members[0].node != entry.info.node:
            leader = message.world.members[0]
            kept = first.setdefault((entry.info.incarnation, leader.node), leader)
            world = dataclasses.replace(message.world, members=(kept, *message.world.members[1:]))
            message = StartRound(world, message.reason)
        tell(self, entry, message)

    return mock.patch.object(MasterTurn, "tell", stale_tell)


def writes_without_fence() -> contextlib.AbstractContextManager[Any]:
    """A Master that has been replaced, and does not know it, writes on."""
    return mock.patch.object(Guard, "condition", lambda self: CreatedAt("/edl/no/such/key", 0))


def collateral_is_charged() -> contextlib.AbstractContextManager[Any]:
    """Workers that fail because a node died use up restarts (torchrun)."""
    return mock.patch.object(incidents, "refund", lambda turn, reason: None)


def exit_closes_the_job() -> contextlib.AbstractContextManager[Any]:
    """A node that leaves in good order ends the job for all (torchrun's closed rendezvous)."""

    def leaving(turn: MasterTurn, entry: Any, message: Any) -> None:
        turn.update(entry, status=NodeStatus.LEAVING)
        if turn.record.phase is not Phase.ENDED:
            forming._end(turn, ExitCode.OK, "a node has left")

    return mock.patch.dict(machine.MESSAGE_HANDLERS, {Leaving: leaving})


@contextlib.contextmanager
def stale_order_is_obeyed() -> Iterator[None]:
    """A start order is sent again to who has had it, and the agent does not look at the round."""

    def start(turn: Any, world: Any, reason: str) -> None:
        member = world.member(turn.state.info.node)
        if member is None or turn.state.phase is not AgentPhase.IDLE:
            return
        born = world.round
        workers = tuple(Worker(index, Rank(member.first_rank + index), born=born) for index in range(member.slots))
        turn.set(phase=AgentPhase.RUNNING, seen_round=world.round, world=world, workers=workers, killed=False)
        turn.do(Start(world, tuple(range(member.slots))))

    catch_up = machine._catch_up

    def forgetful(turn: MasterTurn, entry: Any, attach: Any) -> None:
        catch_up(turn, entry, dataclasses.replace(attach, seen_round=0))

    with mock.patch.object(rounds, "start", start), mock.patch.object(machine, "_catch_up", forgetful):
        yield


def target_has_been_passed() -> contextlib.AbstractContextManager[Any]:
    """Workers are to stop at the highest boundary that one of them has passed, not at the next."""
    settle = planning._settle

    def early(turn: MasterTurn, agreement: Any, commit: int) -> None:
        settle(turn, agreement, commit - 1)

    return mock.patch.object(planning, "_settle", early)


def era_starts_over() -> contextlib.AbstractContextManager[Any]:
    """The era counts the worlds of this job, whatever lies in the checkpoint directory."""

    def write(self: MasterTurn, **changes: Any) -> None:
        world = changes.get("world")
        if world is not None and changes.get("phase") is Phase.RUNNING:
            changes["world"] = dataclasses.replace(world, era=self.record.era + 1)
            changes["era"] = self.record.era + 1
        self.record = dataclasses.replace(self.record, **changes)

    return mock.patch.object(MasterTurn, "write", write)


def waits_for_no_member() -> contextlib.AbstractContextManager[Any]:
    """The next world forms from whoever is ready first (ranks restore what they happen to find)."""
    return mock.patch.object(forming, "awaited", lambda turn: [])


def agreed_settings_are_let_go() -> contextlib.AbstractContextManager[Any]:
    """Workers that wait for the word on what was agreed go on when the Master is lost, and miss it."""
    return mock.patch.object(boundaries, "lose_master", boundaries.release)


def settings_end_with_the_next_hold() -> contextlib.AbstractContextManager[Any]:
    """Whoever has not come to the agreed commit when something else is asked forgets the settings."""
    hold = StepBoundaries.hold

    def forgetful(self: StepBoundaries, number: int) -> int:
        self._due.clear()
        return hold(self, number)

    return mock.patch.object(StepBoundaries, "hold", forgetful)


def one_refusal_ends_the_job() -> contextlib.AbstractContextManager[Any]:
    """A node has found every checkpoint corrupt, and nobody asks what others have in memory."""

    def hasty(members: Any, entries: Any) -> Any:
        refusals = [entry.refused for entry in members if entry.refused]
        return Unusable(refusals[0]) if refusals else choose(members, entries)

    return mock.patch.object(forming, "choose", hasty)


def fork_server_trusts_its_launcher() -> contextlib.AbstractContextManager[Any]:
    """A launcher that is frozen stops no workers, and nobody else does (ours, before the fork server had a
    watchdog)."""
    return mock.patch.object(SimProcesses, "silent", lambda self, until_s: None)


def life_is_taken_for_a_lease() -> contextlib.AbstractContextManager[Any]:
    """A launcher that lives gives its workers a whole lease more, whenever it last renewed its own."""

    def look(self: Entitlement, now_s: float) -> float:
        self.until_s = now_s + 2 * self._lease_ttl_s
        return self.until_s

    return mock.patch.object(Entitlement, "look", look)


def no_copy_is_waited_for() -> contextlib.AbstractContextManager[Any]:
    """A worker with a part of a sharded state may be any number of commits ahead of its copy."""
    return mock.patch.object(SimMemory, "when_copied", lambda self, slot, then, since_s=None: then())


@dataclass(frozen=True)
class Planted:
    """A planted bug and how many schedules may pass before it is found."""

    plant: Plant
    within: int
    known: int = 0
    """A schedule that finds it, to begin with; others follow in order when it does not any more."""
    draw: Callable[[int], Schedule] = Schedule.draw
    """What is played, where few schedules would come to it by chance."""


BUGS: dict[str, Planted] = {
    plant.__name__: Planted(plant, within, *known)
    for plant, within, *known in (
        (joiner_wipes_the_world, 100, 12),
        (world_above_maximum, 100, 1),
        (trimmed_below_minimum, 100, 48),
        (stale_master_address, 300, 1),
        (writes_without_fence, 1000, 6),
        (collateral_is_charged, 3000, 2431),
        (exit_closes_the_job, 300, 1),
        (stale_order_is_obeyed, 3000),
        (target_has_been_passed, 300, 11),
        (era_starts_over, 300, 4),
        (waits_for_no_member, 300, 22),
        (agreed_settings_are_let_go, 1000, 911),
        (settings_end_with_the_next_hold, 300, 35),
        (one_refusal_ends_the_job, 100, 9, refusals.draw),
        (fork_server_trusts_its_launcher, 300, 179),
        (life_is_taken_for_a_lease, 300, 190),
        (no_copy_is_waited_for, 1000, 223),
    )
}


def seeds_needed(planted: Planted) -> tuple[int, str]:
    """Number of schedules until the planted bug is found, and the finding; 0 if it is not found."""
    for count, seed in enumerate((planted.known, *range(planted.within)), start=1):
        with planted.plant():
            result = play(planted.draw(seed))
        if result.violation and not play(planted.draw(seed)).violation:
            return count, f"seed {seed}: {result.violation.splitlines()[0]}"
    return 0, f"nothing found in {planted.within} schedules"


if __name__ == "__main__":
    for name, bug in BUGS.items():
        count, violation = seeds_needed(dataclasses.replace(bug, known=0))
        print(f"{name:24} {count:5}  {violation}")
