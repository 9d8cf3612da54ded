"""Runs the denylist beside the elected Master."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edl.denylist.places import DenylistPlace
from edl.denylist.plan import Author, Sightings, counting, plan, still_bad
from edl.errors import DenylistError, EdlError, FencedOut
from edl.ports import Clock
from edl.watched_master import WatchedMaster
from edl.wire.denylist import DenylistEntry

ADDED = "denylist"
"""Name of the value in the store that lists what this run has added, one name a line."""


class DenylistCompanion:
    """Tells the Master what is on the denylist, and adds what the job has found bad. ``wall_s``: the time in seconds
    since 1970."""

    def __init__(
        self,
        master: WatchedMaster,
        place: DenylistPlace,
        author: Author,
        wall_s: Callable[[], float],
        log: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._master = master
        self._place = place
        self._author = author
        self._wall_s = wall_s
        self._log = log
        self._clock = clock
        self._sightings = Sightings()
        self._reported: tuple[DenylistEntry, ...] | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Look from time to time until the job has ended, or until cancelled. While the place does not answer, what it
        contained before still counts."""
        while self._master.status().phase != "ended":
            try:
                await self.look()
                self._note(self._place.left_out)
            except FencedOut:
                return
            except EdlError as error:
                self._note(str(error))
            await self._master.ended_within(self._place.look_s)

    async def look(self) -> None:
        """Read the entries, tell the Master, and change what the job's dropped slots require. Raises ``StoreError`` or
        ``DenylistError``."""
        entries, wall_s = await self._place.entries(), self._wall_s()
        others = counting(entries, self._author, wall_s)
        if others != self._reported:
            self._reported = others
            self._master.denylist(others)
        own = {one.name for one in entries if one.run == self._author.run}
        added = own.union(self._master.kept(ADDED).split("\n")) - {""}
        status = self._master.status()
        outlived = self._sightings.outlived(entries, self._clock.now_s())
        todo = plan(status, entries, added, self._author, wall_s, outlived)
        for entry in todo.add:
            await self._place.put(entry)
            self._log(f"added to the denylist in {self._place.where}: {entry.name}: {entry.reason}")
        outdated = {one.name for one in entries if one.expired(wall_s)}
        for name in todo.remove:
            try:
                await self._place.remove(name)
            except DenylistError:
                if name not in outdated:  # else it does not count any more, and may be another user's
                    raise
            else:
                self._log(f"removed from the denylist in {self._place.where}: {name}")
        if status.phase != "ended":
            await self._remember([*still_bad(status, added), *(entry.name for entry in todo.add)])

    async def _remember(self, added: Sequence[str]) -> None:
        text = "\n".join(sorted(set(added)))
        if text != self._master.kept(ADDED):
            await self._master.keep(ADDED, text)

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._log(trouble or f"the denylist in {self._place.where} can be used again")
