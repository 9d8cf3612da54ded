"""A member that cannot be started says so, whatever is in its way."""

from __future__ import annotations

import errno
import os
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
