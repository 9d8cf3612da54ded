"""Scenarios of a few lines each, on the real machines in virtual time."""

from __future__ import annotations

import weakref

import pytest

from edl.config import FaultTolerance, JobSpec, NodeRange, Timeouts
from edl.exit_codes import ExitCode
from edl.master.state import Phase, Record
from edl.testing.sim.memory_checkpoints import Directory
from edl.testing.sim.stepping import Script, Stepper
from edl.testing.sim.workers import RoundWorkers
from edl.testing.sim.world import SimWorld
from edl.types import JobId, NodeId, Round
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Version, World

RECOVER, SHRINK, ELASTIC = FaultTolerance.RECOVER, FaultTolerance.SHRINK, FaultTolerance.ELASTIC


class Story:
    """A simulated world with short names for events."""

    def __init__(
        self,
        bounds: str,
        level: FaultTolerance = ELASTIC,
        restarts: int = 3,
        unit: int = 1,
        script: Script | None = None,
        directory: Directory | None = None,
        seed: int = 7,
    ) -> None:
        """``seed`` determines all delays; some scenarios need one in which no node is slower than described."""
        low, _, high = bounds.partition(":")
        nodes = NodeRange(int(low), int(high or low), unit)
        timeouts = Timeouts(recover_s=20.0, shutdown_s=1.0, rejoin_s=2.0, boundary_s=5.0)
        spec = JobSpec(JobId("story"), nodes, restarts, level, timeouts)
        self.world = SimWorld(seed, spec, total_s=1000.0, script=script, directory=directory)
        weakref.finalize(self, self.world.close)

    def start(self, *names: str) -> None:
        """One after the other, so that the first one of all becomes the Master."""
        for name in names:
            self.world.start(name)
            self.world.run(0.05)

    def master(self) -> str:
        """The node the Master is on."""
        assert self.world.master is not None
        return self.world.master.node

    def workers_of(self, name: str) -> int:
        """Number of live workers of a node."""
        return sum(worker.alive for worker in self.world.launchers[NodeId(name)].workers)

    def running(self, *names: str, round: int, within_s: float = 3.0) -> float:
        """Wait until all workers of this world are up; returns how long that took."""
        before_s = self.world.timeline.now_s

        def holds() -> bool:
            record = self.world.checks.record
            if record is None or record.phase is not Phase.RUNNING or record.round != round or record.world is None:
                return False
            if [member.node for member in record.world.members] != list(names):
                return False
            group = self.world.training.group(record.round)
            return group is not None and sum(w.up and w.alive for w in group.workers.values()) == record.world.size

        self.world.run_until(holds, within_s, f"round {round} runs on {names}")
        return self.world.timeline.now_s - before_s

    @property
    def group(self) -> RoundWorkers:
        """The workers of the running round."""
        group = self.world.training.group(self.record.round)
        assert group is not None
        return group

    @property
    def last(self) -> World:
        """The newest world."""
        return self.world.checks.worlds[self.record.round]

    def passed(self, number: int) -> int:
        """The last step boundary that a round has come to."""
        return self.world.checks.progress[Round(number)].reached

    def ways(self, name: str) -> list[str]:
        """How the workers of a node were started."""
        agent = self.world.launchers[NodeId(name)].agent
        assert agent is not None
        return [worker.how for worker in agent.workers]

    def stays(self, for_s: float) -> None:
        """Nothing about the world changes for a while."""
        before = self.record
        self.world.run(for_s)
        assert (self.record.phase, self.record.round) == (before.phase, before.round), self.record.reason

    @property
    def record(self) -> Record:
        assert self.world.checks.record is not None
        return self.world.checks.record

    def ends(self, code: ExitCode, within_s: float = 60.0) -> str:
        """Wait for the end; returns the reason."""
        self.world.run_until(self.world.ended, within_s, "the job ends")
        assert self.record.outcome is not None
        assert self.record.outcome.exit_code == code
        self.world.run_until(lambda: not self.world.alive(), 20.0, "every launcher exits")
        return self.record.outcome.reason

    def finish(self) -> str:
        """Let the work come to its end."""
        self.world.training.shorten(1.0)
        return self.ends(ExitCode.OK)


