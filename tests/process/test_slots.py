"""Slots that are dropped and come back, in real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.harness import Job, OutsideEtcd, alive, until
from tests.process.test_rejoin import job, redone


def test_a_bad_card_costs_one_card(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """Four slots, and in one of them every worker fails at its start."""
    options = ("--bad-slot=a/1",)
    with Job(tmp_path, [etcd.endpoint], nnodes="1:2", arguments=options) as running:
        a = running.start("a", nproc=4)
        three = running.wait_world(3)
        status = running.wait_status(lambda seen: seen["world_size"] == 3, "a world of three")
        assert (status["restarts_used"], status["restarts_allowed"]) == (2, 3)
        (dropped,) = status["dropped"]
        assert (dropped["node"], dropped["slot"]) == ("a", 1)
        assert "failed by itself 2 times" in dropped["why"]
        assert "RuntimeError: the card in a/1 does not answer" in dropped["why"]
        assert status["nodes"][0]["places"] == [0, 2, 3]
        shown = running.cli("status").stdout
        assert "Dropped: slot 1 of a" in shown and "does not answer" in shown
        assert "edl uncordon a --device=1" in shown and "0,2,3 of 4" in shown
        running.start("b", nproc=4)
        seven = running.wait_world(7, after=three.round)
        assert (seven.ranks("a"), seven.ranks("b")) == ([0, 1, 2], [3, 4, 5, 6])
        (running.steps_folder / "repaired").touch()
        back = running.cli("uncordon", "a", "--device=1", "--wait")
        assert back.returncode == 0 and back.stdout.strip() == "slot 1 of a may take part again"
        eight = running.wait_world(8, after=seven.round)
        assert eight.ranks("a") == [0, 1, 2, 3]
        refused = running.cli("cordon", "b", "--device=4")
        assert refused.returncode != 0 and "b has no slot or device 4: it has slots 0 to 3" in refused.stderr
        running.end_soon()
        assert running.exit_codes() == {"a": 0, "b": 0}
    for name in "ab":
        text = running.nodes[name].text
        assert "slot 1 of a dropped: failed by itself 2 times" in text or name == "b", text
        assert "slot 1 of a takes part" in text
    assert a.text.count("RuntimeError: the card in a/1 does not answer; restart") == 2


@pytest.mark.slow
@pytest.mark.soak_but("torch")
def test_by_hand_no_step_is_lost(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """Workers that can hold at a boundary: the others keep their processes, whatever their local ranks become."""
    with job(etcd, tmp_path, framework, nnodes="1") as running:
        running.start("a", nproc=3)
        three = running.wait_world(3)
        running.wait_steps(5)
        done = running.cli("cordon", "a", "--device=1", "--reason=it smells", "--wait")
        assert (done.returncode, done.stdout.strip()) == (0, "slot 1 of a takes no part"), done.stderr
        two = running.wait_world(2, after=three.round)
        assert two.pids == {0: three.pids[0], 1: three.pids[2]}
        until(lambda: not alive(three.pids[1]), "the end of the worker in the dropped slot")
        running.wait_steps(5)
        assert running.cli("uncordon", "a", "--device=1", "--wait").returncode == 0
        back = running.wait_world(3, after=two.round)
        assert {back.pids[0], back.pids[2]} == {three.pids[0], three.pids[2]}
        running.wait_steps(5)
        assert redone(running.steps()) == []
        running.end_soon()
        assert running.exit_codes() == {"a": 0}
