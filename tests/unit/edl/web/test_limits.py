"""Attacks on the HTTP interface that must not harm the job: floods, large bodies, slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

from edl.web.access import RateLimit, peer_of, unmapped
from edl.web.settings import HttpLimits
from tests.support.web_fixture import Setup, head, play

LARGE = 100 * 1000 * 1000


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def test_a_large_body_is_refused_without_being_read() -> None:
    async def scenario(on: Setup) -> None:
        for line in ("Content-Length: 100000000", "Content-Length: 1048577"):
            reader, writer = await on.raw(head("PUT", "JOB/scale", line, "Content-Type: application/json"))
            answer = await reader.read()  # nothing of it has been sent
            assert status_of(answer) == 413 and b"Connection: close" in answer
            writer.close()

    play(scenario)


def test_a_large_body_without_a_length_is_read_up_to_the_bound() -> None:
    async def scenario(on: Setup) -> None:
        chunked = head("PUT", "JOB/scale", "Transfer-Encoding: chunked", "Content-Type: application/json")
        _, writer = await on.raw(chunked)
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        sent = 0
        try:
            while sent < LARGE:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
        except ConnectionError:
            pass
        assert sent < LARGE / 2, "the connection ended long before"
        writer.close()
        reader, writer = await on.raw(chunked + chunk * 17)
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 413
        writer.close()
        assert on.master.requests == []

    play(scenario)


def test_a_client_that_waits_is_told_to_go_on_only_when_it_may() -> None:
    async def scenario(on: Setup) -> None:
        body, expect = b'{"spec": {"replicas": 2}}', "Expect: 100-continue"
        typed = (f"Content-Length: {len(body)}", "Content-Type: application/json", expect)
        reader, writer = await on.raw(head("PUT", "JOB/scale", *typed))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 202
        writer.close()
        for lines, token in ((("Content-Length: 100000000", expect), "x"), (typed, "wrong")):
            reader, writer = await on.raw(head("PUT", "JOB/scale", *lines, token=token))
            assert status_of(await reader.read()) == 401
            writer.close()

    play(scenario)


def test_a_body_that_does_not_come() -> None:
    async def scenario(on: Setup) -> None:
        typed = ("Content-Length: 50", "Content-Type: application/json")
        reader, writer = await on.raw(head("PUT", "JOB/scale", *typed) + b'{"spec"')
        assert status_of(await reader.read()) == 408
        writer.close()

    play(scenario, limits=HttpLimits(body_s=0.02))


def test_a_body_that_breaks_off() -> None:
    async def scenario(on: Setup) -> None:
        _, writer = await on.raw(head("PUT", "JOB/scale", "Content-Length: 50", "Content-Type: application/json"))
        writer.write_eof()
        writer.close()
        assert (await on.ask("GET", "JOB/scale")).code == 200

    assert len(play(scenario).log) == 1


def test_heads_that_never_end_are_closed() -> None:
    """The clock jumps once what comes before the limit has happened: a busy machine may take longer than any limit."""

    async def scenario(on: Setup) -> None:
        loop: Any = asyncio.get_running_loop()
        now, ahead_s = loop.time, 0.0
        loop.time = lambda: now() + ahead_s
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: h\r\nX-", head("GET", "JOB/scale") + b"GET / HT"):
            reader, writer = await on.raw(sent)
            if b"Bearer" in sent:
                assert b"HTTP/1.1 200" in await reader.readuntil(b"\r\n\r\n")
            rest = asyncio.ensure_future(reader.read())
            while not rest.done():
                ahead_s += 100.0
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionResetError):  # it has closed before it had read all that was sent
                assert b"HTTP/1.1" not in await rest
            writer.close()

    play(scenario, limit_s=1e9)


async def crowd(on: Setup) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open four connections, and then 20 above a limit of four, which are closed; returns those of the four that are
    silent."""
    assert (await on.ask("GET", "/healthz")).code == 200  # one is open now
    kept = [await on.raw() for _ in range(3)]
    more = [await on.raw() for _ in range(20)]
    for reader, writer in more:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    return kept