def test_first_world_waits_only_for_those_known_to_be_alive() -> None:
    story = Story("2:4")
    story.start("a", "b", "c", "d")
    assert story.running("a", "b", "c", "d", round=1) < 1.5
    assert story.record.reason == "4 nodes ready"


def test_first_world_below_the_maximum_gives_others_the_join_grace() -> None:
    story = Story("1:4")
    story.start("a", "b")
    took_s = story.running("a", "b", round=1)
    assert 1.0 < took_s < 2.5
    assert story.record.reason == "2 nodes ready"


def test_killed_worker_restarts_the_round_and_is_charged() -> None:
    story = Story("2")
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.kill_worker("b", 1)
    assert story.running("a", "b", round=2) < 2.5
    assert story.record.restarts == 1
    assert story.record.failures[0].what == "was killed by SIGKILL"
    assert [member.first_rank for member in story.world.checks.worlds[story.record.round].members] == [0, 2]


def test_dead_node_is_replaced_without_waiting_for_its_lease() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.crash("b")
    story.world.run_until(lambda: story.record.phase is Phase.FORMING, 1.0, "the loss is noticed")
    assert story.record.reason == "node b lost: its launcher is gone (connection refused)"
    assert story.running("a", "c", round=2) < 2.5  # the lease alone lasts 3 s
    assert story.record.restarts == 0


def test_silent_node_counts_until_its_lease_ends() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.partition(["c"])
    took_s = story.running("a", "b", round=2, within_s=9.0)
    assert 2.0 < took_s < 7.0
    story.world.run(8.0)
    assert story.workers_of("c") == 0, "no split brain"


def test_isolated_master_does_not_keep_its_workers() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    assert story.master() == "a"
    pairs = story.world.partition(["a"])
    story.running("b", "c", round=2, within_s=9.0)
    story.world.run(10.0)
    assert story.workers_of("a") == 0, "no split brain"
    story.world.network.heal(pairs)
    story.running("b", "c", "a", round=3, within_s=9.0)


def test_newcomer_makes_the_world_grow_and_comes_last() -> None:
    story = Story("1:3")
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.start("c")
    story.running("a", "b", "c", round=2)
    assert story.record.restarts == 0


def test_replacement_takes_the_vacated_place() -> None:
    story = Story("3", RECOVER)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.crash("b")
    story.world.run(1.0)
    story.start("d")
    story.running("a", "d", "c", round=2)
    assert story.record.reason == "all places are filled again"


def test_spare_waits_and_steps_in() -> None:
    story = Story("2")
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.start("c")
    story.stays(5.0)
    story.world.crash("b")
    assert story.running("a", "c", round=2) < 2.0


def test_death_of_a_master_that_is_a_spare_changes_no_world() -> None:
    story = Story("2")
    story.start("m")
    for rank, name in enumerate(("a", "b")):
        story.world.start(name, node_rank=rank)
    story.running("a", "b", round=1)
    assert story.master() == "m"
    story.world.crash("m")
    story.stays(10.0)
    assert story.master() in ("a", "b")
    assert story.workers_of("a") == story.workers_of("b") == 2


def test_master_that_dies_between_write_and_send_is_made_good_by_the_next() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.deps.kill_on_write = True
    story.world.kill_worker("b")
    story.running("b", "c", round=2, within_s=5.0)
    assert not story.world.launchers[NodeId("a")].alive


def test_store_outage_does_not_disturb_training() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.store.away = True
    story.world.run(30.0)
    assert all(worker.alive for worker in story.world.training.alive()) and len(story.world.training.alive()) == 6
    story.world.store.come_back()
    story.stays(10.0)


def test_recover_waits_for_a_replacement_and_then_fails() -> None:
    story = Story("1:3", RECOVER)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.crash("c")
    reason = story.ends(ExitCode.NOT_ENOUGH_NODES)
    assert reason.startswith("--fault-tolerance=recover keeps 3 nodes: waiting for 1 replacement for 20 s")
    assert "node c lost: its launcher is gone (connection refused)" in reason


def test_shrink_never_grows() -> None:
    story = Story("1:3", SHRINK)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.crash("b")
    story.running("a", "c", round=2)
    story.start("d", "b")
    story.stays(5.0)
    story.world.crash("c")
    story.world.run(5.0)
    members = [member.node for member in story.world.checks.worlds[story.record.round].members]
    assert (story.record.phase, members[0], len(members)) == (Phase.RUNNING, "a", 2)


