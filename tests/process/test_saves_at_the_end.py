"""A save that ``save()`` accepted is in the checkpoint directory when the job succeeds, or the status names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import OutsideEtcd
from tests.process.test_state_switches import complete, job


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.slow
def test_the_last_save_is_written_though_an_earlier_one_still_was(
    etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path
) -> None:
    """Each save takes far longer than a step."""
    script = ("--steps=6", "--save-every=1", "--pause=0", "--ballast=200")
    with job(etcd, tmp_path, checkpoints, *script) as running:
        running.start("a", "b")
        assert running.exit_codes() == {"a": 0, "b": 0}
    assert complete(checkpoints)[-1] == 6


def test_a_last_save_that_cannot_be_written_is_in_the_exit_status(
    etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path
) -> None:
    checkpoints.mkdir()
    (checkpoints / "commit-0000000004.era-0000000001").write_text("no folder")
    with job(etcd, tmp_path, checkpoints, "--steps=4", "--save-every=2") as running:
        running.start("a", "b")
        assert running.exit_codes() == {"a": ExitCode.INCOMPLETE, "b": ExitCode.INCOMPLETE}
        for node in running.nodes.values():
            assert "commit 4, the newest saved one, is not in the checkpoint directory" in node.text
            assert str(checkpoints) in node.text
    assert complete(checkpoints) == [2]


@pytest.mark.slow
def test_a_state_that_finds_no_memory_is_written_through(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    script, options = ("--save-every=3", "--ballast=20"), ("--state-memory=10M",)
    with job(etcd, tmp_path, checkpoints, "--steps=6", *script, options=options) as running:
        running.start("a", "b")
        assert running.exit_codes() == {"a": 0, "b": 0}
        text = "".join(node.text for node in running.nodes.values())
        assert text.count("written straight to the checkpoint directory") == 1
        assert "not kept in memory" in text
    assert complete(checkpoints) == [3, 6]
    again = "--steps=9", *script
    with (
        OutsideEtcd(tmp_path / "etcd-2") as fresh,
        job(fresh, tmp_path / "again", checkpoints, *again, options=options) as resumed,
    ):
        resumed.start("c")
        assert resumed.exit_codes() == {"c": 0}
        assert min(step.step for step in resumed.steps()) == 7
    assert complete(checkpoints)[-1] == 9
