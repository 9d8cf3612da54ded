"""Keeps a list of objects up to date with watches, whatever happens to them: broken connections, outdated versions,
errors of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from edl.errors import SchedulerError
from edl.schedulers.kubernetes.client import ApiStatusError, ApiTarget, Client, Json
from edl.tasks import Backoff

PAGE = 500
"""Objects requested per page."""
GONE = 410
LIST_AGAIN = 3
"""Watches that fail one after another before the list is read again."""
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
        self._version = ""
        """The version up to which all changes are applied; empty: list again."""
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._failures = 0
        """Failures since a list or a watch last worked."""
        self._watched = True
        """Whether a watch has worked since the last list."""

    async def run(self) -> None:
        """List, then watch from there, and repeat, until cancelled. Failures are retried with growing pauses."""
        while True:
            try:
                if not self._version:
                    self._version = await self._list()
                    self._failures = 0
                await self._watch()
                pause_s = FIRST_PAUSE_S  # in case a server ends every watch at once
            except Exception as error:  # noqa: BLE001 - otherwise the list would silently stop updating
                pause_s = self._failed(error)
            await asyncio.sleep(pause_s)

    async def refresh(self) -> None:
        """Read the list once. Raises ``SchedulerError``."""
        await self._list()

    def _failed(self, error: Exception) -> float:
        """Decide how to go on after a failure; returns the pause in seconds.

        A broken connection loses nothing: the next watch continues from the last event. But a server may also never
        again accept the version, whatever the status that it reports, so repeated failures lead to a new list. Not the
        first one: a list costs an overloaded server much more than a watch.
        """
        self._failures += 1
        expected = isinstance(error, SchedulerError)
        gone = isinstance(error, ApiStatusError) and error.status == GONE
        if gone or not expected or self._failures >= LIST_AGAIN:
            self._version = ""
        pause_s = self._pauses.next()
        if gone and pause_s == FIRST_PAUSE_S:  # usual after an outage: list again at once
            return 0.0
        why = str(error) if expected else f"{self._target.resource}: {type(error).__name__}: {error}"
        if self.problem != why:
            self.problem = why
            self.changed.set()
        return pause_s

    def _recover(self) -> None:
        """Called when a watch works."""
        self._pauses.reset()
        self._failures = 0
        self._watched = True
        self._clear()

    def _clear(self) -> None:
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
        if self._watched:  # else watches keep failing, and the problem would come and go
            self._watched = False
            self._clear()
        return str(about.get("resourceVersion", ""))

    async def _watch(self) -> None:
        """Watch from the last version until the watch ends. Raises ``SchedulerError``, for an error that the server
        reports ``ApiStatusError``."""
        wanted = {**self._query, "resourceVersion": self._version}
        async with contextlib.aclosing(self._client.events(self._target, wanted)) as events:
            async for event in events:
                kind, entry = event.get("type"), event.get("object") or {}
                if kind == "ERROR":
                    code, said = int(entry.get("code") or 0), entry.get("message", "")
                    raise ApiStatusError(code, f"watch of {self._target.resource}: {said}", retry=True)
                self._recover()
                if kind != "BOOKMARK":
                    self._take(str(kind), entry)
                self._version = str((entry.get("metadata") or {}).get("resourceVersion") or self._version)
        self._recover()

    def _take(self, kind: str, entry: Json) -> None:
        if not self._mine(entry):
            return
        name = str(entry["metadata"]["name"])
        before = self.found.pop(name, None)
        if kind != "DELETED":
            self.found[name] = self._kept(entry)
        if self.found.get(name) != before:
            self.changed.set()
