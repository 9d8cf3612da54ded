"""The watchdogs of a launcher's directories, on real directories."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.disk_probe import DiskProbe
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.agent.workers.outputs import claim
from edl.config import LogPlan
from edl.launch.disk_watch import DiskWatch, WatchedDirectory, directories_of
from edl.launch.settings import LaunchSettings
from edl.types import NodeId
from edl.watch.table import WatchLimits
from edl.wire.alarm import Alarm
from edl.wire.messages import Kept
from edl.wire.records import Version

LIMIT_S = 60.0
FULL = WatchLimits((("disk-space", 1e30),))


def looked(folder: Path, limits: WatchLimits, before: Callable[[DiskWatch], None] = lambda watch: None) -> Any:
    """The alarms after the first look."""

    async def body() -> tuple[Alarm, ...]:
        found: asyncio.Future[tuple[Alarm, ...]] = asyncio.get_running_loop().create_future()
        watched = WatchedDirectory("checkpoint directory", str(folder), shared=True, checkpoints=True)
        watch = DiskWatch([watched], limits, NodeId("a"), SystemClock(), SYSTEM_THREADS, found.set_result)
        before(watch)
        watch.begin()
        try:
            return await asyncio.wait_for(found, LIMIT_S)
        finally:
            await watch.leave()

    return asyncio.run(body())


def test_nothing_is_wrong_and_nothing_stays_behind(tmp_path: Path) -> None:
    assert looked(tmp_path, WatchLimits((("disk-space", 0.0), ("disk-inodes", 0.0)))) == ()
    assert list(tmp_path.iterdir()) == []


def test_too_little_space(tmp_path: Path) -> None:
    (alarm,) = looked(tmp_path, FULL)
    assert (alarm.name, alarm.shared) == ("disk-space", True)
    assert alarm.about == f"checkpoint directory {tmp_path}"


def test_a_directory_that_is_gone_blinds_the_others(tmp_path: Path) -> None:
    alarms = looked(tmp_path / "gone", FULL)
    assert [alarm.name for alarm in alarms] == ["blind", "disk-write"]
    assert "cannot write: No such file or directory" in alarms[1].text


def test_a_checkpoint_that_was_written_is_measured(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    os.truncate(os.open(tmp_path / "step" / "sparse", os.O_CREAT | os.O_WRONLY), 1 << 42)
    kept = Kept(Version(1, 5), str(tmp_path / "step"))
    alarms = looked(tmp_path, WatchLimits((("disk-space", 0.0), ("disk-inodes", 0.0))), lambda watch: watch.kept(kept))
    assert [alarm.name for alarm in alarms] == ["disk-space"]
    assert "the last checkpoint took 4.0 TiB: the next one does not fit" in alarms[0].text


def test_a_file_system_that_hangs_is_reported_as_such(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".probe")  # opening it for writing blocks until somebody reads
    probe, done = DiskProbe(str(tmp_path), ".probe", SYSTEM_THREADS), threading.Event()
    probe.begin(done.set, write=True)
    assert probe.result().error.startswith("the file system has not answered for")
    probe.begin(done.set, write=True)  # no second thread
    with (tmp_path / ".probe").open("rb") as reader:
        assert done.wait(LIMIT_S)
        reader.read()
    assert probe.result().error == ""


def test_the_last_write_counts_until_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    probe, done = DiskProbe(str(folder), ".probe", SYSTEM_THREADS), threading.Event()
    probe.begin(done.set, write=True)
    assert done.wait(LIMIT_S)
    folder.mkdir()
    until_ended(probe)
    done.clear()
    probe.begin(done.set, write=False)
    assert done.wait(LIMIT_S)
    assert (probe.result().error, probe.result().write_error) == ("", "No such file or directory")


def test_a_folder_that_is_removed_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old checkpoints are deleted at any time."""
    gone = tmp_path / "step" / "gone"
    gone.mkdir(parents=True)
    (tmp_path / "step" / "file").write_bytes(bytes(100))
    scandir = os.scandir

    def late(path: Any) -> Any:
        if str(path) == str(gone) and gone.exists():
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    probe, done = DiskProbe(str(tmp_path), ".probe", SYSTEM_THREADS), threading.Event()
    probe.begin(done.set, write=False, measure=str(tmp_path / "step"))
    assert done.wait(LIMIT_S)
    assert not gone.exists()
    assert (probe.result().error, probe.result().size_bytes) == ("", 100)


def until_ended(probe: DiskProbe) -> None:
    """Wait for the end of the probe's thread."""
    thread = probe._thread
    assert thread is not None
    thread.join(LIMIT_S)


def test_without_further_threads_it_is_blind_and_goes_on(tmp_path: Path) -> None:
    class FullSystem:
        def __getattr__(self, name: str) -> Any:
            return getattr(SYSTEM_THREADS, name)

        def start(self, target: Callable[..., object], *arguments: Any, name: str) -> Any:
            raise RuntimeError("can't start new thread")

    asked: list[bool] = []
    probe = DiskProbe(str(tmp_path), ".probe", FullSystem())
    probe.begin(lambda: asked.append(True), write=True)
    assert (asked, probe.result().error) == ([True], "no further thread can be started to ask it")


@pytest.mark.parametrize("checkpoint_dir", ["/ckpt", "file:///ckpt"])
def test_the_second_launch_of_a_job_on_a_node_watches_its_own_log_folder(tmp_path: Path, checkpoint_dir: str) -> None:
    """That of the first one is deleted when there are too many logs, and its absence is no trouble of the disk."""
    plan = LogPlan(str(tmp_path / "job_a"))
    claim(plan)
    logs = claim(plan)
    sync, state = SimpleNamespace(roots=["/sync"]), SimpleNamespace(checkpoint_dir=checkpoint_dir)
    settings = cast(LaunchSettings, SimpleNamespace(sync=sync, state=state, logs=plan))
    found = directories_of(settings, logs.folder)
    assert [one.path for one in found] == ["/ckpt", str(tmp_path / "job_a.2"), "/sync"]
