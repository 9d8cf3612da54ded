"""A member that cannot be started says so, whatever is in its way. One that cannot be ended holds nobody up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edl.adapters import etcd_server
from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.errors import StoreError


def full(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["Path.mkdir", "Path.open", "subprocess.Popen"])
def test_a_full_disk_is_no_bug(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = plan_members(["127.0.0.1:2379"])
    member = EtcdMember(plan, tmp_path, binary="/bin/true")
    owner, _, name = step.partition(".")
    monkeypatch.setattr(getattr(etcd_server, owner), name, full)
    with pytest.raises(StoreError) as raised:
        member.start()
    assert str(raised.value) == (
        f"cannot start the embedded etcd with its data in {tmp_path}/127.0.0.1-2379: No space left on device. Free "
        "some space there, name another folder with --rdzv-conf=data_dir=…, or use an etcd that runs elsewhere"
    )
    assert not member.running


class Blocked:
    """A process that waits for a disk, which not even SIGKILL ends."""

    pid = os.getpid()
    returncode = None

    def __init__(self) -> None:
        self.sent: list[int] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.sent.append(number)


def test_a_member_that_its_disk_blocks_does_not_keep_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_server, "REAP_S", 0.0)
    (plan,) = plan_members(["127.0.0.1:2379"])
    member, process = EtcdMember(plan, tmp_path, binary="/bin/true"), Blocked()
    member.log_file.touch()
    monkeypatch.setattr(member, "_process", process)
    asyncio.run(asyncio.wait_for(member.stop(0.0), 60))
    assert process.sent == [signal.SIGTERM, signal.SIGKILL]
    member.discard()
    assert member.log_file.exists()


def test_a_member_gets_neither_settings_of_another_etcd_nor_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ETCD_NAME", "ETCD_UNSUPPORTED_ARCH", "ETCDCTL_API", "EDL_SECRET", "EDL_RDZV_CONF"):
        monkeypatch.setenv(name, "x")
    passed: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env=None, **_: passed.append(env))
    (plan,) = plan_members(["127.0.0.1:2379"])
    EtcdMember(plan, tmp_path, binary="/bin/true").start()
    (found,) = passed
    assert {"ETCD_UNSUPPORTED_ARCH", "ETCDCTL_API", "PATH"} <= found.keys()
    assert not {"ETCD_NAME", "EDL_SECRET", "EDL_RDZV_CONF"} & found.keys()
