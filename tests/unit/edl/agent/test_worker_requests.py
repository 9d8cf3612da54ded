"""Every request of a worker for memory or state is answered, whatever happens: the worker waits without a limit."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edl.agent import worker_server
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


class Full:
    """A listening socket of a process that has no descriptor left for a while."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self.times = times

    def accept(self) -> tuple[socket.socket, Any]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()


def test_a_connection_that_cannot_be_accepted_costs_one_line_and_is_accepted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_server, "ACCEPT_AGAIN_S", 0.01)
    said: list[str] = []

    async def whole() -> None:
        server = WorkerServer(
            lambda session: (Round(1), 3) if session == os.getsid(0) else None,
            Failing(BUG),  # type: ignore[arg-type]
            lambda event: None,
            lambda call: None,
            said.append,
        )
        full = Full(server._listener, 1000)
        server._listener = full  # type: ignore[assignment]
        server.open()
        link = await asyncio.to_thread(Link.connect, server.address, lambda: None)
        try:
            for _ in range(100):
                await asyncio.sleep(0)
            assert full.times >= 990, "the event loop does nothing but try"
            full.times = 1
            while 3 not in server._lines:  # noqa: ASYNC110 - it has no event for that
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(link.close)
            server.close()

    asyncio.run(asyncio.wait_for(whole(), TIMEOUT_S))
    assert len(said) == 1
    assert "Too many open files" in said[0]


def test_a_worker_that_cannot_be_given_its_place_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher goes on, and the worker ends: nobody waits for it."""
    said: list[str] = []
    gone = threading.Event()

    def no_memory(name: str, data: bytes) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def whole() -> None:
        server = WorkerServer(
            lambda session: (Round(1), 3) if session == os.getsid(0) else None,
            Failing(BUG),  # type: ignore[arg-type]
            lambda event: None,
            lambda call: None,
            said.append,
        )
        server.open()
        link = await asyncio.to_thread(Link.connect, server.address, gone.set)
        try:
            while 3 not in server._lines:  # noqa: ASYNC110 - what is waited for runs on this very loop
                await asyncio.sleep(0)
            monkeypatch.setattr(worker_server, "write_memory", no_memory)
            server.give_place(3, a_seat(1))
            assert await asyncio.to_thread(gone.wait, TIMEOUT_S)
        finally:
            await asyncio.to_thread(link.close)
            server.close()

    asyncio.run(whole())
    assert len(said) == 1
    assert "slot 3" in said[0]
    assert "Too many open files" in said[0]
