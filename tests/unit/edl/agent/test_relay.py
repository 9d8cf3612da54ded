"""Messages of a worker to the Master's services, through the real worker server and the real link."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from edl.agent.worker_server import WorkerServer
from edl.types import Round
from edl.wire.messages import ServiceFromWorker, ServiceToWorker
from edl.worker.link import Link

LONG = "x" * 300_000
TIMEOUT_S = 20.0


class NoCheckpoints:
    def forget_worker(self, slot: int) -> None:
        pass


class Relay:
    """A worker server whose only worker is this process, slot 3."""

    def __init__(self) -> None:
        self.said: list[ServiceFromWorker] = []
        self.heard: queue.Queue[str | None] = queue.Queue()
        self.worker_server = WorkerServer(
            lambda session: (Round(1), 3) if session == os.getsid(0) else None,
            NoCheckpoints(),  # type: ignore[arg-type]
            lambda event: None,
            self.said.append,
            lambda text: None,
        )
        self.worker_server.open()

    async def connect(self) -> Link:
        link = await asyncio.to_thread(Link.connect, self.worker_server.address, lambda: None)
        link.listen("data", self.heard.put)
        return link

    async def hears(self) -> str | None:
        return await asyncio.to_thread(self.heard.get, True, TIMEOUT_S)


def play(scenario: Callable[[Relay], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        relay = Relay()
        try:
            await asyncio.wait_for(scenario(relay), TIMEOUT_S)
        finally:
            relay.worker_server.close()

    asyncio.run(whole())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for runs on this very loop
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", ["short", LONG])
def test_words_go_both_ways(body: str) -> None:
    async def scenario(relay: Relay) -> None:
        link = await relay.connect()
        link.call("data", body, 7)
        await until(lambda: relay.said != [])
        assert relay.said == [ServiceFromWorker("data", 3, Round(7), body)]
        relay.worker_server.pass_on(ServiceToWorker("data", 3, body))
        assert await relay.hears() == body
        await asyncio.to_thread(link.close)

    play(scenario)


def test_words_for_others_are_not_heard() -> None:
    async def scenario(relay: Relay) -> None:
        link = await relay.connect()
        link.call("data", "hello", 1)
        await until(lambda: relay.said != [])
        relay.worker_server.pass_on(ServiceToWorker("data", 2, "for another slot"))
        relay.worker_server.pass_on(ServiceToWorker("other", 3, "of another service"))
        relay.worker_server.pass_on(ServiceToWorker("data", 3, "mine"))
        assert await relay.hears() == "mine"
        await asyncio.to_thread(link.close)

    play(scenario)


def test_a_new_master_is_told() -> None:
    async def scenario(relay: Relay) -> None:
        link = await relay.connect()
        link.call("data", "hello", 1)
        await until(lambda: relay.said != [])
        relay.worker_server.reattached(12)
        assert await relay.hears() is None
        await asyncio.to_thread(link.close)

    play(scenario)


def test_long_words_leak_no_descriptors() -> None:
    async def scenario(relay: Relay) -> None:
        link = await relay.connect()
        link.call("data", LONG, 1)
        await until(lambda: len(relay.said) == 1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            link.call("data", LONG, 1)
            relay.worker_server.pass_on(ServiceToWorker("data", 3, LONG))
            assert await relay.hears() == LONG
        await until(lambda: len(relay.said) == 21)
        # Both sides close what they have sent when they get to it.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        await asyncio.to_thread(link.close)

    play(scenario)