def test_unit_keeps_pairs_together() -> None:
    story = Story("2:6", unit=2)
    story.start("a", "b", "c", "d", "e")
    story.running("a", "b", "c", "d", round=1)
    story.world.crash("b")
    story.running("a", "e", "c", "d", round=2)
    story.world.crash("e")
    story.running("a", "c", round=3)
    story.start("f")
    story.running("a", "c", "d", "f", round=4)


def test_below_the_minimum_nothing_forms() -> None:
    story = Story("3:6", unit=2)
    story.start("a", "b", "c", "d")
    story.running("a", "b", "c", "d", round=1)
    story.world.crash("d")
    reason = story.ends(ExitCode.NOT_ENOUGH_NODES)
    assert reason.startswith("3 nodes ready, at least 4 needed (--nnodes=3:6 in units of 2) for 20 s")


def test_leaving_node_is_counted_out_and_exits_in_good_order() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.launchers[NodeId("c")].interrupt(15)
    assert story.running("a", "b", round=2) < 2.0
    launcher = story.world.launchers[NodeId("c")]
    story.world.run_until(lambda: launcher.outcome is not None, 1.0, "the node leaves")
    left = launcher.outcome
    assert left is not None
    assert (left.exit_code, left.reason, left.drained) == (ExitCode.OK, "left the job on SIGTERM", True)
    assert story.record.restarts == 0


def test_budget_is_used_up() -> None:
    story = Story("2", restarts=1)
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.fail_worker("a")
    story.running("a", "b", round=2)
    story.world.fail_worker("b", 1, code=3)
    reason = story.ends(ExitCode.WORKER_FAILED)
    assert reason == "worker 3 on b ended with exit status 3; the only restart is used (--max-restarts=1)"
    assert story.record.outcome is not None
    assert story.record.outcome.failures[0].node == "b"


def test_failures_that_come_before_the_node_loss_that_caused_them_are_not_charged() -> None:
    story = Story("1:3", restarts=0)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    pairs = story.world.partition(["c"])  # nobody can tell that c died ...
    story.group.hangs = False
    story.world.crash("c")
    story.running("a", "b", round=2, within_s=9.0)  # ... until its lease has ended
    assert story.record.restarts == 0
    story.world.network.heal(pairs)


def test_success_needs_every_worker() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    assert story.finish() == "all 6 workers of round 1 ended with status 0"
    assert {launcher.outcome.exit_code for launcher in story.world.launchers.values() if launcher.outcome} == {0}


def test_all_launchers_learn_the_outcome_although_the_master_dies_with_it() -> None:
    story = Story("1:3")
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.training.shorten(0.5)

    def last_write() -> bool:
        done = story.record.done
        story.world.deps.kill_on_write = len(done) == 2
        return story.world.ended()

    story.world.run_until(last_write, 10.0, "the end is written")
    story.world.run_until(lambda: not story.world.alive(), 30.0, "every launcher exits")
    codes = [launcher.outcome.exit_code for launcher in story.world.launchers.values() if launcher.outcome]
    assert codes == [0, 0]


@pytest.mark.parametrize("level", FaultTolerance)
def test_lease_lost_while_alive_costs_one_round(level: FaultTolerance) -> None:
    story = Story("3", level)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.store.revoke(story.world.launchers[NodeId("b")].info.incarnation)
    story.running("a", "b", "c", round=2, within_s=6.0)
    assert story.record.restarts == 0
    story.stays(10.0)


def test_deaf_workers_of_a_node_that_is_cut_off_are_killed_all_the_same() -> None:
    story = Story("1:2")
    story.start("a", "b")
    story.running("a", "b", round=1)
    for local_rank in (0, 1):
        story.world.worker("b", local_rank).deaf = True
    story.group.hangs = True
    story.world.partition(["b"])
    story.world.run(14.0)
    assert story.workers_of("b") == 0


def test_fork_server_that_dies_before_the_start_order_comes_costs_one_round() -> None:
    story = Story("2")
    story.start("a", "b")
    story.world.run_until(lambda: story.world.checks.record is not None, 3.0, "the Master has begun")
    story.world.run_until(lambda: bool(story.world.checks.worlds), 3.0, "the first world is recorded")
    story.world.launchers[NodeId("b")].lose_fork_server()
    story.running("a", "b", round=2)
    assert story.record.restarts <= story.world.checks.worker_failures


