"""Jobs whose nodes come from a scheduler: random schedules, planted bugs, and some stories.

The reconciler that ships runs beside the Master that ships; only the cluster is simulated.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from edl.config import JobSpec, NodeRange, Timeouts
from edl.job_records import SchedulerChoice, SizeOwner
from edl.master.state import Phase
from edl.testing.sim.checks import Violation
from edl.testing.sim.scheduler_plugin import SchedulerPlugin
from edl.testing.sim.schedules import Schedule, play
from edl.testing.sim.simulated_cluster import ClusterTraits
from edl.testing.sim.world import SimWorld
from edl.types import JobId
from edl.wire.scale_requests import Resize, Suspend
from tests.sim import scheduler_bugs

KNOWN = [
    9109,  # a minimum raised above the size of a job that never grows
    9183,  # a query refused for good after the end of the job took the place of the last call
    10313,  # the Master's launcher did not wait for a slow query, after which the set is scaled to zero
]
SEEDS = 20
MORE_SEEDS = 2000
MOST = 40
"""Schedules that a planted bug gets, after the one that is known to find it."""


@pytest.mark.parametrize("seed", [*KNOWN, *range(SEEDS)])
def test_schedules(seed: int) -> None:
    assert not play(Schedule.scheduled(seed)).violation


@pytest.mark.soak
@pytest.mark.parametrize("begin", range(SEEDS, SEEDS + MORE_SEEDS, 100))
def test_many_schedules(begin: int) -> None:
    for seed in range(begin, begin + 100):
        violation = play(Schedule.scheduled(seed)).violation
        assert not violation, f"Schedule.scheduled({seed}): {violation}"


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "first"), scheduler_bugs.FIRST.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_planted_bug_is_found(bug: scheduler_bugs.Bug, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    found = next((seed for seed in (first, *range(MOST)) if play(Schedule.scheduled(seed)).violation), -1)
    assert found >= 0, bug.__doc__


# --- stories ---------------------------------------------------------------------------------------------------------


class Story:
    """A job of one to six nodes; the cluster provides two at first. Nothing goes wrong by itself."""

    def __init__(self, owner: SizeOwner = SizeOwner.MASTER, **traits: Any) -> None:
        timeouts = Timeouts(recover_s=20.0, shutdown_s=1.0, rejoin_s=2.0, boundary_s=5.0)
        choice = SchedulerChoice("statefulset", "sim", owner=owner)
        spec = JobSpec(JobId("story"), NodeRange(1, 6), timeouts=timeouts, scheduler=choice)
        self.scheduler = SchedulerPlugin(1, owner, 2, ClusterTraits(**traits), ())
        self.world = SimWorld(7, spec, total_s=1000.0, plugin=self.scheduler)
        weakref.finalize(self, self.world.close)
        self.cluster = self.scheduler.cluster
        self.becomes(2)

    def becomes(self, members: int, provided: int | None = None, within_s: float = 60.0) -> None:
        """So many nodes train, and the cluster provides so many, by default the same number."""

        def holds() -> bool:
            record = self.world.checks.record
            if record is None or record.phase is not Phase.RUNNING or record.world is None:
                return False
            return len(record.world.members) == members and self.cluster.replicas == (
                members if provided is None else provided
            )

        self.world.run_until(holds, within_s, f"{members} nodes train")

    def resize(self, nodes: int) -> None:
        self.world.ask_for(Resize(nodes, "somebody"))

    @property
    def serving(self) -> bool:
        """Whether a Master rules."""
        master = self.world.master
        return master is not None and master.master_shell is not None and master.master_shell.serving

    @property
    def waiting(self) -> str:
        """Why the size has not been reached."""
        master = self.world.master
        assert master is not None and master.master_shell is not None
        return master.master_shell.status().scale.waiting

    @property
    def calls(self) -> list[tuple[int, tuple[str, ...] | None]]:
        return self.scheduler.changes


def test_until_somebody_asks_the_size_is_left_alone() -> None:
    story = Story()
    story.world.run(30.0)
    assert story.calls == []


@pytest.mark.parametrize("indexed", [False, True])
def test_up_and_down(indexed: bool) -> None:
    story = Story(indexed=indexed)
    story.resize(5)
    story.becomes(5)
    assert story.calls == [(5, None)]
    story.resize(1)
    story.becomes(1)
    nodes, names = story.calls[-1]
    assert nodes == 1 and names is not None
    if indexed:
        assert sorted(names) == ["n1", "n2", "n3", "n4"]


def test_with_an_external_owner_nothing_is_asked_for() -> None:
    story = Story(SizeOwner.EXTERNAL)
    for provided, members in ((4, 4), (8, 6), (1, 1)):
        story.cluster.foreign(provided)
        story.becomes(members, provided)
    assert story.calls == []


def test_nodes_that_stay_pending_hold_nothing_up_and_are_explained() -> None:
    story = Story(capacity=3)
    story.resize(5)
    story.becomes(3, 5)
    story.world.run(10.0)
    assert story.waiting.endswith("; cluster: 3 of 5 nodes have joined")
    assert len(story.calls) == 1, "asked once: the cluster has agreed"
    story.resize(3)
    story.becomes(3)
    story.world.run(2.0)
    assert story.waiting == ""


def test_a_suspended_job_keeps_its_nodes() -> None:
    story = Story()
    story.world.ask_for(Suspend(True, "somebody"))
    story.world.run(5.0)
    story.resize(4)
    story.world.run(60.0)
    assert story.calls == [] and story.cluster.replicas == 2
    story.world.ask_for(Suspend(False, "somebody"))
    story.becomes(4)


def test_a_suspended_job_that_asks_for_nodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn schedules rarely resize a suspended job; the story does."""
    scheduler_bugs.asks_while_suspended(monkeypatch)
    with pytest.raises(Violation, match="the cluster is called for 4 nodes while the job is suspended"):
        test_a_suspended_job_keeps_its_nodes()


@pytest.mark.parametrize("owner", SizeOwner)
@pytest.mark.parametrize("ask_none_at_end", [False, True])
def test_a_cluster_that_starts_finished_nodes_again_is_asked_for_none_at_the_end(
    owner: SizeOwner, ask_none_at_end: bool
) -> None:
    story = Story(owner, ask_none_at_end=ask_none_at_end)
    story.world.training.shorten(1.0)
    story.world.run_until(story.world.ended, 20.0, "the job ends")
    story.world.run_until(lambda: not story.world.alive(), 30.0, "every launcher exits")
    assert story.cluster.replicas == (0 if ask_none_at_end else 2)
    assert len(story.calls) == ask_none_at_end


def test_a_new_master_does_not_ask_again_for_what_is_there() -> None:
    story = Story()
    story.resize(4)
    story.becomes(4)
    master = story.world.master
    assert master is not None
    master.crash()
    story.world.run(10.0)
    story.becomes(4)
    story.world.run(30.0)
    assert len(story.calls) == 1


def test_members_with_high_indexes_make_room_for_low_ones() -> None:
    story = Story(indexed=True, start_s=15.0)
    story.resize(4)
    story.becomes(4)
    for name in ("n0", "n1"):
        story.world.crash(name)
    story.world.run_until(lambda: story.serving, 20.0, "another Master rules")
    story.resize(2)
    story.becomes(2, within_s=120.0)
    record = story.world.checks.record
    assert record is not None and record.world is not None
    assert sorted(member.node for member in record.world.members) == ["n0", "n1"]
