"""What the Master's shell has for those that ask it for something and those that watch it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut
from edl.wire.wishes import Granted, Wish

OVER = "this Master does not rule any more; ask the next one"


@dataclass(frozen=True, slots=True)
class Asking:
    """A wish on its way through the shell's queue, and who waits for the answer."""

    wish: Wish
    answer: asyncio.Future[Granted]

    def settle(self, granted: Granted) -> None:
        """Answer, if there is still somebody to hear."""
        if not self.answer.done():
            self.answer.set_result(granted)

    def fail(self) -> None:
        """The rule is over. What was asked for may be in the store, or not."""
        if not self.answer.done():
            self.answer.set_exception(FencedOut(OVER))


class News:
    """Lets any number of tasks wait for the next change, each from where it has looked last."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._next = asyncio.Event()
        self._over = False

    def tell(self) -> None:
        """Something has changed."""
        self._number += 1
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """Nothing will change any more."""
        self._over = True
        self.tell()

    async def changed(self) -> None:
        """Returns when something has changed since this task's last call returned; the first time at once.

        Raises ``FencedOut`` when the rule is over.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        while self._seen.get(task) == self._number and not self._over:
            await self._next.wait()
        if self._over:
            raise FencedOut(OVER)
        self._seen[task] = self._number


class Companions:
    """Coroutines that run beside a Master while it rules. One that fails is said to have, and harms nobody."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run these from now on."""
        self._tasks += [asyncio.get_running_loop().create_task(self._run(one)) for one in work]

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the top of a task that must not end the rule
            self._log(f"what works beside the Master has failed: {type(error).__name__}: {error}")

    async def settled(self, within_s: float) -> None:
        """Until all have ended by themselves, or it has taken too long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    def drop(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