# --- workers that keep their process, and the state they keep --------------------------------------------------------

RERUN = Script(step_s=0.2)


def trio(script: Script = RERUN, seed: int = 7) -> Story:
    story = Story("1:3", script=script, seed=seed)
    story.start("a", "b", "c")
    story.running("a", "b", "c", round=1)
    story.world.run(4.0)
    return story


def test_killed_worker_costs_others_one_step_and_its_node_comes_back_at_a_boundary() -> None:
    story = trio(seed=1)  # b's new processes come too late for round 2; with many seeds they are in time
    story.world.kill_worker("b", 1)
    assert story.running("a", "c", round=2) < 1.0
    assert story.ways("a") == story.ways("c") == ["in process"] * 2
    assert story.last.restore.era == 1
    assert story.passed(1) - story.last.restore.commit <= 1
    story.running("a", "c", "b", round=3, within_s=6.0)
    assert story.ways("a") == ["in process"] * 2
    assert story.last.restore == Version(2, story.passed(2)), "no step is redone"
    assert story.record.restarts == 1


def test_newcomer_costs_no_step() -> None:
    story = Story("1:3", script=RERUN)
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.run(3.0)
    story.start("c")
    story.running("a", "b", "c", round=2, within_s=4.0)
    assert story.last.restore == Version(1, story.passed(1)) > Version(1, 5)
    assert {source.node for source in story.last.sources} == {"a", "b"}


def test_drained_node_waits_for_the_others_and_costs_no_step() -> None:
    story = trio()
    story.world.launchers[NodeId("c")].interrupt(15)
    assert story.running("a", "b", round=2) < 2.0
    assert story.last.restore == Version(1, story.passed(1))
    story.world.run_until(lambda: not story.world.launchers[NodeId("c")].alive, 2.0, "c goes")
    assert story.record.restarts == 0


def test_spare_takes_over_the_state_of_a_single_node_from_its_copy() -> None:
    story = Story("1", script=RERUN)
    story.start("a", "b")
    story.running("a", round=1)
    story.world.run(4.0)
    story.world.crash("a")
    story.running("b", round=2)
    assert story.last.restore.era == 1
    assert story.passed(1) - story.last.restore.commit <= 3, "copies are sent in the background"


def test_job_that_is_started_again_goes_on_from_the_checkpoint_directory() -> None:
    directory = Directory()
    first = Story("2", script=RERUN, directory=directory)
    first.start("a", "b")
    first.running("a", "b", round=1)
    first.world.run(4.0)
    first.world.ask(Purpose.KILL, by_file=False)
    assert first.ends(ExitCode.KILLED) == "stopped by somebody"
    assert directory.usable() == Version(1, first.passed(1))
    second = Story("1", script=RERUN, directory=directory)
    second.start("x")
    second.running("x", round=1, within_s=6.0)
    assert (second.last.restore, second.last.era) == (directory.usable(), 2)


def test_corrupt_checkpoint_is_passed_over_and_without_a_good_one_nothing_starts() -> None:
    directory = Directory()
    for commit in (5, 9):
        directory.write(Version(3, commit))
    directory.entries[Version(3, 9)].corrupt = True
    story = Story("1", script=RERUN, directory=directory)
    story.start("a")
    story.running("a", round=1, within_s=6.0)
    assert (story.last.restore, story.last.era) == (Version(3, 5), 4)
    directory.entries[Version(3, 5)].corrupt = True
    spoilt = Story("1", script=RERUN, directory=directory)
    spoilt.start("a")
    assert spoilt.ends(ExitCode.CHECKPOINT_UNUSABLE) == "every checkpoint is corrupt"


def test_what_a_silent_node_writes_after_the_end_is_for_the_next_job() -> None:
    directory = Directory()
    directory.write(Version(3, 5))
    story = Story("1:2", script=RERUN, directory=directory)
    story.start("a", "b", "c")
    story.running("a", "b", round=1, within_s=6.0)
    story.world.run(4.0)
    story.world.spoil()
    cut = story.world.partition(["b"])
    story.world.crash("a")
    story.world.run_until(story.world.ended, 60.0, "the job ends")
    assert directory.usable() == NO_STATE, "only the node that is cut off has a state"
    story.world.network.heal(cut)
    assert story.ends(ExitCode.CHECKPOINT_UNUSABLE) == "every checkpoint is corrupt"
    assert directory.usable() > Version(3, 5)
    story.world._judge_outcome()


