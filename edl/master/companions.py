"""Parts of the Master's shell: pending requests, change notifications, and companion tasks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut
from edl.master.events import OperatorRequest
from edl.wire.messages import Asked
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import Answer

OVER = "this launcher is no longer the Master; ask the next one"


@dataclass(frozen=True, slots=True)
class PendingScaleRequest:
    """A request in the shell's queue, and the future for its answer."""

    request: ScaleRequest
    answer: asyncio.Future[Granted]

    def settle(self, granted: Granted) -> None:
        """Answer the requester, unless it is gone."""
        if not self.answer.done():
            self.answer.set_result(granted)

    def fail(self) -> None:
        """Raise ``FencedOut`` in the requester: this Master has stepped down, and the request may be in the store or
        not."""
        if not self.answer.done():
            self.answer.set_exception(FencedOut(OVER))


class UnwrittenRequests:
    """Accepted requests for a checkpoint, the end of the job or other settings that are not in the store yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """By the identity of the event: there may be equal ones."""

    def add(self, request: OperatorRequest) -> asyncio.Future[None]:
        """A future for the moment at which the request is in the store."""
        self._waiting[id(request)] = written = asyncio.get_running_loop().create_future()
        return written

    def written(self, events: Iterable[object]) -> None:
        """What these events have changed is in the store."""
        for event in events:
            waiting = self._waiting.pop(id(event), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def fail(self) -> None:
        """Raise ``FencedOut`` in all requesters: this Master has stepped down."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(FencedOut(OVER))


class ChangeNotifier:
    """Lets any number of tasks wait for changes: each for the next one since its own last wait."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._next = asyncio.Event()
        self._over = False

    def notify(self) -> None:
        """Wake all waiting tasks: something has changed."""
        self._number += 1
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """End all waits with ``FencedOut``: there will be no more changes."""
        self._over = True
        self.notify()

    async def changed(self) -> None:
        """Wait until something has changed since this task's last call returned; the first call returns at once.

        Raises ``FencedOut`` when this Master has stepped down.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        while self._seen.get(task) == self._number and not self._over:
            await self._next.wait()
        if self._over:
            raise FencedOut(OVER)
        self._seen[task] = self._number


class Companions:
    """Coroutines that run beside an elected Master. A failure is logged, and has no other effect."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []
        self.values: dict[str, str] = {}
        """Values that companions of this Master and of earlier ones have stored, by name."""
        self.answers: dict[str, Callable[[Asked], Awaitable[Answer]]] = {}
        """Answers requests of a purpose, by its name."""

    def load(self, stored: Mapping[str, bytes]) -> None:
        """Take over the values of the last Master's companions."""
        self.values = {name: value.decode(errors="replace") for name, value in stored.items()}

    def begin(self, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run these coroutines as tasks on the current event loop, in addition to those that run already."""
        self._tasks += [asyncio.get_running_loop().create_task(self._run(one)) for one in work]

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - top of a task: the Master continues
            self._log(f"a companion task of the Master failed: {type(error).__name__}: {error}")

    async def settled(self, within_s: float) -> None:
        """Wait until all have ended, at most ``within_s`` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    def drop(self) -> None:
        """Cancel those that are still running."""
        for task in self._tasks:
            task.cancel()
