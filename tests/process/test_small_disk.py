"""A disk with a megabyte left: training goes on, and what cannot be written is named."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.exit_codes import ExitCode
from edl.ports import Put
from tests.process.free_ports import free_endpoints
from tests.process.harness import WORKERS, Job, OutsideEtcd, until

TALKATIVE = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1].removeprefix("--folder="))
step = 0
while not (folder / "last-step").exists():
    step += 1
    print(f"step {step} ".ljust(20_000, "."), flush=True)
    (folder / "step").write_text(str(step))
    time.sleep(0.02)
"""


def step(job: Job) -> int:
    file = job.steps_folder / "step"
    return int(file.read_text() or 0) if file.exists() else 0


def test_logs_leave_room_and_go_on_when_there_is_more(tmp_path: Path, etcd: OutsideEtcd, disk: Path) -> None:
    script = tmp_path / "talkative.py"
    script.write_text(TALKATIVE)
    other = disk / "of somebody else"
    other.write_bytes(b"." * 600_000)
    options = ("--redirects=3", "--log-reserve=200K")
    with Job(tmp_path, [etcd.endpoint], script=(str(script),), options=options) as job:
        node = job.start("a", options=[f"--log-dir={disk}"])
        node.says("less than the 200.0 KiB that logs leave free (--log-reserve)")
        status = job.wait_status(lambda status: bool(status["warnings"]), "a warning")
        assert status["warnings"][0].startswith(f"node a: the disk of {disk}")
        before = step(job)
        until(lambda: step(job) > before + 10, "steps without logs")
        other.unlink()
        node.says("has space again")
        job.wait_status(lambda status: not status["warnings"], "no warning any more")
        (job.steps_folder / "last-step").touch()
        assert node.exit_code() == 0, node.text
        assert node.text.count("logs leave free") <= 2, "it is said once each time"
        (written,) = disk.glob("*/attempt_0/0/stdout.log")
        assert "lines are missing here, the disk had no space for them]" in written.read_text()


def test_a_private_store_goes_where_there_is_room(tmp_path: Path, disk: Path) -> None:
    job = Job(tmp_path, free_endpoints(1), environment={"TMPDIR": str(disk)})
    with job:
        launch = [sys.executable, "-m", "edl.launch", str(WORKERS / "plain.py"), f"--folder={job.steps_folder}"]
        node = job.start("a", command=[*launch, "--steps=5"])
        assert node.exit_code() == 0, node.text
        assert f"{disk} has no room for the store; using " in node.text
        assert job.steps()[-1].step == 5


def test_a_store_without_room_is_refused_in_words(tmp_path: Path, disk: Path) -> None:
    options = (f"--rdzv-conf=data_dir={disk}",)
    with Job(tmp_path, free_endpoints(1), "etcd-embedded", options=options) as job:
        node = job.start("a")
        assert node.exit_code() == ExitCode.STORE_UNREACHABLE
        assert f"the embedded etcd needs 136 MB in {disk}" in node.text
        assert "MB left. Free some space" in node.text and "goroutine" not in node.text


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 240 MB: unlike one in memory, it keeps what it got of a file that was too large for it."""
    image, folder = tmp_path / "image", tmp_path / "ext4"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(240_000_000)
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"no small ext4 here: {error}")
        if done.returncode:
            pytest.skip(f"no small ext4 here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_member_starts_on_a_disk_without_room_for_its_logs_next_file(tmp_path: Path, ext4: Path) -> None:
    plan = plan_members(free_endpoints(1))[0]
    member, spare = EtcdMember(plan, ext4), ext4 / plan.name / "member" / "wal" / "0.tmp"
    filler = ext4 / "of somebody else"

    async def served() -> None:
        """Start, and write for long enough that the data has to grow."""
        member.start()
        await member.wait_ready(60)
        store = EtcdStore([member.endpoint], request_timeout_s=5.0)
        for number in range(40):
            await store.write([Put(f"/filled/{number}", os.urandom(50_000))])
        await store.close()
        assert member.running
        await member.stop()

    async def body() -> None:
        await served()
        spare.unlink(missing_ok=True)
        with filler.open("wb") as file:
            left = shutil.disk_usage(ext4).free
            os.posix_fallocate(file.fileno(), 0, left - 30_000_000)
        await served()
        assert spare.is_dir() and shutil.disk_usage(ext4).free > 10_000_000
        filler.unlink()
        await served()
        assert not spare.exists(), "it was made, and is taken away when a member ends in good order"

    asyncio.run(body())
