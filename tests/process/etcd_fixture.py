"""Members of an embedded etcd, for tests of them: started, killed, and asked until they answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_cluster import start_local_member
from edl.adapters.etcd_server import EtcdMember
from edl.errors import StoreUnavailable
from tests.process.free_ports import free_endpoints

LIMIT_S = 300.0
ROOT = Path(__file__).resolve().parents[2]


def run(body: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(body, LIMIT_S)

    asyncio.run(main())


async def start(endpoints: list[str], folder: Path) -> EtcdMember:
    member = await start_local_member(endpoints, folder)
    assert member is not None
    return member


@contextlib.asynccontextmanager
async def three_members(folder: Path) -> AsyncIterator[tuple[list[str], list[EtcdMember]]]:
    endpoints = free_endpoints(3)
    members = [await start(endpoints, folder) for _ in endpoints]
    try:
        assert [member.endpoint for member in members] == endpoints
        await asyncio.gather(*(member.wait_ready(60) for member in members))
        yield endpoints, members
    finally:
        for member in members:
            kill(member)
        await asyncio.gather(*(member.stop(0) for member in members))


def kill(member: EtcdMember, number: signal.Signals = signal.SIGKILL) -> None:
    if member.running and member.pid is not None:
        os.kill(member.pid, number)


def patient_store(*endpoints: str, **named: Any) -> EtcdStore:
    """A store whose calls wait as long as a busy machine needs."""
    return EtcdStore(endpoints, request_timeout_s=60.0, **named)


async def persistently(call: Callable[[], Awaitable[Any]]) -> Any:
    """Retry the call until the store answers, as a caller may for idempotent operations."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(0.02)


async def keys_seen(store: EtcdStore, prefix: str, after: int, last: str) -> list[str]:
    seen = []
    async for change in store.watch(prefix, after):
        seen.append(change.entry.key.removeprefix(prefix))
        if seen[-1] == last:
            break
    return seen