def test_only_so_many_connections_of_one_peer() -> None:
    async def scenario(on: Setup) -> None:
        kept = await crowd(on)
        assert (await on.ask("GET", "JOB/scale")).code == 200
        for _, writer in kept:
            writer.close()

    play(scenario, limits=HttpLimits(connections_each=4))


def test_only_so_many_streams() -> None:
    async def scenario(on: Setup) -> None:
        on.master.endless = True
        streams = [await on.raw(head("GET", "JOB/events?follow=true")) for _ in range(2)]
        for reader, _ in streams:
            assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
        refused = await on.ask("GET", "JOB/events?follow=true")
        assert (refused.code, refused.headers["Retry-After"]) == (429, "10")
        for _, writer in streams:
            writer.close()
        on.master.endless = False
        await until(lambda: not on.master.followers)
        assert (await on.ask("GET", "JOB/events?follow=true")).code == 200, "who goes makes room at once"

    play(scenario, limits=HttpLimits(streams=2))


def test_a_stream_that_nobody_reads_is_let_go() -> None:
    async def scenario(on: Setup) -> None:
        on.master.endless = True
        reader, writer = await on.raw(head("GET", "JOB/events?follow=true"))
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: bool(on.master.followers))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        text = "x" * 100_000
        for _ in range(2000):
            on.master.note("scale", text)
            await asyncio.sleep(0)
            if not on.master.followers:
                break
        await until(lambda: not on.master.followers)
        writer.close()

    play(scenario, limits=HttpLimits(send_s=0.05))


def test_a_flood_is_answered_in_short() -> None:
    """Whoever asks too often gets 429 without a look at token or body; others are not concerned."""

    async def scenario(on: Setup) -> None:
        codes = [(await on.ask("GET", "JOB/scale")).code for _ in range(30)]
        assert codes == [200] * 10 + [429] * 20
        reply = await on.ask("PUT", "JOB/scale", {"spec": {"replicas": 2}})
        assert (reply.code, reply.headers["Retry-After"], reply.json["reason"]) == (429, "1", "TooManyRequests")
        assert on.master.requests == []
        assert (await on.ask("GET", "/healthz")).code == 200, "probes are counted apart"
        on.now_s += 0.5
        codes = [(await on.ask("GET", "JOB/scale")).code for _ in range(10)]
        assert codes == [200] * 5 + [429] * 5

    play(scenario, limits=HttpLimits(rate=10, burst=10))


def test_a_flood_of_pipelined_requests_takes_no_memory() -> None:
    async def scenario(on: Setup) -> None:
        await on.ask("GET", "JOB/scale")
        tracemalloc.start()
        _, writer = await on.raw()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        one = head("GET", "JOB/scale")
        for _ in range(100):
            writer.write(one * 200)
            await asyncio.sleep(0)
        held = tracemalloc.get_traced_memory()[0] - writer.transport.get_write_buffer_size()
        tracemalloc.stop()
        assert held < 20_000_000
        writer.transport.abort()

    play(scenario, limits=HttpLimits(rate=10, burst=10))


def test_the_count_of_peers_is_bounded() -> None:
    limit = RateLimit(rate=1, burst=2, peers=100)
    for number in range(100_000):
        assert limit.admits(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert len(limit) == 100
    assert [limit.admits("a", 1.0) for _ in range(3)] == [True, True, False]
    assert [limit.admits("a", 2.5) for _ in range(2)] == [True, False]
    for number in range(99):
        limit.admits(f"b{number}", 2.5)
    assert not limit.admits("a", 2.5), "who asked last is remembered"


def test_a_host_with_many_addresses_is_one_peer() -> None:
    assert peer_of("10.0.0.1") == "10.0.0.1"
    assert peer_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:2%eth0") != peer_of("2001:db8:0:1::1")


def test_the_address_of_a_peer_is_shown_as_people_write_it() -> None:
    for host, shown in (("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::1")):
        assert unmapped(host) == shown
