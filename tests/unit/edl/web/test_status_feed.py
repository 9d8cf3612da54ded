"""The live status: one reading for all, only what has changed, and no queue for readers that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from edl.web.settings import HttpLimits
from edl.web.status_feed import StatusFeed, change_of
from edl.wire import json_messages
from edl.wire.status import JobStatus
from tests.support.dashboard_jobs import DashboardMaster, training
from tests.support.web_fixture import TOKEN, Setup, head, play

FAST = HttpLimits(rate=1e6, burst=1e6, status_s=0.001)
STREAM = {"Accept": "text/event-stream"}


def apply(status: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What the page does with a change, in other words."""
    nodes = {node["node"]: node for node in status["nodes"]} | {node["node"]: node for node in change["nodes"]}
    kept = [node for name, node in nodes.items() if name not in change["gone"]]
    return {**status, **change["fields"], "nodes": kept}


def sorted_nodes(status: dict[str, Any]) -> dict[str, Any]:
    return {**status, "nodes": sorted(status["nodes"], key=lambda node: str(node["node"]))}


def plain(value: object) -> Any:
    return json.loads(json_messages.encode(value))


def varied(status: JobStatus, draw: random.Random) -> JobStatus:
    """A random successor of a status."""
    nodes = [node for node in status.nodes if draw.random() > 0.05]
    nodes = [
        dataclasses.replace(node, step_s=draw.random(), state=draw.choice(["running", "ready"]))
        if draw.random() < 0.2
        else node
        for node in nodes
    ]
    if draw.random() < 0.3:
        nodes.append(dataclasses.replace(status.nodes[0], node=f"new-{draw.randrange(10**6)}", position=-1))
    fields: dict[str, Any] = {"commit": status.commit + draw.randrange(2), "warnings": ("w",) * draw.randrange(3)}
    return dataclasses.replace(status, nodes=tuple(nodes), **fields)


def test_a_change_turns_one_status_into_the_next() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        old = training(many=draw.randrange(1, 20)).status()
        new = varied(varied(old, draw), draw)
        assert sorted_nodes(apply(plain(old), plain(change_of(old, new)))) == sorted_nodes(plain(new)), seed


def test_a_change_says_no_more_than_has_changed() -> None:
    old = training().status()
    slower = dataclasses.replace(old.nodes[3], step_s=1.0)
    new = dataclasses.replace(old, nodes=(*old.nodes[:3], slower, *old.nodes[4:]), commit=old.commit + 1)
    change = change_of(old, new)
    assert (change.fields, change.nodes, change.gone) == ({"commit": old.commit + 1}, (slower,), ())
    assert change_of(old, old) == dataclasses.replace(change, fields={}, nodes=())


def parsed(event: str) -> tuple[str, Any]:
    first, second = event.strip().split("\n")
    return first.removeprefix("event: "), json.loads(second.removeprefix("data: "))


async def turns(many: int = 20) -> None:
    for _ in range(many):
        await asyncio.sleep(0)


def with_clock(scenario: Callable[[StatusFeed, DashboardMaster, Callable[[], None]], Any]) -> None:
    """Runs a scenario with a feed whose interval ends only when the scenario says so."""

    async def whole() -> None:
        loop: Any = asyncio.get_running_loop()
        now, ahead_s = loop.time, [0.0]
        loop.time = lambda: now() + ahead_s[0]
        master = training()
        feed = StatusFeed(lambda: master.status() if master.serving else None, 100.0)

        def tick() -> None:
            ahead_s[0] += 101.0

        await scenario(feed, master, tick)

    asyncio.run(whole())


def test_ten_readers_cost_one_reading() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        readers = [feed.follow() for _ in range(10)]
        firsts = [await anext(reader) for reader in readers]
        assert len(set(firsts)) == 1 and firsts[0].startswith("event: status\n")
        assert master.reads == 1
        for number in range(2, 6):
            waiting = [asyncio.ensure_future(anext(reader)) for reader in readers]
            master.show(commit=number)
            await turns()
            assert not any(one.done() for one in waiting), "not before the interval is over"
            tick()
            events = await asyncio.gather(*waiting)
            assert len(set(events)) == 1
            assert parsed(events[0]) == ("change", {"fields": {"commit": number}, "nodes": [], "gone": []})
            assert master.reads == number
        for reader in readers:
            await reader.aclose()  # type: ignore[attr-defined]
        tick()
        await turns()
        assert master.reads == 5, "without readers nothing is read"

    with_clock(scenario)


def test_what_does_not_change_is_not_sent() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        reader = feed.follow()
        await anext(reader)
        waiting = asyncio.ensure_future(anext(reader))
        await turns()
        for _ in range(3):
            tick()
            await turns()
        assert master.reads == 4 and not waiting.done()
        master.show(commit=7)
        tick()
        assert parsed(await waiting)[1]["fields"] == {"commit": 7}
        await reader.aclose()  # type: ignore[attr-defined]

    with_clock(scenario)


def test_at_the_end_everybody_gets_the_last_status_before_the_interval_is_over() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        fast, slow = feed.follow(), feed.follow()
        await anext(fast)
        await anext(slow)
        waiting = asyncio.ensure_future(anext(fast))
        await turns()
        master.show(phase="ended", commit=9)
        ending = asyncio.ensure_future(feed.conclude())
        assert parsed(await waiting) == ("change", {"fields": {"commit": 9, "phase": "ended"}, "nodes": [], "gone": []})
        assert await anext(fast, None) is None
        await turns()
        assert not ending.done(), "the slow one has not asked for it yet"
        assert parsed(await anext(slow))[1]["fields"]["phase"] == "ended"
        await slow.aclose()  # type: ignore[attr-defined]
        await ending
        late = feed.follow()
        assert parsed(await anext(late))[1]["phase"] == "ended"
        assert await anext(late, None) is None

    with_clock(scenario)


