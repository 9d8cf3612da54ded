"""What becomes of helper processes when the lease of their keys has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from edl.launch import helpers as module
from edl.launch.helper_process import HelperProcess
from edl.launch.helpers import HelperDeps, Helpers
from edl.tasks import end
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from tests.unit.edl.launch.test_registration import KEYS

LEASE_S = 10.0


class Server:
    """A process that runs until it is killed."""

    ready: Mapping[str, Any] = {"port": 7}

    def __init__(self, pid: int) -> None:
        self.pid, self.masterless, self.over = pid, False, asyncio.Event()

    async def look(self, limit_s: float) -> None:
        """Its state is always up to date."""

    async def ended(self) -> str:
        await self.over.wait()
        return "was killed"

    def kill(self) -> None:
        self.over.set()


class OneServer:
    """One process of a kind that is fenced."""

    what, service, folder = "pserver", "ps", "servers"
    count, fenced = 1, True
    grace_s = farewell_s = drain_s = 0.0

    def __init__(self) -> None:
        self.started: list[Server] = []

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        self.started.append(Server(len(self.started) + 1))
        return cast(HelperProcess, self.started[-1])

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        return {"pid": process.pid}


@pytest.mark.parametrize("masterless", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_a_lease_that_ends(monkeypatch: pytest.MonkeyPatch, away: bool, masterless: bool) -> None:
    """A store that thaws has ended it, or a leader of the store that others have replaced meanwhile: the process keeps
    its key and its data if a Master was in contact. Otherwise others may have taken over."""
    for name in ("RETRY_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.001)

    async def scenario() -> None:
        clock, kind, said = FakeClock(), OneServer(), list[str]()
        store = MemoryStore(clock)
        helpers = Helpers(HelperDeps(store, KEYS, LEASE_S, "a", "host-a", said.append), kind)
        running = asyncio.ensure_future(helpers.run())

        def keys() -> dict[str, bytes]:
            return {entry.key.rpartition("/")[2]: entry.value for entry in store.peek(KEYS.helper("ps", "servers/"))}

        async def until(condition: Callable[[], bool]) -> None:
            for _ in range(60_000):
                if condition():
                    return
                await asyncio.sleep(0.001)
            raise AssertionError(said)

        await until(lambda: bool(keys()))
        assert list(keys()) == ["a-1"]
        kind.started[0].masterless = masterless
        store.available = not away
        helpers._changed.set()
        if away:
            await until(lambda: any("does not answer" in line for line in said))
        clock.advance(2 * LEASE_S)
        store.available = True
        helpers._changed.set()
        if not masterless:
            await until(lambda: any("under a new one" in line for line in said) and bool(keys()))
            assert list(keys()) == ["a-1"] and not kind.started[0].over.is_set()
        else:
            await until(lambda: list(keys()) == ["a-2"])
            assert kind.started[0].over.is_set() and len(kind.started) == 2
        await end(running)

    asyncio.run(scenario())
