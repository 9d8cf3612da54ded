"""The placement machine: pservers and trainers come and go, checkpoints are made."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edl.job_records import Replication, Training
from edl.master import service as sv
from edl.master.service import Caller
from edl.types import NodeId, Round
from edl.wire.records import Settings
from ps.protocol import messages
from ps.protocol.messages import MOST_NUMBER
from ps.server.bucket_machine import SERVED, BucketMachine
from ps.spec import TableSpec
from tests.support.ps_cluster_fixture import TABLE, Cluster

FOUND = messages.FoundCheckpoints(
    7, (messages.FoundCheckpoint("checkpoint-7", 7, 50, (TABLE,), '{"values": {"a/0": "1"}}'),)
)


def cluster(*names: str, training: Training | None = None) -> Cluster:
    return Cluster(training).started(*(names or ("p", "q")))


# --- pservers --------------------------------------------------------------------------------------------------------


def test_it_waits_for_the_least_and_a_moment_for_more() -> None:
    one = Cluster(Training(servers=(2, 4)))
    one.add("p")
    one.pass_time(5.0)
    assert one.machine.state.stage == "new"
    one.add("q")
    one.pass_time(0.5)
    assert one.machine.state.stage == "new"
    one.add("r")
    one.pass_time(0.6)
    assert set(one.machine.state.grid.owner) == {1, 2, 3}


def test_it_does_not_wait_when_the_most_are_there() -> None:
    one = Cluster(Training(servers=(1, 2)))
    one.add("p")
    one.add("q")
    assert set(one.machine.state.grid.owner) == {1, 2}


def test_pservers_above_the_most_are_spares() -> None:
    one = cluster("p", "q", "r", training=Training(servers=(1, 2)))
    assert one.machine.state.grid.holders() == {1, 2}
    one.kill("p")
    assert one.machine.state.grid.holders() == {2, 3}


def test_every_bucket_is_served_by_its_owner_only() -> None:
    one = cluster("p", "q", "r")
    for bucket in range(one.buckets):
        serving = [h.number for h in one.bucket_machines.values() if h.allowed[bucket] == SERVED]
        assert serving == [one.machine.state.grid.owner[bucket]]


def test_a_newcomer_gets_its_share_while_all_goes_on() -> None:
    one = cluster()
    one.add("r")
    owned = [list(one.machine.state.grid.owner).count(number) for number in (1, 2, 3)]
    assert sorted(owned) == [2, 3, 3]
    assert one.machine.state.grid.in_motion() == 0


def test_who_leaves_is_sent_away_when_it_has_nothing_any_more() -> None:
    one = cluster("p", "q", "r")
    one.drain("q")
    leaver = one.bucket_machines["servers/q"]
    assert leaver.orders is not None and leaver.orders.drain and leaver.orders.go
    assert 2 not in one.machine.state.grid.holders()
    stays = one.bucket_machines["servers/p"]
    assert stays.orders is not None and not stays.orders.go


def test_the_last_one_cannot_leave() -> None:
    one = cluster("p", training=Training(servers=(1, 2)))
    one.drain("p")
    assert "p cannot leave: there is no other pserver to take its buckets" in one.notes
    assert one.machine.state.grid.holders() == {1}


def test_a_death_loses_nothing_that_has_a_copy() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a")
    one.kill("p")
    assert set(one.machine.state.grid.owner) == {2}
    assert one.machine.state.history == 1
    assert not one.failed
    assert "1 of at least 2 pservers are left; no data is lost, continuing" in one.notes


def test_a_refused_line_is_a_death_and_a_broken_one_is_not() -> None:
    one = cluster()
    one.feed(sv.LineDown("servers/p", False))
    assert set(one.machine.state.servers) == {1, 2}
    one.feed(sv.LineDown("servers/p", True))
    assert set(one.machine.state.servers) == {2}


def test_a_process_that_comes_back_empty_is_another_one() -> None:
    one = cluster("p", "q", "r")
    one.bucket_machines["servers/p"] = BucketMachine("servers/p", buckets=one.buckets)
    one.feed(sv.LineUp("servers/p"))
    one.say("p", one.bucket_machines["servers/p"].hello())
    assert one.machine.state.named("servers/p") is not None
    assert set(one.machine.state.servers) == {2, 3, 4}, "numbers are never used again"


def test_what_is_said_before_hello_counts_for_nothing() -> None:
    one = cluster()
    one.feed(sv.LineDown("servers/p", False))
    one.say("p", messages.Unsynced(10**6, 2, ((0, 8),)))
    assert one.machine.state.grid.in_motion() == 0


def test_nonsense_is_noted() -> None:
    one = cluster()
    one.feed(sv.HelperSaid("servers/p", "nonsense"))
    one.feed(sv.KeyPut("servers/x", b"nonsense"))
    assert "not a message of the parameter servers" in one.notes[-2]
    assert "does not describe a pserver" in one.notes[-1]


def test_without_pservers_it_fails_in_the_end_and_says_why() -> None:
    one = Cluster(Training(servers=(2, 4)))
    one.add("p")
    one.pass_time(700.0)
    assert "1 of at least 2 pservers have connected within 600 s" in one.failed


@pytest.mark.parametrize("replication", [Replication.SYNC, Replication.NONE])
def test_lost_rows_without_a_checkpoint_end_the_job(replication: Replication) -> None:
    one = cluster(training=Training(servers=(1, 4), replication=replication))
    one.world("a")
    one.trainer("a")
    one.kill("p")
    if replication is Replication.SYNC:
        assert not one.failed
        one.kill("q")
        one.add("r")
    one.pass_time(5.0)
    assert "was the only holder" in one.failed and "there is no complete checkpoint" in one.failed


def test_empty_buckets_are_no_loss() -> None:
    one = cluster(training=Training(servers=(1, 4), replication=Replication.NONE))
    one.kill("p")
    assert set(one.machine.state.grid.owner) == {2}
    assert one.machine.state.history == 1


def test_hot_buckets_are_spread() -> None:
    one = cluster("p", "q", "r")
    load = messages.PserverLoad(0, 0, 0, 0, 0, 0, 0, 0.0, ((0, 1000), (1, 900)))
    before = one.machine.state.grid.owner[0], one.machine.state.grid.owner[1]
    one.say("p", load)
    assert (one.machine.state.grid.owner[0], one.machine.state.grid.owner[1]) != before
    assert one.machine.state.grid.in_motion() == 0


# --- trainers --------------------------------------------------------------------------------------------------------


def test_trainers_are_let_in_when_every_bucket_has_an_owner() -> None:
    one = Cluster()
    one.world("a")
    one.tell("a", messages.Join("n", (TABLE,)))
    assert one.heard("a", messages.Joined) == []
    one.started("p", "q")
    joined = one.heard("a", messages.Joined)
    assert len(joined) == 1
    assert (joined[0].number, joined[0].secret, joined[0].tables, joined[0].restored) == (1, "s", (TABLE,), "")


def test_the_same_process_gets_the_same_number() -> None:
    one = cluster()
    one.world("a")
    assert one.trainer("a", "n") == 1
    one.tell("a", messages.Join("n", (TABLE,)))
    assert [joined.number for joined in one.heard("a", messages.Joined)] == [1, 1]


def test_another_process_in_the_slot_takes_its_place() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a", "n")
    assert one.trainer("a", "m") == 2
    orders = one.bucket_machines["servers/p"].orders
    assert orders is not None
    assert (orders.revoked, [member.number for member in orders.members]) == ((1,), [2])
    one.tell("a", messages.Begin(1))
    assert one.heard("a", messages.RequestRefused)[-1].kind == "stale"


def test_the_epoch_counts_those_that_have_begun() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    number = one.trainer("b")
    epoch = one.machine.state.people.epoch
    assert one.members("a") == ["a/0", "b/0"]
    one.tell("b", messages.LeaveMembership(number))
    assert one.machine.state.people.epoch == epoch + 1
    assert one.members("a") == ["a/0"]
    one.tell("b", messages.Begin(number))
    assert len(one.machine.state.members()) == 2, "its number is good as long as it lives"


def test_a_world_without_its_node_ends_a_trainer_and_no_other() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.trainer("b")
    one.feed(sv.WorldEnded(Round(1), "a node left"))
    assert len(one.machine.state.members()) == 2
    one.world("b", "c", number=2)
    assert [member.name for member in one.machine.state.members()] == ["b/0"]
    one.tell("a", messages.Join("x"))
    assert one.heard("a", messages.RequestRefused)[-1].kind == "stale"


def test_a_trainer_whose_connections_broke_is_gone() -> None:
    one = cluster()
    one.world("a")
    number = one.trainer("a")
    one.say("p", messages.TrainerLost(number))
    assert one.machine.state.members() == ()


def test_the_first_definition_of_a_table_counts() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.tell("b", messages.Join("b", (TableSpec("users", 16),)))
    refused = one.heard("b", messages.RequestRefused)[-1]
    assert (refused.kind, refused.text) == (
        "table",
        "table users: dim 16 here, 8 there (here: this script, there: the job)",
    )
    one.trainer("b", "c", (TABLE, TableSpec("items", 4)))
    assert set(one.machine.state.tables) == {"users", "items"}


def test_a_newer_placement_map_is_sent_to_clients_with_an_older_one() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a")
    told = len(one.heard("a", messages.PlacementUpdate))
    one.tell("a", messages.GetPlacement(one.machine.state.version))
    assert len(one.heard("a", messages.PlacementUpdate)) == told
    one.tell("a", messages.GetPlacement(0))
    assert len(one.heard("a", messages.PlacementUpdate)) == told + 1


def test_learning_rates_apply_from_a_step_that_no_trainer_has_reached() -> None:
    one = cluster()
    one.world("a")
    number = one.trainer("a")
    one.say("p", messages.PserverLoad(0, 0, 0, 0, 0, 0, 99, 0.0))
    one.tell("a", messages.SetLr(number, messages.LrHold(0, 0.5)))
    one.tell("a", messages.SetLr(number, messages.LrHold(500, 0.1, "users")))
    one.feed(sv.SettingsHold(Settings(number=1, factor=2.0)))
    orders = one.bucket_machines["servers/p"].orders
    assert orders is not None
    holds = {(hold.step, hold.table): hold.factor for hold in orders.lr}
    assert holds == {(100, ""): 1.0, (500, "users"): 0.2}, (
        "what is still to come is multiplied, and not brought forward"
    )
    one.say("p", messages.PserverLoad(0, 0, 0, 0, 0, 0, 599, 0.0))
    one.feed(sv.SettingsHold(Settings(number=2, factor=4.0)))
    assert one.bucket_machines["servers/p"].orders is not None
    holds = {(hold.step, hold.table): hold.factor for hold in one.bucket_machines["servers/p"].orders.lr}
    assert (holds[600, ""], holds[600, "users"], holds[500, "users"]) == (2.0, 0.4, 0.2)
    one.tell("a", messages.SetLr(number, messages.LrHold(700, 1.0)))
    again = {(hold.step, hold.table): hold.factor for hold in one.machine.state.lr}
    assert again == {**holds, (700, ""): 4.0}
    assert one.heard("a", messages.LrSet) == []
    one.tell("a", messages.SetLr(number, messages.LrHold(700, 1.0), 77))
    assert one.heard("a", messages.LrSet) == [messages.LrSet(77)]
    one.tell("a", messages.SetLr(number, messages.LrHold(0, 0.5, "other"), 78))
    refused = one.heard("a", messages.RequestRefused)[-1]
    assert "there is no table other" in refused.text and refused.ask == 78


def test_nonsense_is_answered() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a")
    one.feed(sv.Said(Caller(NodeId("a"), 0), Round(1), "nonsense"))
    assert one.heard("a", messages.RequestRefused)[-1].kind == "word"
    one.tell("a", messages.Followed(1))
    assert "not a message that a trainer sends" in one.heard("a", messages.RequestRefused)[-1].text


# --- checkpoints -----------------------------------------------------------------------------------------------------


def halted(one: Cluster, *nodes: str) -> None:
    for node in nodes:
        checkpoint = one.heard(node, messages.Halt)[-1].checkpoint
        one.tell(node, messages.AtCheckpoint(checkpoint, 10, f'"{node}"'))


def test_a_checkpoint_stops_all_names_the_data_marks_and_lets_go() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.trainer("b")
    one.tell("a", messages.Save(5))
    halted(one, "a")
    assert one.heard("a", messages.NameData) == []
    halted(one, "b")
    one.tell("a", messages.DataNamed(1, (("train", "here"),)))
    assert [one.heard(node, messages.GoOn) for node in "ab"] == [[messages.GoOn(1)]] * 2
    assert one.heard("a", messages.CheckpointSaved) == [messages.CheckpointSaved(5, 1, "checkpoint-1")]
    assert "checkpoint 1 is complete: checkpoint-1" in one.notes


def test_who_dies_on_the_way_to_the_boundary_is_left_out() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.trainer("b")
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.world("a", number=2)
    one.tell("a", messages.DataNamed(1, ()))
    assert one.heard("a", messages.CheckpointSaved)


def test_who_does_not_stop_is_named() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.trainer("b")
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.pass_time(61.0)
    refused = one.heard("a", messages.RequestRefused)[-1]
    assert (refused.kind, refused.ask) == ("save", 1)
    assert "b/0 reached no step boundary in time" in refused.text
    assert one.heard("a", messages.GoOn)


def test_a_checkpoint_is_abandoned_when_a_pserver_dies() -> None:
    one = cluster("p", "q", "r")
    one.world("a")
    one.trainer("a")
    one.checkpoints = False
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.tell("a", messages.DataNamed(1, ()))
    assert one.machine.checkpoints.phase == "mark"
    one.kill("r")
    assert one.machine.checkpoints.phase == ""
    assert one.heard("a", messages.GoOn)
    assert "r was lost" in one.heard("a", messages.RequestRefused)[-1].text


def test_buckets_keep_still_until_the_mark() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a")
    one.tell("a", messages.Save(1))
    before = list(one.machine.state.grid.owner)
    one.add("r")
    assert (list(one.machine.state.grid.owner), one.machine.state.grid.in_motion()) == (before, 0)
    halted(one, "a")
    one.tell("a", messages.DataNamed(1, ()))
    assert 3 in one.machine.state.grid.owner


def test_nobody_begins_between_the_last_boundary_and_the_mark() -> None:
    one = cluster()
    one.world("a", "b")
    one.trainer("a")
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.trainer("b")
    assert len(one.machine.state.members()) == 1
    one.tell("a", messages.DataNamed(1, ()))
    assert len(one.machine.state.members()) == 2


def test_checkpoints_by_the_clock() -> None:
    one = cluster(training=Training(servers=(2, 4), save_every_s=30.0))
    one.world("a")
    one.trainer("a")
    one.pass_time(31.0)
    assert one.heard("a", messages.Halt) == [messages.Halt(1)]


def test_a_new_job_goes_on_from_the_newest_checkpoint() -> None:
    one = Cluster()
    one.found = FOUND
    one.started("p", "q")
    one.world("a")
    one.trainer("a")
    joined = one.heard("a", messages.Joined)[-1]
    assert (joined.step, json.loads(joined.restored)["run"]) == (50, "checkpoint-7")
    assert all(
        h.allowed[bucket] == SERVED
        for h in one.bucket_machines.values()
        for bucket in range(8)
        if h.owner[bucket] == h.number
    )
    one.tell("a", messages.Save(1))
    assert one.heard("a", messages.Halt) == [messages.Halt(8)], "numbers in the directory are not used again"


def test_a_lost_bucket_rolls_all_trainers_back() -> None:
    one = cluster("p", "q", "r", training=Training(servers=(1, 4), replication=Replication.NONE))
    one.world("a")
    one.trainer("a", "n")
    one.found = FOUND
    one.kill("p")
    assert one.heard("a", messages.RequestRefused)[-1].kind == "stale"
    one.pass_time(5.0)
    assert one.machine.state.history == 2
    assert one.trainer("a", "m") == 2
    assert json.loads(one.heard("a", messages.Joined)[-1].restored)["history"] == 2


def test_numbers_of_pservers_begin_again_where_they_do_not_fit_any_more() -> None:
    """One that ends as soon as it has its number is started some thousand times a day."""
    one = cluster("p", "q")
    one.machine.state.numbers = MOST_NUMBER - 1
    for name in ("r", "s"):
        one.add(name)
        one.pass_time(5.0)
    assert set(one.machine.state.servers) == {1, 2, MOST_NUMBER, 3}
    assert set(one.machine.state.grid.owner) == {1, 2, MOST_NUMBER, 3}
    assert not any(one.machine.state.grid.joining)


@pytest.mark.parametrize(("history", "step"), [(1, 50), (2, 900), (0, 900)])
def test_steps_before_a_rollback_do_not_count(history: int, step: int) -> None:
    """Learning rates that are set, and new trainers, begin with the next step of the checkpoint."""
    one = cluster("p", "q", "r", training=Training(servers=(1, 4), replication=Replication.NONE))
    one.world("a")
    one.trainer("a", "n")
    one.found = FOUND
    one.kill("p")
    one.pass_time(5.0)
    one.say("q", messages.PserverLoad(0, 0, 0, 0, 0, 0, 900, 0.0, history=history))
    assert one.machine.state.top_step == step


def test_a_learning_rate_set_by_hand_outlives_a_rollback() -> None:
    one = cluster("p", "q", "r", training=Training(servers=(1, 4), replication=Replication.NONE))
    one.world("a")
    number = one.trainer("a", "n")
    one.feed(sv.SettingsHold(Settings(number=1, factor=2.0)))
    one.tell("a", messages.SetLr(number, messages.LrHold(0, 0.5)))
    one.found = FOUND
    one.kill("p")
    one.pass_time(5.0)
    orders = one.bucket_machines["servers/q"].orders
    assert orders is not None and orders.lr == (messages.LrHold(0, 2.0, ""),)


def test_a_damaged_checkpoint_is_passed_over() -> None:
    one = Cluster()
    older = replace(FOUND.checkpoints[0], run="checkpoint-6", number=6, step=40)
    one.found = messages.FoundCheckpoints(7, (*FOUND.checkpoints, older))
    one.bad = {"checkpoint-7"}
    one.started("p", "q")
    assert one.machine.state.found == (older,)
    assert any("checkpoint-7 cannot be restored" in note and "damaged" in note for note in one.notes)


def test_tables_that_differ_from_the_checkpoint_are_refused_and_it_stays() -> None:
    one = Cluster()
    one.found = messages.FoundCheckpoints(7, (replace(FOUND.checkpoints[0], tables=(TABLE,)),))
    one.world("a", "b")
    one.tell("a", messages.Join("a", (TableSpec("users", 16),)))  # before anybody knows of a checkpoint
    one.started("p", "q")
    (refused,) = one.heard("a", messages.RequestRefused)
    assert refused.kind == "table" and "table users: dim 16 here, 8 there" in refused.text
    assert "(here: the script, there: the checkpoint)" in refused.text and "--checkpoint-dir" in refused.text
    state = one.machine.state
    assert state.found == one.found.checkpoints and state.whole and state.tables == {"users": TABLE} and not one.failed
    one.tell("a", messages.Join("a2", (TableSpec("users", 16),)))
    assert one.heard("a", messages.RequestRefused)[-1].kind == "table" and not one.heard("a", messages.Joined)
    one.tell("a", messages.Join("a3", (TableSpec("clients", 8),)))
    assert "table clients: in the script, not in the checkpoint" in one.heard("a", messages.RequestRefused)[-1].text
    assert one.trainer("b", "b", (TABLE, TableSpec("more", 4)))


def test_no_pserver_hears_of_tables_before_a_checkpoint_has_been_looked_for() -> None:
    one = Cluster()
    one.world("a")
    one.tell("a", messages.Join("a", (TableSpec("users", 16),)))
    one.add("p")
    orders = one.bucket_machines["servers/p"].orders
    assert orders is not None and orders.tables == ()
    one.add("q")
    one.pass_time(2.0)
    orders = one.bucket_machines["servers/p"].orders
    assert orders is not None and orders.tables == (TableSpec("users", 16),)


def test_a_pserver_that_cannot_restore_any_checkpoint_discards_none() -> None:
    one = Cluster()
    older = replace(FOUND.checkpoints[0], run="checkpoint-6", number=6, step=40)
    one.found, one.bad, one.lasting = messages.FoundCheckpoints(7, (*FOUND.checkpoints, older)), {"checkpoint-7"}, True
    one.add("p")
    one.add("q")
    one.pass_time(2.0)
    assert "checkpoint-7 cannot be restored" in one.failed and one.machine.state.found == (*FOUND.checkpoints, older)


def test_trainers_that_wait_for_admission_learn_the_reason() -> None:
    one = Cluster()
    one.world("a")
    one.add("p")
    one.tell("a", messages.Join("a", (TABLE,)))
    assert one.heard("a", messages.Waits) == [messages.Waits("waiting for at least 2 pservers; 1 is there")]
    assert "waiting for at least 2 pservers; 1 is there" in one.machine.report()[0].text


def test_a_checkpoint_that_can_never_be_is_not_to_be_asked_for_again() -> None:
    one = cluster()
    one.world("a")
    one.checkpoints = False
    one.tell("a", messages.Save(1))
    number = one.trainer("a")
    one.tell("a", messages.Save(1))
    checkpoint = one.heard("a", messages.Halt)[-1].checkpoint
    one.tell("a", messages.AtCheckpoint(checkpoint, 0))
    one.tell("a", messages.DataNamed(checkpoint, ()))
    one.say("p", messages.CheckpointPhaseDone(checkpoint, "mark", "there is no checkpoint directory", lasting=True))
    refused = one.heard("a", messages.RequestRefused)[-1]
    assert number and "no checkpoint directory" in refused.text and "ask again" not in refused.text


def test_when_no_checkpoint_can_be_used_the_job_does_not_start_over() -> None:
    one = Cluster()
    one.found = messages.FoundCheckpoints(7, (), ("checkpoint-7: its manifest is damaged",))
    one.add("p")
    one.add("q")
    one.pass_time(2.0)
    assert "checkpoint-7: its manifest is damaged" in one.failed
    other = Cluster()
    other.found, other.bad = FOUND, {"checkpoint-7"}
    other.add("p")
    other.add("q")
    other.pass_time(2.0)
    assert "no checkpoint could be restored" in other.failed


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_shows_progress() -> None:
    one = Cluster()
    assert "waiting for at least 2" in one.machine.report()[0].text
    one.started("p", "q")
    one.world("a")
    one.trainer("a")
    one.say("p", messages.PserverLoad(1000, 2 << 20, 0, 0, 0, 0, 5, 0.3))
    texts = [progress.text for progress in one.machine.report()]
    assert texts[0] == "2 pservers, all copies in sync"
    assert texts[1] == "p: 4 buckets, 4 copies, 1,000 rows, 2 MiB, copies 0.3 s behind"
    assert texts[3] == "1 trainers: a/0"


def test_the_report_says_when_there_are_no_copies() -> None:
    one = cluster("p", training=Training(servers=(1, 2)))
    assert "no copies: there is only one pserver" in one.machine.report()[0].text
    two = cluster(training=Training(servers=(1, 2), replication=Replication.NONE))
    assert "no copies (replication none)" in two.machine.report()[0].text
