"""Keeps a list of objects up to date with watches, whatever happens to them: broken connections, outdated versions,
errors of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from edl.errors import SchedulerError
from edl.schedulers.kubernetes.client import ApiStatusError, ApiTarget, Client, Json

PAGE = 500
"""Objects requested per page."""
GONE = 410
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0


class Mirror:
    """A copy of a list on the API server, which ``run`` keeps up to date: at most seconds old while the server answers.
    ``changed`` is set on every change; its single reader clears it."""

    def __init__(
        self,
        client: Client,
        target: ApiTarget,
        selector: str,
        mine: Callable[[Json], bool],
        kept: Callable[[Json], Json] = lambda entry: entry,
    ) -> None:
        """``mine``: whether to include an object. ``kept``: the part of an object to keep; changes in other parts are
        ignored."""
        self.found: dict[str, Json] = {}
        """Objects by name."""
        self.complete = False
        """Whether a whole list has been read."""
        self.problem = ""
        """Why the list cannot be kept up to date at the moment; empty: it is up to date."""
        self.changed = asyncio.Event()
        self._client = client
        self._target = target
        self._query = {"labelSelector": selector} if selector else {}
        self._mine = mine
        self._kept = kept
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        """List, then watch from there, and repeat, until cancelled. Failures are retried with growing pauses."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch(version)
                # in case a server ends every watch at once
                await asyncio.sleep(FIRST_PAUSE_S)
                continue
            except ApiStatusError as error:
                if error.status == GONE:
                    # The server no longer has the changes after that version.
                    version = ""
                    if self._pause_s == FIRST_PAUSE_S:
                        self._pause_s *= 2
                        continue
                self._fail(str(error))
            except SchedulerError as error:
                self._fail(str(error))
            except Exception as error:  # noqa: BLE001 - otherwise the list would silently stop updating
                version = ""
                self._fail(f"{self._target.resource}: {type(error).__name__}: {error}")
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def refresh(self) -> None:
        """Read the list once. Raises ``SchedulerError``."""
        await self._list()

    def _fail(self, why: str) -> None:
        if self.problem != why:
            self.problem = why
            self.changed.set()

    def _recover(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        if self.problem:
            self.problem = ""
            self.changed.set()

    async def _list(self) -> str:
        """Read the whole list, page by page; returns the version from which to watch. Raises ``SchedulerError``."""
        found: dict[str, Json] = {}
        query = {**self._query, "limit": str(PAGE)}
        while True:
            page = await self._client.get(self._target, query)
            for entry in page.get("items") or []:
                if self._mine(entry):
                    found[str(entry["metadata"]["name"])] = self._kept(entry)
            about = page.get("metadata") or {}
            if not about.get("continue"):
                break
            query["continue"] = str(about["continue"])
        if self.found != found or not self.complete:
            self.found, self.complete = found, True
            self.changed.set()
        if self.problem:
            self.problem = ""
            self.changed.set()
        return str(about.get("resourceVersion", ""))

    async def _watch(self, version: str) -> str:
        """Watch from a version until the watch ends; returns the last version seen.

        A broken connection loses nothing: all events up to that version have been applied, and the next watch begins
        there. Raises ``ApiStatusError`` for an error that the server reports.
        """
        try:
            wanted = {**self._query, "resourceVersion": version}
            async with contextlib.aclosing(self._client.events(self._target, wanted)) as events:
                async for event in events:
                    kind, entry = event.get("type"), event.get("object") or {}
                    if kind == "ERROR":
                        code, said = int(entry.get("code") or 0), entry.get("message", "")
                        raise ApiStatusError(code, f"watch of {self._target.resource}: {said}", retry=True)
                    self._recover()
                    version = str((entry.get("metadata") or {}).get("resourceVersion") or version)
                    if kind != "BOOKMARK":
                        self._take(str(kind), entry)
        except ApiStatusError:
            raise
        except SchedulerError as error:
            # connection lost: continue from here after a pause
            self._fail(str(error))
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return version
        self._recover()
        return version

    def _take(self, kind: str, entry: Json) -> None:
        if not self._mine(entry):
            return
        name = str(entry["metadata"]["name"])
        before = self.found.pop(name, None)
        if kind != "DELETED":
            self.found[name] = self._kept(entry)
        if self.found.get(name) != before:
            self.changed.set()
