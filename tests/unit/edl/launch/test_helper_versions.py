"""Launchers that have helpers only serve no job of another version of edl."""

from __future__ import annotations

import asyncio

import pytest

from edl.errors import ForeignJob
from edl.exit_codes import ExitCode
from edl.launch import helper_role
from edl.launch.helper_role import _JobPoll
from edl.ports import Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import NodeId
from edl.wire import plain
from edl.wire.release import Founder
from tests.unit.edl.launch.test_registration import KEYS, SPEC, info


def founded(store: MemoryStore, version: str, token: bytes) -> None:
    """A job by a launcher of this version."""
    node = Put(KEYS.node(NodeId("a")), plain.dumps(info("a")))
    origin = Put(KEYS.origin, plain.dumps(Founder(version, "a", "h1")))
    store.write_now([Put(KEYS.spec, plain.dumps(SPEC)), Put(KEYS.token, token), origin, node])


def poll(store: MemoryStore) -> _JobPoll:
    return _JobPoll(store, KEYS, 60.0, None, "0.1.0")


def test_a_job_of_another_version_is_not_served() -> None:
    store = MemoryStore(FakeClock())
    founded(store, "0.2.0", b"t" * 32)
    with pytest.raises(ForeignJob, match=r"job my-job runs edl 0\.2\.0 .*and this launcher is edl 0\.1\.0") as caught:
        asyncio.run(poll(store).until_begun(lambda text: None))
    assert caught.value.exit_code is ExitCode.FOREIGN_JOB
    founded(store, "0.1.4", b"t" * 32)
    job = asyncio.run(poll(store).until_begun(lambda text: None))
    assert job is not None and (job.spec, job.token) == (SPEC, "t" * 32)


def test_a_job_that_another_version_founds_again_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = MemoryStore(FakeClock())
        founded(store, "0.1.4", b"t" * 32)
        polling = poll(store)
        job = await polling.until_begun(lambda text: None)
        assert job is not None
        watching = asyncio.ensure_future(polling.until_ended(job))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not watching.done()
        founded(store, "0.2.0", b"u" * 32)
        assert await asyncio.wait_for(watching, 5) is None
        with pytest.raises(ForeignJob, match=r"runs edl 0\.2\.0"):
            await polling.until_begun(lambda text: None)

    monkeypatch.setattr(helper_role, "LOOK_S", 0.0)
    asyncio.run(scenario())
