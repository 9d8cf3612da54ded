"""Locks of one user's processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from edl.adapters import claims, etcd_cluster
from edl.adapters.claims import claim
from edl.adapters.etcd_plan import plan_members


def test_one_at_a_time_and_nothing_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        inside = most = 0

        async def work() -> None:
            nonlocal inside, most
            async with claim(tmp_path / "it.lock", 60):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work() for _ in range(20)))
        assert most == 1

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_others_wait_no_longer_than_they_want_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with claim(tmp_path / "it.lock", 60):
            with pytest.raises(TimeoutError, match=r"it\.lock has been locked for 0 s"):
                async with claim(tmp_path / "it.lock", 0):
                    raise AssertionError("not alone")

    asyncio.run(scenario())


def test_where_files_cannot_be_locked_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without the mount option for locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class NoLocks:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        def flock(self, *_: object) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(claims, "fcntl", NoLocks())
    before = os.listdir("/proc/self/fd")

    async def scenario() -> None:
        with pytest.raises(OSError, match="Function not implemented"):
            async with claim(tmp_path / "it.lock", 0.2):
                raise AssertionError("no lock")

        (plan,) = plan_members(["127.0.0.1:2379"])
        async with etcd_cluster._claim(plan) as claimed:
            assert claimed, "the member is started all the same"

    asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_member_of_another_host_is_no_business_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a temporary directory on a file server. The first network namespaces of two hosts may have one number."""
    here = etcd_cluster._network()
    monkeypatch.setattr(etcd_cluster, "boot_id", lambda: "elsewhere", raising=False)
    assert etcd_cluster._network() != here


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "it.lock"
    code = f"""if True:
        import asyncio, os, pathlib, signal
        from edl.adapters.claims import claim
        async def main():
            async with claim(pathlib.Path({str(path)!r}), 60):
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert path.exists()

    async def scenario() -> None:
        async with claim(path, 0):
            pass

    asyncio.run(scenario())
    assert not path.exists()
