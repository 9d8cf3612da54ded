"""Every request of a worker for memory or state is answered, whatever happens: the worker waits without a limit."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edl.agent.worker_server import WorkerServer
from edl.checkpoint.memory.buffer_table import BufferRefusal
from edl.errors import CheckpointError
from edl.types import Round
from edl.wire import local
from edl.wire.local import STATE
from edl.wire.parts import PartRange
from edl.worker.link import Link
from tests.support.fake_agent import a_seat

TIMEOUT_S = 60.0
FULL = OSError(errno.ENOSPC, "No space left on device")
BUG = RuntimeError("can't start new thread")


class Failing:
    """Checkpoints of which each request fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def want(self, slot: int, stream: str, size: int, saves: bool = False, waits: bool = False) -> BufferRefusal:
        raise self.error

    async def piece(self, slot: int, asked: local.Fetch) -> tuple[int, int]:
        raise self.error

    async def headers(self, asked: local.FetchHeaders) -> bytes:
        raise self.error

    async def ranges(self, asked: local.FetchRanges, wanted: Sequence[PartRange]) -> tuple[int, int]:
        raise self.error

    def forget_worker(self, slot: int) -> None:
        pass


def asked(error: Exception, ask: Callable[[Link], str]) -> tuple[str, list[dict[str, Any]]]:
    """The answer to a request that fails, and what the event loop was told."""
    told: list[dict[str, Any]] = []

    async def whole() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        server = WorkerServer(
            lambda session: (Round(1), 3) if session == os.getsid(0) else None,
            Failing(error),  # type: ignore[arg-type]
            lambda event: None,
            lambda call: None,
            lambda text: None,
        )
        server.open()
        link = await asyncio.to_thread(Link.connect, server.address, lambda: None)
        try:
            while 3 not in server._lines:  # noqa: ASYNC110 - what is waited for runs on this very loop
                await asyncio.sleep(0)
            server.give_place(3, a_seat(1))
            await asyncio.to_thread(link.wait_for_place)
            return await asyncio.wait_for(asyncio.to_thread(ask, link), TIMEOUT_S)
        finally:
            server.tell(local.Break(1, "the test is over"), (3,))
            await asyncio.to_thread(link.close)
            server.close()

    return asyncio.run(whole()), told


def fetch(link: Link) -> str:
    link.send(local.Fetch(STATE, 1, 5, 0, 1))
    return str(link.piece(STATE, len))


def headers(link: Link) -> str:
    link.send(local.FetchHeaders("headers", 1, 5, 2))
    return str(link.piece("headers", len))


def ranges(link: Link) -> str:
    link.ask_ranges("ranges", 1, 5, [PartRange(0, 0, 100)])
    return str(link.piece("ranges", len))


def bare_ranges(link: Link) -> str:
    """The kernel drops a descriptor for which the launcher has no number left."""
    link.send(local.FetchRanges("ranges", 1, 5))
    return str(link.piece("ranges", len))


def buffer(link: Link) -> str:
    with pytest.raises(CheckpointError) as caught:
        link.buffer(STATE, 1000)
    return str(caught.value)


@pytest.mark.parametrize("ask", [fetch, headers, ranges, buffer])
@pytest.mark.parametrize("error", [CheckpointError("no node has it"), MemoryError("no room"), FULL, BUG], ids=repr)
def test_what_fails_is_answered(ask: Callable[[Link], str], error: Exception) -> None:
    answer, told = asked(error, ask)
    assert answer == str(error)
    assert {context["exception"] for context in told} == ({BUG} if error is BUG else set()), "bugs are reported, too"


def test_a_request_whose_descriptor_is_lost_is_answered() -> None:
    answer, told = asked(BUG, bare_ranges)
    assert "ulimit -n" in answer
    assert not told