def test_a_slow_reader_gets_the_whole_status_and_delays_nobody() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        slow, fast = feed.follow(), feed.follow()
        await anext(slow)
        await anext(fast)
        for number in range(1, 100):
            waiting = asyncio.ensure_future(anext(fast))
            master.show(commit=number)
            await turns(5)
            tick()
            await waiting
        name, status = parsed(await anext(slow))
        assert (name, status["commit"]) == ("status", 99)
        await slow.aclose()  # type: ignore[attr-defined]
        await fast.aclose()  # type: ignore[attr-defined]

    with_clock(scenario)


def test_the_streams_end_with_the_master() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        reader = feed.follow()
        await anext(reader)
        waiting = asyncio.ensure_future(anext(reader))
        await turns()
        master.serving = False
        tick()
        with contextlib.suppress(StopAsyncIteration):
            raise AssertionError(await waiting)
        master.serving = True
        again = feed.follow()
        assert parsed(await anext(again))[0] == "status", "and begin anew with the next one"
        await again.aclose()  # type: ignore[attr-defined]

    with_clock(scenario)


def test_a_reader_that_comes_as_the_last_one_goes() -> None:
    async def scenario(feed: StatusFeed, master: DashboardMaster, tick: Callable[[], None]) -> None:
        for _ in range(20):
            first, second = feed.follow(), feed.follow()
            await anext(first)
            _, event = await asyncio.gather(first.aclose(), anext(second))  # type: ignore[attr-defined]
            assert parsed(event)[0] == "status"
            waiting = asyncio.ensure_future(anext(second))
            await turns()
            master.show(commit=master.shown.commit + 1)
            tick()
            assert parsed(await waiting)[0] == "change"
            await second.aclose()  # type: ignore[attr-defined]

    with_clock(scenario)


async def events_of(stream: Any) -> AsyncIterator[tuple[str, Any]]:
    while True:
        event = (await stream.content.readuntil(b"\n\n")).decode()
        if event.strip() != ":":
            yield parsed(event)


def test_over_http() -> None:
    async def scenario(on: Setup) -> None:
        master = training()
        on.web.use_master(master)
        once = await on.ask("GET", "JOB/status")
        assert once.code == 200 and once.json == plain(master.status())
        where = f"{on.web.url}/v1/jobs/train/status"
        headers = {"Authorization": f"Bearer {TOKEN}", **STREAM}
        async with on.session.get(where, headers=headers) as stream:
            assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert stream.headers["Cache-Control"] == "no-store"
            events = events_of(stream)
            assert (await anext(events))[0] == "status"
            master.show(commit=12345)
            assert await anext(events) == ("change", {"fields": {"commit": 12345}, "nodes": [], "gone": []})
            master.close()
            assert await stream.content.read() in (b"", b":\n\n")

    play(scenario, limits=FAST)


def test_a_browser_that_does_not_read_is_let_go() -> None:
    async def scenario(on: Setup) -> None:
        master = training()
        on.web.use_master(master)
        reader, writer = await on.raw(head("GET", "JOB/status", "Accept: text/event-stream"))
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = -1
        while before != master.reads:  # until nobody follows any more
            before = master.reads
            for _ in range(50):
                master.show(reason=f"{before} {'x' * 200_000} {random.random()}")
                await asyncio.sleep(0.002)
        refused = await on.ask("GET", "JOB/status")
        assert refused.code == 200
        writer.close()

    play(scenario, limits=dataclasses.replace(FAST, send_s=0.05))


def test_only_so_many_streams() -> None:
    async def scenario(on: Setup) -> None:
        on.web.use_master(training())
        streams = [await on.raw(head("GET", "JOB/status", "Accept: text/event-stream")) for _ in range(2)]
        for reader, _ in streams:
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        refused = await on.ask("GET", "JOB/status", headers=STREAM)
        assert (refused.code, refused.headers["Retry-After"]) == (429, "10")
        assert (await on.ask("GET", "JOB/status")).code == 200
        for _, writer in streams:
            writer.close()
        where, headers = f"{on.web.url}/v1/jobs/train/status", {"Authorization": f"Bearer {TOKEN}", **STREAM}
        while True:
            async with on.session.get(where, headers=headers) as stream:
                if stream.status == 200:
                    break
            await asyncio.sleep(0.001)

    play(scenario, limits=dataclasses.replace(FAST, status_streams=2))


def test_pages_of_the_history() -> None:
    async def scenario(on: Setup) -> None:
        for number in range(2, 101):
            on.master.note("node-joined", str(number))

        async def numbers(query: str) -> list[int]:
            reply = await on.ask("GET", f"JOB/events?{query}")
            assert reply.code == 200
            return [json.loads(line)["number"] for line in reply.text.splitlines()]

        assert await numbers("last=3") == [98, 99, 100]
        assert await numbers("before=98&last=3") == [95, 96, 97]
        assert await numbers("after=50&before=55") == [51, 52, 53, 54]
        assert await numbers("after=50&before=55&last=2") == [53, 54]
        assert await numbers("before=1") == [] == await numbers("after=100&last=5")
        assert len(await numbers("last=0")) == 100 == len(await numbers(f"last={10**15}"))

    play(scenario)
