"""A real Chromium without a window, steered over its DevTools protocol.

The protocol is JSON over a websocket, for which aiohttp is here already; so page and server share one event loop, and
there is no driver to install besides the browser.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from edl.adapters import with_parent
from edl.tasks import end

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 120.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """The path of a Chromium; None: there is none on this host."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        """Exceptions and errors on its console."""

    async def call(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol for this page."""
        return await self._browser.call(method, parameters, self._session)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def reload(self) -> None:
        """Load the page again, and wait until the old one is gone."""
        await self.js("void (window.isOld = true)")
        await self.call("Page.reload")
        await self.until("!window.isOld && document.body !== null")

    async def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited. Raises ``AssertionError`` for an exception."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, limit_s: float = WAIT_S) -> Any:
        """Wait until an expression is true, and return its value; True for an element. Exceptions count as false: the
        page may be loading."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + limit_s
        while True:
            with contextlib.suppress(AssertionError):
                if found := await self.js(f"(it => it instanceof Node ? true : it)({expression})"):
                    return found
            assert loop.time() < give_up_s, f"{expression}; the page: {await self.js('document.body.innerText')}"
            await asyncio.sleep(0.05)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path, *, whole: bool = False, **options: Any) -> None:
        """Write a picture of the view, or of the whole page."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole, **options)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def key(self, key: str, code: int = 0, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    async def write(self, text: str) -> None:
        """Type into the focused element."""
        await self.call("Input.insertText", text=text)

    async def sign_in(self, token: str) -> None:
        """Enter a token into the form."""
        await self.until("document.activeElement?.id === 'token'")
        await self.write(token)
        await self.key("Enter", 13, "\r")


class Browser:
    """A running browser, which ends with this process."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    async def call(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        """A command of the DevTools protocol. Raises ``AssertionError`` if the browser refuses it."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        message = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json({**message, "sessionId": session} if session else message)
        found = await asyncio.wait_for(answer, WAIT_S)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    async def tab(self) -> Tab:
        """A new empty page."""
        target = await self.call("Target.createTarget", {"url": "about:blank"})
        attached = await self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        found = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await found.call(f"{domain}.enable")
        return found

    async def listen(self) -> None:
        """Take what the browser sends, until it ends."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                answer = self._answers.pop(found["id"])
                if not answer.done():
                    answer.set_result(found)
            elif (tab := self._tabs.get(found.get("sessionId", ""))) is not None:
                tab.problems += _problem(found["method"], found["params"])


def _problem(method: str, parameters: dict[str, Any]) -> list[str]:
    """What an event says is wrong with a page."""
    if method == "Runtime.exceptionThrown":
        return [str(parameters["exceptionDetails"])]
    if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
        return [str(parameters["args"])]
    if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
        entry = parameters["entry"]
        return [f"{entry['source']}: {entry['text']} {entry.get('url', '')}"]
    return []


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser with an empty profile."""
    path = chromium()
    assert path is not None
    # Not below pytest's folders: the browser has sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="edl-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(with_parent.__file__)), str(os.getpid()), path),
            *(*FLAGS, f"--user-data-dir={folder}", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        )
        try:
            async with _connected(process) as browser:
                yield browser
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def _connected(process: asyncio.subprocess.Process) -> AsyncIterator[Browser]:
    assert process.stderr is not None
    address, said = "", ""
    while not address:
        line = (await asyncio.wait_for(process.stderr.readline(), WAIT_S)).decode()
        assert line, f"the browser has ended: {said}"
        said += line
        _, _, address = line.partition("DevTools listening on ")
    async with aiohttp.ClientSession() as session, session.ws_connect(address.strip(), max_msg_size=0) as socket:
        browser = Browser(socket)
        listening = asyncio.ensure_future(browser.listen())
        rest = asyncio.ensure_future(process.stderr.read())
        try:
            yield browser
        finally:
            await end(listening)
            await end(rest)
