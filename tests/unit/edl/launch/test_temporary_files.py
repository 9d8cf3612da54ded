"""What a launcher needs in temporary folders outlives programs that clean up there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from edl.adapters.etcd_plan import SocketPlan, plan_members
from edl.adapters.etcd_server import EtcdMember
from edl.adapters.identity import identity_of
from edl.adapters.leftovers import OWNER
from edl.adapters.local_jobs import LocalJob, local_jobs
from edl.launch.temporary_files import keep_temporary, temporary_files
from edl.ports import CommandKind, WorkerCommand
from edl.tasks import end
from edl.types import JobId, NodeId
from edl.wire.secret import Secret

SCRIPT = WorkerCommand(CommandKind.SCRIPT, "train.py", ("/tmp/a-word-of-the-script",))
LONG_AGO = (1_000_000_000.0, 1_000_000_000.0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("edl.adapters.cleaners.CLEANED", ())
    return folder


def test_data_certificates_and_logs_of_a_member_are_kept(temporary: Path) -> None:
    (plan,) = plan_members(["127.0.0.1:2379"])
    member = EtcdMember(plan, temporary / "job")
    names = {path.name for path in temporary_files(SCRIPT, member, str(temporary / "logs"), [])}
    assert names == {"127.0.0.1-2379", *(f"127.0.0.1-2379.{one}" for one in ("tls", "peers", "run", "log")), "logs"}


def test_the_sockets_of_a_private_store_are_kept(temporary: Path) -> None:
    member = EtcdMember(SocketPlan(temporary / "store-1"), temporary / "job")
    found = temporary_files(SCRIPT, member, "", [])
    assert {temporary / "store-1", temporary / "job" / OWNER} < set(found), "and what says whose it is"


def test_the_function_of_a_call_is_kept_and_the_words_of_a_script_are_not(temporary: Path) -> None:
    call = WorkerCommand(CommandKind.CALL, "", (str(temporary / "edl-call-1"),))
    assert temporary_files(call, None, "", []) == (temporary / "edl-call-1",)
    assert temporary_files(SCRIPT, None, "", []) == ()


def test_folders_elsewhere_are_left_alone(tmp_path: Path) -> None:
    assert temporary_files(SCRIPT, None, str(tmp_path / "logs"), [tmp_path / "data"]) == ()


def test_files_look_used_and_the_note_for_commands_comes_back(temporary: Path) -> None:
    note = LocalJob(JobId("job"), NodeId("a"), ("127.0.0.1:2379",))
    data = temporary / "data"
    data.write_text("x")
    os.utime(data, LONG_AGO)

    async def keep_until_it_is_back() -> None:
        keeping = asyncio.ensure_future(keep_temporary([data], note, pause_s=0.001))
        while not local_jobs():  # noqa: ASYNC110 -- a file tells nobody
            await asyncio.sleep(0.001)
        await end(keeping)

    asyncio.run(asyncio.wait_for(keep_until_it_is_back(), 60.0))
    assert data.stat().st_atime > LONG_AGO[0]
    note.remove()


def test_certificates_that_were_deleted_come_back(temporary: Path) -> None:
    """etcd reads them at each new connection."""
    identity = identity_of(Secret(b"a secret of enough bytes"))
    (plan,) = plan_members(["127.0.0.1:2379"], identity)
    member = EtcdMember(plan, temporary / "job")
    member.look_after_files()
    tls = temporary / "job" / "127.0.0.1-2379.tls"
    assert (tls / "cert.pem").read_bytes() == identity.server
    (tls / "key.pem").unlink()
    member.look_after_files()
    assert (tls / "key.pem").read_bytes() == identity.key
