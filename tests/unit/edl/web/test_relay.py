"""Requests of the dashboard that reach another launcher than the Master's, and pages of another origin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

from edl.web.front import Web, WebDeps
from edl.web.settings import HttpLimits, HttpSettings
from tests.support.dashboard_jobs import training
from tests.support.fake_master import JOB, FakeMaster
from tests.support.web_fixture import HOST, TOKEN, FakeOutput, Setup, node_facts, play

RELAY = {"Edl-Relay": "1"}
LIMITS = HttpLimits(rate=1e6, burst=1e6, status_s=0.001)


@contextlib.asynccontextmanager
async def another(
    master: FakeMaster | None, url: str | None = None, settings: HttpSettings | None = None, limits: HttpLimits = LIMITS
) -> AsyncIterator[Web]:
    """Another launcher of the job, whose Master this is."""
    deps = WebDeps(JOB, settings or HttpSettings(0), lambda: TOKEN, lambda text: None, lambda: 100.0, limits)
    web = Web(deps)
    web.listen(HOST)
    web.begin(lambda: url, node_facts, FakeOutput())
    web.use_master(master)
    try:
        yield web
    finally:
        await web.leave()


def test_a_request_is_passed_on_if_asked() -> None:
    async def scenario(on: Setup) -> None:
        async with another(on.master) as master:
            on.url = master.url
            assert (await on.ask("GET", "JOB/scale")).code == 307, "not unless asked"
            read = await on.ask("GET", "JOB/scale", headers=RELAY)
            assert (read.code, read.json["spec"]) == (200, {"replicas": 3})
            assert read.headers["Content-Type"] == "application/json; charset=utf-8"
            written = await on.ask("PATCH", "JOB/scale", {"spec": {"replicas": 2}}, headers=RELAY)
            assert (written.code, on.master.scale.desired) == (202, 2)
            refused = await on.ask("PATCH", "JOB/scale", {"spec": {"replicas": 99}}, headers=RELAY)
            assert refused.code == 422 and "99 nodes" in refused.json["message"]
            assert (await on.ask("POST", "JOB/nodes/nobody/cordon", headers=RELAY)).code == 404
            events = await on.ask("GET", "JOB/events?last=1", headers=RELAY)
            assert json.loads(events.text)["text"] == "size 2"
            jobs = await on.ask("GET", "/v1/jobs", headers=RELAY)
            assert jobs.json == {"jobs": [JOB], "rights": "full", "master": master.url}

    assert len(play(scenario, rules=False).log) == 1


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def scenario(on: Setup) -> None:
        job = training()
        async with another(job) as master:
            on.url = master.url
            headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "text/event-stream", **RELAY}
            async with on.session.get(f"{on.web.url}/v1/jobs/{JOB}/status", headers=headers) as stream:
                assert (await stream.content.readuntil(b"\n\n")).startswith(b"event: status\n")
                job.show(commit=4711)
                assert b"4711" in await stream.content.readuntil(b"\n\n")
                job.close()
                assert await stream.content.read() == b"", "it ends with the Master"

    play(scenario, rules=False, limits=LIMITS)


def test_the_final_status_comes_through_a_launcher_that_is_leaving() -> None:
    async def scenario(on: Setup) -> None:
        job = training()
        async with another(job, limits=dataclasses.replace(LIMITS, status_s=60.0)) as master:
            on.url = master.url
            headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "text/event-stream", **RELAY}
            async with on.session.get(f"{on.web.url}/v1/jobs/{JOB}/status", headers=headers) as stream:
                assert (await stream.content.readuntil(b"\n\n")).startswith(b"event: status\n")
                leaving = asyncio.ensure_future(on.web.leave())
                await asyncio.sleep(0)
                assert master._server is not None
                job.show(phase="ended", commit=4711)
                await master._server.conclude()
                assert b'"ended"' in await stream.content.readuntil(b"\n\n")
                assert await stream.content.read() == b""
                await leaving

    play(scenario, rules=False, limits=LIMITS)


def test_the_token_decides_at_both_ends() -> None:
    async def scenario(on: Setup) -> None:
        async with another(on.master) as master:
            on.url = master.url
            assert (await on.ask("GET", "JOB", headers=RELAY, token=None)).code == 401
            assert (await on.ask("GET", "JOB", headers=RELAY, token="wrong-token")).code == 401
            master.deps.token = lambda: "another-token"
            master.tokens._job_token = master.deps.token
            reply = await on.ask("GET", "JOB", headers=RELAY)
            assert (reply.code, reply.headers["WWW-Authenticate"]) == (401, 'Bearer realm="edl"')

    play(scenario, rules=False)


def test_no_request_goes_in_circles() -> None:
    async def scenario(on: Setup) -> None:
        async with another(None, on.web.url) as former:  # each takes the other for the Master
            on.url = former.url
            reply = await on.ask("GET", "JOB", headers=RELAY)
            assert (reply.code, reply.headers["Retry-After"]) == (503, "1")
            assert "has just changed" in reply.json["message"]

    play(scenario, rules=False)


def test_a_master_that_does_not_answer() -> None:
    async def scenario(on: Setup) -> None:
        async with another(on.master) as master:
            on.url = master.url
        reply = await on.ask("GET", "JOB", headers=RELAY)
        assert (reply.code, reply.headers["Retry-After"]) == (503, "1")
        assert "does not answer" in reply.json["message"] and TOKEN not in reply.text

    assert len(play(scenario, rules=False).log) == 1, "nothing of it is a defect"


def test_a_stream_that_breaks_off_breaks_off_here_too() -> None:
    async def scenario(on: Setup) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
            writer.write(b"4\r\ndata\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        on.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        try:
            await on.ask("GET", "JOB/status", headers=RELAY)
        except Exception as error:  # noqa: BLE001 - any error of the client says that it is not complete
            assert "payload" in str(error).lower() or "disconnected" in str(error).lower()
        else:
            raise AssertionError("half an answer looks like a whole one")
        server.close()

    play(scenario, rules=False)


def test_pages_of_other_origins_may_ask_with_a_token() -> None:
    origin = {"Origin": "http://10.0.0.9:8080"}
    asks = {**origin, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}

    async def scenario(on: Setup) -> None:
        for path in ("/v1/jobs", "JOB/scale", "JOB/status"):
            before = await on.ask("OPTIONS", path, token=None, headers=asks)
            assert before.code == 204
            assert "Authorization" in before.headers["Access-Control-Allow-Headers"]
            reply = await on.ask("GET", path, headers=origin)
            assert (reply.code, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")
            assert "Access-Control-Allow-Credentials" not in reply.headers
            denied = await on.ask("GET", path, headers=origin, token=None)
            assert (denied.code, denied.headers["Access-Control-Allow-Origin"]) == (401, "*"), "the page sees why"
            assert "Access-Control-Allow-Origin" not in (await on.ask("GET", path)).headers
        for path in ("/dashboard", "/metrics", "/openapi.json", "/healthz"):
            assert "Access-Control-Allow-Origin" not in (await on.ask("GET", path, headers=origin)).headers
            assert (await on.ask("OPTIONS", path, token=None, headers=asks)).code in (401, 405)
        assert (await on.ask("OPTIONS", "JOB/scale", token=None)).code == 401, "not a browser's question"

    play(scenario)
