"""Before the first trainer: a pserver looks for checkpoints, once in each history."""

from __future__ import annotations

from edl.job_records import Replication, Training
from tests.support.ps_cluster_fixture import Cluster


def test_a_new_history_begins_when_no_pserver_may_take_the_empty_buckets() -> None:
    """The one that stays has looked already, and would not answer again."""
    one = Cluster(Training(servers=(2, 4), replication=Replication.NONE)).started("p", "q")
    one.drain("p")
    one.kill("q")
    assert one.machine.state.stage == "new"
    one.add("r")
    one.add("s")
    one.pass_time(1.0)
    assert one.machine.state.stage == "placed"
    assert {machine.history for machine in one.bucket_machines.values()} == {2}