@pytest.mark.parametrize("when", ["kill_on_hold", "kill_on_switch"])
def test_master_that_dies_while_workers_hold_leaves_nobody_waiting(when: str) -> None:
    story = Story("1:3", script=RERUN)
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.run(3.0)
    setattr(story.world.deps, when, True)
    story.start("c")
    story.world.run_until(lambda: not story.world.launchers[NodeId("a")].alive, 4.0, "the Master dies")
    story.running("c", "b", round=2, within_s=8.0)
    assert story.passed(1) - story.last.restore.commit <= 1
    story.world.run(2.0)
    assert story.passed(2) > story.last.restore.commit


def test_checkpoint_asked_for_is_written_at_a_boundary_and_training_goes_on() -> None:
    story = trio()
    story.world.ask(Purpose.SAVE, by_file=True)
    story.world.run_until(lambda: not story.world.directory.save_asked, 5.0, "it is written")
    before = story.passed(1)
    assert 0 < story.world.directory.usable().commit <= before
    story.world.run(2.0)
    assert (story.record.round, story.passed(1) > before) == (1, True)


def test_worker_that_does_not_park_is_restarted_and_only_it() -> None:
    story = trio(seed=8)
    stuck = story.world.worker("a")
    assert isinstance(stuck, Stepper)
    stuck.stuck = True
    story.world.crash("c")
    story.running("b", round=2, within_s=6.0)
    story.running("b", "a", round=3, within_s=8.0)
    assert sorted(story.ways("a")) == ["in process", "restarted (did not leave its round within 2 s)"]
    assert story.ways("b") == ["in process"] * 2


def test_source_that_dies_while_it_gives_the_state_is_not_charged() -> None:
    story = Story("1:2", restarts=0, script=RERUN)
    story.start("m", "a")
    story.running("m", "a", round=1)
    story.world.run(3.0)
    story.world.states.kill_source = True
    story.start("c")
    story.world.crash("m")
    story.world.run(15.0)
    assert story.record.phase is Phase.RUNNING
    assert story.record.restarts == 0


def test_sharded_state_grows_from_memory() -> None:
    story = Story("1:3", script=Script(rejoins=False, sharded=True, step_s=1.0))
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.run(3.0)
    story.start("c")
    story.running("a", "b", "c", round=2, within_s=5.0)
    assert (story.last.restore, story.last.stored) == (Version(1, story.passed(1)), False), "no step is lost"


def test_sharded_state_is_read_at_another_size_from_the_checkpoint_directory() -> None:
    directory = Directory()
    for shard in range(3):
        directory.write(Version(2, 8), shard, 3)
    story = Story("1:2", script=Script(rejoins=False, sharded=True, step_s=0.2), directory=directory)
    story.start("a", "b")
    story.running("a", "b", round=1)
    assert (story.last.restore, story.last.stored, story.last.era) == (Version(2, 8), True, 3)


def test_a_damaged_sharded_checkpoint_is_passed_over_by_all_nodes_and_costs_no_restart() -> None:
    directory = Directory()
    for commit in (4, 8):
        for shard in range(3):
            directory.write(Version(2, commit), shard, 3)
    directory.entries[Version(2, 8)].corrupt = True
    story = Story("1:2", script=Script(rejoins=False, sharded=True, step_s=0.2), directory=directory)
    story.start("a", "b")
    story.running("a", "b", round=1, within_s=20.0)
    assert (story.last.restore, story.last.stored) == (Version(2, 4), True)
    assert story.record.restarts == 0


def test_sharded_checkpoints_of_which_none_is_whole_end_the_job() -> None:
    directory = Directory()
    for shard in range(3):
        directory.write(Version(2, 8), shard, 3)
    directory.entries[Version(2, 8)].corrupt = True
    story = Story("1:2", script=Script(rejoins=False, sharded=True), directory=directory)
    story.start("a", "b")
    assert story.ends(ExitCode.CHECKPOINT_UNUSABLE) == "every checkpoint is corrupt"
