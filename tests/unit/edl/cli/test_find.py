"""Error messages of commands that find no Master."""

from __future__ import annotations

import asyncio

import pytest

from edl.cli.find import SHOWN_NODES, NoMaster, _client
from edl.ports import Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import JobId, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish

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
    assert "None of its launchers is registered: they have ended, or cannot reach this store. Start them" in text


def test_what_has_ended_and_what_never_was() -> None:
    assert "has ended with exit code 1: lost" in said(Put(KEYS.farewell, plain.dumps(Finish(1, "lost"))))
    assert said() == "no job job in this store. Check --rdzv-id and --rdzv-endpoint"
