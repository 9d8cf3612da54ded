"""Reports of workers about their collectives, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from edl.agent.workers.collective_reports import FRESH_S, CollectiveReports
from edl.testing.clock import FakeClock
from edl.wire.collective_wait import ADDRESS_SUFFIX, CollectiveWait, DumpRequest, PendingCollective
from edl.wire.json_messages import decode, encode

WAIT = CollectiveWait("7", (PendingCollective("nccl:all_reduce", 7, "default_pg"),))


def test_the_newest_report_of_each_process_counts_while_it_is_fresh() -> None:
    asyncio.run(_converse())


async def _converse() -> None:
    clock, name = FakeClock(100.0), f"edl-test-reports-{os.getpid()}"
    reports = CollectiveReports(name, clock.now_s)
    reports.open()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.setblocking(False)
        assert not reports.ask_dump(os.getpid(), "/nowhere"), "it has not reported yet"
        worker.bind(f"\0{name}-worker")
        worker.connect(f"\0{name}{ADDRESS_SUFFIX}")
        worker.send(b"nonsense")
        worker.send(encode(WAIT))
        await _until(lambda: bool(reports.waits()))
        assert reports.waits() == {os.getpid(): WAIT}
        assert reports.ask_dump(os.getpid(), "/logs/0.json")
        assert decode(DumpRequest, worker.recv(8192)) == DumpRequest("/logs/0.json")
        worker.send(encode(CollectiveWait()))
        await _until(lambda: not reports.waits())
        worker.send(encode(WAIT))
        await _until(lambda: bool(reports.waits()))
        clock.advance(FRESH_S + 1.0)
        assert reports.waits() == {}, "its thread may have to wait for the interpreter's lock"
    reports.close()


async def _until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110  the socket has no event for it
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), 60)
