"""Error messages of commands that find no Master."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from edl import __version__
from edl.cli.find import SHOWN_NODES, JobClient, NoMaster, _client, _only_job, _silence
from edl.errors import ProtocolError, SettingError
from edl.master.election import MasterInfo
from edl.ports import Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import JobId, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import NOT_THE_MASTER, Finish
from edl.wire.release import Founder
from edl.wire.secret import Secret, stored_token

KEYS = JobKeys(JobId("job"))


def said(*left: Put) -> str:
    """Where that is all there is in the store."""
    store = MemoryStore(FakeClock())
    store.write_now(left)
    with pytest.raises(NoMaster) as caught:
        asyncio.run(_client(store, KEYS, None, None))
    return str(caught.value)


def test_who_elects_one_and_what_to_look_at_if_none_comes() -> None:
    nodes = [Put(KEYS.node(NodeId(f"n{number}")), b"{}") for number in range(SHOWN_NODES + 1)]
    text = said(Put(KEYS.spec, b"{}"), *nodes)
    shown = ", ".join(f"n{number}" for number in range(SHOWN_NODES))
    assert f"has no Master at this moment. Its launchers ({shown}, …) are electing one" in text
    assert text.endswith("If none appears, see their output: the store may be full")


def test_a_job_without_launchers_elects_nobody() -> None:
    text = said(Put(KEYS.spec, b"{}"))
    assert "None of its launchers is registered: they have ended, or cannot reach this store." in text
    assert text.endswith("Those that still run register by themselves once they reach it; start the others again")


@pytest.mark.parametrize(
    ("details", "why"),
    [
        (NOT_THE_MASTER, "has stepped down, or cannot take office because the store is slow or full."),
        ("connection refused", "has exited; another launcher takes over when its lease expires."),
        ("socket closed", "does not answer: its host or its launcher is frozen, overloaded or unreachable."),
    ],
)
def test_a_master_that_answers_is_not_called_frozen(details: str, why: str) -> None:
    async def text() -> str:
        client = JobClient(KEYS.job, MasterInfo(NodeId("a"), "127.0.0.1", 1), "token")
        try:
            nothing = grpc.aio.Metadata()
            return _silence(client, grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details))
        finally:
            await client.close()

    assert f"the Master of job job on node a (127.0.0.1:1) {why}" in asyncio.run(text())


def test_what_has_ended_and_what_never_was() -> None:
    assert "has ended with exit code 1: lost" in said(Put(KEYS.farewell, plain.dumps(Finish(1, "lost"))))
    assert said() == "no job job in this store. Check --rdzv-id and --rdzv-endpoint"


def test_the_only_job_of_a_store_is_found_among_keys_of_others() -> None:
    store = MemoryStore(FakeClock())
    killed = JobKeys(JobId("killed")).spec
    store.write_now([Put("/edl/mine", b""), Put(killed, b"{}"), Put(KEYS.node(NodeId("a")), b"{}")])
    assert asyncio.run(_only_job(store)) == "job"


def test_a_job_of_another_version_is_named_before_anything_of_it_is_decoded() -> None:
    store, heard = MemoryStore(FakeClock()), list[str]()
    unreadable = b"another form"
    store.write_now([Put(KEYS.origin, b'{"edl":"99.1.0"}'), Put(KEYS.master, unreadable), Put(KEYS.token, unreadable)])
    with pytest.raises(ProtocolError):
        asyncio.run(_client(store, KEYS, None, None, heard.append))
    (text,) = heard
    assert "job job runs edl 99.1.0, and this command is edl " in text
    store.write_now([Put(KEYS.origin, plain.dumps(Founder(__version__)))])
    with pytest.raises(ProtocolError):
        asyncio.run(_client(store, KEYS, None, None, heard.append))
    assert len(heard) == 1


def test_a_secret_that_the_job_does_not_have_is_left_out() -> None:
    store = MemoryStore(FakeClock())
    master = plain.dumps(MasterInfo(NodeId("a"), "127.0.0.1", 1))
    store.write_now([Put(KEYS.master, master), Put(KEYS.token, b"the token of a job without a secret")])
    mine = Secret(b"long enough for a secret")
    with pytest.raises(SettingError) as refused:
        asyncio.run(_client(store, KEYS, mine, None))
    assert str(refused.value) == (
        f"--secret-file: job job has none, and this command has a secret with the fingerprint {mine.fingerprint}. "
        "Leave out --secret-file and EDL_SECRET"
    )
    store.write_now([Put(KEYS.token, stored_token(mine))])
    with pytest.raises(SettingError, match=r"and this command has none\. Give the job's --secret-file, or EDL_SECRET"):
        asyncio.run(_client(store, KEYS, None, None))
