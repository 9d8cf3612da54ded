"""A new worker's device is warmed up while the others train."""

from __future__ import annotations

from pathlib import Path

from tests.process.harness import WORKERS, Job, OutsideEtcd, until


def test_the_others_train_while_a_new_worker_warms_its_device_up(etcd: OutsideEtcd, tmp_path: Path) -> None:
    script = (str(WORKERS / "rejoin_plain.py"),)
    with Job(tmp_path, [etcd.endpoint], script=script, arguments=("--slow-device",)) as running:
        running.start("a")
        alone = running.wait_world(1)
        running.start("b")
        warming = running.steps_folder / "warming"
        until(lambda: warming.exists() and warming.read_text().endswith("\n"), "the new worker at its device")
        still = running.wait_steps(20, world=1)
        assert still.round == alone.round
        (running.steps_folder / "warm").touch()
        together = running.wait_world(2, after=alone.round)
        assert together.pids_of("a") == alone.pids_of("a")
        assert warming.read_text() == "b 0\n", "a's worker was started together with its world"
        running.nodes["b"].says("so the first step will take longer: it is no device")
        running.end_soon(20)
        assert set(running.exit_codes().values()) == {0}
