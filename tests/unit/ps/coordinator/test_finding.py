"""The search for checkpoints: which pserver looks, and what happens if it cannot read the directory."""

from __future__ import annotations

import pytest

from edl.master import service as sv
from ps.coordinator.report import waiting
from ps.protocol import messages
from tests.support.ps_cluster_fixture import Cluster

FAILED = messages.CheckpointPhaseDone(0, "find", "the directory does not answer")


def test_a_search_that_fails_is_repeated_and_reported_meanwhile() -> None:
    one = Cluster()
    one.found = FAILED
    one.add("p")
    one.add("q")
    one.pass_time(60.0)
    text = "pserver p cannot read the checkpoints: the directory does not answer"
    assert waiting(one.machine.state) == f"looking for a checkpoint; {text}"
    assert one.notes.count(text) == 1
    one.found = messages.FoundCheckpoints(0)
    one.pass_time(10.0)
    assert one.machine.state.stage == "placed" and not one.failed
    assert waiting(one.machine.state) == ""
    one.pass_time(1000.0)
    assert not one.failed


@pytest.mark.parametrize("reason", ["", "pserver x was the only holder of 4 of 8 buckets"])
def test_a_search_that_keeps_failing_ends_the_job(reason: str) -> None:
    one = Cluster(recover_s=100.0)
    one.machine.state.reason = reason
    one.found = FAILED
    one.add("p")
    one.add("q")
    one.pass_time(99.0)
    assert not one.failed
    one.pass_time(10.0)
    text = "pserver p cannot read the checkpoints: the directory does not answer"
    assert one.failed == (f"{reason}, and {text}" if reason else text)


def test_the_next_one_looks_when_the_one_that_could_not_dies() -> None:
    one = Cluster()
    one.found = FAILED
    for name in ("p", "q", "r"):
        one.add(name)
    one.pass_time(20.0)
    one.found = messages.FoundCheckpoints(0)
    one.kill("p")
    assert one.machine.state.stage == "placed"


def test_a_pserver_with_a_checkpoint_directory_looks_for_checkpoints() -> None:
    one = Cluster()
    one.found = messages.CheckpointPhaseDone(0, "find")  # no answer yet
    one.key_content = {"saves": False}
    one.add("p")
    one.key_content = {}
    one.add("q")
    one.pass_time(2.0)
    assert [one.orders[f"servers/{name}"].checkpoint for name in "pq"] == [None, messages.CheckpointOrder(0, "find")]
    one.say("p", messages.FoundCheckpoints(0))
    assert one.machine.state.stage == "finding", "p cannot know"
    one.say("q", messages.FoundCheckpoints(0))
    assert one.machine.state.stage == "placed"


def test_a_new_master_asks_the_one_with_a_directory_too() -> None:
    one = Cluster()
    one.found = messages.CheckpointPhaseDone(0, "find")
    one.key_content = {"saves": False}
    one.add("q")
    one.key_content = {}
    one.add("p")
    one.pass_time(2.0)
    machines, one.bucket_machines = one.bucket_machines, {}
    one.new_machine()
    one.found = messages.FoundCheckpoints(0)
    one.bucket_machines = {"servers/p": machines["servers/p"]}
    one.orders.clear()
    one.register_again("p")
    one.bucket_machines["servers/q"] = machines["servers/q"]
    one.key_content = {"saves": False}
    one.register_again("q")
    assert one.machine.state.stage == "placed"


def test_without_any_directory_the_search_finds_nothing() -> None:
    one = Cluster()
    one.key_content = {"saves": False}
    one.started("p", "q")
    one.feed(sv.Tick())
    assert one.machine.state.stage == "placed"
