"""Workers whose start waits for the newest files of the synchronised directories.

For the machine they have been started: a signal ends them, and a failure is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl.agent.deps import SyncedFiles
from edl.agent.machine.events import WorkerEnded
from edl.errors import CheckpointError
from edl.tasks import BackgroundTasks
from edl.types import Round
from edl.wire.records import World


@dataclass(frozen=True, slots=True)
class FilesAlike:
    """All members of the world have the same files: the held workers can start."""

    world: World


class HeldStarts:
    """The held workers of the newest round."""

    def __init__(
        self,
        synced: SyncedFiles,
        post: Callable[[WorkerEnded | FilesAlike], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``failed``: called with an exception that indicates a bug."""
        self._synced = synced
        self._post = post
        self._tasks = BackgroundTasks(failed)
        self._round = Round(0)
        self._alike = False
        self._failure = ""
        self._slots: tuple[int, ...] = ()

    def enter(self, world: World, started: tuple[int, ...]) -> None:
        """This node, a member of a world, starts workers of these slots: wait for its files, also if these are none."""
        if world.round != self._round:
            self._tasks.drop()
            self._round, self._alike, self._failure, self._slots = world.round, False, "", ()
            self._tasks.begin(self._wait(world, len(started)))

    async def _wait(self, world: World, started: int) -> None:
        try:
            await self._synced.alike(world, started)
        except CheckpointError as error:
            self._failure = str(error)
            self._fail()
            return
        self._alike = True
        if self._slots:
            self._post(FilesAlike(world))

    def hold(self, slots: tuple[int, ...]) -> bool:
        """Hold workers of the world that was entered; returns False if they can start at once."""
        if self._alike:
            return False
        self._slots += slots
        if self._failure:
            self._fail()
        return True

    def _fail(self) -> None:
        slots, self._slots = self._slots, ()
        for slot in slots:
            self._post(WorkerEnded(self._round, slot, 1, exception=self._failure))

    def released(self, world: World) -> tuple[int, ...]:
        """The slots whose workers are to be started now that the files are alike."""
        if world.round != self._round:
            return ()
        slots, self._slots = self._slots, ()
        return slots

    def signal(self, number: int, slots: tuple[int, ...]) -> None:
        """A signal for these slots, or all if it is empty: held workers end by it."""
        ended = tuple(slot for slot in self._slots if slot in slots or not slots)
        self._slots = tuple(slot for slot in self._slots if slot not in ended)
        for slot in ended:
            self._post(WorkerEnded(self._round, slot, -number))

    def drop(self) -> None:
        """Give up waiting for files; held workers are never started."""
        self._tasks.drop()
