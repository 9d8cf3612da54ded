"""Keeps a list of objects up to date with watches. This is the only place that handles everything a watch can do."""

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
    """A copy of a list on the API server, at most seconds old while the server answers. ``run`` keeps it up to date;
    ``changed`` is set whenever something has changed. It has a single reader, which clears it."""

    def __init__(
        self,
        client: Client,
        target: ApiTarget,
        selector: str,
        mine: Callable[[Json], bool],
        kept: Callable[[Json], Json] = lambda entry: entry,
    ) -> None:
        """``mine``: which objects to include; ``kept``: the part of an object to keep. Changes in other parts are
        ignored."""
        self.found: dict[str, Json] = {}
        """Objects by name."""
        self.complete = False
        """A whole list has been read, and it is not known to be out of date."""
        self.trouble = ""
        """Why the list is not being followed at the moment; empty: it is."""
        self.changed = asyncio.Event()
        self._client = client
        self._target = target
        self._query = {"labelSelector": selector} if selector else {}
        self._mine = mine
        self._kept = kept
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        """List, then watch from there, and repeat; never returns. Failures are retried with growing pauses."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch(version)
                # a pause, in case a server ends every watch at once
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

    def _fail(self, words: str) -> None:
        if self.trouble != words:
            self.trouble = words
            self.changed.set()

    def _works(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        if self.trouble:
            self.trouble = ""
            self.changed.set()

    async def _list(self) -> str:
        """Read everything; returns the version from which to watch."""
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
        if self.trouble:
            self.trouble = ""
            self.changed.set()
        return str(about.get("resourceVersion", ""))

    async def _watch(self, version: str) -> str:
        """Watch from a version until the server ends the watch; returns the last version seen.

        A broken connection loses nothing: everything up to the last event has been applied, so the next watch begins
        there. That is why the version is kept after an error.
        """
        try:
            wanted = {**self._query, "resourceVersion": version}
            async with contextlib.aclosing(self._client.events(self._target, wanted)) as events:
                async for event in events:
                    kind, entry = event.get("type"), event.get("object") or {}
                    if kind == "ERROR":
                        code, said = int(entry.get("code") or 0), entry.get("message", "")
                        raise ApiStatusError(code, f"watch of {self._target.resource}: {said}", retry=True)
                    self._works()
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
        self._works()
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
