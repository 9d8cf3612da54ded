"""The HTTP side of a launcher on a free port, before a fake Master, with a clock that stands still."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from edl.errors import StoreUnavailable, UsageError
from edl.metrics.facts import DirectoryFacts, NodeFacts
from edl.web.front import Web, WebDeps
from edl.web.settings import HttpLimits, HttpSettings
from edl.wire.node_requests import OutputLine, OutputLines, OutputRequest
from tests.support.fake_master import JOB, FakeMaster

TOKEN = "the-token-of-the-job"
HOST = "127.0.0.1"


class FakeOutput:
    """The output of the workers of node-a; node-b does not answer."""

    def __init__(self) -> None:
        self.asked: list[OutputRequest] = []
        self.lines = [OutputLine(0, 1, False, "step 1"), OutputLine(0, 1, True, "\x1b[31mwarning\x1b[0m <b>bold</b>")]

    async def output(self, node: str, request: OutputRequest) -> OutputLines:
        self.asked.append(request)
        self._check(node)
        return OutputLines(tuple(self.lines[max(0, request.after - 1) :]), len(self.lines) + 1)

    async def stacks(self, node: str) -> OutputLines:
        self._check(node)
        return OutputLines((OutputLine(0, 1, True, 'File "train.py", line 7, in train'),), 2)

    def _check(self, node: str) -> None:
        if node == "node-b":
            raise StoreUnavailable("the launcher of node node-b does not answer (unavailable)")
        if node not in ("node-a", "gpu-0003"):
            raise UsageError(f"no launcher of node {node} is registered")


async def node_facts() -> NodeFacts:
    """A node with one worker and a directory that does not answer."""
    directories = (DirectoryFacts("checkpoints", True, 100, 40, 10, 5), DirectoryFacts("logs", answers=False))
    return NodeFacts(
        *("0.1", "3.12.1", "node-a", "10.0.0.1", "default"),
        is_master=True,
        phase="running",
        slots=1,
        training=1,
        exits={"error": 2},
        directories=directories,
    )


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    code: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Setup:
    """A launcher's HTTP server and a client."""

    web: Web
    master: FakeMaster
    log: list[str]
    session: aiohttp.ClientSession
    now_s: float = 100.0
    url: str | None = None
    """Where another launcher that rules has its HTTP side."""
    problems: list[str] = field(default_factory=list)
    output: FakeOutput = field(default_factory=FakeOutput)

    async def ask(self, method: str, path: str, body: Any = None, token: str | None = TOKEN, **options: Any) -> Reply:
        headers = dict(options.pop("headers", {}))
        if token is not None:
            headers.setdefault("Authorization", f"Bearer {token}")
        if body is not None and not isinstance(body, (bytes, str)):
            headers.setdefault("Content-Type", "application/json")
            body = json.dumps(body)
        where = self.web.url + path.replace("JOB", f"/v1/jobs/{JOB}")
        async with self.session.request(
            method, where, data=body, headers=headers, allow_redirects=False, **options
        ) as answer:
            return Reply(answer.status, answer.headers, await answer.text())

    async def raw(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw connection."""
        port = int(self.web.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        return reader, writer


def head(method: str, path: str, *lines: str, token: str = TOKEN) -> bytes:
    """The head of a request, by hand."""
    path = path.replace("JOB", f"/v1/jobs/{JOB}")
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: h", f"Authorization: Bearer {token}", *lines, "", ""]
    ).encode()


def play(
    scenario: Callable[[Setup], Coroutine[None, None, None]],
    settings: HttpSettings | None = None,
    limits: HttpLimits | None = None,
    *,
    rules: bool = True,
    tls: ssl.SSLContext | None = None,
    limit_s: float = 60.0,
) -> Setup:
    """Runs a scenario; what goes wrong where only the event loop sees it counts as well."""
    made: list[Setup] = []

    async def whole() -> None:
        problems: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
        log: list[str] = []
        master = FakeMaster()
        deps = WebDeps(JOB, settings or HttpSettings(0), lambda: TOKEN, log.append, lambda: made[0].now_s)
        deps.limits = limits or HttpLimits(rate=1e6, burst=1e6)
        web = Web(deps)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls if tls is not None else True)
        ) as session:
            made.append(Setup(web, master, log, session, problems=problems))
            web.listen(HOST)
            web.begin(lambda: made[0].url, node_facts, made[0].output)
            if rules:
                web.use_master(master)
            try:
                await asyncio.wait_for(scenario(made[0]), limit_s)
            finally:
                await web.leave()
        await asyncio.sleep(0)
        gc.collect()
        assert problems == []

    asyncio.run(whole())
    return made[0]
